//! A backend that counts, for tests (feature `testing`).
//!
//! [`Counting`] wraps any backend, hands everything on, and keeps [`Counts`] of what passed: launches per operation,
//! allocations, copies. While a step is recorded it refuses every allocation, preparation and copy, also those that are
//! reached through [`Recorder::backend`], so a test proves that a recorded step has none. The recorded step knows
//! how many launches it has. Wrapped by [`Counting::one_by_one`], it runs its operations one by one instead, which is what a
//! replay must equal.

mod counts;
mod inner;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use self::counts::{Counts, Launches};
use self::inner::Inner;
use crate::backend::{DeviceBuffer, Reservation};
use crate::device::DeviceInfo;
use crate::ops::{
    Accept, Attend, AttentionOps, Choose, CopyRows, Count, Embed, Experts, GdnFold, GdnMix, GdnOps, Head, HeadArgmax,
    LinearOps, MoeOps, MtpStem, NormOps, Project, ProjectAdd, RmsNorm, RopeAppend, Route, SampleOps, Swiglu,
};
use crate::{Backend, DType, Error, PackedRef, Recorder, Result, View};

/// A backend that hands everything to another one and counts it.
///
/// Buffers, weights and queues are those of the wrapped backend; clones share the counts. One thread at a time is to use
/// it: what another thread does during a recording is refused or counted as part of it.
///
/// ```
/// # fn example<B: ninfer_core::Backend>(backend: B) -> ninfer_core::Result<()> {
/// use ninfer_core::Backend;
/// use ninfer_core::testing::Counting;
/// let counting = Counting::new(backend);
/// let mut queue = counting.queue()?;
/// let step = counting.record(&mut queue, |recorder| {
///     assert!(recorder.backend().alloc("not here", 1).is_err());
///     Ok(())
/// })?;
/// assert_eq!(step.launches().total(), 0);
/// counting.alloc("scratch", 64)?;
/// assert_eq!(counting.counts().allocations, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Counting<B: Backend> {
    backend: B,
    one_by_one: bool,
    state: Arc<Mutex<State<B>>>,
}

impl<B: Backend> fmt::Debug for Counting<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counting").field("backend", &self.backend).finish_non_exhaustive()
    }
}

struct State<B: Backend> {
    counts: Counts,
    /// The step that is being recorded.
    recording: Option<Taken<B>>,
}

/// What was recorded of a step.
struct Taken<B: Backend> {
    launches: Launches,
    operations: Vec<Operation<B>>,
}

/// An operation of the wrapped backend.
type Operation<B> = Box<dyn Fn(&B, &mut <B as Backend>::Queue) -> Result<()> + Send + Sync>;

/// A recorded step with the number of its launches.
pub struct CountedStep<B: Backend> {
    step: B::Recorded,
    taken: Taken<B>,
}

impl<B: Backend> fmt::Debug for CountedStep<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CountedStep").field("launches", &self.taken.launches).finish_non_exhaustive()
    }
}

impl<B: Backend> CountedStep<B> {
    /// Launches of one replay.
    #[must_use]
    pub fn launches(&self) -> &Launches {
        &self.taken.launches
    }

    /// The step of the wrapped backend.
    #[must_use]
    pub fn inner(&self) -> &B::Recorded {
        &self.step
    }
}

impl<B: Backend> Counting<B> {
    /// Wraps a backend.
    #[must_use]
    pub fn new(backend: B) -> Self {
        let state = State { counts: Counts::default(), recording: None };
        Self { backend, one_by_one: false, state: Arc::new(Mutex::new(state)) }
    }

    /// Wraps a backend, of whose recorded steps a replay runs the operations one by one.
    #[must_use]
    pub fn one_by_one(backend: B) -> Self {
        Self { one_by_one: true, ..Self::new(backend) }
    }

    /// The wrapped backend.
    #[must_use]
    pub fn inner(&self) -> &B {
        &self.backend
    }

    /// What was counted since the beginning or the last [`Counting::reset`].
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.state().counts.clone()
    }

    /// Sets all counts to zero.
    pub fn reset(&self) {
        self.state().counts = Counts::default();
    }

    /// Whether a step is being recorded.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.state().recording.is_some()
    }

    fn state(&self) -> MutexGuard<'_, State<B>> {
        // A panic between two updates of a counter leaves nothing inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counts, unless a step is being recorded.
    fn eager(&self, what: &'static str) -> Result<MutexGuard<'_, State<B>>> {
        let state = self.state();
        if state.recording.is_some() {
            return Err(Error::Recording { what });
        }
        Ok(state)
    }

    fn launch(&self, name: &'static str, operation: impl FnOnce() -> Operation<B>) {
        let mut state = self.state();
        match &mut state.recording {
            Some(taken) => {
                taken.launches.add(name, 1);
                if self.one_by_one {
                    taken.operations.push(operation());
                }
            }
            None => state.counts.launches.add(name, 1),
        }
    }
}

