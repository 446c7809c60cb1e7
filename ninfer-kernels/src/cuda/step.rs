//! Products of steps of at most eight tokens, with matrices of any formats in one launch: see `common/step.cuh`.
//!
//! One numeric class with [`multiply`](super::linear::multiply): which of the two computes a step never changes a bit.

use ninfer_core::backend::DeviceWeight;
use ninfer_core::ops::Norm;
use ninfer_core::{Backend, Error, Result};

use super::Cuda;
use super::buffer::Matrix;
use super::driver::Launch;
use super::linear::{Epilogue, Part, Target};
use super::queue::CudaQueue;
use super::weight::{CudaWeight, Piece, RECORD_COLUMNS, ROW_BLOCK, RecordFormat, WeightArg};

const FAMILY: &str = "step";
/// Matrices of one launch.
const PARTS: usize = 6;
/// Warps of a block that multiply.
const WARPS: usize = 8;
/// Threads of a block: those, and a warp that brings weights.
const BLOCK: u32 = 32 * (WARPS as u32 + 1);
/// Threads of a block of the second half of experts.
const DOWN_BLOCK: u32 = 256;
/// Most tokens, `kStepColumns` of `common/experts.cuh`.
pub(super) const COLUMNS: usize = 8;
/// Most pairs of tokens and experts, `kStepPairs`.
pub(super) const PAIRS: usize = 64;
/// Bytes of the partial sums of one row block, for two turns.
const PARTIALS: usize = 2 * WARPS * 128 * 4;
/// Most stages, `kMostStages` of `common/stage.cuh`.
const STAGES: usize = 8;
/// Elements between normed rows, `kRowGap` of `common/step.cuh`.
const ROW_GAP: usize = 32;
/// Most bytes of normed rows that every block makes for itself.
const NORMED: usize = 24 << 10;
/// Longest row that a block norms, `kHeld` pieces of eight columns a thread.
const LONGEST: usize = 8192;

/// `StepPart` of `common/step.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PartArg {
    weight: WeightArg,
    out: Matrix,
    first_block: i32,
    block_count: i32,
    row_blocks: i32,
    rows: i32,
    second_row: i32,
    expert_rows: i32,
    run: i32,
    gap: i32,
    experts: i32,
    unused: i32,
}

/// `StepRouter` of `common/step.cuh`: the choice of experts that the last block makes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RouterArg {
    /// f32 `[T, E]`, which the product writes.
    pub(super) logits: Matrix,
    /// f32 `[T]`, likewise.
    pub(super) gate: u64,
    /// I32 `[T, k]`.
    pub(super) experts: Matrix,
    /// f32 `[T, k + 1]`.
    pub(super) weights: Matrix,
    /// A counter that is zero between launches.
    pub(super) arrivals: u64,
    /// Experts.
    pub(super) count: i32,
    /// Experts of a token.
    pub(super) k: i32,
    pub(super) renormalise: i32,
    pub(super) unused: i32,
}

impl RouterArg {
    const NONE: Self = Self {
        logits: Matrix::NONE,
        gate: 0,
        experts: Matrix::NONE,
        weights: Matrix::NONE,
        arrivals: 0,
        count: 0,
        k: 0,
        renormalise: 0,
        unused: 0,
    };
}

/// `Step` of `common/step.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct StepArg {
    x: Matrix,
    gain: u64,
    normed: Matrix,
    column_scale: u64,
    experts: Matrix,
    router: RouterArg,
    columns: i32,
    cols: i32,
    parts: i32,
    epilogue: i32,
    k: i32,
    eps: f32,
    partials: i32,
    rows: i32,
    part: [PartArg; PARTS],
}

/// What the matrices of a step multiply.
#[derive(Clone, Copy)]
pub(super) struct StepInput {
    /// Staged rows; with `norm` rows as they are.
    pub(super) x: Matrix,
    /// Scale of each staged row, or 0.
    pub(super) column_scale: u64,
    /// Tokens.
    pub(super) columns: usize,
    pub(super) cols: usize,
    /// Address of the gain and eps of the norm that every block makes.
    pub(super) norm: Option<(u64, f32)>,
    /// Where the normed rows go too.
    pub(super) normed: Matrix,
}

