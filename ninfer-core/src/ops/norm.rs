//! Embedding, norms, the input of the MTP block, and row copies.

use super::{Check, recorder_methods};
use crate::backend::{Backend, DeviceWeight};
use crate::segment::Batch;
use crate::{DType, Result, View};

/// A zero-centred RMS norm: `N(x) = x · rsqrt(mean(x²) + eps) · (1 + gain)`, in f32, rounded once at the end.
///
/// The gain is kept as stored (zero-centred); 1 is added in f32 at use.
#[derive(Clone, Debug)]
pub struct Norm<B: Backend> {
    /// f32 `[1, H]`.
    pub gain: View<B>,
    /// Added to the mean square.
    pub eps: f32,
}

impl<B: Backend> Norm<B> {
    pub(crate) fn check<'a>(&'a self, c: &mut Check<'a, B>, width: usize) -> Result<()> {
        c.read("gain", &self.gain, DType::F32, 1, width)
    }
}

/// Embedding rows: `y_t = E[ids_t]`, no scaling. An id of `u32::MAX` (a padding row) gives zeros.
#[derive(Clone, Debug)]
pub struct Embed<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// U32 `[T, 1]`.
    pub ids: View<B>,
    /// `[V, H]`, any format.
    pub table: B::Weight,
    /// act `[T, H]`.
    pub output: View<B>,
}

impl<B: Backend> Embed<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("embed", &self.batch)?;
        c.read("ids", &self.ids, DType::U32, self.batch.rows, 1)?;
        c.write("output", &self.output, self.output.dtype(), self.batch.rows, self.table.cols())
    }
}

/// A norm with its result in memory: `y = N(x)`.
#[derive(Clone, Debug)]
pub struct RmsNorm<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, H]`.
    pub input: View<B>,
    /// The norm.
    pub norm: Norm<B>,
    /// act `[T, H]`.
    pub output: View<B>,
}

impl<B: Backend> RmsNorm<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("rms_norm", &self.batch)?;
        let (t, h, act) = (self.batch.rows, self.input.cols(), self.input.dtype());
        c.read("input", &self.input, act, t, h)?;
        self.norm.check(&mut c, h)?;
        c.write("output", &self.output, act, t, h)
    }
}

/// Input of the MTP block: `u_t = fc · [N_e(E[ids_t]) ; N_h(hidden[index_t])]`, embedding first.
///
/// `hidden` rows are the target's final-normed states, or the block's own outputs when drafts are chained.
#[derive(Clone, Debug)]
pub struct MtpStem<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// U32 `[T, 1]`: the token that follows the position of the hidden state; `u32::MAX` counts as a zero embedding.
    pub ids: View<B>,
    /// `[V, H]`.
    pub table: B::Weight,
    /// act `[R, H]`.
    pub hidden: View<B>,
    /// I32 `[T, 1]`: row of `hidden` for each row; a negative index gives a row of zeros.
    pub index: View<B>,
    /// `pre_fc_norm_embedding`.
    pub embedding_norm: Norm<B>,
    /// `pre_fc_norm_hidden`.
    pub hidden_norm: Norm<B>,
    /// `[H, 2H]`.
    pub fc: B::Weight,
    /// act `[T, H]`.
    pub output: View<B>,
}

impl<B: Backend> MtpStem<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("mtp_stem", &self.batch)?;
        let (t, h, act) = (self.batch.rows, self.table.cols(), self.output.dtype());
        c.read("ids", &self.ids, DType::U32, t, 1)?;
        c.read("index", &self.index, DType::I32, t, 1)?;
        c.read("hidden", &self.hidden, act, self.hidden.rows(), h)?;
        self.embedding_norm.check(&mut c, h)?;
        self.hidden_norm.check(&mut c, h)?;
        c.weight("fc", &self.fc, h, 2 * h)?;
        c.write("output", &self.output, act, t, h)
    }
}

/// Copies rows: `dst[dst_index_i] ← src[src_index_i]`; a negative index on either side skips the row.
///
/// `src` and `dst` may lie in one buffer if the two views do not overlap.
#[derive(Clone, Debug)]
pub struct CopyRows<B: Backend> {
    /// `[R, W]`.
    pub src: View<B>,
    /// I32 `[n, 1]`.
    pub src_index: View<B>,
    /// `[S, W]`, same dtype.
    pub dst: View<B>,
    /// I32 `[n, 1]`.
    pub dst_index: View<B>,
}

impl<B: Backend> CopyRows<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::new("copy_rows");
        let n = self.src_index.rows();
        c.read("src", &self.src, self.src.dtype(), self.src.rows(), self.src.cols())?;
        c.read("src_index", &self.src_index, DType::I32, n, 1)?;
        c.read("dst_index", &self.dst_index, DType::I32, n, 1)?;
        c.write("dst", &self.dst, self.src.dtype(), self.dst.rows(), self.src.cols())
    }
}

/// Embedding, norms and row copies.
pub trait NormOps: Backend {
    /// See [`Embed`].
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for an id outside the table, or what the device reports.
    fn embed(&self, queue: &mut Self::Queue, op: Embed<Self>) -> Result<()>;

    /// See [`RmsNorm`].
    ///
    /// # Errors
    /// What the device reports.
    fn rms_norm(&self, queue: &mut Self::Queue, op: RmsNorm<Self>) -> Result<()>;

    /// See [`MtpStem`].
    ///
    /// # Errors
    /// As [`NormOps::embed`].
    fn mtp_stem(&self, queue: &mut Self::Queue, op: MtpStem<Self>) -> Result<()>;

    /// See [`CopyRows`].
    ///
    /// # Errors
    /// [`crate::Error::OutOfRange`] for an index outside its matrix, or what the device reports.
    fn copy_rows(&self, queue: &mut Self::Queue, op: CopyRows<Self>) -> Result<()>;
}

recorder_methods! { NormOps:
    /// Runs or records an [`Embed`].
    embed(Embed),
    /// Runs or records an [`RmsNorm`].
    rms_norm(RmsNorm),
    /// Runs or records an [`MtpStem`].
    mtp_stem(MtpStem),
    /// Runs or records a [`CopyRows`].
    copy_rows(CopyRows),
}
