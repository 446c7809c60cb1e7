//! The bridge from NVFP4 to FP8, for devices whose matrix units take E4M3 but not E2M1.
//!
//! An NVFP4 weight is `u · m`, where `u = e2m1 · e4m3` has at most six significant bits and `m` is the matrix's multiplier
//! (`1/g` or `g`). [`BridgeScale::Pow2Row`] stores `e4m3(u / 2^k)` with the row scale `2^k · m`, where `k` is the smallest
//! integer for which the row fits, `max|u| ≤ 448 · 2^k`. Dividing by a power of two changes no significant bit, so an E2M1
//! code of 0.5, 1, 2 or 4 lands on an E4M3 number exactly, and so does one of 1.5, 3 or 6 under three of the eight
//! significands that an E4M3 scale can have.
//!
//! Under two others the product lies exactly between two E4M3 numbers. These ties go toward zero: weights grow rarer with
//! their magnitude, so the ones that NVFP4 gathered in a code lie below it on average, above all those of the code 6, which
//! stands for 5 and more. Over the projections of the trained demo model (relative L2 distances; negative log-likelihood of
//! the first 4,096 held-out tokens):
//!
//! | weights | distance to NVFP4 | distance to BF16 | NLL |
//! |---|---|---|---|
//! | NVFP4 | 0 | 0.0951 | 1.6165 |
//! | ties toward zero | 0.0216 | 0.0950 | 1.6006 |
//! | ties to even | 0.0216 | 0.0969 | 1.6169 |
//! | ties away from zero | 0.0216 | 0.0990 | 1.6291 |
//!
//! So the rule costs nothing by the conversion's own error and is the nearest to the weights that NVFP4 was made from. With
//! block scales each of the four distances is the same to four digits, since few weights of a trained model are that small.
//!
//! Error of the conversion, for a weight `w` and its image `ŵ`, with the row (or block) scale `s`:
//!
//! | scale | bound | mean on a trained model |
//! |---|---|---|
//! | 2^k · m | `|ŵ − w| ≤ max(|w| / 21, s / 1024)` | 0.8 % |
//! | max of the row / 448 | `|ŵ − w| ≤ max(|w| / 17, s / 1024)` | 2.4 % |
//!
//! plus a few roundings of f32. 1/21 is the worst product that falls between two E4M3 numbers (a significand of 21 between
//! 20 and 22); 1/17 is the general half step; `s / 1024` is half the step of the E4M3 subnormals. Blocks have smaller maxima than
//! rows, hence fewer subnormals.
//!
//! Of all exponents this `k` has the least squared error, so none is searched for. A larger one leaves the normal numbers as
//! they are and makes subnormals coarser. A smaller one saturates: the maximum is above `224 · 2^k` and has six significant bits,
//! so it is `228 · 2^k` or more, and the error of saturating it is at least `4 · 2^k`; what can be gained is at most the
//! `2^k / 1024` that a subnormal may be off, for each weight, which outweighs it squared only beyond 2²⁴ weights in a row.

use ninfer_core::format::{FP8_BLOCK, NVFP4_GROUP};
use ninfer_core::{PackedData, PackedRef, WeightFormat};

use crate::codes::{E4M3_MAX, decode_e2m1_scaled, decode_e4m3, encode_e4m3};
use crate::encode::largest;
use crate::nvfp4::multiplier;
use crate::{Error, Fp8ScaleVec, PackedMatrix, PackedParts, Result, encode_ref};

/// How the FP8 scales are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BridgeScale {
    /// One scale per row: a power of two times the matrix's multiplier.
    #[default]
    Pow2Row,
    /// One scale per row: the row's maximum / 448.
    AmaxRow,
    /// One scale per 128×128 block: a power of two times the matrix's multiplier.
    Pow2Block,
}

