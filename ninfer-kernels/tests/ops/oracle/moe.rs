//! Mixture of experts.

use super::{matmul, sigmoid, swiglu};

/// Chosen experts, largest first, and their weights, for one row of logits.
pub fn route(logits: &[f64], k: usize, renormalise: bool) -> (Vec<usize>, Vec<f64>) {
    let max = logits.iter().fold(f64::NEG_INFINITY, |m, x| m.max(*x));
    let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // The sort is stable, so equals keep the lower id first.
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    order.truncate(k);
    let mut weights: Vec<f64> = order.iter().map(|&e| (logits[e] - max).exp() / sum).collect();
    if renormalise {
        let kept: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= kept);
    }
    (order, weights)
}

/// `down(silu(gate x) ⊙ up x)`, gate rows first.
pub fn ffn(x: &[f64], gate_up: &[f64], down: &[f64]) -> Vec<f64> {
    let both = matmul(x, gate_up, x.len());
    let mid = swiglu(&both, both.len() / 2);
    matmul(&mid, down, mid.len())
}

/// Weights of a block.
pub struct Block {
    /// `E` matrices `[2M, H]`.
    pub gate_up: Vec<Vec<f64>>,
    /// `E` matrices `[H, M]`.
    pub down: Vec<Vec<f64>>,
    /// `[2S, H]`.
    pub shared_gate_up: Vec<f64>,
    /// `[H, S]`.
    pub shared_down: Vec<f64>,
}

impl Block {
    /// The routed and the shared part for one row, the shared one already gated.
    pub fn token(&self, x: &[f64], chosen: &[usize], weights: &[f64], shared_logit: f64) -> (Vec<f64>, Vec<f64>) {
        let mut routed = vec![0.0; x.len()];
        for (&e, w) in chosen.iter().zip(weights) {
            for (r, y) in routed.iter_mut().zip(ffn(x, &self.gate_up[e], &self.down[e])) {
                *r += w * y;
            }
        }
        let shared = ffn(x, &self.shared_gate_up, &self.shared_down);
        (routed, shared.iter().map(|y| y * sigmoid(shared_logit)).collect())
    }
}
