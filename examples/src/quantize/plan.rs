//! Which tensors the output has, and where each comes from.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ninfer_core::format::ActivationPrecision;
use ninfer_core::{DType, WeightFormat};
use ninfer_models::Error;
use ninfer_models::checkpoint::NewTensor;
use ninfer_models::weights::{LayerRef, MatrixPlace, WeightTable};
use ninfer_quant::Target;
use ninfer_quant::checkpoint::{ACTIVATION_SUFFIXES, StoredKind};
use ninfer_quant::writer::{self, BlockScaleName};

use crate::Result;
use crate::recipes::Recipes;

/// Scales that stand beside a matrix for the sake of the KV cache: they stay, whatever becomes of the matrix.
const CACHE_SCALES: [&str; 2] = ["k_scale", "v_scale"];

/// What becomes of one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// Whether a recipe changes its codes.
    pub changed: bool,
    /// How it will be stored: in one piece, or in several from the top where a recipe treats its rows differently.
    pub pieces: Vec<Piece>,
}

/// Rows of a matrix that are stored in one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Piece {
    /// How many.
    pub rows: usize,
    /// How they will be stored.
    pub kind: StoredKind,
    /// What happens to the inputs of products with them.
    pub activations: ActivationPrecision,
}

impl Outcome {
    /// Names of the formats.
    #[must_use]
    pub fn formats(&self) -> String {
        let mut names: Vec<&str> = self.pieces.iter().map(|p| p.kind.name()).collect();
        names.dedup();
        names.join(", ")
    }

    /// The kind of what stays in one piece.
    fn whole(&self) -> Option<StoredKind> {
        match self.pieces.as_slice() {
            [one] => Some(one.kind),
            _ => None,
        }
    }
}

/// What makes some tensors of the output.
#[derive(Clone, Debug)]
pub(super) enum Action {
    /// The bytes of a stored tensor as they are; the matrices whose parts it holds are checked before.
    Copy { tensor: usize, output: usize, check: Vec<usize> },
    /// A matrix, converted, as tensors of its own.
    Matrix { place: usize, outputs: Range<usize> },
    /// A matrix, converted, as a part of a fused tensor.
    Part { place: usize, output: usize, offset: u64 },
}

/// All tensors of the output.
#[derive(Debug)]
pub struct Plan {
    pub(super) places: Vec<MatrixPlace>,
    pub(super) outcomes: Vec<Outcome>,
    pub(super) actions: Vec<Action>,
    pub(super) blocks: BlockScaleName,
    tensors: Vec<NewTensor>,
    is_copy: bool,
}

impl Plan {
    pub(super) fn new(table: &WeightTable, recipes: &Recipes) -> Result<Self> {
        let places = table.places();
        let outcomes = places.iter().map(|p| outcome(table, recipes, p)).collect::<Result<Vec<_>>>()?;
        let pieces = || outcomes.iter().flat_map(|o| &o.pieces);
        let native = pieces().all(|p| p.activations == ActivationPrecision::Native);
        let is_copy = native && !outcomes.iter().any(|o| o.changed);
        let quantised = |p: &&Piece| !matches!(p.kind, StoredKind::Plain(_));
        let only_blocks = native && pieces().filter(quantised).all(|p| p.kind == StoredKind::Fp8Block);
        let blocks = if only_blocks { BlockScaleName::WeightScaleInv } else { BlockScaleName::WeightScale };
        let mut plan = Self { places, outcomes, actions: Vec::new(), blocks, tensors: Vec::new(), is_copy };
        plan.lay_out(table)?;
        Ok(plan)
    }

    /// Every matrix and what becomes of it.
    pub fn matrices(&self) -> impl Iterator<Item = (&MatrixPlace, &Outcome)> {
        self.places.iter().zip(&self.outcomes)
    }

    /// Every module of the output that is a matrix, or a piece of one, with its name.
    pub fn modules(&self) -> impl Iterator<Item = (&MatrixPlace, String, Piece)> {
        self.matrices().flat_map(|(place, outcome)| {
            let pieces = outcome.pieces.iter().enumerate();
            pieces.map(move |(i, &piece)| (place, piece_name(place, i, outcome), piece))
        })
    }

    /// The tensors of the output.
    #[must_use]
    pub fn tensors(&self) -> &[NewTensor] {
        &self.tensors
    }

    /// Bytes of all tensors of the output.
    #[must_use]
    pub fn output_bytes(&self) -> u64 {
        self.tensors.iter().map(NewTensor::bytes).sum()
    }

    /// Whether nothing changes, so that every tensor is copied.
    #[must_use]
    pub fn is_copy(&self) -> bool {
        self.is_copy
    }

