//! The Qwen3.5 / 3.6 / 3.8 text model: weights on a device, and the graph that runs over them.

mod graph;
mod layers;
mod load;
mod mtp;
mod synthetic;

use std::fmt;
use std::sync::Arc;

use ninfer_core::backend::{DeviceWeight, InferenceBackend};
use ninfer_core::view::View;

pub use load::{LoadProgress, WeightSource};
pub use synthetic::SyntheticWeights;

pub(crate) use layers::{AttentionWeights, FfnWeights, GdnWeights, LayerWeights, Mixer, MtpWeights};
pub(crate) use mtp::MtpPass;

use crate::config::Config;
use crate::session::{Session, SessionOptions};
use crate::weights::WeightTable;
use crate::{Recipe, Result};

/// A loaded model; a cheap handle that sessions share.
///
/// ```no_run
/// use ninfer_kernels::cpu::Cpu;
/// use ninfer_models::{Qwen35, SessionOptions};
/// let model = Qwen35::load(&Cpu::new(), "path/to/checkpoint", &"keep".parse()?, &mut |_| {})?;
/// let session = model.session(&SessionOptions::new(4096))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Qwen35<B: InferenceBackend>(Arc<Inner<B>>);

struct Inner<B: InferenceBackend> {
    backend: B,
    config: Config,
    embedding: B::Weight,
    layers: Vec<LayerWeights<B>>,
    final_norm: View<B>,
    head: B::Weight,
    mtp: Option<MtpWeights<B>>,
    /// f32 `[1, R/2]`.
    frequencies: View<B>,
    magnitude: f32,
    bytes: usize,
}

impl<B: InferenceBackend> Clone for Qwen35<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: InferenceBackend> fmt::Debug for Qwen35<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qwen35")
            .field("backend", &self.0.backend)
            .field("layers", &self.0.layers.len())
            .field("weight_bytes", &self.0.bytes)
            .finish_non_exhaustive()
    }
}

impl<B: InferenceBackend> Qwen35<B> {
    /// Loads a checkpoint folder, converting each matrix as the recipe says.
    ///
    /// Tensors are read, converted and handed to the device one at a time; `progress` is told after each.
    ///
    /// # Errors
    /// What [`WeightTable::open`] reports about the folder, and what the backend reports about a matrix.
    pub fn load(
        backend: &B,
        dir: impl AsRef<std::path::Path>,
        recipe: &Recipe,
        progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        let table = WeightTable::open(dir)?;
        Self::from_source(backend, &load::Converted { table: &table, recipe }, progress)
    }

    /// Loads from any source of weights.
    ///
    /// # Errors
    /// What the source and the backend report.
    pub fn from_source(
        backend: &B,
        source: &dyn WeightSource,
        progress: &mut dyn FnMut(LoadProgress<'_>),
    ) -> Result<Self> {
        load::load(backend, source, progress).map(|inner| Self(Arc::new(inner)))
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &B {
        &self.0.backend
    }

    /// Whether a complete MTP block was loaded.
    #[must_use]
    pub fn has_mtp(&self) -> bool {
        self.0.mtp.is_some()
    }

    /// Number of layers, the MTP layer not counted.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.0.layers.len()
    }

    /// Bytes of all prepared weights on the device.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        self.0.bytes
    }

    /// Rows of the head.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.0.head.rows()
    }

    /// Opens a session: KV pages, recurrent state and workspace for some lanes.
    ///
    /// # Errors
    /// [`ninfer_core::Error::OutOfRange`] for illegal options, [`ninfer_core::Error::OutOfMemory`].
    pub fn session(&self, options: &SessionOptions) -> Result<Session<B>> {
        Session::open(self.clone(), options)
    }

    pub(crate) fn embedding(&self) -> &B::Weight {
        &self.0.embedding
    }

    pub(crate) fn head(&self) -> &B::Weight {
        &self.0.head
    }

    pub(crate) fn layer_weights(&self) -> &[LayerWeights<B>] {
        &self.0.layers
    }

    pub(crate) fn mtp_weights(&self) -> Option<&MtpWeights<B>> {
        self.0.mtp.as_ref()
    }
}
