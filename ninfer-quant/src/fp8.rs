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

use crate::codes::{E4M3_MAX, encode_e4m3};
use crate::encode::{block_amax, check_input, largest};
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

fn push_codes(codes: &mut Vec<u8>, w: &[f32], s: f32) {
    codes.extend(w.iter().map(|x| encode_e4m3(x / s)));
}

fn finish(rows: usize, cols: usize, codes: Vec<u8>, scales: Fp8ScaleVec) -> PackedMatrix {
    PackedMatrix::trusted(rows, cols, PackedParts::Fp8 { codes, scales })
}

/// Encodes a row-major `[rows, cols]` matrix with one scale.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length), [`Error::NonFinite`](crate::Error::NonFinite).
pub fn encode_tensor(rows: usize, cols: usize, w: &[f32]) -> Result<PackedMatrix> {
    check_input(WeightFormat::Fp8Tensor, rows, cols, w)?;
    let s = scale(largest(w));
    let mut codes = Vec::with_capacity(w.len());
    push_codes(&mut codes, w, s);
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
    check_input(WeightFormat::Fp8Row, rows, cols, w)?;
    let (mut codes, mut scales) = (Vec::with_capacity(w.len()), Vec::with_capacity(rows));
    for row in 0..rows {
        let x = &w[row * cols..(row + 1) * cols];
        let s = scale(largest(x));
        push_codes(&mut codes, x, s);
        scales.push(s);
    }
    Ok(finish(rows, cols, codes, Fp8ScaleVec::Row(scales)))
}

/// Encodes a row-major `[rows, cols]` matrix with one scale per 128×128 block; blocks at the edges are partial.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length), [`Error::NonFinite`](crate::Error::NonFinite).
pub fn encode_blocks(rows: usize, cols: usize, w: &[f32]) -> Result<PackedMatrix> {
    check_input(WeightFormat::Fp8Block, rows, cols, w)?;
    let blocks = cols.div_ceil(FP8_BLOCK);
    let scales: Vec<f32> = block_amax(rows, cols, w).into_iter().map(bf16_scale).collect();
    let mut codes = Vec::with_capacity(w.len());
    for row in 0..rows {
        let scales = &scales[row / FP8_BLOCK * blocks..][..blocks];
        for (x, &s) in w[row * cols..(row + 1) * cols].chunks(FP8_BLOCK).zip(scales) {
            push_codes(&mut codes, x, s);
        }
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
