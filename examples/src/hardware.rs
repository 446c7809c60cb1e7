//! The devices of this machine.

use ninfer_core::device::{DeviceInfo, measure_cpu_read_bandwidth};
use ninfer_core::tuning::{self, Row};
use serde::Serialize;

use crate::table::{Align, Table, grouped};

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Hardware {
    /// The processor.
    pub cpu: DeviceInfo,
    /// NVIDIA GPUs, in the driver's order.
    pub cuda: Vec<DeviceInfo>,
    /// Why GPUs were not looked for or not found, if so.
    pub cuda_note: Option<String>,
}

impl Hardware {
    /// Looks for devices. With `bandwidth` the memory of the processor is read for about a tenth of a second.
    #[must_use]
    pub fn detect(bandwidth: bool) -> Self {
        let mut cpu = DeviceInfo::cpu();
        if bandwidth {
            cpu.bandwidth = measure_cpu_read_bandwidth();
        }
        let (cuda, cuda_note) = match cuda_devices() {
            Ok(devices) if devices.is_empty() => (devices, Some("the driver reports no device".to_owned())),
            Ok(devices) => (devices, None),
            Err(note) => (Vec::new(), Some(note)),
        };
        Self { cpu, cuda, cuda_note }
    }
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
