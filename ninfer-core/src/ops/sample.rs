//! Head, choice of tokens, acceptance of drafts, and token counts: everything a round needs to stay on the device.

use super::{Check, recorder_methods};
use crate::backend::{Backend, DeviceWeight};
use crate::sampling::PARAM_WORDS;
use crate::segment::{Batch, SEGMENT_WORDS};
use crate::{DType, Result, View};

/// Logits: `l = n · Wᵀ`, f32.
#[derive(Clone, Debug)]
pub struct Head<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, H]`, final-normed.
    pub input: View<B>,
    /// `[V, H]`.
    pub head: B::Weight,
    /// f32 `[T, V]`.
    pub logits: View<B>,
}

impl<B: Backend> Head<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("head", &self.batch)?;
        let t = self.batch.rows;
        c.read("input", &self.input, self.input.dtype(), t, self.head.cols())?;
        c.write("logits", &self.logits, DType::F32, t, self.head.rows())
    }
}

/// Greedy choice without materialised logits: `id = argmax_{v < limit} n · W_vᵀ`, ties take the lower id.
///
/// A row with a NaN logit, or without any finite one, gives `u32::MAX`; infinities count as in [`crate::sampling::choose`].
#[derive(Clone, Debug)]
pub struct HeadArgmax<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, H]`, final-normed.
    pub input: View<B>,
    /// `[V, H]`.
    pub head: B::Weight,
    /// Rows of the head from here on have no token and are never chosen.
    pub limit: usize,
    /// U32 `[T, 1]`.
    pub output: View<B>,
}

impl<B: Backend> HeadArgmax<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("head_argmax", &self.batch)?;
        let t = self.batch.rows;
        c.read("input", &self.input, self.input.dtype(), t, self.head.cols())?;
        c.at_least("vocabulary limit", 1, self.limit)?;
        c.at_least("rows of the head", self.limit, self.head.rows())?;
        c.write("output", &self.output, DType::U32, t, 1)
    }
}

/// Draws one token per row from its final distribution (see [`crate::sampling`]).
///
/// The row at position `p` chooses the token of position `p + 1` with that position's single uniform number. Penalties see
/// the counts of the slot plus, in a [`Step`](crate::segment::Profile::Step), the inputs of the row's segment up to and
/// including the row. A row with a NaN logit, or without any finite one, gives `u32::MAX`.
#[derive(Clone, Debug)]
pub struct Choose<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// f32 `[T, V]`.
    pub logits: View<B>,
    /// U32 `[T, 1]`: inputs of the rows.
    pub ids: View<B>,
    /// U32 `[slots, PARAM_WORDS]`: [`crate::sampling::SamplingParams::to_words`] of each slot.
    pub params: View<B>,
    /// U32 `[slots, V]`: see [`Count`].
    pub counts: View<B>,
    /// Tokens from here on are never chosen.
    pub limit: usize,
    /// U32 `[T, 1]`.
    pub output: View<B>,
}

impl<B: Backend> Choose<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("choose", &self.batch)?;
        let (t, v, slots) = (self.batch.rows, self.logits.cols(), self.params.rows());
        c.read("logits", &self.logits, DType::F32, t, v)?;
        c.read("ids", &self.ids, DType::U32, t, 1)?;
        c.read("params", &self.params, DType::U32, slots, PARAM_WORDS)?;
        c.read("counts", &self.counts, DType::U32, slots, v)?;
        c.at_least("vocabulary limit", 1, self.limit)?;
        c.at_least("columns of logits", self.limit, v)?;
        c.write("output", &self.output, DType::U32, t, 1)
    }
}

/// Keeps the token counts of a slot: the low 31 bits of a count are how often the token was generated, the high bit says
/// that it stands in the prompt.
///
/// [`Prefill`](crate::segment::Profile::Prefill): marks the segment's inputs as prompt. [`Step`](crate::segment::Profile::Step):
/// counts the first `fold` inputs of the previous round as generated, then remembers this round's inputs in `previous`; like the
/// recurrent state, a dropped round leaves no trace. Where [`Segment::base`](crate::segment::Segment::base) is 0 the slot's
/// counts are cleared first.
#[derive(Clone, Debug)]
pub struct Count<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// U32 `[T, 1]`: inputs of the rows.
    pub ids: View<B>,
    /// U32 `[slots, W]`: inputs of the previous round.
    pub previous: View<B>,
    /// U32 `[slots, V]`.
    pub counts: View<B>,
}

