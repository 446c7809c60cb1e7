//! One entry for encoding to any format.

use ninfer_core::{PackedRef, WeightFormat};

use crate::source::Source;
pub(crate) use crate::source::largest;
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
    encode_source(format, Source::values(rows, cols, w)?)
}

/// Encodes a packed matrix again, in another format: the weights that [`dequantize_ref`](crate::dequantize_ref) gives,
/// encoded as [`encode`] does. Rows are decoded one at a time, so that no f32 copy of the matrix is made.
///
/// # Errors
/// Those of [`encode`], and [`Error::Conversion`] also for a matrix in a format this crate does not know.
///
/// ```
/// use ninfer_core::{DType, PackedData, PackedRef, WeightFormat};
/// let bytes = ninfer_quant::codes::encode_bf16_slice(&[0.5; 64]);
/// let stored = PackedRef::new(1, 64, PackedData::Plain { dtype: DType::Bf16, bytes: &bytes })?;
/// let m = ninfer_quant::encode_ref(WeightFormat::Fp8Row, &stored)?;
/// assert_eq!(m.dequantize(), [0.5; 64]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn encode_ref(format: WeightFormat, m: &PackedRef<'_>) -> Result<PackedMatrix> {
    encode_source(format, Source::packed(m)?)
}

fn encode_source(format: WeightFormat, source: Source<'_>) -> Result<PackedMatrix> {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => plain::encode_source(format, source),
        WeightFormat::Fp8Tensor => fp8::tensor(source),
        WeightFormat::Fp8Row => fp8::by_rows(source),
        WeightFormat::Fp8Block => fp8::by_blocks(source),
        WeightFormat::Nvfp4 => nvfp4::encode_source(nvfp4::Convention::CompressedTensors, source, None),
        WeightFormat::Group(g) => groupwise::encode_source(g, source),
        _ => Err(Error::Conversion { conversion: "encode", stored: format }),
    }
}
