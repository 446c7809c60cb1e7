//! Groupwise integers by role, as NInfer ships the 27B and the 35B-A3B.

use ninfer_core::format::GroupFormat;
use ninfer_core::shape::Part;

use super::site::{RowPart, Site};
use crate::TensorRole;

/// Down projections of experts that have six bits, counted from the last layer, which is 1.
const WIDER_DOWN: [usize; 3] = [1, 2, 6];

/// The format of a matrix; `None` if it stays as stored. The table is in the documentation of `Recipe`.
pub(super) fn format(site: &Site) -> Option<GroupFormat> {
    use GroupFormat::{Q4, Q5, Q6, W8};
    match site.role {
        TensorRole::Router | TensorRole::SharedExpertGate | TensorRole::GdnA | TensorRole::GdnB => None,
        _ if site.is_mtp() => Some(W8),
        TensorRole::MtpFc => Some(W8),
        TensorRole::Embedding => Some(if site.has_experts { W8 } else { Q6 }),
        TensorRole::Head => Some(Q6),
        TensorRole::MlpGate | TensorRole::MlpUp | TensorRole::ExpertGate | TensorRole::ExpertUp => Some(Q4),
        TensorRole::MlpDown => Some(Q5),
        TensorRole::ExpertDown => Some(if has_wider_down(site) { Q6 } else { Q5 }),
        _ if site.has_experts => Some(W8),
        TensorRole::AttnK => Some(Q4),
        TensorRole::GdnQkv if site.rows == RowPart::QueryKey => Some(Q4),
        _ => Some(Q5),
    }
}

fn has_wider_down(site: &Site) -> bool {
    match site.place {
        Part::Layer(i) => site.layers.checked_sub(i).is_some_and(|from_end| WIDER_DOWN.contains(&from_end)),
        _ => false,
    }
}
