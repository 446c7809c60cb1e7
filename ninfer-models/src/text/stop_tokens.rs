//! Tokens that end a reply.

use serde_json::Value;

use super::error::TextResult;
use super::json::field_error;
use super::tokenizer::Tokenizer;

/// Where a stop token was named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum StopSource {
    /// `eos_token_id` of `generation_config.json`.
    GenerationConfig,
    /// `eos_token_id` of `config.json`, at the top or in `text_config`.
    Config,
    /// `eos_token` of `tokenizer_config.json`.
    TokenizerConfig,
    /// `<|im_end|>`, with which the chat template ends a turn.
    TurnEnd,
    /// Added by the caller.
    Caller,
}

/// The set of tokens that end a reply, each with the places that named it.
///
/// The files of a checkpoint often disagree: `config.json` may only list the token that ends a document, while a
/// chat's turn is ended by another. A reply must stop at any of them, so this is the union.
///
/// ```
/// use ninfer_models::text::StopTokens;
///
/// let stops = StopTokens::new([7, 3]);
/// assert!(stops.contains(3) && !stops.contains(4));
/// assert_eq!(stops.ids(), [3, 7]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopTokens {
    /// Ascending ids.
    ids: Vec<u32>,
    sources: Vec<(u32, StopSource)>,
}

impl StopTokens {
    /// The turn end of this family's chat templates.
    pub const TURN_END: &'static str = "<|im_end|>";

    /// A set chosen by the caller; an empty one never stops.
    #[must_use]
    pub fn new(ids: impl IntoIterator<Item = u32>) -> Self {
        let mut stops = Self::default();
        for id in ids {
            stops.insert(id, StopSource::Caller);
        }
        stops
    }

    /// The union of what the checkpoint's files name and of the turn end, as far as the tokenizer has it.
    ///
    /// `generation` is `generation_config.json`, `config` is `config.json`, `tokenizer_config` is
    /// `tokenizer_config.json`; any may be absent.
    ///
    /// # Errors
    /// [`TextError::Field`](super::TextError::Field) when an `eos_token_id` is neither an id nor a list of ids, or the
    /// tokenizer has no such token: it lost its added tokens, or the files belong to another checkpoint.
    pub fn from_configs(
        tokenizer: &Tokenizer,
        generation: Option<&Value>,
        config: Option<&Value>,
        tokenizer_config: Option<&Value>,
    ) -> TextResult<Self> {
        let mut stops = Self::default();
        let text_config = config.and_then(|config| config.get("text_config"));
        let numeric = [
            (generation, StopSource::GenerationConfig, "generation_config.json"),
            (config, StopSource::Config, "config.json"),
            (text_config, StopSource::Config, "config.json: text_config"),
        ];
        for (file, source, what) in numeric {
            for id in read_ids(file.and_then(|file| file.get("eos_token_id")), what)? {
                if tokenizer.token_bytes(id).is_none() {
                    return Err(field_error(what, "eos_token_id", "ids that the tokenizer has", &id.into()));
                }
                stops.insert(id, source);
            }
        }
        let eos = tokenizer_config.and_then(|config| config.get("eos_token")).and_then(token_content);
        let named = [(eos, StopSource::TokenizerConfig), (Some(Self::TURN_END), StopSource::TurnEnd)];
        for (token, source) in named {
            if let Some(id) = token.and_then(|token| tokenizer.token_to_id(token)) {
                stops.insert(id, source);
            }
        }
        Ok(stops)
    }

    /// Adds a token.
    #[must_use]
    pub fn with(mut self, id: u32) -> Self {
        self.insert(id, StopSource::Caller);
        self
    }

    fn insert(&mut self, id: u32, source: StopSource) {
        if let Err(place) = self.ids.binary_search(&id) {
            self.ids.insert(place, id);
        }
        if !self.sources.contains(&(id, source)) {
            self.sources.push((id, source));
        }
    }

    /// True when the token ends the reply.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.ids.binary_search(&id).is_ok()
    }

    /// The ids, ascending.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Each id with each place that named it.
    #[must_use]
    pub fn sources(&self) -> &[(u32, StopSource)] {
        &self.sources
    }
}

/// A token given as a string or as an object with a `content`.
pub(super) fn token_content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content").and_then(Value::as_str))
}

fn read_ids(ids: Option<&Value>, what: &str) -> TextResult<Vec<u32>> {
    let read = |id: &Value| {
        let small = id.as_u64().and_then(|id| u32::try_from(id).ok());
        small.ok_or_else(|| field_error(what, "eos_token_id", "a token id or a list of them", id))
    };
    match ids {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(read).collect(),
        Some(id) => Ok(vec![read(id)?]),
    }
}
