//! Queues: submit, capture and replay, staging of small copies, workspace, and the device's error report.

use std::any::Any;
use std::sync::Arc;

use ninfer_core::view::View;
use ninfer_core::{Error, Result};

use super::Cuda;
use super::buffer::Matrix;
use super::driver::{Context, Graph, Launch, Memory, Pinned, Stream};
use super::report::DeviceReport;
use super::timing::TimedLaunches;

/// Bytes of pinned memory for uploads between two synchronisations.
const STAGING: usize = 1 << 20;
/// Bytes of pinned memory for a download.
const EGRESS: usize = 1 << 20;
/// Bytes of counters that every kernel leaves as it found them: zero.
const COUNTERS: usize = 1024;
/// Alignment of the parts of a workspace.
const ALIGN: usize = 256;

/// Where operations of the CUDA backend go: one stream with its workspace; one owner thread.
#[derive(Debug)]
pub struct CudaQueue {
    pub(super) stream: Stream,
    workspace: Arc<Memory>,
    counters: Arc<Memory>,
    staging: Pinned,
    staged: usize,
    egress: Pinned,
    report: DeviceReport,
    capture: Option<Capture>,
    launches: u64,
}

/// What a captured step needs to stay alive.
#[derive(Default)]
struct Capture {
    operations: Vec<Box<dyn Any + Send>>,
    workspaces: Vec<Arc<Memory>>,
    /// Events around launches, where kernels are timed.
    timed: Option<TimedLaunches>,
}

impl std::fmt::Debug for Capture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Capture({} operations)", self.operations.len())
    }
}

/// A recorded step: an executable graph and handles to everything it touches.
#[derive(Debug)]
pub struct CudaRecorded {
    graph: Graph,
    timed: Option<Arc<TimedLaunches>>,
    _keep: Capture,
}

impl CudaRecorded {
    /// Kernels, copies and fills of the step.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.graph.nodes - self.timed.as_ref().map_or(0, |t| t.events())
    }

    pub(super) fn timed(&self) -> Option<Arc<TimedLaunches>> {
        self.timed.clone()
    }
}

/// A queue that records; dropping this ends the recording, whatever way its closure was left.
struct Recording<'a>(&'a mut CudaQueue);

impl Recording<'_> {
    fn finish(self) -> (Result<Graph>, Capture) {
        let mut keep = self.0.capture.take().unwrap_or_default();
        let last = keep.timed.as_mut().map_or(Ok(()), |timed| timed.finish(&self.0.stream));
        let graph = self.0.stream.end_capture();
        (last.and(graph), keep)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.0.capture.take().is_some() {
            let _ = self.0.stream.end_capture();
        }
    }
}

