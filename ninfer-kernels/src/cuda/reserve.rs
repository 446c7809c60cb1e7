//! Workspace of the largest calls, set aside before the first of them.

use ninfer_core::backend::Reservation;
use ninfer_core::shape::FfnShape;

use super::Cuda;
use super::attention::split_bytes;

/// Bytes that the operations of a model take at most; an upper estimate, since a queue grows where it falls short.
pub(super) fn bytes(backend: &Cuda, need: &Reservation) -> usize {
    let s = &need.shape;
    let rows = need.step_rows.max(need.prefill_rows);
    let widest = match s.ffn {
        FfnShape::Dense { intermediate } => intermediate,
        FfnShape::Moe { width, shared_width, .. } => width.max(shared_width),
        _ => 0,
    }
    .max(2 * s.hidden)
    .max(s.gdn.values())
    .max(s.attention.query_heads * s.attention.head_dim);
    // Staged inputs in bf16 with a scale a row.
    let staged = rows * (widest.next_multiple_of(64) * 2 + 4);
    let experts = match s.ffn {
        FfnShape::Moe { top_k, width, shared_width, experts } => {
            rows * top_k * (2 * s.hidden + width) * 4 + rows * (shared_width + s.hidden) * 4 + rows * experts * 8
        }
        _ => 0,
    };
    // Partial attention results: one of f32 for each leaf of 256 keys.
    let leaves = need.max_context.div_ceil(256) + 1;
    let partial = need.step_rows * leaves * s.attention.query_heads * (s.attention.head_dim + 2) * 4
        + split_bytes(backend, s.attention.head_dim);
    let gdn = rows * (s.gdn.channels() * 4 + s.gdn.values() * 4 + s.gdn.value_heads * 8);
    let head = need.step_rows * s.vocab * 4;
    staged + experts.max(partial).max(gdn).max(head) + (1 << 20)
}
