//! Gated DeltaNet: see `gdn.cu` and `gdn_step.cu`; most prompts go through `gdn_chunk`.

use ninfer_core::capability::Target;
use ninfer_core::ops::{GdnFold, GdnMix, GdnOps, GdnParams, GdnRecord, GdnState, OutputGate};
use ninfer_core::segment::Batch;
use ninfer_core::shape::GdnShape;
use ninfer_core::view::View;
use ninfer_core::{Error, Result};

use super::Cuda;
use super::batch::BatchArg;
use super::buffer::Matrix;
use super::driver::Launch;
use super::gdn_chunk;
use super::queue::CudaQueue;

/// Threads of a block that convolves or norms.
const BLOCK: u32 = 256;
/// Threads of a block with a part of a state in its registers.
const DELTA_BLOCK: u32 = 128;
/// Tokens of a prompt that a thread convolves.
const TILE: usize = 16;
/// Features of the heads that the tuned kernels take.
pub(super) const TUNED: usize = 128;
/// Most key features of a head, and most taps of the convolution.
const MOST_KEYS: usize = 256;
const MOST_TAPS: usize = 8;

/// `GdnRecord` of `common/gdn.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RecordArg {
    columns: u64,
    key_value: u64,
    gates: u64,
    width: i32,
    unused: i32,
}

/// `Gdn` of `common/gdn.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GdnArg {
    batch: BatchArg,
    qkv: Matrix,
    z: Matrix,
    a: Matrix,
    b: Matrix,
    output: Matrix,
    record: RecordArg,
    conv: u64,
    a_log: u64,
    dt_bias: u64,
    gain: u64,
    window: u64,
    matrix: u64,
    mixed: u64,
    gates: u64,
    reads: u64,
    report: u64,
    slots: i32,
    key_heads: i32,
    value_heads: i32,
    key_dim: i32,
    value_dim: i32,
    taps: i32,
    sigmoid: i32,
    fold_only: i32,
    eps: f32,
    query_scale: f32,
}

/// Address of a matrix whose rows lie behind each other.
fn dense(op: &'static str, what: &'static str, view: &View<Cuda>) -> Result<u64> {
    if view.is_contiguous() {
        return Ok(Matrix::from(view).address());
    }
    Err(Error::Shape { op, what, expected: "rows without gaps".to_owned(), got: format!("{view:?}") })
}

fn check_dims(op: &'static str, d: &GdnShape) -> Result<()> {
    if [d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.conv_kernel.saturating_sub(1)].contains(&0) {
        return Err(Error::Shape {
            op,
            what: "sizes",
            expected: "at least one head of one feature and two taps".to_owned(),
            got: format!("{d:?}"),
        });
    }
    if d.key_dim > MOST_KEYS || d.conv_kernel > MOST_TAPS {
        return Err(Error::Unsupported {
            op: format!("{op} with {} key features and {} taps", d.key_dim, d.conv_kernel),
            need: format!("at most {MOST_KEYS} key features and {MOST_TAPS} taps"),
            have: "the kernels of this backend".to_owned(),
        });
    }
    Ok(())
}

impl GdnArg {
    /// Everything that mixing and folding have in common.
    fn new(
        op: &'static str,
        queue: &CudaQueue,
        batch: &Batch<Cuda>,
        params: &GdnParams<Cuda>,
        state: &GdnState<Cuda>,
        record: Option<&GdnRecord<Cuda>>,
    ) -> Result<Self> {
        let d = &params.dims;
        check_dims(op, d)?;
        let mut slots = state.window.rows() / d.channels();
        let mut recorded = RecordArg { columns: 0, key_value: 0, gates: 0, width: 0, unused: 0 };
        if let Some(record) = record {
            slots = slots.min(record.columns.rows() / (2 * record.width));
            recorded = RecordArg {
                columns: dense(op, "record columns", &record.columns)?,
                key_value: dense(op, "record keys and values", &record.key_value)?,
                gates: dense(op, "record gates", &record.gates)?,
                width: record.width as i32,
                unused: 0,
            };
        }
        Ok(Self {
            batch: batch.into(),
            qkv: Matrix::NONE,
            z: Matrix::NONE,
            a: Matrix::NONE,
            b: Matrix::NONE,
            output: Matrix::NONE,
            record: recorded,
            conv: dense(op, "conv", &params.conv)?,
            a_log: Matrix::from(&params.a_log).address(),
            dt_bias: Matrix::from(&params.dt_bias).address(),
            gain: Matrix::from(&params.gain).address(),
            window: dense(op, "window", &state.window)?,
            matrix: dense(op, "matrix", &state.matrix)?,
            mixed: 0,
            gates: 0,
            reads: 0,
            report: queue.report_address(),
            slots: slots as i32,
            key_heads: d.key_heads as i32,
            value_heads: d.value_heads as i32,
            key_dim: d.key_dim as i32,
            value_dim: d.value_dim as i32,
            taps: d.conv_kernel as i32,
            sigmoid: i32::from(params.gate == OutputGate::Sigmoid),
            fold_only: 0,
            eps: params.eps,
            query_scale: 1.0 / (d.key_dim as f32).sqrt(),
        })
    }

    /// Whether rows and parameters can be read in vectors.
    pub(super) fn is_aligned(&self) -> bool {
        let rows = |m: &Matrix, bytes: u64| (m.address() | (m.stride() as u64 * 2)).is_multiple_of(bytes);
        let parameters = (self.conv | self.matrix).is_multiple_of(16);
        rows(&self.qkv, 8) && rows(&self.z, 16) && rows(&self.output, 16) && parameters
    }

