//! Which device a model runs on.

use std::str::FromStr;

use ninfer_kernels::cpu::Cpu;

use crate::{Failure, Result};

/// The devices a program can be told to use: `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The fastest device that this build has a backend for.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// An NVIDIA GPU, by its number in the driver's order.
    Cuda(u32),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let cuda = |number: &str| number.parse().map(Self::Cuda).map_err(|_| format!("{number:?} is no device number"));
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => match text.strip_prefix("cuda:") {
                Some(number) => cuda(number),
                None => Err("expected auto, cpu, cuda or cuda:N".to_owned()),
            },
        }
    }
}

/// An opened device. A program has one arm a backend and is generic below it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Device {
    /// The processor.
    Cpu(Cpu),
}

impl DeviceChoice {
    /// Opens the device; `threads` is for the processor, where `None` uses all.
    ///
    /// # Errors
    /// [`ninfer_core::Error::Unsupported`] or [`ninfer_core::Error::NoDriver`] for a GPU; [`Failure::Usage`] for zero
    /// threads.
    pub fn open(self, threads: Option<usize>) -> Result<Device> {
        match self {
            Self::Auto | Self::Cpu => match threads {
                None => Ok(Device::Cpu(Cpu::new())),
                Some(0) => Err(Failure::usage("--threads is 0", "give at least one thread, or leave the option out")),
                Some(threads) => Ok(Device::Cpu(Cpu::with_threads(threads)?)),
            },
            Self::Cuda(number) => Err(no_cuda(number).into()),
        }
    }
}

#[cfg(feature = "cuda")]
fn no_cuda(number: u32) -> ninfer_core::Error {
    match ninfer_core::driver::devices() {
        Err(error) => error,
        Ok(devices) => ninfer_core::Error::Unsupported {
            op: format!("running on CUDA device {number}"),
            need: "a CUDA backend in this build".to_owned(),
            have: match usize::try_from(number).ok().and_then(|n| devices.get(n)) {
                Some(device) => format!("{device}, and the CPU backend only"),
                None => format!("{} CUDA devices, and the CPU backend only", devices.len()),
            },
        },
    }
}

#[cfg(not(feature = "cuda"))]
fn no_cuda(number: u32) -> ninfer_core::Error {
    ninfer_core::Error::Unsupported {
        op: format!("running on CUDA device {number}"),
        need: "a CUDA backend in this build".to_owned(),
        have: "the CPU backend only".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        assert_eq!("auto".parse(), Ok(DeviceChoice::Auto));
        assert_eq!("cpu".parse(), Ok(DeviceChoice::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceChoice::Cuda(3)));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_gpu_is_refused_with_a_reason() {
        let failure = DeviceChoice::Cuda(0).open(None).unwrap_err();
        assert_eq!(failure.status(), 1);
        assert!(!failure.help().is_empty());
        assert_eq!(DeviceChoice::Auto.open(Some(0)).unwrap_err().status(), 2);
    }
}
