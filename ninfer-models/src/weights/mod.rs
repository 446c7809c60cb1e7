//! The weights of a model in a checkpoint folder or a `.ninfer` container.
//!
//! [`WeightTable::open`] reads headers only. It works out from the configuration which tensors there must be, finds them
//! under any of the known prefixes and in any of the known formats, checks shapes and element types, and fails with two
//! lists if anything is missing or left over. Data is then read one weight at a time, so that a caller can hand each to a
//! backend and drop it.
//!
//! Skipped knowingly: the vision tower, and scales of activations and of the KV cache.

mod entry;
mod expected;
mod load;
mod names;
mod part;
mod places;
mod progress;
mod resolve;

use std::path::Path;

use ninfer_core::shape::ModelShape;
use ninfer_quant::TensorRole;
use ninfer_quant::checkpoint::DecodeOptions;

pub use self::entry::{Entry, EntryRole, Stored};
pub use self::part::{ExpertPart, LayerRef, MtpState, VectorRole};
pub use self::places::MatrixPlace;
use self::progress::Observer;
pub use self::progress::Progress;
use self::resolve::{ExpertSet, Module, Resolved};
use crate::checkpoint::{Checkpoint, TensorEntry};
use crate::config::Quantization;
use crate::container::{Container, ContainerWeights, is_container};
use crate::{Config, Result};

/// The weights of a model, found and checked but not loaded.
///
/// ```no_run
/// use ninfer_models::weights::{LayerRef, VectorRole, WeightTable};
/// use ninfer_quant::{Recipe, TensorRole};
///
/// let table = WeightTable::open("models/qwen3.6-35b-a3b")?;
/// let embedding = table.matrix(LayerRef::Root, TensorRole::Embedding, &Recipe::Keep)?;
/// let norm = table.vector(LayerRef::Main(0), VectorRole::InputNorm)?;
/// assert_eq!((embedding.cols(), norm.len()), (table.config().hidden, table.config().hidden));
/// # Ok::<(), ninfer_models::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightTable {
    checkpoint: Checkpoint,
    config: Config,
    mtp: MtpState,
    found: Resolved,
    /// Where the weights come from if not from the files of `checkpoint`.
    container: Option<ContainerWeights>,
    decode: DecodeOptions,
    observer: Observer,
}

