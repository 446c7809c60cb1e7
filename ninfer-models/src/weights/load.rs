//! Reading weights.

use ninfer_core::{DType, WeightFormat};
use ninfer_quant::checkpoint::{StoredKind, StoredTensor, decode};
use ninfer_quant::codes::{decode_bf16_slice, decode_f16_slice, decode_f32_slice};
use ninfer_quant::{PackedMatrix, PackedParts, Recipe, RowPart, Site, TensorRole, encode};
use rayon::prelude::*;

use super::WeightTable;
use super::part::{ExpertPart, LayerRef, VectorRole, place};
use super::resolve::{ExpertSet, Module};
use crate::checkpoint::TensorEntry;
use crate::config::Ffn;
use crate::{Error, Result};

impl WeightTable {
    /// Reads a matrix and converts it as the recipe says for its role.
    ///
    /// Where the head is not stored, [`TensorRole::Head`] reads the embedding. Matrices of routed experts are read by
    /// [`WeightTable::experts`]. All rows are treated alike; [`WeightTable::stack`] knows recipes that do not.
    ///
    /// # Errors
    /// [`Error::NoSuchWeight`] if the layer has no such matrix; [`Error::Io`], [`Error::OutOfMemory`];
    /// [`Error::Quant`] naming the module for scales or weights that are NaN, infinite or implausible, and where the target
    /// format cannot hold the matrix.
    pub fn matrix(&self, layer: LayerRef, role: TensorRole, recipe: &Recipe) -> Result<PackedMatrix> {
        let (packed, name) = self.stored_matrix(layer, role)?;
        let target = recipe.target(&self.site(layer, role), packed.format());
        target.apply_owned(packed).map_err(|source| Error::Quant { module: name, source })
    }

    /// Reads a matrix and converts it as the recipe says for its role and its rows: the results, stacked, are the matrix.
    ///
    /// There is more than one only where a recipe tells query rows of `q_proj` from gate rows, or query and key rows of
    /// `in_proj_qkv` from value rows, or where the matrix is stored in such pieces.
    ///
    /// # Errors
    /// As [`WeightTable::matrix`].
    pub fn stack(&self, layer: LayerRef, role: TensorRole, recipe: &Recipe) -> Result<Vec<PackedMatrix>> {
        if let Some(m) = self.found.matrices.get(&(layer, role)).filter(|m| !m.pieces.is_empty()) {
            let (mut start, mut stack) = (0, Vec::with_capacity(m.pieces.len()));
            for piece in &m.pieces {
                let packed = self.stored(piece)?;
                let target = recipe.target(&self.piece_site(layer, role, start), packed.format());
                let named = |source| Error::Quant { module: piece.name.clone(), source };
                stack.push(target.apply_owned(packed).map_err(named)?);
                start += piece.rows;
            }
            return Ok(stack);
        }
        let (packed, name) = self.stored_matrix(layer, role)?;
        recipe
            .convert_stack(packed, &self.site(layer, role), &self.row_parts(role))
            .map_err(|source| Error::Quant { module: name, source })
    }

    /// What a recipe decides by for a matrix of this model.
    #[must_use]
    pub fn site(&self, layer: LayerRef, role: TensorRole) -> Site {
        let has_experts = matches!(self.config.ffn, Ffn::Moe { .. });
        Site::new(role, place(layer, role), self.config.layers.len(), has_experts)
    }

    /// The kinds of rows of a matrix that a recipe may tell from each other, and how many of each follow each other, over and
    /// over. Empty for the many matrices in which it may not.
    #[must_use]
    pub fn row_parts(&self, role: TensorRole) -> Vec<(RowPart, usize)> {
        let (attention, gdn) = (&self.config.attention, &self.config.gdn);
        match role {
            TensorRole::AttnQ => vec![(RowPart::Query, attention.head_dim), (RowPart::Gate, attention.head_dim)],
            TensorRole::GdnQkv => vec![(RowPart::QueryKey, 2 * gdn.keys()), (RowPart::Value, gdn.values())],
            _ => Vec::new(),
        }
    }

    /// The site of the rows from `start` on, which are all of one kind.
    pub(super) fn piece_site(&self, layer: LayerRef, role: TensorRole, start: usize) -> Site {
        let (site, parts) = (self.site(layer, role), self.row_parts(role));
        let period: usize = parts.iter().map(|&(_, count)| count).sum();
        let mut rest = start.checked_rem(period).unwrap_or_default();
        for (kind, count) in parts {
            match rest.checked_sub(count) {
                None => return site.with_rows(kind),
                Some(less) => rest = less,
            }
        }
        site
    }

