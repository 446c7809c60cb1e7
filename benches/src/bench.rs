//! A backend, its queue and everything that is allocated for a benchmark.

use ninfer_core::backend::{Backend, Recorder};
use ninfer_core::ops::Norm;
use ninfer_core::segment::{Batch, Profile, Segment};
use ninfer_core::{DType, Result, View, WeightFormat};
use ninfer_kernels::cpu::{Cpu, CpuQueue, CpuRecorded, CpuWeight};
use ninfer_quant::{PackedMatrix, encode};

use crate::Random;

/// The CPU backend with a queue and a source of random numbers.
///
/// ```
/// use ninfer_benches::{Bench, step};
/// use ninfer_core::WeightFormat;
/// use ninfer_core::ops::Project;
///
/// let mut bench = Bench::new()?;
/// let batch = bench.batch(&[step(0, 0, 1)])?;
/// let weight = bench.weight(WeightFormat::Bf16, 48, 32)?;
/// let (input, output) = (bench.random(1, 32)?, bench.random(1, 48)?);
/// let recorded = bench.record(|rec| rec.project(Project { batch, input, norm: None, parts: vec![(weight, output)] }))?;
/// bench.replay(&recorded)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Bench {
    cpu: Cpu,
    queue: CpuQueue,
    random: Random,
}

impl Bench {
    /// All threads of the machine, a fixed seed.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn new() -> Result<Self> {
        let cpu = Cpu::new();
        let queue = cpu.queue()?;
        Ok(Self { cpu, queue, random: Random::new(1) })
    }

    /// The backend.
    #[must_use]
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// The source of random numbers.
    pub fn numbers(&mut self) -> &mut Random {
        &mut self.random
    }

    /// An f32 view of numbers uniform in −1 … 1.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn random(&mut self, rows: usize, cols: usize) -> Result<View<Cpu>> {
        let values: Vec<f32> = (0..rows * cols).map(|_| self.random.uniform()).collect();
        self.view(DType::F32, rows, cols, values.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    /// An f32 view of one number.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn filled(&mut self, value: f32, rows: usize, cols: usize) -> Result<View<Cpu>> {
        self.view(DType::F32, rows, cols, value.to_le_bytes().repeat(rows * cols))
    }

    /// A view of numbers uniform in −1 … 1 in a type of KV pages: F32 or BF16.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn pages(&mut self, dtype: DType, rows: usize, cols: usize) -> Result<View<Cpu>> {
        if dtype != DType::Bf16 {
            return self.random(rows, cols);
        }
        // The upper half of an f32 is a BF16 value.
        let values = (0..rows * cols).map(|_| self.random.uniform().to_le_bytes());
        let bytes = values.flat_map(|[_, _, low, high]| [low, high]).collect();
        self.view(dtype, rows, cols, bytes)
    }

    /// A one-column or wider view of 32-bit words, U32 or I32.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn words(&mut self, dtype: DType, cols: usize, words: &[u32]) -> Result<View<Cpu>> {
        let bytes = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.view(dtype, words.len() / cols.max(1), cols, bytes)
    }

    fn view(&mut self, dtype: DType, rows: usize, cols: usize, bytes: Vec<u8>) -> Result<View<Cpu>> {
        let view = View::new(self.cpu.alloc("benchmark", bytes.len())?, dtype, 0, rows, cols)?;
        self.cpu.upload(&mut self.queue, &view, &bytes)?;
        Ok(view)
    }

    /// A matrix of numbers uniform in −1 … 1, packed in a format.
    ///
    /// # Errors
    /// What the encoder reports.
    pub fn packed(&mut self, format: WeightFormat, rows: usize, cols: usize) -> ninfer_quant::Result<PackedMatrix> {
        let values: Vec<f32> = (0..rows * cols).map(|_| self.random.uniform()).collect();
        encode(format, rows, cols, &values)
    }

    /// A prepared matrix of numbers uniform in −1 … 1.
    ///
    /// # Errors
    /// What the encoder and the backend report.
    pub fn weight(
        &mut self,
        format: WeightFormat,
        rows: usize,
        cols: usize,
    ) -> Result<CpuWeight, Box<dyn std::error::Error>> {
        let packed = self.packed(format, rows, cols)?;
        Ok(self.cpu.prepare(&[packed.as_ref()])?)
    }

    /// A norm over `cols` features.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn norm(&mut self, cols: usize) -> Result<Norm<Cpu>> {
        Ok(Norm { gain: self.random(1, cols)?, eps: 1e-6 })
    }

    /// A step over some segments.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn batch(&mut self, segments: &[Segment]) -> Result<Batch<Cpu>> {
        self.batch_of(Profile::Step, segments)
    }

    /// A prompt chunk over some segments.
    ///
    /// # Errors
    /// What the backend reports.
    pub fn chunk(&mut self, segments: &[Segment]) -> Result<Batch<Cpu>> {
        self.batch_of(Profile::Prefill, segments)
    }

    fn batch_of(&mut self, profile: Profile, segments: &[Segment]) -> Result<Batch<Cpu>> {
        let words: Vec<u32> = segments.iter().flat_map(|s| s.to_words()).map(i32::cast_unsigned).collect();
        let table = self.words(DType::I32, ninfer_core::segment::SEGMENT_WORDS, &words)?;
        let rows = segments.iter().map(|s| (s.row + s.len) as usize).max().unwrap_or(0);
        Batch::new(profile, rows, table)
    }

    /// Records a step and runs it once, so that whatever it reports is reported before it is measured.
    ///
    /// # Errors
    /// What an operation reports.
    pub fn record(&mut self, work: impl FnOnce(&mut Recorder<'_, Cpu>) -> Result<()>) -> Result<CpuRecorded> {
        let recorded = self.cpu.record(&mut self.queue, work)?;
        self.replay(&recorded)?;
        Ok(recorded)
    }

    /// Runs a recorded step.
    ///
    /// # Errors
    /// What an operation reports.
    pub fn replay(&mut self, recorded: &CpuRecorded) -> Result<()> {
        self.cpu.replay(&mut self.queue, recorded)
    }
}

/// A segment of a step: `len` columns at position `start`, after a round whose first column alone was committed.
#[must_use]
pub fn step(row: u32, start: u32, len: u32) -> Segment {
    Segment { slot: 0, start, row, len, fold: start.min(1), bank: 0 }
}

/// A segment of a prompt chunk: `len` rows at position `start`.
#[must_use]
pub fn prompt_chunk(start: u32, len: u32) -> Segment {
    Segment { slot: 0, start, row: 0, len, fold: 0, bank: 0 }
}
