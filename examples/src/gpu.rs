//! What a GPU tells when it is opened: its memory's speed and its kernels.

use ninfer_core::device::{Bandwidth, DeviceInfo};
use serde::Serialize;

use crate::table::{Align, Table, grouped};

/// What is wanted of a GPU besides the facts that cost nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Questions {
    /// How fast its memory is: takes about a tenth of a second.
    pub bandwidth: bool,
    /// Which kernels it runs: the driver compiles all of them, unless it has them in its cache.
    pub kernels: bool,
}

/// A kernel as the driver compiled it.
#[derive(Clone, Debug, Serialize)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// What the shipped module was built for.
    pub target: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack.
    pub local_bytes: u32,
    /// Static shared memory of a block in bytes.
    pub shared_bytes: u32,
    /// Modules for newer or more specific targets that were not taken, and why.
    pub passed_over: String,
}

/// The answers of one GPU.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Answers {
    /// Why it gave none.
    pub failure: Option<String>,
    /// What its user should know about the choice of kernels.
    pub notices: Vec<String>,
    /// Bytes a second of a copy, read and written ones counted.
    pub copy: Option<Bandwidth>,
    /// Bytes a second of reading alone.
    pub read: Option<Bandwidth>,
    /// The kernels, by name.
    pub kernels: Vec<Kernel>,
}

impl Answers {
    /// The kernels as a table.
    #[must_use]
    pub fn kernel_table(&self) -> Table {
        let (left, right) = (Align::Left, Align::Right);
        let mut table = Table::new(&[
            ("kernel", left),
            ("target", left),
            ("registers", right),
            ("stack", right),
            ("shared", right),
            ("passed over", left),
        ]);
        for k in &self.kernels {
            table.row([
                k.name.clone(),
                k.target.clone(),
                k.registers.to_string(),
                grouped(k.local_bytes.into()),
                grouped(k.shared_bytes.into()),
                k.passed_over.clone(),
            ]);
        }
        table
    }
}

/// Opens a GPU and asks; what opening brings to light goes to `device`: free memory and, if asked for, the measured
/// bandwidth of a copy.
#[cfg(feature = "cuda")]
#[must_use]
pub fn ask(number: u32, device: &mut DeviceInfo, questions: Questions) -> Answers {
    let mut answers = Answers::default();
    if let Err(error) = fill(number, device, questions, &mut answers) {
        answers.failure = Some(format!("{error} ({})", error.help()));
    }
    answers
}

#[cfg(feature = "cuda")]
fn fill(number: u32, device: &mut DeviceInfo, questions: Questions, answers: &mut Answers) -> ninfer_core::Result<()> {
    let gpu = ninfer_kernels::cuda::Cuda::new(number)?;
    answers.notices = gpu.notices().to_vec();
    *device = ninfer_core::Backend::device(&gpu).clone();
    if questions.bandwidth {
        let rates = gpu.measure_bandwidth()?;
        (answers.copy, answers.read) = (Some(rates.copy), Some(rates.read));
        device.bandwidth = Some(rates.copy);
    }
    if questions.kernels {
        gpu.load_kernels()?;
        let kernel = |k: ninfer_kernels::cuda::KernelUse| Kernel {
            name: k.name.to_owned(),
            target: k.target.to_string(),
            registers: k.registers,
            local_bytes: k.local_bytes,
            shared_bytes: k.shared_bytes,
            passed_over: k.passed_over,
        };
        answers.kernels = gpu.kernel_report().into_iter().map(kernel).collect();
    }
    Ok(())
}

/// There is no way to open one in this build.
#[cfg(not(feature = "cuda"))]
#[must_use]
pub fn ask(_number: u32, _device: &mut DeviceInfo, _questions: Questions) -> Answers {
    Answers::default()
}
