//! From the stored tensors of one module to a packed matrix.
//!
//! A loader groups tensor names with [`split_name`], asks [`classify`] what a module is from the file header alone, and
//! hands its bytes to [`decode`]. Everything is decided by what is stored; one fact is not, the zero-point convention of
//! GPTQ, and comes in [`DecodeOptions`].

use ninfer_core::DType;
use ninfer_core::format::{GROUP_PAD, GlobalScale, GroupFormat};

use crate::codes::{decode_bf16_slice, decode_e4m3, decode_f16, decode_f16_slice, decode_f32_slice};
use crate::int4;
use crate::nvfp4::multiplier;
use crate::packed::{first_bad_ue4m3, first_nan_e4m3, first_non_finite};
use crate::{Error, Fp8ScaleVec, PackedMatrix, PackedParts, Result};

pub use crate::stored::{
    ACTIVATION_SUFFIXES, StoredKind, StoredModule, TensorInfo, WEIGHT_SUFFIXES, classify, split_name,
};

/// Largest plausible factor between a code and a weight.
///
/// Above it even the code 448 (times 6 for NVFP4) would be a weight of several hundred; the scale is then taken to be
/// stored as its reciprocal.
pub const MAX_MULTIPLIER: f32 = 1.0;

/// One stored tensor of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredTensor<'a> {
    /// Suffix, element type and shape.
    pub info: TensorInfo<'a>,
    /// Little-endian elements, row-major.
    pub bytes: &'a [u8],
}

impl<'a> StoredTensor<'a> {
    /// Puts the pieces together; nothing is checked here.
    #[must_use]
    pub const fn new(suffix: &'a str, dtype: DType, shape: &'a [usize], bytes: &'a [u8]) -> Self {
        Self { info: TensorInfo { suffix, dtype, shape }, bytes }
    }
}

/// How GPTQ zero points are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GptqZeros {
    /// `checkpoint_format` "gptq", also when absent: one less than the zero point.
    #[default]
    MinusOne,
    /// `checkpoint_format` "gptq_v2": the zero point itself.
    Exact,
}

/// What the tensors of a module do not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecodeOptions {
    /// Zero-point convention of GPTQ modules.
    pub gptq_zeros: GptqZeros,
}

impl DecodeOptions {
    /// Sets the zero-point convention of GPTQ modules.
    #[must_use]
    pub const fn with_gptq_zeros(mut self, zeros: GptqZeros) -> Self {
        self.gptq_zeros = zeros;
        self
    }
}

/// Decodes the tensors of `module` to a packed matrix in their own format.
///
/// Plain, FP8, NVFP4 and groupwise modules keep their codes and scales byte for byte. Int4 and int8 modules become groupwise integers
/// where that is exact (f16 scales that are not negative, whole groups of 64 or 32 columns that share one), and F32
/// otherwise; their weights are `(q − z) · scale` in f32 either way.
///
/// # Errors
/// Those of [`classify`]; [`Error::TensorBytes`]; [`Error::TensorValue`] for scales that are NaN, infinite, negative or (where
/// one serves the whole matrix) zero, for NaN or infinite weights, for group indices out of range and for a bias that is
/// not zero; [`Error::SwappedScale`] for a multiplier above [`MAX_MULTIPLIER`].
///
/// ```
/// use ninfer_core::DType;
/// use ninfer_quant::checkpoint::{DecodeOptions, StoredTensor, decode};
/// let tensors = [
///     StoredTensor::new("weight", DType::F8E4M3, &[1, 2], &[0x38, 0xC0]),
///     StoredTensor::new("weight_scale", DType::F32, &[], &[0, 0, 0, 0x3F]),
/// ];
/// let m = decode("layers.0.mlp.up_proj", &tensors, &DecodeOptions::default())?;
/// assert_eq!(m.dequantize(), [0.5, -1.0]);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn decode(module: &str, tensors: &[StoredTensor<'_>], options: &DecodeOptions) -> Result<PackedMatrix> {
    let infos: Vec<TensorInfo<'_>> = tensors.iter().map(|t| t.info).collect();
    let StoredModule { kind, rows, cols } = classify(module, &infos)?;
    let t = Tensors { module, tensors };
    for t in tensors {
        check_bytes(module, t)?;
    }
    t.check_bias()?;
    let parts = match kind {
        StoredKind::Plain(dtype) => PackedParts::Plain { dtype, bytes: t.finite("weight")?.bytes.to_vec() },
        StoredKind::Nvfp4CompressedTensors => {
            let global = GlobalScale::Divide(t.global_scale("weight_global_scale", GlobalScale::Divide)?);
            t.nvfp4("weight_packed", global)?
        }
        StoredKind::Nvfp4ModelOpt => {
            let global = GlobalScale::Multiply(t.global_scale("weight_scale_2", GlobalScale::Multiply)?);
            t.nvfp4("weight", global)?
        }
        StoredKind::Fp8Tensor | StoredKind::Fp8Row | StoredKind::Fp8Block => t.fp8(kind)?,
        StoredKind::Groupwise(format) => return t.groupwise(format, rows, cols),
        StoredKind::IntCompressedTensors => return int4::compressed_tensors(&t, rows),
        StoredKind::Gptq => return int4::gptq(&t, rows, cols, options.gptq_zeros),
        StoredKind::Awq => return int4::awq(&t, rows, cols),
    };
    Ok(PackedMatrix::trusted(rows, cols, parts))
}

