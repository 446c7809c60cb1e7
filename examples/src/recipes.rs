//! Weight recipes in a row: `nvfp4,bridge-fp8` first makes NVFP4 and then FP8 of it.

use std::fmt;
use std::str::FromStr;

use ninfer_core::WeightFormat;
use ninfer_models::weights::{ExpertPart, LayerRef, MtpState, VectorRole, WeightTable};
use ninfer_models::{Config, Error, Result, qwen35::WeightSource};
use ninfer_quant::{Conversion, PackedMatrix, Recipe, TensorRole};
use serde::{Serialize, Serializer};

/// One or more recipes, applied in order to each matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipes {
    first: Recipe,
    rest: Vec<Recipe>,
}

impl Default for Recipes {
    fn default() -> Self {
        Self { first: Recipe::Keep, rest: Vec::new() }
    }
}

impl FromStr for Recipes {
    type Err = ninfer_quant::Error;

    fn from_str(text: &str) -> Result<Self, ninfer_quant::Error> {
        let mut names = text.split(',');
        let first = names.next().unwrap_or_default().parse()?;
        Ok(Self { first, rest: names.map(str::parse).collect::<Result<_, _>>()? })
    }
}

impl fmt::Display for Recipes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        self.rest.iter().try_for_each(|recipe| write!(f, ",{recipe}"))
    }
}

impl Serialize for Recipes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Recipes {
    /// Whether every matrix stays as it is stored.
    #[must_use]
    pub fn keeps_all(&self) -> bool {
        self.first == Recipe::Keep && self.rest.iter().all(|&recipe| recipe == Recipe::Keep)
    }

    /// The format that a matrix ends in.
    #[must_use]
    pub fn result(&self, role: TensorRole, is_mtp: bool, stored: WeightFormat) -> WeightFormat {
        let step = |format, recipe: &Recipe| recipe.target(role, is_mtp, format).result(format);
        std::iter::once(&self.first).chain(&self.rest).fold(stored, step)
    }

    /// Whether a matrix is changed, and the format that it ends in.
    #[must_use]
    pub fn outcome(&self, layer: LayerRef, role: TensorRole, stored: WeightFormat) -> (bool, WeightFormat) {
        std::iter::once(&self.first).chain(&self.rest).fold((false, stored), |(changed, format), recipe| {
            let conversion = recipe.target(role, layer.is_mtp(), format);
            (changed || conversion != Conversion::Keep, conversion.result(format))
        })
    }

    /// Converts a matrix as all recipes say, one after the other.
    ///
    /// # Errors
    /// Those of [`Conversion::apply`].
    pub fn apply(
        &self,
        m: &PackedMatrix,
        layer: LayerRef,
        role: TensorRole,
    ) -> Result<PackedMatrix, ninfer_quant::Error> {
        let first = self.first.target(role, layer.is_mtp(), m.format()).apply(m)?;
        self.rest.iter().try_fold(first, |m, r| r.target(role, layer.is_mtp(), m.format()).apply_owned(m))
    }

    /// Applies all recipes but the first.
    fn finish(&self, m: PackedMatrix, layer: LayerRef, role: TensorRole) -> Result<PackedMatrix> {
        self.rest.iter().try_fold(m, |m, recipe| {
            let module = || format!("{layer} {role}");
            let conversion = recipe.target(role, layer.is_mtp(), m.format());
            conversion.apply_owned(m).map_err(|source| Error::Quant { module: module(), source })
        })
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
        let m = self.table.matrix(layer, role, &self.recipes.first)?;
        self.recipes.finish(m, layer, role)
    }

    fn experts(&self, layer: LayerRef, part: ExpertPart) -> Result<Vec<PackedMatrix>> {
        let pair = [TensorRole::ExpertGate, TensorRole::ExpertUp];
        let roles = if part == ExpertPart::GateUp { &pair[..] } else { &[TensorRole::ExpertDown] };
        let stacked = self.table.experts(layer, part, &self.recipes.first)?;
        stacked.into_iter().zip(roles.iter().cycle()).map(|(m, &role)| self.recipes.finish(m, layer, role)).collect()
    }

    fn vector(&self, layer: LayerRef, role: VectorRole) -> Result<Vec<f32>> {
        self.table.vector(layer, role)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_in_a_row() {
        let recipes: Recipes = "nvfp4,bridge-fp8".parse().unwrap();
        assert_eq!(recipes.to_string(), "nvfp4,bridge-fp8");
        assert_eq!(recipes.result(TensorRole::MlpUp, false, WeightFormat::Bf16), WeightFormat::Fp8Row);
        assert_eq!(recipes.result(TensorRole::Router, false, WeightFormat::Bf16), WeightFormat::Bf16);
        assert!(!recipes.keeps_all() && Recipes::default().keeps_all());
    }

    #[test]
    fn unknown_names_list_the_known_ones() {
        for text in ["", "nvfp5", "nvfp4,", "nvfp4, fp8"] {
            let error = text.parse::<Recipes>().unwrap_err().to_string();
            assert!(error.contains("bridge-fp8"), "{error}");
        }
    }
}
