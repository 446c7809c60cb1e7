//! Rotary frequencies.

use std::f64::consts::PI;

/// Rotary embedding of the first [`Rope::rotary_dim`] features of every query and key head.
///
/// Feature `f` is paired with feature `f + rotary_dim / 2`; features from `rotary_dim` on pass through.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Rope {
    /// Base of the frequencies, above 1.
    pub theta: f64,
    /// Rotated features R of a head; even and at least 2.
    pub rotary_dim: usize,
    /// How frequencies are stretched for long contexts.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// YaRN: low frequencies are divided by `factor`, high ones kept, those between blended.
    #[non_exhaustive]
    Yarn {
        /// Ratio of the extended to the trained context, at least 1.
        factor: f64,
        /// Positions the model was trained on.
        original_positions: usize,
        /// Factor on both cosine and sine.
        attention_factor: f64,
        /// Rotations over the trained context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations over the trained context below which a frequency is divided by `factor`.
        beta_slow: f64,
        /// Whether the borders between the three ranges are rounded outwards to whole frequencies.
        truncate: bool,
    },
}

impl Rope {
    /// Rotary embedding without scaling.
    #[must_use]
    pub fn new(theta: f64, rotary_dim: usize) -> Self {
        Self { theta, rotary_dim, scaling: RopeScaling::None }
    }
}

/// The attention factor YaRN recommends: `0.1 · mscale · ln(factor) + 1`, and 1 where nothing is stretched.
pub(crate) fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// Inverse frequencies `[rotary_dim / 2]` and the magnitude of cosine and sine.
///
/// The angle of position `p` and feature pair `f` is `p as f32 * inverse[f]`, a product in f32, and the rotation is by
/// `magnitude · cos`, `magnitude · sin` of it. Without scaling `inverse[f] = 1 / theta^(2f / R)` and the magnitude is 1.
///
/// Every step is rounded to f32 as the published implementation does (transformers, `compute_default_rope_parameters` and
/// `_compute_yarn_parameters`): at position 262143 one unit in the last place of an inverse frequency turns the angle by
/// up to 0.015.
///
/// ```
/// use ninfer_models::rope::{Rope, inverse_frequencies};
///
/// let (inverse, magnitude) = inverse_frequencies(&Rope::new(1e7, 64));
/// assert_eq!((inverse.len(), inverse[0], magnitude), (32, 1.0, 1.0));
/// ```
#[must_use]
pub fn inverse_frequencies(rope: &Rope) -> (Vec<f32>, f32) {
    let base = rope.theta as f32;
    let pairs = rope.rotary_dim / 2;
    let periods = (0..pairs).map(|f| {
        let exponent = (2 * f) as f32 / rope.rotary_dim as f32;
        // Rounding the f64 power once gives the correctly rounded f32 power.
        f64::from(base).powf(f64::from(exponent)) as f32
    });
    match rope.scaling {
        RopeScaling::None => (periods.map(|p| 1.0 / p).collect(), 1.0),
        RopeScaling::Yarn { factor, original_positions, attention_factor, beta_fast, beta_slow, truncate } => {
            let border = |rotations: f64| {
                let wave = original_positions as f64 / (rotations * 2.0 * PI);
                rope.rotary_dim as f64 * wave.ln() / (2.0 * rope.theta.ln())
            };
            let (mut low, mut high) = (border(beta_fast), border(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            low = low.max(0.0);
            high = high.min(rope.rotary_dim as f64 - 1.0);
            if low == high {
                high += 0.001;
            }
            let (low, width) = (low as f32, (high - low) as f32);
            let inverse = periods.enumerate().map(|(f, period)| {
                let keep = 1.0 - ((f as f32 - low) / width).clamp(0.0, 1.0);
                let stretched = 1.0 / (factor as f32 * period);
                stretched * (1.0 - keep) + (1.0 / period) * keep
            });
            (inverse.collect(), attention_factor as f32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_scaling_the_magnitude_is_one() {
        let (inverse, magnitude) = inverse_frequencies(&Rope::new(1e4, 8));
        assert_eq!(magnitude, 1.0);
        for (f, x) in inverse.iter().enumerate() {
            let exact = 1e4f64.powf(-(2.0 * f as f64) / 8.0);
            assert!((f64::from(*x) - exact).abs() <= exact * 1.2e-7, "{f}: {x} {exact}"); // two roundings to f32
        }
    }

    #[test]
    fn yarn_keeps_high_and_divides_low_frequencies() {
        let plain = Rope::new(1e7, 64);
        let scaling = RopeScaling::Yarn {
            factor: 4.0,
            original_positions: 262_144,
            attention_factor: yarn_mscale(4.0, 1.0),
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
        };
        let (before, _) = inverse_frequencies(&plain);
        let (after, magnitude) = inverse_frequencies(&Rope { scaling, ..plain });
        assert_eq!((after[0], after[31]), (before[0], before[31] / 4.0));
        assert!(before.iter().zip(&after).all(|(b, a)| *a <= *b && *a >= b / 4.0));
        assert!((f64::from(magnitude) - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-7);
        assert_eq!(yarn_mscale(1.0, 1.0), 1.0);
    }
}
