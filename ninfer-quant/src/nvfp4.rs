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

use ninfer_core::WeightFormat;
use ninfer_core::format::{GlobalScale, NVFP4_GROUP};

use crate::codes::{E2M1_MAX, E4M3_MAX, E4M3_MIN_POSITIVE, decode_e4m3, encode_e2m1, encode_e4m3};
use crate::encode::{check_input, largest};
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

fn group_scale(global: GlobalScale, amax: f32) -> u8 {
    match global {
        GlobalScale::Divide(g) => match encode_e4m3(g * (amax / E2M1_MAX)) {
            0 => encode_e4m3(0.125),
            code => code,
        },
        GlobalScale::Multiply(g) => match amax / (E2M1_MAX * g) {
            0.0 => encode_e4m3(1.0),
            s => encode_e4m3(s.clamp(E4M3_MIN_POSITIVE, E4M3_MAX)),
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
    const FORMAT: WeightFormat = WeightFormat::Nvfp4;
    check_input(FORMAT, rows, cols, w)?;
    if !cols.is_multiple_of(NVFP4_GROUP) {
        return Err(Error::Columns { format: FORMAT, multiple: NVFP4_GROUP, cols });
    }
    let own = largest(w);
    let amax = amax.unwrap_or(own);
    let global = global_scale(convention, amax);
    let fits = amax.is_finite() && amax >= own && (E2M1_MAX * global.apply(E4M3_MAX)).is_finite();
    if !fits {
        return Err(Error::Overflow { format: FORMAT, row: 0, col: 0, amax: own });
    }
    let (mut codes, mut scales) = (Vec::with_capacity(w.len() / 2), Vec::with_capacity(w.len() / NVFP4_GROUP));
    for group in w.chunks_exact(NVFP4_GROUP) {
        let scale = group_scale(global, largest(group));
        let step = global.apply(decode_e4m3(scale));
        let mut lanes = [0u8; NVFP4_GROUP];
        for (lane, x) in lanes.iter_mut().zip(group) {
            *lane = encode_e2m1(x / step);
        }
        codes.extend(lanes.as_chunks::<2>().0.iter().map(|[low, high]| low | (high << 4)));
        scales.push(scale);
    }
    Ok(PackedMatrix::trusted(rows, cols, PackedParts::Nvfp4 { codes, scales, global }))
}
