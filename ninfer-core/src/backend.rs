//! The backend: memory, prepared weights, and steps that are recorded once and replayed.

use std::fmt::Debug;

use crate::format::{ActivationPrecision, PackedRef, WeightFormat};
use crate::ops::Ops;
use crate::shape::ModelShape;
use crate::{DType, Result, View};

/// A handle to device bytes; clones share the memory.
pub trait DeviceBuffer: Clone + Debug + Send + Sync + 'static {
    /// Length in bytes.
    fn len(&self) -> usize;

    /// Whether both are handles to the same memory.
    fn is_same(&self, other: &Self) -> bool;

    /// Whether the length is zero.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A handle to a prepared weight `[rows, cols]`; clones share the memory.
pub trait DeviceWeight: Clone + Debug + Send + Sync + 'static {
    /// Out features, over all parts.
    fn rows(&self) -> usize;
    /// In features.
    fn cols(&self) -> usize;
    /// Format of the first part.
    fn format(&self) -> WeightFormat;
    /// What a product does to its input rows; the same for all parts.
    fn activations(&self) -> ActivationPrecision;
    /// Bytes in device memory.
    fn bytes(&self) -> usize;
}

/// The largest calls a queue will see, told before the first of them so that nothing is allocated later.
#[derive(Clone, Debug)]
pub struct Reservation {
    /// The model.
    pub shape: ModelShape,
    /// Most rows of a step.
    pub step_rows: usize,
    /// Most rows of a prompt chunk.
    pub prefill_rows: usize,
    /// Most segments of a call.
    pub segments: usize,
    /// Most visible keys of a row.
    pub max_context: usize,
}

/// A weight of random values, for benchmarks: the values mean nothing, their number and format do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synthetic {
    /// How it is stored.
    pub format: WeightFormat,
    /// What a product does to its input rows.
    pub activations: ActivationPrecision,
    /// Out features.
    pub rows: usize,
    /// In features.
    pub cols: usize,
    /// Different seeds give different values.
    pub seed: u64,
}

/// A device that runs the operations; a cheap handle.
///
/// Life of a step: everything is allocated, weights are prepared, the step is recorded once, and from then on each round
/// is one upload of its small inputs, one [`Backend::replay`] and one [`Backend::download`], which is the only
/// synchronisation. While a step is recorded there is only a [`Recorder`], which can neither allocate nor copy to or from
/// the host; all that changes between replays is device data.
pub trait Backend: Clone + Debug + Send + Sync + 'static {
    /// Device bytes.
    type Buffer: DeviceBuffer;
    /// A packed matrix in this backend's layout.
    type Weight: DeviceWeight;
    /// What work is submitted to; one owner thread.
    type Queue: Send + Debug;
    /// A recorded step. It owns a handle to every buffer it touches.
    type Recorded: Send + Debug;

    /// What the device is.
    fn device(&self) -> &crate::device::DeviceInfo;

    /// Element type of activations (the residual stream and everything between two operations).
    fn activation_dtype(&self) -> DType;

    /// Element types that KV pages may have; the first one is the default.
    fn kv_dtypes(&self) -> &[DType];

    /// A new queue.
    ///
    /// # Errors
    /// Whatever the device reports.
    fn queue(&self) -> Result<Self::Queue>;

    /// Sizes the workspace of a queue for the largest calls to come.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`].
    fn reserve(&self, queue: &mut Self::Queue, need: &Reservation) -> Result<()>;

    /// Allocates device bytes; their content is unspecified.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] naming `what`.
    fn alloc(&self, what: &str, bytes: usize) -> Result<Self::Buffer>;

    /// Copies host bytes into a contiguous view, in order with the queue's work.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the lengths differ.
    fn upload(&self, queue: &mut Self::Queue, dst: &View<Self>, bytes: &[u8]) -> Result<()>;

    /// Waits for the queue and copies a contiguous view to the host.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the lengths differ, or what the work before it reported.
    fn download(&self, queue: &mut Self::Queue, src: &View<Self>, out: &mut [u8]) -> Result<()>;

    /// Brings one or more packed matrices of equal width into this backend's layout, stacked by rows.
    ///
    /// Each part keeps its own scales, so gate and up, or the experts of a layer, may have different ones. All parts have the
    /// same [`ActivationPrecision`], which becomes that of the weight.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if the widths differ or there is no part, [`crate::Error::OutOfRange`] if the activation
    /// precisions differ ([`ActivationPrecision::common`]), [`crate::Error::Unsupported`] for a format without a route.
    fn prepare(&self, parts: &[PackedRef<'_>]) -> Result<Self::Weight>;

    /// Makes a weight of random values on the device, from parts stacked by rows as in [`Backend::prepare`], scaled so that
    /// activations keep their size; `None` where the backend has no way to, and the values must come from the host.
    ///
    /// # Errors
    /// As [`Backend::prepare`].
    fn synthesize(&self, parts: &[Synthetic]) -> Result<Option<Self::Weight>> {
        let _ = parts;
        Ok(None)
    }

    /// Runs operations now, in order.
    ///
    /// # Errors
    /// Whatever the closure or an operation reports.
    fn run(&self, queue: &mut Self::Queue, work: impl FnOnce(&mut Recorder<'_, Self>) -> Result<()>) -> Result<()> {
        work(&mut Recorder::new(self, queue))
    }

    /// Records operations without running them.
    ///
    /// # Errors
    /// Whatever the closure or an operation reports; the queue is usable afterwards.
    fn record(
        &self,
        queue: &mut Self::Queue,
        work: impl FnOnce(&mut Recorder<'_, Self>) -> Result<()>,
    ) -> Result<Self::Recorded>;

    /// Runs a recorded step.
    ///
    /// # Errors
    /// Whatever an operation reports.
    fn replay(&self, queue: &mut Self::Queue, step: &Self::Recorded) -> Result<()>;
}

/// Access to the operations of a queue, and to nothing else of it.
///
/// Each method checks the shapes of its operation, and that nothing it writes overlaps another of its views, and hands it to the backend, which runs or records it. The methods are
/// in [`crate::ops`], beside the operations.
#[derive(Debug)]
pub struct Recorder<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) queue: &'a mut B::Queue,
}

impl<'a, B: Backend> Recorder<'a, B> {
    /// For backends: wraps a queue for the duration of a closure.
    pub fn new(backend: &'a B, queue: &'a mut B::Queue) -> Self {
        Self { backend, queue }
    }

    /// The backend.
    #[must_use]
    pub fn backend(&self) -> &'a B {
        self.backend
    }
}

/// A backend with every family of operations: what a model graph needs.
pub trait InferenceBackend: Backend + Ops {}

impl<B: Backend + Ops> InferenceBackend for B {}
