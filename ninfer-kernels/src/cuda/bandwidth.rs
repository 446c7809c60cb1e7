//! The probe of a device's memory: how fast it is read and copied.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ninfer_core::device::{Bandwidth, DeviceInfo};
use ninfer_core::{Backend, Error, Result};

use super::Cuda;
use super::driver::{Event, Launch, Memory};
use super::queue::CudaQueue;

const FAMILY: &str = "probe";
/// Threads of a block.
const BLOCK: u32 = 256;
/// Bytes that a block moves in one step: `kThreads · kAhead` times 16.
const STEP: usize = 256 * 4 * 16;
/// Bytes of a buffer at least and at most; between them it is this many times the L2 cache, so that neither the cache nor
/// the time to start and to end a kernel counts.
const LEAST: usize = 64 << 20;
const MOST: usize = 1 << 30;
const CACHES: u64 = 24;
/// Time for each kind of transfer, and the most that are measured. With buffers and their filling everything takes less
/// than 100 ms on parts with 200 GB/s and more.
const BUDGET: Duration = Duration::from_millis(20);
const REPEATS: usize = 21;

/// What a device's memory was measured to do.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct MemoryRates {
    /// A copy: bytes read plus bytes written, by a kernel or by the driver, whichever is faster.
    pub copy: Bandwidth,
    /// Reading alone.
    pub read: Bandwidth,
}

/// `Probe` of `probe.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProbeArg {
    from: u64,
    to: u64,
    sink: u64,
    steps: i64,
}

/// Devices that were measured in this process.
static MEASURED: Mutex<Vec<(DeviceInfo, MemoryRates)>> = Mutex::new(Vec::new());

fn same_device(a: &DeviceInfo, b: &DeviceInfo) -> bool {
    (&a.uuid, &a.pci, &a.name) == (&b.uuid, &b.pci, &b.name)
}

impl Cuda {
    /// Measures how fast the device's memory is read and copied: medians over transfers of buffers of many times the
    /// L2 cache, for at most 100 ms in all. A copy is that of a kernel or the driver's own, whichever is faster. Later calls
    /// in this process give the same figures at once.
    ///
    /// Opening a device does not measure. [`DeviceInfo::with_bandwidth`] puts a figure in place of the nominal one.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] without room for two buffers of 64 MiB; [`Error::Driver`].
    ///
    /// ```no_run
    /// use ninfer_core::Backend;
    /// use ninfer_kernels::cuda::Cuda;
    /// let gpu = Cuda::new(0)?;
    /// let rates = gpu.measure_bandwidth()?;
    /// println!("{}: copy {}, read {}", gpu.device().name, rates.copy, rates.read);
    /// # Ok::<(), ninfer_core::Error>(())
    /// ```
    pub fn measure_bandwidth(&self) -> Result<MemoryRates> {
        let mut measured = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, rates)) = measured.iter().find(|(device, _)| same_device(device, self.device())) {
            return Ok(*rates);
        }
        let rates = Probe::new(self)?.rates()?;
        measured.push((self.device().clone(), rates));
        Ok(rates)
    }
}

/// Steps that make a buffer.
fn steps(l2: u64, free: u64) -> usize {
    let wanted = usize::try_from(l2.saturating_mul(CACHES)).unwrap_or(MOST).clamp(LEAST, MOST);
    // Two buffers take a quarter of what is free at most, unless that is very little.
    let room = usize::try_from(free / 8).unwrap_or(MOST).max(LEAST);
    wanted.min(room) / STEP
}

/// A transfer that is timed.
#[derive(Clone, Copy)]
enum Transfer {
    Kernel(&'static str),
    /// The driver's own copy.
    Driver,
}

struct Probe<'a> {
    backend: &'a Cuda,
    queue: CudaQueue,
    from: Memory,
    to: Memory,
    steps: usize,
}

