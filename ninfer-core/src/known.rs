//! Known devices as data: for planning without the device, for tests, and as nominal figures beside measured ones.
//!
//! ```
//! use ninfer_core::known;
//! let gb10 = known::profile("gb10")?.device_info();
//! assert_eq!((gb10.sm_count, gb10.integrated), (48, true));
//! # Ok::<(), ninfer_core::Error>(())
//! ```

use crate::capability::Capability;
use crate::device::{Bandwidth, DeviceInfo, HOST_RESERVE};
use crate::{Error, Result};

/// A figure and where it is from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure<T> {
    /// The value.
    pub value: T,
    /// Where it is from.
    pub source: &'static str,
}

/// A rate that was measured on the part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    /// What was measured.
    pub what: &'static str,
    /// Bytes or floating-point operations a second.
    pub per_second: f64,
    /// By what.
    pub source: &'static str,
}

/// One known part.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct KnownDevice {
    /// Short name for command lines.
    pub profile: &'static str,
    /// Product name; the name a driver reports contains it.
    pub name: &'static str,
    /// Streaming multiprocessors.
    pub sm_count: Figure<u32>,
    /// Compute capability.
    pub capability: Figure<Capability>,
    /// L2 cache in bytes.
    pub l2_bytes: Figure<u64>,
    /// Memory in bytes, as sold; a driver reports a little less.
    pub memory: Figure<u64>,
    /// Memory bandwidth in bytes a second.
    pub bandwidth: Figure<f64>,
    /// Whether host and device share the memory.
    pub integrated: bool,
    /// What was measured on it.
    pub measured: &'static [Measurement],
}

const CUDA_GPUS: &str = "NVIDIA, list of CUDA GPUs with their compute capability";
const GA102: &str = "NVIDIA, Ampere GA102 architecture white paper";
const ADA: &str = "NVIDIA, Ada architecture white paper";
const BLACKWELL: &str = "NVIDIA, RTX Blackwell architecture white paper";
const BLACKWELL_PRO: &str = "NVIDIA, RTX PRO 6000 Blackwell data sheet";
const A100: &str = "NVIDIA, A100 80GB SXM data sheet";
const H100: &str = "NVIDIA, H100 SXM data sheet";
const H200: &str = "NVIDIA, H200 SXM data sheet";
const GB10: &str = "NVIDIA, DGX Spark data sheet";
const H200_QUERY: &str = "device properties that driver 580 reports";
const GB10_PORT: &str = "published by a port of NInfer to DGX Spark";

const fn figure<T: Copy>(value: T, source: &'static str) -> Figure<T> {
    Figure { value, source }
}

const fn capability(major: u8, minor: u8) -> Figure<Capability> {
    Figure { value: Capability::new(major, minor), source: CUDA_GPUS }
}

