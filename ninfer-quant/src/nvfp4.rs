//! NVFP4: E2M1 codes, one E4M3 scale per 16 columns, one f32 scale for the matrix.
//!
//! Two conventions are in use, and a matrix says which one it follows by its [`GlobalScale`]:
//!
//! | | compressed-tensors | ModelOpt |
//! |---|---|---|
//! | tensors | `weight_packed`, `weight_scale`, `weight_global_scale` `[1]` | `weight`, `weight_scale`, `weight_scale_2` `[]` |
//! | weight | `e2m1 · (e4m3 / g)` | `e2m1 · (e4m3 · g)` |
//! | `g` | `(1 / max|W|) · 2688` | `max|W| / 2688` |
//! | group scale | `e4m3(g · (max|group| / 6))`; a 0 becomes 0.125 | `e4m3(clamp(max|group| / (6 · g), 2⁻⁹, 448))`; 1 for a zero group |
//! | code | `e2m1(w / (e4m3 / g))` | `e2m1(w / (e4m3 · g))` |
//!
//! (2688 = 448 · 6.) All in f32 and in this order of operations, which gives the bytes that the two libraries write
//! (compressed-tensors 0.20.1, nvidia-modelopt 0.47.0). The second level is never folded into the E4M3 scales: that would
//! round a second time.
//!
//! `g` of an all-zero matrix is 1. Where `max|W|` is so small that `g` would overflow or vanish, `g` stays at the largest
//! or smallest normal number.

use std::hint::black_box;

use ninfer_core::format::{GlobalScale, NVFP4_GROUP};
use ninfer_core::{PackedRef, WeightFormat};

use crate::codes::{E2M1_MAX, E4M3_MAX, E4M3_MIN_POSITIVE, decode_e4m3, encode_e4m3, nearest_e2m1, nearest_e4m3};
use crate::simd::wide;
use crate::source::{Source, largest};
use crate::{Error, PackedMatrix, PackedParts, Result};

/// Which library's layout and arithmetic to follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Convention {
    /// The global scale divides.
    #[default]
    CompressedTensors,
    /// The global scale multiplies.
    ModelOpt,
}

/// The factor that a decoded group scale is multiplied with: `1/g` or `g`. Plausible weights have one of at most 1.
#[must_use]
pub fn multiplier(global: GlobalScale) -> f32 {
    global.apply(1.0)
}

fn global_scale(convention: Convention, amax: f32) -> GlobalScale {
    let range = E4M3_MAX * E2M1_MAX;
    match (convention, amax > 0.0) {
        // Not `range / amax`: dividing a number by a tensor, the library multiplies with the reciprocal. The other last
        // bit of `g` would decide ties between codes.
        (Convention::CompressedTensors, true) => GlobalScale::Divide((amax.recip() * range).min(f32::MAX)),
        (Convention::CompressedTensors, false) => GlobalScale::Divide(1.0),
        (Convention::ModelOpt, true) => GlobalScale::Multiply((amax / range).max(f32::MIN_POSITIVE)),
        (Convention::ModelOpt, false) => GlobalScale::Multiply(1.0),
    }
}

#[inline(always)]
fn group_scale(global: GlobalScale, amax: f32) -> u8 {
    match global {
        GlobalScale::Divide(g) => match nearest_e4m3(g * (amax / E2M1_MAX)) {
            0 => encode_e4m3(0.125),
            code => code,
        },
        GlobalScale::Multiply(g) => match amax / (E2M1_MAX * g) {
            0.0 => encode_e4m3(1.0),
            s => nearest_e4m3(s.clamp(E4M3_MIN_POSITIVE, E4M3_MAX)),
        },
    }
}

