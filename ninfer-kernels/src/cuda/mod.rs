//! The CUDA backend: committed PTX, loaded through the NVIDIA driver; nothing else needs to be installed.
//!
//! Activations are bf16, sums f32. Weights are repacked once, at load, into the order in which the lanes of a matrix
//! instruction consume them. A queue is one stream with its workspace; a recorded step is an executable graph. Nothing
//! is allocated while a step is replayed, and a download is the only synchronisation.
//!
//! Kernels are compiled by the driver when they are first used. What was chosen for the device is listed by
//! [`Cuda::kernel_report`].

mod attention;
mod bandwidth;
mod batch;
mod buffer;
mod choose;
mod driver;
mod gdn;
mod gdn_chunk;
mod images;
mod kernels;
mod linear;
mod mma_tile;
mod moe;
mod norm;
mod pack;
mod preload;
mod queue;
mod report;
mod reserve;
mod sample;
mod step;
mod tile;
mod tile_e4m3;
mod timing;
mod weight;

use std::fmt;
use std::sync::Arc;

use ninfer_core::backend::{Reservation, Synthetic};
use ninfer_core::capability::{SHIPPED, Target, select_targets};
use ninfer_core::device::{DeviceInfo, DeviceKind};
use ninfer_core::{Backend, DType, Error, PackedRef, Recorder, Result, View};

pub use bandwidth::MemoryRates;
pub use buffer::CudaBuffer;
pub use kernels::{Image, KernelUse, images};
pub use queue::{CudaQueue, CudaRecorded};
pub use timing::{KernelTime, ReplayTime, Timing};
pub use weight::CudaWeight;

use driver::{Context, Memory};
use kernels::Kernels;
use pack::Loader;
use timing::Timer;

/// One NVIDIA GPU as a backend; a cheap handle.
///
/// ```no_run
/// use ninfer_core::Backend;
/// use ninfer_kernels::cuda::Cuda;
/// let gpu = Cuda::new(0)?;
/// println!("{}", gpu.device());
/// # Ok::<(), ninfer_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Cuda(Arc<Inner>);

struct Inner {
    loader: Loader,
    kernels: Kernels,
    device: DeviceInfo,
    context: Arc<Context>,
    timer: Timer,
    choice: Choice,
}

/// Which kernels are chosen besides what the device can do.
#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    /// E2M1 products take kernels that emulate the instruction.
    emulates_fp4: bool,
    /// Routes are taken that no device has run yet.
    tries_all: bool,
}

impl Cuda {
    /// Opens a device by its number.
    ///
    /// # Errors
    /// [`Error::NoDriver`] without a driver, [`Error::OutOfRange`] for a device that does not exist,
    /// [`Error::DriverTooOld`] and [`Error::Unsupported`] where no shipped kernels run on it.
    pub fn new(ordinal: u32) -> Result<Self> {
        Self::with_targets(ordinal, &SHIPPED)
    }

    /// Opens a device with the kernels built for some targets only, as if it were an older one: to test and to compare
    /// routes that it would not choose.
    ///
    /// ```no_run
    /// use ninfer_core::capability::Target;
    /// use ninfer_kernels::cuda::Cuda;
    /// let gpu = Cuda::with_targets(0, &[Target::Sm80])?;
    /// # Ok::<(), ninfer_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Cuda::new`]; [`Error::Unsupported`] where none of the targets runs on the device.
    pub fn with_targets(ordinal: u32, targets: &[Target]) -> Result<Self> {
        Self::open(ordinal, targets, Choice::default())
    }