/// All of them.
pub static DEVICES: [KnownDevice; 11] = [
    KnownDevice {
        profile: "rtx5090",
        name: "GeForce RTX 5090",
        sm_count: figure(170, BLACKWELL),
        capability: capability(12, 0),
        l2_bytes: figure(96 << 20, BLACKWELL),
        memory: figure(32 << 30, BLACKWELL),
        bandwidth: figure(1792e9, BLACKWELL),
        integrated: false,
        measured: &[Measurement {
            what: "read from device memory",
            per_second: 1674.5e9,
            source: "published by NInfer as its ceiling",
        }],
    },
    KnownDevice {
        profile: "gb10",
        name: "GB10",
        sm_count: figure(48, GB10_PORT),
        capability: capability(12, 1),
        l2_bytes: figure(24 << 20, GB10_PORT),
        memory: figure(128 << 30, GB10),
        bandwidth: figure(273e9, GB10),
        integrated: true,
        measured: &[Measurement { what: "read from device memory", per_second: 246e9, source: GB10_PORT }],
    },
    KnownDevice {
        profile: "h200",
        name: "H200",
        sm_count: figure(132, H200_QUERY),
        capability: capability(9, 0),
        l2_bytes: figure(60 << 20, H200_QUERY),
        memory: figure(141 << 30, H200),
        bandwidth: figure(4800e9, H200),
        integrated: false,
        measured: &[
            Measurement {
                what: "copy in device memory, bytes read and written",
                per_second: 4.23e12,
                source: "PyTorch, driver 580",
            },
            Measurement { what: "read from device memory", per_second: 4.35e12, source: "PyTorch sum, driver 580" },
            Measurement {
                what: "bf16 product of 8192³, operations",
                per_second: 776e12,
                source: "PyTorch, driver 580",
            },
        ],
    },
    KnownDevice {
        profile: "h100",
        name: "H100",
        sm_count: figure(132, H100),
        capability: capability(9, 0),
        l2_bytes: figure(50 << 20, H100),
        memory: figure(80 << 30, H100),
        bandwidth: figure(3350e9, H100),
        integrated: false,
        measured: &[],
    },
    KnownDevice {
        profile: "a100",
        name: "A100",
        sm_count: figure(108, A100),
        capability: capability(8, 0),
        l2_bytes: figure(40 << 20, A100),
        memory: figure(80 << 30, A100),
        bandwidth: figure(2039e9, A100),
        integrated: false,
        measured: &[],
    },
    KnownDevice {
        profile: "rtxpro6000",
        name: "RTX PRO 6000 Blackwell",
        sm_count: figure(188, BLACKWELL_PRO),
        capability: capability(12, 0),
        l2_bytes: figure(128 << 20, BLACKWELL),
        memory: figure(96 << 30, BLACKWELL_PRO),
        bandwidth: figure(1792e9, BLACKWELL_PRO),
        integrated: false,
        measured: &[],
    },
    KnownDevice {
        profile: "rtx5080",
        name: "GeForce RTX 5080",
        sm_count: figure(84, BLACKWELL),
        capability: capability(12, 0),
        l2_bytes: figure(64 << 20, BLACKWELL),
        memory: figure(16 << 30, BLACKWELL),
        bandwidth: figure(960e9, BLACKWELL),
        integrated: false,
        measured: &[],
    },
    KnownDevice {
        profile: "rtx4090",
        name: "GeForce RTX 4090",
        sm_count: figure(128, ADA),
        capability: capability(8, 9),
        l2_bytes: figure(72 << 20, ADA),
        memory: figure(24 << 30, ADA),
        bandwidth: figure(1008e9, ADA),
        integrated: false,
        measured: &[],
    },
    KnownDevice {
        profile: "rtx4080",
        name: "GeForce RTX 4080",
        sm_count: figure(76, ADA),
        capability: capability(8, 9),
        l2_bytes: figure(64 << 20, ADA),
        memory: figure(16 << 30, ADA),
        bandwidth: figure(716.8e9, ADA),
        integrated: false,
        measured: &[],
    },
    KnownDevice {
        profile: "rtx3090",
        name: "GeForce RTX 3090",
        sm_count: figure(82, GA102),
        capability: capability(8, 6),
        l2_bytes: figure(6 << 20, GA102),
        memory: figure(24 << 30, GA102),
        bandwidth: figure(936e9, GA102),
        integrated: false,
        measured: &[],
    },
    KnownDevice {
        profile: "rtx3080",
        name: "GeForce RTX 3080",
        sm_count: figure(68, GA102),
        capability: capability(8, 6),
        l2_bytes: figure(5 << 20, GA102),
        memory: figure(10 << 30, GA102),
        bandwidth: figure(760e9, GA102),
        integrated: false,
        measured: &[],
    },
];

impl KnownDevice {
    /// Device facts for planning, with nominal bandwidth.
    ///
    /// Usable memory is what is sold less 4 GiB on an integrated part (the host's share) and less a thirty-second on a
    /// card (driver and context).
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        let total = self.memory.value;
        let kept = if self.integrated { HOST_RESERVE } else { total / 32 };
        let mut device = DeviceInfo::cuda(self.name, self.capability.value, self.sm_count.value)
            .with_integrated(self.integrated)
            .with_l2(self.l2_bytes.value)
            .with_memory(total)
            .with_bandwidth(Bandwidth::nominal(self.bandwidth.value));
        device.usable_memory = Some(total - kept);
        device
    }
}

