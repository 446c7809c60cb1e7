//! What a recipe decides by: which matrix, or which of its rows, of which model.

use std::fmt;

use ninfer_core::shape::{FfnShape, ModelShape, Part, Role, TensorShape};

use crate::TensorRole;

/// Rows of a stored matrix that a recipe may treat by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum RowPart {
    /// All rows.
    #[default]
    All,
    /// The query rows of `q_proj`, those of each head in front of its gate rows.
    Query,
    /// The output-gate rows of `q_proj`.
    Gate,
    /// The query and key rows of `in_proj_qkv`, which come first.
    QueryKey,
    /// The value rows of `in_proj_qkv`.
    Value,
}

impl RowPart {
    /// Short lower-case name; empty for all rows.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::All => "",
            Self::Query => "query",
            Self::Gate => "gate",
            Self::QueryKey => "query_key",
            Self::Value => "value",
        }
    }
}

/// Where a matrix stands in a model, and what it is for.
///
/// A recipe knows nothing else of a matrix than this and its stored format, so that what it will do can be asked without a
/// checkpoint. The experts of a layer have one site for each role.
///
/// ```
/// use ninfer_core::shape::Part;
/// use ninfer_quant::{Site, TensorRole};
/// let site = Site::new(TensorRole::ExpertDown, Part::Layer(3), 40, true);
/// assert_eq!(site.name(), "model.layers.3.mlp.experts.*.down_proj");
/// assert_eq!(Site::new(TensorRole::MtpFc, Part::Mtp, 40, true).name(), "mtp.fc");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Site {
    /// What the matrix is for.
    pub role: TensorRole,
    /// Which of its rows.
    pub rows: RowPart,
    /// Where it stands.
    pub place: Part,
    /// Main layers of the model.
    pub layers: usize,
    /// Whether the model's feed-forward blocks are mixtures of experts.
    pub has_experts: bool,
}

impl Site {
    /// All rows of a matrix in a model of `layers` main layers.
    #[must_use]
    pub const fn new(role: TensorRole, place: Part, layers: usize, has_experts: bool) -> Self {
        Self { role, rows: RowPart::All, place, layers, has_experts }
    }

    /// The site of a planned tensor; `None` for what is no matrix.
    #[must_use]
    pub fn of(t: &TensorShape, shape: &ModelShape) -> Option<Self> {
        let (role, rows) = role_of(t.role)?;
        let has_experts = matches!(shape.ffn, FfnShape::Moe { .. });
        Some(Self::new(role, t.part, shape.layers.len(), has_experts).with_rows(rows))
    }

    /// Some rows of the same matrix.
    #[must_use]
    pub const fn with_rows(self, rows: RowPart) -> Self {
        Self { rows, ..self }
    }

    /// Whether it belongs to the MTP block.
    #[must_use]
    pub const fn is_mtp(self) -> bool {
        matches!(self.place, Part::Mtp)
    }

    /// Whether it is a large projection of the main layers: what the recipes that quantise touch.
    #[must_use]
    pub const fn is_body_projection(self) -> bool {
        self.role.is_body_projection() && !self.is_mtp()
    }

    /// The module's name without the prefix of a wrapping model; the number of an expert is written `*`.
    #[must_use]
    pub fn name(self) -> String {
        let module = self.role.module();
        match (self.role, self.place) {
            (TensorRole::Head, _) => module.to_owned(),
            (TensorRole::MtpFc, _) => format!("mtp.{module}"),
            (_, Part::Layer(i)) => format!("model.layers.{i}.{module}"),
            (_, Part::Mtp) => format!("mtp.layers.0.{module}"),
            _ => format!("model.{module}"),
        }
    }

    /// The role's name, with that of the rows: `attn.q.gate`.
    #[must_use]
    pub fn role_name(self) -> String {
        match self.rows {
            RowPart::All => self.role.name().to_owned(),
            rows => format!("{}.{}", self.role, rows.name()),
        }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// The stored matrix that a planned tensor is, and which rows of it.
fn role_of(role: Role) -> Option<(TensorRole, RowPart)> {
    let whole = match role {
        Role::AttnQuery => return Some((TensorRole::AttnQ, RowPart::Query)),
        Role::AttnGate => return Some((TensorRole::AttnQ, RowPart::Gate)),
        Role::GdnQueryKey => return Some((TensorRole::GdnQkv, RowPart::QueryKey)),
        Role::GdnValue => return Some((TensorRole::GdnQkv, RowPart::Value)),
        Role::Embedding => TensorRole::Embedding,
        Role::Head => TensorRole::Head,
        Role::AttnKey => TensorRole::AttnK,
        Role::AttnValue => TensorRole::AttnV,
        Role::AttnOut => TensorRole::AttnOut,
        Role::GdnZ => TensorRole::GdnZ,
        Role::GdnA => TensorRole::GdnA,
        Role::GdnB => TensorRole::GdnB,
        Role::GdnOut => TensorRole::GdnOut,
        Role::FfnGate => TensorRole::MlpGate,
        Role::FfnUp => TensorRole::MlpUp,
        Role::FfnDown => TensorRole::MlpDown,
        Role::Router => TensorRole::Router,
        Role::ExpertGate => TensorRole::ExpertGate,
        Role::ExpertUp => TensorRole::ExpertUp,
        Role::ExpertDown => TensorRole::ExpertDown,
        Role::SharedGate => TensorRole::SharedGate,
        Role::SharedUp => TensorRole::SharedUp,
        Role::SharedDown => TensorRole::SharedDown,
        Role::SharedScale => TensorRole::SharedExpertGate,
        Role::MtpFc => TensorRole::MtpFc,
        _ => return None,
    };
    Some((whole, RowPart::All))
}

#[cfg(test)]
mod tests {
    use ninfer_core::shape;

    use super::*;

    #[test]
    fn every_matrix_of_every_published_size_has_a_site() {
        for name in shape::PUBLISHED {
            let shape = shape::published(name).unwrap();
            for t in shape.tensors() {
                assert_eq!(Site::of(&t, &shape).is_some(), t.role.is_matrix(), "{name}: {}", t.role);
            }
        }
    }

    #[test]
    fn names_are_those_of_checkpoints() {
        let name = |role, place| Site::new(role, place, 4, false).name();
        assert_eq!(name(TensorRole::Embedding, Part::Embedding), "model.embed_tokens");
        assert_eq!(name(TensorRole::Head, Part::Head), "lm_head");
        assert_eq!(name(TensorRole::GdnQkv, Part::Layer(2)), "model.layers.2.linear_attn.in_proj_qkv");
        assert_eq!(name(TensorRole::AttnOut, Part::Mtp), "mtp.layers.0.self_attn.o_proj");
    }
}
