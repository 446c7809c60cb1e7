//! From a packed matrix to the tensors that a checkpoint stores of it: the inverse of [`checkpoint`](crate::checkpoint).
//!
//! [`layout`] tells names, element types and shapes before there is any data, so that a file header can be written first;
//! [`tensors`] borrows the data where the file has the same bytes as the matrix. [`checkpoint::decode`] of what is written
//! gives the matrix back.
//!
//! | format | tensors |
//! |---|---|
//! | plain | `weight` `[out, in]` |
//! | FP8, one scale | `weight` F8_E4M3 `[out, in]`, `weight_scale` F32 `[1]` |
//! | FP8, row scales | `weight`, `weight_scale` F32 `[out, 1]` |
//! | FP8, blocks | `weight`, `weight_scale_inv` or `weight_scale` F32 `[⌈out/128⌉, ⌈in/128⌉]` |
//! | NVFP4, dividing | `weight_packed` U8 `[out, in/2]`, `weight_scale` F8_E4M3 `[out, in/16]`, `weight_global_scale` F32 `[1]` |
//! | NVFP4, multiplying | `weight` U8 `[out, in/2]`, `weight_scale`, `weight_scale_2` F32 `[]` |
//! | groupwise integers | `weight_codes`, `weight_codes_high` U8, `weight_scale` F16 `[out, groups]`, `weight_shape` I64 `[2]` |
//!
//! The columns of groupwise integers are padded to a multiple of 128, and `groups` is what they then hold. `weight_codes` of W8
//! is I8 `[out, 32 · groups]`, one column each; of Q4, Q5 and Q6 it is U8 `[out, 32 · groups]`, the low four bits of two columns
//! in a byte. `weight_codes_high` is `[out, 8 · groups]` for Q5, `[out, 16 · groups]` for Q6, and absent otherwise.
//! `weight_shape` holds `out` and the columns without the padding.
//!
//! [`checkpoint::decode`]: crate::checkpoint::decode

use std::borrow::Cow;

use ninfer_core::format::{FP8_BLOCK, GROUP_PAD, GlobalScale, NVFP4_GROUP};
use ninfer_core::{DType, WeightFormat};

use crate::checkpoint::StoredKind;
use crate::packed::check_dimensions;
use crate::{Error, Fp8ScaleVec, PackedMatrix, PackedParts, Result};

/// Name of the scales of FP8 blocks; they multiply under either.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BlockScaleName {
    /// `weight_scale_inv`, as in Qwen's own FP8 releases (`quant_method` "fp8").
    #[default]
    WeightScaleInv,
    /// `weight_scale`, as in compressed-tensors files.
    WeightScale,
}

impl BlockScaleName {
    const fn suffix(self) -> &'static str {
        match self {
            Self::WeightScaleInv => "weight_scale_inv",
            Self::WeightScale => "weight_scale",
        }
    }
}

/// Suffix, element type and shape of a tensor to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorLayout {
    /// Last part of the name, for example `weight_scale`.
    pub suffix: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Vec<usize>,
}

impl TensorLayout {
    fn new(suffix: &'static str, dtype: DType, shape: &[usize]) -> Self {
        Self { suffix, dtype, shape: shape.to_vec() }
    }

    /// Bytes of the data.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

/// A tensor to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrittenTensor<'a> {
    /// Suffix, element type and shape.
    pub layout: TensorLayout,
    /// Little-endian elements, row-major.
    pub bytes: Cow<'a, [u8]>,
}