/// Converts an NVFP4 matrix to FP8.
///
/// # Errors
/// [`Error::Conversion`] if the matrix is not NVFP4; [`Error::NonFinite`], [`Error::Code`] or [`Error::Scale`] if it was never
/// checked and holds scales that [`PackedMatrix::new`] refuses.
///
/// ```
/// use ninfer_core::WeightFormat;
/// use ninfer_quant::bridge::{BridgeScale, bridge};
/// use ninfer_quant::encode;
/// let w: Vec<f32> = (0..64).map(|i| (i as f32 - 32.0) / 64.0).collect();
/// let nvfp4 = encode(WeightFormat::Nvfp4, 2, 32, &w)?;
/// let fp8 = bridge(&nvfp4.as_ref(), BridgeScale::Pow2Row)?;
/// assert_eq!(fp8.format(), WeightFormat::Fp8Row);
/// for (a, b) in fp8.dequantize().iter().zip(nvfp4.dequantize()) {
///     assert!((a - b).abs() <= b.abs() / 20.9);
/// }
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn bridge(m: &PackedRef<'_>, scale: BridgeScale) -> Result<PackedMatrix> {
    let PackedData::Nvfp4 { codes, scales, global } = m.data() else {
        return Err(Error::Conversion { conversion: "the bridge from NVFP4 to FP8", stored: m.format() });
    };
    let (rows, cols) = (m.rows(), m.cols());
    if scale == BridgeScale::AmaxRow {
        return encode_ref(WeightFormat::Fp8Row, m);
    }
    let m = multiplier(global);
    let block = scale == BridgeScale::Pow2Block;
    let (high, wide) = if block { (FP8_BLOCK, FP8_BLOCK) } else { (1, cols.max(1)) };
    let tiles = cols.div_ceil(wide);
    let (row_codes, row_scales) =
        (codes.chunks_exact(cols.max(2) / 2), scales.chunks_exact((cols / NVFP4_GROUP).max(1)));
    let units = row_codes.zip(row_scales).map(|(codes, scales)| row_units(codes, scales));
    let mut amax = vec![0.0f32; rows.div_ceil(high) * tiles];
    for (row, u) in units.clone().enumerate() {
        for (a, u) in amax[row / high * tiles..].iter_mut().zip(u.chunks(wide)) {
            *a = a.max(largest(u));
        }
    }
    let powers: Vec<f32> = amax.iter().map(|&a| power(a, m)).collect();
    let mut out = Vec::with_capacity(rows * cols);
    for (row, u) in units.enumerate() {
        for (u, p) in u.chunks(wide).zip(&powers[row / high * tiles..]) {
            out.extend(u.iter().map(|u| encode_e4m3(toward_zero(u / p))));
        }
    }
    let scales = powers.iter().map(|p| p * m).collect();
    let scales = if block { Fp8ScaleVec::Block(scales) } else { Fp8ScaleVec::Row(scales) };
    PackedMatrix::new(rows, cols, PackedParts::Fp8 { codes: out, scales })
}

/// `e2m1 · e4m3` of one row, exact.
fn row_units(codes: &[u8], scales: &[u8]) -> Vec<f32> {
    let mut u = vec![0.0; codes.len() * 2];
    let groups = u.chunks_exact_mut(NVFP4_GROUP).zip(codes.chunks_exact(NVFP4_GROUP / 2));
    for ((u, codes), &s) in groups.zip(scales) {
        decode_e2m1_scaled(codes, decode_e4m3(s), u);
    }
    u
}

/// The next f32 toward zero: one in the last place decides ties and nothing else, for these numbers have six bits.
fn toward_zero(x: f32) -> f32 {
    if x == 0.0 { x } else { f32::from_bits(x.to_bits() - 1) }
}

/// The smallest `2^k` with `amax ≤ 448 · 2^k` for which `2^k · multiplier` is a normal number; 1 for zeros.
fn power(amax: f32, multiplier: f32) -> f32 {
    if amax == 0.0 {
        return 1.0;
    }
    // amax is 0.5 · 2⁻⁹ at least and 6 · 448 at most.
    let mut p = 8.0f32;
    while amax <= E4M3_MAX * (p / 2.0) && p / 2.0 * multiplier >= f32::MIN_POSITIVE {
        p /= 2.0;
    }
    p
}
