//! The NVIDIA driver: whether it is there, which CUDA version it supports, and what its devices are.
//!
//! The driver library is opened at run time, so programs with this feature build and start on any machine. Nothing here
//! creates a context or takes device memory, and nothing panics: a machine without a driver gives [`Error::NoDriver`], a
//! driver without devices an empty list, and any other refusal [`Error::Driver`] with the driver's own words.
//!
//! ```
//! use ninfer_core::{Error, driver};
//! match driver::devices() {
//!     Ok(devices) => devices.iter().for_each(|d| println!("{d}")),
//!     Err(e @ Error::NoDriver { .. }) => println!("{e}: {}", e.help()),
//!     Err(e) => println!("{e}"),
//! }
//! ```

mod api;

use serde::Serialize;

use self::api::{Api, Attribute, NO_DEVICE, STUB_LIBRARY};
use crate::capability::{Capability, CudaVersion};
use crate::device::{Bandwidth, DeviceInfo, HostMemory};
use crate::{Error, Result, known};

/// A driver that answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DriverInfo {
    /// CUDA version it supports.
    pub version: CudaVersion,
    /// Devices visible to this process.
    pub devices: u32,
}

/// Looks for the driver and starts it.
///
/// # Errors
/// [`Error::NoDriver`] where the library is missing, incomplete or a stub; [`Error::Driver`] where it refuses to start.
pub fn probe() -> Result<DriverInfo> {
    Api::get()?.start()
}

/// The devices visible to this process, in the driver's order, with every fact that can be had without a context.
///
/// Usable memory of a discrete card is its total here, because the driver tells free memory only within a context; a
/// backend replaces it by [`DeviceInfo::with_driver_free`]. The bandwidth is nominal: from [`known`] for a known part, else
/// from memory clock and bus width where the driver tells them.
///
/// # Errors
/// As [`probe`].
pub fn devices() -> Result<Vec<DeviceInfo>> {
    Api::get()?.devices()
}

impl Api {
    /// Starts the driver; no device is no error.
    fn start(&self) -> Result<DriverInfo> {
        let code = self.init();
        match code {
            STUB_LIBRARY => {
                return Err(Error::NoDriver { reason: "the library found is a stub for linking, not a driver".into() });
            }
            0 | NO_DEVICE => {}
            code => return Err(self.error("cuInit", code)),
        }
        let version = CudaVersion::from_driver(self.driver_version()?);
        let devices = if code == NO_DEVICE { 0 } else { self.device_count()? };
        Ok(DriverInfo { version, devices: u32::try_from(devices).unwrap_or(0) })
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let driver = self.start()?;
        (0..driver.devices).map(|ordinal| self.describe(ordinal, driver.version)).collect()
    }

    fn describe(&self, ordinal: u32, version: CudaVersion) -> Result<DeviceInfo> {
        let device = self.device(i32::try_from(ordinal).unwrap_or(i32::MAX))?;
        let number = |attribute| self.attribute(device, attribute).map(|n| u32::try_from(n).unwrap_or(0));
        let byte = |attribute| number(attribute).map(|n| u8::try_from(n).unwrap_or(u8::MAX));
        let capability = Capability::new(byte(Attribute::CapabilityMajor)?, byte(Attribute::CapabilityMinor)?);
        let name = self.name(device)?;
        let sm_count = number(Attribute::SmCount)?;
        let total = self.total_memory(device)?;

        let mut info = DeviceInfo::cuda(name, capability, sm_count)
            .with_identity(self.uuid(device).ok().map(uuid_text), self.pci_address(device).ok())
            .with_integrated(number(Attribute::Integrated)? != 0)
            .with_sm_limits(
                number(Attribute::ThreadsPerSm)?,
                number(Attribute::RegistersPerSm)?,
                number(Attribute::SharedPerSm)?,
                number(Attribute::SharedPerBlockOptin)?,
            )
            .with_l2(u64::from(number(Attribute::L2Bytes)?))
            .with_cooperative_launch(number(Attribute::CooperativeLaunch)? != 0)
            .with_memory(total)
            .with_driver(version);
        if info.integrated {
            info = info.with_driver_free(total, HostMemory::detect());
        }
        let nominal = known::find(&info.name, sm_count).map(|d| d.bandwidth.value).or_else(|| {
            // Newer drivers may no longer tell these two.
            let clock = number(Attribute::MemoryClockKhz).ok()?;
            let bits = number(Attribute::MemoryBusBits).ok()?;
            let bytes = f64::from(clock) * 1e3 * 2.0 * f64::from(bits) / 8.0;
            (bytes > 0.0).then_some(bytes)
        });
        Ok(match nominal {
            Some(bytes_per_second) => info.with_bandwidth(Bandwidth::nominal(bytes_per_second)),
            None => info,
        })
    }
}

/// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, as the vendor's tools print it.
fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (i, byte) in bytes.iter().enumerate() {
        if matches!(i, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests;