impl<B: Backend> Count<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("count", &self.batch)?;
        let slots = self.counts.rows();
        c.read("ids", &self.ids, DType::U32, self.batch.rows, 1)?;
        c.write("previous", &self.previous, DType::U32, slots, self.previous.cols())?;
        c.write("counts", &self.counts, DType::U32, slots, self.counts.cols())
    }
}

/// Accepts drafts by comparison and prepares the MTP passes of the same round.
///
/// Per segment with columns `[anchor, d_1 … d_k]` (`k = len − 1`) and chosen tokens `t_0 … t_k`: `a` is the largest number
/// with `d_i = t_{i−1}` for all `i ≤ a`. Emitted are `t_0 … t_a` (the accepted drafts, then the correction or bonus token).
#[derive(Clone, Debug)]
pub struct Accept<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// U32 `[T, 1]`: inputs.
    pub ids: View<B>,
    /// U32 `[T, 1]`: chosen tokens.
    pub chosen: View<B>,
    /// U32 `[segments, W + 1]`: `a`, then the `a + 1` emitted tokens, then `u32::MAX`; `W` is at least the longest segment.
    pub result: View<B>,
    /// I32 `[segments, 8]`: segments of the MTP pass over the emitted tokens: start + 1, same row, length `a + 1`.
    pub realign: View<B>,
    /// I32 `[segments, 1]`: row of column `a`; −1 for a segment without rows.
    pub last: View<B>,
    /// I32 `[n · segments, 8]`, `n ≥ 0`: segments of one row per draft: entry `i · segments + s` is row `s`, at position
    /// start + a + 1 + i. Entry 0 is the last row of the MTP pass over the emitted tokens, the others are chained.
    pub chain: View<B>,
}

impl<B: Backend> Accept<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("accept", &self.batch)?;
        let (t, s) = (self.batch.rows, self.batch.segments);
        c.read("ids", &self.ids, DType::U32, t, 1)?;
        c.read("chosen", &self.chosen, DType::U32, t, 1)?;
        c.write("result", &self.result, DType::U32, s, self.result.cols())?;
        c.at_least("columns of result", 2, self.result.cols())?;
        c.write("realign", &self.realign, DType::I32, s, SEGMENT_WORDS)?;
        c.write("last", &self.last, DType::I32, s, 1)?;
        c.divides("rows of chain", s, self.chain.rows())?;
        c.write("chain", &self.chain, DType::I32, self.chain.rows(), SEGMENT_WORDS)
    }
}

/// Head and sampling.
pub trait SampleOps: Backend {
    /// See [`Head`].
    ///
    /// # Errors
    /// What the device reports.
    fn head(&self, queue: &mut Self::Queue, op: Head<Self>) -> Result<()>;

    /// See [`HeadArgmax`].
    ///
    /// # Errors
    /// What the device reports.
    fn head_argmax(&self, queue: &mut Self::Queue, op: HeadArgmax<Self>) -> Result<()>;

    /// See [`Choose`].
    ///
    /// # Errors
    /// What the device reports.
    fn choose(&self, queue: &mut Self::Queue, op: Choose<Self>) -> Result<()>;

    /// See [`Count`].
    ///
    /// # Errors
    /// What the device reports.
    fn count(&self, queue: &mut Self::Queue, op: Count<Self>) -> Result<()>;

    /// See [`Accept`].
    ///
    /// # Errors
    /// What the device reports.
    fn accept(&self, queue: &mut Self::Queue, op: Accept<Self>) -> Result<()>;
}

recorder_methods! { SampleOps:
    /// Runs or records a [`Head`].
    head(Head),
    /// Runs or records a [`HeadArgmax`].
    head_argmax(HeadArgmax),
    /// Runs or records a [`Choose`].
    choose(Choose),
    /// Runs or records a [`Count`].
    count(Count),
    /// Runs or records an [`Accept`].
    accept(Accept),
}
