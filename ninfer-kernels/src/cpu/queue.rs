//! Queues of the CPU backend: run now, or record and replay.

use ninfer_core::backend::Reservation;
use ninfer_core::ops::{
    Accept, Attend, Choose, CopyRows, Count, Embed, Experts, GdnFold, GdnMix, Head, HeadArgmax, MtpStem, Project,
    ProjectAdd, RmsNorm, RopeAppend, Route, Swiglu,
};
use ninfer_core::sampling::ChooseScratch;
use ninfer_core::{Error, Result};

use super::codes::Codes;
use super::reserve::{grow, reserve};
use super::simd::Isa;
use super::{Cpu, attention, gdn, linear, moe, norm, sample};

/// Where operations of the CPU backend go; one owner thread.
#[derive(Debug, Default)]
pub struct CpuQueue {
    scratch: Scratch,
    recording: Option<Vec<Op>>,
}

/// A recorded step: the operations, with handles to their buffers.
#[derive(Debug)]
pub struct CpuRecorded(Vec<Op>);

impl CpuRecorded {
    /// Number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no operation.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Host memory that operations work in; grows to what the largest of them needs and stays.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) floats: Floats,
    pub(super) codes: Codes,
    pub(super) indices: Vec<u32>,
    pub(super) places: Vec<usize>,
    pub(super) choose: ChooseScratch,
}

/// One block of f32 values that each operation cuts as it needs.
#[derive(Debug, Default)]
pub(super) struct Floats(Vec<f32>);

impl Floats {
    /// Disjoint slices of the given lengths; their content is unspecified.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if there is no room for them.
    pub(super) fn get<const N: usize>(&mut self, lengths: [usize; N]) -> Result<[&mut [f32]; N]> {
        let total = lengths.iter().fold(0, |sum: usize, len| sum.saturating_add(*len));
        if self.0.len() < total {
            grow(&mut self.0, total)?;
            self.0.resize(total, 0.0);
        }
        let mut rest = self.0.as_mut_slice();
        Ok(lengths.map(|len| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(len);
            rest = tail;
            head
        }))
    }
}

macro_rules! operations {
    ($($op:ident => $run:path),+ $(,)?) => {
        /// An operation with everything it needs; it is moved once, and boxing it would cost an allocation a call.
        #[derive(Debug)]
        #[allow(clippy::large_enum_variant)]
        pub(super) enum Op {
            $($op($op<Cpu>)),+
        }

        impl Op {
            fn run(&self, isa: Isa, scratch: &mut Scratch) -> Result<()> {
                match self {
                    $(Self::$op(op) => $run(op, isa, scratch)),+
                }
            }
        }
    };
}

operations! {
    Project => linear::project,
    ProjectAdd => linear::project_add,
    Swiglu => linear::swiglu,
    Embed => norm::embed,
    RmsNorm => norm::rms_norm,
    MtpStem => norm::mtp_stem,
    CopyRows => norm::copy_rows,
    RopeAppend => attention::rope_append,
    Attend => attention::attend,
    GdnMix => gdn::mix,
    GdnFold => gdn::fold,
    Route => moe::route,
    Experts => moe::experts,
    Head => sample::head,
    HeadArgmax => sample::head_argmax,
    Choose => sample::choose,
    Count => sample::count,
    Accept => sample::accept,
}

/// A queue that records; dropping this ends the recording, whatever way its closure was left.
pub(super) struct Recording<'a>(&'a mut CpuQueue);

impl Recording<'_> {
    pub(super) fn queue(&mut self) -> &mut CpuQueue {
        self.0
    }

    pub(super) fn finish(self) -> CpuRecorded {
        CpuRecorded(self.0.recording.take().unwrap_or_default())
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.0.recording = None;
    }
}

impl CpuQueue {
    pub(super) fn submit(&mut self, backend: &Cpu, op: Op) -> Result<()> {
        if let Some(list) = &mut self.recording {
            list.push(op);
            return Ok(());
        }
        let scratch = &mut self.scratch;
        backend.install(|| op.run(backend.isa(), scratch))
    }

    pub(super) fn start(&mut self) -> Result<Recording<'_>> {
        self.idle("recording another step")?;
        self.recording = Some(Vec::new());
        Ok(Recording(self))
    }

    pub(super) fn replay(&mut self, backend: &Cpu, step: &CpuRecorded) -> Result<()> {
        self.idle("replay")?;
        let scratch = &mut self.scratch;
        backend.install(|| step.0.iter().try_for_each(|op| op.run(backend.isa(), scratch)))
    }

    pub(super) fn reserve(&mut self, backend: &Cpu, need: &Reservation) -> Result<()> {
        self.idle("reserving workspace")?;
        reserve(backend, &mut self.scratch, need)
    }

    pub(super) fn idle(&self, what: &'static str) -> Result<()> {
        if self.recording.is_some() {
            return Err(Error::Recording { what });
        }
        Ok(())
    }
}
