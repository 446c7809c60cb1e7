//! What a model is made of: where a weight stands and what it is for.

use std::fmt;

use ninfer_core::shape::Part;
use ninfer_quant::TensorRole;

/// A place in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum LayerRef {
    /// Embedding, final norm and head.
    Root,
    /// The main layer of this index.
    Main(usize),
    /// The MTP block, its layer included.
    Mtp,
}

impl LayerRef {
    /// Whether this is the MTP block.
    #[must_use]
    pub const fn is_mtp(self) -> bool {
        matches!(self, Self::Mtp)
    }
}

impl fmt::Display for LayerRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("root"),
            Self::Main(i) => write!(f, "layer {i}"),
            Self::Mtp => f.write_str("MTP block"),
        }
    }
}

/// Where a matrix stands in terms of a model's shape.
pub(super) const fn place(layer: LayerRef, role: TensorRole) -> Part {
    match (layer, role) {
        (LayerRef::Main(i), _) => Part::Layer(i),
        (LayerRef::Mtp, _) => Part::Mtp,
        (LayerRef::Root, TensorRole::Head) => Part::Head,
        (LayerRef::Root, _) => Part::Embedding,
    }
}

/// A weight that is kept in f32.
///
/// | role | where | shape |
/// |---|---|---|
/// | `FinalNorm` | root (`norm`), MTP (`mtp.norm`) | \[H\] |
/// | `InputNorm`, `PostNorm` | every layer, MTP | \[H\] |
/// | `QNorm`, `KNorm` | full-attention layers, MTP | \[D\] |
/// | `GdnNorm` | GDN layers | \[dv\] |
/// | `ALog`, `DtBias` | GDN layers | \[Hv\] |
/// | `Conv` | GDN layers | \[C, K\], the newest column last |
/// | `EmbeddingNorm`, `HiddenNorm` | MTP | \[H\] |
///
/// All norms but `GdnNorm` are zero-centred: the gain is `1 + w`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum VectorRole {
    /// The norm before the head.
    FinalNorm,
    /// `input_layernorm`.
    InputNorm,
    /// `post_attention_layernorm`.
    PostNorm,
    /// `self_attn.q_norm`.
    QNorm,
    /// `self_attn.k_norm`.
    KNorm,
    /// `linear_attn.norm`.
    GdnNorm,
    /// `linear_attn.A_log`; −∞ is legal and means that the head never decays.
    ALog,
    /// `linear_attn.dt_bias`.
    DtBias,
    /// `linear_attn.conv1d`.
    Conv,
    /// `mtp.pre_fc_norm_embedding`.
    EmbeddingNorm,
    /// `mtp.pre_fc_norm_hidden`.
    HiddenNorm,
}

impl VectorRole {
    /// Short lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FinalNorm => "norm.final",
            Self::InputNorm => "norm.input",
            Self::PostNorm => "norm.post",
            Self::QNorm => "attn.q_norm",
            Self::KNorm => "attn.k_norm",
            Self::GdnNorm => "gdn.norm",
            Self::ALog => "gdn.a_log",
            Self::DtBias => "gdn.dt_bias",
            Self::Conv => "gdn.conv",
            Self::EmbeddingNorm => "mtp.embedding_norm",
            Self::HiddenNorm => "mtp.hidden_norm",
        }
    }
}

impl fmt::Display for VectorRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which matrices of the routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ExpertPart {
    /// Gate and up, \[M, H\] each.
    GateUp,
    /// Down, \[H, M\].
    Down,
}

/// Whether the checkpoint has an MTP block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MtpState {
    /// No tensor of it is there.
    Absent,
    /// All of its tensors are there. (A block that is there in part is an error at opening.)
    Complete,
}
