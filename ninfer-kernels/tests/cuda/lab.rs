//! One backend on the test bench: matrices between guard bytes, poisoned wherever nothing is to be read.

use std::collections::BTreeSet;
use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

use bytemuck::Pod;
use half::bf16;
use ninfer_core::capability::Target;
use ninfer_core::segment::{Batch, Profile, Segment};
use ninfer_core::{Backend, DType, DeviceBuffer, Recorder, Result, View};
use ninfer_kernels::cpu::Cpu;
use ninfer_kernels::cuda::Cuda;

/// Every byte that no operation may read or write: NaN as a float, −1 as an index, "none" as a token.
const POISON: u8 = 0xff;
/// Bytes in front of and behind a matrix.
const GUARD: usize = 256;

/// The first device, or `None` with a printed line.
pub fn gpu() -> Option<Cuda> {
    static GPU: OnceLock<std::result::Result<Cuda, String>> = OnceLock::new();
    static SKIPPED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    match GPU.get_or_init(|| Cuda::new(0).map_err(|e| e.to_string())) {
        Ok(gpu) => Some(gpu.clone()),
        Err(reason) => {
            // A test may ask more often than once; its thread has its name.
            let test = std::thread::current().name().unwrap_or_default().to_owned();
            let mut skipped = SKIPPED.lock().unwrap_or_else(PoisonError::into_inner);
            if skipped.insert(test) {
                // Past the test harness, which keeps what passing tests print.
                let _ = writeln!(std::io::stderr(), "GPU test skipped ({} so far): {reason}", skipped.len());
            }
            None
        }
    }
}

/// The same device with the modules that every device loads; there must be one.
pub fn oldest() -> Cuda {
    static GPU: OnceLock<Cuda> = OnceLock::new();
    GPU.get_or_init(|| Cuda::with_targets(0, &[Target::Sm80]).unwrap()).clone()
}

/// Values as the activations of every backend hold them exactly.
pub fn exact(values: Vec<f32>) -> Vec<f32> {
    values.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect()
}

struct Guarded<B: Backend> {
    buffer: B::Buffer,
    bytes: usize,
}

/// A backend, a queue and the guarded matrices made with them.
pub struct Side<B: Backend> {
    pub backend: B,
    pub queue: B::Queue,
    guarded: Vec<Guarded<B>>,
}

impl Side<Cpu> {
    pub fn cpu() -> Self {
        Self::new(Cpu::new())
    }
}

impl<B: Backend> Side<B> {
    pub fn new(backend: B) -> Self {
        let queue = backend.queue().unwrap();
        Self { backend, queue, guarded: Vec::new() }
    }

    fn make(&mut self, dtype: DType, rows: usize, cols: usize, content: Option<&[u8]>) -> View<B> {
        let size = rows * cols * dtype.size();
        let mut image = vec![POISON; size + 2 * GUARD];
        if let Some(content) = content {
            image[GUARD..GUARD + size].copy_from_slice(content);
        }
        let buffer = self.backend.alloc("test matrix", image.len()).unwrap();
        let all = View::new(buffer.clone(), DType::U8, 0, 1, image.len()).unwrap();
        self.backend.upload(&mut self.queue, &all, &image).unwrap();
        self.guarded.push(Guarded { buffer: buffer.clone(), bytes: size });
        View::new(buffer, dtype, GUARD, rows, cols).unwrap()
    }

    /// A matrix of 32-bit words or other plain values.
    pub fn plain<T: Pod>(&mut self, dtype: DType, rows: usize, cols: usize, values: &[T]) -> View<B> {
        assert_eq!(size_of::<T>(), dtype.size());
        self.make(dtype, rows, cols, Some(bytemuck::cast_slice(values)))
    }

    pub fn floats(&mut self, rows: usize, cols: usize, values: &[f32]) -> View<B> {
        self.plain(DType::F32, rows, cols, values)
    }

    /// Activations in the backend's type.
    pub fn acts(&mut self, rows: usize, cols: usize, values: &[f32]) -> View<B> {
        let dtype = self.backend.activation_dtype();
        self.encoded(dtype, rows, cols, values)
    }

    /// f32 or bf16 values.
    pub fn encoded(&mut self, dtype: DType, rows: usize, cols: usize, values: &[f32]) -> View<B> {
        match dtype {
            DType::Bf16 => {
                let rounded: Vec<_> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                self.plain(dtype, rows, cols, &rounded)
            }
            _ => self.floats(rows, cols, values),
        }
    }

    /// A poisoned matrix for results.
    pub fn poisoned(&mut self, dtype: DType, rows: usize, cols: usize) -> View<B> {
        self.make(dtype, rows, cols, None)
    }

    pub fn result(&mut self, rows: usize, cols: usize) -> View<B> {
        let dtype = self.backend.activation_dtype();
        self.poisoned(dtype, rows, cols)
    }

