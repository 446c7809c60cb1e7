//! Exact decoding of borrowed packed matrices.

use ninfer_core::format::{FP8_BLOCK, Fp8Scales, NVFP4_GROUP};
use ninfer_core::{DType, PackedData, PackedRef};

use crate::codes::{
    decode_bf16_slice, decode_e2m1_scaled, decode_e4m3, decode_e4m3_scaled, decode_f16_slice, decode_f32_slice,
};
use crate::{Error, Result, groupwise};

/// Decodes one row of a packed matrix to f32.
///
/// The values are those of the format's definition, bit for bit:
///
/// | format | weight |
/// |---|---|
/// | plain | the element |
/// | FP8 | `e4m3(code) · scale` |
/// | NVFP4 | `e2m1(code) · (e4m3(scale) / g)`, or `· (e4m3(scale) · g)` for the multiplying convention |
/// | groupwise | `code · f16(scale)` |
///
/// # Errors
/// [`Error::Rows`] if the row does not exist, [`Error::Length`] if `out` is not `cols` long, [`Error::Conversion`] for a
/// format this crate does not know.
///
/// ```
/// use ninfer_core::{DType, PackedData, PackedRef};
/// let bytes: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|x| x.to_le_bytes()).collect();
/// let m = PackedRef::new(2, 2, PackedData::Plain { dtype: DType::F32, bytes: &bytes })?;
/// let mut row = [0.0; 2];
/// ninfer_quant::dequantize_ref_row(&m, 1, &mut row)?;
/// assert_eq!(row, [3.0, 4.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn dequantize_ref_row(m: &PackedRef<'_>, row: usize, out: &mut [f32]) -> Result<()> {
    let (rows, cols) = (m.rows(), m.cols());
    if row >= rows {
        let reason = "no such row";
        return Err(Error::Rows { format: m.format(), start: row, end: row.saturating_add(1), rows, reason });
    }
    if out.len() != cols {
        return Err(Error::Length { what: "row buffer", expected: cols, got: out.len() });
    }
    match m.data() {
        PackedData::Plain { dtype, bytes } => {
            let size = dtype.size();
            let bytes = &bytes[row * cols * size..(row + 1) * cols * size];
            match dtype {
                DType::F16 => decode_f16_slice(bytes, out),
                DType::Bf16 => decode_bf16_slice(bytes, out),
                _ => decode_f32_slice(bytes, out),
            }
        }
        PackedData::Fp8 { codes, scales } => {
            let codes = &codes[row * cols..(row + 1) * cols];
            match scales {
                Fp8Scales::Tensor(s) => decode_e4m3_scaled(codes, s, out),
                Fp8Scales::Row(s) => decode_e4m3_scaled(codes, s[row], out),
                Fp8Scales::Block(s) => {
                    let blocks = cols.div_ceil(FP8_BLOCK);
                    let s = &s[row / FP8_BLOCK * blocks..][..blocks];
                    for ((codes, out), &s) in codes.chunks(FP8_BLOCK).zip(out.chunks_mut(FP8_BLOCK)).zip(s) {
                        decode_e4m3_scaled(codes, s, out);
                    }
                }
            }
        }
        PackedData::Nvfp4 { codes, scales, global } => {
            let codes = &codes[row * cols / 2..(row + 1) * cols / 2];
            let scales = &scales[row * cols / NVFP4_GROUP..(row + 1) * cols / NVFP4_GROUP];
            let groups = codes.chunks_exact(NVFP4_GROUP / 2).zip(out.chunks_exact_mut(NVFP4_GROUP));
            for ((codes, out), &s) in groups.zip(scales) {
                decode_e2m1_scaled(codes, global.apply(decode_e4m3(s)), out);
            }
        }
        PackedData::Group { format, base, high, scales } => {
            groupwise::decode_row(format, row, base, high, scales, out);
        }
        _ => return Err(Error::Conversion { conversion: "dequantize", stored: m.format() }),
    }
    Ok(())
}

/// Decodes all rows of a packed matrix to f32, row-major `[rows, cols]`.
///
/// # Errors
/// [`Error::Conversion`] for a format this crate does not know.
pub fn dequantize_ref(m: &PackedRef<'_>) -> Result<Vec<f32>> {
    let mut out = vec![0.0; m.rows() * m.cols()];
    dequantize_ref_into(m, &mut out)?;
    Ok(out)
}

/// Decodes all rows of a packed matrix into a buffer, row-major `[rows, cols]`; to be preferred where a buffer can be used
/// again, since getting new memory can take longer than decoding.
///
/// # Errors
/// [`Error::Length`] if `out` is not `rows · cols` long, [`Error::Conversion`] for a format this crate does not know.
///
/// ```
/// use ninfer_core::WeightFormat;
/// let m = ninfer_quant::encode(WeightFormat::Bf16, 2, 2, &[1.0, 2.0, 3.0, 4.0])?;
/// let mut w = [0.0; 4];
/// ninfer_quant::dequantize_ref_into(&m.as_ref(), &mut w)?;
/// assert_eq!(w, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn dequantize_ref_into(m: &PackedRef<'_>, out: &mut [f32]) -> Result<()> {
    let expected = m.rows().saturating_mul(m.cols());
    if out.len() != expected {
        return Err(Error::Length { what: "buffer", expected, got: out.len() });
    }
    for (row, out) in out.chunks_exact_mut(m.cols().max(1)).enumerate() {
        dequantize_ref_row(m, row, out)?;
    }
    Ok(())
}
