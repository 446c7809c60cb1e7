//! Gated full attention over a paged KV cache.

use super::{Check, recorder_methods};
use crate::backend::Backend;
use crate::memory::KvFormat;
use crate::segment::{Batch, PAGE_TOKENS};
use crate::{DType, Result, View};

/// The paged cache of one layer.
///
/// A page holds 64 tokens of all KV heads: element `(page, head, token, d)` stands at row
/// `(page · Hkv + head) · 64 + token`. Keys are normed and rotated, values raw. Page 0 … `pages − 1` belong to one pool
/// shared by all sequences; a page table gives each sequence its pages in order.
///
/// I8 pages hold codes with one scale per group of 64 features, F8E4M3 pages with one scale per head and token; other
/// pages hold the elements themselves. A vector or group `x` is encoded as `s = f16(max|x| / limit)` with limit 127 or 448,
/// at most the largest f16, then `code = round(x · (1/s))`, to nearest even, at most ±limit; it means `code · s`. A group
/// that holds a NaN or an infinity gets the scale NaN and zero codes, one with `s = 0` zero codes.
#[derive(Clone, Debug)]
pub struct KvLayer<B: Backend> {
    /// `[pages · Hkv · 64, D]` in one of [`Backend::kv_dtypes`].
    pub keys: View<B>,
    /// As `keys`.
    pub values: View<B>,
    /// Scales of the codes; `None` for pages of elements.
    pub scales: Option<KvScales<B>>,
    /// I32 `[slots, pages per sequence]`; entries behind the last used page are not read.
    pub pages: View<B>,
    /// `Hkv`.
    pub heads: usize,
}

/// Scales of quantised pages, in the order of the rows of the pages.
#[derive(Clone, Debug)]
pub struct KvScales<B: Backend> {
    /// F16 `[pages · Hkv · 64, groups]`: groups are `⌈D / 64⌉` for I8 and 1 for F8E4M3.
    pub keys: View<B>,
    /// As `keys`.
    pub values: View<B>,
}

impl<B: Backend> KvLayer<B> {
    fn check<'a>(&'a self, c: &mut Check<'a, B>, head_dim: usize, written: bool) -> Result<()> {
        let store = if written { Check::write } else { Check::read };
        c.at_least("KV heads", 1, self.heads)?;
        c.divides("rows of the key pages", self.heads * PAGE_TOKENS, self.keys.rows())?;
        store(c, "keys", &self.keys, self.keys.dtype(), self.keys.rows(), head_dim)?;
        store(c, "values", &self.values, self.keys.dtype(), self.keys.rows(), head_dim)?;
        let groups = KvFormat::of(self.keys.dtype()).map_or(0, |format| format.scale_groups(head_dim));
        match (&self.scales, groups) {
            (None, 0) => {}
            (Some(scales), 1..) => {
                store(c, "key scales", &scales.keys, DType::F16, self.keys.rows(), groups)?;
                store(c, "value scales", &scales.values, DType::F16, self.keys.rows(), groups)?;
            }
            (scales, _) => {
                let expected = format!("{groups} for a row of {}", self.keys.dtype());
                let got = if scales.is_some() { "some" } else { "none" };
                return c.shape("scales of the KV pages", expected, got.to_owned());
            }
        }
        c.read("pages", &self.pages, DType::I32, self.pages.rows(), self.pages.cols())
    }
}

/// Rotary frequencies.
#[derive(Clone, Debug)]
pub struct RopeTable<B: Backend> {
    /// f32 `[1, R/2]`: `theta^(−2f/R)`, possibly scaled for long contexts. The angle is `position · frequency` formed in f32.
    pub frequencies: View<B>,
    /// Multiplies cosine and sine; 1 except for YaRN.
    pub magnitude: f32,
    /// Subtracted from the position of a row before rotating: 0 for the model, 1 for the MTP block, whose slot `s` holds
    /// the row of position `s − 1`. A position below the shift rotates as position 0.
    pub shift: u32,
}

