//! Gated DeltaNet, one token at a time.

use ninfer_core::ops::OutputGate;
use ninfer_core::shape::GdnShape;

use super::{dot, sigmoid, silu, softplus};

/// Parameters of a layer.
#[derive(Clone)]
pub struct Layer {
    pub dims: GdnShape,
    pub conv: Vec<f32>,
    pub a_log: Vec<f32>,
    pub dt_bias: Vec<f32>,
    pub gain: Vec<f32>,
    pub eps: f32,
    pub gate: OutputGate,
}

/// State of a sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct State {
    /// `[C, K − 1]`.
    pub window: Vec<f64>,
    /// `[Hv, dk, dv]`.
    pub matrix: Vec<f64>,
}

/// What one token puts in.
pub struct Token<'a> {
    pub qkv: &'a [f32],
    pub z: &'a [f32],
    pub a: &'a [f32],
    pub b: &'a [f32],
}

/// A result, and the factor by which the gated norm multiplied the read-out and so its error.
pub struct Result {
    pub value: f64,
    pub slope: f64,
}

impl State {
    pub fn zero(d: &GdnShape) -> Self {
        Self { window: vec![0.0; d.channels() * (d.conv_kernel - 1)], matrix: vec![0.0; d.values() * d.key_dim] }
    }
}

/// `x · rsqrt(Σx² + 1e−6)`.
pub fn l2_norm(x: &[f64]) -> Vec<f64> {
    let scale = 1.0 / (dot(x, x) + 1e-6).sqrt();
    x.iter().map(|x| x * scale).collect()
}

/// One token of the rule on one head: raw query and key, state `[dk, dv]`. Gives the read-out.
pub fn rule(s: &mut [f64], q: &[f64], k: &[f64], v: &[f64], g: f64, beta: f64) -> Vec<f64> {
    let (dk, dv) = (k.len(), v.len());
    let (q, k) = (l2_norm(q), l2_norm(k));
    s.iter_mut().for_each(|s| *s *= g.exp());
    let u: Vec<f64> = (0..dv).map(|j| beta * (v[j] - (0..dk).map(|i| s[i * dv + j] * k[i]).sum::<f64>())).collect();
    for i in 0..dk {
        for j in 0..dv {
            s[i * dv + j] += k[i] * u[j];
        }
    }
    let scale = 1.0 / (dk as f64).sqrt();
    (0..dv).map(|j| (0..dk).map(|i| s[i * dv + j] * q[i] * scale).sum()).collect()
}

impl Layer {
    /// Log decay and β of each value head.
    pub fn gates(&self, a: &[f32], b: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let g = |h: usize| {
            let rate = f64::from(self.a_log[h]).exp().min(f64::from(f32::MAX));
            -rate * softplus(f64::from(a[h]) + f64::from(self.dt_bias[h]))
        };
        ((0..a.len()).map(g).collect(), b.iter().map(|b| sigmoid(f64::from(*b))).collect())
    }

    /// Convolution and SiLU of one column; the window moves on.
    pub fn convolve(&self, window: &mut [f64], column: &[f32]) -> Vec<f64> {
        let kernel = self.dims.conv_kernel;
        let keep = kernel - 1;
        (0..column.len())
            .map(|c| {
                let window = &mut window[c * keep..(c + 1) * keep];
                let mut line = window.to_vec();
                line.push(f64::from(column[c]));
                let sum: f64 = (0..kernel).map(|j| f64::from(self.conv[c * kernel + j]) * line[j]).sum();
                window.copy_from_slice(&line[1..]);
                silu(sum)
            })
            .collect()
    }

    /// One token: `[Hv · dv]` results.
    pub fn token(&self, state: &mut State, token: &Token<'_>) -> Vec<Result> {
        let d = &self.dims;
        let (dk, dv, keys) = (d.key_dim, d.value_dim, d.keys());
        let y = self.convolve(&mut state.window, token.qkv);
        let (g, beta) = self.gates(token.a, token.b);
        let mut out = Vec::new();
        for h in 0..d.value_heads {
            let kh = h / (d.value_heads / d.key_heads);
            let q = &y[kh * dk..(kh + 1) * dk];
            let k = &y[keys + kh * dk..keys + (kh + 1) * dk];
            let v = &y[2 * keys + h * dv..2 * keys + (h + 1) * dv];
            let o = rule(&mut state.matrix[h * dk * dv..(h + 1) * dk * dv], q, k, v, g[h], beta[h]);
            let scale = 1.0 / (dot(&o, &o) / dv as f64 + f64::from(self.eps)).sqrt();
            for (j, o) in o.iter().enumerate() {
                let z = f64::from(token.z[h * dv + j]);
                let act = if self.gate == OutputGate::Sigmoid { sigmoid(z) } else { silu(z) };
                let slope = scale * f64::from(self.gain[j]) * act;
                out.push(Result { value: o * slope, slope: slope.abs() });
            }
        }
        out
    }
}
