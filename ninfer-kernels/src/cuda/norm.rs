//! Norms, staging of the inputs of products, embedding, the input of the MTP block, and row copies.

use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::ops::{CopyRows, Embed, MtpStem, Norm, NormOps, RmsNorm};
use ninfer_core::view::View;
use ninfer_core::{DType, Result};

use super::Cuda;
use super::batch::BatchArg;
use super::buffer::Matrix;
use super::driver::Launch;
use super::linear::{Epilogue, Product, Target, multiply};
use super::queue::CudaQueue;
use super::weight::{RECORD_COLUMNS, WeightArg};

/// Threads of a block.
const BLOCK: u32 = 256;
/// Columns that a thread takes at once.
const PIECE: usize = 8;
const FAMILY: &str = "norm";

/// `Stage` of `norm.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct StageArg {
    x: Matrix,
    y: Matrix,
    gain: u64,
    scales: u64,
    cols: i32,
    padded: i32,
    eps: f32,
    unused: i32,
}

/// `Embed` of `norm.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedArg {
    batch: BatchArg,
    table: WeightArg,
    ids: Matrix,
    y: Matrix,
    report: u64,
}

/// `Stem` of `norm.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct StemArg {
    batch: BatchArg,
    table: WeightArg,
    ids: Matrix,
    hidden: Matrix,
    index: Matrix,
    y: Matrix,
    embedding_gain: u64,
    hidden_gain: u64,
    report: u64,
    embedding_eps: f32,
    hidden_eps: f32,
    hidden_rows: i32,
    unused: i32,
}

/// `Round` of `norm.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RoundArg {
    x: Matrix,
    y: Matrix,
    scales: u64,
    cols: i32,
    padded: i32,
}

/// `Copy` of `norm.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CopyArg {
    src: Matrix,
    dst: Matrix,
    src_index: Matrix,
    dst_index: Matrix,
    report: u64,
    width: i64,
    src_rows: i32,
    dst_rows: i32,
}

/// `Stage` of `stage_e2m1.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct E2m1Arg {
    x: Matrix,
    y: Matrix,
    gain: u64,
    scales: u64,
    cols: i32,
    padded: i32,
    eps: f32,
    wide: i32,
}

/// The input of a product: aligned bf16 rows, and the scale of each where they are values of codes.
#[derive(Clone, Copy)]
pub(super) struct Staged {
    pub(super) values: Matrix,
    pub(super) scales: u64,
    pub(super) precision: ActivationPrecision,
}

/// Columns of a staged row.
fn padded(cols: usize) -> usize {
    cols.next_multiple_of(RECORD_COLUMNS)
}

/// Bytes of staged rows with their scales.
pub(super) fn staged_bytes(rows: usize, cols: usize) -> usize {
    (rows * padded(cols) * 2).next_multiple_of(256) + rows * 4
}

/// Places for staged rows at an address of the workspace.
pub(super) fn staged_at(space: u64, rows: usize, cols: usize, precision: ActivationPrecision) -> Staged {
    let scales = space + (rows * padded(cols) * 2).next_multiple_of(256) as u64;
    Staged {
        values: Matrix::at(space, padded(cols)),
        scales: if precision == ActivationPrecision::Native { 0 } else { scales },
        precision,
    }
}

/// Rows as kernels of products can read them: in place where nothing is to be done, else in `space`.
pub(super) fn stage(
    backend: &Cuda,
    queue: &mut CudaQueue,
    input: &View<Cuda>,
    norm: Option<&Norm<Cuda>>,
    precision: ActivationPrecision,
    space: u64,
) -> Result<Staged> {
    let x = Matrix::from(input);
    let aligned =
        x.address().is_multiple_of(16) && x.stride().is_multiple_of(8) && input.cols().is_multiple_of(RECORD_COLUMNS);
    if aligned && norm.is_none() && precision == ActivationPrecision::Native {
        return Ok(Staged { values: x, scales: 0, precision });
    }
    let staged = staged_at(space, input.rows(), input.cols(), precision);
    norm_rows(backend, queue, input, norm, staged, padded(input.cols()))?;
    Ok(staged)
}

fn norm_rows(
    backend: &Cuda,
    queue: &mut CudaQueue,
    input: &View<Cuda>,
    norm: Option<&Norm<Cuda>>,
    output: Staged,
    padded: usize,
) -> Result<()> {
    let gain = norm.map_or(0, |n| Matrix::from(&n.gain).address());
    if output.precision == ActivationPrecision::E2m1Group16 {
        let eps = norm.map_or(0.0, |n| n.eps);
        return e2m1_rows(backend, queue, input.into(), (input.rows(), input.cols()), (gain, eps, false), output);
    }
    let arguments = StageArg {
        x: input.into(),
        y: output.values,
        gain,
        scales: output.scales,
        cols: input.cols() as i32,
        padded: padded as i32,
        eps: norm.map_or(0.0, |n| n.eps),
        unused: 0,
    };
    let how = Launch { grid: [input.rows() as u32, 1, 1], block: BLOCK, shared: 0 };
    // SAFETY: the struct is the kernel's parameter; rows of input and output are as many as blocks.
    unsafe { queue.launch(backend, FAMILY, "norm_rows", how, &arguments) }
}