    /// The same with another place for read-outs.
    pub(super) fn with_reads(self, reads: u64) -> Self {
        Self { reads, ..self }
    }

    /// Norms and gates the read-outs of all rows.
    pub(super) fn norm(&self, backend: &Cuda, queue: &mut CudaQueue, rows: usize, d: &GdnShape) -> Result<()> {
        let how = Launch { grid: [rows as u32, d.value_heads.div_ceil(8) as u32, 1], block: BLOCK, shared: 0 };
        // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder.
        unsafe { queue.launch(backend, "gdn", "gdn_norm", how, self) }
    }

    /// Convolutions and gates, then the delta rule. With a record the segments are rounds, otherwise prompts.
    fn run(&self, backend: &Cuda, queue: &mut CudaQueue, d: &GdnShape, batch: &Batch<Cuda>) -> Result<()> {
        let round = self.record.width > 0;
        let columns = match (round, d.conv_kernel) {
            (true, ..=4) => "gdn_round_columns_4",
            (true, _) => "gdn_round_columns_8",
            (false, ..=4) => "gdn_prompt_columns_4",
            (false, _) => "gdn_prompt_columns_8",
        };
        let tiles = if round { 0 } else { batch.rows.div_ceil(TILE) };
        let channel_blocks = d.channels().div_ceil(BLOCK as usize) as u32;
        let how = Launch { grid: [channel_blocks + 1, (batch.segments + tiles) as u32, 1], block: BLOCK, shared: 0 };
        // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, segments by the kernel.
        unsafe { queue.launch(backend, "gdn", columns, how, self)? };
        // Kernels and the value features of one of their blocks.
        let (family, delta, slice) = match (round, d.key_dim, d.value_dim) {
            (true, TUNED, TUNED) => ("gdn_delta", "gdn_round_full", 32),
            (false, TUNED, TUNED) => ("gdn_delta", "gdn_prompt_full", 32),
            (true, ..=32, _) => ("gdn_delta_any", "gdn_round_32", 32),
            (false, ..=32, _) => ("gdn_delta_any", "gdn_prompt_32", 32),
            (true, ..) => ("gdn_delta_any", "gdn_round_256", 16),
            (false, ..) => ("gdn_delta_any", "gdn_prompt_256", 16),
        };
        let blocks = d.value_heads * d.value_dim.div_ceil(slice);
        let how = Launch { grid: [blocks as u32, batch.segments as u32, 1], block: DELTA_BLOCK, shared: 0 };
        // SAFETY: as above.
        unsafe { queue.launch(backend, family, delta, how, self) }
    }

    /// The kernel that does all of a round in clusters of blocks, with its blocks for a key head and their threads.
    fn step_kernel(&self, backend: &Cuda, d: &GdnShape) -> Option<(&'static str, u32, u32)> {
        let tuned = (d.key_dim, d.value_dim, d.conv_kernel) == (TUNED, TUNED, 4);
        let clusters = backend.kernels().selection().targets.contains(&Target::Sm90);
        match d.value_heads / d.key_heads {
            _ if self.record.width == 0 || !tuned || !clusters => None,
            1 => Some(("gdn_step_1", 4, 128)),
            2 => Some(("gdn_step_2", 8, 128)),
            3 => Some(("gdn_step_3", 6, 256)),
            _ => None,
        }
    }
}

impl GdnOps for Cuda {
    fn gdn_mix(&self, queue: &mut CudaQueue, op: GdnMix<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let (d, t) = (&op.params.dims, op.batch.rows);
            let arguments = GdnArg {
                qkv: (&op.qkv).into(),
                z: (&op.z).into(),
                a: (&op.a).into(),
                b: (&op.b).into(),
                output: (&op.output).into(),
                ..GdnArg::new("gdn_mix", queue, &op.batch, &op.params, &op.state, op.record.as_ref())?
            };
            if gdn_chunk::takes(op, &arguments) {
                return gdn_chunk::run(self, queue, op, arguments);
            }
            if let Some((name, blocks, block)) = arguments.step_kernel(self, d) {
                let how = Launch { grid: [d.key_heads as u32 * blocks, op.batch.segments as u32, 1], block, shared: 0 };
                // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, segments by the kernel.
                return unsafe { queue.launch(self, "gdn_step", name, how, &arguments) };
            }
            let mixed = if op.record.is_some() { d.keys() } else { d.channels() };
            let [mixed, gates, reads] =
                queue.scratch([t * mixed * 4, t * 2 * d.value_heads * 4, t * d.values() * 4])?;
            let arguments = GdnArg { mixed, gates, reads, ..arguments };
            arguments.run(self, queue, d, &op.batch)?;
            arguments.norm(self, queue, t, d)
        })
    }

    fn gdn_fold(&self, queue: &mut CudaQueue, op: GdnFold<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let record = Some(&op.record);
            let arguments = GdnArg::new("gdn_fold", queue, &op.batch, &op.params, &op.state, record)?;
            GdnArg { fold_only: 1, ..arguments }.run(self, queue, &op.params.dims, &op.batch)
        })
    }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[
    ("gdn_norm", size_of::<GdnArg>()),
    ("gdn_prompt_", size_of::<GdnArg>()),
    ("gdn_round_", size_of::<GdnArg>()),
    ("gdn_step_", size_of::<GdnArg>()),
];
