//! Reading the weights of a model from a container.

use std::ops::Range;

use ninfer_core::DType;
use ninfer_core::format::GroupFormat;
use ninfer_quant::checkpoint::StoredKind;
use ninfer_quant::codes::{decode_bf16_slice, decode_f32_slice};
use ninfer_quant::container::{ContainerFormat, StoredMatrix};
use ninfer_quant::{PackedMatrix, PackedParts, TensorRole, widen};

use super::inventory::{Bound, Piece, Source};
use super::{Container, Inventory, ObjectKind};
use crate::config::Ffn;
use crate::weights::{Entry, EntryRole, ExpertPart, LayerRef, Stored, VectorRole};
use crate::{Config, Error, Result};

/// A container with the weights of a configuration found in it.
#[derive(Debug)]
pub(crate) struct ContainerWeights {
    container: Container,
    inventory: Inventory,
    /// Experts, width and hidden size of the routed experts.
    experts: Option<(usize, usize, usize)>,
}

impl ContainerWeights {
    pub(crate) fn new(container: Container, config: &Config) -> Result<Self> {
        let inventory = Inventory::find(&container, config)?;
        let experts = match config.ffn {
            Ffn::Moe { experts, width, .. } => Some((experts, width, config.hidden)),
            Ffn::Dense { .. } => None,
        };
        Ok(Self { container, inventory, experts })
    }

    pub(crate) fn container(&self) -> &Container {
        &self.container
    }

    pub(crate) fn has_mtp(&self) -> bool {
        self.inventory.mtp
    }

    pub(crate) fn has_matrix(&self, layer: LayerRef, role: TensorRole) -> bool {
        self.inventory.matrices.contains_key(&(layer, role))
    }

    /// A matrix in the format it is stored in.
    pub(crate) fn matrix(&self, layer: LayerRef, role: TensorRole, progress: &dyn Fn(u64)) -> Result<PackedMatrix> {
        let Some(bound) = self.inventory.matrices.get(&(layer, role)) else {
            return Err(Error::NoSuchWeight { layer: layer.to_string(), role: role.to_string() });
        };
        let pieces = bound.source.pieces();
        let named = |source| Error::Quant { module: self.name(pieces[0].object), source };
        if let &[piece] = pieces.as_slice() {
            return self.piece(piece, progress);
        }
        let parts: Vec<PackedMatrix> = pieces.iter().map(|p| self.piece(p, progress)).collect::<Result<_>>()?;
        let parts = unify(parts).map_err(named)?;
        let joined = match (&bound.source, parts.as_slice()) {
            (Source::Heads { heads, .. }, [query, gate]) => by_head(query, gate, *heads),
            _ => PackedMatrix::concat_rows(&parts.iter().collect::<Vec<_>>()),
        };
        joined.map_err(named)
    }

