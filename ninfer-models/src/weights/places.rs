//! Every matrix of a checkpoint by itself, each expert included: what a converter walks over.

use std::ops::Range;

use ninfer_core::DType;
use ninfer_quant::checkpoint::StoredKind;
use ninfer_quant::{PackedMatrix, PackedParts, RowPart, Site, TensorRole};

use super::WeightTable;
use super::part::LayerRef;
use super::resolve::{ExpertSet, Module};
use crate::checkpoint::TensorEntry;
use crate::{Error, Result};

/// One matrix of a checkpoint, found but not read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MatrixPlace {
    /// Where it stands.
    pub layer: LayerRef,
    /// What it is for.
    pub role: TensorRole,
    /// Which routed expert it belongs to.
    pub expert: Option<usize>,
    /// For a piece of a matrix whose rows are stored in different formats: its first row.
    pub start: Option<usize>,
    /// Name of its module, as in `model.layers.0.mlp.experts.3.gate_proj`. A part of a fused tensor has the name that it
    /// would have by itself.
    pub name: String,
    /// Out features.
    pub rows: usize,
    /// In features.
    pub cols: usize,
    /// How it is stored; a part of a fused tensor is plain.
    pub stored: StoredKind,
    /// Its tensors as indices into [`Checkpoint::tensors`](crate::checkpoint::Checkpoint::tensors). A part of a fused tensor
    /// has one, which it shares.
    pub tensors: Vec<usize>,
    /// For a part of a fused tensor: which bytes of it.
    pub fused: Option<Range<u64>>,
}

impl WeightTable {
    /// All matrices in the order root, layers, MTP block; in a layer the experts come last, one after the other.
    #[must_use]
    pub fn places(&self) -> Vec<MatrixPlace> {
        let mut out = Vec::new();
        for (&(layer, role), m) in &self.found.matrices {
            if m.pieces.is_empty() {
                out.push(place(layer, role, None, m));
            }
            let mut start = 0;
            for piece in &m.pieces {
                out.push(MatrixPlace { start: Some(start), ..place(layer, role, None, piece) });
                start += piece.rows;
            }
        }
        for (&layer, set) in &self.found.experts {
            match set {
                ExpertSet::Fused { gate_up, down } => self.fused_places(layer, *gate_up, *down, &mut out),
                ExpertSet::Split { gate, up, down } => {
                    for (e, ((g, u), d)) in gate.iter().zip(up).zip(down).enumerate() {
                        let parts =
                            [(TensorRole::ExpertGate, g), (TensorRole::ExpertUp, u), (TensorRole::ExpertDown, d)];
                        out.extend(parts.map(|(role, m)| place(layer, role, Some(e), m)));
                    }
                }
            }
        }
        // The sort is stable: experts stay behind the other matrices of their layer.
        out.sort_by_key(|p| p.layer);
        out
    }

    /// Reads one matrix in the format it is stored in.
    ///
    /// # Errors
    /// As [`WeightTable::matrix`].
    pub fn read_place(&self, place: &MatrixPlace) -> Result<PackedMatrix> {
        let tensors = || place.tensors.iter().filter_map(|&i| self.checkpoint.tensors().get(i));
        let Some(range) = &place.fused else {
            let suffix = |t: &TensorEntry| t.name().rsplit_once('.').map_or("", |(_, suffix)| suffix).to_owned();
            let module = Module {
                name: place.name.clone(),
                kind: place.stored,
                rows: place.rows,
                cols: place.cols,
                tensors: tensors().map(suffix).zip(place.tensors.iter().copied()).collect(),
                pieces: Vec::new(),
            };
            return self.stored(&module);
        };
        let missing = || Error::NoSuchWeight { layer: place.layer.to_string(), role: place.role.to_string() };
        let tensor = tensors().next().ok_or_else(missing)?;
        let bytes = self.checkpoint.read_range(tensor, range.clone(), &mut |n| self.observer.add(n))?;
        let parts = PackedParts::Plain { dtype: tensor.dtype().unwrap_or(DType::F32), bytes };
        let expert = place.expert.unwrap_or_default();
        PackedMatrix::new(place.rows, place.cols, parts)
            .map_err(|source| Error::Quant { module: format!("{}[{expert}]", tensor.name()), source })
    }

    /// What a recipe decides by, and the kinds of rows that it may tell apart, as in [`WeightTable::row_parts`].
    #[must_use]
    pub fn site_of(&self, place: &MatrixPlace) -> (Site, Vec<(RowPart, usize)>) {
        match place.start {
            Some(start) => (self.piece_site(place.layer, place.role, start), Vec::new()),
            None => (self.site(place.layer, place.role), self.row_parts(place.role)),
        }
    }

    fn fused_places(&self, layer: LayerRef, gate_up: usize, down: usize, out: &mut Vec<MatrixPlace>) {
        let tensor = |i: usize| {
            let t = self.checkpoint.tensors().get(i)?;
            // Shape and element type were checked when the tensor was found.
            let (&[experts, rows, cols], Some(dtype)) = (t.shape(), t.dtype()) else { return None };
            Some((t.name(), experts, rows, cols, dtype))
        };
        let (Some((name, experts, rows, cols, dtype)), Some(d)) = (tensor(gate_up), tensor(down)) else { return };
        let part = |role, expert: usize, rows: usize, cols: usize, dtype: DType, index, nth: usize| {
            let bytes = (rows * cols * dtype.size()) as u64;
            let leaf = match role {
                TensorRole::ExpertGate => "gate_proj",
                TensorRole::ExpertUp => "up_proj",
                _ => "down_proj",
            };
            let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
            MatrixPlace {
                layer,
                role,
                expert: Some(expert),
                start: None,
                name: format!("{stem}.{expert}.{leaf}"),
                rows,
                cols,
                stored: StoredKind::Plain(dtype),
                tensors: vec![index],
                fused: Some(nth as u64 * bytes..(nth as u64 + 1) * bytes),
            }
        };
        for e in 0..experts {
            out.push(part(TensorRole::ExpertGate, e, rows / 2, cols, dtype, gate_up, 2 * e));
            out.push(part(TensorRole::ExpertUp, e, rows / 2, cols, dtype, gate_up, 2 * e + 1));
            out.push(part(TensorRole::ExpertDown, e, d.2, d.3, d.4, down, e));
        }
    }
}

fn place(layer: LayerRef, role: TensorRole, expert: Option<usize>, m: &Module) -> MatrixPlace {
    MatrixPlace {
        layer,
        role,
        expert,
        start: None,
        name: m.name.clone(),
        rows: m.rows,
        cols: m.cols,
        stored: m.kind,
        tensors: m.tensors.iter().map(|&(_, index)| index).collect(),
        fused: None,
    }
}
