//! The devices of this machine.

use ninfer_core::device::{DeviceInfo, measure_cpu_read_bandwidth};
use ninfer_core::memory::binary_size;
use ninfer_core::tuning::{self, Row};
use serde::Serialize;

use crate::gpu::{Answers, Questions, ask};
use crate::table::{Align, Table, grouped};

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Hardware {
    /// The processor.
    pub cpu: DeviceInfo,
    /// NVIDIA GPUs, in the driver's order.
    pub cuda: Vec<DeviceInfo>,
    /// What each of them answered, if it was asked anything.
    pub answers: Vec<Answers>,
    /// Why GPUs were not looked for or not found, if so.
    pub cuda_note: Option<String>,
}

impl Hardware {
    /// Looks for devices, and asks all of them. Measuring takes about a tenth of a second for each; a GPU that is asked
    /// nothing is not opened.
    #[must_use]
    pub fn detect(questions: Questions) -> Self {
        let mut cpu = DeviceInfo::cpu();
        if questions.bandwidth {
            cpu.bandwidth = measure_cpu_read_bandwidth();
        }
        let (mut cuda, cuda_note) = match cuda_devices() {
            Ok(devices) if devices.is_empty() => (devices, Some("the driver reports no device".to_owned())),
            Ok(devices) => (devices, None),
            Err(note) => (Vec::new(), Some(note)),
        };
        let answers = if questions == Questions::default() {
            Vec::new()
        } else {
            (0..).zip(&mut cuda).map(|(number, device)| ask(number, device, questions)).collect()
        };
        Self { cpu, cuda, answers, cuda_note }
    }
}

/// Everything that is known about a GPU, one fact a line.
#[must_use]
pub fn facts(device: &DeviceInfo) -> String {
    let bytes = |n: Option<u64>| n.map(binary_size);
    let kib = |n: u32| Some(binary_size(n.into()));
    let count = |n: u32| Some(grouped(n.into()));
    let lines = [
        ("UUID", device.uuid.clone()),
        ("PCI address", device.pci.clone()),
        ("capability", device.capability.map(|c| c.to_string())),
        ("features", Some(device.features().to_string()).filter(|f| !f.is_empty())),
        ("SMs", count(device.sm_count)),
        ("threads an SM", count(device.threads_per_sm)),
        ("registers an SM", count(device.registers_per_sm)),
        ("shared memory", kib(device.shared_per_sm).map(|s| format!("{s} an SM"))),
        ("", kib(device.shared_per_block_optin).map(|s| format!("{s} a block at most"))),
        ("L2 cache", bytes(Some(device.l2_bytes).filter(|&n| n > 0))),
        ("memory", bytes(device.total_memory)),
        ("", bytes(device.usable_memory).map(|s| format!("{s} usable"))),
        ("", Some(if device.integrated { "shared with the host" } else { "of its own" }.to_owned())),
        ("bandwidth", device.bandwidth.map(|b| b.to_string())),
        ("driver", device.driver.map(|v| format!("CUDA {v}"))),
        ("newest PTX", device.newest_ptx().map(|v| v.to_string())),
    ];
    let known = lines.into_iter().filter_map(|(name, value)| Some((name, value?)));
    known.map(|(name, value)| format!("      {name:<16}{value}\n")).collect()
}

#[cfg(feature = "cuda")]
fn cuda_devices() -> Result<Vec<DeviceInfo>, String> {
    ninfer_core::driver::devices().map_err(|error| format!("{error} ({})", error.help()))
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> Result<Vec<DeviceInfo>, String> {
    Err("not looked for: this program was built without the `cuda` feature".to_owned())
}

/// A device and the launch sizes that follow from it.
#[derive(Clone, Debug, Serialize)]
pub struct Tuned {
    /// The device.
    pub device: DeviceInfo,
    /// The formulas with their values.
    pub tuning: Vec<Row>,
}

impl Tuned {
    /// Evaluates every formula for a device.
    #[must_use]
    pub fn new(device: DeviceInfo) -> Self {
        let tuning = tuning::table(&device);
        Self { device, tuning }
    }

    /// The formulas as a table.
    #[must_use]
    pub fn table(&self) -> Table {
        let left = Align::Left;
        let mut table =
            Table::new(&[("launch size", left), ("formula", left), ("effect", left), ("value", Align::Right)]);
        for row in &self.tuning {
            table.row([row.name.to_owned(), row.formula.to_owned(), row.effect.to_string(), grouped(row.value)]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use ninfer_core::known;

    use super::*;

    #[test]
    fn facts_of_a_known_device() {
        let text = facts(&known::profile("h200").unwrap().device_info());
        for line in ["capability      9.0\n", "SMs             132\n", "features        ", "of its own", "GB/s nominal"]
        {
            assert!(text.contains(line), "{line}: {text}");
        }
        // What is not known has no line.
        assert!(!text.contains("UUID"));
    }

    #[test]
    fn a_device_that_is_asked_nothing_is_not_opened() {
        let hardware = Hardware::detect(Questions::default());
        assert!(hardware.answers.is_empty() && hardware.cpu.bandwidth.is_none());
        assert_eq!(hardware.cuda.is_empty(), hardware.cuda_note.is_some());
    }
}