    /// Matrices and other tensors that are done one by one.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.actions.len()
    }

    /// Follows the order of the input, so that what was stored side by side stays so.
    fn lay_out(&mut self, table: &WeightTable) -> Result<()> {
        let mut owners: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (i, place) in self.places.iter().enumerate() {
            place.tensors.iter().for_each(|&t| owners.entry(t).or_default().push(i));
        }
        let split = self.layers_to_split();
        for (tensor, entry) in table.checkpoint().tensors().iter().enumerate() {
            let owned = owners.get(&tensor).map_or(&[][..], Vec::as_slice);
            let first = owned.first().and_then(|&i| Some((i, self.places.get(i)?)));
            let suffix = entry.name().rsplit_once('.').map_or("", |(_, suffix)| suffix);
            match first {
                _ if self.is_copy => {
                    let check = owned.iter().copied().filter(|&i| self.places[i].tensors.first() == Some(&tensor));
                    let check = check.collect();
                    self.add_copy(NewTensor::like(entry), tensor, check);
                }
                None if ACTIVATION_SUFFIXES.contains(&suffix) && !CACHE_SCALES.contains(&suffix) => {}
                None => self.add_copy(NewTensor::like(entry), tensor, Vec::new()),
                // A module is written when the first of its tensors comes up.
                Some((_, place)) if place.tensors.first() != Some(&tensor) => {}
                Some((i, place)) if place.fused.is_none() => self.add_matrix(i)?,
                Some((_, place)) if split.contains(&place.layer) => {
                    owned.iter().try_for_each(|&i| self.add_matrix(i))?;
                }
                Some((i, _)) => self.add_parts(entry.name(), entry.shape(), i, owned),
            }
        }
        Ok(())
    }

    /// Layers whose fused experts cannot stay fused: some have scales, or differ in format.
    fn layers_to_split(&self) -> BTreeSet<LayerRef> {
        let mut kinds: BTreeMap<(LayerRef, usize), StoredKind> = BTreeMap::new();
        let mut split = BTreeSet::new();
        for (place, outcome) in self.matrices() {
            let (Some(_), Some(&tensor)) = (&place.fused, place.tensors.first()) else { continue };
            let own = outcome.whole();
            let first = own.map(|own| *kinds.entry((place.layer, tensor)).or_insert(own));
            if own != first || !matches!(own, Some(StoredKind::Plain(_))) {
                split.insert(place.layer);
            }
        }
        split
    }

    fn add_copy(&mut self, new: NewTensor, tensor: usize, check: Vec<usize>) {
        self.actions.push(Action::Copy { tensor, output: self.tensors.len(), check });
        self.tensors.push(new);
    }

    fn add_matrix(&mut self, place: usize) -> Result<()> {
        let (p, outcome) = (&self.places[place], &self.outcomes[place]);
        let first = self.tensors.len();
        for (i, piece) in outcome.pieces.iter().enumerate() {
            let module = piece_name(p, i, outcome);
            let layouts = writer::layout(piece.kind, piece.rows, p.cols, self.blocks)
                .map_err(|source| Error::Quant { module: module.clone(), source })?;
            let new = layouts.iter().map(|t| NewTensor::new(format!("{module}.{}", t.suffix), t.dtype, &t.shape));
            self.tensors.extend(new);
        }
        self.actions.push(Action::Matrix { place, outputs: first..self.tensors.len() });
        Ok(())
    }

    fn add_parts(&mut self, name: &str, shape: &[usize], first: usize, owned: &[usize]) {
        let dtype = plain_dtype(&self.outcomes[first]);
        let output = self.tensors.len();
        self.tensors.push(NewTensor::new(name, dtype, shape));
        let mut offset = 0;
        for &place in owned {
            self.actions.push(Action::Part { place, output, offset });
            let p = &self.places[place];
            offset += (p.rows * p.cols * dtype.size()) as u64;
        }
    }
}

/// The name of a module: that of the matrix, or `<matrix>.rows.<i>` of a piece of it.
fn piece_name(place: &MatrixPlace, i: usize, outcome: &Outcome) -> String {
    if outcome.pieces.len() == 1 { place.name.clone() } else { format!("{}.rows.{i}", place.name) }
}

fn plain_dtype(outcome: &Outcome) -> DType {
    match outcome.whole() {
        Some(StoredKind::Plain(dtype)) => dtype,
        _ => DType::Bf16,
    }
}

fn outcome(table: &WeightTable, recipes: &Recipes, place: &MatrixPlace) -> Result<Outcome> {
    // Integers of other libraries become whatever holds their values exactly, which only the data tells.
    let (stored, kind) = match place.stored.weight_format() {
        Some(format) => (format, place.stored),
        None => {
            let m = table.read_place(place)?;
            (m.format(), writer::kind(&m))
        }
    };
    let (site, parts) = table.site_of(place);
    let target = |rows| recipes.recipe().target(&site.with_rows(rows), stored);
    let mut targets: Vec<(Target, usize)> = parts.iter().map(|&(rows, count)| (target(rows), count)).collect();
    if targets.windows(2).all(|pair| pair[0].0 == pair[1].0) {
        let all = targets.into_iter().next().map_or_else(|| target(site.rows), |(target, _)| target);
        targets = vec![(all, place.rows)];
    }
    // Kinds of rows follow each other over and over; `Recipe::convert_stack` cuts in the same places.
    let (mut outcome, mut row) = (Outcome { changed: false, pieces: Vec::new() }, 0);
    for (target, count) in targets.iter().cycle() {
        let rows = (*count).min(place.rows - row);
        if rows == 0 {
            break;
        }
        let changed = !target.steps().is_empty();
        let kind = if changed { written_as(target.result(stored)).unwrap_or(kind) } else { kind };
        outcome.changed |= changed;
        outcome.pieces.push(Piece { rows, kind, activations: target.activations(stored) });
        row += rows;
    }
    Ok(outcome)
}

/// How an encoded matrix of this format is stored.
fn written_as(format: WeightFormat) -> Option<StoredKind> {
    Some(match format {
        WeightFormat::F32 => StoredKind::Plain(DType::F32),
        WeightFormat::F16 => StoredKind::Plain(DType::F16),
        WeightFormat::Bf16 => StoredKind::Plain(DType::Bf16),
        WeightFormat::Fp8Tensor => StoredKind::Fp8Tensor,
        WeightFormat::Fp8Row => StoredKind::Fp8Row,
        WeightFormat::Fp8Block => StoredKind::Fp8Block,
        WeightFormat::Nvfp4 => StoredKind::Nvfp4CompressedTensors,
        WeightFormat::Group(g) => StoredKind::Groupwise(g),
        _ => return None,
    })
}
