//! Mixture of experts.

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::ops::{Experts, MoeOps, Route};
use ninfer_core::segment::Profile;

use super::Cuda;
use super::batch::BatchArg;
use super::buffer::Matrix;
use super::driver::Launch;
use super::linear::{Epilogue, Groups, Product, Target, multiply, needs_any, tile_columns};
use super::mma_tile;
use super::norm::{Staged, norm_into, round_rows, stage, staged_at, staged_bytes};
use super::queue::CudaQueue;
use super::step::{self, Down, PAIRS, RouterArg, StepCall, StepInput, StepTarget};
use super::tile;
use super::weight::{CudaWeight, RECORD_COLUMNS};

const FAMILY: &str = "moe";

/// `TopK` of `moe.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TopKArg {
    logits: Matrix,
    gate: u64,
    experts: Matrix,
    weights: Matrix,
    count: i32,
    k: i32,
    renormalise: i32,
    tokens: i32,
}

/// `Group` of `moe.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GroupArg {
    batch: BatchArg,
    experts: Matrix,
    order: u64,
    tiles: u64,
    count: i32,
    k: i32,
    width: i32,
    capacity: i32,
}

/// `Combine` of `moe.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CombineArg {
    routed: Matrix,
    shared: Matrix,
    weights: Matrix,
    residual: Matrix,
    h: i32,
    k: i32,
}

/// Most tiles of `width` pairs that `pairs` pairs of `experts` experts can need.
fn tile_capacity(pairs: usize, experts: usize, width: usize) -> usize {
    pairs.min(pairs / width + experts.min(pairs))
}

/// Two products in a row of one expert kind: `down · (silu(gate x) ⊙ up x)`, as f32 rows of `out`.
struct FeedForward<'a> {
    profile: Profile,
    gate_up: &'a CudaWeight,
    down: &'a CudaWeight,
    /// Columns of `down`.
    width: usize,
    /// Rows of `down` of one expert.
    h: usize,
    /// Rows of the intermediate result.
    rows: usize,
    /// Tokens.
    columns: usize,
    groups: Option<Groups>,
    input: Staged,
    /// f32 `[rows, width]`.
    mid: u64,
    /// Staged `[rows, width]`.
    staged: u64,
    out: Matrix,
}

impl FeedForward<'_> {
    fn run(&self, backend: &Cuda, queue: &mut CudaQueue) -> Result<()> {
        let precision = self.down.activations();
        let first = self.groups;
        // Without quantisation the intermediate result is rounded where it is made.
        let native = precision == ActivationPrecision::Native && self.width.is_multiple_of(RECORD_COLUMNS);
        let input = staged_at(self.staged, self.rows, self.width, precision);
        let (out, epilogue) = match native {
            true => (input.values, Epilogue::Store),
            false => (Matrix::at(self.mid, self.width), Epilogue::Float),
        };
        let targets = [Target { weight: self.gate_up, out, rows: self.width, pair: true }];
        let (profile, columns) = (self.profile, self.columns);
        let product = Product { profile, input: self.input, columns, epilogue, groups: first, targets: &targets };
        multiply(backend, queue, &product)?;
        if !native {
            round_rows(backend, queue, out, (self.rows, self.width), input)?;
        }
        let targets = [Target { weight: self.down, out: self.out, rows: self.h, pair: false }];
        let groups = self.groups.map(|g| Groups { pairs_per_row: 1, ..g });
        let epilogue = Epilogue::Float;
        multiply(backend, queue, &Product { profile, input, columns, epilogue, groups, targets: &targets })
    }
}

