//! Recipes: which matrix is converted to which format at load.

use std::fmt;
use std::str::FromStr;

use ninfer_core::format::GroupFormat;
use ninfer_core::{PackedRef, WeightFormat};
use serde::{Deserialize, Serialize};

use crate::bridge::{BridgeScale, bridge};
use crate::{Error, PackedMatrix, Result, TensorRole, dequantize_ref, encode, fp8};

/// What is done with one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Conversion {
    /// It stays as stored.
    Keep,
    /// It is decoded to f32 and encoded in this format. One FP8 scale for the matrix becomes one per row without decoding.
    To(WeightFormat),
    /// NVFP4 becomes FP8 by [`bridge`].
    Bridge(BridgeScale),
}

impl Conversion {
    /// The format of a matrix after the conversion.
    #[must_use]
    pub const fn result(self, stored: WeightFormat) -> WeightFormat {
        match self {
            Self::Keep => stored,
            Self::To(format) => format,
            Self::Bridge(BridgeScale::Pow2Block) => WeightFormat::Fp8Block,
            Self::Bridge(_) => WeightFormat::Fp8Row,
        }
    }

    /// Converts a matrix that stays usable.
    ///
    /// # Errors
    /// Those of [`encode()`] and [`bridge`].
    pub fn apply(self, m: &PackedMatrix) -> Result<PackedMatrix> {
        match self {
            Self::Keep => Ok(m.clone()),
            _ => self.apply_ref(&m.as_ref()),
        }
    }

    /// Converts a matrix that is given away: nothing is copied where nothing changes.
    ///
    /// # Errors
    /// Those of [`encode()`] and [`bridge`].
    pub fn apply_owned(self, m: PackedMatrix) -> Result<PackedMatrix> {
        match (self, m.format()) {
            (Self::Keep, _) => Ok(m),
            (Self::To(to), from) if to == from => Ok(m),
            (Self::To(WeightFormat::Fp8Row), WeightFormat::Fp8Tensor) => Ok(fp8::widen_to_rows(m)),
            _ => self.apply_ref(&m.as_ref()),
        }
    }

    /// Converts a borrowed matrix, for example one expert of a fused tensor.
    ///
    /// # Errors
    /// Those of [`PackedMatrix::from_ref`], [`encode()`] and [`bridge`].
    pub fn apply_ref(self, m: &PackedRef<'_>) -> Result<PackedMatrix> {
        match (self, m.format()) {
            (Self::Keep, _) => PackedMatrix::from_ref(m),
            (Self::To(to), from) if to == from => PackedMatrix::from_ref(m),
            (Self::To(WeightFormat::Fp8Row), WeightFormat::Fp8Tensor) => {
                Ok(fp8::widen_to_rows(PackedMatrix::from_ref(m)?))
            }
            (Self::To(to), _) => encode(to, m.rows(), m.cols(), &dequantize_ref(m)?),
            (Self::Bridge(scale), _) => bridge(m, scale),
        }
    }
}

/// A named rule for all matrices of a checkpoint.
///
/// | name | what it converts |
/// |---|---|
/// | `keep` | nothing |
/// | `bf16`, `f32` | every matrix, to elements without scales |
/// | `q4`, `q5`, `q6`, `w8` | the projections of the body, to groupwise integers |
/// | `nvfp4` | the projections of the body, to NVFP4 with a global scale of its own for each matrix |
/// | `fp8`, `fp8-block` | the projections of the body, to FP8 with one scale per row, or per 128×128 block |
/// | `bridge-fp8` | every matrix stored as NVFP4, by [`BridgeScale::Pow2Row`] |
/// | `bridge-fp8-amax` | every matrix stored as NVFP4, by [`BridgeScale::AmaxRow`] |
///
/// "The projections of the body" are the roles of [`TensorRole::is_body_projection`] outside the MTP block. A matrix that is
/// already in the target format stays as it is. The name is the form in which a recipe is serialised.
///
/// ```
/// use ninfer_core::WeightFormat;
/// use ninfer_quant::{Conversion, Recipe, TensorRole};
/// let recipe: Recipe = "fp8-block".parse()?;
/// let to = Conversion::To(WeightFormat::Fp8Block);
/// assert_eq!(recipe.target(TensorRole::MlpUp, false, WeightFormat::Bf16), to);
/// assert_eq!(recipe.target(TensorRole::MlpUp, true, WeightFormat::Bf16), Conversion::Keep);
/// assert_eq!(recipe.target(TensorRole::Router, false, WeightFormat::Bf16), Conversion::Keep);
/// assert!("fp7".parse::<Recipe>().unwrap_err().to_string().contains("bridge-fp8"));
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
#[non_exhaustive]
pub enum Recipe {
    /// As stored.
    #[default]
    Keep,
    /// BF16 elements.
    Bf16,
    /// F32 elements.
    F32,
    /// Groupwise integers.
    Group(GroupFormat),
    /// NVFP4, compressed-tensors convention.
    Nvfp4,
    /// FP8, one scale per row.
    Fp8,
    /// FP8, one scale per block.
    Fp8Block,
    /// NVFP4 to FP8, row scales that are a power of two times the multiplier.
    BridgeFp8,
    /// NVFP4 to FP8, row scales from the row maximum.
    BridgeFp8Amax,
}