/// Rows, normed by a gain first if there is one, as values of E2M1 codes with their scales; `wide` ones are f32.
fn e2m1_rows(
    backend: &Cuda,
    queue: &mut CudaQueue,
    x: Matrix,
    (rows, cols): (usize, usize),
    (gain, eps, wide): (u64, f32, bool),
    output: Staged,
) -> Result<()> {
    let arguments = E2m1Arg {
        x,
        y: output.values,
        gain,
        scales: output.scales,
        cols: cols as i32,
        padded: padded(cols) as i32,
        eps,
        wide: i32::from(wide),
    };
    let how = Launch { grid: [rows as u32, 1, 1], block: BLOCK, shared: 0 };
    // SAFETY: the struct is the kernel's parameter; rows of input and output are as many as blocks.
    unsafe { queue.launch(backend, "stage_e2m1", "e2m1_stage", how, &arguments) }
}

/// `output = N(input)`.
pub(super) fn norm_into(
    backend: &Cuda,
    queue: &mut CudaQueue,
    input: &View<Cuda>,
    norm: &Norm<Cuda>,
    output: &View<Cuda>,
) -> Result<()> {
    let output = Staged { values: output.into(), scales: 0, precision: ActivationPrecision::Native };
    norm_rows(backend, queue, input, Some(norm), output, input.cols())
}

/// Rounds f32 rows of the workspace to the input of a product.
pub(super) fn round_rows(
    backend: &Cuda,
    queue: &mut CudaQueue,
    x: Matrix,
    (rows, cols): (usize, usize),
    output: Staged,
) -> Result<()> {
    if output.precision == ActivationPrecision::E2m1Group16 {
        return e2m1_rows(backend, queue, x, (rows, cols), (0, 0.0, true), output);
    }
    let arguments =
        RoundArg { x, y: output.values, scales: output.scales, cols: cols as i32, padded: padded(cols) as i32 };
    let how = Launch { grid: [rows as u32, 1, 1], block: BLOCK, shared: 0 };
    // SAFETY: the struct is the kernel's parameter; the workspace holds both matrices.
    unsafe { queue.launch(backend, FAMILY, "round_rows", how, &arguments) }
}

impl NormOps for Cuda {
    fn embed(&self, queue: &mut CudaQueue, op: Embed<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let arguments = EmbedArg {
                batch: (&op.batch).into(),
                table: op.table.argument("embed")?,
                ids: (&op.ids).into(),
                y: (&op.output).into(),
                report: queue.report_address(),
            };
            let blocks = op.table.cols().div_ceil(PIECE * BLOCK as usize);
            let how = Launch { grid: [op.batch.rows as u32, blocks as u32, 1], block: BLOCK, shared: 0 };
            // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, ids by the kernel.
            unsafe { queue.launch(self, FAMILY, "embed_rows", how, &arguments) }
        })
    }

    fn rms_norm(&self, queue: &mut CudaQueue, op: RmsNorm<Self>) -> Result<()> {
        queue.submit(op, |queue, op| norm_into(self, queue, &op.input, &op.norm, &op.output))
    }

    fn mtp_stem(&self, queue: &mut CudaQueue, op: MtpStem<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let (rows, h) = (op.batch.rows, op.table.cols());
            let precision = op.fc.activations();
            let [both, space] = queue.scratch([rows * 2 * h * 4, staged_bytes(rows, 2 * h)])?;
            let both = Matrix::at(both, 2 * h);
            let arguments = StemArg {
                batch: (&op.batch).into(),
                table: op.table.argument("mtp_stem")?,
                ids: (&op.ids).into(),
                hidden: (&op.hidden).into(),
                index: (&op.index).into(),
                y: both,
                embedding_gain: Matrix::from(&op.embedding_norm.gain).address(),
                hidden_gain: Matrix::from(&op.hidden_norm.gain).address(),
                report: queue.report_address(),
                embedding_eps: op.embedding_norm.eps,
                hidden_eps: op.hidden_norm.eps,
                hidden_rows: op.hidden.rows() as i32,
                unused: 0,
            };
            let how = Launch { grid: [rows as u32, 1, 1], block: BLOCK, shared: 0 };
            // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, indices by the kernel.
            unsafe { queue.launch(self, FAMILY, "stem_rows", how, &arguments)? };
            let input = staged_at(space, rows, 2 * h, precision);
            round_rows(self, queue, both, (rows, 2 * h), input)?;
            let targets = [Target { weight: &op.fc, out: (&op.output).into(), rows: op.fc.rows(), pair: false }];
            let (profile, epilogue) = (op.batch.profile, Epilogue::Store);
            multiply(self, queue, &Product { profile, input, columns: rows, epilogue, groups: None, targets: &targets })
        })
    }

    fn copy_rows(&self, queue: &mut CudaQueue, op: CopyRows<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let size = op.src.dtype().size();
            let bytes = |view: &View<Self>| {
                let m = Matrix::from(view);
                Matrix::at(m.address(), m.stride() * size)
            };
            debug_assert_eq!(op.src_index.dtype(), DType::I32);
            let arguments = CopyArg {
                src: bytes(&op.src),
                dst: bytes(&op.dst),
                src_index: (&op.src_index).into(),
                dst_index: (&op.dst_index).into(),
                report: queue.report_address(),
                width: (op.src.cols() * size) as i64,
                src_rows: op.src.rows() as i32,
                dst_rows: op.dst.rows() as i32,
            };
            let how = Launch { grid: [op.src_index.rows() as u32, 1, 1], block: BLOCK, shared: 0 };
            // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, indices by the kernel.
            unsafe { queue.launch(self, FAMILY, "copy_rows", how, &arguments) }
        })
    }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[
    ("norm_rows", size_of::<StageArg>()),
    ("e2m1_stage", size_of::<E2m1Arg>()),
    ("embed_rows", size_of::<EmbedArg>()),
    ("stem_rows", size_of::<StemArg>()),
    ("round_rows", size_of::<RoundArg>()),
    ("copy_rows", size_of::<CopyArg>()),
];
