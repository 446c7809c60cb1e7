//! Facts about a device: what a backend found, or what a test pretends.

mod bandwidth;
mod host;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::bandwidth::measure_cpu_read_bandwidth;
pub use self::host::HostMemory;
use crate::capability::{Capability, CudaVersion, Feature, Features, PtxIsa};

/// Bytes left to the rest of the system on a device that shares its memory with the host.
pub const HOST_RESERVE: u64 = 4 << 30;

/// Which backend a device belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DeviceKind {
    /// The processor this runs on.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BandwidthSource {
    /// A probe on this device.
    Measured,
    /// The data sheet.
    Nominal,
}

/// Memory bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Bytes a second: of a copy, bytes read plus bytes written; of a read probe, bytes read.
    pub bytes_per_second: f64,
    /// Where the figure comes from.
    pub source: BandwidthSource,
}

impl Bandwidth {
    /// From a probe.
    #[must_use]
    pub const fn measured(bytes_per_second: f64) -> Self {
        Self { bytes_per_second, source: BandwidthSource::Measured }
    }

    /// From a data sheet.
    #[must_use]
    pub const fn nominal(bytes_per_second: f64) -> Self {
        Self { bytes_per_second, source: BandwidthSource::Nominal }
    }
}

/// In GB/s (10⁹), with its source.
impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.source {
            BandwidthSource::Measured => "measured",
            BandwidthSource::Nominal => "nominal",
        };
        write!(f, "{:.0} GB/s {source}", self.bytes_per_second / 1e9)
    }
}

/// What is known about a device.
///
/// GPU facts (capability, shared memory, registers, L2) are `None` or 0 on a CPU. Tests build one by
/// [`DeviceInfo::cuda`] and the `with_*` methods; [`crate::known`] has real parts.
///
/// ```
/// use ninfer_core::capability::{Capability, Feature};
/// use ninfer_core::device::DeviceInfo;
/// let gb10 = DeviceInfo::cuda("GB10", Capability::new(12, 1), 48).with_integrated(true);
/// assert!(gb10.features().has(Feature::MmaFp4));
/// assert_eq!(gb10.shared_per_block_optin, 99 << 10);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Which backend it belongs to.
    pub kind: DeviceKind,
    /// Name as the driver or the system reports it.
    pub name: String,
    /// UUID in the form `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
    pub uuid: Option<String>,
    /// PCI address in the form `0000:01:00.0`.
    pub pci: Option<String>,
    /// Compute capability.
    pub capability: Option<Capability>,
    /// Streaming multiprocessors; on a CPU the threads that run at once.
    pub sm_count: u32,
    /// Resident threads of an SM.
    pub threads_per_sm: u32,
    /// 32-bit registers of an SM.
    pub registers_per_sm: u32,
    /// Shared memory of an SM, in bytes.
    pub shared_per_sm: u32,
    /// Shared memory a block can opt in to, in bytes.
    pub shared_per_block_optin: u32,
    /// L2 cache in bytes.
    pub l2_bytes: u64,
    /// Whether the device shares its memory with the host.
    pub integrated: bool,
    /// Whether the driver allows cooperative launches.
    pub cooperative_launch: bool,
    /// Memory in bytes; `None` where the system does not tell.
    pub total_memory: Option<u64>,
    /// Memory that can be taken without pushing something else out, in bytes: see [`DeviceInfo::with_driver_free`].
    pub usable_memory: Option<u64>,
    /// CUDA version of the driver.
    pub driver: Option<CudaVersion>,
    /// Memory bandwidth.
    pub bandwidth: Option<Bandwidth>,
}

impl DeviceInfo {
    /// The processor and memory of this machine. Cheap: the bandwidth is left open, [`measure_cpu_read_bandwidth`] has it.
    #[must_use]
    pub fn cpu() -> Self {
        let memory = HostMemory::detect();
        Self {
            name: host::processor_name(),
            kind: DeviceKind::Cpu,
            uuid: None,
            pci: None,
            capability: None,
            sm_count: host::threads(),
            threads_per_sm: 0,
            registers_per_sm: 0,
            shared_per_sm: 0,
            shared_per_block_optin: 0,
            l2_bytes: 0,
            integrated: true,
            cooperative_launch: false,
            total_memory: memory.map(|m| m.total),
            usable_memory: memory.map(|m| m.available),
            driver: None,
            bandwidth: None,
        }
    }