    pub fn batch(&mut self, profile: Profile, rows: usize, segments: &[Segment]) -> Batch<B> {
        let words: Vec<i32> = segments.iter().flat_map(|s| s.to_words()).collect();
        let table = self.plain(DType::I32, segments.len(), 8, &words);
        Batch::new(profile, rows, table).unwrap()
    }

    /// One sequence in slot 0 from position `start` on.
    pub fn one(&mut self, profile: Profile, rows: usize, start: u32) -> Batch<B> {
        self.batch(profile, rows, &[Segment { start, len: rows as u32, ..Segment::default() }])
    }

    /// Runs operations now.
    pub fn run(&mut self, work: impl FnOnce(&mut Recorder<'_, B>) -> Result<()>) {
        self.backend.run(&mut self.queue, work).unwrap();
    }

    /// Records operations and runs the recording.
    pub fn replay(&mut self, work: impl FnOnce(&mut Recorder<'_, B>) -> Result<()>) -> B::Recorded {
        let step = self.backend.record(&mut self.queue, work).unwrap();
        self.backend.replay(&mut self.queue, &step).unwrap();
        step
    }

    pub fn bytes(&mut self, view: &View<B>) -> Vec<u8> {
        let mut out = vec![0; view.rows() * view.cols() * view.dtype().size()];
        self.backend.download(&mut self.queue, view, &mut out).unwrap();
        out
    }

    pub fn read<T: Pod>(&mut self, view: &View<B>) -> Vec<T> {
        assert_eq!(size_of::<T>(), view.dtype().size());
        self.bytes(view).chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }

    /// f32 or bf16 values as f32.
    pub fn values(&mut self, view: &View<B>) -> Vec<f32> {
        match view.dtype() {
            DType::Bf16 => self.read::<bf16>(view).into_iter().map(bf16::to_f32).collect(),
            _ => self.read::<f32>(view),
        }
    }

    /// Guard bytes of all matrices are untouched.
    #[track_caller]
    pub fn check_guards(&mut self) {
        for g in &self.guarded {
            let mut image = vec![0; g.buffer.len()];
            let all = View::new(g.buffer.clone(), DType::U8, 0, 1, image.len()).unwrap();
            self.backend.download(&mut self.queue, &all, &mut image).unwrap();
            let broken = image[..GUARD].iter().chain(&image[GUARD + g.bytes..]).any(|&b| b != POISON);
            assert!(!broken, "bytes around a matrix of {} bytes changed", g.bytes);
        }
    }
}

/// How far a result may be off: relative L2, and for each element an absolute and a part of the largest reference.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    pub l2: f64,
    pub absolute: f64,
    pub relative: f64,
}

/// Products with 16-bit activations: the result is rounded to bf16 (2^-9), and so may be an input that is normed first.
pub const PRODUCT: Tolerance = Tolerance { l2: 1.0 / 256.0, absolute: 1.0 / 256.0, relative: 2.0 / 256.0 };
/// SwiGLU: both factors carry the rounding of the normed input, and the result is rounded.
pub const SWIGLU: Tolerance = Tolerance { l2: 5e-3, absolute: 5e-3, relative: 2.0 / 256.0 };
/// Norms: one rounding to bf16, half a unit in the last place of which is up to 2^-8 of the value.
pub const NORM: Tolerance = Tolerance { l2: 1.85e-3, absolute: 1e-5, relative: 1.0 / 256.0 };
/// Expert blocks: three roundings to bf16 in a row.
pub const EXPERTS: Tolerance = Tolerance { l2: 1.2e-2, absolute: 4e-3, relative: 1e-2 };

/// Compares a result with its reference.
#[track_caller]
pub fn near(what: &str, got: &[f32], expected: &[f32], tolerance: Tolerance) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    let (mut error, mut size, mut most) = (0.0, 0.0, 0.0f64);
    for (g, e) in got.iter().zip(expected) {
        let (g, e) = (f64::from(*g), f64::from(*e));
        error += (g - e) * (g - e);
        size += e * e;
        most = most.max(e.abs());
    }
    for (i, (g, e)) in got.iter().zip(expected).enumerate() {
        let off = f64::from((g - e).abs());
        assert!(
            off <= tolerance.absolute + tolerance.relative * most,
            "{what}[{i}]: {g} instead of {e}, largest {most:.3}, {tolerance:?}"
        );
    }
    let l2 = (error / f64::max(size, 1e-30)).sqrt();
    // The limit is that of many elements; a few of them scatter by one over the root of their number.
    let limit = tolerance.l2 * (1.0 + 4.0 / (got.len() as f64).sqrt());
    assert!(l2 <= limit, "{what}: relative L2 error {l2:.2e} of {} elements, {tolerance:?}", got.len());
}

/// Equal bits.
#[track_caller]
pub fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &[T], expected: &[T]) {
    assert_eq!(got.len(), expected.len(), "{what}: length");
    if let Some(i) = (0..got.len()).find(|&i| got[i] != expected[i]) {
        panic!("{what}[{i}]: {:?} instead of {:?}", got[i], expected[i]);
    }
}
