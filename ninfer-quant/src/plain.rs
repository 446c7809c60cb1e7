//! F32, F16 and BF16 elements without scales.

use ninfer_core::{DType, WeightFormat};

use crate::codes::{encode_bf16_slice, encode_f16_slice, encode_f32_slice};
use crate::encode::check_input;
use crate::packed::first_non_finite;
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
    let (dtype, bytes) = match format {
        WeightFormat::F32 => (DType::F32, encode_f32_slice(w)),
        WeightFormat::F16 => (DType::F16, encode_f16_slice(w)),
        WeightFormat::Bf16 => (DType::Bf16, encode_bf16_slice(w)),
        _ => return Err(Error::Conversion { conversion: "encoding without scales", stored: format }),
    };
    check_input(format, rows, cols, w)?;
    if let Some((i, _)) = first_non_finite(dtype, &bytes) {
        return Err(Error::NonFinite { format, row: i / cols, col: i % cols, value: w[i] });
    }
    Ok(PackedMatrix::trusted(rows, cols, PackedParts::Plain { dtype, bytes }))
}