/// One matrix of a step.
#[derive(Clone, Copy)]
pub(super) struct StepTarget<'a> {
    pub(super) target: &'a Target<'a>,
    /// Experts of the matrix; 0: it is one matrix.
    pub(super) experts: usize,
}

/// The other properties of a step.
#[derive(Clone, Copy)]
pub(super) struct StepCall {
    pub(super) epilogue: Epilogue,
    /// I32 `[T, k]` for matrices of experts, and `k`.
    pub(super) experts: (Matrix, usize),
    pub(super) router: Option<RouterArg>,
}

/// Rows of one format of a matrix of a step.
struct StepPart<'a> {
    part: Part<'a>,
    experts: usize,
}

impl<'a> StepPart<'a> {
    fn of(of: &StepTarget<'a>) -> impl Iterator<Item = Self> {
        let experts = of.experts;
        Part::of(of.target).map(move |part| Self { part, experts })
    }

    /// Row blocks that are computed at most.
    fn items(&self, pairs: usize) -> usize {
        let distinct = if self.experts > 0 { pairs.min(self.experts) } else { 1 };
        self.part.rows().div_ceil(ROW_BLOCK) * distinct
    }

    /// Bytes of the weights of one item.
    fn item_bytes(&self) -> usize {
        let layout = &self.part.piece.layout;
        self.part.halves() * layout.blocks() * layout.format.record_bytes()
    }

    /// Whether row blocks begin at multiples of 16 rows.
    fn aligned(&self) -> bool {
        self.part.second_row().is_multiple_of(ROW_BLOCK)
            && (self.experts == 0 || self.part.expert_rows().is_multiple_of(ROW_BLOCK))
    }
}

/// Where things lie in the shared memory of a block, and how many blocks a multiprocessor holds.
#[derive(Clone, Copy)]
struct Room {
    partials: usize,
    rows: usize,
    all: usize,
    resident: usize,
}

/// Bytes of a stage, `stage_bytes` of `common/stage.cuh`.
fn stage_bytes(format: RecordFormat, blocks: usize) -> usize {
    let depth = if format == RecordFormat::Bf16 { 1 } else { 2 };
    blocks * WARPS * depth * format.record_bytes()
}

/// The room of a launch: as many blocks at a time as registers allow and `items` occupy, if each then has two stages of its
/// largest format. Fewer blocks have more stages, so that all their weights are on their way before the kernel waits. Together
/// they take about two thirds of a multiprocessor's shared memory where that is enough for three stages: the next kernel's
/// blocks, which begin while these still run, need some too.
fn room(
    backend: &Cuda,
    formats: impl Iterator<Item = RecordFormat>,
    pair: bool,
    normed: usize,
    items: usize,
) -> Option<Room> {
    let (blocks, most) = if pair { (2, 2) } else { (1, 3) };
    let most = items.div_ceil(backend.sms()).clamp(1, most);
    let stage = formats.map(|f| stage_bytes(f, blocks)).max().unwrap_or(0);
    let rest = blocks * PARTIALS + normed;
    let device = backend.device();
    // Barriers and groups are static; the driver takes 1 KiB of each block.
    let fixed = 5 << 10;
    (1..=most).rev().find_map(|resident| {
        let fit = |shared: usize| {
            let block = (shared / resident).min(device.shared_per_block_optin as usize);
            block.checked_sub(fixed + rest).map_or(0, |left| (left / stage.max(1)).min(STAGES))
        };
        let all = device.shared_per_sm as usize;
        let stages = fit(all / 3 * 2).max(fit(all).min(3));
        let partials = stages * stage;
        let room = Room { partials, rows: partials + blocks * PARTIALS, all: partials + rest, resident };
        (stages >= 2).then_some(room)
    })
}

/// What a launch reports that was not asked for with `takes` before.
fn no_room(backend: &Cuda, op: &str) -> Error {
    Error::Unsupported {
        op: op.to_owned(),
        need: "two stages of weights in the shared memory of a block".to_owned(),
        have: format!("{} bytes", backend.device().shared_per_block_optin),
    }
}

/// Bytes of the normed rows of a block.
fn normed_bytes(columns: usize, cols: usize) -> usize {
    columns * (cols + ROW_GAP) * 2
}