/// The router of a step in one launch, with `logits` and `gate` as addresses of workspace; false if it takes the long way.
fn route_step(backend: &Cuda, queue: &mut CudaQueue, op: &Route<Cuda>, (logits, gate): (u64, u64)) -> Result<bool> {
    let (t, h, count, k) = (op.batch.rows, op.input.cols(), op.router.rows(), op.experts.cols());
    let (x, normed) = (Matrix::from(&op.input), Matrix::from(&op.hidden));
    let targets = [
        Target { weight: &op.router, out: Matrix::at(logits, count), rows: count, pair: false },
        Target { weight: &op.shared_gate, out: Matrix::at(gate, 1), rows: 1, pair: false },
    ];
    let list = targets.each_ref().map(|target| StepTarget { target, experts: 0 });
    let pieces: usize = targets.iter().map(|t| t.weight.pieces().len()).sum();
    let taken = op.batch.profile == Profile::Step
        && pieces == 2
        && step::norms(x, t, h, normed)
        && step::takes(backend, t, h, true, &list);
    if !taken {
        return Ok(false);
    }
    let router = RouterArg {
        logits: Matrix::at(logits, count),
        gate,
        experts: (&op.experts).into(),
        weights: (&op.weights).into(),
        arrivals: queue.counters_address(),
        count: count as i32,
        k: k as i32,
        renormalise: i32::from(op.renormalise),
        unused: 0,
    };
    let norm = Some(step::norm_of(&op.norm));
    let input = StepInput { x, column_scale: 0, columns: t, cols: h, norm, normed };
    let call = StepCall { epilogue: Epilogue::Float, experts: (Matrix::NONE, 1), router: Some(router) };
    step::run(backend, queue, &input, &call, &list)?;
    Ok(true)
}

/// The experts of a step in two launches; false if they take the long way.
fn experts_step(backend: &Cuda, queue: &mut CudaQueue, op: &Experts<Cuda>) -> Result<bool> {
    let (t, h, k) = (op.batch.rows, op.hidden.cols(), op.experts.cols());
    let (width, own, count) = (op.down.cols(), op.shared_down.cols(), op.down.rows() / h);
    let x = Matrix::from(&op.hidden);
    let native = [&op.gate_up, &op.down, &op.shared_gate_up, &op.shared_down]
        .iter()
        .all(|w| w.activations() == ActivationPrecision::Native);
    let wide = x.address().is_multiple_of(16) && x.stride().is_multiple_of(8);
    let whole = [h, width, own].iter().all(|n| n.is_multiple_of(RECORD_COLUMNS));
    if op.batch.profile != Profile::Step || t * k > PAIRS || !(native && wide && whole) {
        return Ok(false);
    }
    let [mid, shared] = queue.scratch([t * k * width * 2, t * own * 2])?;
    let (mid, shared) = (Matrix::at(mid, width), Matrix::at(shared, own));
    let targets = [
        Target { weight: &op.gate_up, out: mid, rows: width, pair: true },
        Target { weight: &op.shared_gate_up, out: shared, rows: own, pair: true },
    ];
    let list = [StepTarget { target: &targets[0], experts: count }, StepTarget { target: &targets[1], experts: 0 }];
    if !step::takes(backend, t, h, false, &list) || !step::takes_down(backend, &op.down, &op.shared_down, h) {
        return Ok(false);
    }
    let input = StepInput { x, column_scale: 0, columns: t, cols: h, norm: None, normed: Matrix::NONE };
    let call = StepCall { epilogue: Epilogue::Store, experts: ((&op.experts).into(), k), router: None };
    step::run(backend, queue, &input, &call, &list)?;
    let down = Down {
        routed: &op.down,
        own: &op.shared_down,
        mid,
        shared,
        experts: (&op.experts).into(),
        weights: (&op.weights).into(),
        residual: (&op.residual).into(),
        columns: t,
        k,
        h,
    };
    step::down(backend, queue, &down)?;
    Ok(true)
}