    /// One matrix an expert, or gate and up of each, as a backend stacks them; each is handed to `convert`.
    pub(crate) fn experts(
        &self,
        layer: LayerRef,
        part: ExpertPart,
        convert: &(dyn Fn(TensorRole, PackedMatrix) -> ninfer_quant::Result<PackedMatrix> + Sync),
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<PackedMatrix>> {
        use rayon::prelude::*;
        let missing = || Error::NoSuchWeight { layer: layer.to_string(), role: "routed experts".to_owned() };
        let &(gate_up, down) = self.inventory.experts.get(&layer).ok_or_else(missing)?;
        let (experts, width, hidden) = self.experts.ok_or_else(missing)?;
        let (object, rows, roles): (_, _, &[TensorRole]) = match part {
            ExpertPart::GateUp => (gate_up, width, &[TensorRole::ExpertGate, TensorRole::ExpertUp]),
            ExpertPart::Down => (down, hidden, &[TensorRole::ExpertDown]),
        };
        (0..experts * roles.len())
            .into_par_iter()
            .map(|i| {
                let piece = Piece { object, rows: i * rows..(i + 1) * rows };
                let named =
                    |source| Error::Quant { module: format!("{}[{}]", self.name(object), i / roles.len()), source };
                convert(roles[i % roles.len()], self.piece(&piece, progress)?).map_err(named)
            })
            .collect()
    }

    /// A small parameter vector in f32, row-major; the convolution one channel after the other.
    pub(crate) fn vector(&self, layer: LayerRef, role: VectorRole, progress: &dyn Fn(u64)) -> Result<Vec<f32>> {
        let missing = || Error::NoSuchWeight { layer: layer.to_string(), role: role.to_string() };
        let index = *self.inventory.vectors.get(&(layer, role)).ok_or_else(missing)?;
        let object = self.container.objects().get(index).ok_or_else(missing)?;
        let ObjectKind::Tensor { format, shape } = object.kind() else { return Err(missing()) };
        let bytes = self.container.read(object, 0..object.bytes(), progress)?;
        let mut values = vec![0.0; shape.iter().product()];
        match format {
            ContainerFormat::Bf16 => decode_bf16_slice(&bytes, &mut values),
            _ => decode_f32_slice(&bytes, &mut values),
        }
        let legal = |x: f32| x.is_finite() || (role == VectorRole::ALog && x == f32::NEG_INFINITY);
        if let Some(index) = values.iter().position(|&x| !legal(x)) {
            return Err(Error::NonFinite { tensor: object.name().to_owned(), index, value: values[index] });
        }
        if let (VectorRole::Conv, &[taps, channels]) = (role, shape.as_slice()) {
            values = (0..channels)
                .flat_map(|c| (0..taps).map(move |t| (t, c)))
                .map(|(t, c)| values[t * channels + c])
                .collect();
        }
        Ok(values)
    }

    fn name(&self, object: usize) -> String {
        self.container.objects().get(object).map_or_else(String::new, |o| o.name().to_owned())
    }

    fn stored(&self, object: usize) -> Option<StoredMatrix> {
        match self.container.objects().get(object)?.kind() {
            ObjectKind::Tensor { format, shape } => match *shape.as_slice() {
                [rows, cols] => StoredMatrix::new(*format, rows, cols).ok(),
                _ => None,
            },
            ObjectKind::Resource => None,
        }
    }

    fn piece(&self, piece: &Piece, progress: &dyn Fn(u64)) -> Result<PackedMatrix> {
        let missing = || Error::NoSuchWeight { layer: "container".to_owned(), role: self.name(piece.object) };
        let object = self.container.objects().get(piece.object).ok_or_else(missing)?;
        let stored = self.stored(piece.object).ok_or_else(missing)?;
        let spans = stored.spans(piece.rows.clone());
        let parts =
            spans.into_iter().map(|span| self.container.read(object, span, progress)).collect::<Result<Vec<_>>>()?;
        let named = |source| Error::Quant { module: object.name().to_owned(), source };
        stored.decode(piece.rows.clone(), parts).map_err(named)
    }

    /// Bytes that reading rows of an object takes.
    fn piece_bytes(&self, object: usize, rows: Range<usize>) -> u64 {
        let spans = self.stored(object).map(|s| s.spans(rows)).unwrap_or_default();
        spans.iter().map(|s| s.end - s.start).sum()
    }

    /// How a matrix will be stored once it is read.
    fn kind(&self, bound: &Bound) -> Stored {
        let kinds: Vec<StoredKind> =
            bound.source.pieces().iter().filter_map(|p| self.stored(p.object)).map(|s| kind(s.format())).collect();
        let bits = |k: &StoredKind| if let StoredKind::Groupwise(g) = k { g.bits() } else { 0 };
        Stored::Matrix(kinds.into_iter().max_by_key(bits).unwrap_or(StoredKind::Plain(DType::Bf16)))
    }

    /// All weights, unsorted.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let mut out = Vec::new();
        for (&(layer, role), bound) in &self.inventory.matrices {
            let pieces = bound.source.pieces();
            let names: Vec<String> = pieces.iter().map(|p| self.name(p.object)).collect();
            let name = match names.as_slice() {
                [first, second] if first != second => format!("{first} + {second}"),
                names => names.first().cloned().unwrap_or_default(),
            };
            out.push(Entry {
                layer,
                name,
                role: EntryRole::Matrix(role),
                shape: vec![bound.rows, bound.cols],
                count: 1,
                stored: self.kind(bound),
                bytes: pieces.iter().map(|p| self.piece_bytes(p.object, p.rows.clone())).sum(),
            });
        }
        for (&(layer, role), &index) in &self.inventory.vectors {
            if let Some(o) = self.container.objects().get(index)
                && let ObjectKind::Tensor { format, shape } = o.kind()
            {
                let dtype = if *format == ContainerFormat::Bf16 { DType::Bf16 } else { DType::F32 };
                out.push(Entry {
                    layer,
                    name: o.name().to_owned(),
                    role: EntryRole::Vector(role),
                    shape: shape.clone(),
                    count: 1,
                    stored: Stored::Elements(dtype),
                    bytes: o.bytes(),
                });
            }
        }
        if let Some((experts, width, hidden)) = self.experts {
            for (&layer, &(gate_up, down)) in &self.inventory.experts {
                let parts = [
                    (TensorRole::ExpertGate, gate_up, width, hidden, 0),
                    (TensorRole::ExpertUp, gate_up, width, hidden, width),
                    (TensorRole::ExpertDown, down, hidden, width, 0),
                ];
                for (role, object, rows, cols, first) in parts {
                    let Some(stored) = self.stored(object) else { continue };
                    let stride = if role == TensorRole::ExpertDown { hidden } else { 2 * width };
                    let each = |e: usize| self.piece_bytes(object, e * stride + first..e * stride + first + rows);
                    out.push(Entry {
                        layer,
                        name: self.name(object),
                        role: EntryRole::Matrix(role),
                        shape: vec![rows, cols],
                        count: experts,
                        stored: Stored::Matrix(kind(stored.format())),
                        bytes: (0..experts).map(each).sum(),
                    });
                }
            }
        }
        out
    }
}