fn check_bytes(module: &str, t: &StoredTensor<'_>) -> Result<()> {
    let size = t.info.dtype.size();
    let expected = t.info.shape.iter().try_fold(size, |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX);
    if t.bytes.len() == expected {
        return Ok(());
    }
    Err(Error::TensorBytes { tensor: format!("{module}.{}", t.info.suffix), expected, got: t.bytes.len() })
}

/// The tensors of one module whose shapes and lengths were checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tensors<'a> {
    pub(crate) module: &'a str,
    tensors: &'a [StoredTensor<'a>],
}

impl<'a> Tensors<'a> {
    pub(crate) fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    pub(crate) fn get(&self, suffix: &str) -> Option<&'a StoredTensor<'a>> {
        self.tensors.iter().find(|t| t.info.suffix == suffix)
    }

    pub(crate) fn need(&self, suffix: &str) -> Result<&'a StoredTensor<'a>> {
        let reason = "its format needs it";
        self.get(suffix).ok_or_else(|| Error::MissingTensor { tensor: self.name(suffix), reason })
    }

    pub(crate) fn bad_value<T>(
        &self,
        suffix: &str,
        index: usize,
        got: impl ToString,
        reason: &'static str,
    ) -> Result<T> {
        Err(Error::TensorValue { tensor: self.name(suffix), index, got: got.to_string(), reason })
    }

    /// A tensor of floats without NaN and infinity.
    fn finite(&self, suffix: &str) -> Result<&'a StoredTensor<'a>> {
        let t = self.need(suffix)?;
        match first_non_finite(t.info.dtype, t.bytes) {
            Some((index, value)) => self.bad_value(suffix, index, value, "weights and scales are finite"),
            None => Ok(t),
        }
    }

    /// A tensor of finite floats, decoded.
    pub(crate) fn floats(&self, suffix: &str) -> Result<Vec<f32>> {
        let t = self.finite(suffix)?;
        let mut out = vec![0.0; t.bytes.len() / t.info.dtype.size()];
        match t.info.dtype {
            DType::F16 => decode_f16_slice(t.bytes, &mut out),
            DType::Bf16 => decode_bf16_slice(t.bytes, &mut out),
            _ => decode_f32_slice(t.bytes, &mut out),
        }
        Ok(out)
    }

    fn check_bias(&self) -> Result<()> {
        let Some(bias) = self.get("bias") else { return Ok(()) };
        match bias.bytes.iter().position(|&b| b != 0) {
            Some(i) => {
                let index = i / bias.info.dtype.size();
                self.bad_value("bias", index, "not zero", "the layers of this family have no bias, so it must be zero")
            }
            None => Ok(()),
        }
    }

