//! Mixture of experts.

use ninfer_core::backend::DeviceWeight;
use ninfer_core::ops::{Experts, Route};
use ninfer_core::segment::Profile;
use ninfer_core::{Error, Result};

use super::Cpu;
use super::buffer::Access;
use super::linear::combine;
use super::matmul::{Input, Output, dot_rows, matmul};
use super::norm::{normalise, sigmoid};
use super::parallel::split;
use super::queue::Scratch;
use super::rows::Rows;
use super::simd::Isa;

pub(super) fn route(op: &Route<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("route");
    let mut rows = Rows::read(&access, "route", &op.batch)?;
    // A choice between experts must not depend on how a prompt is cut; the dot class never does.
    rows.profile = Profile::Step;
    let (h, k, experts) = (op.input.cols(), op.experts.cols(), op.router.rows());
    let input: &[f32] = access.read("input", &op.input)?;
    let gain = access.read("gain", &op.norm.gain)?;
    let hidden: &mut [f32] = access.write("hidden", &op.hidden)?;
    let chosen: &mut [i32] = access.write("experts", &op.experts)?;
    let weights: &mut [f32] = access.write("weights", &op.weights)?;
    for t in 0..rows.count {
        let row = &input[t * op.input.stride()..][..h];
        normalise(isa, row, gain, op.norm.eps, &mut hidden[t * op.hidden.stride()..][..h]);
    }
    let Scratch { floats, codes, .. } = scratch;
    let [logits, shared] = floats.get([rows.count * experts, rows.count])?;
    let x = Input::new(hidden, op.hidden.stride());
    matmul(isa, &rows, x, &op.router, &Output::set(logits, experts), codes)?;
    matmul(isa, &rows, x, &op.shared_gate, &Output::set(shared, 1), codes)?;
    for t in 0..rows.count {
        let ids = &mut chosen[t * op.experts.stride()..][..k];
        let weights = &mut weights[t * op.weights.stride()..][..k + 1];
        choose_experts(&mut logits[t * experts..][..experts], ids, &mut weights[..k], op.renormalise);
        weights[k] = sigmoid(shared[t]);
    }
    Ok(())
}

/// Softmax over all logits, then the largest `ids.len()`; ties take the lower id.
///
/// Where the softmax is not a number (a logit is NaN or +∞, or all are −∞) the choice is 0, 1, … with weights of NaN.
fn choose_experts(logits: &mut [f32], ids: &mut [i32], weights: &mut [f32], renormalise: bool) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
    let mut sum = 0.0;
    for x in logits.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    if sum.is_nan() {
        ids.iter_mut().zip(0..).for_each(|(id, i)| *id = i);
        weights.fill(f32::NAN);
        return;
    }
    for (id, weight) in ids.iter_mut().zip(weights.iter_mut()) {
        let mut best = 0;
        for (i, p) in logits.iter().enumerate() {
            if *p > logits[best] {
                best = i;
            }
        }
        *id = best as i32;
        *weight = logits[best] / sum;
        logits[best] = -1.0;
    }
    if renormalise {
        let kept: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= kept);
    }
}