impl CudaQueue {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        let stream = Stream::new(context)?;
        let counters = Memory::new(context, "counters", COUNTERS)?;
        stream.fill(counters.address, 0, COUNTERS)?;
        Ok(Self {
            stream,
            counters: Arc::new(counters),
            workspace: Arc::new(Memory::new(context, "workspace", 0)?),
            staging: Pinned::new(context, STAGING)?,
            staged: 0,
            egress: Pinned::new(context, EGRESS)?,
            report: DeviceReport::new(context)?,
            capture: None,
            launches: 0,
        })
    }

    /// Kernels launched or captured so far.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.launches
    }

    /// Address that kernels report errors to.
    pub(super) fn report_address(&self) -> u64 {
        self.report.address()
    }

    /// Address of counters that are zero between launches.
    pub(super) fn counters_address(&self) -> u64 {
        self.counters.address
    }

    /// Makes the workspace at least this large.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.workspace.bytes {
            let memory = Arc::new(Memory::new(&self.stream.context, "workspace", bytes.next_multiple_of(1 << 20))?);
            if let Some(capture) = &mut self.capture {
                capture.workspaces.push(memory.clone());
            }
            self.workspace = memory;
        }
        Ok(())
    }

    /// Addresses of parts of the workspace of the given lengths in bytes; their content is unspecified, and the next call
    /// gives out the same memory again.
    pub(super) fn scratch<const N: usize>(&mut self, lengths: [usize; N]) -> Result<[u64; N]> {
        let total = lengths.iter().map(|l| l.next_multiple_of(ALIGN)).sum();
        self.reserve(total)?;
        let mut at = self.workspace.address;
        Ok(lengths.map(|length| {
            let here = at;
            at += length.next_multiple_of(ALIGN) as u64;
            here
        }))
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// As [`Stream::launch`]: the arguments fit the kernel, and what they address belongs to the operation's views, to its
    /// weights or to the workspace.
    pub(super) unsafe fn launch<A: Copy>(
        &mut self,
        backend: &Cuda,
        family: &'static str,
        kernel: &'static str,
        how: Launch,
        arguments: &A,
    ) -> Result<()> {
        if how.grid.contains(&0) {
            return Ok(());
        }
        let mut function = backend.kernels().get(family, kernel, how.shared)?;
        let mut timed = self.capture.as_mut().and_then(|c| c.timed.as_mut());
        if let Some(timed) = &mut timed {
            timed.before(&self.stream)?;
            // It begins behind an event.
            function.overlaps = false;
        }
        self.launches += 1;
        // SAFETY: the caller's promise.
        let launched = unsafe { self.stream.launch(&function, &how, arguments) };
        launched.map_err(|error| match error {
            Error::Driver { call, code, message } => {
                let Launch { grid, block, shared } = how;
                let message = format!("{message} ({kernel}, grid {grid:?}, block {block}, {shared} bytes shared)");
                Error::Driver { call, code, message }
            }
            error => error,
        })?;
        timed.map_or(Ok(()), |timed| timed.after(&self.stream, kernel, how))
    }

    /// Runs or captures an operation, and keeps it while the captured step lives.
    pub(super) fn submit<T: Send + 'static>(
        &mut self,
        op: T,
        work: impl FnOnce(&mut Self, &T) -> Result<()>,
    ) -> Result<()> {
        self.stream.context.enter()?;
        work(self, &op)?;
        if let Some(capture) = &mut self.capture {
            capture.operations.push(Box::new(op));
        }
        Ok(())
    }

    pub(super) fn upload(&mut self, dst: &View<Cuda>, bytes: &[u8]) -> Result<()> {
        self.idle("an upload")?;
        self.stream.context.enter()?;
        let mut to = Matrix::from(dst).address();
        for part in bytes.chunks(STAGING) {
            if self.staged + part.len() > self.staging.len() {
                self.stream.synchronize()?;
                self.staged = 0;
            }
            let at = self.staged;
            self.staging.bytes_mut()[at..at + part.len()].copy_from_slice(part);
            self.stream.upload(to, &self.staging, at, part.len())?;
            self.staged = (at + part.len()).next_multiple_of(ALIGN).min(self.staging.len());
            to += part.len() as u64;
        }
        Ok(())
    }

    pub(super) fn download(&mut self, src: &View<Cuda>, out: &mut [u8]) -> Result<()> {
        self.idle("a download")?;
        self.stream.context.enter()?;
        let mut from = Matrix::from(src).address();
        if out.is_empty() {
            self.stream.synchronize()?;
        }
        for part in out.chunks_mut(EGRESS) {
            self.stream.download(&mut self.egress, 0, from, part.len())?;
            self.stream.synchronize()?;
            part.copy_from_slice(&self.egress.bytes()[..part.len()]);
            from += part.len() as u64;
        }
        self.staged = 0;
        self.report.take()
    }

    /// Records a step, with an event around each kernel if they are to be timed.
    pub(super) fn record(
        &mut self,
        times_kernels: bool,
        work: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<CudaRecorded> {
        self.idle("recording another step")?;
        self.stream.context.enter()?;
        self.stream.begin_capture()?;
        self.capture = Some(Capture {
            workspaces: vec![self.workspace.clone(), self.counters.clone()],
            timed: times_kernels.then(TimedLaunches::default),
            ..Capture::default()
        });
        let recording = Recording(self);
        let worked = work(&mut *recording.0);
        let (graph, mut keep) = recording.finish();
        worked?;
        let timed = keep.timed.take().map(Arc::new);
        Ok(CudaRecorded { graph: graph?, timed, _keep: keep })
    }

    pub(super) fn replay(&mut self, step: &CudaRecorded) -> Result<()> {
        self.idle("replay")?;
        self.stream.context.enter()?;
        self.stream.replay(&step.graph)
    }

    pub(super) fn idle(&self, what: &'static str) -> Result<()> {
        if self.capture.is_some() {
            return Err(Error::Recording { what });
        }
        Ok(())
    }
}
