//! The tensors of a model: what they are, how large, how many, and how many of them a token reads.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{FfnShape, LayerKind, ModelShape};

/// What a tensor does.
///
/// Roles are finer than stored tensors where recipes differ inside one: `q_proj` holds queries and output gates
/// interleaved by head, `in_proj_qkv` holds queries, keys and values. Rows of all weight formats are independent, so the
/// bytes of the parts add up to those of the whole (apart from one 4-byte matrix scale for each part).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Role {
    /// `embed_tokens` \[V, H\].
    Embedding,
    /// `lm_head` \[V, H\].
    Head,
    /// Query rows of `q_proj` \[Hq·D, H\].
    AttnQuery,
    /// Output-gate rows of `q_proj` \[Hq·D, H\].
    AttnGate,
    /// `k_proj` \[Hkv·D, H\].
    AttnKey,
    /// `v_proj` \[Hkv·D, H\].
    AttnValue,
    /// `o_proj` \[H, Hq·D\].
    AttnOut,
    /// Query and key rows of `in_proj_qkv` \[2·Kd, H\].
    GdnQueryKey,
    /// Value rows of `in_proj_qkv` \[Vd, H\].
    GdnValue,
    /// `in_proj_z` \[Vd, H\].
    GdnZ,
    /// `in_proj_a` \[Hv, H\].
    GdnA,
    /// `in_proj_b` \[Hv, H\].
    GdnB,
    /// `linear_attn.out_proj` \[H, Vd\].
    GdnOut,
    /// `conv1d` \[C, K\]; kept in f32.
    GdnConv,
    /// `A_log` and `dt_bias`, \[1, Hv\] each; kept in f32.
    GdnScalar,
    /// `mlp.gate_proj` \[I, H\].
    FfnGate,
    /// `mlp.up_proj` \[I, H\].
    FfnUp,
    /// `mlp.down_proj` \[H, I\].
    FfnDown,
    /// `mlp.gate` \[E, H\].
    Router,
    /// Gate rows of an expert \[M, H\].
    ExpertGate,
    /// Up rows of an expert \[M, H\].
    ExpertUp,
    /// Down matrix of an expert \[H, M\].
    ExpertDown,
    /// `shared_expert.gate_proj` \[S, H\].
    SharedGate,
    /// `shared_expert.up_proj` \[S, H\].
    SharedUp,
    /// `shared_expert.down_proj` \[H, S\].
    SharedDown,
    /// `shared_expert_gate` \[1, H\].
    SharedScale,
    /// `mtp.fc` \[H, 2·H\].
    MtpFc,
    /// The weight of a norm \[1, n\]; kept in f32.
    Norm,
}

impl Role {
    /// Short lower-case name, as printed in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Head => "head",
            Self::AttnQuery => "attention query",
            Self::AttnGate => "attention gate",
            Self::AttnKey => "attention key",
            Self::AttnValue => "attention value",
            Self::AttnOut => "attention output",
            Self::GdnQueryKey => "gdn query+key",
            Self::GdnValue => "gdn value",
            Self::GdnZ => "gdn z",
            Self::GdnA => "gdn a",
            Self::GdnB => "gdn b",
            Self::GdnOut => "gdn output",
            Self::GdnConv => "gdn conv",
            Self::GdnScalar => "gdn scalars",
            Self::FfnGate => "ffn gate",
            Self::FfnUp => "ffn up",
            Self::FfnDown => "ffn down",
            Self::Router => "router",
            Self::ExpertGate => "expert gate",
            Self::ExpertUp => "expert up",
            Self::ExpertDown => "expert down",
            Self::SharedGate => "shared gate",
            Self::SharedUp => "shared up",
            Self::SharedDown => "shared down",
            Self::SharedScale => "shared scale",
            Self::MtpFc => "mtp fc",
            Self::Norm => "norm",
        }
    }

    /// Whether the tensor is applied as `y = x Wᵀ` (or looked up by row) and so takes a weight format; the others are
    /// always f32 once loaded.
    #[must_use]
    pub const fn is_matrix(self) -> bool {
        !matches!(self, Self::Norm | Self::GdnScalar | Self::GdnConv)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where in the model a tensor stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Part {
    /// Before the layers.
    Embedding,
    /// Layer of this index.
    Layer(usize),
    /// The norm after the layers.
    FinalNorm,
    /// After the final norm.
    Head,
    /// The MTP block, its layer included.
    Mtp,
}

/// `count` equal tensors of shape `[rows, cols]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct TensorShape {
    /// What it does.
    pub role: Role,
    /// Where it stands.
    pub part: Part,
    /// Out features.
    pub rows: usize,
    /// In features.
    pub cols: usize,
    /// How many of them there are: the number of experts for expert matrices, 2 for [`Role::GdnScalar`], otherwise 1.
    pub count: usize,
    /// How many of the `count` one decoded token reads in full: the routed experts, 0 for an untied embedding (of which
    /// one row is read), otherwise all. A tied embedding is read as the head. For [`Part::Mtp`]: by one draft step.
    pub read: usize,
}

