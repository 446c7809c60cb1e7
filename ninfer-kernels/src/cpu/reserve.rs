//! Host memory of the largest calls, set aside before the first of them.

use ninfer_core::backend::Reservation;
use ninfer_core::sampling::{self, SamplingParams};
use ninfer_core::segment::PAGE_TOKENS;
use ninfer_core::shape::FfnShape;
use ninfer_core::{Error, Result};

use super::queue::Scratch;
use super::{Cpu, attention, matmul};

/// Grows the scratch of a queue, and that of every thread of the pool, to what the calls of a model need at most.
pub(super) fn reserve(backend: &Cpu, scratch: &mut Scratch, need: &Reservation) -> Result<()> {
    let s = &need.shape;
    let rows = need.step_rows.max(need.prefill_rows);
    let top_k = if let FfnShape::Moe { top_k, .. } = s.ffn { top_k } else { 0 };
    let pairs = product([rows, top_k]);
    scratch.floats.get([floats(need)])?;
    grow(&mut scratch.indices, need.max_context.div_ceil(PAGE_TOKENS).max(pairs))?;
    grow(&mut scratch.places, pairs)?;
    if backend.takes_codes() {
        let experts = if let FfnShape::Moe { width, .. } = s.ffn { width.max(s.hidden) } else { 0 };
        let values = product([rows, widest(need)]).max(product([pairs, experts]));
        scratch.codes.reserve(values, rows.max(pairs))?;
    }
    // A draw from a flat distribution uses all the memory that any draw can.
    let flat = SamplingParams::greedy().with_temperature(1.0).with_top_p(0.5);
    let mut logits = Vec::new();
    grow(&mut logits, s.vocab)?;
    logits.resize(s.vocab, 0.0);
    let _ = sampling::choose(&logits, s.vocab, &flat, &|_| 0, 0, &mut scratch.choose);

    let scores = need.max_context.saturating_add(s.attention.head_dim);
    let columns = if need.prefill_rows > 0 { widest(need) } else { 0 };
    backend.on_each_thread(|| {
        attention::reserve(scores)?;
        matmul::reserve(columns)
    })
}

/// f32 values of the operation that needs most: what each of them asks of the scratch.
fn floats(need: &Reservation) -> usize {
    let s = &need.shape;
    let (h, g, step) = (s.hidden, &s.gdn, need.step_rows);
    let rows = step.max(need.prefill_rows);
    let stem = sum([product([rows, 2, h]), h]);
    let rotation = product([2, s.attention.head_dim]);
    let gdn = sum([
        product([rows, sum([g.channels(), product([2, g.value_heads])])]),
        product([step, g.keys()]),
        product([g.values(), sum([g.key_dim, 2])]),
    ]);
    let ffn = match s.ffn {
        FfnShape::Dense { intermediate } => product([rows, sum([h, product([2, intermediate])])]),
        FfnShape::Moe { experts, top_k, width, shared_width } => {
            let routed = product([top_k, sum([product([2, h]), product([3, width])])]);
            let shared = sum([product([3, shared_width]), h]);
            product([rows, sum([routed, shared]).max(sum([experts, 1]))])
        }
        _ => 0,
    };
    [stem, rotation, gdn, ffn, product([step, s.vocab])].into_iter().max().unwrap_or_default()
}

/// Columns of the widest matrix.
fn widest(need: &Reservation) -> usize {
    let s = &need.shape;
    let ffn = match s.ffn {
        FfnShape::Dense { intermediate } => intermediate,
        FfnShape::Moe { width, shared_width, .. } => width.max(shared_width),
        _ => 0,
    };
    let mixer = product([s.attention.query_heads, s.attention.head_dim]).max(s.gdn.values());
    product([2, s.hidden]).max(mixer).max(ffn)
}

fn product<const N: usize>(factors: [usize; N]) -> usize {
    factors.into_iter().fold(1, usize::saturating_mul)
}

fn sum<const N: usize>(terms: [usize; N]) -> usize {
    terms.into_iter().fold(0, usize::saturating_add)
}

/// Makes room for `len` elements, or reports that there is none.
pub(super) fn grow<T>(list: &mut Vec<T>, len: usize) -> Result<()> {
    list.try_reserve_exact(len.saturating_sub(list.len())).map_err(|_| Error::OutOfMemory {
        what: "workspace of the CPU backend".to_owned(),
        requested: (len as u64).saturating_mul(size_of::<T>() as u64),
        available: 0,
    })
}
