//! One entry for encoding to any format.

use ninfer_core::WeightFormat;
use ninfer_core::format::FP8_BLOCK;

use crate::packed::{check_dimensions, first};
use crate::{Error, PackedMatrix, Result, fp8, groupwise, nvfp4, plain};

/// Encodes a row-major `[rows, cols]` matrix.
///
/// NVFP4 is written in the compressed-tensors convention; [`nvfp4::encode`] offers both. FP8 blocks have scales that are
/// BF16 values. The rules are those of [`plain`], [`fp8`], [`nvfp4`] and [`groupwise`].
///
/// # Errors
/// [`Error::Length`] if `w` is not `rows · cols` long; [`Error::NonFinite`] for a NaN or an infinity, or a finite value
/// that becomes infinite in F16 or BF16; [`Error::Columns`] if NVFP4 is asked for a number of columns that 16 does not
/// divide; [`Error::Overflow`] if a scale would not be finite; [`Error::Conversion`] for a format this crate does not
/// know.
///
/// ```
/// use ninfer_core::WeightFormat;
/// let m = ninfer_quant::encode(WeightFormat::Nvfp4, 1, 16, &[0.5; 16])?;
/// assert_eq!(m.bytes(), 8 + 1 + 4);
/// assert!((m.dequantize()[3] - 0.5).abs() < 1e-6);
/// assert!(ninfer_quant::encode(WeightFormat::Bf16, 1, 1, &[f32::NAN]).is_err());
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn encode(format: WeightFormat, rows: usize, cols: usize, w: &[f32]) -> Result<PackedMatrix> {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => plain::encode(format, rows, cols, w),
        WeightFormat::Fp8Tensor => fp8::encode_tensor(rows, cols, w),
        WeightFormat::Fp8Row => fp8::encode_rows(rows, cols, w),
        WeightFormat::Fp8Block => fp8::encode_blocks(rows, cols, w),
        WeightFormat::Nvfp4 => nvfp4::encode(nvfp4::Convention::CompressedTensors, rows, cols, w, None),
        WeightFormat::Group(g) => groupwise::encode(g, rows, cols, w),
        _ => Err(Error::Conversion { conversion: "encode", stored: format }),
    }
}

/// Refuses wrong lengths and weights that are not finite.
pub(crate) fn check_input(format: WeightFormat, rows: usize, cols: usize, w: &[f32]) -> Result<()> {
    check_dimensions(rows, cols)?;
    let expected = rows.saturating_mul(cols);
    if w.len() != expected {
        return Err(Error::Length { what: "weights", expected, got: w.len() });
    }
    match first(w, |x| !x.is_finite()) {
        Some(i) => Err(Error::NonFinite { format, row: i / cols, col: i % cols, value: w[i] }),
        None => Ok(()),
    }
}

/// Largest magnitude; of finite numbers it is the one with the largest bits, and integers are compared many at a time.
pub(crate) fn largest(w: &[f32]) -> f32 {
    f32::from_bits(w.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7FFF_FFFF)))
}

/// Largest magnitude of each 128×128 block, `[⌈rows/128⌉, ⌈cols/128⌉]`.
pub(crate) fn block_amax(rows: usize, cols: usize, w: &[f32]) -> Vec<f32> {
    let blocks = cols.div_ceil(FP8_BLOCK);
    let mut out = vec![0.0f32; rows.div_ceil(FP8_BLOCK) * blocks];
    for row in 0..rows {
        let out = &mut out[row / FP8_BLOCK * blocks..][..blocks];
        for (m, x) in out.iter_mut().zip(w[row * cols..(row + 1) * cols].chunks(FP8_BLOCK)) {
            *m = m.max(largest(x));
        }
    }
    out
}
