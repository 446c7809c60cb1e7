//! How a session is opened.

use ninfer_core::state::MAX_COLUMNS;
use ninfer_core::{DType, Error, Result};

/// Sizes of a session: everything is allocated when it opens.
///
/// ```
/// use ninfer_models::SessionOptions;
/// let options = SessionOptions::new(4096).with_lanes(2).with_max_drafts(3);
/// assert_eq!(options.lanes, 2);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionOptions {
    /// Most positions of a lane, prompt and output together.
    pub max_context: usize,
    /// Lanes that can be open at once.
    pub lanes: usize,
    /// Most drafts a round verifies, at most 15.
    pub max_drafts: usize,
    /// Rows of a prompt chunk. Multiples of 64 never change a result by a bit.
    pub prefill_chunk: usize,
    /// Tokens that all lanes together can cache; `None` is lanes × max_context.
    pub kv_tokens: Option<usize>,
    /// Element type of KV pages; `None` is the backend's default.
    pub kv_dtype: Option<DType>,
    /// Whether the MTP block, if there is one, is kept ready to draft.
    pub mtp: bool,
    /// Tokens from here on are never chosen; `None` is the whole vocabulary.
    pub token_limit: Option<usize>,
}

impl SessionOptions {
    /// One lane, up to 5 drafts, chunks of 1,024 rows.
    #[must_use]
    pub fn new(max_context: usize) -> Self {
        Self {
            max_context,
            lanes: 1,
            max_drafts: 5,
            prefill_chunk: 1024,
            kv_tokens: None,
            kv_dtype: None,
            mtp: true,
            token_limit: None,
        }
    }

    /// Sets the number of lanes.
    #[must_use]
    pub fn with_lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes;
        self
    }

    /// Sets the largest number of drafts.
    #[must_use]
    pub fn with_max_drafts(mut self, drafts: usize) -> Self {
        self.max_drafts = drafts;
        self
    }

    /// Sets the rows of a prompt chunk.
    #[must_use]
    pub fn with_prefill_chunk(mut self, rows: usize) -> Self {
        self.prefill_chunk = rows;
        self
    }

    /// Sets the size of the KV pool in tokens.
    #[must_use]
    pub fn with_kv_tokens(mut self, tokens: usize) -> Self {
        self.kv_tokens = Some(tokens);
        self
    }

    /// Sets the element type of KV pages.
    #[must_use]
    pub fn with_kv_dtype(mut self, dtype: DType) -> Self {
        self.kv_dtype = Some(dtype);
        self
    }

    /// Says whether MTP is kept ready.
    #[must_use]
    pub fn with_mtp(mut self, mtp: bool) -> Self {
        self.mtp = mtp;
        self
    }

    /// Sets the number of tokens that have a meaning.
    #[must_use]
    pub fn with_token_limit(mut self, limit: usize) -> Self {
        self.token_limit = Some(limit);
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        let legal = |what, got: usize, low: usize, high: usize| {
            if (low..=high).contains(&got) {
                return Ok(());
            }
            Err(Error::OutOfRange { what, got: got.to_string(), legal: format!("{low} to {high}") })
        };
        legal("maximum context", self.max_context, 2, 1 << 24)?;
        legal("lanes", self.lanes, 1, 128)?;
        legal("drafts", self.max_drafts, 0, MAX_COLUMNS - 1)?;
        legal("prefill chunk", self.prefill_chunk, 1, 1 << 16)?;
        legal("token limit", self.token_limit.unwrap_or(1), 1, usize::MAX)?;
        legal("KV tokens", self.kv_tokens.unwrap_or(self.max_context), 1, 1 << 31)
    }
}
