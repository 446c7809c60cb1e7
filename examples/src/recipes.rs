//! What a `--weights` option takes, and a checkpoint read through it.

use std::fmt;
use std::str::FromStr;

use ninfer_core::WeightFormat;
use ninfer_models::weights::{ExpertPart, LayerRef, MtpState, VectorRole, WeightTable};
use ninfer_models::{Config, Result, qwen35::WeightSource};
use ninfer_quant::{PackedMatrix, Recipe, Site, TensorRole};
use serde::{Serialize, Serializer};

/// A recipe by name, or by the path of a TOML file with rules; or several with commas between them, which are applied in order
/// to each matrix: `nvfp4,bridge-fp8` first makes NVFP4 and then FP8 of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recipes(Recipe);

impl FromStr for Recipes {
    type Err = ninfer_quant::Error;

    fn from_str(text: &str) -> Result<Self, ninfer_quant::Error> {
        Recipe::open(text).map(Self)
    }
}

impl From<Recipe> for Recipes {
    fn from(recipe: Recipe) -> Self {
        Self(recipe)
    }
}

impl FromIterator<Recipe> for Recipes {
    fn from_iter<I: IntoIterator<Item = Recipe>>(recipes: I) -> Self {
        Self(Recipe::Chain(recipes.into_iter().collect()))
    }
}

impl fmt::Display for Recipes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Recipes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Recipes {
    /// The one recipe that does it all.
    #[must_use]
    pub fn recipe(&self) -> &Recipe {
        &self.0
    }

    /// The format that a matrix ends in.
    #[must_use]
    pub fn result(&self, site: &Site, stored: WeightFormat) -> WeightFormat {
        self.0.target(site, stored).result(stored)
    }

    /// Whether the codes of a matrix change, and the format that it ends in.
    #[must_use]
    pub fn outcome(&self, site: &Site, stored: WeightFormat) -> (bool, WeightFormat) {
        let target = self.0.target(site, stored);
        (!target.steps().is_empty(), target.result(stored))
    }

    /// Converts a matrix.
    ///
    /// # Errors
    /// Those of [`Target::apply`](ninfer_quant::Target::apply).
    pub fn apply(&self, m: &PackedMatrix, site: &Site) -> Result<PackedMatrix, ninfer_quant::Error> {
        self.0.target(site, m.format()).apply(m)
    }
}

/// The weights of a checkpoint, converted by recipes.
#[derive(Debug)]
pub struct Converted<'a> {
    table: &'a WeightTable,
    recipes: &'a Recipes,
    mtp: bool,
}

impl<'a> Converted<'a> {
    /// All weights; the MTP block is left out unless `mtp` is set.
    #[must_use]
    pub fn new(table: &'a WeightTable, recipes: &'a Recipes, mtp: bool) -> Self {
        Self { table, recipes, mtp: mtp && table.mtp() == MtpState::Complete }
    }
}

impl WeightSource for Converted<'_> {
    fn config(&self) -> &Config {
        self.table.config()
    }

    fn has_mtp(&self) -> bool {
        self.mtp
    }

    fn has_head(&self) -> bool {
        !self.table.shares_head()
    }

    fn matrix(&self, layer: LayerRef, role: TensorRole) -> Result<PackedMatrix> {
        self.table.matrix(layer, role, self.recipes.recipe())
    }

    fn stack(&self, layer: LayerRef, role: TensorRole) -> Result<Vec<PackedMatrix>> {
        self.table.stack(layer, role, self.recipes.recipe())
    }

    fn experts(&self, layer: LayerRef, part: ExpertPart) -> Result<Vec<PackedMatrix>> {
        self.table.experts(layer, part, self.recipes.recipe())
    }

    fn vector(&self, layer: LayerRef, role: VectorRole) -> Result<Vec<f32>> {
        self.table.vector(layer, role)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ninfer_core::shape::{self, Part};

    use super::*;

    #[test]
    fn recipes_in_a_row() {
        let recipes: Recipes = "nvfp4,bridge-fp8".parse().unwrap();
        assert_eq!(recipes.to_string(), "nvfp4,bridge-fp8");
        let result = |role| recipes.result(&Site::new(role, Part::Layer(0), 2, true), WeightFormat::Bf16);
        assert_eq!(result(TensorRole::MlpUp), WeightFormat::Fp8Row);
        assert_eq!(result(TensorRole::Router), WeightFormat::Bf16);
    }

    #[test]
    fn unknown_names_list_the_known_ones() {
        for text in ["", "nvfp5", "nvfp4,", "nvfp4, fp8"] {
            let error = text.parse::<Recipes>().unwrap_err().to_string();
            assert!(error.contains("bridge-fp8"), "{error}");
        }
    }

    /// The shipped example says in its comments what it does; that is checked here on the size it is made for.
    #[test]
    fn the_example_file_does_what_it_says() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/edges.toml");
        let recipes: Recipes = path.to_str().unwrap().parse().unwrap();
        let shape = shape::published("35b-a3b").unwrap();
        let format = recipes.recipe().formats(&shape, |_| WeightFormat::Bf16);
        let of = |role: shape::Role, part| {
            format(&shape.tensors().find(|t| t.role == role && t.part == part).unwrap()).name()
        };
        for edge in [0, 1, 38, 39] {
            assert_eq!(of(shape::Role::ExpertUp, Part::Layer(edge)), "w8");
            assert_eq!(of(shape::Role::SharedDown, Part::Layer(edge)), "w8");
        }
        assert_eq!(of(shape::Role::ExpertUp, Part::Layer(20)), "q4");
        assert_eq!(of(shape::Role::ExpertDown, Part::Layer(20)), "q5");
        assert_eq!(of(shape::Role::AttnValue, Part::Layer(19)), "fp8");
        assert_eq!(of(shape::Role::GdnQueryKey, Part::Layer(20)), "w8");
        assert_eq!(of(shape::Role::Head, Part::Head), "q6");
        assert_eq!(of(shape::Role::ExpertUp, Part::Mtp), "bf16");
    }
}