impl TensorShape {
    /// Elements of one of them.
    #[must_use]
    pub const fn elements(&self) -> u64 {
        (self.rows as u64).saturating_mul(self.cols as u64)
    }

    /// Elements of all of them.
    #[must_use]
    pub const fn parameters(&self) -> u64 {
        self.elements().saturating_mul(self.count as u64)
    }
}

impl ModelShape {
    /// Every tensor, in the order a token meets them, the MTP block last.
    ///
    /// ```
    /// use ninfer_core::shape::{self, Role};
    /// let shape = shape::published("35b-a3b")?;
    /// let down = shape.tensors().find(|t| t.role == Role::ExpertDown).unwrap();
    /// assert_eq!((down.rows, down.cols, down.count, down.read), (2048, 512, 256, 8));
    /// # Ok::<(), ninfer_core::Error>(())
    /// ```
    pub fn tensors(&self) -> impl Iterator<Item = TensorShape> + '_ {
        let vocab = (self.vocab, self.hidden);
        let embedding = TensorShape { read: usize::from(self.tied), ..one(Role::Embedding, Part::Embedding, vocab) };
        let head = (!self.tied).then(|| one(Role::Head, Part::Head, vocab));
        let layers = self.layers.iter().enumerate().flat_map(|(i, &kind)| self.layer(Part::Layer(i), kind));
        std::iter::once(embedding)
            .chain(layers)
            .chain(std::iter::once(one(Role::Norm, Part::FinalNorm, (1, self.hidden))))
            .chain(head)
            .chain(self.mtp.then(|| self.mtp_tensors()).into_iter().flatten())
    }

    fn layer(&self, part: Part, kind: LayerKind) -> Vec<TensorShape> {
        let h = self.hidden;
        let mut list = vec![one(Role::Norm, part, (1, h))];
        match kind {
            LayerKind::FullAttention => {
                let a = &self.attention;
                let queries = a.query_heads.saturating_mul(a.head_dim);
                let keys = a.kv_heads.saturating_mul(a.head_dim);
                list.extend([
                    one(Role::AttnQuery, part, (queries, h)),
                    one(Role::AttnGate, part, (queries, h)),
                    one(Role::AttnKey, part, (keys, h)),
                    one(Role::AttnValue, part, (keys, h)),
                    one(Role::Norm, part, (1, a.head_dim)),
                    one(Role::Norm, part, (1, a.head_dim)),
                    one(Role::AttnOut, part, (h, queries)),
                ]);
            }
            LayerKind::LinearAttention => {
                let g = &self.gdn;
                list.extend([
                    one(Role::GdnQueryKey, part, (g.keys().saturating_mul(2), h)),
                    one(Role::GdnValue, part, (g.values(), h)),
                    one(Role::GdnZ, part, (g.values(), h)),
                    one(Role::GdnA, part, (g.value_heads, h)),
                    one(Role::GdnB, part, (g.value_heads, h)),
                    one(Role::GdnConv, part, (g.channels(), g.conv_kernel)),
                    TensorShape { count: 2, read: 2, ..one(Role::GdnScalar, part, (1, g.value_heads)) },
                    one(Role::Norm, part, (1, g.value_dim)),
                    one(Role::GdnOut, part, (h, g.values())),
                ]);
            }
        }
        list.push(one(Role::Norm, part, (1, h)));
        match self.ffn {
            FfnShape::Dense { intermediate: i } => list.extend([
                one(Role::FfnGate, part, (i, h)),
                one(Role::FfnUp, part, (i, h)),
                one(Role::FfnDown, part, (h, i)),
            ]),
            FfnShape::Moe { experts, top_k, width: m, shared_width: s } => {
                let routed = |role, dims| TensorShape { count: experts, read: top_k, ..one(role, part, dims) };
                list.extend([
                    one(Role::Router, part, (experts, h)),
                    routed(Role::ExpertGate, (m, h)),
                    routed(Role::ExpertUp, (m, h)),
                    routed(Role::ExpertDown, (h, m)),
                    one(Role::SharedScale, part, (1, h)),
                    one(Role::SharedGate, part, (s, h)),
                    one(Role::SharedUp, part, (s, h)),
                    one(Role::SharedDown, part, (h, s)),
                ]);
            }
        }
        list
    }

    fn mtp_tensors(&self) -> Vec<TensorShape> {
        let h = self.hidden;
        let norm = one(Role::Norm, Part::Mtp, (1, h));
        let mut list = vec![norm, norm, one(Role::MtpFc, Part::Mtp, (h, h.saturating_mul(2)))];
        list.extend(self.layer(Part::Mtp, LayerKind::FullAttention));
        list.push(norm);
        list
    }
}

