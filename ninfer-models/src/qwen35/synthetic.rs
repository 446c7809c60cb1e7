//! Weights of a true shape made from a seed, for benchmarks and tests.

use ninfer_core::WeightFormat;
use ninfer_core::backend::Synthetic;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::shape::Part;
use ninfer_quant::{PackedMatrix, Recipe, RowPart, Site, TensorRole, encode};

use super::load::WeightSource;
use crate::Result;
use crate::config::{Config, Ffn};
use crate::weights::{ExpertPart, LayerRef, VectorRole};

/// Random weights for any configuration.
///
/// Every value is a pure function of seed, tensor and index, small enough that activations stay finite. Projections of
/// the body have the chosen format; embedding, head, router, gates and the MTP block are BF16. With a recipe, all matrices
/// have the formats that the recipe gives a BF16 model. The text such a model writes means nothing; its speed and memory
/// do. A backend that can makes the values by itself, where they are needed.
#[derive(Clone, Debug)]
pub struct SyntheticWeights {
    config: Config,
    format: WeightFormat,
    recipe: Option<Recipe>,
    seed: u64,
}

impl SyntheticWeights {
    /// Weights for a configuration.
    #[must_use]
    pub fn new(config: Config, format: WeightFormat, seed: u64) -> Self {
        Self { config, format, recipe: None, seed }
    }

    /// Weights in the formats that a recipe gives a model stored in BF16.
    #[must_use]
    pub fn with_recipe(config: Config, recipe: Recipe, seed: u64) -> Self {
        Self { config, format: WeightFormat::Bf16, recipe: Some(recipe), seed }
    }

    /// Format and activation precision of some rows of a matrix.
    fn kind(&self, layer: LayerRef, role: TensorRole, rows: RowPart) -> (WeightFormat, ActivationPrecision) {
        let stored = WeightFormat::Bf16;
        let Some(recipe) = &self.recipe else {
            let body = role.is_body_projection() && layer != LayerRef::Mtp;
            return (if body { self.format } else { stored }, ActivationPrecision::Native);
        };
        let place = match layer {
            LayerRef::Main(i) => Part::Layer(i),
            LayerRef::Mtp => Part::Mtp,
            LayerRef::Root if role == TensorRole::Head => Part::Head,
            LayerRef::Root => Part::Embedding,
        };
        let has_experts = matches!(self.config.ffn, Ffn::Moe { .. });
        let target =
            recipe.target(&Site::new(role, place, self.config.layers.len(), has_experts).with_rows(rows), stored);
        (target.result(stored), target.activations(stored))
    }

    /// Runs of rows of a matrix with their formats.
    fn runs(&self, layer: LayerRef, role: TensorRole) -> Vec<(usize, (WeightFormat, ActivationPrecision))> {
        let (a, g) = (&self.config.attention, &self.config.gdn);
        let parts = match role {
            TensorRole::AttnQ => vec![(RowPart::Query, a.head_dim), (RowPart::Gate, a.head_dim)],
            TensorRole::GdnQkv => vec![(RowPart::QueryKey, 2 * g.keys()), (RowPart::Value, g.values())],
            _ => vec![(RowPart::All, self.shape(role).0)],
        };
        let (mut rest, mut runs) = (self.shape(role).0, Vec::<(usize, _)>::new());
        for (part, count) in parts.into_iter().cycle() {
            let (count, kind) = (count.min(rest), self.kind(layer, role, part));
            match runs.last_mut() {
                Some((rows, last)) if *last == kind => *rows += count,
                _ => runs.push((count, kind)),
            }
            rest -= count;
            if rest == 0 || count == 0 {
                break;
            }
        }
        runs
    }

    fn matrix_of(
        &self,
        key: u64,
        role: TensorRole,
        (format, activations): (WeightFormat, ActivationPrecision),
        rows: usize,
        cols: usize,
    ) -> Result<PackedMatrix> {
        // Uniform in ±√(3/cols), so that a product with unit-variance inputs has unit variance.
        let scale = (3.0 / cols as f32).sqrt();
        let values: Vec<f32> = Uniform::new(self.seed, key).take(rows * cols).map(|x| x * scale).collect();
        encode(format, rows, cols, &values)
            .and_then(|m| m.with_activations(activations))
            .map_err(|source| crate::Error::Quant { module: format!("{role:?}"), source })
    }

    fn shape(&self, role: TensorRole) -> (usize, usize) {
        let (c, h) = (&self.config, self.config.hidden);
        let (a, g) = (&c.attention, &c.gdn);
        let (intermediate, experts, width, shared) = match c.ffn {
            Ffn::Dense { intermediate } => (intermediate, 0, 0, 0),
            Ffn::Moe { experts, width, shared_width, .. } => (0, experts, width, shared_width),
        };
        match role {
            TensorRole::GdnQkv => (g.channels(), h),
            TensorRole::GdnZ => (g.values(), h),
            TensorRole::GdnA | TensorRole::GdnB => (g.value_heads, h),
            TensorRole::GdnOut => (h, g.values()),
            TensorRole::AttnQ => (a.heads * 2 * a.head_dim, h),
            TensorRole::AttnK | TensorRole::AttnV => (a.kv_heads * a.head_dim, h),
            TensorRole::AttnOut => (h, a.heads * a.head_dim),
            TensorRole::MlpGate | TensorRole::MlpUp => (intermediate, h),
            TensorRole::MlpDown => (h, intermediate),
            TensorRole::Router => (experts, h),
            TensorRole::ExpertGate | TensorRole::ExpertUp => (width, h),
            TensorRole::ExpertDown => (h, width),
            TensorRole::SharedGate | TensorRole::SharedUp => (shared, h),
            TensorRole::SharedDown => (h, shared),
            TensorRole::SharedExpertGate => (1, h),
            TensorRole::MtpFc => (h, 2 * h),
            _ => (c.vocab, h),
        }
    }
}

