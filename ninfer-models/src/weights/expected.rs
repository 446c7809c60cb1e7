//! The weights that a configuration asks for, with their names and shapes.

use ninfer_core::shape::LayerKind;
use ninfer_quant::TensorRole;

use super::part::{LayerRef, VectorRole};
use crate::Config;
use crate::config::Ffn;

/// A matrix: its module name below the layer, and its shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedMatrix {
    pub(super) role: TensorRole,
    pub(super) module: &'static str,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// A weight that is kept in f32: its tensor name below the layer, and its shape.
#[derive(Clone, Debug)]
pub(super) struct ExpectedVector {
    pub(super) role: VectorRole,
    pub(super) tensor: &'static str,
    pub(super) shape: Vec<usize>,
}

/// What one place of the model needs, apart from routed experts.
#[derive(Clone, Debug, Default)]
pub(super) struct ExpectedLayer {
    pub(super) matrices: Vec<ExpectedMatrix>,
    pub(super) vectors: Vec<ExpectedVector>,
}

/// Shape of the routed experts of every layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedExperts {
    /// E.
    pub(super) experts: usize,
    /// M.
    pub(super) width: usize,
    /// H.
    pub(super) hidden: usize,
}

impl ExpectedExperts {
    pub(super) fn of(config: &Config) -> Option<Self> {
        match config.ffn {
            Ffn::Moe { experts, width, .. } => Some(Self { experts, width, hidden: config.hidden }),
            Ffn::Dense { .. } => None,
        }
    }
}

/// The name that a place's tensors start with, once the prefix of the text model is replaced by `model.`.
pub(super) fn stem(layer: LayerRef) -> String {
    match layer {
        LayerRef::Root => "model.".to_owned(),
        LayerRef::Main(i) => format!("model.layers.{i}."),
        LayerRef::Mtp => "mtp.layers.0.".to_owned(),
    }
}

/// What the root needs; the head is not among it, since it may be tied.
pub(super) fn root(config: &Config) -> ExpectedLayer {
    let mut out = ExpectedLayer::default();
    out.matrix(TensorRole::Embedding, "embed_tokens", config.vocab, config.hidden);
    out.vector(VectorRole::FinalNorm, "norm.weight", &[config.hidden]);
    out
}

/// The head, which stands outside the text model's prefix.
pub(super) fn head(config: &Config) -> ExpectedMatrix {
    ExpectedMatrix { role: TensorRole::Head, module: "lm_head", rows: config.vocab, cols: config.hidden }
}

/// What a main layer needs.
pub(super) fn layer(config: &Config, kind: LayerKind) -> ExpectedLayer {
    let mut out = ExpectedLayer::default();
    out.vector(VectorRole::InputNorm, "input_layernorm.weight", &[config.hidden]);
    match kind {
        LayerKind::LinearAttention => out.gdn(config),
        LayerKind::FullAttention => out.attention(config),
    }
    out.vector(VectorRole::PostNorm, "post_attention_layernorm.weight", &[config.hidden]);
    out.ffn(config);
    out
}

/// What the MTP block needs outside its layer; names are below `mtp.`.
pub(super) fn mtp_root(config: &Config) -> ExpectedLayer {
    let h = config.hidden;
    let mut out = ExpectedLayer::default();
    out.matrix(TensorRole::MtpFc, "fc", h, 2 * h);
    out.vector(VectorRole::EmbeddingNorm, "pre_fc_norm_embedding.weight", &[h]);
    out.vector(VectorRole::HiddenNorm, "pre_fc_norm_hidden.weight", &[h]);
    out.vector(VectorRole::FinalNorm, "norm.weight", &[h]);
    out
}

impl ExpectedLayer {
    fn matrix(&mut self, role: TensorRole, module: &'static str, rows: usize, cols: usize) {
        self.matrices.push(ExpectedMatrix { role, module, rows, cols });
    }

    fn vector(&mut self, role: VectorRole, tensor: &'static str, shape: &[usize]) {
        self.vectors.push(ExpectedVector { role, tensor, shape: shape.to_vec() });
    }

    fn gdn(&mut self, config: &Config) {
        let (g, h) = (&config.gdn, config.hidden);
        let (channels, values) = (g.channels(), g.values());
        self.matrix(TensorRole::GdnQkv, "linear_attn.in_proj_qkv", channels, h);
        self.matrix(TensorRole::GdnZ, "linear_attn.in_proj_z", values, h);
        self.matrix(TensorRole::GdnA, "linear_attn.in_proj_a", g.value_heads, h);
        self.matrix(TensorRole::GdnB, "linear_attn.in_proj_b", g.value_heads, h);
        self.matrix(TensorRole::GdnOut, "linear_attn.out_proj", h, values);
        self.vector(VectorRole::Conv, "linear_attn.conv1d.weight", &[channels, 1, g.conv_kernel]);
        self.vector(VectorRole::ALog, "linear_attn.A_log", &[g.value_heads]);
        self.vector(VectorRole::DtBias, "linear_attn.dt_bias", &[g.value_heads]);
        self.vector(VectorRole::GdnNorm, "linear_attn.norm.weight", &[g.value_dim]);
    }

    fn attention(&mut self, config: &Config) {
        let (a, h) = (&config.attention, config.hidden);
        let (queries, keys) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        self.matrix(TensorRole::AttnQ, "self_attn.q_proj", 2 * queries, h);
        self.matrix(TensorRole::AttnK, "self_attn.k_proj", keys, h);
        self.matrix(TensorRole::AttnV, "self_attn.v_proj", keys, h);
        self.matrix(TensorRole::AttnOut, "self_attn.o_proj", h, queries);
        self.vector(VectorRole::QNorm, "self_attn.q_norm.weight", &[a.head_dim]);
        self.vector(VectorRole::KNorm, "self_attn.k_norm.weight", &[a.head_dim]);
    }

    fn ffn(&mut self, config: &Config) {
        let h = config.hidden;
        match config.ffn {
            Ffn::Dense { intermediate } => {
                self.matrix(TensorRole::MlpGate, "mlp.gate_proj", intermediate, h);
                self.matrix(TensorRole::MlpUp, "mlp.up_proj", intermediate, h);
                self.matrix(TensorRole::MlpDown, "mlp.down_proj", h, intermediate);
            }
            Ffn::Moe { experts, shared_width, .. } => {
                self.matrix(TensorRole::Router, "mlp.gate", experts, h);
                self.matrix(TensorRole::SharedGate, "mlp.shared_expert.gate_proj", shared_width, h);
                self.matrix(TensorRole::SharedUp, "mlp.shared_expert.up_proj", shared_width, h);
                self.matrix(TensorRole::SharedDown, "mlp.shared_expert.down_proj", h, shared_width);
                self.matrix(TensorRole::SharedExpertGate, "mlp.shared_expert_gate", 1, h);
            }
        }
    }
}
