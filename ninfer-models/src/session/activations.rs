//! Buffers of a pass: one row a token, sized once for the largest call.

use ninfer_core::backend::InferenceBackend;
use ninfer_core::view::View;
use ninfer_core::{DType, Result};

use crate::config::{Config, Ffn};

/// Allocates a `[rows, cols]` matrix of its own.
pub(crate) fn matrix<B: InferenceBackend>(
    backend: &B,
    what: &str,
    dtype: DType,
    rows: usize,
    cols: usize,
) -> Result<View<B>> {
    let bytes = rows.saturating_mul(cols).saturating_mul(dtype.size());
    View::new(backend.alloc(what, bytes)?, dtype, 0, rows, cols)
}

/// Activations of some rows.
pub(crate) struct Rows<B: InferenceBackend> {
    /// Residual stream `[T, H]`.
    pub(crate) x: View<B>,
    /// `[T, Hq · 2D]`.
    pub(crate) query_gate: View<B>,
    /// `[T, Hq · D]`.
    pub(crate) query: View<B>,
    /// `[T, Hkv · D]`.
    pub(crate) key: View<B>,
    /// `[T, Hkv · D]`.
    pub(crate) value: View<B>,
    /// Attention output `[T, Hq · D]`.
    pub(crate) attended: View<B>,
    /// `[T, C]`.
    pub(crate) qkv: View<B>,
    /// `[T, Hv · dv]`.
    pub(crate) z: View<B>,
    /// `[T, Hv]`.
    pub(crate) a: View<B>,
    /// `[T, Hv]`.
    pub(crate) b: View<B>,
    /// Mixer output `[T, Hv · dv]`.
    pub(crate) mixed: View<B>,
    /// Dense: SwiGLU output `[T, I]`. MoE: normed input `[T, H]`.
    pub(crate) mid: View<B>,
    /// I32 `[T, k]`.
    pub(crate) experts: View<B>,
    /// f32 `[T, k + 1]`.
    pub(crate) expert_weights: View<B>,
}

impl<B: InferenceBackend> Rows<B> {
    pub(crate) fn alloc(backend: &B, config: &Config, rows: usize) -> Result<Self> {
        let act = backend.activation_dtype();
        let (a, g) = (&config.attention, &config.gdn);
        let (mid, k) = match config.ffn {
            Ffn::Dense { intermediate } => (intermediate, 1),
            Ffn::Moe { top_k, .. } => (config.hidden, top_k),
        };
        let new = |what: &str, cols: usize| matrix(backend, what, act, rows, cols);
        Ok(Self {
            x: new("residual stream", config.hidden)?,
            query_gate: new("queries and gates", a.heads * 2 * a.head_dim)?,
            query: new("queries", a.heads * a.head_dim)?,
            key: new("keys", a.kv_heads * a.head_dim)?,
            value: new("values", a.kv_heads * a.head_dim)?,
            attended: new("attention output", a.heads * a.head_dim)?,
            qkv: new("GDN projection", g.channels())?,
            z: new("GDN gate", g.values())?,
            a: new("GDN decay", g.value_heads)?,
            b: new("GDN beta", g.value_heads)?,
            mixed: new("GDN output", g.values())?,
            mid: new("feed-forward", mid)?,
            experts: matrix(backend, "chosen experts", DType::I32, rows, k)?,
            expert_weights: matrix(backend, "expert weights", DType::F32, rows, k + 1)?,
        })
    }

    /// The first `count` rows.
    pub(crate) fn first(&self, count: usize) -> Result<Self> {
        let cut = |v: &View<B>| v.row_range(0..count);
        Ok(Self {
            x: cut(&self.x)?,
            query_gate: cut(&self.query_gate)?,
            query: cut(&self.query)?,
            key: cut(&self.key)?,
            value: cut(&self.value)?,
            attended: cut(&self.attended)?,
            qkv: cut(&self.qkv)?,
            z: cut(&self.z)?,
            a: cut(&self.a)?,
            b: cut(&self.b)?,
            mixed: cut(&self.mixed)?,
            mid: cut(&self.mid)?,
            experts: cut(&self.experts)?,
            expert_weights: cut(&self.expert_weights)?,
        })
    }
}
