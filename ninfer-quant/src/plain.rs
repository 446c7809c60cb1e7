//! F32, F16 and BF16 elements without scales.

use ninfer_core::{DType, WeightFormat};

use crate::codes::{decode_bf16, decode_f16, encode_bf16, encode_f16};
use crate::slices::{write_bf16, write_f16, write_f32};
use crate::source::Source;
use crate::{Error, PackedMatrix, PackedParts, Result};

/// Rounds a row-major `[rows, cols]` matrix to F32, F16 or BF16 elements, nearest even.
///
/// # Errors
/// [`Error::Length`]; [`Error::NonFinite`], also for a finite weight that rounds to infinity; [`Error::Conversion`] if
/// `format` has scales.
///
/// ```
/// use ninfer_core::WeightFormat;
/// use ninfer_quant::plain;
/// let m = plain::encode(WeightFormat::F16, 1, 2, &[1.0, -0.25])?;
/// assert_eq!(m.dequantize(), [1.0, -0.25]);
/// assert!(plain::encode(WeightFormat::F16, 1, 1, &[70000.0]).is_err());
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn encode(format: WeightFormat, rows: usize, cols: usize, w: &[f32]) -> Result<PackedMatrix> {
    encode_source(format, Source::values(rows, cols, w)?)
}

pub(crate) fn encode_source(format: WeightFormat, mut w: Source<'_>) -> Result<PackedMatrix> {
    let dtype = match format {
        WeightFormat::F32 => DType::F32,
        WeightFormat::F16 => DType::F16,
        WeightFormat::Bf16 => DType::Bf16,
        _ => return Err(Error::Conversion { conversion: "encoding without scales", stored: format }),
    };
    let (rows, cols) = (w.rows(), w.cols());
    let mut bytes = vec![0; rows * cols * dtype.size()];
    let mut rounded_to_infinity = None;
    for (row, bytes) in bytes.chunks_exact_mut((cols * dtype.size()).max(1)).enumerate() {
        let (x, amax) = w.finite_row(format, row)?;
        match dtype {
            DType::F16 => write_f16(x, bytes),
            DType::Bf16 => write_bf16(x, bytes),
            _ => write_f32(x, bytes),
        }
        // Rounding keeps the order: if the largest stays finite, all do.
        if !round(dtype, amax).is_finite() && rounded_to_infinity.is_none() {
            rounded_to_infinity = x.iter().position(|&x| !round(dtype, x).is_finite()).map(|col| (row, col, x[col]));
        }
    }
    match rounded_to_infinity {
        Some((row, col, value)) => Err(Error::NonFinite { format, row, col, value }),
        None => Ok(PackedMatrix::trusted(rows, cols, PackedParts::Plain { dtype, bytes })),
    }
}

/// What a weight is once it is stored.
fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F16 => decode_f16(encode_f16(x)),
        DType::Bf16 => decode_bf16(encode_bf16(x)),
        _ => x,
    }
}
