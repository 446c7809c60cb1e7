//! Gated DeltaNet: convolution, gates, delta rule and gated norm, with record and fold.

use super::{Check, recorder_methods};
use crate::backend::Backend;
use crate::segment::Batch;
use crate::shape::GdnShape;
use crate::{DType, Result, View};

/// Activation of the output gate `z`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputGate {
    /// `z · sigmoid(z)`, the default ("swish").
    #[default]
    Silu,
    /// `sigmoid(z)`.
    Sigmoid,
}

/// Small f32 parameters of a layer.
#[derive(Clone, Debug)]
pub struct GdnParams<B: Backend> {
    /// Sizes.
    pub dims: GdnShape,
    /// f32 `[C, K]`, the newest column last.
    pub conv: View<B>,
    /// f32 `[1, Hv]`; −inf is legal and means no decay.
    pub a_log: View<B>,
    /// f32 `[1, Hv]`.
    pub dt_bias: View<B>,
    /// f32 `[1, dv]`, plain gain (not zero-centred).
    pub gain: View<B>,
    /// Epsilon of the gated norm.
    pub eps: f32,
    /// Activation of the output gate.
    pub gate: OutputGate,
}

impl<B: Backend> GdnParams<B> {
    fn check<'a>(&'a self, c: &mut Check<'a, B>) -> Result<()> {
        let d = &self.dims;
        c.at_least("key heads", 1, d.key_heads)?;
        c.divides("value heads", d.key_heads, d.value_heads)?;
        c.read("conv", &self.conv, DType::F32, d.channels(), d.conv_kernel)?;
        c.read("a_log", &self.a_log, DType::F32, 1, d.value_heads)?;
        c.read("dt_bias", &self.dt_bias, DType::F32, 1, d.value_heads)?;
        c.read("gain", &self.gain, DType::F32, 1, d.value_dim)
    }
}

/// Recurrent state of one layer for all slots. A sequence's state belongs to one position: window and matrix move together.
#[derive(Clone, Debug)]
pub struct GdnState<B: Backend> {
    /// act `[slots · C, K − 1]`: the last raw columns of the convolution's input, oldest first.
    pub window: View<B>,
    /// f32 `[slots · Hv · dk, dv]`.
    pub matrix: View<B>,
}

/// Raw columns of a round, so that any accepted prefix of it can be folded into the state with the same arithmetic.
///
/// Two banks of `W` columns per slot: a round writes one while the columns of the previous round are folded from the other.
/// Row `(slot · 2 + bank) · W + i` holds column `i`.
#[derive(Clone, Debug)]
pub struct GdnRecord<B: Backend> {
    /// Columns per bank: the widest round.
    pub width: usize,
    /// act `[slots · 2 · W, C]`: input of the convolution.
    pub columns: View<B>,
    /// act `[slots · 2 · W, Hk·dk + Hv·dv]`: convolved keys (before the l2 norm), then values.
    pub key_value: View<B>,
    /// f32 `[slots · 2 · W, 2 · Hv]`: log decay g, then β.
    pub gates: View<B>,
}

impl<B: Backend> GdnRecord<B> {
    fn check<'a>(&'a self, c: &mut Check<'a, B>, d: &GdnShape, act: DType) -> Result<()> {
        let rows = self.columns.rows();
        c.at_least("record width", 1, self.width)?;
        c.divides("rows of the record", 2 * self.width, rows)?;
        c.write("record columns", &self.columns, act, rows, d.channels())?;
        c.write("record keys and values", &self.key_value, act, rows, d.keys() + d.values())?;
        c.write("record gates", &self.gates, DType::F32, rows, 2 * d.value_heads)
    }
}

impl<B: Backend> GdnState<B> {
    fn check<'a>(&'a self, c: &mut Check<'a, B>, d: &GdnShape, act: DType) -> Result<()> {
        c.divides("rows of the window", d.channels(), self.window.rows())?;
        let slots = self.window.rows() / d.channels();
        c.write("window", &self.window, act, slots * d.channels(), d.conv_kernel - 1)?;
        c.write("matrix", &self.matrix, DType::F32, slots * d.value_heads * d.key_dim, d.value_dim)
    }
}