    /// Reads a matrix in the format it is stored in, and gives it a name for errors.
    fn stored_matrix(&self, layer: LayerRef, role: TensorRole) -> Result<(PackedMatrix, String)> {
        let stored = match role {
            TensorRole::Head if self.shares_head() => TensorRole::Embedding,
            role => role,
        };
        if let Some(c) = &self.container {
            let packed = c.matrix(layer, stored, &|n| self.observer.add(n))?;
            return Ok((packed, format!("{role} of {layer}")));
        }
        let module = self
            .found
            .matrices
            .get(&(layer, stored))
            .ok_or_else(|| Error::NoSuchWeight { layer: layer.to_string(), role: role.to_string() })?;
        Ok((self.stored(module)?, module.name.clone()))
    }

    /// Reads the routed experts of a layer and converts each matrix by itself.
    ///
    /// The order is that in which a backend stacks them: gate 0, up 0, gate 1, up 1, … (\[M, H\] each), or down 0, down 1, …
    /// (\[H, M\] each), whether they are stored fused or one by one. Experts are read and converted in parallel.
    ///
    /// # Errors
    /// As [`WeightTable::matrix`].
    pub fn experts(&self, layer: LayerRef, part: ExpertPart, recipe: &Recipe) -> Result<Vec<PackedMatrix>> {
        if let Some(c) = &self.container {
            let convert = |role, m: PackedMatrix| recipe.target(&self.site(layer, role), m.format()).apply_owned(m);
            return c.experts(layer, part, &convert, &|n| self.observer.add(n));
        }
        let set = self
            .found
            .experts
            .get(&layer)
            .ok_or_else(|| Error::NoSuchWeight { layer: layer.to_string(), role: "routed experts".to_owned() })?;
        let roles: &[TensorRole] = match part {
            ExpertPart::GateUp => &[TensorRole::ExpertGate, TensorRole::ExpertUp],
            ExpertPart::Down => &[TensorRole::ExpertDown],
        };
        match set {
            ExpertSet::Fused { gate_up, down } => {
                let index = if part == ExpertPart::GateUp { *gate_up } else { *down };
                self.fused_experts(index, layer, roles, recipe)
            }
            ExpertSet::Split { gate, up, down } => {
                let modules: Vec<(&Module, TensorRole)> = match part {
                    ExpertPart::GateUp => {
                        let pair = |(g, u)| [(g, TensorRole::ExpertGate), (u, TensorRole::ExpertUp)];
                        gate.iter().zip(up).flat_map(pair).collect()
                    }
                    ExpertPart::Down => down.iter().map(|m| (m, TensorRole::ExpertDown)).collect(),
                };
                modules.into_par_iter().map(|(m, role)| self.module(m, layer, role, recipe)).collect()
            }
        }
    }

    /// Reads a weight that is kept in f32, in row-major order, as stored (the 1 of a zero-centred gain is not added).
    ///
    /// # Errors
    /// [`Error::NoSuchWeight`] if the layer has no such weight; [`Error::Io`], [`Error::OutOfMemory`];
    /// [`Error::NonFinite`] for NaN and infinity, but for `−∞` in [`VectorRole::ALog`].
    pub fn vector(&self, layer: LayerRef, role: VectorRole) -> Result<Vec<f32>> {
        if let Some(c) = &self.container {
            return c.vector(layer, role, &|n| self.observer.add(n));
        }
        let missing = || Error::NoSuchWeight { layer: layer.to_string(), role: role.to_string() };
        let index = *self.found.vectors.get(&(layer, role)).ok_or_else(missing)?;
        let tensor = self.checkpoint.tensors().get(index).ok_or_else(missing)?;
        let (dtype, bytes) = (tensor.dtype().unwrap_or(DType::F32), self.read(tensor)?);
        let mut values = vec![0.0; bytes.len() / dtype.size()];
        match dtype {
            DType::Bf16 => decode_bf16_slice(&bytes, &mut values),
            DType::F16 => decode_f16_slice(&bytes, &mut values),
            _ => decode_f32_slice(&bytes, &mut values),
        }
        let legal = |x: f32| x.is_finite() || (role == VectorRole::ALog && x == f32::NEG_INFINITY);
        match values.iter().position(|&x| !legal(x)) {
            Some(index) => {
                let (tensor, value) = (tensor.name().to_owned(), values[index]);
                Err(Error::NonFinite { tensor, index, value })
            }
            None => Ok(values),
        }
    }