/// The matrices of an expert, in the order in which they are stacked.
fn expert_roles(part: ExpertPart) -> &'static [TensorRole] {
    match part {
        ExpertPart::GateUp => &[TensorRole::ExpertGate, TensorRole::ExpertUp],
        ExpertPart::Down => &[TensorRole::ExpertDown],
    }
}

/// A number that differs for every tensor.
fn key(layer: LayerRef, kind: u64, index: usize) -> u64 {
    let layer = match layer {
        LayerRef::Root => 0,
        LayerRef::Mtp => 1,
        LayerRef::Main(i) => 2 + i as u64,
    };
    (layer << 40) | (kind << 24) | index as u64
}

impl WeightSource for SyntheticWeights {
    fn config(&self) -> &Config {
        &self.config
    }

    fn has_mtp(&self) -> bool {
        self.config.mtp_layers > 0
    }

    fn has_head(&self) -> bool {
        !self.config.tied
    }

    fn matrix(&self, layer: LayerRef, role: TensorRole) -> Result<PackedMatrix> {
        let (rows, cols) = self.shape(role);
        let kind = self.kind(layer, role, RowPart::All);
        self.matrix_of(key(layer, 1 + role as u64, 0), role, kind, rows, cols)
    }

    fn stack(&self, layer: LayerRef, role: TensorRole) -> Result<Vec<PackedMatrix>> {
        let cols = self.shape(role).1;
        let runs = self.runs(layer, role).into_iter().enumerate();
        runs.map(|(i, (rows, kind))| self.matrix_of(key(layer, 1 + role as u64, i), role, kind, rows, cols)).collect()
    }

    fn experts(&self, layer: LayerRef, part: ExpertPart) -> Result<Vec<PackedMatrix>> {
        let Ffn::Moe { experts, .. } = self.config.ffn else { return Ok(Vec::new()) };
        let each = (0..experts).flat_map(|e| expert_roles(part).iter().map(move |r| (e, *r)));
        each.map(|(e, role)| {
            let (rows, cols) = self.shape(role);
            self.matrix_of(key(layer, 1 + role as u64, e), role, self.kind(layer, role, RowPart::All), rows, cols)
        })
        .collect()
    }

    fn synthetic(&self, layer: LayerRef, role: TensorRole) -> Vec<Synthetic> {
        let cols = self.shape(role).1;
        let seed = mix(self.seed ^ key(layer, 1 + role as u64, 0));
        let runs = self.runs(layer, role).into_iter();
        runs.map(|(rows, (format, activations))| Synthetic { format, activations, rows, cols, seed }).collect()
    }

    fn synthetic_experts(&self, layer: LayerRef, part: ExpertPart) -> Vec<Synthetic> {
        let Ffn::Moe { experts, .. } = self.config.ffn else { return Vec::new() };
        let each = (0..experts).flat_map(|_| expert_roles(part)).map(|&role| {
            let ((rows, cols), (format, activations)) = (self.shape(role), self.kind(layer, role, RowPart::All));
            let seed = mix(self.seed ^ key(layer, 1 + role as u64, 0));
            Synthetic { format, activations, rows, cols, seed }
        });
        each.collect()
    }

    fn vector(&self, layer: LayerRef, role: VectorRole) -> Result<Vec<f32>> {
        let (c, g) = (&self.config, &self.config.gdn);
        let (len, offset, spread) = match role {
            VectorRole::Conv => (g.channels() * g.conv_kernel, 0.0, 0.5),
            // Decays between e^−0.2 and e^−0.01 a token.
            VectorRole::ALog => (g.value_heads, -2.0, 0.7),
            VectorRole::DtBias => (g.value_heads, 0.0, 1.0),
            VectorRole::GdnNorm => (g.value_dim, 1.0, 0.1),
            VectorRole::QNorm | VectorRole::KNorm => (c.attention.head_dim, 0.0, 0.1),
            _ => (c.hidden, 0.0, 0.1),
        };
        let values = Uniform::new(self.seed, key(layer, 64 + role as u64, 0));
        Ok(values.take(len).map(|x| offset + spread * x).collect())
    }
}

/// Uniform numbers in −1 … 1 by counting and mixing.
struct Uniform(u64);

impl Uniform {
    fn new(seed: u64, key: u64) -> Self {
        Self(mix(seed ^ mix(key)))
    }
}

impl Iterator for Uniform {
    type Item = f32;

    fn next(&mut self) -> Option<f32> {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        Some((mix(self.0) >> 40) as f32 / 8_388_608.0 - 1.0)
    }
}

/// Finaliser of SplitMix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