fn kind(format: ContainerFormat) -> StoredKind {
    match format {
        ContainerFormat::Group(g) => StoredKind::Groupwise(g),
        ContainerFormat::Nvfp4 => StoredKind::Nvfp4CompressedTensors,
        ContainerFormat::Fp8Row => StoredKind::Fp8Row,
        ContainerFormat::F32 => StoredKind::Plain(DType::F32),
        _ => StoredKind::Plain(DType::Bf16),
    }
}

/// Groupwise matrices all in the widest of their formats; anything else stays, and joining it reports what differs.
fn unify(parts: Vec<PackedMatrix>) -> ninfer_quant::Result<Vec<PackedMatrix>> {
    let formats: Option<Vec<GroupFormat>> = parts
        .iter()
        .map(|m| if let PackedParts::Group { format, .. } = m.parts() { Some(*format) } else { None })
        .collect();
    match formats.and_then(|f| f.into_iter().max_by_key(|g| g.bits())) {
        Some(widest) => parts.iter().map(|m| widen(m, widest)).collect(),
        None => Ok(parts),
    }
}

/// Query and gate rows head by head, as `q_proj` has them.
fn by_head(query: &PackedMatrix, gate: &PackedMatrix, heads: usize) -> ninfer_quant::Result<PackedMatrix> {
    let d = query.rows() / heads.max(1);
    let mut rows = Vec::with_capacity(2 * heads);
    for head in 0..heads {
        rows.push(query.slice_rows(head * d..(head + 1) * d)?);
        rows.push(gate.slice_rows(head * d..(head + 1) * d)?);
    }
    PackedMatrix::concat_rows(&rows.iter().collect::<Vec<_>>())
}
