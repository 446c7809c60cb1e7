//! Recipes: which matrix is converted to which format at load.

mod by_role;
mod conversion;
mod custom;
mod pattern;
mod site;
mod stack;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use ninfer_core::WeightFormat;
use ninfer_core::format::{ActivationPrecision, GroupFormat};
use ninfer_core::shape::{ModelShape, TensorShape};
use serde::{Deserialize, Serialize};

pub use self::conversion::{Conversion, Target};
pub use self::custom::Custom;
pub use self::site::{RowPart, Site};
use crate::bridge::BridgeScale;
use crate::{Error, PackedMatrix, Result};

/// A rule for all matrices of a checkpoint.
///
/// | name | what it converts |
/// |---|---|
/// | `keep` | nothing |
/// | `bf16`, `f32` | every matrix, to elements without scales |
/// | `q4`, `q5`, `q6`, `w8` | the projections of the body, to groupwise integers |
/// | `groupwise` | nearly every matrix, to groupwise integers that depend on its role: see below |
/// | `nvfp4` | the projections of the body, to NVFP4 with a global scale of its own for each matrix |
/// | `fp8`, `fp8-block` | the projections of the body, to FP8 with one scale per row, or per 128×128 block |
/// | `bridge-fp8` | every matrix stored as NVFP4, by [`BridgeScale::Pow2Row`] |
/// | `bridge-fp8-block` | every matrix stored as NVFP4, by [`BridgeScale::Pow2Block`] |
/// | `bridge-fp8-amax` | every matrix stored as NVFP4, by [`BridgeScale::AmaxRow`] |
/// | `nvfp4-a4` | as `nvfp4`; what is NVFP4 then among the projections of the body takes its inputs as [`ActivationPrecision::E2m1Group16`] |
/// | `fp8-a8`, `fp8-block-a8`, `bridge-fp8-a8`, … | as without `-a8`; what is FP8 then among the projections of the body takes its inputs as [`ActivationPrecision::E4m3Token`] |
///
/// "The projections of the body" are the roles of [`TensorRole::is_body_projection`](crate::TensorRole::is_body_projection)
/// outside the MTP block. A matrix that is already in the target format keeps its codes.
///
/// Names with commas between them are applied in order: `nvfp4,bridge-fp8` first makes NVFP4 and then FP8 of it. Rules of your
/// own are read from TOML: see [`Custom`].
///
/// `groupwise` is what NInfer ships the 27B and the 35B-A3B with:
#[doc = include_str!("recipe/by_role.md")]
///
/// ```
/// use ninfer_core::{WeightFormat, shape::Part};
/// use ninfer_quant::{Conversion, Recipe, Site, TensorRole};
/// let recipe: Recipe = "fp8-block".parse()?;
/// let up = Site::new(TensorRole::MlpUp, Part::Layer(0), 4, false);
/// assert_eq!(recipe.target(&up, WeightFormat::Bf16).result(WeightFormat::Bf16), WeightFormat::Fp8Block);
/// let mtp = Site::new(TensorRole::MlpUp, Part::Mtp, 4, false);
/// assert!(recipe.target(&mtp, WeightFormat::Bf16).keeps());
/// assert!("fp7".parse::<Recipe>().unwrap_err().to_string().contains("bridge-fp8"));
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum Recipe {
    /// As stored.
    #[default]
    Keep,
    /// BF16 elements.
    Bf16,
    /// F32 elements.
    F32,
    /// Groupwise integers, the same for all.
    Group(GroupFormat),
    /// Groupwise integers by role.
    Groupwise,
    /// NVFP4, compressed-tensors convention.
    Nvfp4,
    /// The same, with E2M1 activations.
    Nvfp4A4,
    /// FP8, one scale per row.
    Fp8,
    /// The same, with E4M3 activations.
    Fp8A8,
    /// FP8, one scale per block.
    Fp8Block,
    /// The same, with E4M3 activations.
    Fp8BlockA8,
    /// NVFP4 to FP8, row scales that are a power of two times the multiplier.
    BridgeFp8,
    /// The same, with E4M3 activations.
    BridgeFp8A8,
    /// NVFP4 to FP8, block scales that are a power of two times the multiplier.
    BridgeFp8Block,
    /// The same, with E4M3 activations.
    BridgeFp8BlockA8,
    /// NVFP4 to FP8, row scales from the row maximum.
    BridgeFp8Amax,
    /// The same, with E4M3 activations.
    BridgeFp8AmaxA8,
    /// Rules from a file. It is serialised by its name, which cannot be read back.
    Custom(Arc<Custom>),
    /// One after the other.
    Chain(Arc<[Self]>),
}

