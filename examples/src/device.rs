//! Which device a model runs on.

use std::num::NonZeroUsize;
use std::str::FromStr;

use ninfer_core::backend::InferenceBackend;
use ninfer_kernels::cpu::Cpu;
#[cfg(feature = "cuda")]
use ninfer_kernels::cuda::Cuda;

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

/// An opened device.
#[derive(Clone, Debug)]
pub enum Device {
    /// The processor.
    Cpu(Cpu),
    /// An NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(Cuda),
}

/// What a program does on a device: the same code for every backend.
pub trait Work {
    /// Does it.
    ///
    /// # Errors
    /// What the work reports.
    fn run<B: InferenceBackend>(self, backend: &B) -> Result<()>;
}

impl Device {
    /// Does the work on this device.
    ///
    /// # Errors
    /// What the work reports.
    pub fn run(&self, work: impl Work) -> Result<()> {
        match self {
            Self::Cpu(cpu) => work.run(cpu),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => work.run(gpu),
        }
    }
}

impl DeviceChoice {
    /// Opens the device; `threads` is for the processor, where `None` uses all. `Auto` is the first GPU where this build,
    /// the driver and the GPU allow it, unless threads are asked for, and else the processor.
    ///
    /// # Errors
    /// [`ninfer_core::Error::Unsupported`] without a CUDA backend in this build, [`ninfer_core::Error::NoDriver`] and others
    /// for a GPU that cannot be used; [`Failure::Usage`] for zero threads or far too many.
    pub fn open(self, threads: Option<usize>) -> Result<Device> {
        match self {
            Self::Auto if threads.is_none() => match cuda(0) {
                Ok(gpu) => Ok(gpu),
                // No GPU is the usual case; one that cannot be used is worth a word.
                Err(ninfer_core::Error::NoDriver { .. } | ninfer_core::Error::Unsupported { .. }) => cpu(None),
                Err(error) => {
                    eprintln!("running on the processor: {error} ({})", error.help());
                    cpu(None)
                }
            },
            Self::Auto | Self::Cpu => cpu(threads),
            Self::Cuda(number) => Ok(cuda(number)?),
        }
    }
}

fn cpu(threads: Option<usize>) -> Result<Device> {
    let Some(threads) = threads else { return Ok(Device::Cpu(Cpu::new())) };
    check_threads(threads, std::thread::available_parallelism().map_or(1, NonZeroUsize::get))?;
    Ok(Device::Cpu(Cpu::with_threads(threads)?))
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
fn cuda(number: u32) -> Result<Device, ninfer_core::Error> {
    Cuda::new(number).map(Device::Cuda)
}

#[cfg(not(feature = "cuda"))]
fn cuda(number: u32) -> Result<Device, ninfer_core::Error> {
    Err(ninfer_core::Error::Unsupported {
        op: format!("running on CUDA device {number}"),
        need: "a CUDA backend in this build: `cargo build --features cuda`".to_owned(),
        have: "the CPU backend only".to_owned(),
    })
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
        // A number that no machine has.
        let failure = DeviceChoice::Cuda(u32::MAX).open(None).unwrap_err();
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