/// Encodes a row-major `[rows, cols]` matrix.
///
/// `amax` sets the global scale in place of the matrix's own maximum: matrices that are to be joined later (query, key
/// and value; gate and up) are encoded with the largest of their maxima and then share it.
///
/// # Errors
/// [`Error::Length`], [`Error::NonFinite`]; [`Error::Columns`] unless 16 divides `cols`; [`Error::Overflow`] if `amax` is
/// below the matrix's maximum or not finite, or the weights are within a rounding of the largest f32.
///
/// ```
/// use ninfer_quant::nvfp4::{Convention, encode};
/// let w: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) / 64.0).collect();
/// let a = encode(Convention::CompressedTensors, 2, 16, &w, None)?;
/// let b = encode(Convention::ModelOpt, 2, 16, &w, None)?;
/// let worst = a.dequantize().iter().zip(b.dequantize()).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
/// assert!(worst < 1e-7);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn encode(convention: Convention, rows: usize, cols: usize, w: &[f32], amax: Option<f32>) -> Result<PackedMatrix> {
    encode_source(convention, Source::values(rows, cols, w)?, amax)
}

/// Encodes a packed matrix again as [`encode`] does, decoding a row at a time.
///
/// # Errors
/// Those of [`encode`], and [`Error::Conversion`] for a matrix in a format this crate does not know.
pub fn encode_ref(convention: Convention, m: &PackedRef<'_>, amax: Option<f32>) -> Result<PackedMatrix> {
    encode_source(convention, Source::packed(m)?, amax)
}

pub(crate) fn encode_source(convention: Convention, mut w: Source<'_>, amax: Option<f32>) -> Result<PackedMatrix> {
    const FORMAT: WeightFormat = WeightFormat::Nvfp4;
    let (rows, cols) = (w.rows(), w.cols());
    let mut own = 0.0f32;
    for row in 0..rows {
        own = own.max(w.largest_of_row(FORMAT, row)?);
    }
    if !cols.is_multiple_of(NVFP4_GROUP) {
        return Err(Error::Columns { format: FORMAT, multiple: NVFP4_GROUP, cols });
    }
    let amax = amax.unwrap_or(own);
    let global = global_scale(convention, amax);
    let fits = amax.is_finite() && amax >= own && (E2M1_MAX * global.apply(E4M3_MAX)).is_finite();
    if !fits {
        return Err(Error::Overflow { format: FORMAT, row: 0, col: 0, amax: own });
    }
    let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0; rows * cols / NVFP4_GROUP]);
    let planes = codes.chunks_exact_mut((cols / 2).max(1)).zip(scales.chunks_exact_mut((cols / NVFP4_GROUP).max(1)));
    for (row, (codes, scales)) in planes.enumerate() {
        let x = w.row(row)?;
        wide!(encode_row(global, x, codes, scales));
    }
    Ok(PackedMatrix::trusted(rows, cols, PackedParts::Nvfp4 { codes, scales, global }))
}

/// Encodes a row, a piece at a time; each step is a loop over the piece, for the compiler to make vectors of.
#[inline(always)]
fn encode_row(global: GlobalScale, x: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    const PIECE: usize = 512;
    const GROUPS: usize = PIECE / NVFP4_GROUP;
    let (mut amax, mut of_groups) = ([0.0; GROUPS], [0.0; GROUPS]);
    let (mut steps, mut lanes) = ([0.0; PIECE], [0; PIECE]);
    let planes = codes.chunks_mut(PIECE / 2).zip(scales.chunks_mut(GROUPS));
    for (x, (codes, scales)) in x.chunks(PIECE).zip(planes) {
        for (a, x) in amax.iter_mut().zip(x.as_chunks::<NVFP4_GROUP>().0) {
            // Without the fence the compiler takes eight groups at a time and gathers their columns one by one.
            *a = black_box(largest(x));
        }
        for (s, &a) in scales.iter_mut().zip(&amax) {
            *s = group_scale(global, a);
        }
        for (step, &s) in of_groups.iter_mut().zip(&*scales) {
            *step = decode_e4m3(s);
        }
        for step in &mut of_groups {
            *step = global.apply(*step);
        }
        for (steps, &step) in steps.as_chunks_mut::<NVFP4_GROUP>().0.iter_mut().zip(&of_groups) {
            *steps = [step; NVFP4_GROUP];
        }
        for ((lane, x), step) in lanes.iter_mut().zip(x).zip(&steps) {
            // No step is zero and no weight infinite: the quotient is a number.
            *lane = nearest_e2m1(x / step);
        }
        for (b, [low, high]) in codes.iter_mut().zip(lanes.as_chunks::<2>().0) {
            *b = low | (high << 4);
        }
    }
}