impl Recipe {
    /// All recipes that have a name of their own.
    pub const ALL: [Self; 20] = [
        Self::Keep,
        Self::Bf16,
        Self::F32,
        Self::Group(GroupFormat::Q4),
        Self::Group(GroupFormat::Q5),
        Self::Group(GroupFormat::Q6),
        Self::Group(GroupFormat::W8),
        Self::Groupwise,
        Self::Nvfp4,
        Self::Nvfp4A4,
        Self::Fp8,
        Self::Fp8A8,
        Self::Fp8Block,
        Self::Fp8BlockA8,
        Self::BridgeFp8,
        Self::BridgeFp8A8,
        Self::BridgeFp8Block,
        Self::BridgeFp8BlockA8,
        Self::BridgeFp8Amax,
        Self::BridgeFp8AmaxA8,
    ];

    /// The name of one of [`Recipe::ALL`], as parsed by [`FromStr`]; [`Display`](fmt::Display) has one for every recipe.
    #[must_use]
    pub const fn name(&self) -> Option<&'static str> {
        Some(match self {
            Self::Keep => "keep",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Group(g) => WeightFormat::Group(*g).name(),
            Self::Groupwise => "groupwise",
            Self::Nvfp4 => "nvfp4",
            Self::Nvfp4A4 => "nvfp4-a4",
            Self::Fp8 => "fp8",
            Self::Fp8A8 => "fp8-a8",
            Self::Fp8Block => "fp8-block",
            Self::Fp8BlockA8 => "fp8-block-a8",
            Self::BridgeFp8 => "bridge-fp8",
            Self::BridgeFp8A8 => "bridge-fp8-a8",
            Self::BridgeFp8Block => "bridge-fp8-block",
            Self::BridgeFp8BlockA8 => "bridge-fp8-block-a8",
            Self::BridgeFp8Amax => "bridge-fp8-amax",
            Self::BridgeFp8AmaxA8 => "bridge-fp8-amax-a8",
            Self::Custom(_) | Self::Chain(_) => return None,
        })
    }

    /// Names of all recipes, with commas between them.
    #[must_use]
    pub fn names() -> String {
        Self::ALL.iter().filter_map(Self::name).collect::<Vec<_>>().join(", ")
    }

    /// A recipe by name, or from a file of rules, or several with commas between them: what a `--weights` option takes. What
    /// ends in `.toml` is a path.
    ///
    /// # Errors
    /// [`Error::UnknownRecipe`], and those of [`Custom::read`].
    pub fn open(text: &str) -> Result<Self> {
        Self::chain(text, |one| match std::path::Path::new(one).extension() {
            Some(extension) if extension == "toml" => Ok(Self::Custom(Arc::new(Custom::read(one)?))),
            _ => Self::named(one),
        })
    }

    /// The recipe under which every quantised matrix runs on the matrix units of a device.
    ///
    /// `fp4` and `fp8` say whether it multiplies E2M1 and E4M3 in hardware. Without E2M1 units NVFP4 takes the bridge to
    /// FP8, without either everything becomes BF16. This is advice for compute-bound work: kernels that decode weights on
    /// the fly run every format on every device, and need less memory.
    ///
    /// ```
    /// use ninfer_quant::Recipe;
    /// assert_eq!(Recipe::for_matrix_units(true, true), Recipe::Keep); // compute capability 10.0, 12.0
    /// assert_eq!(Recipe::for_matrix_units(false, true), Recipe::BridgeFp8); // 8.9, 9.0
    /// assert_eq!(Recipe::for_matrix_units(false, false), Recipe::Bf16); // 8.0
    /// ```
    #[must_use]
    pub const fn for_matrix_units(fp4: bool, fp8: bool) -> Self {
        match (fp4, fp8) {
            (true, _) => Self::Keep,
            (false, true) => Self::BridgeFp8,
            (false, false) => Self::Bf16,
        }
    }

    /// What happens to a matrix that stands there and is stored in this format.
    #[must_use]
    pub fn target(&self, site: &Site, stored: WeightFormat) -> Target {
        self.decide(site, stored).unwrap_or_default().simplified(stored)
    }

    /// The format of every tensor of a model under this recipe, from the one it is stored in, without loading anything: for
    /// [`memory::plan`](ninfer_core::memory::plan) and the rooflines. What is no matrix is f32.
    ///
    /// ```
    /// use ninfer_core::memory::{PlanOptions, plan};
    /// use ninfer_core::{WeightFormat, shape};
    /// use ninfer_quant::Recipe;
    /// let shape = shape::published("27b")?;
    /// let formats = Recipe::Groupwise.formats(&shape, |_| WeightFormat::Bf16);
    /// let gigabytes = plan(&shape, formats, &PlanOptions::new(4096))?.weights / 1_000_000_000;
    /// assert_eq!(gigabytes, 16);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn formats<'a>(
        &'a self,
        shape: &'a ModelShape,
        stored: impl Fn(&TensorShape) -> WeightFormat + Copy + 'a,
    ) -> impl Fn(&TensorShape) -> WeightFormat + Copy + 'a {
        move |t| match Site::of(t, shape) {
            Some(site) => {
                let stored = stored(t);
                self.target(&site, stored).result(stored)
            }
            None => WeightFormat::F32,
        }
    }

    /// As [`Recipe::target`]; `None` where the recipe has nothing to say.
    fn decide(&self, site: &Site, stored: WeightFormat) -> Option<Target> {
        use ActivationPrecision::{E2m1Group16, E4m3Token, Native};
        let every = |format| Some(Conversion::To(format).into());
        let body = |format, activations| {
            site.is_body_projection().then(|| Target::from(Conversion::To(format)).with_activations(activations))
        };
        let bridge = |scale, activations| match stored {
            WeightFormat::Nvfp4 if site.is_body_projection() => {
                Some(Target::from(Conversion::Bridge(scale)).with_activations(activations))
            }
            WeightFormat::Nvfp4 => Some(Conversion::Bridge(scale).into()),
            _ if site.is_body_projection() && activations != Native && activations.fits(stored) => {
                Some(Target::default().with_activations(activations))
            }
            _ => None,
        };
        match self {
            Self::Keep => None,
            Self::Bf16 => every(WeightFormat::Bf16),
            Self::F32 => every(WeightFormat::F32),
            Self::Group(g) => body(WeightFormat::Group(*g), Native),
            Self::Groupwise => every(WeightFormat::Group(by_role::format(site)?)),
            Self::Nvfp4 => body(WeightFormat::Nvfp4, Native),
            Self::Nvfp4A4 => body(WeightFormat::Nvfp4, E2m1Group16),
            Self::Fp8 => body(WeightFormat::Fp8Row, Native),
            Self::Fp8A8 => body(WeightFormat::Fp8Row, E4m3Token),
            Self::Fp8Block => body(WeightFormat::Fp8Block, Native),
            Self::Fp8BlockA8 => body(WeightFormat::Fp8Block, E4m3Token),
            Self::BridgeFp8 => bridge(BridgeScale::Pow2Row, Native),
            Self::BridgeFp8A8 => bridge(BridgeScale::Pow2Row, E4m3Token),
            Self::BridgeFp8Block => bridge(BridgeScale::Pow2Block, Native),
            Self::BridgeFp8BlockA8 => bridge(BridgeScale::Pow2Block, E4m3Token),
            Self::BridgeFp8Amax => bridge(BridgeScale::AmaxRow, Native),
            Self::BridgeFp8AmaxA8 => bridge(BridgeScale::AmaxRow, E4m3Token),
            Self::Custom(custom) => custom.decide(site, stored),
            Self::Chain(recipes) => recipes.iter().fold(None, |done: Option<Target>, recipe| {
                let format = done.as_ref().map_or(stored, |target| target.result(stored));
                match (done, recipe.decide(site, format)) {
                    (Some(done), Some(next)) => Some(done.then(next)),
                    (done, next) => done.or(next),
                }
            }),
        }
    }

    fn named(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|r| r.name() == Some(name))
            .ok_or_else(|| Error::UnknownRecipe { got: name.to_owned(), known: Self::names() })
    }

    fn chain(text: &str, one: impl Fn(&str) -> Result<Self>) -> Result<Self> {
        match text.contains(',') {
            true => Ok(Self::Chain(text.split(',').map(one).collect::<Result<_>>()?)),
            false => one(text),
        }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Custom(custom) => f.write_str(custom.name()),
            Self::Chain(recipes) => recipes.iter().enumerate().try_for_each(|(i, recipe)| {
                f.write_str(if i == 0 { "" } else { "," })?;
                recipe.fmt(f)
            }),
            named => f.write_str(named.name().unwrap_or_default()),
        }
    }
}