impl MoeOps for Cuda {
    fn route(&self, queue: &mut CudaQueue, op: Route<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let (t, h, count, k) = (op.batch.rows, op.input.cols(), op.router.rows(), op.experts.cols());
            let [logits, gate, space] = queue.scratch([t * count * 4, t * 4, staged_bytes(t, h)])?;
            if route_step(self, queue, op, (logits, gate))? {
                return Ok(());
            }
            norm_into(self, queue, &op.input, &op.norm, &op.hidden)?;
            let input = stage(self, queue, &op.hidden, None, ActivationPrecision::Native, space)?;
            let targets = [
                Target { weight: &op.router, out: Matrix::at(logits, count), rows: count, pair: false },
                Target { weight: &op.shared_gate, out: Matrix::at(gate, 1), rows: 1, pair: false },
            ];
            let (profile, epilogue) = (op.batch.profile, Epilogue::Float);
            multiply(self, queue, &Product { profile, input, columns: t, epilogue, groups: None, targets: &targets })?;
            let arguments = TopKArg {
                logits: Matrix::at(logits, count),
                gate,
                experts: (&op.experts).into(),
                weights: (&op.weights).into(),
                count: count as i32,
                k: k as i32,
                renormalise: i32::from(op.renormalise),
                tokens: t as i32,
            };
            let how = Launch { grid: [t.div_ceil(8) as u32, 1, 1], block: 256, shared: 0 };
            // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder.
            unsafe { queue.launch(self, FAMILY, "moe_top_k", how, &arguments) }
        })
    }

    fn experts(&self, queue: &mut CudaQueue, op: Experts<Self>) -> Result<()> {
        queue.submit(op, |queue, op| {
            let (t, h, k) = (op.batch.rows, op.hidden.cols(), op.experts.cols());
            let (width, shared) = (op.down.cols(), op.shared_down.cols());
            let (pairs, count) = (t * k, op.down.rows() / h);
            if experts_step(self, queue, op)? {
                return Ok(());
            }
            let any = needs_any(width) || needs_any(h);
            // Tiles are as wide as the pairs of an expert are likely to be.
            let likely = pairs.div_ceil(count.max(1));
            let (profile, weights) = (op.batch.profile, [&op.gate_up, &op.down]);
            let columns = tile::group_columns(self, profile, weights, likely);
            let tile = match columns.or_else(|| mma_tile::group_columns(self, profile, weights, likely)) {
                Some(columns) if !any => columns,
                _ if any => 8,
                _ => tile_columns(likely, true),
            };
            let capacity = tile_capacity(pairs, count, tile);
            let widest = width.max(shared);
            let [order, tiles, space, mid, staged, routed, own] = queue.scratch([
                pairs * 4,
                capacity * 16,
                staged_bytes(t, h),
                pairs.max(t) * widest * 4,
                staged_bytes(pairs.max(t), widest),
                pairs * h * 4,
                t * h * 4,
            ])?;
            let arguments = GroupArg {
                batch: (&op.batch).into(),
                experts: (&op.experts).into(),
                order,
                tiles,
                count: count as i32,
                k: k as i32,
                width: tile as i32,
                capacity: capacity as i32,
            };
            let how = Launch { grid: [1, 1, 1], block: 1024, shared: (count * 4) as u32 };
            // SAFETY: the struct is the kernel's parameter; order and tiles are parts of the workspace of these sizes.
            unsafe { queue.launch(self, FAMILY, "moe_group", how, &arguments)? };
            let (routed, own) = (Matrix::at(routed, h), Matrix::at(own, h));
            let groups = Groups { tiles, order, capacity, width: tile, pairs_per_row: k };
            FeedForward {
                profile: op.batch.profile,
                gate_up: &op.gate_up,
                down: &op.down,
                width,
                h,
                rows: pairs,
                columns: t,
                groups: Some(groups),
                input: stage(self, queue, &op.hidden, None, op.gate_up.activations(), space)?,
                mid,
                staged,
                out: routed,
            }
            .run(self, queue)?;
            FeedForward {
                profile: op.batch.profile,
                gate_up: &op.shared_gate_up,
                down: &op.shared_down,
                width: shared,
                h,
                rows: t,
                columns: t,
                groups: None,
                input: stage(self, queue, &op.hidden, None, op.shared_gate_up.activations(), space)?,
                mid,
                staged,
                out: own,
            }
            .run(self, queue)?;
            let arguments = CombineArg {
                routed,
                shared: own,
                weights: (&op.weights).into(),
                residual: (&op.residual).into(),
                h: h as i32,
                k: k as i32,
            };
            let how = Launch { grid: [t as u32, h.div_ceil(256) as u32, 1], block: 256, shared: 0 };
            // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder.
            unsafe { queue.launch(self, FAMILY, "moe_combine", how, &arguments) }
        })
    }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[
    ("moe_top_k", size_of::<TopKArg>()),
    ("moe_group", size_of::<GroupArg>()),
    ("moe_combine", size_of::<CombineArg>()),
];
