//! Weight formats and borrowed packed matrices.
//!
//! A matrix is always `[rows, cols]` = `[out features, in features]`, row-major, and is applied as `y = x Wᵀ`.
//! The convention of every scale is part of the type, so that dividing where a format multiplies does not compile into
//! garbage: [`GlobalScale`] says which of the two NVFP4 conventions holds, and [`PackedRef::new`] refuses data whose
//! lengths do not fit the shape. What happens to the inputs of a product belongs to the matrix, too: [`ActivationPrecision`].

mod activations;

use std::fmt;

pub use self::activations::ActivationPrecision;
use crate::error::expect_eq;
use crate::{DType, Error, Result};

/// Columns that share one E4M3 scale in NVFP4.
pub const NVFP4_GROUP: usize = 16;
/// Rows and columns of one FP8 block.
pub const FP8_BLOCK: usize = 128;
/// Columns are padded to a multiple of this in the groupwise-int planes.
pub const GROUP_PAD: usize = 128;

/// Symmetric integer codes with one f16 scale per group of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupFormat {
    /// 4-bit codes, groups of 64.
    Q4,
    /// 5-bit codes, groups of 64.
    Q5,
    /// 6-bit codes, groups of 64.
    Q6,
    /// 8-bit codes, groups of 32.
    W8,
}

impl GroupFormat {
    /// Columns that share a scale.
    #[must_use]
    pub const fn group_size(self) -> usize {
        match self {
            Self::W8 => 32,
            _ => 64,
        }
    }

    /// Bits of a code.
    #[must_use]
    pub const fn bits(self) -> usize {
        match self {
            Self::Q4 => 4,
            Self::Q5 => 5,
            Self::Q6 => 6,
            Self::W8 => 8,
        }
    }

    /// Largest code magnitude the encoder writes.
    #[must_use]
    pub const fn qmax(self) -> i32 {
        match self {
            Self::Q4 => 7,
            Self::Q5 => 15,
            Self::Q6 => 31,
            Self::W8 => 127,
        }
    }

    /// Bytes of the high plane of one group (0 where the base plane holds the whole code).
    #[must_use]
    pub const fn high_bytes(self) -> usize {
        match self {
            Self::Q5 => 8,
            Self::Q6 => 16,
            _ => 0,
        }
    }
}

/// How a matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightFormat {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// E4M3 codes with one scale for the matrix.
    Fp8Tensor,
    /// E4M3 codes with one scale per row.
    Fp8Row,
    /// E4M3 codes with one scale per 128×128 block.
    Fp8Block,
    /// E2M1 codes, one E4M3 scale per 16 columns, one f32 scale for the matrix.
    Nvfp4,
    /// Groupwise integers.
    Group(GroupFormat),
}

impl WeightFormat {
    /// Short lower-case name, as used in tables and recipes.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8Tensor => "fp8-tensor",
            Self::Fp8Row => "fp8",
            Self::Fp8Block => "fp8-block",
            Self::Nvfp4 => "nvfp4",
            Self::Group(GroupFormat::Q4) => "q4",
            Self::Group(GroupFormat::Q5) => "q5",
            Self::Group(GroupFormat::Q6) => "q6",
            Self::Group(GroupFormat::W8) => "w8",
        }
    }

    /// Bytes that a `[rows, cols]` matrix occupies in this format, scales included.
    ///
    /// ```
    /// use ninfer_core::WeightFormat;
    /// assert_eq!(WeightFormat::Bf16.bytes(2, 128), 512);
    /// assert_eq!(WeightFormat::Nvfp4.bytes(2, 128), 2 * (64 + 8) + 4);
    /// ```
    #[must_use]
    pub const fn bytes(self, rows: usize, cols: usize) -> usize {
        let n = rows * cols;
        match self {
            Self::F32 => 4 * n,
            Self::F16 | Self::Bf16 => 2 * n,
            Self::Fp8Tensor => n + 4,
            Self::Fp8Row => n + 4 * rows,
            Self::Fp8Block => n + 4 * rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK),
            Self::Nvfp4 => rows * (cols.div_ceil(2) + cols.div_ceil(NVFP4_GROUP)) + 4,
            Self::Group(g) => {
                let groups = cols.next_multiple_of(GROUP_PAD) / g.group_size();
                rows * groups * (32 + g.high_bytes() + 2)
            }
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The matrix-wide NVFP4 scale with its convention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GlobalScale {
    /// compressed-tensors `weight_global_scale`: the group scale is `e4m3 / g`.
    Divide(f32),
    /// ModelOpt `weight_scale_2`: the group scale is `e4m3 · g`.
    Multiply(f32),
}

impl GlobalScale {
    /// The f32 scale of a group whose decoded E4M3 scale is `e4m3`, rounded exactly as the format's own library does.
    #[must_use]
    pub fn apply(self, e4m3: f32) -> f32 {
        match self {
            Self::Divide(g) => e4m3 / g,
            Self::Multiply(g) => e4m3 * g,
        }
    }
}

/// Scales of an FP8 matrix; a weight is `e4m3(code) · scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fp8Scales<'a> {
    /// One scale.
    Tensor(f32),
    /// `[rows]`.
    Row(&'a [f32]),
    /// `[⌈rows/128⌉, ⌈cols/128⌉]`, row-major.
    Block(&'a [f32]),
}

/// Bytes of a packed matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum PackedData<'a> {
    /// Little-endian F32, F16 or BF16 elements, `rows · cols`.
    Plain {
        /// F32, F16 or Bf16.
        dtype: DType,
        /// The elements.
        bytes: &'a [u8],
    },
    /// One E4M3 code per element.
    Fp8 {
        /// `[rows, cols]`.
        codes: &'a [u8],
        /// Multipliers.
        scales: Fp8Scales<'a>,
    },
    /// E2M1 codes, two per byte, even column in the low nibble.
    Nvfp4 {
        /// `[rows, cols/2]`.
        codes: &'a [u8],
        /// E4M3 codes `[rows, cols/16]`, row-major (never swizzled).
        scales: &'a [u8],
        /// Second-level scale and its convention.
        global: GlobalScale,
    },
    /// Groupwise integers in three planes, columns padded to a multiple of 128 with zero codes.
    Group {
        /// Code width and group size.
        format: GroupFormat,
        /// 32 bytes per group: Q4/Q5/Q6 hold the low four bits of two's complement, two lanes per byte, even lane low;
        /// W8 holds one signed byte per lane.
        base: &'a [u8],
        /// Q5: 8 bytes per group, one bit per lane; Q6: 16 bytes per group, two bits per lane; empty otherwise.
        /// Lane 0 is the lowest bit.
        high: &'a [u8],
        /// Little-endian f16 `[rows, groups]`.
        scales: &'a [u8],
    },
}

/// A borrowed packed matrix `[rows, cols]` whose lengths were checked.
///
/// ```
/// use ninfer_core::{DType, PackedData, PackedRef};
/// let bytes = [0u8; 2 * 3 * 4];
/// let m = PackedRef::new(2, 3, PackedData::Plain { dtype: DType::F32, bytes: &bytes })?;
/// assert_eq!((m.rows(), m.cols()), (2, 3));
/// assert!(PackedRef::new(2, 4, PackedData::Plain { dtype: DType::F32, bytes: &bytes }).is_err());
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackedRef<'a> {
    rows: usize,
    cols: usize,
    data: PackedData<'a>,
    activations: ActivationPrecision,
}

