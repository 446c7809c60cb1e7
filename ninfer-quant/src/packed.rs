//! Owned packed matrices.

use ninfer_core::format::{ActivationPrecision, Fp8Scales, GROUP_PAD, GlobalScale, GroupFormat};
use ninfer_core::{DType, PackedData, PackedRef, WeightFormat};

use crate::codes::{decode_bf16, decode_e4m3, decode_f16};
use crate::groupwise::unpack_group;
use crate::{Error, Result, dequantize_ref, dequantize_ref_row};

/// Scales of an FP8 matrix; a weight is `e4m3(code) · scale`.
#[derive(Clone, Debug, PartialEq)]
pub enum Fp8ScaleVec {
    /// One scale.
    Tensor(f32),
    /// `[rows]`.
    Row(Vec<f32>),
    /// `[⌈rows/128⌉, ⌈cols/128⌉]`, row-major.
    Block(Vec<f32>),
}

impl Fp8ScaleVec {
    fn as_slice(&self) -> &[f32] {
        match self {
            Self::Tensor(s) => std::slice::from_ref(s),
            Self::Row(s) | Self::Block(s) => s,
        }
    }
}

/// The parts of a packed matrix; the owned twin of [`PackedData`], with the same layouts.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum PackedParts {
    /// Little-endian F32, F16 or BF16, `rows · cols`.
    Plain {
        /// F32, F16 or Bf16.
        dtype: DType,
        /// The elements.
        bytes: Vec<u8>,
    },
    /// One E4M3 code per element.
    Fp8 {
        /// `[rows, cols]`.
        codes: Vec<u8>,
        /// Multipliers.
        scales: Fp8ScaleVec,
    },
    /// E2M1 codes, two per byte, even column in the low nibble. There is no form without a global scale.
    Nvfp4 {
        /// `[rows, cols/2]`.
        codes: Vec<u8>,
        /// E4M3 codes `[rows, cols/16]`, row-major.
        scales: Vec<u8>,
        /// Second-level scale and its convention.
        global: GlobalScale,
    },
    /// Groupwise integers in three planes; see [`PackedData::Group`].
    Group {
        /// Code width and group size.
        format: GroupFormat,
        /// 32 bytes per group.
        base: Vec<u8>,
        /// High bits of Q5 and Q6.
        high: Vec<u8>,
        /// Little-endian f16 `[rows, groups]`.
        scales: Vec<u8>,
    },
}

impl PackedParts {
    fn as_data(&self) -> PackedData<'_> {
        match self {
            Self::Plain { dtype, bytes } => PackedData::Plain { dtype: *dtype, bytes },
            Self::Fp8 { codes, scales } => PackedData::Fp8 {
                codes,
                scales: match scales {
                    Fp8ScaleVec::Tensor(s) => Fp8Scales::Tensor(*s),
                    Fp8ScaleVec::Row(s) => Fp8Scales::Row(s),
                    Fp8ScaleVec::Block(s) => Fp8Scales::Block(s),
                },
            },
            Self::Nvfp4 { codes, scales, global } => PackedData::Nvfp4 { codes, scales, global: *global },
            Self::Group { format, base, high, scales } => PackedData::Group { format: *format, base, high, scales },
        }
    }
}

/// A packed matrix `[rows, cols]` = `[out features, in features]` that owns its bytes.
///
/// Every value of this type is usable: lengths fit the shape, every scale is finite and not negative, the NVFP4 global
/// scale is positive, and no weight is NaN or infinite. [`PackedMatrix::new`] checks that once.
///
/// ```
/// use ninfer_core::WeightFormat;
/// use ninfer_quant::encode;
///
/// let w: Vec<f32> = (0..2 * 128).map(|i| (i as f32 - 100.0) / 256.0).collect();
/// let m = encode(WeightFormat::Fp8Row, 2, 128, &w)?;
/// assert_eq!((m.rows(), m.cols(), m.bytes()), (2, 128, 2 * 128 + 2 * 4));
/// let back = m.dequantize();
/// assert!((back[0] - w[0]).abs() <= w[0].abs() / 16.0);
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PackedMatrix {
    rows: usize,
    cols: usize,
    parts: PackedParts,
    activations: ActivationPrecision,
}

impl PackedMatrix {
    /// Takes the parts of a matrix after checking them. Activations are [`ActivationPrecision::Native`].
    ///
    /// # Errors
    /// [`Error::Core`] if a length does not fit; [`Error::Scale`] for a scale that is NaN, infinite or negative, or a
    /// global scale that is not positive; [`Error::Code`] for an E4M3 NaN, the W8 code −128 or codes in the column
    /// padding; [`Error::NonFinite`] for a plain element that is NaN or infinite.
    pub fn new(rows: usize, cols: usize, parts: PackedParts) -> Result<Self> {
        check_dimensions(rows, cols)?;
        PackedRef::new(rows, cols, parts.as_data())?;
        let m = Self { rows, cols, parts, activations: ActivationPrecision::Native };
        m.check_values()?;
        Ok(m)
    }