impl<'a> Probe<'a> {
    fn new(backend: &'a Cuda) -> Result<Self> {
        let steps = steps(backend.device().l2_bytes, backend.free_memory()?);
        let buffer = || Memory::new(backend.context(), "bandwidth probe", steps * STEP);
        let (from, to) = (buffer()?, buffer()?);
        let mut probe = Self { backend, queue: backend.queue()?, from, to, steps };
        probe.launch("probe_fill", probe.to.address, probe.from.address)?;
        Ok(probe)
    }

    /// With as many blocks as are resident at once: the rest of a larger grid would run with most of the device idle.
    fn launch(&mut self, kernel: &'static str, from: u64, to: u64) -> Result<()> {
        let arguments = ProbeArg { from, to, sink: self.to.address, steps: self.steps as i64 };
        let resident = self.backend.kernels().get(FAMILY, kernel, 0)?.blocks_per_sm(BLOCK, 0)?.max(1) as usize;
        let blocks = (self.backend.sms() * resident).min(self.steps);
        let how = Launch { grid: [blocks as u32, 1, 1], block: BLOCK, shared: 0 };
        // SAFETY: the struct is the kernel's parameter; both buffers hold all steps.
        unsafe { self.queue.launch(self.backend, FAMILY, kernel, how, &arguments) }
    }

    fn transfer(&mut self, transfer: Transfer) -> Result<()> {
        match transfer {
            Transfer::Kernel(name) => self.launch(name, self.from.address, self.to.address),
            Transfer::Driver => self.queue.stream.copy(&self.to, &self.from, self.steps * STEP),
        }
    }

    fn rates(mut self) -> Result<MemoryRates> {
        let moved = (self.steps * STEP) as f64;
        let copy = self.seconds(Transfer::Kernel("probe_copy"))?.min(self.seconds(Transfer::Driver)?);
        Ok(MemoryRates {
            copy: Bandwidth::measured(2.0 * moved / copy),
            read: Bandwidth::measured(moved / self.seconds(Transfer::Kernel("probe_read"))?),
        })
    }

    /// Median time of a transfer; the first run is not counted.
    fn seconds(&mut self, transfer: Transfer) -> Result<f64> {
        let (before, after) = (Event::new(self.backend.context())?, Event::new(self.backend.context())?);
        let begin = Instant::now();
        let mut times = Vec::with_capacity(REPEATS);
        self.transfer(transfer)?;
        while times.len() < REPEATS && (times.is_empty() || begin.elapsed() < BUDGET) {
            self.queue.stream.record(&before)?;
            self.transfer(transfer)?;
            self.queue.stream.record(&after)?;
            after.wait()?;
            times.push(f64::from(after.since(&before)?) * 1e-3);
        }
        times.sort_by(f64::total_cmp);
        let middle = times.get(times.len() / 2).copied().filter(|&t| t > 0.0);
        middle.ok_or_else(|| Error::Driver {
            call: "cuEventElapsedTime",
            code: 0,
            message: "a transfer took no time".to_owned(),
        })
    }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[("probe_", size_of::<ProbeArg>())];

#[cfg(test)]
mod tests {
    use ninfer_core::capability::Capability;

    use super::*;

    #[test]
    fn buffers_are_larger_than_the_cache_and_leave_most_memory_alone() {
        for (l2, free) in
            [(50 << 20, 140 << 30), (24 << 20, 100 << 30), (0, 1 << 30), (1 << 40, 0), (96 << 20, 28 << 30)]
        {
            let bytes = steps(l2, free) * STEP;
            assert!((LEAST..=MOST).contains(&bytes), "{bytes}");
            assert!(l2 > 1 << 30 || bytes as u64 >= 8 * l2, "{bytes} of an L2 of {l2}");
            assert!(bytes <= LEAST || bytes as u64 * 8 <= free, "{bytes} of {free}");
        }
    }

    #[test]
    fn devices_are_told_apart_by_identity() {
        let card =
            |uuid: &str| DeviceInfo::cuda("x", Capability::new(9, 0), 132).with_identity(Some(uuid.to_owned()), None);
        assert!(same_device(&card("a"), &card("a").with_memory(1)));
        assert!(!same_device(&card("a"), &card("b")));
    }
}
