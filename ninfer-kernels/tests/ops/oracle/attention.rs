//! Rotation and attention.

use super::{dot, sigmoid};

/// Rotates pairs `(f, f + R/2)` of one head. The angle is the f32 product of position and frequency.
pub fn rotate(head: &mut [f64], position: u32, frequencies: &[f32], magnitude: f32) {
    let half = frequencies.len();
    for (f, frequency) in frequencies.iter().enumerate() {
        let angle = f64::from(position as f32 * frequency);
        let (cos, sin) = (angle.cos() * f64::from(magnitude), angle.sin() * f64::from(magnitude));
        let (a, b) = (head[f], head[f + half]);
        head[f] = a * cos - b * sin;
        head[f + half] = b * cos + a * sin;
    }
}

/// `softmax(q·Kᵀ / √D) V ⊙ sigmoid(gate)` for one query head; zeros if there is no key.
pub fn attend(query: &[f64], keys: &[&[f64]], values: &[&[f64]], gate: &[f64]) -> Vec<f64> {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let scores: Vec<f64> = keys.iter().map(|k| dot(query, k) * scale).collect();
    let max = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; query.len()];
    for (w, v) in weights.iter().zip(values) {
        for (o, v) in out.iter_mut().zip(*v) {
            *o += w / sum * v;
        }
    }
    out.iter().zip(gate).map(|(o, g)| o * sigmoid(*g)).collect()
}
