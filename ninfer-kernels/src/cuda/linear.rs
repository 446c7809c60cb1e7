//! Projections.

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::ops::{LinearOps, Norm, Project, ProjectAdd, Swiglu};
use ninfer_core::segment::Profile;
use ninfer_core::view::View;

use super::Cuda;
use super::buffer::Matrix;
use super::driver::Launch;
use super::mma_tile;
use super::norm::{Staged, stage, staged_bytes};
use super::queue::CudaQueue;
use super::step::{self, StepCall, StepInput, StepTarget};
use super::tile;
use super::tile_e4m3;
use super::weight::{CudaWeight, Piece, ROW_BLOCK, RecordFormat, WeightArg, chunk_records};

/// Matrices of one launch.
const PARTS: usize = 6;
/// Warps of a block.
const WARPS: usize = 8;
/// Threads of a block.
const BLOCK: u32 = 256;
/// Chunks of a ring, `kChunks` of `common/stream.cuh`.
const CHUNKS: usize = 2;

/// What becomes of a result, `Epilogue` of `common/linear.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Epilogue {
    Store = 0,
    Add = 1,
    Float = 2,
}

/// `Part` of `common/linear.cuh`, and what `common/tile.cuh` and `common/mma_tile.cuh` take in the same form.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PartArg {
    weight: WeightArg,
    out: Matrix,
    first_block: i32,
    rows: i32,
    second_row: i32,
    expert_rows: i32,
    run: i32,
    gap: i32,
}

impl PartArg {
    /// No matrix.
    pub(super) const NONE: Self = Self {
        weight: WeightArg::NONE,
        out: Matrix::NONE,
        first_block: 0,
        rows: 0,
        second_row: 0,
        expert_rows: 0,
        run: i32::MAX,
        gap: 0,
    };
}

/// `Linear` of `common/linear.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct LinearArg {
    x: Matrix,
    column_scale: u64,
    tiles: u64,
    order: u64,
    columns: i32,
    parts: i32,
    epilogue: i32,
    pairs_per_row: i32,
    part: [PartArg; PARTS],
}

/// One matrix of a product and where its result goes.
pub(super) struct Target<'a> {
    pub(super) weight: &'a CudaWeight,
    pub(super) out: Matrix,
    /// Columns of the result.
    pub(super) rows: usize,
    /// The second half of the matrix is the factor of `silu(first half)`.
    pub(super) pair: bool,
}

/// Pairs of tokens and experts in order of experts: see `moe.cu`.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    /// `{expert, first, count, 0}` of each tile.
    pub(super) tiles: u64,
    pub(super) order: u64,
    /// Most tiles there can be.
    pub(super) capacity: usize,
    /// Pairs in a tile at most.
    pub(super) width: usize,
    /// Pairs that share a row of the input.
    pub(super) pairs_per_row: usize,
}

/// A product of one staged input with some matrices.
pub(super) struct Product<'a> {
    pub(super) profile: Profile,
    pub(super) input: Staged,
    pub(super) columns: usize,
    pub(super) epilogue: Epilogue,
    pub(super) groups: Option<Groups>,
    pub(super) targets: &'a [Target<'a>],
}

fn family(format: RecordFormat) -> &'static str {
    match format {
        RecordFormat::Bf16 => "linear_bf16",
        RecordFormat::Fp8 => "linear_fp8",
        RecordFormat::Nvfp4 => "linear_nvfp4",
        RecordFormat::Q4 => "linear_q4",
        RecordFormat::Q5 => "linear_q5",
        RecordFormat::Q6 => "linear_q6",
        RecordFormat::W8 => "linear_w8",
    }
}

/// Name of the kernel for tiles of 16 or 64 columns. `two` takes two row blocks at once, `any` rows that do not start at
/// multiples of 16, in tiles of 8.
fn kernel(format: RecordFormat, columns: usize, two: bool, any: bool) -> &'static str {
    macro_rules! names {
        ($($format:ident: $text:literal),+) => {
            match (format, columns, two, any) {
                $((RecordFormat::$format, _, false, true) => concat!("linear_", $text, "_8_any"),
                (RecordFormat::$format, _, true, true) => concat!("linear_", $text, "_8_two_any"),
                (RecordFormat::$format, 16, false, false) => concat!("linear_", $text, "_16"),
                (RecordFormat::$format, _, false, false) => concat!("linear_", $text, "_64"),
                (RecordFormat::$format, _, true, false) => concat!("linear_", $text, "_16_two"),)+
            }
        };
    }
    names!(Bf16: "bf16", Fp8: "fp8", Nvfp4: "nvfp4", Q4: "q4", Q5: "q5", Q6: "q6", W8: "w8")
}

