//! The operations once more, in f64 and from their formulas, sharing nothing with the code under test.

pub mod attention;
pub mod codes;
pub mod gdn;
pub mod moe;

/// `1 / (1 + e^−x)`.
pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x · sigmoid(x)`.
pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// `log(1 + eˣ)`.
pub fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

pub fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `[T, K] · [N, K]ᵀ`.
pub fn matmul(x: &[f64], w: &[f64], k: usize) -> Vec<f64> {
    x.chunks(k).flat_map(|x| w.chunks(k).map(move |w| dot(x, w))).collect()
}

/// `Σ |x| |w|` for each element of [`matmul`]: what its rounding errors are relative to.
pub fn magnitude(x: &[f64], w: &[f64], k: usize) -> Vec<f64> {
    let (x, w): (Vec<f64>, Vec<f64>) = (x.iter().map(|x| x.abs()).collect(), w.iter().map(|x| x.abs()).collect());
    matmul(&x, &w, k)
}

/// `x · rsqrt(mean(x²) + eps) · (1 + gain)` for each row.
pub fn rms_norm(x: &[f64], gain: &[f32], eps: f32) -> Vec<f64> {
    let n = gain.len();
    x.chunks(n)
        .flat_map(|x| {
            let scale = 1.0 / (dot(x, x) / n as f64 + f64::from(eps)).sqrt();
            x.iter().zip(gain).map(move |(x, g)| x * scale * (1.0 + f64::from(*g)))
        })
        .collect()
}

/// `silu(gate) · up` for rows of gates followed by ups.
pub fn swiglu(both: &[f64], width: usize) -> Vec<f64> {
    both.chunks(2 * width).flat_map(|row| (0..width).map(|i| silu(row[i]) * row[width + i])).collect()
}
