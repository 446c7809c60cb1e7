//! Reading, converting and writing, a few matrices at a time.

use ninfer_models::Error;
use ninfer_models::checkpoint::CheckpointWriter;
use ninfer_models::weights::{EntryRole, LayerRef, MatrixPlace, WeightTable};
use ninfer_quant::checkpoint::{DecodeOptions, StoredTensor, decode};
use ninfer_quant::{ErrorReport, ErrorSums, PackedMatrix, PackedParts, TensorRole, writer};
use rayon::prelude::*;

use super::plan::{Action, Outcome, Plan};
use crate::Result;
use crate::recipes::Recipes;

/// Stored bytes of matrices that are converted at the same time. A larger matrix is converted by itself.
const BATCH_BYTES: u64 = 32 << 20;
/// Bytes of one read when a tensor is copied.
const COPY_BYTES: u64 = 16 << 20;

/// A matrix or tensor that was finished.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Step<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its bytes in the input.
    pub bytes: u64,
}

/// A matrix that was converted.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Converted {
    /// Where it stands.
    pub layer: LayerRef,
    /// What it is for.
    pub role: TensorRole,
    /// Name of its module.
    pub name: String,
    /// Out features and in features.
    pub shape: [usize; 2],
    /// How it was stored.
    pub from: &'static str,
    /// How it is stored now.
    pub to: String,
    /// Bytes before.
    pub input_bytes: u64,
    /// Bytes now.
    pub output_bytes: u64,
    /// Distance to the weights before.
    pub sums: ErrorSums,
}

impl Converted {
    /// Distance to the weights before.
    #[must_use]
    pub fn error(&self) -> ErrorReport {
        self.sums.report()
    }
}

/// A matrix in its new format, and its distance to the old one if it was changed.
struct Encoded {
    /// More than one where its rows have different formats.
    stack: Vec<PackedMatrix>,
    sums: Option<ErrorSums>,
}