    /// A discrete GPU with what its capability implies; everything else is open.
    #[must_use]
    pub fn cuda(name: impl Into<String>, capability: Capability, sm_count: u32) -> Self {
        Self {
            name: name.into(),
            kind: DeviceKind::Cuda,
            uuid: None,
            pci: None,
            capability: Some(capability),
            sm_count,
            threads_per_sm: capability.threads_per_sm(),
            registers_per_sm: 65_536,
            shared_per_sm: capability.shared_per_sm(),
            shared_per_block_optin: capability.shared_per_block_optin(),
            l2_bytes: 0,
            integrated: false,
            cooperative_launch: true,
            total_memory: None,
            usable_memory: None,
            driver: None,
            bandwidth: None,
        }
    }

    /// Sets UUID and PCI address.
    #[must_use]
    pub fn with_identity(mut self, uuid: Option<String>, pci: Option<String>) -> Self {
        self.uuid = uuid;
        self.pci = pci;
        self
    }

    /// Says whether device and host share memory.
    #[must_use]
    pub fn with_integrated(mut self, integrated: bool) -> Self {
        self.integrated = integrated;
        self
    }

    /// Sets the limits of an SM: resident threads, registers, shared memory, shared memory of a block.
    #[must_use]
    pub fn with_sm_limits(mut self, threads: u32, registers: u32, shared: u32, shared_per_block: u32) -> Self {
        self.threads_per_sm = threads;
        self.registers_per_sm = registers;
        self.shared_per_sm = shared;
        self.shared_per_block_optin = shared_per_block;
        self
    }

    /// Sets the L2 size in bytes.
    #[must_use]
    pub fn with_l2(mut self, bytes: u64) -> Self {
        self.l2_bytes = bytes;
        self
    }

    /// Says whether cooperative launches are allowed.
    #[must_use]
    pub fn with_cooperative_launch(mut self, allowed: bool) -> Self {
        self.cooperative_launch = allowed;
        self
    }

    /// Sets total memory, and usable memory to the same.
    #[must_use]
    pub fn with_memory(mut self, total: u64) -> Self {
        self.total_memory = Some(total);
        self.usable_memory = Some(total);
        self
    }

    /// Sets usable memory from what the driver calls free and, on an integrated device, from the host's figures.
    ///
    /// On a discrete card the driver's figure holds. On an integrated one it counts the page cache as used and can be
    /// tens of GiB too low after a file was written; there the kernel's estimate of available memory less
    /// [`HOST_RESERVE`] is taken where it is known.
    ///
    /// ```
    /// use ninfer_core::capability::Capability;
    /// use ninfer_core::device::{DeviceInfo, HostMemory};
    /// let host = HostMemory { total: 120 << 30, available: 115 << 30 };
    /// let gb10 = DeviceInfo::cuda("GB10", Capability::new(12, 1), 48).with_integrated(true);
    /// let gb10 = gb10.with_driver_free(41 << 30, Some(host));
    /// assert_eq!(gb10.usable_memory, Some(111 << 30));
    /// ```
    #[must_use]
    pub fn with_driver_free(mut self, free: u64, host: Option<HostMemory>) -> Self {
        self.usable_memory = Some(match host {
            Some(host) if self.integrated => host.available.saturating_sub(HOST_RESERVE),
            _ => free,
        });
        self
    }

    /// Sets the driver's CUDA version.
    #[must_use]
    pub fn with_driver(mut self, driver: CudaVersion) -> Self {
        self.driver = Some(driver);
        self
    }

    /// Sets the memory bandwidth.
    #[must_use]
    pub fn with_bandwidth(mut self, bandwidth: Bandwidth) -> Self {
        self.bandwidth = Some(bandwidth);
        self
    }