impl Recipe {
    /// All recipes.
    pub const ALL: [Self; 12] = [
        Self::Keep,
        Self::Bf16,
        Self::F32,
        Self::Group(GroupFormat::Q4),
        Self::Group(GroupFormat::Q5),
        Self::Group(GroupFormat::Q6),
        Self::Group(GroupFormat::W8),
        Self::Nvfp4,
        Self::Fp8,
        Self::Fp8Block,
        Self::BridgeFp8,
        Self::BridgeFp8Amax,
    ];

    /// The name, as parsed by [`FromStr`].
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Group(g) => WeightFormat::Group(g).name(),
            Self::Nvfp4 => "nvfp4",
            Self::Fp8 => "fp8",
            Self::Fp8Block => "fp8-block",
            Self::BridgeFp8 => "bridge-fp8",
            Self::BridgeFp8Amax => "bridge-fp8-amax",
        }
    }

    /// The recipe under which every quantised matrix runs on the matrix units of a device.
    ///
    /// `fp4` and `fp8` say whether it multiplies E2M1 and E4M3 in hardware. Without E2M1 units NVFP4 takes the bridge to
    /// FP8, without either everything becomes BF16. This is advice for compute-bound work: kernels that decode weights on
    /// the fly run every format on every device, and need less memory.
    ///
    /// ```
    /// use ninfer_quant::Recipe;
    /// assert_eq!(Recipe::for_matrix_units(true, true).name(), "keep"); // compute capability 10.0, 12.0
    /// assert_eq!(Recipe::for_matrix_units(false, true).name(), "bridge-fp8"); // 8.9, 9.0
    /// assert_eq!(Recipe::for_matrix_units(false, false).name(), "bf16"); // 8.0
    /// ```
    #[must_use]
    pub const fn for_matrix_units(fp4: bool, fp8: bool) -> Self {
        match (fp4, fp8) {
            (true, _) => Self::Keep,
            (false, true) => Self::BridgeFp8,
            (false, false) => Self::Bf16,
        }
    }

    /// What happens to a matrix of this role stored in this format; `is_mtp` says that it belongs to the MTP block.
    #[must_use]
    pub fn target(&self, role: TensorRole, is_mtp: bool, stored: WeightFormat) -> Conversion {
        let body = |format| match role.is_body_projection() && !is_mtp && stored != format {
            true => Conversion::To(format),
            false => Conversion::Keep,
        };
        let every = |format| if stored == format { Conversion::Keep } else { Conversion::To(format) };
        let nvfp4 = |s| if stored == WeightFormat::Nvfp4 { Conversion::Bridge(s) } else { Conversion::Keep };
        match *self {
            Self::Keep => Conversion::Keep,
            Self::Bf16 => every(WeightFormat::Bf16),
            Self::F32 => every(WeightFormat::F32),
            Self::Group(g) => body(WeightFormat::Group(g)),
            Self::Nvfp4 => body(WeightFormat::Nvfp4),
            Self::Fp8 => body(WeightFormat::Fp8Row),
            Self::Fp8Block => body(WeightFormat::Fp8Block),
            Self::BridgeFp8 => nvfp4(BridgeScale::Pow2Row),
            Self::BridgeFp8Amax => nvfp4(BridgeScale::AmaxRow),
        }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Recipe {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|r| r.name() == s)
            .ok_or_else(|| Error::UnknownRecipe { got: s.to_owned(), known: Self::ALL.map(Self::name).join(", ") })
    }
}

impl TryFrom<String> for Recipe {
    type Error = Error;

    fn try_from(s: String) -> Result<Self> {
        s.parse()
    }
}

impl From<Recipe> for &'static str {
    fn from(r: Recipe) -> Self {
        r.name()
    }
}

/// Converts one matrix as the recipe says for its role; `is_mtp` says that it belongs to the MTP block.
///
/// # Errors
/// Those of [`encode()`] and [`bridge`].
///
/// ```
/// use ninfer_core::WeightFormat;
/// use ninfer_quant::{TensorRole, convert, encode};
/// let w = encode(WeightFormat::Bf16, 2, 64, &[0.25; 128])?;
/// let q = convert(&w, &"q6".parse()?, TensorRole::ExpertDown, false)?;
/// assert_eq!(q.format().name(), "q6");
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn convert(m: &PackedMatrix, recipe: &Recipe, role: TensorRole, is_mtp: bool) -> Result<PackedMatrix> {
    recipe.target(role, is_mtp, m.format()).apply(m)
}
