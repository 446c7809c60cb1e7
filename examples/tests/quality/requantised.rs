//! Weights replaced by what another encoder makes of them, as the reference did: in f32, each matrix by itself.

use ninfer_core::WeightFormat;
use ninfer_kernels::cpu::Cpu;
use ninfer_models::qwen35::WeightSource;
use ninfer_models::weights::{ExpertPart, LayerRef, VectorRole, WeightTable};
use ninfer_models::{Config, Qwen35, Recipe, Result};
use ninfer_quant::codes::{decode_e2m1, decode_e4m3, decode_f16, encode_e2m1, encode_e4m3, encode_f16};
use ninfer_quant::{PackedMatrix, TensorRole, encode};

use crate::reference::table;

/// Makes of a row-major matrix with `cols` columns the values that a format would hold.
pub(crate) type Encoder = fn(cols: usize, w: &[f32]) -> Vec<f32>;

struct Requantised<'a> {
    table: &'a WeightTable,
    encoder: Encoder,
}

impl Requantised<'_> {
    fn apply(&self, m: &PackedMatrix) -> PackedMatrix {
        let values = (self.encoder)(m.cols(), &m.dequantize());
        encode(WeightFormat::F32, m.rows(), m.cols(), &values).unwrap()
    }
}

impl WeightSource for Requantised<'_> {
    fn config(&self) -> &Config {
        self.table.config()
    }

    fn has_mtp(&self) -> bool {
        false
    }

    fn has_head(&self) -> bool {
        !self.table.shares_head()
    }

    fn matrix(&self, layer: LayerRef, role: TensorRole) -> Result<PackedMatrix> {
        let m = self.table.matrix(layer, role, &Recipe::Keep)?;
        Ok(if role.is_body_projection() { self.apply(&m) } else { m })
    }

    fn experts(&self, layer: LayerRef, part: ExpertPart) -> Result<Vec<PackedMatrix>> {
        Ok(self.table.experts(layer, part, &Recipe::Keep)?.iter().map(|m| self.apply(m)).collect())
    }

    fn vector(&self, layer: LayerRef, role: VectorRole) -> Result<Vec<f32>> {
        self.table.vector(layer, role)
    }
}

pub(crate) fn model(encoder: Encoder) -> Qwen35<Cpu> {
    Qwen35::from_source(&Cpu::new(), &Requantised { table: &table(), encoder }, &mut |_| {}).unwrap()
}

fn largest(w: &[f32]) -> f32 {
    w.iter().fold(0.0, |m, x| x.abs().max(m))
}

/// The matrix's global scale, a divisor, and its NVFP4 values.
fn nvfp4_with_scale(w: &[f32]) -> (f32, Vec<f32>) {
    let global = largest(w).recip() * 2688.0;
    let group = |group: &[f32]| -> Vec<f32> {
        let scale = match decode_e4m3(encode_e4m3(global * (largest(group) / 6.0))) {
            0.0 => 0.125,
            scale => scale,
        };
        let step = scale / global;
        group.iter().map(|x| decode_e2m1(encode_e2m1(x / step)) * step).collect()
    };
    (global, w.chunks(16).flat_map(group).collect())
}

/// NVFP4, then FP8 with row scales `2^k / global`; the rounding of the division decides ties.
pub(crate) fn bridge_pow2(cols: usize, w: &[f32]) -> Vec<f32> {
    let (global, values) = nvfp4_with_scale(w);
    let rows = |row: &[f32]| -> Vec<f32> {
        let s = (largest(row) * global / 448.0).log2().ceil().exp2() / global;
        row.iter().map(|x| decode_e4m3(encode_e4m3(x / s)) * s).collect()
    };
    values.chunks(cols).flat_map(rows).collect()
}

/// Four-bit groups of 64 columns with f16 scales; the code is the rounded quotient.
pub(crate) fn four_bit_groups(_: usize, w: &[f32]) -> Vec<f32> {
    let group = |w: &[f32]| -> Vec<f32> {
        let s = decode_f16(encode_f16(largest(w) / 7.0));
        w.iter().map(|x| if s == 0.0 { 0.0 } else { (x / s).round_ties_even().clamp(-7.0, 7.0) * s }).collect()
    };
    w.chunks(64).flat_map(group).collect()
}
