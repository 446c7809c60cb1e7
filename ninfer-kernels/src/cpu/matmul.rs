//! `y = x · Wᵀ` in the two numeric classes.
//!
//! Step: one dot product per element over sixteen lanes, in an order that depends only on the number of columns, so a
//! row's result is the same whatever else is in the call. Several rows share the decoding of a weight.
//!
//! Prefill: the GEMM library on tiles of 64 rows at fixed absolute positions, zero-padded, against panels of 64 weight rows
//! decoded to f32. Both tile sizes are constant, so a row's result does not depend on how the prompt was split.

use std::cell::RefCell;
use std::ops::Range;

use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::GroupFormat;
use ninfer_core::segment::Profile;

use super::parallel::{Shared, split};
use super::rows::Rows;
use super::simd::{Isa, dispatch, mul_add, reduce};
use super::weight::{Brains, CpuWeight, Decoder, Floats, Fp8, Group, Halves, LANES, Nvfp4, Packed, with_decoder};

/// Rows of a prefill tile.
const TILE: usize = 64;
/// Weight rows of a prefill panel.
const PANEL: usize = 64;

/// Input rows: f32, `stride` apart.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub(super) data: &'a [f32],
    pub(super) stride: usize,
}

impl<'a> Input<'a> {
    pub(super) fn new(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride }
    }

    #[inline(always)]
    fn row(&self, r: usize, cols: usize) -> &'a [f32] {
        &self.data[r * self.stride..][..cols]
    }
}

/// Output rows, written or added to.
pub(super) struct Output<'a> {
    data: Shared<f32>,
    stride: usize,
    add: bool,
    _borrow: std::marker::PhantomData<&'a mut [f32]>,
}

impl<'a> Output<'a> {
    /// `y ← x · Wᵀ`.
    pub(super) fn set(data: &'a mut [f32], stride: usize) -> Self {
        Self { data: Shared::new(data), stride, add: false, _borrow: std::marker::PhantomData }
    }

    /// `y ← y + x · Wᵀ`.
    pub(super) fn add(data: &'a mut [f32], stride: usize) -> Self {
        Self { add: true, ..Self::set(data, stride) }
    }

    /// # Safety
    /// No other thread may write column `col` at the same time, and rows must not share elements.
    #[inline(always)]
    unsafe fn put(&self, row: usize, col: usize, value: f32) {
        let at = row * self.stride + col;
        // SAFETY: forwarded to the caller.
        let out = unsafe { &mut self.data.range(at..at + 1)[0] };
        *out = if self.add { *out + value } else { value };
    }
}

/// `y = x · Wᵀ` for all rows of a call.
pub(super) fn matmul(isa: Isa, rows: &Rows, x: Input<'_>, weight: &CpuWeight, y: &Output<'_>) {
    let (n, k) = (weight.rows(), weight.cols());
    // Tasks own columns; with rows closer than that, a column of one row would be a column of the next one.
    assert!(n <= y.stride || rows.count <= 1, "an output has the shape of its product");
    match rows.profile {
        Profile::Step => {
            let work = n * k * rows.count;
            split(n, 4, work, &|range| dot_rows(isa, weight, range, 0, x, 0..rows.count, y));
        }
        Profile::Prefill => split(n, PANEL, n * k * rows.count, &|range| panels(rows, x, weight, range, y)),
    }
}

/// Step class: weight rows `range` against input rows `tokens`; weight row `r` gives column `r − column0`.
pub(super) fn dot_rows(
    isa: Isa,
    weight: &CpuWeight,
    range: Range<usize>,
    column0: usize,
    x: Input<'_>,
    tokens: Range<usize>,
    y: &Output<'_>,
) {
    for (part, rows) in weight.pieces(range) {
        let task = Task { part_first: part.first, column0, rows, cols: part.cols, tokens: tokens.clone(), x, y };
        with_decoder!(part, d => dot_part(isa, d, &task));
    }
}

struct Task<'a> {
    part_first: usize,
    column0: usize,
    rows: Range<usize>,
    cols: usize,
    tokens: Range<usize>,
    x: Input<'a>,
    y: &'a Output<'a>,
}

