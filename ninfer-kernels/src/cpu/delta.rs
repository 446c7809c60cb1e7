//! The arithmetic of the gated delta rule on one head, shared by prompt chunks, steps and folds.

use ninfer_core::ops::OutputGate;

use super::norm::sigmoid;
use super::simd::{Lanes, dispatch, dot};

/// `log(1 + eˣ)`; the identity above 20, where the difference is below f32 resolution.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// `g = −exp(A_log) · softplus(a + dt_bias)` and `β = sigmoid(b)` per value head.
///
/// `exp(A_log)` is clamped to the largest finite value, so that it never meets a zero softplus as infinity; −inf gives no
/// decay.
pub(super) fn gates(a: &[f32], b: &[f32], a_log: &[f32], dt_bias: &[f32], (g, beta): (&mut [f32], &mut [f32])) {
    for h in 0..g.len() {
        g[h] = -a_log[h].exp().min(f32::MAX) * softplus(a[h] + dt_bias[h]);
        beta[h] = sigmoid(b[h]);
    }
}

dispatch! {
    /// `x ← x · rsqrt(Σx² + eps) · scale`.
    pub(super) fn l2_normalise(x: &mut [f32], eps: f32, scale: f32) = l2_normalise_body
}

#[inline(always)]
fn l2_normalise_body<L: Lanes>(x: &mut [f32], eps: f32, scale: f32) {
    let factor = scale / (dot::<L>(x, x) + eps).sqrt();
    x.iter_mut().for_each(|x| *x *= factor);
}

dispatch! {
    /// One token: `S ← exp(g) S; u = β (v − Sᵀk); S ← S + k uᵀ`, and with a query `o = Sᵀ q`.
    ///
    /// `s` is `[dk, dv]`, `gates` is `[g, β]`, `u` holds `dv` values of scratch. Sums over `dk` run in ascending order. The state
    /// is the same bits with or without a query.
    pub(super) fn delta_step(
        s: &mut [f32],
        k: &[f32],
        v: &[f32],
        gates: [f32; 2],
        u: &mut [f32],
        read: Option<(&[f32], &mut [f32])>,
    ) = delta_step_body
}

#[inline(always)]
fn delta_step_body<L: Lanes>(
    s: &mut [f32],
    k: &[f32],
    v: &[f32],
    [g, beta]: [f32; 2],
    u: &mut [f32],
    read: Option<(&[f32], &mut [f32])>,
) {
    let decay = g.exp();
    let width = v.len();
    u.fill(0.0);
    for (row, k) in s.chunks_exact_mut(width).zip(k) {
        for (s, u) in row.iter_mut().zip(u.iter_mut()) {
            *s *= decay;
            *u = L::scalar(*s, *k, *u);
        }
    }
    for (u, v) in u.iter_mut().zip(v) {
        *u = beta * (v - *u);
    }
    if let Some((q, out)) = read {
        out.fill(0.0);
        for ((row, k), q) in s.chunks_exact_mut(width).zip(k).zip(q) {
            for ((s, u), o) in row.iter_mut().zip(u.iter()).zip(out.iter_mut()) {
                *s = L::scalar(*k, *u, *s);
                *o = L::scalar(*s, *q, *o);
            }
        }
    } else {
        for (row, k) in s.chunks_exact_mut(width).zip(k) {
            for (s, u) in row.iter_mut().zip(u.iter()) {
                *s = L::scalar(*k, *u, *s);
            }
        }
    }
}

dispatch! {
    /// `o ← o · rsqrt(mean(o²) + eps) · gain · act(z)` over one head.
    pub(super) fn gated_norm(o: &mut [f32], z: &[f32], gain: &[f32], eps: f32, gate: OutputGate) = gated_norm_body
}

#[inline(always)]
fn gated_norm_body<L: Lanes>(o: &mut [f32], z: &[f32], gain: &[f32], eps: f32, gate: OutputGate) {
    let scale = 1.0 / (dot::<L>(o, o) / o.len() as f32 + eps).sqrt();
    for ((o, z), gain) in o.iter_mut().zip(z).zip(gain) {
        let act = match gate {
            OutputGate::Sigmoid => sigmoid(*z),
            _ => z * sigmoid(*z),
        };
        *o = *o * scale * gain * act;
    }
}

#[cfg(test)]
mod tests;
