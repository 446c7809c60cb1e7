//! Ragged batches: which rows of a call belong to which sequence, at which position.
//!
//! Every operation that looks at positions or state takes a [`Batch`]: a number of rows and a device table of
//! [`Segment`]s. Decoding (length 1), verification (anchor and drafts), a prompt chunk and several sequences at once all
//! have this one form. The table is device data, so a recorded step is replayed while it changes.

use std::fmt;

use crate::backend::Backend;
use crate::{DType, Error, Result, View};

/// I32 words of one segment in the device table.
pub const SEGMENT_WORDS: usize = 8;

/// Tokens per KV page.
pub const PAGE_TOKENS: usize = 64;

/// Most rows of a call in the [`Profile::Step`] profile.
pub const MAX_STEP_ROWS: usize = 128;

/// Which numeric class of kernels a call uses; chosen by the caller, never by the width of the call.
///
/// Within a profile the result for a token does not depend on how many other tokens are in the call. `Step` results are
/// bitwise the same for decoding, for verification and in a batch. `Prefill` results are bitwise the same however a
/// prompt is split at multiples of 64 tokens. The two profiles agree only up to rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Profile {
    /// Decoding and verification, at most [`MAX_STEP_ROWS`] rows.
    Step,
    /// Prompt chunks.
    Prefill,
}

/// The rows of one sequence in a call.
///
/// Row `row + i` (for `i < len`) is the token at position `start + i` of the sequence in `slot`. Rows that belong to no
/// segment are padding: their results are unspecified and they touch no state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Sequence slot: selects page table row, recurrent state, records and counts.
    pub slot: u32,
    /// Position of the first row.
    pub start: u32,
    /// First row.
    pub row: u32,
    /// Number of valid rows; 0 makes the segment a no-op.
    pub len: u32,
    /// How many columns recorded by the previous round are to be folded into the recurrent state before this call.
    /// The state in memory then belongs to position `start − fold`, so it is at most `start`.
    pub fold: u32,
    /// Bank (0 or 1) that this round records into; the fold reads the other one.
    pub bank: u32,
}

impl Segment {
    /// The device form: slot, start, row, len, fold, bank, 0, 0.
    #[must_use]
    pub fn to_words(self) -> [i32; SEGMENT_WORDS] {
        let w = |x: u32| i32::try_from(x).unwrap_or(i32::MAX);
        [w(self.slot), w(self.start), w(self.row), w(self.len), w(self.fold), w(self.bank), 0, 0]
    }

    /// Reads the device form; `None` if a word is negative.
    ///
    /// ```
    /// use ninfer_core::segment::Segment;
    /// let s = Segment { slot: 1, start: 64, row: 0, len: 4, fold: 2, bank: 1 };
    /// assert_eq!(Segment::from_words(&s.to_words()), Some(s));
    /// ```
    #[must_use]
    pub fn from_words(words: &[i32; SEGMENT_WORDS]) -> Option<Self> {
        let w = |i: usize| u32::try_from(words[i]).ok();
        Some(Self { slot: w(0)?, start: w(1)?, row: w(2)?, len: w(3)?, fold: w(4)?, bank: w(5)? })
    }

    /// Position to which the recurrent state in memory belongs; 0 means that the state is all zeros and is not read.
    #[must_use]
    pub fn base(&self) -> u32 {
        self.start.saturating_sub(self.fold)
    }
}

/// A ragged batch.
pub struct Batch<B: Backend> {
    /// Numeric class.
    pub profile: Profile,
    /// Rows of every activation matrix of the call, padding included.
    pub rows: usize,
    /// Number of segments.
    pub segments: usize,
    /// I32 `[segments, 8]`: [`Segment::to_words`] for each.
    pub table: View<B>,
}

impl<B: Backend> Batch<B> {
    /// Describes a batch by its device table.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::WrongDType`] if the table is not I32 `[segments, 8]`; [`Error::OutOfRange`] if a step
    /// has more than [`MAX_STEP_ROWS`] rows.
    pub fn new(profile: Profile, rows: usize, table: View<B>) -> Result<Self> {
        if table.dtype() != DType::I32 {
            return Err(Error::WrongDType { op: "Batch", what: "table", expected: DType::I32, got: table.dtype() });
        }
        crate::error::expect_eq("Batch", "columns of the table", SEGMENT_WORDS, table.cols())?;
        if profile == Profile::Step && rows > MAX_STEP_ROWS {
            return Err(Error::OutOfRange {
                what: "rows of a step",
                got: rows.to_string(),
                legal: format!("1 to {MAX_STEP_ROWS}"),
            });
        }
        Ok(Self { profile, rows, segments: table.rows(), table })
    }
}

impl<B: Backend> Clone for Batch<B> {
    fn clone(&self) -> Self {
        Self { table: self.table.clone(), ..*self }
    }
}

impl<B: Backend> fmt::Debug for Batch<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("profile", &self.profile)
            .field("rows", &self.rows)
            .field("segments", &self.segments)
            .finish_non_exhaustive()
    }
}