    /// Copies a borrowed matrix after checking its values as [`PackedMatrix::new`] does.
    ///
    /// # Errors
    /// As [`PackedMatrix::new`], and [`Error::Conversion`] for a format this crate does not know.
    pub fn from_ref(m: &PackedRef<'_>) -> Result<Self> {
        let parts = match m.data() {
            PackedData::Plain { dtype, bytes } => PackedParts::Plain { dtype, bytes: bytes.to_vec() },
            PackedData::Fp8 { codes, scales } => PackedParts::Fp8 {
                codes: codes.to_vec(),
                scales: match scales {
                    Fp8Scales::Tensor(s) => Fp8ScaleVec::Tensor(s),
                    Fp8Scales::Row(s) => Fp8ScaleVec::Row(s.to_vec()),
                    Fp8Scales::Block(s) => Fp8ScaleVec::Block(s.to_vec()),
                },
            },
            PackedData::Nvfp4 { codes, scales, global } => {
                PackedParts::Nvfp4 { codes: codes.to_vec(), scales: scales.to_vec(), global }
            }
            PackedData::Group { format, base, high, scales } => {
                PackedParts::Group { format, base: base.to_vec(), high: high.to_vec(), scales: scales.to_vec() }
            }
            _ => return Err(Error::Conversion { conversion: "copy", stored: m.format() }),
        };
        Self::new(m.rows(), m.cols(), parts)?.with_activations(m.activations())
    }

    /// For parts made by this crate, whose lengths and values hold by construction.
    pub(crate) fn trusted(rows: usize, cols: usize, parts: PackedParts) -> Self {
        debug_assert!(PackedRef::new(rows, cols, parts.as_data()).is_ok());
        Self { rows, cols, parts, activations: ActivationPrecision::Native }
    }

    /// The same matrix with another precision of its inputs.
    ///
    /// # Errors
    /// [`ninfer_core::Error::Unsupported`] in [`Error::Core`] if the format cannot have it.
    ///
    /// ```
    /// use ninfer_core::WeightFormat;
    /// use ninfer_core::format::ActivationPrecision;
    /// let m = ninfer_quant::encode(WeightFormat::Fp8Row, 1, 2, &[0.5, 1.0])?;
    /// assert_eq!(m.activations(), ActivationPrecision::Native);
    /// let m = m.with_activations(ActivationPrecision::E4m3Token)?;
    /// assert_eq!(m.as_ref().activations(), ActivationPrecision::E4m3Token);
    /// let bf16 = ninfer_quant::encode(WeightFormat::Bf16, 1, 2, &[0.5, 1.0])?;
    /// assert!(bf16.with_activations(ActivationPrecision::E4m3Token).is_err());
    /// # Ok::<(), ninfer_quant::Error>(())
    /// ```
    pub fn with_activations(self, activations: ActivationPrecision) -> Result<Self> {
        activations.check(self.format())?;
        Ok(Self { activations, ..self })
    }