impl<B: Backend> Taken<B> {
    fn new() -> Self {
        Self { launches: Launches::default(), operations: Vec::new() }
    }
}

/// Ends a recording, whatever way its closure is left.
struct Recording<'a, B: Backend>(&'a Counting<B>);

impl<B: Backend> Drop for Recording<'_, B> {
    fn drop(&mut self) {
        self.0.state().recording = None;
    }
}

impl<B: Backend> Backend for Counting<B> {
    type Buffer = B::Buffer;
    type Weight = B::Weight;
    type Queue = B::Queue;
    type Recorded = CountedStep<B>;

    fn device(&self) -> &DeviceInfo {
        self.backend.device()
    }

    fn activation_dtype(&self) -> DType {
        self.backend.activation_dtype()
    }

    fn kv_dtypes(&self) -> &[DType] {
        self.backend.kv_dtypes()
    }

    fn queue(&self) -> Result<Self::Queue> {
        self.backend.queue()
    }

    fn reserve(&self, queue: &mut Self::Queue, need: &Reservation) -> Result<()> {
        drop(self.eager("reserving workspace")?);
        self.backend.reserve(queue, need)
    }

    fn alloc(&self, what: &str, bytes: usize) -> Result<Self::Buffer> {
        let mut state = self.eager("an allocation")?;
        let buffer = self.backend.alloc(what, bytes)?;
        state.counts.allocations += 1;
        state.counts.allocated_bytes += buffer.len() as u64;
        Ok(buffer)
    }

    fn upload(&self, queue: &mut Self::Queue, dst: &View<Self>, bytes: &[u8]) -> Result<()> {
        let mut state = self.eager("an upload")?;
        self.backend.upload(queue, &dst.inner()?, bytes)?;
        state.counts.uploads += 1;
        state.counts.uploaded_bytes += bytes.len() as u64;
        Ok(())
    }

    fn download(&self, queue: &mut Self::Queue, src: &View<Self>, out: &mut [u8]) -> Result<()> {
        let mut state = self.eager("a download")?;
        self.backend.download(queue, &src.inner()?, out)?;
        state.counts.downloads += 1;
        state.counts.downloaded_bytes += out.len() as u64;
        Ok(())
    }

    fn prepare(&self, parts: &[PackedRef<'_>]) -> Result<Self::Weight> {
        let mut state = self.eager("preparing a weight")?;
        let weight = self.backend.prepare(parts)?;
        state.counts.prepared += 1;
        Ok(weight)
    }

    fn record(
        &self,
        queue: &mut Self::Queue,
        work: impl FnOnce(&mut Recorder<'_, Self>) -> Result<()>,
    ) -> Result<Self::Recorded> {
        self.eager("recording another step")?.recording = Some(Taken::new());
        let recording = Recording(self);
        let step = self.backend.record(queue, |recorder| work(&mut Recorder::new(self, recorder.queue)))?;
        let taken = self.state().recording.take().unwrap_or_else(Taken::new);
        drop(recording);
        self.state().counts.recorded += 1;
        Ok(CountedStep { step, taken })
    }

    fn replay(&self, queue: &mut Self::Queue, step: &Self::Recorded) -> Result<()> {
        {
            let mut state = self.eager("replay")?;
            state.counts.replays += 1;
            state.counts.replayed.merge(&step.taken.launches);
        }
        if self.one_by_one {
            return step.taken.operations.iter().try_for_each(|operation| operation(&self.backend, queue));
        }
        self.backend.replay(queue, &step.step)
    }
}

/// Implements a family by counting each operation and handing it on.
macro_rules! count {
    ($($family:ident { $($name:ident: $op:ident),+ })+) => {
        $(impl<B: $family> $family for Counting<B> {
            $(fn $name(&self, queue: &mut Self::Queue, op: $op<Self>) -> Result<()> {
                let op = op.inner()?;
                self.launch(stringify!($name), || {
                    let op = op.clone();
                    Box::new(move |backend: &B, queue: &mut B::Queue| backend.$name(queue, op.clone()))
                });
                self.backend.$name(queue, op)
            })+
        })+
    };
}

count! {
    LinearOps { project: Project, project_add: ProjectAdd, swiglu: Swiglu }
    NormOps { embed: Embed, rms_norm: RmsNorm, mtp_stem: MtpStem, copy_rows: CopyRows }
    AttentionOps { rope_append: RopeAppend, attend: Attend }
    GdnOps { gdn_mix: GdnMix, gdn_fold: GdnFold }
    MoeOps { route: Route, experts: Experts }
    SampleOps { head: Head, head_argmax: HeadArgmax, choose: Choose, count: Count, accept: Accept }
}