/// The token mixer of a Gated-DeltaNet layer between its input and output projections.
///
/// Per token and channel: `y = silu(Σ_j w_j · x_{t−K+1+j})`, giving q, k, v. Per value head, in f32:
///
/// ```text
/// g = −exp(A_log) · softplus(a + dt_bias)        β = sigmoid(b)        exp(A_log) is clamped to the largest finite f32
/// k̂ = k · rsqrt(Σk² + 1e−6)                      q̂ = q · rsqrt(Σq² + 1e−6) · dk^(−1/2)
/// S ← exp(g) S;  u = β (v − Sᵀ k̂);  S ← S + k̂ uᵀ;  o = Sᵀ q̂
/// y = o · rsqrt(mean(o²) + eps) · gain · act(z)
/// ```
///
/// Without a record (prompt chunks) the state advances over all rows. With one (steps), the `fold` columns of the previous
/// round are first folded into the state, the rows then run on a copy of it, and their raw columns are recorded; what is
/// in memory afterwards belongs to position `start`, and dropping the round costs nothing. Where [`Segment::base`] is 0 the state
/// counts as zeros and is not read.
///
/// [`Segment::base`]: crate::segment::Segment::base
#[derive(Clone, Debug)]
pub struct GdnMix<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, C]`: q, k, v parts, heads contiguous inside each.
    pub qkv: View<B>,
    /// act `[T, Hv·dv]`: output gate.
    pub z: View<B>,
    /// act `[T, Hv]`.
    pub a: View<B>,
    /// act `[T, Hv]`.
    pub b: View<B>,
    /// Layer parameters.
    pub params: GdnParams<B>,
    /// State, read and written.
    pub state: GdnState<B>,
    /// Record, for steps.
    pub record: Option<GdnRecord<B>>,
    /// act `[T, Hv·dv]`.
    pub output: View<B>,
}

impl<B: Backend> GdnMix<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("gdn_mix", &self.batch)?;
        let (t, d, act) = (self.batch.rows, &self.params.dims, self.output.dtype());
        c.at_least("convolution width", 2, d.conv_kernel)?;
        self.params.check(&mut c)?;
        c.read("qkv", &self.qkv, act, t, d.channels())?;
        c.read("z", &self.z, act, t, d.values())?;
        c.read("a", &self.a, act, t, d.value_heads)?;
        c.read("b", &self.b, act, t, d.value_heads)?;
        c.write("output", &self.output, act, t, d.values())?;
        self.state.check(&mut c, d, act)?;
        self.record.as_ref().map_or(Ok(()), |r| r.check(&mut c, d, act))
    }
}

/// Folds recorded columns into the state now: what the next [`GdnMix`] would do first, for snapshots and prompt chunks.
///
/// Only `slot`, `start`, `fold` and `bank` of the segments are read: the columns come from bank `1 − bank`. A segment whose
/// `fold` is 0 is a no-op.
#[derive(Clone, Debug)]
pub struct GdnFold<B: Backend> {
    /// Which slots, and how many columns.
    pub batch: Batch<B>,
    /// Layer parameters.
    pub params: GdnParams<B>,
    /// State, read and written.
    pub state: GdnState<B>,
    /// Record of the previous round.
    pub record: GdnRecord<B>,
}

impl<B: Backend> GdnFold<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("gdn_fold", &self.batch)?;
        let act = self.state.window.dtype();
        c.at_least("convolution width", 2, self.params.dims.conv_kernel)?;
        self.params.check(&mut c)?;
        self.state.check(&mut c, &self.params.dims, act)?;
        self.record.check(&mut c, &self.params.dims, act)
    }
}

/// Gated DeltaNet.
pub trait GdnOps: Backend {
    /// See [`GdnMix`].
    ///
    /// # Errors
    /// What the device reports.
    fn gdn_mix(&self, queue: &mut Self::Queue, op: GdnMix<Self>) -> Result<()>;

    /// See [`GdnFold`].
    ///
    /// # Errors
    /// What the device reports.
    fn gdn_fold(&self, queue: &mut Self::Queue, op: GdnFold<Self>) -> Result<()>;
}

recorder_methods! { GdnOps:
    /// Runs or records a [`GdnMix`].
    gdn_mix(GdnMix),
    /// Runs or records a [`GdnFold`].
    gdn_fold(GdnFold),
}