/// Head norms, rotation and the append to the cache.
///
/// `q = rope(N_q(query))`, `k = rope(N_k(key))` per head; keys and raw values go to the pages at the position of the row.
/// Rotation pairs feature `f` with `f + R/2` inside the first `R` features of a head; the others pass through.
#[derive(Clone, Debug)]
pub struct RopeAppend<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, Hq · 2D]`: per head `D` query values, then `D` output-gate values.
    pub query_gate: View<B>,
    /// act `[T, Hkv · D]`.
    pub key: View<B>,
    /// act `[T, Hkv · D]`.
    pub value: View<B>,
    /// f32 `[2, D]`: zero-centred gains of query (row 0) and key (row 1).
    pub gains: View<B>,
    /// Epsilon of both norms.
    pub eps: f32,
    /// Rotary frequencies.
    pub rope: RopeTable<B>,
    /// act `[T, Hq · D]`: normed and rotated queries.
    pub query: View<B>,
    /// The cache.
    pub kv: KvLayer<B>,
}

impl<B: Backend> RopeAppend<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("rope_append", &self.batch)?;
        let (t, act, d) = (self.batch.rows, self.query.dtype(), self.gains.cols());
        c.read("gains", &self.gains, DType::F32, 2, d)?;
        c.divides("columns of query", d, self.query.cols())?;
        c.write("query", &self.query, act, t, self.query.cols())?;
        c.read("query_gate", &self.query_gate, act, t, 2 * self.query.cols())?;
        c.read("key", &self.key, act, t, self.kv.heads * d)?;
        c.read("value", &self.value, act, t, self.kv.heads * d)?;
        let half = self.rope.frequencies.cols();
        c.read("frequencies", &self.rope.frequencies, DType::F32, 1, half)?;
        c.at_least("head size", 2 * half, d)?;
        self.kv.check(&mut c, d, true)
    }
}

/// Causal attention with the output gate: `y = softmax(q·Kᵀ / √D) V ⊙ sigmoid(gate)`.
///
/// The row at position `p` sees keys `first_key ..= p` of its sequence; query head `j` reads KV head `j / (Hq/Hkv)`.
/// Softmax in f32. Partial results, where a backend splits the keys, belong to fixed leaves of 256 keys by absolute position.
#[derive(Clone, Debug)]
pub struct Attend<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, Hq · D]` from [`RopeAppend`].
    pub query: View<B>,
    /// act `[T, Hq · 2D]`: the projection that holds the gates.
    pub query_gate: View<B>,
    /// The cache.
    pub kv: KvLayer<B>,
    /// First visible key: 0 for the model, 1 for the MTP block, whose slot 0 is never written.
    pub first_key: u32,
    /// act `[T, Hq · D]`.
    pub output: View<B>,
}

impl<B: Backend> Attend<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("attend", &self.batch)?;
        let (t, act, d) = (self.batch.rows, self.query.dtype(), self.kv.keys.cols());
        self.kv.check(&mut c, d, false)?;
        c.divides("columns of query", self.kv.heads * d, self.query.cols())?;
        c.read("query", &self.query, act, t, self.query.cols())?;
        c.read("query_gate", &self.query_gate, act, t, 2 * self.query.cols())?;
        c.write("output", &self.output, act, t, self.query.cols())
    }
}

/// Attention.
pub trait AttentionOps: Backend {
    /// See [`RopeAppend`].
    ///
    /// # Errors
    /// [`crate::Error::ContextOverflow`] if a position has no page, or what the device reports.
    fn rope_append(&self, queue: &mut Self::Queue, op: RopeAppend<Self>) -> Result<()>;

    /// See [`Attend`].
    ///
    /// # Errors
    /// As [`AttentionOps::rope_append`].
    fn attend(&self, queue: &mut Self::Queue, op: Attend<Self>) -> Result<()>;
}

recorder_methods! { AttentionOps:
    /// Runs or records a [`RopeAppend`].
    rope_append(RopeAppend),
    /// Runs or records an [`Attend`].
    attend(Attend),
}
