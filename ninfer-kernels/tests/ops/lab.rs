//! A backend on the test bench: matrices between guard bytes, poisoned wherever nothing is to be read.

use bytemuck::Pod;
use half::bf16;
use ninfer_core::backend::InferenceBackend;
use ninfer_core::segment::{Batch, Profile, Segment};
use ninfer_core::{Backend, DType, DeviceBuffer, Error, PackedRef, Recorder, Result, View};
use ninfer_kernels::cpu::Cpu;

/// Every byte that no operation may read or write: NaN as a float, −1 as an index, "none" as a token.
const POISON: u8 = 0xff;
/// Elements in front of and behind a matrix.
const GUARD: usize = 37;

/// Element types of test matrices.
pub trait Word: Pod + PartialEq + std::fmt::Debug {
    const DTYPE: DType;
}

impl Word for f32 {
    const DTYPE: DType = DType::F32;
}
impl Word for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Word for half::f16 {
    const DTYPE: DType = DType::F16;
}
impl Word for u8 {
    const DTYPE: DType = DType::U8;
}
impl Word for u32 {
    const DTYPE: DType = DType::U32;
}
impl Word for i32 {
    const DTYPE: DType = DType::I32;
}

/// A matrix of a test.
#[derive(Clone)]
pub struct Mat<B: Backend> {
    pub view: View<B>,
    /// Place in [`Lab::known`].
    id: usize,
}

impl<B: Backend> Mat<B> {
    /// The view, to be moved into an operation.
    pub fn v(&self) -> View<B> {
        self.view.clone()
    }
}

/// What the host knows of a buffer.
struct Known<B: Backend> {
    view: View<B>,
    image: Vec<u8>,
    written: bool,
}

/// A backend, a queue, and all matrices made for one case.
pub struct Lab<B: InferenceBackend = Cpu> {
    pub backend: B,
    pub queue: B::Queue,
    known: Vec<Known<B>>,
    /// Columns left and right of every matrix made by [`Lab::input`] and [`Lab::output`].
    pub gaps: (usize, usize),
}

impl Lab<Cpu> {
    /// The CPU with the process's thread pool.
    pub fn cpu() -> Self {
        Self::new(Cpu::new())
    }
}

impl<B: InferenceBackend> Lab<B> {
    pub fn new(backend: B) -> Self {
        let queue = backend.queue().unwrap();
        Self { backend, queue, known: Vec::new(), gaps: (0, 0) }
    }

    /// Leaves gaps between the rows of matrices made from now on.
    pub fn with_gaps(mut self, left: usize, right: usize) -> Self {
        self.gaps = (left, right);
        self
    }

    /// A matrix that no operation may change.
    pub fn input<T: Word>(&mut self, rows: usize, cols: usize, values: &[T]) -> Mat<B> {
        self.make(rows, cols, Some(values), self.gaps, false)
    }

    /// A poisoned matrix for results.
    pub fn output<T: Word>(&mut self, rows: usize, cols: usize) -> Mat<B> {
        self.make::<T>(rows, cols, None, self.gaps, true)
    }

    /// A matrix with contents that an operation may change.
    pub fn inout<T: Word>(&mut self, rows: usize, cols: usize, values: &[T]) -> Mat<B> {
        self.make(rows, cols, Some(values), self.gaps, true)
    }

    /// As [`Lab::inout`], for matrices whose rows may have no gaps.
    pub fn state<T: Word>(&mut self, rows: usize, cols: usize, values: &[T]) -> Mat<B> {
        self.make(rows, cols, Some(values), (0, 0), true)
    }

    /// A poisoned matrix whose rows may have no gaps.
    pub fn poisoned<T: Word>(&mut self, rows: usize, cols: usize) -> Mat<B> {
        self.make::<T>(rows, cols, None, (0, 0), true)
    }

    /// As [`Lab::input`], for matrices whose rows may have no gaps.
    pub fn dense<T: Word>(&mut self, rows: usize, cols: usize, values: &[T]) -> Mat<B> {
        self.make(rows, cols, Some(values), (0, 0), false)
    }