    /// The borrowed form that operations take.
    #[must_use]
    pub fn as_ref(&self) -> PackedRef<'_> {
        PackedRef::new(self.rows, self.cols, self.parts.as_data())
            .and_then(|m| m.with_activations(self.activations))
            .expect("lengths and activations were checked when they were set")
    }

    /// What a product does to its input rows.
    #[must_use]
    pub fn activations(&self) -> ActivationPrecision {
        self.activations
    }

    /// Out features.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// In features.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The storage format.
    #[must_use]
    pub fn format(&self) -> WeightFormat {
        self.as_ref().format()
    }

    /// Bytes of codes and scales.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.as_ref().bytes()
    }

    /// The parts.
    #[must_use]
    pub fn parts(&self) -> &PackedParts {
        &self.parts
    }

    /// Gives the parts away.
    #[must_use]
    pub fn into_parts(self) -> PackedParts {
        self.parts
    }

    /// All weights in f32, row-major `[rows, cols]`, exactly as the format defines them.
    #[must_use]
    pub fn dequantize(&self) -> Vec<f32> {
        dequantize_ref(&self.as_ref()).expect("an owned matrix has a format this crate decodes")
    }

    /// One row of weights in f32.
    ///
    /// # Errors
    /// [`Error::Rows`] if the row does not exist, [`Error::Length`] if `out` is not `cols` long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        dequantize_ref_row(&self.as_ref(), row, out)
    }

    fn check_values(&self) -> Result<()> {
        let format = self.format();
        let bad_code = |index, code| Err(Error::Code { format, index, code });
        match &self.parts {
            PackedParts::Plain { dtype, bytes } => {
                if let Some((index, value)) = first_non_finite(*dtype, bytes) {
                    return Err(Error::NonFinite { format, row: index / self.cols, col: index % self.cols, value });
                }
            }
            PackedParts::Fp8 { codes, scales } => {
                check_scales("FP8 scale", scales.as_slice())?;
                if let Some(i) = first_nan_e4m3(codes) {
                    return bad_code(i, codes[i]);
                }
            }
            PackedParts::Nvfp4 { scales, global, .. } => {
                let (GlobalScale::Divide(g) | GlobalScale::Multiply(g)) = *global;
                if !(g.is_finite() && g > 0.0) {
                    return Err(Error::Scale { what: "NVFP4 global scale", index: 0, value: g });
                }
                if let Some(index) = first_bad_ue4m3(scales) {
                    return Err(Error::Scale { what: "NVFP4 group scale", index, value: decode_e4m3(scales[index]) });
                }
                let largest = scales.iter().copied().max().unwrap_or(0);
                if !(6.0 * global.apply(decode_e4m3(largest))).is_finite() {
                    return Err(Error::Scale { what: "NVFP4 global scale", index: 0, value: g });
                }
            }
            PackedParts::Group { format: group, base, scales, .. } => {
                for (index, b) in scales.chunks_exact(2).enumerate() {
                    let value = decode_f16(u16::from_le_bytes([b[0], b[1]]));
                    if !value.is_finite() || value.is_sign_negative() {
                        return Err(Error::Scale { what: "group scale", index, value });
                    }
                }
                if *group == GroupFormat::W8
                    && let Some(i) = base.iter().position(|&b| b == 0x80)
                {
                    return bad_code(i, 0x80);
                }
                self.check_padding(*group)?;
            }
        }
        Ok(())
    }

    /// Lanes past the last column must be zero, so that a kernel may run over whole groups.
    fn check_padding(&self, group: GroupFormat) -> Result<()> {
        let PackedParts::Group { base, high, .. } = &self.parts else { return Ok(()) };
        let (size, groups) = (group.group_size(), self.cols.next_multiple_of(GROUP_PAD) / group.group_size());
        for row in 0..self.rows {
            for g in self.cols / size..groups {
                let first = self.cols.saturating_sub(g * size).min(size);
                let at = row * groups + g;
                let high = &high[at * group.high_bytes()..(at + 1) * group.high_bytes()];
                let base = &base[at * 32..(at + 1) * 32];
                let codes = unpack_group(group, base, high);
                if let Some(lane) = (first..size).find(|&l| codes[l] != 0) {
                    let index = at * size + lane;
                    return Err(Error::Code {
                        format: WeightFormat::Group(group),
                        index,
                        code: base[lane * 32 / size],
                    });
                }
            }
        }
        Ok(())
    }
}

/// Index of the first element for which `bad` holds; whole blocks are judged without branches.
pub(crate) fn first<T>(elements: &[T], bad: impl Fn(&T) -> bool) -> Option<usize> {
    const BLOCK: usize = 1024;
    let (b, block) = elements.chunks(BLOCK).enumerate().find(|(_, x)| x.iter().fold(false, |any, x| any | bad(x)))?;
    block.iter().position(bad).map(|i| b * BLOCK + i)
}

/// Flat index and value of the first element that is NaN or infinite.
pub(crate) fn first_non_finite(dtype: DType, bytes: &[u8]) -> Option<(usize, f32)> {
    match dtype {
        DType::F32 => {
            let words = bytes.as_chunks::<4>().0;
            let i = first(words, |&b| u32::from_le_bytes(b) & 0x7F80_0000 == 0x7F80_0000)?;
            Some((i, f32::from_le_bytes(words[i])))
        }
        DType::Bf16 | DType::F16 => {
            let exponent = if dtype == DType::F16 { 0x7C00 } else { 0x7F80 };
            let words = bytes.as_chunks::<2>().0;
            let i = first(words, |&b| u16::from_le_bytes(b) & exponent == exponent)?;
            let bits = u16::from_le_bytes(words[i]);
            Some((i, if dtype == DType::F16 { decode_f16(bits) } else { decode_bf16(bits) }))
        }
        _ => None,
    }
}

/// Index of the first E4M3 NaN.
pub(crate) fn first_nan_e4m3(codes: &[u8]) -> Option<usize> {
    first(codes, |&c| c & 0x7F == 0x7F)
}

/// Index of the first E4M3 code that is no unsigned scale: a NaN or anything with the sign bit.
pub(crate) fn first_bad_ue4m3(codes: &[u8]) -> Option<usize> {
    first(codes, |&c| c >= 0x7F)
}

/// Keeps paddings and byte counts far from overflow, also where the other dimension is 0.
pub(crate) fn check_dimensions(rows: usize, cols: usize) -> Result<()> {
    const LIMIT: usize = isize::MAX as usize / 1024;
    if rows.max(cols) <= LIMIT && rows.saturating_mul(cols) <= LIMIT {
        return Ok(());
    }
    Err(Error::Core(ninfer_core::Error::OutOfRange {
        what: "matrix size",
        got: format!("{rows} × {cols}"),
        legal: format!("at most {LIMIT} elements"),
    }))
}

fn check_scales(what: &'static str, scales: &[f32]) -> Result<()> {
    // The largest code, 448, times the scale must stay finite as well.
    match scales.iter().position(|&s| !(s >= 0.0 && (448.0 * s).is_finite())) {
        Some(index) => Err(Error::Scale { what, index, value: scales[index] }),
        None => Ok(()),
    }
}
