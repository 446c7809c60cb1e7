//! E4M3 codes with one scale for the matrix, for each row, or for each 128×128 block.
//!
//! A weight is `e4m3(code) · scale`; every scale multiplies, whatever the tensor is called in a file. Encoding:
//!
//! ```text
//! scale = max |w| / 448        over the matrix, the row or the block; block scales are rounded to BF16
//! code  = e4m3(w / scale)      in f32, with the rounded scale
//! ```
//!
//! Where the maximum is 0 the scale is 1 and the codes are 0. Where the scale would round to 0 it is the smallest positive
//! number of its type. 448 · scale is finite for every finite maximum, f32::MAX included.

use half::bf16;
use ninfer_core::WeightFormat;
use ninfer_core::format::FP8_BLOCK;

use crate::codes::E4M3_MAX;
use crate::simd::wide;
use crate::slices::f32_to_e4m3;
use crate::source::{Source, largest};
use crate::{Fp8ScaleVec, PackedMatrix, PackedParts, Result};

fn scale(amax: f32) -> f32 {
    if amax == 0.0 { 1.0 } else { (amax / E4M3_MAX).max(f32::from_bits(1)) }
}

fn bf16_scale(amax: f32) -> f32 {
    if amax == 0.0 {
        return 1.0;
    }
    bf16::from_f32(amax / E4M3_MAX).max(bf16::from_bits(1)).to_f32()
}

fn finish(rows: usize, cols: usize, codes: Vec<u8>, scales: Fp8ScaleVec) -> PackedMatrix {
    PackedMatrix::trusted(rows, cols, PackedParts::Fp8 { codes, scales })
}

/// Encodes a row-major `[rows, cols]` matrix with one scale.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length), [`Error::NonFinite`](crate::Error::NonFinite).
pub fn encode_tensor(rows: usize, cols: usize, w: &[f32]) -> Result<PackedMatrix> {
    tensor(Source::values(rows, cols, w)?)
}

pub(crate) fn tensor(mut w: Source<'_>) -> Result<PackedMatrix> {
    let mut amax = 0.0f32;
    for row in 0..w.rows() {
        amax = amax.max(w.largest_of_row(WeightFormat::Fp8Tensor, row)?);
    }
    let (rows, cols, s) = (w.rows(), w.cols(), scale(amax));
    let mut codes = vec![0; rows * cols];
    for (row, codes) in codes.chunks_exact_mut(cols.max(1)).enumerate() {
        let x = w.row(row)?;
        wide!(f32_to_e4m3(x, s, codes));
    }
    Ok(finish(rows, cols, codes, Fp8ScaleVec::Tensor(s)))
}

/// Encodes a row-major `[rows, cols]` matrix with one scale per row.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length), [`Error::NonFinite`](crate::Error::NonFinite).
///
/// ```
/// let m = ninfer_quant::fp8::encode_rows(2, 2, &[448.0, 1.0, 0.0, 0.0])?;
/// assert_eq!(m.dequantize(), [448.0, 1.0, 0.0, 0.0]);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn encode_rows(rows: usize, cols: usize, w: &[f32]) -> Result<PackedMatrix> {
    by_rows(Source::values(rows, cols, w)?)
}

pub(crate) fn by_rows(mut w: Source<'_>) -> Result<PackedMatrix> {
    let (rows, cols) = (w.rows(), w.cols());
    let (mut codes, mut scales) = (vec![0; rows * cols], vec![1.0; rows]);
    for (row, (codes, s)) in codes.chunks_exact_mut(cols.max(1)).zip(&mut scales).enumerate() {
        let (x, amax) = w.finite_row(WeightFormat::Fp8Row, row)?;
        *s = scale(amax);
        wide!(f32_to_e4m3(x, *s, codes));
    }
    Ok(finish(rows, cols, codes, Fp8ScaleVec::Row(scales)))
}

/// Encodes a row-major `[rows, cols]` matrix with one scale per 128×128 block; blocks at the edges are partial.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length), [`Error::NonFinite`](crate::Error::NonFinite).
pub fn encode_blocks(rows: usize, cols: usize, w: &[f32]) -> Result<PackedMatrix> {
    by_blocks(Source::values(rows, cols, w)?)
}

pub(crate) fn by_blocks(mut w: Source<'_>) -> Result<PackedMatrix> {
    let (rows, cols) = (w.rows(), w.cols());
    let blocks = cols.div_ceil(FP8_BLOCK);
    let mut scales = vec![0.0f32; rows.div_ceil(FP8_BLOCK) * blocks];
    for row in 0..rows {
        let (x, _) = w.finite_row(WeightFormat::Fp8Block, row)?;
        let amax = &mut scales[row / FP8_BLOCK * blocks..][..blocks];
        wide!({
            for (a, x) in amax.iter_mut().zip(x.chunks(FP8_BLOCK)) {
                *a = a.max(largest(x));
            }
        });
    }
    for s in &mut scales {
        *s = bf16_scale(*s);
    }
    let mut codes = vec![0; rows * cols];
    for (row, codes) in codes.chunks_exact_mut(cols.max(1)).enumerate() {
        let (x, scales) = (w.row(row)?, &scales[row / FP8_BLOCK * blocks..][..blocks]);
        wide!({
            for ((codes, x), &s) in codes.chunks_mut(FP8_BLOCK).zip(x.chunks(FP8_BLOCK)).zip(scales) {
                f32_to_e4m3(x, s, codes);
            }
        });
    }
    Ok(finish(rows, cols, codes, Fp8ScaleVec::Block(scales)))
}

/// Writes one scale per row where there was one for the matrix; no weight changes. Other formats come back as they are.
#[must_use]
pub fn widen_to_rows(m: PackedMatrix) -> PackedMatrix {
    let (rows, cols) = (m.rows(), m.cols());
    match m.into_parts() {
        PackedParts::Fp8 { codes, scales: Fp8ScaleVec::Tensor(s) } => {
            finish(rows, cols, codes, Fp8ScaleVec::Row(vec![s; rows]))
        }
        parts => PackedMatrix::trusted(rows, cols, parts),
    }
}