pub(super) fn experts(op: &Experts<Cpu>, isa: Isa, scratch: &mut Scratch) -> Result<()> {
    let access = Access::new("experts");
    let rows = Rows::read(&access, "experts", &op.batch)?;
    let (t, h, k) = (rows.count, op.hidden.cols(), op.experts.cols());
    let (width, shared_width, count) = (op.down.cols(), op.shared_down.cols(), op.down.rows() / h);
    let hidden: &[f32] = access.read("hidden", &op.hidden)?;
    let chosen: &[i32] = access.read("experts", &op.experts)?;
    let weights: &[f32] = access.read("weights", &op.weights)?;
    let residual: &mut [f32] = access.write("residual", &op.residual)?;
    let x = Input::new(hidden, op.hidden.stride());

    // Token–choice pairs sorted by expert, padding rows left out; each pair has its own result row.
    let Scratch { floats, codes, indices: order, places: place, .. } = scratch;
    order.clear();
    for segment in rows.segments() {
        for token in segment.row..segment.row + segment.len {
            for j in 0..k {
                let expert = chosen[token as usize * op.experts.stride() + j];
                if usize::try_from(expert).map_or(true, |e| e >= count) {
                    return Err(Error::OutOfRange {
                        what: "expert",
                        got: expert.to_string(),
                        legal: format!("0 to {}", count.saturating_sub(1)),
                    });
                }
                order.push(token * k as u32 + j as u32);
            }
        }
    }
    let expert_of = |pair: u32| chosen[pair as usize / k * op.experts.stride() + pair as usize % k] as usize;
    order.sort_unstable_by_key(|&pair| (expert_of(pair), pair));
    let (order, pairs) = (&*order, order.len());
    place.clear();
    place.resize(t * k, 0);
    for (i, &pair) in order.iter().enumerate() {
        place[pair as usize] = i;
    }

    let [gathered, both, mid, out, shared_both, shared_mid, shared_out] = floats.get([
        pairs * h,
        pairs * 2 * width,
        pairs * width,
        pairs * h,
        t * 2 * shared_width,
        t * shared_width,
        t * h,
    ])?;
    for (i, &pair) in order.iter().enumerate() {
        let token = pair as usize / k;
        gathered[i * h..][..h].copy_from_slice(&hidden[token * op.hidden.stride()..][..h]);
    }
    let groups = Groups { order, expert_of: &expert_of };
    grouped(isa, &groups, &op.gate_up, 2 * width, codes.of(isa, &op.gate_up, pairs, Input::new(gathered, h))?, both);
    for i in 0..pairs {
        combine(&both[i * 2 * width..][..2 * width], &mut mid[i * width..][..width]);
    }
    grouped(isa, &groups, &op.down, h, codes.of(isa, &op.down, pairs, Input::new(mid, width))?, out);

    matmul(isa, &rows, x, &op.shared_gate_up, &Output::set(shared_both, 2 * shared_width), codes)?;
    for i in 0..t {
        combine(
            &shared_both[i * 2 * shared_width..][..2 * shared_width],
            &mut shared_mid[i * shared_width..][..shared_width],
        );
    }
    let x = Input::new(shared_mid, shared_width);
    matmul(isa, &rows, x, &op.shared_down, &Output::set(shared_out, h), codes)?;

    // Each token adds its results in the order of its choices, the shared expert last.
    let stride = op.residual.stride();
    for segment in rows.segments() {
        for token in segment.row as usize..(segment.row + segment.len) as usize {
            let r = &mut residual[token * stride..][..h];
            let w = &weights[token * op.weights.stride()..][..k + 1];
            for (c, r) in r.iter_mut().enumerate() {
                let mut sum = 0.0;
                for j in 0..k {
                    sum += w[j] * out[place[token * k + j] * h + c];
                }
                *r += sum + w[k] * shared_out[token * h + c];
            }
        }
    }
    Ok(())
}

struct Groups<'a> {
    order: &'a [u32],
    expert_of: &'a (dyn Fn(u32) -> usize + Sync),
}

/// `y_i = x_i · W_{e_i}ᵀ` for sorted pairs, in the dot class: a pair's result never depends on who shares its expert.
fn grouped(isa: Isa, groups: &Groups<'_>, stack: &super::CpuWeight, n: usize, x: Input<'_>, y: &mut [f32]) {
    let pairs = groups.order.len();
    let output = Output::set(y, n);
    let mut start = 0;
    let k = stack.cols();
    while start < pairs {
        let expert = (groups.expert_of)(groups.order[start]);
        let mut end = start + 1;
        while end < pairs && (groups.expert_of)(groups.order[end]) == expert {
            end += 1;
        }
        let tokens = start..end;
        split(n, 4, n * k * tokens.len(), &|range| {
            let first = expert * n;
            dot_rows(isa, stack, first + range.start..first + range.end, first, x, tokens.clone(), &output);
        });
        start = end;
    }
}