/// Dynamic shared memory of a block: rings of weights, and partial sums in their place.
fn shared_bytes(format: RecordFormat, columns: usize, two: bool) -> u32 {
    let run = chunk_records(format) * format.record_bytes();
    let rings = WARPS * CHUNKS * (if two { 2 } else { 1 } * run + 16);
    rings.max(WARPS * ROW_BLOCK * columns * 4) as u32
}

/// Columns of a tile for a number of tokens. All widths belong to one numeric class.
pub(super) fn tile_columns(columns: usize, pair: bool) -> usize {
    match columns {
        0..=16 => 16,
        _ if pair => 16,
        _ => 64,
    }
}

/// Rows of one format of a matrix, and where their results go.
#[derive(Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) target: &'a Target<'a>,
    pub(super) piece: &'a Piece,
}

impl<'a> Part<'a> {
    /// The parts of a target, one for each format of its weight.
    pub(super) fn of(target: &'a Target<'a>) -> impl Iterator<Item = Self> {
        target.weight.pieces().iter().map(move |piece| Self { target, piece })
    }

    /// Whether it is all of the matrix.
    pub(super) fn is_whole(&self) -> bool {
        self.target.weight.pieces().len() == 1
    }

    /// Columns of the result (of one expert).
    pub(super) fn rows(&self) -> usize {
        if self.is_whole() { self.target.rows } else { self.piece.layout.rows }
    }

    /// Rows of the matrix for a column of the result.
    pub(super) fn halves(&self) -> usize {
        if self.target.pair { 2 } else { 1 }
    }

    /// First row of the second half, or 0.
    pub(super) fn second_row(&self) -> usize {
        if self.target.pair { self.rows() } else { 0 }
    }

    /// Rows of the matrix of one expert.
    pub(super) fn expert_rows(&self) -> usize {
        self.rows() * self.halves()
    }

    /// Its weight as kernels see it.
    pub(super) fn weight(&self) -> WeightArg {
        self.target.weight.argument_of(self.piece)
    }

    /// Where its first result goes.
    pub(super) fn out(&self, epilogue: Epilogue) -> Matrix {
        let size = if epilogue == Epilogue::Float { 4 } else { 2 };
        Matrix::at(self.target.out.address() + (self.piece.first * size) as u64, self.target.out.stride())
    }

    /// So many columns of the result are adjacent, then so many belong to another part.
    pub(super) fn run_and_gap(&self) -> (i32, i32) {
        if self.is_whole() {
            (i32::MAX, 0)
        } else {
            (self.piece.run as i32, (self.piece.stride - self.piece.run) as i32)
        }
    }

    /// It as kernels see it, behind `first` row blocks or tiles of other parts.
    pub(super) fn argument(&self, first: usize, epilogue: Epilogue) -> PartArg {
        let (run, gap) = self.run_and_gap();
        PartArg {
            weight: self.weight(),
            out: self.out(epilogue),
            first_block: first as i32,
            rows: self.rows() as i32,
            second_row: self.second_row() as i32,
            expert_rows: self.expert_rows() as i32,
            run,
            gap,
        }
    }
}

/// Launches a product: one kernel for all rows of a format.
pub(super) fn multiply(backend: &Cuda, queue: &mut CudaQueue, product: &Product<'_>) -> Result<()> {
    let mut rest: Vec<Part<'_>> = Vec::with_capacity(PARTS);
    for target in product.targets {
        let pieces = target.weight.pieces();
        if pieces.len() != 1 && (target.pair || product.groups.is_some()) {
            target.weight.argument(if target.pair { "swiglu" } else { "experts" })?;
        }
        rest.extend(Part::of(target));
    }
    rest = tile_e4m3::multiply(backend, queue, product, rest)?;
    rest = tile::multiply(backend, queue, product, rest)?;
    rest = mma_tile::multiply(backend, queue, product, rest)?;
    if product.groups.is_none() && !rest.is_empty() {
        let targets: Vec<_> = product.targets.iter().map(|target| StepTarget { target, experts: 0 }).collect();
        let whole = rest.len() == targets.iter().map(|t| t.target.weight.pieces().len()).sum::<usize>();
        // The staged rows are as wide as their stride says, zeros behind the last column.
        if whole && step::takes(backend, product.columns, 0, false, &targets) {
            let input = StepInput {
                x: product.input.values,
                column_scale: product.input.scales,
                columns: product.columns,
                cols: 0,
                norm: None,
                normed: Matrix::NONE,
            };
            let call = StepCall { epilogue: product.epilogue, experts: (Matrix::NONE, 1), router: None };
            return step::run(backend, queue, &input, &call, &targets);
        }
    }
    while let Some(first) = rest.first() {
        let format = first.piece.layout.format;
        let (mut now, later): (Vec<_>, Vec<_>) = rest.into_iter().partition(|p| p.piece.layout.format == format);
        rest = later;
        while !now.is_empty() {
            let more = now.split_off(now.len().min(PARTS));
            launch(backend, queue, product, format, &now)?;
            now = more;
        }
    }
    Ok(())
}