pub(super) fn execute(
    table: &WeightTable,
    plan: &Plan,
    recipes: &Recipes,
    out: &mut CheckpointWriter,
    progress: &mut dyn FnMut(Step<'_>) -> Result<()>,
) -> Result<Vec<Converted>> {
    check_vectors(table)?;
    let mut converted = Vec::new();
    let mut rest = plan.actions.as_slice();
    while let Some(first) = rest.first() {
        if let Action::Copy { tensor, output, check } = first {
            rest = &rest[1..];
            for &i in check {
                table.read_place(&plan.places[i])?;
            }
            copy(table, *tensor, *output, out, progress)?;
            continue;
        }
        let (batch, later) = rest.split_at(batch_len(table, plan, rest));
        rest = later;
        let results: Vec<Encoded> = batch
            .par_iter()
            .filter_map(place_of)
            .map(|i| convert(table, recipes, &plan.places[i], &plan.outcomes[i]))
            .collect::<Result<_>>()?;
        for (action, result) in batch.iter().zip(results) {
            let Some(place) = place_of(action).map(|i| &plan.places[i]) else { continue };
            write(plan, action, &result.stack, out)?;
            let bytes = stored_bytes(table, place);
            if let Some(sums) = result.sums {
                converted.push(Converted {
                    layer: place.layer,
                    role: place.role,
                    name: place.name.clone(),
                    shape: [place.rows, place.cols],
                    from: place.stored.name(),
                    to: place_of(action).map_or_else(String::new, |i| plan.outcomes[i].formats()),
                    input_bytes: bytes,
                    output_bytes: result.stack.iter().map(PackedMatrix::bytes).sum::<usize>() as u64,
                    sums,
                });
            }
            progress(Step { name: &place.name, bytes })?;
        }
    }
    Ok(converted)
}

fn place_of(action: &Action) -> Option<usize> {
    match *action {
        Action::Matrix { place, .. } | Action::Part { place, .. } => Some(place),
        Action::Copy { .. } => None,
    }
}

/// How many actions from the first on make a batch: at least one, which the caller has seen to convert a matrix.
fn batch_len(table: &WeightTable, plan: &Plan, actions: &[Action]) -> usize {
    let mut bytes = 0;
    let fits = |place: usize| {
        bytes += stored_bytes(table, &plan.places[place]);
        bytes <= BATCH_BYTES
    };
    actions.iter().map_while(place_of).map(fits).take_while(|&fits| fits).count().max(1)
}

fn stored_bytes(table: &WeightTable, place: &MatrixPlace) -> u64 {
    match &place.fused {
        Some(range) => range.end - range.start,
        None => place.tensors.iter().filter_map(|&i| table.checkpoint().tensors().get(i)).map(|t| t.bytes()).sum(),
    }
}

fn convert(table: &WeightTable, recipes: &Recipes, place: &MatrixPlace, outcome: &Outcome) -> Result<Encoded> {
    let stored = table.read_place(place)?;
    if !outcome.changed {
        return Ok(Encoded { stack: vec![stored], sums: None });
    }
    let named = |source| Error::Quant { module: place.name.clone(), source };
    let (site, parts) = table.site_of(place);
    let stack = match (outcome.pieces.as_slice(), parts.first()) {
        ([_], first) => {
            let site = first.map_or(site, |&(rows, _)| site.with_rows(rows));
            vec![recipes.apply(&stored, &site).map_err(named)?]
        }
        _ => recipes.recipe().convert_stack(stored.clone(), &site, &parts).map_err(named)?,
    };
    let mut sums = ErrorSums::default();
    let (mut before, mut after) = (vec![0.0; stored.cols()], vec![0.0; stored.cols()]);
    let rows = stack.iter().flat_map(|m| (0..m.rows()).map(move |row| (m, row)));
    for (row, (m, own_row)) in rows.enumerate() {
        stored.dequantize_row(row, &mut before).map_err(named)?;
        m.dequantize_row(own_row, &mut after).map_err(named)?;
        sums.add(&before, &after).map_err(named)?;
    }
    drop(stored);
    stack.iter().try_for_each(|m| check_readable(place, m))?;
    Ok(Encoded { stack, sums: Some(sums) })
}

/// Reads what will be written: a matrix that loading would refuse, for example for scales above 1, is refused here.
fn check_readable(place: &MatrixPlace, m: &PackedMatrix) -> Result<()> {
    if matches!(m.parts(), PackedParts::Plain { .. }) {
        // Elements are finite, and nothing else is asked of them; a copy of the largest matrix is not worth that.
        return Ok(());
    }
    let named = |source| Error::Quant { module: place.name.clone(), source };
    let written = writer::tensors(m, Default::default()).map_err(named)?;
    let tensors: Vec<StoredTensor<'_>> =
        written.iter().map(|t| StoredTensor::new(t.layout.suffix, t.layout.dtype, &t.layout.shape, &t.bytes)).collect();
    decode(&place.name, &tensors, &DecodeOptions::default()).map_err(named)?;
    Ok(())
}

fn write(plan: &Plan, action: &Action, stack: &[PackedMatrix], out: &mut CheckpointWriter) -> Result<()> {
    let unnamed = |source| Error::Quant { module: plan_name(plan, action), source };
    let mut tensors = Vec::new();
    for m in stack {
        tensors.extend(writer::tensors(m, plan.blocks).map_err(unnamed)?);
    }
    match action {
        Action::Matrix { outputs, .. } => {
            for (output, tensor) in outputs.clone().zip(&tensors) {
                out.write(output, 0, &tensor.bytes)?;
            }
        }
        Action::Part { output, offset, .. } => {
            for tensor in &tensors {
                out.write(*output, *offset, &tensor.bytes)?;
            }
        }
        Action::Copy { .. } => {}
    }
    Ok(())
}

fn plan_name(plan: &Plan, action: &Action) -> String {
    place_of(action).and_then(|i| plan.places.get(i)).map_or_else(String::new, |p| p.name.clone())
}

fn copy(
    table: &WeightTable,
    tensor: usize,
    output: usize,
    out: &mut CheckpointWriter,
    progress: &mut dyn FnMut(Step<'_>) -> Result<()>,
) -> Result<()> {
    let Some(entry) = table.checkpoint().tensors().get(tensor) else { return Ok(()) };
    let mut at = 0;
    while at < entry.bytes() {
        let piece = table.checkpoint().read_range(entry, at..at + COPY_BYTES, &mut |_| {})?;
        out.write(output, at, &piece)?;
        at += piece.len() as u64;
    }
    progress(Step { name: entry.name(), bytes: entry.bytes() })
}

/// Norms and the other vectors are copied as bytes; they are read once before, so that damage is found.
fn check_vectors(table: &WeightTable) -> Result<()> {
    for entry in table.entries() {
        if let EntryRole::Vector(role) = entry.role {
            table.vector(entry.layer, role)?;
        }
    }
    Ok(())
}
