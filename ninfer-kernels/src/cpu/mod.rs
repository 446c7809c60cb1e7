//! The CPU backend: the plain f32 definition of every operation, parallel and reasonably fast.
//!
//! Weights stay in their packed form and are decoded sixteen columns at a time; activations are f32. Every operation first
//! takes checked access to its views, then loops. Nothing is allocated once the scratch memory has grown to the largest
//! call.

// Kernels are written over indices, so that the order of operations is plain to see.
#![allow(clippy::needless_range_loop)]

mod attention;
mod buffer;
mod codes;
mod delta;
mod gdn;
mod kv;
mod linear;
mod matmul;
mod moe;
mod norm;
mod parallel;
mod queue;
mod reserve;
mod rows;
mod sample;
mod simd;
mod weight;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ninfer_core::backend::{DeviceWeight, Reservation};
use ninfer_core::device::DeviceInfo;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::ops::{
    Accept, Attend, AttentionOps, Choose, CopyRows, Count, Embed, Experts, GdnFold, GdnMix, GdnOps, Head, HeadArgmax,
    LinearOps, MoeOps, MtpStem, NormOps, Project, ProjectAdd, RmsNorm, RopeAppend, Route, SampleOps, Swiglu,
};
use ninfer_core::{Backend, DType, Error, PackedRef, Recorder, Result, View};

pub use buffer::CpuBuffer;
pub use queue::{CpuQueue, CpuRecorded};
pub use weight::CpuWeight;

use buffer::Access;
use queue::Op;
use simd::Isa;

/// The CPU as a backend; a cheap handle.
///
/// ```
/// use ninfer_core::Backend;
/// use ninfer_kernels::cpu::Cpu;
/// let cpu = Cpu::new();
/// assert_eq!(cpu.activation_dtype(), ninfer_core::DType::F32);
/// ```
#[derive(Clone)]
pub struct Cpu(Arc<Inner>);

struct Inner {
    device: DeviceInfo,
    isa: Isa,
    pool: Option<rayon::ThreadPool>,
    /// Whether any weight takes its input rows as codes, so that queues set room for them aside.
    takes_codes: AtomicBool,
}

/// Most threads of a pool; more than any processor has, and few enough to be started.
const MAX_THREADS: usize = 1024;

impl Cpu {
    /// Uses the process's thread pool.
    #[must_use]
    pub fn new() -> Self {
        Self::with_pool(None)
    }

    /// Uses `threads` threads of its own.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for zero threads or more than 1,024, [`Error::Unsupported`] if threads cannot be started.
    pub fn with_threads(threads: usize) -> Result<Self> {
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(Error::OutOfRange {
                what: "number of threads",
                got: threads.to_string(),
                legal: format!("1 to {MAX_THREADS}"),
            });
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|e| Error::Unsupported {
            op: "a thread pool".to_owned(),
            need: format!("{threads} threads"),
            have: e.to_string(),
        })?;
        Ok(Self::with_pool(Some(pool)))
    }

    fn with_pool(pool: Option<rayon::ThreadPool>) -> Self {
        let takes_codes = AtomicBool::new(false);
        Self(Arc::new(Inner { device: DeviceInfo::cpu(), isa: Isa::detect(), pool, takes_codes }))
    }

    fn takes_codes(&self) -> bool {
        self.0.takes_codes.load(Ordering::Relaxed)
    }

    fn isa(&self) -> Isa {
        self.0.isa
    }

    /// Runs work on a thread of the pool, so that splitting it costs no hand-over.
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.0.pool {
            Some(pool) => pool.install(work),
            None if rayon::current_thread_index().is_some() => work(),
            None => rayon::scope(|_| work()),
        }
    }

    /// Runs work once on each thread of the pool.
    fn on_each_thread(&self, work: impl Fn() -> Result<()> + Sync) -> Result<()> {
        let results = match &self.0.pool {
            Some(pool) => pool.broadcast(|_| work()),
            None => rayon::broadcast(|_| work()),
        };
        results.into_iter().collect()
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu({:?})", self.0.isa)
    }
}

impl Backend for Cpu {
    type Buffer = CpuBuffer;
    type Weight = CpuWeight;
    type Queue = CpuQueue;
    type Recorded = CpuRecorded;

    fn device(&self) -> &DeviceInfo {
        &self.0.device
    }

    fn activation_dtype(&self) -> DType {
        DType::F32
    }

    fn kv_dtypes(&self) -> &[DType] {
        &[DType::F32, DType::Bf16, DType::I8, DType::F8E4M3]
    }

    fn queue(&self) -> Result<CpuQueue> {
        Ok(CpuQueue::default())
    }

    fn reserve(&self, queue: &mut CpuQueue, need: &Reservation) -> Result<()> {
        queue.reserve(self, need)
    }

    fn alloc(&self, what: &str, bytes: usize) -> Result<CpuBuffer> {
        CpuBuffer::new(what, bytes)
    }

    fn upload(&self, queue: &mut CpuQueue, dst: &View<Self>, bytes: &[u8]) -> Result<()> {
        queue.idle("an upload")?;
        dst.check_bytes("upload", bytes.len())?;
        Access::new("upload").write_bytes("dst", dst)?.copy_from_slice(bytes);
        Ok(())
    }

    fn download(&self, queue: &mut CpuQueue, src: &View<Self>, out: &mut [u8]) -> Result<()> {
        queue.idle("a download")?;
        src.check_bytes("download", out.len())?;
        out.copy_from_slice(Access::new("download").read_bytes("src", src)?);
        Ok(())
    }

    fn prepare(&self, parts: &[PackedRef<'_>]) -> Result<CpuWeight> {
        let weight = CpuWeight::prepare(parts)?;
        if weight.activations() != ActivationPrecision::Native {
            self.0.takes_codes.store(true, Ordering::Relaxed);
        }
        Ok(weight)
    }

    fn record(
        &self,
        queue: &mut CpuQueue,
        work: impl FnOnce(&mut Recorder<'_, Self>) -> Result<()>,
    ) -> Result<CpuRecorded> {
        let mut recording = queue.start()?;
        work(&mut Recorder::new(self, recording.queue()))?;
        Ok(recording.finish())
    }

    fn replay(&self, queue: &mut CpuQueue, step: &CpuRecorded) -> Result<()> {
        queue.replay(self, step)
    }
}

/// Implements a family by handing each operation to the queue.
macro_rules! submit {
    ($($family:ident { $($name:ident: $op:ident),+ })+) => {
        $(impl $family for Cpu {
            $(fn $name(&self, queue: &mut CpuQueue, op: $op<Self>) -> Result<()> {
                queue.submit(self, Op::$op(op))
            })+
        })+
    };
}

submit! {
    LinearOps { project: Project, project_add: ProjectAdd, swiglu: Swiglu }
    NormOps { embed: Embed, rms_norm: RmsNorm, mtp_stem: MtpStem, copy_rows: CopyRows }
    AttentionOps { rope_append: RopeAppend, attend: Attend }
    GdnOps { gdn_mix: GdnMix, gdn_fold: GdnFold }
    MoeOps { route: Route, experts: Experts }
    SampleOps { head: Head, head_argmax: HeadArgmax, choose: Choose, count: Count, accept: Accept }
}