fn one(role: Role, part: Part, (rows, cols): (usize, usize)) -> TensorShape {
    TensorShape { role, part, rows, cols, count: 1, read: 1 }
}

#[cfg(test)]
mod tests {
    use super::super::published;
    use super::*;

    fn of(shape: &ModelShape, part: Part) -> Vec<(Role, usize, usize)> {
        shape.tensors().filter(|t| t.part == part).map(|t| (t.role, t.rows, t.cols)).collect()
    }

    #[test]
    fn dense_layers_have_the_stored_shapes() {
        let shape = published("27b").unwrap();
        let gdn = of(&shape, Part::Layer(0));
        assert!(gdn.contains(&(Role::GdnQueryKey, 4096, 5120)) && gdn.contains(&(Role::GdnZ, 6144, 5120)));
        assert!(gdn.contains(&(Role::GdnConv, 10240, 4)) && gdn.contains(&(Role::GdnOut, 5120, 6144)));
        let full = of(&shape, Part::Layer(3));
        assert!(full.contains(&(Role::AttnGate, 6144, 5120)) && full.contains(&(Role::AttnKey, 1024, 5120)));
        assert!(full.contains(&(Role::FfnDown, 5120, 17408)));
        assert!(of(&shape, Part::Mtp).contains(&(Role::MtpFc, 5120, 10240)));
    }

    #[test]
    fn stored_tensor_count_is_that_of_the_release() {
        // The 35B-A3B release in BF16 has 1045 tensors, 333 of them vision. Fused experts: gate and up are one tensor,
        // the experts of a layer are one tensor; query and gate, and query+key and value, are one each.
        let shape = published("35b-a3b").unwrap();
        let stored: usize = shape
            .tensors()
            .map(|t| match t.role {
                Role::AttnGate | Role::GdnValue | Role::ExpertUp => 0,
                Role::ExpertGate | Role::ExpertDown => 1,
                _ => t.count,
            })
            .sum();
        assert_eq!(stored, 1045 - 333);
    }

    #[test]
    fn tied_models_read_the_embedding_as_head() {
        let tied = published("2b").unwrap();
        assert!(tied.tensors().all(|t| t.role != Role::Head));
        assert_eq!(tied.tensors().next().map(|t| t.read), Some(1));
        let untied = published("9b").unwrap();
        assert_eq!(untied.tensors().next().map(|t| t.read), Some(0));
        assert_eq!(untied.tensors().filter(|t| t.role == Role::Head).count(), 1);
    }

    #[test]
    fn without_mtp_nothing_of_it_is_listed() {
        let mut shape = published("0.8b").unwrap();
        shape.mtp = false;
        assert!(shape.tensors().all(|t| t.part != Part::Mtp));
        assert_eq!(shape.parameters().mtp, 0);
    }
}