    fn read(&self, tensor: &TensorEntry) -> Result<Vec<u8>> {
        self.checkpoint.read_range(tensor, 0..tensor.bytes(), &mut |n| self.observer.add(n))
    }

    fn module(&self, m: &Module, layer: LayerRef, role: TensorRole, recipe: &Recipe) -> Result<PackedMatrix> {
        let packed = self.stored(m)?;
        let target = recipe.target(&self.site(layer, role), packed.format());
        target.apply_owned(packed).map_err(|source| Error::Quant { module: m.name.clone(), source })
    }

    /// Reads a matrix in the format it is stored in; one in pieces in F32, which holds the weights of all formats.
    pub(super) fn stored(&self, m: &Module) -> Result<PackedMatrix> {
        if !m.pieces.is_empty() {
            let mut values = Vec::new();
            for piece in &m.pieces {
                values.extend(self.stored(piece)?.dequantize());
            }
            return encode(WeightFormat::F32, m.rows, m.cols, &values)
                .map_err(|source| Error::Quant { module: m.name.clone(), source });
        }
        let named = |source| Error::Quant { module: m.name.clone(), source };
        let entries: Vec<(&str, &TensorEntry)> = m
            .tensors
            .iter()
            .filter_map(|(suffix, i)| Some((suffix.as_str(), self.checkpoint.tensors().get(*i)?)))
            .collect();
        let mut data = entries.iter().map(|(_, t)| self.read(t)).collect::<Result<Vec<_>>>()?;
        let packed = match (m.kind, entries.as_slice(), data.as_mut_slice()) {
            // One tensor that is already the matrix: its bytes are taken as they are.
            (StoredKind::Plain(dtype), [_], [bytes]) => {
                let parts = PackedParts::Plain { dtype, bytes: std::mem::take(bytes) };
                PackedMatrix::new(m.rows, m.cols, parts)
            }
            _ => {
                let tensors: Vec<StoredTensor<'_>> = entries
                    .iter()
                    .zip(&data)
                    .map(|((suffix, t), bytes)| {
                        StoredTensor::new(suffix, t.dtype().unwrap_or(DType::U8), t.shape(), bytes)
                    })
                    .collect();
                decode(&m.name, &tensors, &self.decode)
            }
        }
        .map_err(named)?;
        if (packed.rows(), packed.cols()) != (m.rows, m.cols) {
            return Err(Error::TensorShape {
                file: entries.first().map_or(self.checkpoint.dir(), |(_, t)| self.checkpoint.file_of(t)).to_owned(),
                tensor: m.name.clone(),
                expected: vec![m.rows, m.cols],
                got: vec![packed.rows(), packed.cols()],
            });
        }
        Ok(packed)
    }

    /// Cuts a tensor `[E, rows, cols]` into one matrix per expert and role, reading one expert at a time.
    fn fused_experts(
        &self,
        index: usize,
        layer: LayerRef,
        roles: &[TensorRole],
        recipe: &Recipe,
    ) -> Result<Vec<PackedMatrix>> {
        let missing = || Error::NoSuchWeight { layer: layer.to_string(), role: "routed experts".to_owned() };
        let tensor = self.checkpoint.tensors().get(index).ok_or_else(missing)?;
        let (&[experts, rows, cols], Some(dtype)) = (tensor.shape(), tensor.dtype()) else { return Err(missing()) };
        // The whole tensor was checked to fit its file, so these products do not overflow.
        let (part_rows, expert_bytes) = (rows / roles.len(), (rows * cols * dtype.size()) as u64);
        let convert = |expert: usize| -> Result<Vec<PackedMatrix>> {
            let start = expert as u64 * expert_bytes;
            let mut rest =
                self.checkpoint.read_range(tensor, start..start + expert_bytes, &mut |n| self.observer.add(n))?;
            let mut out = Vec::with_capacity(roles.len());
            for &role in roles {
                let next = rest.split_off(part_rows * cols * dtype.size());
                let parts = PackedParts::Plain { dtype, bytes: std::mem::replace(&mut rest, next) };
                let packed = PackedMatrix::new(part_rows, cols, parts)
                    .and_then(|m| recipe.target(&self.site(layer, role), m.format()).apply_owned(m));
                let named = |source| Error::Quant { module: format!("{}[{expert}]", tensor.name()), source };
                out.push(packed.map_err(named)?);
            }
            Ok(out)
        };
        let all: Vec<Vec<PackedMatrix>> = (0..experts).into_par_iter().map(convert).collect::<Result<_>>()?;
        Ok(all.into_iter().flatten().collect())
    }
}
