//! What a matrix is for.

use std::fmt;

/// The role of a matrix in the Qwen3.5 family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum TensorRole {
    /// `embed_tokens`.
    Embedding,
    /// `lm_head`.
    Head,
    /// `linear_attn.in_proj_qkv`.
    GdnQkv,
    /// `linear_attn.in_proj_z`.
    GdnZ,
    /// `linear_attn.in_proj_a`.
    GdnA,
    /// `linear_attn.in_proj_b`.
    GdnB,
    /// `linear_attn.out_proj`.
    GdnOut,
    /// `self_attn.q_proj`, the output gate included.
    AttnQ,
    /// `self_attn.k_proj`.
    AttnK,
    /// `self_attn.v_proj`.
    AttnV,
    /// `self_attn.o_proj`.
    AttnOut,
    /// `mlp.gate_proj` of a dense layer.
    MlpGate,
    /// `mlp.up_proj` of a dense layer.
    MlpUp,
    /// `mlp.down_proj` of a dense layer.
    MlpDown,
    /// `mlp.gate`, the router.
    Router,
    /// `gate_proj` of one routed expert.
    ExpertGate,
    /// `up_proj` of one routed expert.
    ExpertUp,
    /// `down_proj` of one routed expert.
    ExpertDown,
    /// `shared_expert.gate_proj`.
    SharedGate,
    /// `shared_expert.up_proj`.
    SharedUp,
    /// `shared_expert.down_proj`.
    SharedDown,
    /// `shared_expert_gate`, one row.
    SharedExpertGate,
    /// `mtp.fc`.
    MtpFc,
}

impl TensorRole {
    /// All roles.
    pub const ALL: [Self; 23] = [
        Self::Embedding,
        Self::Head,
        Self::GdnQkv,
        Self::GdnZ,
        Self::GdnA,
        Self::GdnB,
        Self::GdnOut,
        Self::AttnQ,
        Self::AttnK,
        Self::AttnV,
        Self::AttnOut,
        Self::MlpGate,
        Self::MlpUp,
        Self::MlpDown,
        Self::Router,
        Self::ExpertGate,
        Self::ExpertUp,
        Self::ExpertDown,
        Self::SharedGate,
        Self::SharedUp,
        Self::SharedDown,
        Self::SharedExpertGate,
        Self::MtpFc,
    ];

    /// Whether the recipes that quantise touch matrices of this role outside the MTP block: the large projections do,
    /// what is small or sensitive (embedding, head, router, gates of the delta rule, the shared expert's gate, `mtp.fc`)
    /// does not.
    #[must_use]
    pub const fn is_body_projection(self) -> bool {
        !matches!(
            self,
            Self::Embedding
                | Self::Head
                | Self::GdnA
                | Self::GdnB
                | Self::Router
                | Self::SharedExpertGate
                | Self::MtpFc
        )
    }

    /// The module's name below its layer, or below the model; the number of an expert is written `*`.
    #[must_use]
    pub const fn module(self) -> &'static str {
        match self {
            Self::Embedding => "embed_tokens",
            Self::Head => "lm_head",
            Self::GdnQkv => "linear_attn.in_proj_qkv",
            Self::GdnZ => "linear_attn.in_proj_z",
            Self::GdnA => "linear_attn.in_proj_a",
            Self::GdnB => "linear_attn.in_proj_b",
            Self::GdnOut => "linear_attn.out_proj",
            Self::AttnQ => "self_attn.q_proj",
            Self::AttnK => "self_attn.k_proj",
            Self::AttnV => "self_attn.v_proj",
            Self::AttnOut => "self_attn.o_proj",
            Self::MlpGate => "mlp.gate_proj",
            Self::MlpUp => "mlp.up_proj",
            Self::MlpDown => "mlp.down_proj",
            Self::Router => "mlp.gate",
            Self::ExpertGate => "mlp.experts.*.gate_proj",
            Self::ExpertUp => "mlp.experts.*.up_proj",
            Self::ExpertDown => "mlp.experts.*.down_proj",
            Self::SharedGate => "mlp.shared_expert.gate_proj",
            Self::SharedUp => "mlp.shared_expert.up_proj",
            Self::SharedDown => "mlp.shared_expert.down_proj",
            Self::SharedExpertGate => "mlp.shared_expert_gate",
            Self::MtpFc => "fc",
        }
    }

    /// Short lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Head => "head",
            Self::GdnQkv => "gdn.qkv",
            Self::GdnZ => "gdn.z",
            Self::GdnA => "gdn.a",
            Self::GdnB => "gdn.b",
            Self::GdnOut => "gdn.out",
            Self::AttnQ => "attn.q",
            Self::AttnK => "attn.k",
            Self::AttnV => "attn.v",
            Self::AttnOut => "attn.out",
            Self::MlpGate => "mlp.gate",
            Self::MlpUp => "mlp.up",
            Self::MlpDown => "mlp.down",
            Self::Router => "router",
            Self::ExpertGate => "expert.gate",
            Self::ExpertUp => "expert.up",
            Self::ExpertDown => "expert.down",
            Self::SharedGate => "shared.gate",
            Self::SharedUp => "shared.up",
            Self::SharedDown => "shared.down",
            Self::SharedExpertGate => "shared.expert_gate",
            Self::MtpFc => "mtp.fc",
        }
    }
}

impl fmt::Display for TensorRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
