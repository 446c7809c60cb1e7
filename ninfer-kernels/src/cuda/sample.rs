//! Head, choice of tokens, counts, acceptance.

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::ops::{Accept, Choose, Count, Head, HeadArgmax, SampleOps};
use ninfer_core::segment::Profile;
use ninfer_core::view::View;

use super::Cuda;
use super::batch::BatchArg;
use super::buffer::Matrix;
use super::choose::{self, Source, choose, choose_bytes};
use super::driver::Launch;
use super::linear::{Epilogue, Product, Target, multiply};
use super::norm::{stage, staged_bytes};
use super::queue::CudaQueue;
use super::weight::CudaWeight;

const FAMILY: &str = "sample";
/// Threads of a block that counts.
const BLOCK: u32 = 256;
/// Tokens whose counts a block clears or marks.
const RANGE: usize = 8192;

/// `Count` of `sample.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CountArg {
    batch: BatchArg,
    ids: Matrix,
    previous: Matrix,
    counts: Matrix,
    report: u64,
    slots: i32,
    width: i32,
    vocab: i32,
    range: i32,
}

/// `Accept` of `sample.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AcceptArg {
    batch: BatchArg,
    ids: Matrix,
    chosen: Matrix,
    result: Matrix,
    realign: Matrix,
    last: Matrix,
    chain: Matrix,
    report: u64,
    width: i32,
    links: i32,
}

/// Logits in f32 of some rows; `space` holds the staged input.
fn logits(
    backend: &Cuda,
    queue: &mut CudaQueue,
    profile: Profile,
    input: &View<Cuda>,
    head: &CudaWeight,
    out: Matrix,
    space: u64,
) -> Result<()> {
    let staged = stage(backend, queue, input, None, head.activations(), space)?;
    let targets = [Target { weight: head, out, rows: head.rows(), pair: false }];
    let (columns, epilogue) = (input.rows(), Epilogue::Float);
    multiply(backend, queue, &Product { profile, input: staged, columns, epilogue, groups: None, targets: &targets })
}

impl SampleOps for Cuda {
    fn head(&self, queue: &mut CudaQueue, op: Head<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let [space] = queue.scratch([staged_bytes(op.input.rows(), op.input.cols())])?;
            logits(self, queue, op.batch.profile, &op.input, &op.head, (&op.logits).into(), space)
        })
    }

    fn head_argmax(&self, queue: &mut CudaQueue, op: HeadArgmax<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let (rows, vocab) = (op.batch.rows, op.head.rows());
            // As many rows at a time as a step has at most; results do not depend on it.
            let most = rows.min(choose::ROWS);
            let [space, products, choice] =
                queue.scratch([staged_bytes(most, op.input.cols()), most * vocab * 4, choose_bytes(most, op.limit)])?;
            for first in (0..rows).step_by(choose::ROWS) {
                let part = first..(first + most).min(rows);
                let (input, output) = (op.input.row_range(part.clone())?, op.output.row_range(part.clone())?);
                let products = Matrix::at(products, vocab);
                logits(self, queue, op.batch.profile, &input, &op.head, products, space)?;
                let source = Source::greedy((&op.batch).into(), products, op.limit, (&output).into());
                choose(self, queue, &source, part.len(), choice)?;
            }
            Ok(())
        })
    }

    fn choose(&self, queue: &mut CudaQueue, op: Choose<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let [space] = queue.scratch([choose_bytes(op.batch.rows, op.limit)])?;
            choose(self, queue, &Source::of(op), op.batch.rows, space)
        })
    }

    fn count(&self, queue: &mut CudaQueue, op: Count<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let vocab = op.counts.cols();
            let arguments = CountArg {
                batch: (&op.batch).into(),
                ids: (&op.ids).into(),
                previous: (&op.previous).into(),
                counts: (&op.counts).into(),
                report: queue.report_address(),
                slots: op.counts.rows() as i32,
                width: op.previous.cols() as i32,
                vocab: vocab as i32,
                range: RANGE as i32,
            };
            let ranges = vocab.div_ceil(RANGE).max(1) as u32;
            let how = Launch { grid: [ranges, op.batch.segments as u32, 1], block: BLOCK, shared: 0 };
            // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, slots, rows and ids by the
            // kernel.
            unsafe { queue.launch(self, FAMILY, "sample_count", how, &arguments) }
        })
    }

    fn accept(&self, queue: &mut CudaQueue, op: Accept<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let segments = op.batch.segments;
            let arguments = AcceptArg {
                batch: (&op.batch).into(),
                ids: (&op.ids).into(),
                chosen: (&op.chosen).into(),
                result: (&op.result).into(),
                realign: (&op.realign).into(),
                last: (&op.last).into(),
                chain: (&op.chain).into(),
                report: queue.report_address(),
                width: (op.result.cols() - 1) as i32,
                links: (op.chain.rows() / segments.max(1)) as i32,
            };
            let how = Launch { grid: [segments as u32, 1, 1], block: 32, shared: 0 };
            // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, rows by the kernel.
            unsafe { queue.launch(self, FAMILY, "sample_accept", how, &arguments) }
        })
    }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] =
    &[("sample_count", size_of::<CountArg>()), ("sample_accept", size_of::<AcceptArg>())];
