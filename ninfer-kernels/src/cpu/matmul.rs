//! `y = x · Wᵀ` in the two numeric classes.
//!
//! Step: one dot product per element over sixteen lanes, in an order that depends only on the number of columns, so a
//! row's result is the same whatever else is in the call. Several rows share the decoding of a weight.
//!
//! Prefill: the GEMM library on tiles of 64 rows at fixed absolute positions, zero-padded, against panels of 256 weight
//! rows decoded to f32. Both tile sizes are constant, so a row's result does not depend on how the prompt was split.

use std::cell::RefCell;
use std::ops::Range;

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::GroupFormat;
use ninfer_core::segment::Profile;

use super::codes::Codes;
use super::parallel::{Shared, split};
use super::reserve;
use super::rows::Rows;
use super::simd::{Isa, Lanes, dispatch};
use super::weight::{
    Brains, CpuWeight, DecodeRow, Decoder, Floats, Fp8, Group, Halves, LANES, Nvfp4, Packed, with_decoder,
};

/// Rows of a prefill tile.
const TILE: usize = 64;
/// Weight rows of a prefill panel.
const PANEL: usize = 256;

/// Input rows: f32, `stride` apart, or codes with a scale for each row.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    pub(super) data: &'a [f32],
    pub(super) stride: usize,
    scales: Option<&'a [f32]>,
}

impl<'a> Input<'a> {
    pub(super) fn new(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride, scales: None }
    }

    /// Rows whose products are to be multiplied by `scales`.
    pub(super) fn scaled(data: &'a [f32], stride: usize, scales: &'a [f32]) -> Self {
        Self { data, stride, scales: Some(scales) }
    }

    #[inline(always)]
    pub(super) fn row(&self, r: usize, cols: usize) -> &'a [f32] {
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

    /// Writes or adds `scale · values`; without a scale, the values.
    ///
    /// # Safety
    /// No other thread may write these elements at the same time.
    unsafe fn put_row(&self, row: usize, col: usize, values: &[f32], scale: Option<f32>) {
        let at = row * self.stride + col;
        // SAFETY: forwarded to the caller.
        let out = unsafe { self.data.range(at..at + values.len()) };
        let pairs = out.iter_mut().zip(values);
        match (self.add, scale) {
            (true, None) => pairs.for_each(|(out, value)| *out += value),
            (true, Some(scale)) => pairs.for_each(|(out, value)| *out += scale * value),
            (false, None) => out.copy_from_slice(values),
            (false, Some(scale)) => pairs.for_each(|(out, value)| *out = scale * value),
        }
    }
}

