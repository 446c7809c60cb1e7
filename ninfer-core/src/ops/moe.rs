//! Mixture of experts: router, routed experts and the shared expert.

use super::{Check, Norm, recorder_methods};
use crate::backend::{Backend, DeviceWeight};
use crate::segment::Batch;
use crate::{DType, Result, View};

/// Router: `p = softmax(N(x) · W_rᵀ)` over all experts in f32, the `k` largest of them (ties take the lower id), and the
/// shared expert's gate.
#[derive(Clone, Debug)]
pub struct Route<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, H]`: the residual stream.
    pub input: View<B>,
    /// Norm in front of the feed-forward block.
    pub norm: Norm<B>,
    /// `[E, H]`.
    pub router: B::Weight,
    /// `[1, H]`.
    pub shared_gate: B::Weight,
    /// Whether the chosen probabilities are divided by their sum (this family always does).
    pub renormalise: bool,
    /// act `[T, H]`: `N(x)`, which [`Experts`] reads.
    pub hidden: View<B>,
    /// I32 `[T, k]`: chosen experts, largest probability first.
    pub experts: View<B>,
    /// f32 `[T, k + 1]`: their weights, then `sigmoid(N(x) · w_s)`.
    pub weights: View<B>,
}

impl<B: Backend> Route<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("route", &self.batch)?;
        let (t, h, act, k) = (self.batch.rows, self.input.cols(), self.input.dtype(), self.experts.cols());
        c.read("input", &self.input, act, t, h)?;
        self.norm.check(&mut c, h)?;
        c.write("hidden", &self.hidden, act, t, h)?;
        c.at_least("experts per token", 1, k)?;
        c.at_least("experts", k, self.router.rows())?;
        c.weight("router", &self.router, self.router.rows(), h)?;
        c.weight("shared_gate", &self.shared_gate, 1, h)?;
        c.write("experts", &self.experts, DType::I32, t, k)?;
        c.write("weights", &self.weights, DType::F32, t, k + 1)
    }
}

/// Experts: `r ← r + Σ_j w_j · down_{e_j}(silu(gate_{e_j} h) ⊙ up_{e_j} h) + w_s · shared(h)`.
///
/// The sum runs in the order of the router's choice and the shared expert comes last, so that it never depends on which
/// tokens share an expert.
#[derive(Clone, Debug)]
pub struct Experts<B: Backend> {
    /// Rows of the call.
    pub batch: Batch<B>,
    /// act `[T, H]` from [`Route`].
    pub hidden: View<B>,
    /// I32 `[T, k]` from [`Route`].
    pub experts: View<B>,
    /// f32 `[T, k + 1]` from [`Route`].
    pub weights: View<B>,
    /// `[E · 2M, H]`: per expert `M` gate rows, then `M` up rows.
    pub gate_up: B::Weight,
    /// `[E · H, M]`.
    pub down: B::Weight,
    /// `[2S, H]`.
    pub shared_gate_up: B::Weight,
    /// `[H, S]`.
    pub shared_down: B::Weight,
    /// act `[T, H]`, read and written.
    pub residual: View<B>,
}

impl<B: Backend> Experts<B> {
    pub(crate) fn check(&self) -> Result<()> {
        let mut c = Check::batch("experts", &self.batch)?;
        let (t, h, act, k) = (self.batch.rows, self.hidden.cols(), self.hidden.dtype(), self.experts.cols());
        c.read("hidden", &self.hidden, act, t, h)?;
        c.read("experts", &self.experts, DType::I32, t, k)?;
        c.read("weights", &self.weights, DType::F32, t, k + 1)?;
        c.write("residual", &self.residual, act, t, h)?;
        c.divides("rows of down", h, self.down.rows())?;
        let (experts, width, shared) = (self.down.rows() / h, self.down.cols(), self.shared_down.cols());
        c.weight("gate_up", &self.gate_up, experts * 2 * width, h)?;
        c.weight("shared_down", &self.shared_down, h, shared)?;
        c.weight("shared_gate_up", &self.shared_gate_up, 2 * shared, h)
    }
}

/// Mixture of experts.
pub trait MoeOps: Backend {
    /// See [`Route`].
    ///
    /// # Errors
    /// What the device reports.
    fn route(&self, queue: &mut Self::Queue, op: Route<Self>) -> Result<()>;

    /// See [`Experts`].
    ///
    /// # Errors
    /// What the device reports.
    fn experts(&self, queue: &mut Self::Queue, op: Experts<Self>) -> Result<()>;
}

recorder_methods! { MoeOps:
    /// Runs or records a [`Route`].
    route(Route),
    /// Runs or records an [`Experts`].
    experts(Experts),
}