impl WeightTable {
    /// Opens a checkpoint folder with its own `config.json`, or a `.ninfer` container (a path that ends so).
    ///
    /// # Errors
    /// Those of [`Config::from_dir`] or [`Container::config`], and of [`WeightTable::open_with`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        if is_container(path.as_ref()) {
            let container = Container::open(path)?;
            let config = container.config()?;
            return Self::of_container(container, config);
        }
        let config = Config::from_dir(&path)?;
        Self::open_with(path, config)
    }

    /// Opens a checkpoint folder or a container with a given configuration, for example one whose `tied` was corrected.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`]; [`Error::TensorList`](crate::Error::TensorList) with what is missing and what is left
    /// over; [`Error::IncompleteMtp`](crate::Error::IncompleteMtp), [`Error::NoHead`](crate::Error::NoHead),
    /// [`Error::MixedPrefixes`](crate::Error::MixedPrefixes); [`Error::TensorShape`](crate::Error::TensorShape),
    /// [`Error::TensorDType`](crate::Error::TensorDType) and [`Error::Quant`](crate::Error::Quant) for a weight that is there
    /// and cannot be used. Of a container those of [`Container::open`] and
    /// [`Inventory::find`](crate::container::Inventory::find).
    pub fn open_with(path: impl AsRef<Path>, config: Config) -> Result<Self> {
        if is_container(path.as_ref()) {
            return Self::of_container(Container::open(path)?, config);
        }
        let checkpoint = Checkpoint::open(path)?;
        let (found, mtp) = resolve::resolve(&checkpoint, &config)?;
        let mut decode = DecodeOptions::default();
        if let Some(Quantization::Gptq(zeros)) = config.quantization {
            decode = decode.with_gptq_zeros(zeros);
        }
        let observer = Observer::default();
        Ok(Self { checkpoint, config, mtp, found, container: None, decode, observer }.counted())
    }

    fn of_container(container: Container, config: Config) -> Result<Self> {
        let checkpoint = Checkpoint::without_files(container.path());
        let container = ContainerWeights::new(container, &config)?;
        let mtp = if container.has_mtp() { MtpState::Complete } else { MtpState::Absent };
        let (found, decode, observer) = (Resolved::default(), DecodeOptions::default(), Observer::default());
        Ok(Self { checkpoint, config, mtp, found, container: Some(container), decode, observer }.counted())
    }

    /// With the bytes of all weights as the total of progress.
    fn counted(mut self) -> Self {
        let total = self.entries().iter().fold(0u64, |n, e| n.saturating_add(e.bytes));
        self.observer = Observer::new(total);
        self
    }

    /// Has `callback` told of every 16 MiB that are read, from whatever thread reads them.
    #[must_use]
    pub fn with_progress(mut self, callback: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        self.observer.tell(Box::new(callback));
        self
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The files of a folder; without any for a container.
    #[must_use]
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The container, if the weights come from one.
    #[must_use]
    pub fn container(&self) -> Option<&Container> {
        self.container.as_ref().map(ContainerWeights::container)
    }

    /// Whether there is an MTP block.
    #[must_use]
    pub fn mtp(&self) -> MtpState {
        self.mtp
    }

    /// Main layers, the MTP layer not counted.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.config.layers.len()
    }

    /// Layers of the MTP block: 0 or 1.
    #[must_use]
    pub fn mtp_layers(&self) -> usize {
        match self.mtp {
            MtpState::Absent => 0,
            MtpState::Complete => 1,
        }
    }

    /// Whether the head is the embedding matrix, because no head is stored.
    #[must_use]
    pub fn shares_head(&self) -> bool {
        let head = (LayerRef::Root, TensorRole::Head);
        match &self.container {
            Some(c) => !c.has_matrix(head.0, head.1),
            None => !self.found.matrices.contains_key(&head),
        }
    }

    /// Every dimension of the model, with MTP block and tied head as they are stored.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        let mut shape = self.config.shape();
        shape.mtp = self.mtp == MtpState::Complete;
        shape.tied = self.shares_head();
        shape
    }

    /// Stored bytes of all weights of the model: what is read if each is loaded once.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.observer.total()
    }

    /// All weights in the order root, layers, MTP block.
    ///
    /// Experts of a layer that are stored alike share a line.
    #[must_use]
    pub fn entries(&self) -> Vec<Entry> {
        let mut out = self.container.as_ref().map(ContainerWeights::entries).unwrap_or_default();
        for (&(layer, role), m) in &self.found.matrices {
            match m.pieces.as_slice() {
                [] => out.push(self.module_entry(layer, role, m)),
                pieces => out.extend(pieces.iter().map(|piece| self.module_entry(layer, role, piece))),
            }
        }
        for (&(layer, role), &index) in &self.found.vectors {
            if let Some(t) = self.checkpoint.tensors().get(index) {
                let role = EntryRole::Vector(role);
                out.push(self.tensor_entry(layer, role, t, t.shape().to_vec(), 1, t.bytes()));
            }
        }
        for (&layer, set) in &self.found.experts {
            match set {
                ExpertSet::Fused { gate_up, down } => out.extend(self.fused_entries(layer, *gate_up, *down)),
                ExpertSet::Split { gate, up, down } => {
                    let parts =
                        [(TensorRole::ExpertGate, gate), (TensorRole::ExpertUp, up), (TensorRole::ExpertDown, down)];
                    for (role, modules) in parts {
                        self.split_entries(&mut out, layer, role, modules);
                    }
                }
            }
        }
        out.sort_by_key(|e| e.layer);
        out
    }

    fn module_entry(&self, layer: LayerRef, role: TensorRole, m: &Module) -> Entry {
        let sizes = m.tensors.iter().filter_map(|&(_, i)| self.checkpoint.tensors().get(i));
        Entry {
            layer,
            name: m.name.clone(),
            role: EntryRole::Matrix(role),
            shape: vec![m.rows, m.cols],
            count: 1,
            stored: Stored::Matrix(m.kind),
            bytes: sizes.map(TensorEntry::bytes).sum(),
        }
    }

    fn tensor_entry(
        &self,
        layer: LayerRef,
        role: EntryRole,
        t: &TensorEntry,
        shape: Vec<usize>,
        count: usize,
        bytes: u64,
    ) -> Entry {
        // Tensors of elements were checked to be F32, F16 or BF16.
        let stored = Stored::Elements(t.dtype().unwrap_or(ninfer_core::DType::F32));
        Entry { layer, name: t.name().to_owned(), role, shape, count, stored, bytes }
    }

    fn fused_entries(&self, layer: LayerRef, gate_up: usize, down: usize) -> Vec<Entry> {
        let mut out = Vec::new();
        let parts = [
            (TensorRole::ExpertGate, gate_up, 2),
            (TensorRole::ExpertUp, gate_up, 2),
            (TensorRole::ExpertDown, down, 1),
        ];
        for (role, index, share) in parts {
            let Some(t) = self.checkpoint.tensors().get(index) else { continue };
            if let [experts, rows, cols] = *t.shape() {
                let shape = vec![rows / share, cols];
                let bytes = t.bytes() / share as u64;
                out.push(self.tensor_entry(layer, EntryRole::Matrix(role), t, shape, experts, bytes));
            }
        }
        out
    }

    fn split_entries(&self, out: &mut Vec<Entry>, layer: LayerRef, role: TensorRole, modules: &[Module]) {
        let first = out.len();
        for (expert, m) in modules.iter().enumerate() {
            let mut entry = self.module_entry(layer, role, m);
            entry.name = entry.name.replacen(&format!(".experts.{expert}."), ".experts.*.", 1);
            match out[first..].iter_mut().find(|e| e.stored == entry.stored && e.name == entry.name) {
                Some(e) => {
                    e.count += 1;
                    e.bytes = e.bytes.saturating_add(entry.bytes);
                }
                None => out.push(entry),
            }
        }
    }
}