/// `y = x · Wᵀ` for all rows of a call; `codes` is room for the rows in the precision that the weight takes them in.
pub(super) fn matmul(
    isa: Isa,
    rows: &Rows,
    x: Input<'_>,
    weight: &CpuWeight,
    y: &Output<'_>,
    codes: &mut Codes,
) -> Result<()> {
    let x = codes.of(isa, weight, rows.count, x)?;
    let (n, k) = (weight.rows(), weight.cols());
    // Tasks own columns; with rows closer than that, a column of one row would be a column of the next one.
    assert!(n <= y.stride || rows.count <= 1, "an output has the shape of its product");
    match rows.profile {
        Profile::Step => {
            let work = n * k * rows.count;
            split(n, 4, work, &|range| dot_rows(isa, weight, range, 0, x, 0..rows.count, y));
        }
        Profile::Prefill => {
            // One task for each panel and group of tiles; several groups where there are few panels.
            let (panels, tiles) = (n.div_ceil(PANEL), rows.tiles(TILE).count());
            let wanted = (2 * rayon::current_num_threads()).div_ceil(panels.max(1));
            let groups = if rows.are_disjoint() { wanted.clamp(1, tiles.max(1)) } else { 1 };
            split(panels * groups, 1, n * k * rows.count, &|range| {
                for task in range {
                    let (first, group) = (task / groups * PANEL, task % groups);
                    let tiles = tiles * group / groups..tiles * (group + 1) / groups;
                    panel(isa, rows, x, weight, first..n.min(first + PANEL), tiles, y);
                }
            });
        }
    }
    Ok(())
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
fn dot_part_body<L: Lanes, D: Decoder>(decoder: D, task: &Task<'_>) {
    let mut token = task.tokens.start;
    while token < task.tokens.end {
        // Blocks share the decoding of a weight (tokens) or the loads of the input (rows); the order inside one dot product
        // is the same in all of them.
        let (count, rows) = match task.tokens.end - token {
            1 => (1, 4),
            2 | 3 => (2, 2),
            _ => (4, 1),
        };
        let mut row = task.rows.start;
        while row < task.rows.end {
            match (count, task.rows.end - row < rows) {
                (1, false) => tile::<L, D, 4, 1>(decoder, task, row, token, four_rows),
                (2, false) => tile::<L, D, 2, 2>(decoder, task, row, token, two_by_two),
                (1, true) => tile::<L, D, 1, 1>(decoder, task, row, token, one),
                (2, true) => tile::<L, D, 1, 2>(decoder, task, row, token, two_tokens),
                _ => tile::<L, D, 1, 4>(decoder, task, row, token, four_tokens),
            }
            row += if task.rows.end - row < rows { 1 } else { rows };
        }
        token += count;
    }
}

/// Dot products of `R` weight rows from `row` on with `T` tokens from `token` on; `whole` does all whole chunks.
#[inline(always)]
fn tile<L: Lanes, D: Decoder, const R: usize, const T: usize>(
    d: D,
    task: &Task<'_>,
    row: usize,
    token: usize,
    whole: impl Fn(&[D::Row; R], &[&[[f32; LANES]]; T], usize) -> [[L; T]; R],
) {
    let x: [&[f32]; T] = std::array::from_fn(|t| task.x.row(token + t, task.cols));
    let w: [D::Row; R] = std::array::from_fn(|r| d.row(row + r));
    let full = task.cols / LANES;
    let acc = whole(&w, &x.map(|x| &x.as_chunks().0[..full]), full);
    for r in 0..R {
        // A loop, not a closure: a closure would be compiled without the features of this copy.
        let mut sums = [0.0; T];
        for t in 0..T {
            sums[t] = acc[r][t].sum();
        }
        if !task.cols.is_multiple_of(LANES) {
            let w = w[r].rest(full);
            for t in 0..T {
                for (w, x) in w.iter().zip(&x[t][full * LANES..]) {
                    sums[t] = L::scalar(*w, *x, sums[t]);
                }
            }
        }
        let column = task.part_first + row + r - task.column0;
        for (t, sum) in sums.into_iter().enumerate() {
            let sum = match task.x.scales {
                Some(scales) => scales[token + t] * sum,
                None => sum,
            };
            // SAFETY: tasks that run at the same time have disjoint weight rows, so disjoint columns; `matmul` checked the
            // stride, and the scratch rows of experts are as wide as their product.
            unsafe { task.y.put(token + t, column, sum) };
        }
    }
}

// The five block shapes, written out so that the accumulators stay in registers.

#[inline(always)]
fn one<L: Lanes, W: DecodeRow>([w]: &[W; 1], [x]: &[&[[f32; LANES]]; 1], full: usize) -> [[L; 1]; 1] {
    let mut a = L::zero();
    for i in 0..full {
        a = w.chunk::<L>(i).mul_add(L::load(&x[i]), a);
    }
    [[a]]
}

#[inline(always)]
fn two_tokens<L: Lanes, W: DecodeRow>([w]: &[W; 1], [x, y]: &[&[[f32; LANES]]; 2], full: usize) -> [[L; 2]; 1] {
    let (mut a, mut b) = (L::zero(), L::zero());
    for i in 0..full {
        let w: L = w.chunk(i);
        a = w.mul_add(L::load(&x[i]), a);
        b = w.mul_add(L::load(&y[i]), b);
    }
    [[a, b]]
}

#[inline(always)]
fn four_tokens<L: Lanes, W: DecodeRow>([w]: &[W; 1], x: &[&[[f32; LANES]]; 4], full: usize) -> [[L; 4]; 1] {
    let (mut a, mut b, mut c, mut d) = (L::zero(), L::zero(), L::zero(), L::zero());
    for i in 0..full {
        let w: L = w.chunk(i);
        a = w.mul_add(L::load(&x[0][i]), a);
        b = w.mul_add(L::load(&x[1][i]), b);
        c = w.mul_add(L::load(&x[2][i]), c);
        d = w.mul_add(L::load(&x[3][i]), d);
    }
    [[a, b, c, d]]
}

#[inline(always)]
fn two_by_two<L: Lanes, W: DecodeRow>([v, w]: &[W; 2], [x, y]: &[&[[f32; LANES]]; 2], full: usize) -> [[L; 2]; 2] {
    let (mut a, mut b, mut c, mut d) = (L::zero(), L::zero(), L::zero(), L::zero());
    for i in 0..full {
        let (x, y) = (L::load(&x[i]), L::load(&y[i]));
        let v: L = v.chunk(i);
        a = v.mul_add(x, a);
        b = v.mul_add(y, b);
        let w: L = w.chunk(i);
        c = w.mul_add(x, c);
        d = w.mul_add(y, d);
    }
    [[a, b], [c, d]]
}

#[inline(always)]
fn four_rows<L: Lanes, W: DecodeRow>(w: &[W; 4], [x]: &[&[[f32; LANES]]; 1], full: usize) -> [[L; 1]; 4] {
    let (mut a, mut b, mut c, mut d) = (L::zero(), L::zero(), L::zero(), L::zero());
    for i in 0..full {
        let x = L::load(&x[i]);
        a = w[0].chunk::<L>(i).mul_add(x, a);
        b = w[1].chunk::<L>(i).mul_add(x, b);
        c = w[2].chunk::<L>(i).mul_add(x, c);
        d = w[3].chunk::<L>(i).mul_add(x, d);
    }
    [[a], [b], [c], [d]]
}

thread_local! {
    /// Decoded panel, padded tile and product of the thread; grows once.
    static SCRATCH: RefCell<[Vec<f32>; 3]> = const { RefCell::new([const { Vec::new() }; 3]) };
}

/// Makes room for prefill calls with up to `columns` columns on this thread.
pub(super) fn reserve(columns: usize) -> Result<()> {
    SCRATCH.with_borrow_mut(|[panel, tile, product]| {
        for list in [panel, tile] {
            reserve::grow(list, PANEL.max(TILE).saturating_mul(columns))?;
        }
        reserve::grow(product, TILE * PANEL)
    })
}

/// Prefill class: the weight rows of one panel against some of the tiles of the call.
fn panel(
    isa: Isa,
    rows: &Rows,
    x: Input<'_>,
    weight: &CpuWeight,
    columns: Range<usize>,
    tiles: Range<usize>,
    y: &Output<'_>,
) {
    let (k, n, first) = (weight.cols(), columns.len(), columns.start);
    SCRATCH.with_borrow_mut(|[panel, padded, product]| {
        grow(panel, PANEL * k);
        grow(padded, TILE * k);
        grow(product, TILE * PANEL);
        for (part, piece) in weight.pieces(columns) {
            for r in piece {
                part.decode_row(isa, r, &mut panel[(part.first + r - first) * k..][..k]);
            }
        }
        for block in rows.tiles(TILE).skip(tiles.start).take(tiles.len()) {
            let tile = if block.len == TILE {
                Input::new(&x.data[block.row * x.stride..], x.stride)
            } else {
                padded[..TILE * k].fill(0.0);
                for i in 0..block.len {
                    padded[(block.offset + i) * k..][..k].copy_from_slice(x.row(block.row + i, k));
                }
                Input::new(padded, k)
            };
            gemm(tile, &panel[..n * k], &mut product[..TILE * n], n, k);
            for i in 0..block.len {
                let row = block.row + i;
                let scale = x.scales.map(|scales| scales[row]);
                // SAFETY: tasks that run at the same time have disjoint columns or disjoint tiles; `matmul` checked the stride.
                unsafe { y.put_row(row, first, &product[(block.offset + i) * n..][..n], scale) };
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
fn gemm(tile: Input<'_>, panel: &[f32], product: &mut [f32], n: usize, k: usize) {
    assert!(tile.stride >= k && tile.data.len() >= (TILE - 1) * tile.stride + k);
    assert!(panel.len() == n * k && product.len() == TILE * n);
    let (k_stride, n_stride, tile_stride) = (k.cast_signed(), n.cast_signed(), tile.stride.cast_signed());
    // SAFETY: the three matrices lie inside their slices with these extents and strides, by the assertions, and `product` is
    // borrowed exclusively.
    unsafe {
        gemm::gemm(
            TILE,
            n,
            k,
            product.as_mut_ptr(),
            1,
            n_stride,
            false,
            tile.data.as_ptr(),
            1,
            tile_stride,
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