/// The device of a profile name, in any case, with or without spaces and dashes: `gb10`, `rtx5090`, `RTX PRO 6000`.
///
/// # Errors
/// [`Error::OutOfRange`] listing the names.
pub fn profile(name: &str) -> Result<&'static KnownDevice> {
    let plain: String =
        name.chars().filter(|c| !matches!(c, ' ' | '-' | '_')).map(|c| c.to_ascii_lowercase()).collect();
    DEVICES.iter().find(|d| d.profile == plain).ok_or_else(|| Error::OutOfRange {
        what: "device profile",
        got: name.to_owned(),
        legal: DEVICES.iter().map(|d| d.profile).collect::<Vec<_>>().join(", "),
    })
}

/// The known part that a driver's device name and SM count belong to. The count keeps variants of one name apart (a PCIe
/// or laptop part with fewer SMs is not the part of the table).
#[must_use]
pub fn find(driver_name: &str, sm_count: u32) -> Option<&'static KnownDevice> {
    let words: Vec<&str> = driver_name.split_whitespace().collect();
    DEVICES.iter().find(|d| {
        let name: Vec<&str> = d.name.split_whitespace().collect();
        // Variants put a suffix on the word itself ("A100-SXM4-80GB") or words behind it.
        let same = |a: &str, b: &str| a == b || a.split('-').next() == Some(b);
        d.sm_count.value == sm_count && words.windows(name.len()).any(|w| w.iter().zip(&name).all(|(a, b)| same(a, b)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::{SHIPPED, select_targets};

    #[test]
    fn facts_that_other_parts_rely_on() {
        let fact = |name: &str| {
            let d = profile(name).unwrap();
            (d.sm_count.value, d.capability.value.to_string(), d.bandwidth.value / 1e9, d.l2_bytes.value >> 20)
        };
        assert_eq!(fact("rtx5090"), (170, "12.0".into(), 1792.0, 96));
        assert_eq!(fact("gb10"), (48, "12.1".into(), 273.0, 24));
        assert_eq!(fact("h200"), (132, "9.0".into(), 4800.0, 60));
        assert_eq!(fact("rtx3090").0, 82);
        assert_eq!(fact("rtx4090").0, 128);
        assert_eq!(fact("rtx5080").0, 84);
        assert_eq!(fact("RTX PRO 6000").0, 188);
    }

    #[test]
    fn every_part_is_complete_and_runs_something() {
        for d in &DEVICES {
            let info = d.device_info();
            assert!(info.usable_memory < info.total_memory && info.usable_memory > Some(8 << 30), "{}", d.profile);
            assert!(select_targets(d.capability.value, None, &SHIPPED).unwrap().notices.is_empty());
            assert!(d.measured.iter().all(|m| m.per_second > 0.0 && !m.source.is_empty()));
            assert_eq!(profile(d.profile).unwrap(), d);
            assert_eq!(find(&format!("NVIDIA {}", d.name), d.sm_count.value), Some(d));
        }
    }

    #[test]
    fn unknown_profiles_list_the_names() {
        let error = profile("gtx1080").unwrap_err().to_string();
        for d in &DEVICES {
            assert!(error.contains(d.profile), "{error}");
        }
    }

    #[test]
    fn driver_names_find_their_part() {
        let name = |n, sms| find(n, sms).map(|d| d.profile);
        assert_eq!(name("NVIDIA GeForce RTX 5090", 170), Some("rtx5090"));
        assert_eq!(name("NVIDIA GeForce RTX 5090 Laptop GPU", 82), None);
        assert_eq!(name("NVIDIA A100-SXM4-80GB", 108), Some("a100"));
        assert_eq!(name("NVIDIA H100 80GB HBM3", 132), Some("h100"));
        assert_eq!(name("NVIDIA H100 PCIe", 114), None);
        assert_eq!(name("NVIDIA GB10", 48), Some("gb10"));
        assert_eq!(name("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188), Some("rtxpro6000"));
        assert_eq!(name("", 170), None);
    }
}
