//! Times of recorded steps on the device, taken only when they are asked for.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use ninfer_core::Result;

use super::Cuda;
use super::driver::{Context, Event, Launch, Stream};
use super::queue::{CudaQueue, CudaRecorded};

/// Most replays whose times are kept until [`Cuda::take_times`].
const MOST_KEPT: usize = 4096;

/// What of a recorded step is timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Timing {
    /// Nothing: replays cost nothing more.
    #[default]
    Off,
    /// The time of each replay, by events before and behind it.
    Replays,
    /// As [`Timing::Replays`], and steps that are recorded from now on have an event around each kernel as well. In their
    /// replays kernels run strictly one after another: none begins while the one in front still runs, so the kernels
    /// together take longer than the step without events.
    Kernels,
}

/// Time of one kernel of a recorded step that was recorded under [`Timing::Kernels`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct KernelTime {
    /// The kernel's name, as in [`Cuda::kernel_report`].
    pub name: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// From the event before it to the event behind it, of which [`ReplayTime::floor`] is what two events cost.
    pub seconds: f64,
}

/// Time of one replay of a recorded step on the device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ReplayTime {
    /// From the event before it to the event behind it.
    pub seconds: f64,
    /// Kernels, copies and fills of the step, without events.
    pub launches: usize,
    /// Its kernels in order, if it was recorded under [`Timing::Kernels`].
    pub kernels: Vec<KernelTime>,
    /// Time between two events of the step with nothing between them; 0 without times of kernels.
    pub floor: f64,
}

/// A launch of a step whose kernels are timed.
struct TimedLaunch {
    name: &'static str,
    how: Launch,
    after: Event,
}

/// Events of a step whose kernels are timed.
#[derive(Default)]
pub(super) struct TimedLaunches {
    first: Option<Event>,
    launches: Vec<TimedLaunch>,
    /// Behind the event of the last launch, at once.
    last: Option<Event>,
}

impl fmt::Debug for TimedLaunches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TimedLaunches({})", self.launches.len())
    }
}

fn event_in(stream: &Stream) -> Result<Event> {
    let event = Event::new(&stream.context)?;
    stream.record_in_step(&event)?;
    Ok(event)
}

impl TimedLaunches {
    /// Before a launch is captured.
    pub(super) fn before(&mut self, stream: &Stream) -> Result<()> {
        if self.first.is_none() {
            self.first = Some(event_in(stream)?);
        }
        Ok(())
    }

    /// Behind a launch that was captured.
    pub(super) fn after(&mut self, stream: &Stream, name: &'static str, how: Launch) -> Result<()> {
        let after = event_in(stream)?;
        self.launches.push(TimedLaunch { name, how, after });
        Ok(())
    }

    /// When all launches were captured.
    pub(super) fn finish(&mut self, stream: &Stream) -> Result<()> {
        if self.first.is_some() {
            self.last = Some(event_in(stream)?);
        }
        Ok(())
    }

    /// Events in the step.
    pub(super) fn events(&self) -> usize {
        self.launches.len() + usize::from(self.first.is_some()) + usize::from(self.last.is_some())
    }

    /// Times of the last replay, which must have ended, and of two events with nothing between them.
    fn times(&self) -> Result<(Vec<KernelTime>, f64)> {
        let (Some(mut before), Some(last)) = (self.first.as_ref(), self.last.as_ref()) else {
            return Ok((Vec::new(), 0.0));
        };
        let mut times = Vec::with_capacity(self.launches.len());
        for TimedLaunch { name, how, after } in &self.launches {
            let seconds = seconds(before, after)?;
            let Launch { grid, block, shared } = *how;
            times.push(KernelTime { name, grid, block, shared_bytes: shared, seconds });
            before = after;
        }
        Ok((times, seconds(before, last)?))
    }
}

fn seconds(before: &Event, after: &Event) -> Result<f64> {
    Ok(f64::from(after.since(before)?) * 1e-3)
}

/// A replay whose times have not been read.
struct Pending {
    before: Event,
    after: Event,
    launches: usize,
    kernels: Option<Arc<TimedLaunches>>,
}

impl Pending {
    fn read(&self) -> Result<ReplayTime> {
        self.after.wait()?;
        let (kernels, floor) = match &self.kernels {
            Some(kernels) => kernels.times()?,
            None => (Vec::new(), 0.0),
        };
        Ok(ReplayTime { seconds: seconds(&self.before, &self.after)?, launches: self.launches, kernels, floor })
    }
}

#[derive(Default)]
struct State {
    timing: Timing,
    pending: Vec<Pending>,
    read: Vec<ReplayTime>,
}

impl State {
    fn settle(&mut self) -> Result<()> {
        for pending in std::mem::take(&mut self.pending) {
            self.read.push(pending.read()?);
        }
        Ok(())
    }
}

/// Times of the replays of one device.
#[derive(Default)]
pub(super) struct Timer(Mutex<State>);

impl Timer {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn timing(&self) -> Timing {
        self.state().timing
    }

    /// Replays a step between two events.
    pub(super) fn replay(&self, context: &Arc<Context>, queue: &mut CudaQueue, step: &CudaRecorded) -> Result<()> {
        queue.idle("replay")?;
        let kernels = step.timed();
        if kernels.is_some() {
            // The events of a step are recorded again by each replay.
            self.state().settle()?;
        }
        let (before, after) = (Event::new(context)?, Event::new(context)?);
        queue.stream.record(&before)?;
        queue.replay(step)?;
        queue.stream.record(&after)?;
        let mut state = self.state();
        if state.pending.len() + state.read.len() < MOST_KEPT {
            state.pending.push(Pending { before, after, launches: step.nodes(), kernels });
        }
        Ok(())
    }
}

impl Cuda {
    /// Says what is timed from now on, for all queues of this handle and its clones. One queue at a time should be used
    /// under [`Timing::Kernels`].
    ///
    /// ```no_run
    /// use ninfer_kernels::cuda::{Cuda, Timing};
    /// let gpu = Cuda::new(0)?;
    /// gpu.set_timing(Timing::Replays);
    /// // … rounds …
    /// for replay in gpu.take_times()? {
    ///     println!("{:.1} µs in {} launches", replay.seconds * 1e6, replay.launches);
    /// }
    /// # Ok::<(), ninfer_core::Error>(())
    /// ```
    pub fn set_timing(&self, timing: Timing) {
        self.timer().state().timing = timing;
    }

    /// Waits for the replays that were timed and gives their times in order, each once; the first 4,096 that were not taken.
    ///
    /// # Errors
    /// [`ninfer_core::Error::Driver`].
    pub fn take_times(&self) -> Result<Vec<ReplayTime>> {
        self.context().enter()?;
        let mut state = self.timer().state();
        state.settle()?;
        Ok(std::mem::take(&mut state.read))
    }
}