fn launch(
    backend: &Cuda,
    queue: &mut CudaQueue,
    product: &Product<'_>,
    format: RecordFormat,
    list: &[Part<'_>],
) -> Result<()> {
    let mut part = [PartArg::NONE; PARTS];
    let two = list.iter().any(|p| p.target.pair);
    let (mut blocks, mut any) = (0, false);
    for (arg, p) in part.iter_mut().zip(list) {
        any |= !p.second_row().is_multiple_of(ROW_BLOCK)
            || (product.groups.is_some() && !p.expert_rows().is_multiple_of(ROW_BLOCK));
        *arg = p.argument(blocks, product.epilogue);
        blocks += p.rows().div_ceil(ROW_BLOCK);
    }
    let (width, tiles) = match &product.groups {
        Some(groups) => (groups.width, groups.capacity),
        None => {
            let width = if any { 8 } else { tile_columns(product.columns, two) };
            (width, product.columns.div_ceil(width))
        }
    };
    let arguments = LinearArg {
        x: product.input.values,
        column_scale: product.input.scales,
        tiles: product.groups.map_or(0, |g| g.tiles),
        order: product.groups.map_or(0, |g| g.order),
        columns: product.columns as i32,
        parts: list.len() as i32,
        epilogue: product.epilogue as i32,
        pairs_per_row: product.groups.map_or(1, |g| g.pairs_per_row) as i32,
        part,
    };
    let shared = shared_bytes(format, width, two);
    let how = Launch { grid: [blocks as u32, tiles as u32, 1], block: BLOCK, shared };
    // SAFETY: the struct is the kernel's parameter. Input and results are views whose shapes the recorder checked, or parts
    // of the workspace of those shapes.
    unsafe { queue.launch(backend, family(format), kernel(format, width, two, any), how, &arguments) }
}

/// Whether tiles of pairs must be of 8 columns, because rows of the experts start anywhere.
pub(super) fn needs_any(rows: usize) -> bool {
    !rows.is_multiple_of(ROW_BLOCK)
}

/// Products of one input that is normed or quantised first, with matrices of any formats.
fn project_parts(
    backend: &Cuda,
    queue: &mut CudaQueue,
    profile: Profile,
    input: &View<Cuda>,
    norm: Option<&Norm<Cuda>>,
    epilogue: Epilogue,
    targets: Vec<Target<'_>>,
) -> Result<()> {
    let columns = input.rows();
    if let (Profile::Step, Some(norm)) = (profile, norm) {
        let (x, cols) = (Matrix::from(input), input.cols());
        let list: Vec<_> = targets.iter().map(|target| StepTarget { target, experts: 0 }).collect();
        let native = targets.iter().all(|t| t.weight.activations() == ActivationPrecision::Native);
        if native && step::norms(x, columns, cols, Matrix::NONE) && step::takes(backend, columns, cols, true, &list) {
            let norm = Some(step::norm_of(norm));
            let input = StepInput { x, column_scale: 0, columns, cols, norm, normed: Matrix::NONE };
            let call = StepCall { epilogue, experts: (Matrix::NONE, 1), router: None };
            return step::run(backend, queue, &input, &call, &list);
        }
    }
    let [space] = queue.scratch([staged_bytes(columns, input.cols())])?;
    let mut rest = targets;
    while let Some(first) = rest.first() {
        let precision = first.weight.activations();
        let (now, later): (Vec<_>, Vec<_>) = rest.into_iter().partition(|t| t.weight.activations() == precision);
        let input = stage(backend, queue, input, norm, precision, space)?;
        multiply(backend, queue, &Product { profile, input, columns, epilogue, groups: None, targets: &now })?;
        rest = later;
    }
    Ok(())
}

impl LinearOps for Cuda {
    fn project(&self, queue: &mut CudaQueue, op: Project<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let targets = op
                .parts
                .iter()
                .map(|(weight, out)| Target { weight, out: out.into(), rows: weight.rows(), pair: false })
                .collect();
            project_parts(self, queue, op.batch.profile, &op.input, op.norm.as_ref(), Epilogue::Store, targets)
        })
    }

    fn project_add(&self, queue: &mut CudaQueue, op: ProjectAdd<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let out = Matrix::from(&op.residual);
            let targets = vec![Target { weight: &op.weight, out, rows: op.weight.rows(), pair: false }];
            project_parts(self, queue, op.batch.profile, &op.input, None, Epilogue::Add, targets)
        })
    }

    fn swiglu(&self, queue: &mut CudaQueue, op: Swiglu<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let rows = op.output.cols();
            let targets = vec![Target { weight: &op.gate_up, out: Matrix::from(&op.output), rows, pair: true }];
            project_parts(self, queue, op.batch.profile, &op.input, op.norm.as_ref(), Epilogue::Store, targets)
        })
    }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[("linear_", size_of::<LinearArg>())];
