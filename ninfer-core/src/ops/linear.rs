//! Projections: matrix products of activations with packed weights.

use super::{Check, Norm, recorder_methods};
use crate::backend::{Backend, DeviceWeight};
use crate::segment::Batch;
use crate::{Result, View};

/// Several projections of one input: `y_i = N(x) · W_iᵀ`.
///
/// With `norm`, `N(x) = x · rsqrt(mean(x²) + eps) · (1 + gain)`; without, `N(x) = x`.
#[derive(Clone, Debug)]
pub struct Project<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, K]`.
    pub input: View<B>,
    /// Norm applied to the input first.
    pub norm: Option<Norm<B>>,
    /// Weights `[N_i, K]` and their outputs, act `[T, N_i]`.
    pub parts: Vec<(B::Weight, View<B>)>,
}

impl<B: Backend> Project<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("project", &self.batch)?;
        let (t, k, act) = (self.batch.rows, self.input.cols(), self.input.dtype());
        c.read("input", &self.input, act, t, k)?;
        if let Some(norm) = &self.norm {
            norm.check(&mut c, k)?;
        }
        c.at_least("number of parts", 1, self.parts.len())?;
        for (w, out) in &self.parts {
            c.write("output", out, act, t, w.rows())?;
            c.weight("weight", w, out.cols(), k)?;
        }
        Ok(())
    }
}

/// A projection added to the residual stream: `r ← r + x · Wᵀ`.
#[derive(Clone, Debug)]
pub struct ProjectAdd<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, K]`.
    pub input: View<B>,
    /// `[H, K]`.
    pub weight: B::Weight,
    /// act `[T, H]`, read and written.
    pub residual: View<B>,
}

impl<B: Backend> ProjectAdd<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("project_add", &self.batch)?;
        let t = self.batch.rows;
        c.read("input", &self.input, self.residual.dtype(), t, self.weight.cols())?;
        c.write("residual", &self.residual, self.residual.dtype(), t, self.weight.rows())
    }
}

/// Gate and up projection with SwiGLU: `y = silu(N(x) · W_gᵀ) ⊙ (N(x) · W_uᵀ)`, `silu(a) = a · sigmoid(a)`.
#[derive(Clone, Debug)]
pub struct Swiglu<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, H]`.
    pub input: View<B>,
    /// Norm applied to the input first.
    pub norm: Option<Norm<B>>,
    /// `[2I, H]`: rows `0..I` gate, `I..2I` up.
    pub gate_up: B::Weight,
    /// act `[T, I]`.
    pub output: View<B>,
}

impl<B: Backend> Swiglu<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("swiglu", &self.batch)?;
        let (t, h) = (self.batch.rows, self.input.cols());
        c.read("input", &self.input, self.input.dtype(), t, h)?;
        if let Some(norm) = &self.norm {
            norm.check(&mut c, h)?;
        }
        c.write("output", &self.output, self.input.dtype(), t, self.output.cols())?;
        c.weight("gate_up", &self.gate_up, 2 * self.output.cols(), h)
    }
}

/// Projections.
pub trait LinearOps: Backend {
    /// See [`Project`].
    ///
    /// # Errors
    /// What the device reports.
    fn project(&self, queue: &mut Self::Queue, op: Project<Self>) -> Result<()>;

    /// See [`ProjectAdd`].
    ///
    /// # Errors
    /// What the device reports.
    fn project_add(&self, queue: &mut Self::Queue, op: ProjectAdd<Self>) -> Result<()>;

    /// See [`Swiglu`].
    ///
    /// # Errors
    /// What the device reports.
    fn swiglu(&self, queue: &mut Self::Queue, op: Swiglu<Self>) -> Result<()>;
}

recorder_methods! { LinearOps:
    /// Runs or records a [`Project`].
    project(Project),
    /// Runs or records a [`ProjectAdd`].
    project_add(ProjectAdd),
    /// Runs or records a [`Swiglu`].
    swiglu(Swiglu),
}
