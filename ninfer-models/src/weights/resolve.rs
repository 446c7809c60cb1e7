//! From file headers to the table: every expected weight is found and checked, and nothing is left over.

use std::collections::BTreeMap;

use ninfer_core::DType;
use ninfer_core::format::GROUP_PAD;
use ninfer_quant::TensorRole;
use ninfer_quant::checkpoint::{StoredKind, StoredModule, TensorInfo, classify};

use super::expected::{self, ExpectedExperts, ExpectedLayer, ExpectedMatrix, ExpectedVector};
use super::names::Names;
use super::part::{LayerRef, MtpState, VectorRole};
use crate::checkpoint::{Checkpoint, TensorEntry};
use crate::error::NameList;
use crate::{Config, Error, Result};

/// Suffixes that carry the codes of a matrix; without one of them a module is missing.
const CODES: [&str; 4] = ["weight", "weight_packed", "weight_codes", "qweight"];

/// What stands between the name of a matrix and the number of a piece of it.
const PIECES: &str = ".rows.";

/// The stored tensors of one matrix.
#[derive(Clone, Debug)]
pub(super) struct Module {
    /// Name in the file, without suffix.
    pub(super) name: String,
    /// Format as the header shows it.
    pub(super) kind: StoredKind,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Suffixes, and indices into the tensors of the checkpoint.
    pub(super) tensors: Vec<(String, usize)>,
    /// The modules that follow each other from the top, where rows differ in format; there are no other tensors then.
    pub(super) pieces: Vec<Module>,
}

/// The routed experts of one layer.
#[derive(Clone, Debug)]
pub(super) enum ExpertSet {
    /// Two tensors for all experts, `[E, 2M, H]` and `[E, H, M]`; indices into the tensors of the checkpoint.
    Fused { gate_up: usize, down: usize },
    /// Three matrices an expert.
    Split { gate: Vec<Module>, up: Vec<Module>, down: Vec<Module> },
}

/// Everything that was found.
#[derive(Debug, Default)]
pub(super) struct Resolved {
    pub(super) matrices: BTreeMap<(LayerRef, TensorRole), Module>,
    pub(super) vectors: BTreeMap<(LayerRef, VectorRole), usize>,
    pub(super) experts: BTreeMap<LayerRef, ExpertSet>,
}

struct Resolver<'a> {
    checkpoint: &'a Checkpoint,
    names: Names,
    experts: Option<ExpectedExperts>,
    missing: NameList,
    out: Resolved,
}

/// Finds all weights that `config` asks for.
pub(super) fn resolve(checkpoint: &Checkpoint, config: &Config) -> Result<(Resolved, MtpState)> {
    let mut r = Resolver {
        checkpoint,
        names: Names::new(checkpoint)?,
        experts: ExpectedExperts::of(config),
        missing: NameList::default(),
        out: Resolved::default(),
    };
    r.place(LayerRef::Root, &expected::stem(LayerRef::Root), &expected::root(config))?;
    for (i, &kind) in config.layers.iter().enumerate() {
        let layer = LayerRef::Main(i);
        let stem = expected::stem(layer);
        r.place(layer, &stem, &expected::layer(config, kind))?;
        r.place_experts(layer, &stem)?;
    }
    let before_head = r.missing.len();
    let head = expected::head(config);
    if r.names.module(head.module).is_some() || !config.tied {
        r.place_matrix(LayerRef::Root, "", &head)?;
    }
    let head_missing = r.missing.len() > before_head;

    let main_missing = std::mem::take(&mut r.missing);
    let mtp = if r.names.any_under("mtp.") {
        r.place(LayerRef::Mtp, "mtp.", &expected::mtp_root(config))?;
        let stem = expected::stem(LayerRef::Mtp);
        r.place(LayerRef::Mtp, &stem, &expected::layer(config, ninfer_core::shape::LayerKind::FullAttention))?;
        r.place_experts(LayerRef::Mtp, &stem)?;
        MtpState::Complete
    } else {
        MtpState::Absent
    };
    let unexpected = r.names.unused(checkpoint);
    match (main_missing.len(), r.missing.len(), unexpected.len()) {
        (0, 0, 0) => Ok((r.out, mtp)),
        (0, _, 0) => Err(Error::IncompleteMtp { missing: r.missing }),
        (1, 0, 0) if head_missing => Err(Error::NoHead { tensor: main_missing.to_string() }),
        _ => {
            let mut missing = main_missing;
            missing.append(r.missing);
            Err(Error::TensorList { missing, unexpected })
        }
    }
}