    /// Opens a device as one with the kernels of [`Target::Sm80`] that multiplies E2M1 codes, by a function with the operands
    /// of that instruction: to test what is around it where it does not exist. It is slow.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn emulating_fp4(ordinal: u32) -> Result<Self> {
        Self::open(ordinal, &[Target::Sm80], Choice { emulates_fp4: true, ..Choice::default() })
    }

    /// Opens a device with the routes, too, that no device has run yet, to test them: those of E4M3 codes by the matrix
    /// instructions of warpgroups, for prompts of `-a8` recipes on sm_90a. Otherwise such products take the tiles of bf16.
    ///
    /// # Errors
    /// As [`Cuda::new`].
    pub fn trying_all(ordinal: u32) -> Result<Self> {
        Self::open(ordinal, &SHIPPED, Choice { tries_all: true, ..Choice::default() })
    }

    fn open(ordinal: u32, targets: &[Target], choice: Choice) -> Result<Self> {
        let devices = ninfer_core::driver::devices()?;
        let Some(device) = devices.get(ordinal as usize).cloned() else {
            return Err(Error::OutOfRange {
                what: "CUDA device",
                got: ordinal.to_string(),
                legal: match devices.len() {
                    0 => "none: the driver sees no device".to_owned(),
                    n => format!("0 to {}", n - 1),
                },
            });
        };
        let capability = device.capability.ok_or_else(|| Error::Unsupported {
            op: "CUDA kernels".to_owned(),
            need: "a compute capability".to_owned(),
            have: device.name.clone(),
        })?;
        let selection = select_targets(capability, device.driver, targets)?;
        let context = Context::retain(ordinal)?;
        let host = device.integrated.then(ninfer_core::device::HostMemory::detect).flatten();
        let device = device.with_driver_free(context.memory()?.0, host);
        Ok(Self(Arc::new(Inner {
            loader: Loader::new(&context),
            kernels: Kernels::new(&context, selection),
            device,
            context,
            timer: Timer::default(),
            choice,
        })))
    }

    /// What a user should be told about the choice of kernels; empty for a known part with a new enough driver.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.0.kernels.selection().notices
    }

    /// Every kernel used so far, with the target it was built for and its resources.
    #[must_use]
    pub fn kernel_report(&self) -> Vec<KernelUse> {
        self.0.kernels.report()
    }

    /// Free device memory in bytes, as the driver sees it now.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn free_memory(&self) -> Result<u64> {
        self.0.context.memory().map(|(free, _)| free)
    }

    /// Gives back the pinned memory that loading weights took; call it when all are loaded.
    pub fn finish_loading(&self) {
        self.0.loader.release();
    }

    fn kernels(&self) -> &Kernels {
        &self.0.kernels
    }

    fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    fn timer(&self) -> &Timer {
        &self.0.timer
    }

    /// Streaming multiprocessors.
    fn sms(&self) -> usize {
        self.0.device.sm_count as usize
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({})", self.0.device.name)
    }
}

impl Backend for Cuda {
    type Buffer = CudaBuffer;
    type Weight = CudaWeight;
    type Queue = CudaQueue;
    type Recorded = CudaRecorded;

    fn device(&self) -> &DeviceInfo {
        debug_assert_eq!(self.0.device.kind, DeviceKind::Cuda);
        &self.0.device
    }

    fn activation_dtype(&self) -> DType {
        DType::Bf16
    }

    fn kv_dtypes(&self) -> &[DType] {
        &[DType::Bf16, DType::I8, DType::F8E4M3]
    }

    fn queue(&self) -> Result<CudaQueue> {
        CudaQueue::new(self.context())
    }

    fn reserve(&self, queue: &mut CudaQueue, need: &Reservation) -> Result<()> {
        queue.idle("reserving workspace")?;
        self.context().enter()?;
        queue.reserve(reserve::bytes(self, need))
    }

    fn alloc(&self, what: &str, bytes: usize) -> Result<CudaBuffer> {
        Ok(CudaBuffer(Arc::new(Memory::new(self.context(), what, bytes)?)))
    }

    fn upload(&self, queue: &mut CudaQueue, dst: &View<Self>, bytes: &[u8]) -> Result<()> {
        dst.check_bytes("upload", bytes.len())?;
        queue.upload(dst, bytes)
    }

    fn download(&self, queue: &mut CudaQueue, src: &View<Self>, out: &mut [u8]) -> Result<()> {
        src.check_bytes("download", out.len())?;
        queue.download(src, out)
    }

    fn prepare(&self, parts: &[PackedRef<'_>]) -> Result<CudaWeight> {
        self.0.loader.prepare(&self.0.kernels, parts)
    }

    fn synthesize(&self, parts: &[Synthetic]) -> Result<Option<CudaWeight>> {
        self.0.loader.synthesize(&self.0.kernels, self.sms(), parts).map(Some)
    }

    fn record(
        &self,
        queue: &mut CudaQueue,
        work: impl FnOnce(&mut Recorder<'_, Self>) -> Result<()>,
    ) -> Result<CudaRecorded> {
        let times_kernels = self.timer().timing() == Timing::Kernels;
        queue.record(times_kernels, |queue| work(&mut Recorder::new(self, queue)))
    }

    fn replay(&self, queue: &mut CudaQueue, step: &CudaRecorded) -> Result<()> {
        match self.timer().timing() {
            Timing::Off => queue.replay(step),
            Timing::Replays | Timing::Kernels => self.timer().replay(self.context(), queue, step),
        }
    }
}