/// The tensors of a `[rows, cols]` matrix of this kind, in the order of [`tensors`].
///
/// # Errors
/// [`Error::NotWritten`] for the kinds that are read only (GPTQ, AWQ, integers of compressed-tensors); [`Error::Columns`] for
/// NVFP4 with columns that 16 does not divide; [`Error::Core`] for sizes beyond any memory.
///
/// ```
/// use ninfer_core::{DType, format::GroupFormat};
/// use ninfer_quant::checkpoint::StoredKind;
/// use ninfer_quant::writer::{BlockScaleName, layout};
/// let q5 = layout(StoredKind::Groupwise(GroupFormat::Q5), 3, 200, BlockScaleName::default())?;
/// let shapes: Vec<_> = q5.iter().map(|t| (t.suffix, t.dtype, t.shape.as_slice())).collect();
/// assert_eq!(shapes[0], ("weight_codes", DType::U8, &[3, 128][..])); // 256 columns with the padding, two a byte
/// assert_eq!(shapes[1], ("weight_codes_high", DType::U8, &[3, 32][..]));
/// assert_eq!(shapes[2], ("weight_scale", DType::F16, &[3, 4][..]));
/// assert_eq!(shapes[3], ("weight_shape", DType::I64, &[2][..]));
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn layout(kind: StoredKind, rows: usize, cols: usize, blocks: BlockScaleName) -> Result<Vec<TensorLayout>> {
    check_dimensions(rows, cols)?;
    let new = TensorLayout::new;
    let fp8 =
        |suffix, shape: &[usize]| vec![new("weight", DType::F8E4M3, &[rows, cols]), new(suffix, DType::F32, shape)];
    let nvfp4 = |codes, global, shape: &[usize]| {
        if !cols.is_multiple_of(NVFP4_GROUP) {
            return Err(Error::Columns { format: WeightFormat::Nvfp4, multiple: NVFP4_GROUP, cols });
        }
        Ok(vec![
            new(codes, DType::U8, &[rows, cols / 2]),
            new("weight_scale", DType::F8E4M3, &[rows, cols / NVFP4_GROUP]),
            new(global, DType::F32, shape),
        ])
    };
    Ok(match kind {
        StoredKind::Plain(dtype) => vec![new("weight", dtype, &[rows, cols])],
        StoredKind::Fp8Tensor => fp8("weight_scale", &[1]),
        StoredKind::Fp8Row => fp8("weight_scale", &[rows, 1]),
        StoredKind::Fp8Block => fp8(blocks.suffix(), &[rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)]),
        StoredKind::Nvfp4CompressedTensors => nvfp4("weight_packed", "weight_global_scale", &[1])?,
        StoredKind::Nvfp4ModelOpt => nvfp4("weight", "weight_scale_2", &[])?,
        StoredKind::Groupwise(format) => {
            let groups = cols.next_multiple_of(GROUP_PAD) / format.group_size();
            let signed = format.bits() == 8;
            let codes = new("weight_codes", if signed { DType::I8 } else { DType::U8 }, &[rows, 32 * groups]);
            let high = new("weight_codes_high", DType::U8, &[rows, format.high_bytes() * groups]);
            let scales = new("weight_scale", DType::F16, &[rows, groups]);
            let shape = new("weight_shape", DType::I64, &[2]);
            let high = (format.high_bytes() > 0).then_some(high);
            [Some(codes), high, Some(scales), Some(shape)].into_iter().flatten().collect()
        }
        StoredKind::IntCompressedTensors | StoredKind::Gptq | StoredKind::Awq => {
            return Err(Error::NotWritten { kind });
        }
    })
}

/// The kind of tensors that [`tensors`] makes of a matrix.
#[must_use]
pub fn kind(m: &PackedMatrix) -> StoredKind {
    match m.parts() {
        PackedParts::Plain { dtype, .. } => StoredKind::Plain(*dtype),
        PackedParts::Fp8 { scales: Fp8ScaleVec::Tensor(_), .. } => StoredKind::Fp8Tensor,
        PackedParts::Fp8 { scales: Fp8ScaleVec::Row(_), .. } => StoredKind::Fp8Row,
        PackedParts::Fp8 { scales: Fp8ScaleVec::Block(_), .. } => StoredKind::Fp8Block,
        PackedParts::Nvfp4 { global: GlobalScale::Divide(_), .. } => StoredKind::Nvfp4CompressedTensors,
        PackedParts::Nvfp4 { global: GlobalScale::Multiply(_), .. } => StoredKind::Nvfp4ModelOpt,
        PackedParts::Group { format, .. } => StoredKind::Groupwise(*format),
    }
}

/// The tensors that a checkpoint stores of a matrix.
///
/// # Errors
/// Those of [`layout`].
///
/// ```
/// use ninfer_core::WeightFormat;
/// use ninfer_quant::checkpoint::{DecodeOptions, StoredTensor, decode};
/// use ninfer_quant::writer::{BlockScaleName, tensors};
/// let m = ninfer_quant::encode(WeightFormat::Nvfp4, 2, 16, &[0.25; 32])?;
/// let written = tensors(&m, BlockScaleName::default())?;
/// let stored: Vec<_> =
///     written.iter().map(|t| StoredTensor::new(t.layout.suffix, t.layout.dtype, &t.layout.shape, &t.bytes)).collect();
/// assert_eq!(decode("mlp.up_proj", &stored, &DecodeOptions::default())?, m);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn tensors(m: &PackedMatrix, blocks: BlockScaleName) -> Result<Vec<WrittenTensor<'_>>> {
    let floats = |s: &[f32]| Cow::Owned(s.iter().flat_map(|x| x.to_le_bytes()).collect());
    let scales_of = |scales: &Fp8ScaleVec| match scales {
        Fp8ScaleVec::Tensor(s) => floats(&[*s]),
        Fp8ScaleVec::Row(s) | Fp8ScaleVec::Block(s) => floats(s),
    };
    let data: Vec<Cow<'_, [u8]>> = match m.parts() {
        PackedParts::Plain { bytes, .. } => vec![bytes.into()],
        PackedParts::Fp8 { codes, scales } => vec![codes.into(), scales_of(scales)],
        PackedParts::Nvfp4 { codes, scales, global: GlobalScale::Divide(g) | GlobalScale::Multiply(g) } => {
            vec![codes.into(), scales.into(), floats(&[*g])]
        }
        PackedParts::Group { format, base, high, scales } => {
            let shape = [m.rows() as u64, m.cols() as u64].iter().flat_map(|n| n.to_le_bytes()).collect();
            let mut data: Vec<Cow<'_, [u8]>> = vec![base.into()];
            if format.high_bytes() > 0 {
                data.push(high.into());
            }
            data.extend([scales.into(), Cow::Owned(shape)]);
            data
        }
    };
    let layouts = layout(kind(m), m.rows(), m.cols(), blocks)?;
    Ok(layouts.into_iter().zip(data).map(|(layout, bytes)| WrittenTensor { layout, bytes }).collect())
}