impl<'a> PackedRef<'a> {
    /// Checks every length against the shape. Activations are [`ActivationPrecision::Native`].
    ///
    /// # Errors
    /// [`Error::Shape`] naming the part that does not fit; [`Error::OutOfRange`] for an element type that is not a float.
    pub fn new(rows: usize, cols: usize, data: PackedData<'a>) -> Result<Self> {
        const OP: &str = "PackedRef::new";
        let size = |a: usize, b: usize| {
            a.checked_mul(b).ok_or(Error::OutOfRange {
                what: "matrix size",
                got: format!("{a} × {b}"),
                legal: "products that fit in memory".to_owned(),
            })
        };
        let n = size(rows, cols)?;
        match data {
            PackedData::Plain { dtype, bytes } => {
                if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
                    return Err(Error::OutOfRange {
                        what: "dtype of a plain matrix",
                        got: dtype.to_string(),
                        legal: "F32, F16, BF16".to_owned(),
                    });
                }
                expect_eq(OP, "byte length", size(n, dtype.size())?, bytes.len())?;
            }
            PackedData::Fp8 { codes, scales } => {
                expect_eq(OP, "codes", n, codes.len())?;
                match scales {
                    Fp8Scales::Tensor(_) => {}
                    Fp8Scales::Row(s) => expect_eq(OP, "row scales", rows, s.len())?,
                    Fp8Scales::Block(s) => {
                        expect_eq(OP, "block scales", rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK), s.len())?;
                    }
                }
            }
            PackedData::Nvfp4 { codes, scales, .. } => {
                if !cols.is_multiple_of(NVFP4_GROUP) {
                    return Err(Error::Shape {
                        op: OP,
                        what: "NVFP4 columns",
                        expected: format!("a multiple of {NVFP4_GROUP}"),
                        got: cols.to_string(),
                    });
                }
                expect_eq(OP, "codes", n / 2, codes.len())?;
                expect_eq(OP, "group scales", n / NVFP4_GROUP, scales.len())?;
            }
            PackedData::Group { format, base, high, scales } => {
                let groups = size(rows, cols.next_multiple_of(GROUP_PAD) / format.group_size())?;
                expect_eq(OP, "base plane", size(groups, 32)?, base.len())?;
                expect_eq(OP, "high plane", size(groups, format.high_bytes())?, high.len())?;
                expect_eq(OP, "group scales", size(groups, 2)?, scales.len())?;
            }
        }
        Ok(Self { rows, cols, data, activations: ActivationPrecision::Native })
    }

    /// The same matrix with another precision of its inputs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the format cannot have it.
    pub fn with_activations(self, activations: ActivationPrecision) -> Result<Self> {
        activations.check(self.format())?;
        Ok(Self { activations, ..self })
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

    /// What a product does to its input rows.
    #[must_use]
    pub fn activations(&self) -> ActivationPrecision {
        self.activations
    }

    /// The bytes.
    #[must_use]
    pub fn data(&self) -> PackedData<'a> {
        self.data
    }

    /// The storage format.
    #[must_use]
    pub fn format(&self) -> WeightFormat {
        match self.data {
            PackedData::Plain { dtype: DType::F32, .. } => WeightFormat::F32,
            PackedData::Plain { dtype: DType::F16, .. } => WeightFormat::F16,
            PackedData::Plain { .. } => WeightFormat::Bf16,
            PackedData::Fp8 { scales: Fp8Scales::Tensor(_), .. } => WeightFormat::Fp8Tensor,
            PackedData::Fp8 { scales: Fp8Scales::Row(_), .. } => WeightFormat::Fp8Row,
            PackedData::Fp8 { .. } => WeightFormat::Fp8Block,
            PackedData::Nvfp4 { .. } => WeightFormat::Nvfp4,
            PackedData::Group { format, .. } => WeightFormat::Group(format),
        }
    }

    /// Bytes of codes and scales.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.format().bytes(self.rows, self.cols)
    }
}