/// Whether each block of a step can make the norm of its rows itself.
pub(super) fn norms(x: Matrix, columns: usize, cols: usize, normed: Matrix) -> bool {
    let wide = |m: Matrix| m.address().is_multiple_of(16) && m.stride().is_multiple_of(8);
    wide(x)
        && wide(normed)
        && cols.is_multiple_of(RECORD_COLUMNS)
        && cols <= LONGEST
        && normed_bytes(columns, cols) <= NORMED
}

/// Whether this route computes a product of a step.
pub(super) fn takes(backend: &Cuda, columns: usize, cols: usize, norm: bool, targets: &[StepTarget<'_>]) -> bool {
    let pair = targets.first().is_some_and(|t| t.target.pair);
    let parts = || targets.iter().flat_map(StepPart::of);
    let formats = parts().map(|p| p.part.piece.layout.format);
    let normed = if norm { normed_bytes(columns, cols) } else { 0 };
    columns <= COLUMNS
        && targets.iter().all(|t| t.target.pair == pair)
        && parts().all(|p| p.aligned() && (p.part.is_whole() || (!pair && p.experts == 0)))
        && room(backend, formats, pair, normed, usize::MAX).is_some()
}

/// Launches a step that [`takes`] is true of.
pub(super) fn run(
    backend: &Cuda,
    queue: &mut CudaQueue,
    input: &StepInput,
    call: &StepCall,
    targets: &[StepTarget<'_>],
) -> Result<()> {
    let parts: Vec<StepPart<'_>> = targets.iter().flat_map(StepPart::of).collect();
    for some in parts.chunks(PARTS) {
        launch(backend, queue, input, call, some)?;
    }
    Ok(())
}

/// Blocks of each part: one for each item while the device holds so many at a time, else in proportion to bytes.
fn block_counts(parts: &[StepPart<'_>], pairs: usize, resident: usize) -> Vec<usize> {
    let items: Vec<usize> = parts.iter().map(|p| p.items(pairs)).collect();
    if items.iter().sum::<usize>() <= resident {
        return items;
    }
    let bytes: Vec<usize> = parts.iter().zip(&items).map(|(p, n)| p.item_bytes() * n).collect();
    let all = bytes.iter().sum::<usize>().max(1);
    items.iter().zip(&bytes).map(|(&n, &b)| (resident * b / all).clamp(1, n)).collect()
}

fn launch(
    backend: &Cuda,
    queue: &mut CudaQueue,
    input: &StepInput,
    call: &StepCall,
    list: &[StepPart<'_>],
) -> Result<()> {
    let pair = list.first().is_some_and(|p| p.part.target.pair);
    let normed = if input.norm.is_some() { normed_bytes(input.columns, input.cols) } else { 0 };
    let pairs = input.columns * call.experts.1;
    let items = list.iter().map(|p| p.items(pairs)).sum();
    let formats = list.iter().map(|p| p.part.piece.layout.format);
    let room = room(backend, formats, pair, normed, items).ok_or_else(|| no_room(backend, "step"))?;
    let empty = PartArg {
        weight: WeightArg::NONE,
        out: Matrix::NONE,
        first_block: 0,
        block_count: 0,
        row_blocks: 0,
        rows: 0,
        second_row: 0,
        expert_rows: 0,
        run: i32::MAX,
        gap: 0,
        experts: 0,
        unused: 0,
    };
    let mut part = [empty; PARTS];
    let resident = backend.sms() * room.resident;
    let counts = block_counts(list, pairs, resident);
    let mut blocks = 0;
    for ((arg, p), count) in part.iter_mut().zip(list).zip(counts) {
        let (run, gap) = p.part.run_and_gap();
        *arg = PartArg {
            weight: p.part.weight(),
            out: p.part.out(call.epilogue),
            first_block: blocks as i32,
            block_count: count as i32,
            row_blocks: p.part.rows().div_ceil(ROW_BLOCK) as i32,
            rows: p.part.rows() as i32,
            second_row: p.part.second_row() as i32,
            expert_rows: p.part.expert_rows() as i32,
            run,
            gap,
            experts: p.experts as i32,
            unused: 0,
        };
        blocks += count;
    }
    let (gain, eps) = input.norm.unwrap_or((0, 0.0));
    let arguments = StepArg {
        x: input.x,
        gain,
        normed: input.normed,
        column_scale: input.column_scale,
        experts: call.experts.0,
        router: call.router.unwrap_or(RouterArg::NONE),
        columns: input.columns as i32,
        cols: input.cols as i32,
        parts: list.len() as i32,
        epilogue: call.epilogue as i32,
        k: call.experts.1 as i32,
        eps,
        partials: room.partials as i32,
        rows: room.rows as i32,
        part,
    };
    let kernel = if pair { "step_pair" } else { "step_rows" };
    let how = Launch { grid: [blocks as u32, 1, 1], block: BLOCK, shared: room.all as u32 };
    // SAFETY: the struct is the kernel's parameter. Input and results are views whose shapes the recorder checked, or parts
    // of the workspace of those shapes; `takes` checked what the kernel needs besides.
    unsafe { queue.launch(backend, FAMILY, kernel, how, &arguments) }
}

/// A norm as a step's blocks make it.
pub(super) fn norm_of(norm: &Norm<Cuda>) -> (u64, f32) {
    (Matrix::from(&norm.gain).address(), norm.eps)
}

/// `StepDown` of `step_experts.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct DownArg {
    routed: WeightArg,
    own: WeightArg,
    mid: Matrix,
    shared: Matrix,
    experts: Matrix,
    weights: Matrix,
    residual: Matrix,
    columns: i32,
    k: i32,
    count: i32,
    h: i32,
    places: i32,
    unused: i32,
}

/// The second half of the experts of a step.
pub(super) struct Down<'a> {
    pub(super) routed: &'a CudaWeight,
    pub(super) own: &'a CudaWeight,
    /// bf16 `[T · k, M]`.
    pub(super) mid: Matrix,
    /// bf16 `[T, S]`.
    pub(super) shared: Matrix,
    pub(super) experts: Matrix,
    pub(super) weights: Matrix,
    pub(super) residual: Matrix,
    pub(super) columns: usize,
    pub(super) k: usize,
    pub(super) h: usize,
}

/// Row blocks that a warp has room for, and the shared memory of a block; none if not even one fits.
fn down_room(backend: &Cuda, routed: &Piece, own: &Piece, pairs: usize) -> Option<(usize, usize)> {
    let bytes = |p: &Piece| p.layout.blocks() * p.layout.format.record_bytes();
    let room = |places| bytes(own).next_multiple_of(128) + WARPS * places * bytes(routed);
    // Groups and results of pairs are static.
    let limit = (backend.device().shared_per_block_optin as usize).saturating_sub(12 << 10);
    let useful = if pairs > WARPS { 2 } else { 1 };
    [useful, 1].into_iter().map(|places| (places, room(places))).find(|&(_, all)| all <= limit)
}

/// Whether [`down`] computes the second half of experts.
pub(super) fn takes_down(backend: &Cuda, routed: &CudaWeight, own: &CudaWeight, h: usize) -> bool {
    match (routed.pieces(), own.pieces()) {
        ([routed], [own]) => h.is_multiple_of(ROW_BLOCK) && down_room(backend, routed, own, 1).is_some(),
        _ => false,
    }
}

/// Launches the second half of experts that [`takes_down`] is true of. It must come right behind the step that makes its
/// inputs: it reads the chosen experts before that one has ended.
pub(super) fn down(backend: &Cuda, queue: &mut CudaQueue, d: &Down<'_>) -> Result<()> {
    let (routed, own) = (d.routed.argument("experts")?, d.own.argument("experts")?);
    let room = match (d.routed.pieces(), d.own.pieces()) {
        ([routed], [own]) => down_room(backend, routed, own, d.columns * d.k),
        _ => None,
    };
    let (places, shared) = room.ok_or_else(|| no_room(backend, "experts"))?;
    let arguments = DownArg {
        routed,
        own,
        mid: d.mid,
        shared: d.shared,
        experts: d.experts,
        weights: d.weights,
        residual: d.residual,
        columns: d.columns as i32,
        k: d.k as i32,
        count: (d.routed.rows() / d.h) as i32,
        h: d.h as i32,
        places: places as i32,
        unused: 0,
    };
    let how = Launch { grid: [(d.h / ROW_BLOCK) as u32, 1, 1], block: DOWN_BLOCK, shared: shared as u32 };
    // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder and by `takes_down`.
    unsafe { queue.launch(backend, "step_experts", "step_down", how, &arguments) }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] =
    &[("step_rows", size_of::<StepArg>()), ("step_pair", size_of::<StepArg>()), ("step_down", size_of::<DownArg>())];