    fn make<T: Word>(
        &mut self,
        rows: usize,
        cols: usize,
        values: Option<&[T]>,
        (left, right): (usize, usize),
        written: bool,
    ) -> Mat<B> {
        let size = size_of::<T>();
        let stride = left + cols + right;
        let mut image = vec![POISON; (2 * GUARD + rows * stride) * size];
        if let Some(values) = values {
            assert_eq!(values.len(), rows * cols, "values of a [{rows}, {cols}] matrix");
            for r in 0..rows {
                let at = (GUARD + r * stride + left) * size;
                image[at..at + cols * size].copy_from_slice(bytemuck::cast_slice(&values[r * cols..(r + 1) * cols]));
            }
        }
        let buffer = self.backend.alloc("test matrix", image.len()).unwrap();
        let all = View::new(buffer.clone(), DType::U8, 0, 1, image.len()).unwrap();
        self.backend.upload(&mut self.queue, &all, &image).unwrap();
        let whole = View::new(buffer, T::DTYPE, GUARD * size, rows, stride).unwrap();
        let view = whole.col_range(left..left + cols).unwrap();
        self.known.push(Known { view: view.clone(), image, written });
        Mat { view, id: self.known.len() - 1 }
    }

    pub fn batch(&mut self, profile: Profile, rows: usize, segments: &[Segment]) -> Batch<B> {
        let words: Vec<i32> = segments.iter().flat_map(|s| s.to_words()).collect();
        let table = self.input(segments.len(), 8, &words);
        Batch::new(profile, rows, table.v()).unwrap()
    }

    /// One sequence in slot 0 from position `start` on.
    pub fn one(&mut self, profile: Profile, rows: usize, start: u32) -> Batch<B> {
        self.batch(profile, rows, &[Segment { start, len: rows as u32, ..Segment::default() }])
    }

    pub fn weight(&mut self, parts: &[PackedRef<'_>]) -> B::Weight {
        self.backend.prepare(parts).unwrap()
    }

    /// Overwrites a matrix.
    pub fn fill<T: Word>(&mut self, mat: &Mat<B>, values: &[T]) {
        let (rows, cols, size) = (mat.view.rows(), mat.view.cols(), size_of::<T>());
        assert_eq!(values.len(), rows * cols);
        for r in 0..rows {
            let row = mat.view.row_range(r..r + 1).unwrap();
            self.backend
                .upload(&mut self.queue, &row, bytemuck::cast_slice(&values[r * cols..(r + 1) * cols]))
                .unwrap();
        }
        let image = &mut self.known[mat.id].image;
        for r in 0..rows {
            let at = mat.view.offset() + r * mat.view.stride() * size;
            let row = bytemuck::cast_slice(&values[r * cols..(r + 1) * cols]);
            image[at..at + cols * size].copy_from_slice(row);
        }
    }

    /// Runs operations, then checks that inputs and guards are untouched.
    pub fn run(&mut self, work: impl FnOnce(&mut Recorder<'_, B>) -> Result<()>) {
        self.backend.run(&mut self.queue, work).unwrap();
        self.check();
    }

    /// Runs operations that must fail, and gives their error. Inputs and guards must be untouched nevertheless.
    pub fn fail(&mut self, work: impl FnOnce(&mut Recorder<'_, B>) -> Result<()>) -> Error {
        let error = self.backend.run(&mut self.queue, work).expect_err("this call must be refused");
        assert!(!error.help().is_empty());
        self.check();
        error
    }

    /// Inputs are as they were uploaded, and so is everything around outputs.
    pub fn check(&mut self) {
        for known in &self.known {
            let mut now = vec![0; known.image.len()];
            let all = View::new(known.view.buffer().clone(), DType::U8, 0, 1, now.len()).unwrap();
            self.backend.download(&mut self.queue, &all, &mut now).unwrap();
            if known.written {
                let (size, view) = (known.view.dtype().size(), &known.view);
                for r in 0..view.rows() {
                    let at = view.offset() + r * view.stride() * size;
                    let row = at..at + view.cols() * size;
                    now[row.clone()].copy_from_slice(&known.image[row]);
                }
            }
            if now != known.image {
                let at = now.iter().zip(&known.image).position(|(a, b)| a != b).unwrap();
                panic!("byte {at} of {:?} changed ({} bytes in all)", known.view, known.view.buffer().len());
            }
        }
    }

    pub fn read<T: Word>(&mut self, mat: &Mat<B>) -> Vec<T> {
        self.read_view(&mat.view)
    }

    pub fn read_view<T: Word>(&mut self, view: &View<B>) -> Vec<T> {
        assert_eq!(view.dtype(), T::DTYPE);
        let mut values = vec![T::zeroed(); view.rows() * view.cols()];
        if view.cols() > 0 {
            for (r, row) in values.chunks_exact_mut(view.cols()).enumerate() {
                let from = view.row_range(r..r + 1).unwrap();
                self.backend.download(&mut self.queue, &from, bytemuck::cast_slice_mut(row)).unwrap();
            }
        }
        values
    }
}