    /// What the device can execute; nothing of it on a CPU.
    #[must_use]
    pub fn features(&self) -> Features {
        let Some(capability) = self.capability else { return Features::NONE };
        let features = Features::of(capability);
        if self.cooperative_launch { features } else { features.without(Feature::CooperativeLaunch) }
    }

    /// The newest PTX version its driver accepts.
    #[must_use]
    pub fn newest_ptx(&self) -> Option<PtxIsa> {
        self.driver.map(CudaVersion::newest_ptx)
    }
}

/// One line: name, capability, SMs, memory, bandwidth.
impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        match self.capability {
            Some(capability) => write!(f, ", capability {capability}, {} SMs", self.sm_count)?,
            None => write!(f, ", {} threads", self.sm_count)?,
        }
        if let Some(total) = self.total_memory {
            write!(f, ", {}", crate::memory::binary_size(total))?;
        }
        if let Some(usable) = self.usable_memory {
            write!(f, " ({} usable)", crate::memory::binary_size(usable))?;
        }
        if let Some(bandwidth) = self.bandwidth {
            write!(f, ", {bandwidth}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_of_an_integrated_device_is_the_hosts() {
        // A GB10 after a 60 GB file was written: the driver sees 41 GiB free, the kernel 115 GiB available.
        let text = "MemTotal: 125829120 kB\nMemFree: 42991616 kB\nMemAvailable: 120586240 kB\n";
        let host = HostMemory::parse(text);
        assert_eq!(host.map(|h| h.available), Some(115 << 30));
        let part = DeviceInfo::cuda("GB10", Capability::new(12, 1), 48).with_memory(120 << 30);
        let integrated = part.clone().with_integrated(true);
        assert!(integrated.clone().with_driver_free(41 << 30, host).usable_memory >= Some(100 << 30));
        assert_eq!(integrated.with_driver_free(41 << 30, None).usable_memory, Some(41 << 30));
        assert_eq!(part.with_driver_free(41 << 30, host).usable_memory, Some(41 << 30));
    }

    #[test]
    fn little_memory_does_not_wrap() {
        let host = HostMemory { total: 1 << 30, available: 1 << 20 };
        let d = DeviceInfo::cuda("x", Capability::new(8, 7), 16).with_integrated(true).with_driver_free(0, Some(host));
        assert_eq!(d.usable_memory, Some(0));
    }

    #[test]
    fn this_machine_has_a_cpu() {
        let cpu = DeviceInfo::cpu();
        assert_eq!(cpu.kind, DeviceKind::Cpu);
        assert!(cpu.sm_count >= 1 && !cpu.name.is_empty());
        assert_eq!((cpu.features(), cpu.newest_ptx()), (Features::NONE, None));
        if let (Some(total), Some(usable)) = (cpu.total_memory, cpu.usable_memory) {
            assert!(0 < usable && usable <= total);
        }
    }

    #[test]
    fn a_query_can_take_cooperative_launch_away() {
        let d = DeviceInfo::cuda("x", Capability::new(9, 0), 132);
        assert!(d.features().has(Feature::CooperativeLaunch));
        assert!(!d.with_cooperative_launch(false).features().has(Feature::CooperativeLaunch));
    }

    #[test]
    fn facts_survive_json() {
        let d = DeviceInfo::cuda("NVIDIA H200", Capability::new(9, 0), 132)
            .with_identity(Some("GPU-0".into()), Some("0000:01:00.0".into()))
            .with_memory(141 << 30)
            .with_l2(50 << 20)
            .with_driver(CudaVersion::new(13, 0))
            .with_bandwidth(Bandwidth::measured(4.23e12));
        let json = serde_json::to_string(&d).unwrap();
        assert!(json.contains("\"capability\":\"9.0\"") && json.contains("\"driver\":\"13.0\""), "{json}");
        assert_eq!(serde_json::from_str::<DeviceInfo>(&json).unwrap(), d);
        assert_eq!(d.newest_ptx(), Some(PtxIsa::new(9, 0)));
        assert_eq!(
            d.to_string(),
            "NVIDIA H200, capability 9.0, 132 SMs, 141.00 GiB (141.00 GiB usable), 4230 GB/s measured"
        );
    }
}