dispatch! {
    fn dot_part<D: Decoder>(decoder: D, task: &Task<'_>) = dot_part_body
}

#[inline(always)]
fn dot_part_body<const FMA: bool, D: Decoder>(decoder: D, task: &Task<'_>) {
    let mut token = task.tokens.start;
    while token < task.tokens.end {
        let left = task.tokens.end - token;
        // Blocks share the decoding of a weight (tokens) or the loads of the input (rows); the order inside one dot product
        // is the same in all of them.
        if left >= 4 {
            block::<FMA, D, 1, 4>(decoder, task, token);
            token += 4;
        } else if left >= 2 {
            block::<FMA, D, 2, 2>(decoder, task, token);
            token += 2;
        } else {
            block::<FMA, D, 4, 1>(decoder, task, token);
            token += 1;
        }
    }
}

/// All weight rows against `T` tokens from `token` on, `R` rows at a time.
#[inline(always)]
fn block<const FMA: bool, D: Decoder, const R: usize, const T: usize>(d: D, task: &Task<'_>, token: usize) {
    let mut row = task.rows.start;
    while row + R <= task.rows.end {
        tile::<FMA, D, R, T>(d, task, row, token);
        row += R;
    }
    while row < task.rows.end {
        tile::<FMA, D, 1, T>(d, task, row, token);
        row += 1;
    }
}

#[inline(always)]
fn tile<const FMA: bool, D: Decoder, const R: usize, const T: usize>(d: D, task: &Task<'_>, row: usize, token: usize) {
    let x: [&[f32]; T] = std::array::from_fn(|t| task.x.row(token + t, task.cols));
    let mut acc = [[[0.0f32; LANES]; T]; R];
    let full = task.cols / LANES;
    for chunk in 0..full {
        let inputs: [&[f32; LANES]; T] = std::array::from_fn(|t| chunk_of(x[t], chunk));
        for r in 0..R {
            let w = d.chunk(row + r, chunk);
            for t in 0..T {
                for l in 0..LANES {
                    acc[r][t][l] = mul_add::<FMA>(w[l], inputs[t][l], acc[r][t][l]);
                }
            }
        }
    }
    let rest = task.cols % LANES;
    if rest > 0 {
        for r in 0..R {
            let w = d.chunk(row + r, full);
            for t in 0..T {
                for l in 0..rest {
                    acc[r][t][l] = mul_add::<FMA>(w[l], x[t][full * LANES + l], acc[r][t][l]);
                }
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            let column = task.part_first + row + r - task.column0;
            // SAFETY: tasks that run at the same time have disjoint weight rows, so disjoint columns; `matmul` checked the
            // stride, and the scratch rows of experts are as wide as their product.
            unsafe { task.y.put(token + t, column, reduce(acc[r][t])) };
        }
    }
}

#[inline(always)]
fn chunk_of(x: &[f32], chunk: usize) -> &[f32; LANES] {
    const ZERO: &[f32; LANES] = &[0.0; LANES];
    x[chunk * LANES..].first_chunk().unwrap_or(ZERO)
}

thread_local! {
    /// Decoded panel, padded tile and product of the thread; grows once.
    static SCRATCH: RefCell<[Vec<f32>; 3]> = const { RefCell::new([const { Vec::new() }; 3]) };
}

/// Prefill class: weight rows `range` (whole panels) against every tile of the call.
fn panels(rows: &Rows, x: Input<'_>, weight: &CpuWeight, range: Range<usize>, y: &Output<'_>) {
    let k = weight.cols();
    SCRATCH.with_borrow_mut(|[panel, tile, product]| {
        grow(panel, PANEL * k);
        grow(tile, TILE * k);
        grow(product, TILE * PANEL);
        for first in range.clone().step_by(PANEL) {
            let n = PANEL.min(range.end - first);
            for (part, piece) in weight.pieces(first..first + n) {
                for r in piece {
                    part.decode_row(r, &mut panel[(part.first + r - first) * k..][..k]);
                }
            }
            for block in rows.tiles(TILE) {
                tile[..TILE * k].fill(0.0);
                for i in 0..block.len {
                    tile[(block.offset + i) * k..][..k].copy_from_slice(x.row(block.row + i, k));
                }
                gemm(&tile[..TILE * k], &panel[..n * k], &mut product[..TILE * n], n, k);
                for i in 0..block.len {
                    for c in 0..n {
                        // SAFETY: tasks that run at the same time have disjoint panels, so disjoint columns; `matmul` checked
                        // the stride.
                        unsafe { y.put(block.row + i, first + c, product[(block.offset + i) * n + c]) };
                    }
                }
            }
        }
    });
}

fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

/// `product [64, n] = tile [64, k] · panelᵀ`, all row-major.
fn gemm(tile: &[f32], panel: &[f32], product: &mut [f32], n: usize, k: usize) {
    assert!(tile.len() == TILE * k && panel.len() == n * k && product.len() == TILE * n);
    let (k_stride, n_stride) = (k.cast_signed(), n.cast_signed());
    // SAFETY: the three matrices have exactly these extents and strides, by the assertion, and do not overlap.
    unsafe {
        gemm::gemm(
            TILE,
            n,
            k,
            product.as_mut_ptr(),
            1,
            n_stride,
            false,
            tile.as_ptr(),
            1,
            k_stride,
            panel.as_ptr(),
            k_stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
