//! Which device a model runs on.

use std::num::NonZeroUsize;
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
pub enum Device {
    /// The processor.
    Cpu(Cpu),
}

impl DeviceChoice {
    /// Opens the device; `threads` is for the processor, where `None` uses all.
    ///
    /// # Errors
    /// [`ninfer_core::Error::Unsupported`] or [`ninfer_core::Error::NoDriver`] for a GPU; [`Failure::Usage`] for zero
    /// threads or far too many.
    pub fn open(self, threads: Option<usize>) -> Result<Device> {
        match self {
            Self::Auto | Self::Cpu => match threads {
                None => Ok(Device::Cpu(Cpu::new())),
                Some(threads) => {
                    check_threads(threads, std::thread::available_parallelism().map_or(1, NonZeroUsize::get))?;
                    Ok(Device::Cpu(Cpu::with_threads(threads)?))
                }
            },
            Self::Cuda(number) => Err(no_cuda(number).into()),
        }
    }
}

/// Refuses a number of threads that can only be a mistake: with far more than run at once, nothing gets done.
fn check_threads(threads: usize, at_once: usize) -> Result<()> {
    let most = at_once.saturating_mul(8);
    if (1..=most).contains(&threads) {
        return Ok(());
    }
    let message = format!("--threads is {threads}, this machine runs {at_once} at once");
    Err(Failure::usage(message, format!("give 1 to {most}, or leave the option out")))
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

    #[test]
    fn numbers_of_threads_have_limits() {
        assert!(check_threads(1, 2).is_ok() && check_threads(16, 2).is_ok());
        let failure = check_threads(17, 2).unwrap_err();
        assert!(failure.to_string().contains("runs 2 at once") && failure.help().contains("1 to 16"));
    }
}