impl FromStr for Recipe {
    type Err = Error;

    /// A name of [`Recipe::ALL`], or several with commas between them.
    fn from_str(s: &str) -> Result<Self> {
        Self::chain(s, Self::named)
    }
}

impl TryFrom<String> for Recipe {
    type Error = Error;

    fn try_from(s: String) -> Result<Self> {
        s.parse()
    }
}

impl From<Recipe> for String {
    fn from(r: Recipe) -> Self {
        r.to_string()
    }
}

/// Converts one matrix as the recipe says for its site.
///
/// # Errors
/// Those of [`encode()`](crate::encode()) and [`bridge`](crate::bridge::bridge).
///
/// ```
/// use ninfer_core::{WeightFormat, shape::Part};
/// use ninfer_quant::{Site, TensorRole, convert, encode};
/// let w = encode(WeightFormat::Bf16, 2, 64, &[0.25; 128])?;
/// let q = convert(&w, &"q6".parse()?, &Site::new(TensorRole::ExpertDown, Part::Layer(0), 1, true))?;
/// assert_eq!(q.format().name(), "q6");
/// # Ok::<(), ninfer_quant::Error>(())
/// ```
pub fn convert(m: &PackedMatrix, recipe: &Recipe, site: &Site) -> Result<PackedMatrix> {
    recipe.target(site, m.format()).apply(m)
}
