//! The checkpoint's byte-level BPE tokenizer.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use super::error::{TextError, TextResult};
use super::json::read_bytes;
use super::stream_decoder::StreamDecoder;
use super::tokenizer_file::{self, Pipeline};
use super::vocabulary::{Kind, Vocabulary};

/// Largest `tokenizer.json` that is read, in bytes.
pub const MAX_TOKENIZER_BYTES: u64 = 128 << 20;

/// A byte-level BPE tokenizer read from `tokenizer.json`. Cloning is cheap: clones share the tables.
///
/// Encoding normalizes (NFC in this family), matches added tokens verbatim, splits, and merges; no token is put in
/// front or behind. Decoding concatenates the tokens' bytes and replaces invalid UTF-8 by U+FFFD, as
/// [`String::from_utf8_lossy`] does.
///
/// # Example
///
/// ```no_run
/// use ninfer_models::text::Tokenizer;
///
/// let tokenizer = Tokenizer::from_file("checkpoint/tokenizer.json")?;
/// let ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n")?;
/// assert_eq!(ids.first().copied(), tokenizer.token_to_id("<|im_start|>"));
/// assert_eq!(tokenizer.decode(&ids, true), "user\nhi\n");
/// # Ok::<(), ninfer_models::text::TextError>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    pipeline: Pipeline,
    vocabulary: Arc<Vocabulary>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json` file.
    ///
    /// # Errors
    /// [`TextError::Missing`], [`TextError::Unreadable`] or [`TextError::TooLarge`] for the file itself, and everything
    /// [`Tokenizer::from_bytes`] reports.
    pub fn from_file(file: impl AsRef<Path>) -> TextResult<Self> {
        Self::from_bytes(&read_bytes(file.as_ref(), MAX_TOKENIZER_BYTES)?)
    }

    /// Parses the content of a `tokenizer.json` file.
    ///
    /// # Errors
    /// [`TextError::NotJson`], [`TextError::Field`], [`TextError::NotBpe`], [`TextError::UnsupportedTokenizer`],
    /// [`TextError::InconsistentTokenizer`] or [`TextError::TooLarge`], by what is wrong with it.
    ///
    /// ```
    /// use ninfer_models::text::{TextError, Tokenizer};
    ///
    /// let error = Tokenizer::from_bytes(br#"{"model": {"type": "WordPiece", "vocab": {}}}"#).unwrap_err();
    /// assert_eq!(error, TextError::NotBpe { found: "WordPiece".into() });
    /// ```
    pub fn from_bytes(bytes: &[u8]) -> TextResult<Self> {
        Self::from_parts(bytes, None)
    }

    /// As [`Tokenizer::from_bytes`], with the added tokens that only `tokenizer_config.json` has.
    pub(super) fn from_parts(bytes: &[u8], tokenizer_config: Option<&Value>) -> TextResult<Self> {
        let got = bytes.len() as u64;
        if got > MAX_TOKENIZER_BYTES {
            let what = "tokenizer.json in bytes".to_owned();
            return Err(TextError::TooLarge { what, got, limit: MAX_TOKENIZER_BYTES });
        }
        let (pipeline, vocabulary) = tokenizer_file::read(bytes, tokenizer_config)?;
        Ok(Self { shared: Arc::new(Shared { pipeline, vocabulary: Arc::new(vocabulary) }) })
    }

    /// Encodes text in which added tokens such as `<|im_start|>` stand for themselves.
    ///
    /// Meant for rendered chat templates and raw prompts. Text of unknown origin can forge turns this way; encode it
    /// with [`Tokenizer::encode_plain`] where that matters.
    ///
    /// # Errors
    /// [`TextError::Encode`] when the tokenizer fails on the text.
    pub fn encode(&self, text: &str) -> TextResult<Vec<u32>> {
        let encoding = self.shared.pipeline.encode_fast(text, false).map_err(encode_error)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Encodes text in which nothing is an added token: `<|im_end|>` becomes the tokens of its characters.
    ///
    /// # Errors
    /// [`TextError::Encode`] when the tokenizer fails on the text.
    pub fn encode_plain(&self, text: &str) -> TextResult<Vec<u32>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let pipeline = &self.shared.pipeline;
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = pipeline.get_normalizer() {
            normalizer.normalize(&mut normalized).map_err(encode_error)?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        if let Some(splitter) = pipeline.get_pre_tokenizer() {
            splitter.pre_tokenize(&mut pieces).map_err(encode_error)?;
        }
        pieces.tokenize(|piece| pipeline.get_model().tokenize(piece.get())).map_err(encode_error)?;
        let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::None);
        Ok(splits.iter().filter_map(|(_, _, tokens)| tokens.as_ref()).flatten().map(|token| token.id).collect())
    }

    /// The text of `ids`; with `skip_special`, added tokens marked special are left out.
    ///
    /// Ids without a token add nothing. Invalid UTF-8 becomes U+FFFD.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            bytes.extend_from_slice(self.shared.vocabulary.text_bytes(id, skip_special));
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// A decoder that turns ids into text one at a time.
    #[must_use]
    pub fn stream_decoder(&self, skip_special: bool) -> StreamDecoder {
        StreamDecoder::new(Arc::clone(&self.shared.vocabulary), skip_special)
    }

    /// The id of a token by its text as stored in the vocabulary (byte-level alphabet) or of an added token.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.shared.pipeline.token_to_id(token)
    }

    /// The token of an id, in the byte-level alphabet for ordinary tokens.
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.shared.pipeline.id_to_token(id)
    }

    /// The bytes a token stands for, or `None` when no token has this id.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let vocabulary = &self.shared.vocabulary;
        (vocabulary.kind(id) != Kind::Unassigned).then(|| vocabulary.bytes(id))
    }

    /// True for an added token that is marked special.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.shared.vocabulary.kind(id) == Kind::Special
    }

    /// One more than the highest id with a token.
    ///
    /// The model's matrices often have more rows; those stand for no token and must be masked when sampling, see
    /// [`Tokenizer::unassigned`].
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a tokenizer without tokens is refused when it is read")]
    pub fn len(&self) -> usize {
        self.shared.vocabulary.len()
    }

    /// The ids below `rows` (the model's vocabulary size) that no token has: mask them when sampling.
    #[must_use]
    pub fn unassigned(&self, rows: usize) -> Vec<u32> {
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        (0..rows).filter(|&id| self.shared.vocabulary.kind(id) == Kind::Unassigned).collect()
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("len", &self.len()).finish_non_exhaustive()
    }
}

fn encode_error(error: tokenizers::Error) -> TextError {
    TextError::Encode { reason: error.to_string() }
}