    fn global_scale(&self, suffix: &str, convention: fn(f32) -> GlobalScale) -> Result<f32> {
        let Some(&value) = self.floats(suffix)?.first() else {
            return Err(Error::MissingTensor { tensor: self.name(suffix), reason: "it is empty" });
        };
        if value <= 0.0 {
            return self.bad_value(suffix, 0, value, "the scale of the matrix is positive");
        }
        self.check_multiplier(suffix, value, multiplier(convention(value)))?;
        Ok(value)
    }

    fn check_multiplier(&self, suffix: &str, value: f32, multiplier: f32) -> Result<()> {
        if multiplier <= MAX_MULTIPLIER {
            return Ok(());
        }
        Err(Error::SwappedScale { tensor: self.name(suffix), value, multiplier })
    }

    fn nvfp4(&self, codes: &str, global: GlobalScale) -> Result<PackedParts> {
        let scales = self.need("weight_scale")?.bytes;
        if let Some(i) = first_bad_ue4m3(scales) {
            return self.bad_value(
                "weight_scale",
                i,
                decode_e4m3(scales[i]),
                "group scales are not NaN and not negative",
            );
        }
        Ok(PackedParts::Nvfp4 { codes: self.need(codes)?.bytes.to_vec(), scales: scales.to_vec(), global })
    }

    /// `padded` columns, of which `weight_shape` says how many count.
    fn groupwise(&self, format: GroupFormat, rows: usize, padded: usize) -> Result<PackedMatrix> {
        let stated = self.need("weight_shape")?.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b));
        let stated: Vec<i64> = stated.collect();
        let cols = match *stated {
            [r, c] if usize::try_from(r) == Ok(rows) => usize::try_from(c).ok(),
            _ => None,
        };
        let Some(cols) = cols.filter(|&c| c > 0 && c.checked_next_multiple_of(GROUP_PAD) == Some(padded)) else {
            let reason = "it is the shape of the matrix, whose columns are padded to the next multiple of 128";
            return self.bad_value("weight_shape", 0, format!("{stated:?}"), reason);
        };
        let scales = self.need("weight_scale")?.bytes;
        for (i, b) in scales.as_chunks().0.iter().enumerate() {
            let s = decode_f16(u16::from_le_bytes(*b));
            if !s.is_finite() || s.is_sign_negative() {
                return self.bad_value("weight_scale", i, s, "scales are finite and not negative");
            }
        }
        let base = self.need("weight_codes")?.bytes.to_vec();
        let high = self.get("weight_codes_high").map_or_else(Vec::new, |t| t.bytes.to_vec());
        let parts = PackedParts::Group { format, base, high, scales: scales.to_vec() };
        match PackedMatrix::new(rows, cols, parts) {
            Err(Error::Code { index, code, .. }) => {
                let reason = "codes of W8 are at least -127, and codes of the padding are zero";
                self.bad_value("weight_codes", index, format!("{code:#04x}"), reason)
            }
            other => other,
        }
    }

    fn fp8(&self, kind: StoredKind) -> Result<PackedParts> {
        let codes = self.need("weight")?.bytes;
        if let Some(i) = first_nan_e4m3(codes) {
            return self.bad_value("weight", i, "NaN", "weights are finite");
        }
        let suffix = if self.get("weight_scale_inv").is_some() { "weight_scale_inv" } else { "weight_scale" };
        let scales = self.floats(suffix)?;
        for (i, &s) in scales.iter().enumerate() {
            if s < 0.0 || (s == 0.0 && kind == StoredKind::Fp8Tensor) {
                return self.bad_value(suffix, i, s, "scales are not negative, and one for the matrix is not zero");
            }
            self.check_multiplier(suffix, s, s)?;
        }
        let scales = match kind {
            StoredKind::Fp8Row => Fp8ScaleVec::Row(scales),
            StoredKind::Fp8Block => Fp8ScaleVec::Block(scales),
            _ => Fp8ScaleVec::Tensor(scales.first().copied().unwrap_or(1.0)),
        };
        Ok(PackedParts::Fp8 { codes: codes.to_vec(), scales })
    }
}