impl Resolver<'_> {
    fn place(&mut self, layer: LayerRef, stem: &str, expected: &ExpectedLayer) -> Result<()> {
        for matrix in &expected.matrices {
            self.place_matrix(layer, stem, matrix)?;
        }
        for vector in &expected.vectors {
            self.place_vector(layer, stem, vector)?;
        }
        Ok(())
    }

    fn place_matrix(&mut self, layer: LayerRef, stem: &str, m: &ExpectedMatrix) -> Result<()> {
        if let Some(module) = self.module(&format!("{stem}{}", m.module), m.rows, m.cols)? {
            self.out.matrices.insert((layer, m.role), module);
        }
        Ok(())
    }

    fn place_vector(&mut self, layer: LayerRef, stem: &str, v: &ExpectedVector) -> Result<()> {
        if let Some((index, _)) = self.floats(&format!("{stem}{}", v.tensor), &v.shape)? {
            self.out.vectors.insert((layer, v.role), index);
        }
        Ok(())
    }

    fn place_experts(&mut self, layer: LayerRef, stem: &str) -> Result<()> {
        let Some(ExpectedExperts { experts, width, hidden }) = self.experts else { return Ok(()) };
        let (gate_up, down) = (format!("{stem}mlp.experts.gate_up_proj"), format!("{stem}mlp.experts.down_proj"));
        let fused = self.names.has(&gate_up) || self.names.has(&down);
        let set = if fused || !self.names.has_split_experts(stem) {
            let gate_up = self.floats(&gate_up, &[experts, 2 * width, hidden])?;
            let down = self.floats(&down, &[experts, hidden, width])?;
            let (Some((gate_up, _)), Some((down, _))) = (gate_up, down) else { return Ok(()) };
            ExpertSet::Fused { gate_up, down }
        } else {
            let mut all = |part: &str, rows, cols| -> Result<Vec<Module>> {
                let module = |e| self.module(&format!("{stem}mlp.experts.{e}.{part}"), rows, cols);
                (0..experts).map(module).filter_map(Result::transpose).collect()
            };
            ExpertSet::Split {
                gate: all("gate_proj", width, hidden)?,
                up: all("up_proj", width, hidden)?,
                down: all("down_proj", hidden, width)?,
            }
        };
        self.out.experts.insert(layer, set);
        Ok(())
    }

    fn tensor(&self, index: usize) -> &TensorEntry {
        // Names only hands out indices of this checkpoint's own tensors.
        &self.checkpoint.tensors()[index]
    }

    fn dtype(&self, tensor: &TensorEntry, expected: &'static str, legal: fn(DType) -> bool) -> Result<DType> {
        tensor.dtype().filter(|&d| legal(d)).ok_or_else(|| Error::TensorDType {
            file: self.checkpoint.file_of(tensor).to_owned(),
            tensor: tensor.name().to_owned(),
            expected,
            got: tensor.dtype_name().to_string(),
        })
    }

    /// A tensor of floats with this shape; notes it as missing if it is not there.
    fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Option<(usize, DType)>> {
        let Some(index) = self.names.take(name) else {
            let stored = self.names.stored_name(name);
            self.missing.push(stored);
            return Ok(None);
        };
        let t = self.tensor(index);
        let dtype = self.dtype(t, "F32, F16 or BF16", |d| matches!(d, DType::F32 | DType::F16 | DType::Bf16))?;
        if t.shape() != shape {
            return Err(self.shape_error(t, t.name(), shape, t.shape()));
        }
        Ok(Some((index, dtype)))
    }

    /// The tensors of a matrix, whatever its format, or of the pieces it is stored in; notes what is not there as missing.
    fn module(&mut self, module: &str, rows: usize, cols: usize) -> Result<Option<Module>> {
        let piece = |i: usize| format!("{module}{PIECES}{i}");
        if self.names.module(module).is_some() || self.names.module(&piece(0)).is_none() {
            return self.single(module, Some(rows), cols);
        }
        let mut pieces: Vec<Module> = Vec::new();
        while self.names.module(&piece(pieces.len())).is_some() {
            let Some(one) = self.single(&piece(pieces.len()), None, cols)? else { return Ok(None) };
            pieces.push(one);
        }
        let name = self.names.stored_name(module);
        let got = pieces.iter().fold(0usize, |n, p| n.saturating_add(p.rows));
        let Some(first) = pieces.first().filter(|_| got == rows) else {
            let index = pieces.first().and_then(|p| p.tensors.first()).map_or(0, |t| t.1);
            return Err(self.shape_error(self.tensor(index), &name, &[rows, cols], &[got, cols]));
        };
        Ok(Some(Module { name, kind: first.kind, rows, cols, tensors: Vec::new(), pieces }))
    }

    /// The tensors of a matrix or of one piece, which has any number of rows.
    fn single(&mut self, module: &str, rows: Option<usize>, cols: usize) -> Result<Option<Module>> {
        let name = self.names.stored_name(module);
        let tensors = self.names.module(module).map(<[_]>::to_vec).unwrap_or_default();
        if !tensors.iter().any(|(suffix, _)| CODES.contains(&suffix.as_str())) {
            self.missing.push(format!("{name}.weight"));
            return Ok(None);
        }
        for (suffix, _) in &tensors {
            self.names.take(&format!("{module}.{suffix}"));
        }
        let info = |(suffix, index): &'_ (String, usize)| -> Result<(String, DType, Vec<usize>)> {
            let t = self.tensor(*index);
            let dtype = self.dtype(t, "an element type of weights or scales", |_| true)?;
            Ok((suffix.clone(), dtype, t.shape().to_vec()))
        };
        let infos = tensors.iter().map(info).collect::<Result<Vec<_>>>()?;
        let infos: Vec<TensorInfo<'_>> =
            infos.iter().map(|(suffix, dtype, shape)| TensorInfo { suffix, dtype: *dtype, shape }).collect();
        let stored = match classify(&name, &infos) {
            Ok(stored) => stored,
            Err(ninfer_quant::Error::MissingTensor { tensor, .. }) => {
                self.missing.push(tensor);
                return Ok(None);
            }
            Err(source) => return Err(Error::Quant { module: name, source }),
        };
        let rows = rows.unwrap_or(stored.rows);
        if !fits(&stored, rows, cols) {
            let t = self.tensor(tensors[0].1);
            return Err(self.shape_error(t, &name, &[rows, cols], &[stored.rows, stored.cols]));
        }
        Ok(Some(Module { name, kind: stored.kind, rows, cols, tensors, pieces: Vec::new() }))
    }

    fn shape_error(&self, t: &TensorEntry, name: &str, expected: &[usize], got: &[usize]) -> Error {
        Error::TensorShape {
            file: self.checkpoint.file_of(t).to_owned(),
            tensor: name.to_owned(),
            expected: expected.to_vec(),
            got: got.to_vec(),
        }
    }
}

/// Whether a stored module can be a `[rows, cols]` matrix. The header of integers bounds the columns only. Those of
/// compressed-tensors are counted as if each word held 8 codes, where it may hold 4, and with the last word not full;
/// groupwise integers with their padding.
fn fits(stored: &StoredModule, rows: usize, cols: usize) -> bool {
    let columns = match stored.kind {
        StoredKind::IntCompressedTensors => stored.cols == 8 * cols.div_ceil(8) || stored.cols == 8 * cols.div_ceil(4),
        StoredKind::Groupwise(_) => stored.cols == cols.next_multiple_of(GROUP_PAD),
        _ => stored.cols == cols,
    };
    stored.rows == rows && columns
}
