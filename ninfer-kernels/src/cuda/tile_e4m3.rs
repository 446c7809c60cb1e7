//! Products of prompts on Hopper whose weights and activations are E4M3 codes, by warpgroup matrix instructions on the codes.

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::segment::Profile;

use super::Cuda;
use super::buffer::Matrix;
use super::driver::Launch;
use super::kernels::images;
use super::linear::{Part, Product};
use super::queue::CudaQueue;
use super::weight::{ROW_BLOCK, RecordFormat, WeightArg};

const FAMILY: &str = "tile_e4m3";
/// Matrices of one launch.
const PARTS: usize = 6;
/// Threads of a block: two warpgroups that multiply, one that brings data; and of one that makes codes.
const BLOCK: u32 = 384;
const CODES_BLOCK: u32 = 512;
/// Row blocks of a tile.
const ROW_BLOCKS: usize = 16;
/// Columns of a stage, which are as many bytes of a token.
const COLUMNS: usize = 128;
/// Bytes of a row block in a stage: two records, and scales of 128 columns.
const SLOT_BYTES: usize = 2 * RecordFormat::Fp8.record_bytes() + 64;
/// Tokens whose codes lie together.
const GROUP: usize = 8;
/// Shared memory of a block.
const SHARED: usize = 227 << 10;
/// Of it, where results are turned, the barriers, and the room to align what follows.
const RESULTS: usize = 8 * 2 * 16 * 20 * 4;
const BARRIERS: usize = 128;
const ALIGNMENT: usize = 1024;

/// `CodePart` of `common/tile_e4m3.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PartArg {
    weight: WeightArg,
    out: Matrix,
    first_tile: i32,
    rows: i32,
    second_row: i32,
    run: i32,
    gap: i32,
    unused: i32,
}

/// `CodeTiles` of `common/tile_e4m3.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TilesArg {
    codes: u64,
    group_bytes: i64,
    column_scale: u64,
    columns: i32,
    parts: i32,
    epilogue: i32,
    row_tiles: i32,
    column_tiles: i32,
    stages: i32,
    part: [PartArg; PARTS],
}

/// `Codes` of `tile_e4m3.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CodesArg {
    /// The stride counts bytes.
    x: Matrix,
    rows: i32,
    cols: i32,
}

/// Tiles of so many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    /// 64 tokens.
    One,
    /// 128 tokens, for two blocks of a cluster each, which share the weights.
    Two,
}

impl Width {
    const fn kernel(self) -> &'static str {
        match self {
            Self::One => "e4m3_tile_64",
            Self::Two => "e4m3_tile_128",
        }
    }

    /// Tokens of a block.
    const fn tokens(self) -> usize {
        match self {
            Self::One => 64,
            Self::Two => 128,
        }
    }

    /// Blocks that compute neighbouring tiles.
    const fn peers(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }

    /// Cycles of a stage: what it multiplies, or brings at 30 bytes a cycle.
    const fn cycles(self) -> usize {
        match self {
            Self::One => 1400,
            Self::Two => 1200,
        }
    }

    const fn stage_bytes(self) -> usize {
        self.tokens() * COLUMNS + ROW_BLOCKS * SLOT_BYTES
    }

    /// Stages of the ring.
    const fn stages(self) -> usize {
        (SHARED - RESULTS - BARRIERS - ALIGNMENT) / self.stage_bytes()
    }

    const fn shared_bytes(self) -> usize {
        self.stages() * self.stage_bytes() + RESULTS + BARRIERS + ALIGNMENT
    }

    /// Tiles, or pairs of them, of a product.
    const fn tiles(self, row_tiles: usize, columns: usize) -> usize {
        row_tiles * columns.div_ceil(self.tokens() * self.peers())
    }

    /// The width with which a launch is done first.
    fn best(row_tiles: usize, columns: usize, sms: usize) -> Self {
        let time = |w: Self| w.tiles(row_tiles, columns).div_ceil((sms / w.peers()).max(1)) * w.cycles();
        if time(Self::One) < time(Self::Two) { Self::One } else { Self::Two }
    }
}

/// Bytes of a row of codes.
const fn code_bytes(cols: usize) -> usize {
    cols.next_multiple_of(COLUMNS)
}

/// Whether a product takes this route. The device, the profile, the operation and its matrices decide, so that all calls of
/// a prompt are of one numeric class. Codes take the place of the input, so it is all of the product or nothing.
fn is_taken(backend: &Cuda, product: &Product<'_>, parts: &[Part<'_>]) -> bool {
    let targets = &backend.kernels().selection().targets;
    let fits = |p: &Part<'_>| {
        p.target.weight.activations() == ActivationPrecision::E4m3Token
            && p.piece.layout.format == RecordFormat::Fp8
            && (!p.target.pair || p.target.rows.is_multiple_of(ROW_BLOCK))
            // The codes of a group are gathered in shared memory.
            && GROUP * code_bytes(p.target.weight.cols()) <= SHARED
    };
    // No device has run these kernels yet.
    backend.0.choice.tries_all
        && product.profile == Profile::Prefill
        && product.groups.is_none()
        && product.columns > 0
        && parts.iter().all(fits)
        && images().iter().any(|i| i.family == FAMILY && targets.contains(&i.target))
}

/// Launches a product that takes this route, and returns the rest: nothing or all of it.
pub(super) fn multiply<'a>(
    backend: &Cuda,
    queue: &mut CudaQueue,
    product: &Product<'_>,
    parts: Vec<Part<'a>>,
) -> Result<Vec<Part<'a>>> {
    if !is_taken(backend, product, &parts) {
        return Ok(parts);
    }
    let Some(first) = parts.first() else { return Ok(parts) };
    make_codes(backend, queue, product, first.target.weight.cols())?;
    for list in parts.chunks(PARTS) {
        launch(backend, queue, product, list)?;
    }
    Ok(Vec::new())
}

/// Turns staged bf16 values of codes into the codes, where they are.
fn make_codes(backend: &Cuda, queue: &mut CudaQueue, product: &Product<'_>, cols: usize) -> Result<()> {
    let arguments = CodesArg {
        x: Matrix::at(product.input.values.address(), 2 * product.input.values.stride()),
        rows: product.columns as i32,
        cols: cols as i32,
    };
    let grid = [product.columns.div_ceil(GROUP) as u32, 1, 1];
    let how = Launch { grid, block: CODES_BLOCK, shared: (GROUP * code_bytes(cols)) as u32 };
    // SAFETY: the struct is the kernel's parameter. Inputs of this precision are always staged in the workspace, in rows of
    // whole records of bf16, which are at least as long as their codes.
    unsafe { queue.launch(backend, FAMILY, "e4m3_groups", how, &arguments) }
}

fn launch(backend: &Cuda, queue: &mut CudaQueue, product: &Product<'_>, list: &[Part<'_>]) -> Result<()> {
    let empty = PartArg {
        weight: WeightArg::NONE,
        out: Matrix::NONE,
        first_tile: 0,
        rows: 0,
        second_row: 0,
        run: i32::MAX,
        gap: 0,
        unused: 0,
    };
    let mut part = [empty; PARTS];
    let mut row_tiles = 0;
    for (arg, p) in part.iter_mut().zip(list) {
        let (run, gap) = p.run_and_gap();
        *arg = PartArg {
            weight: p.weight(),
            out: p.out(product.epilogue),
            first_tile: row_tiles as i32,
            rows: p.rows() as i32,
            second_row: p.second_row() as i32,
            run,
            gap,
            unused: 0,
        };
        row_tiles += p.rows().div_ceil(ROW_BLOCKS * ROW_BLOCK / p.halves());
    }
    let sms = backend.sms();
    let width = Width::best(row_tiles, product.columns, sms);
    let arguments = TilesArg {
        codes: product.input.values.address(),
        group_bytes: (GROUP * 2 * product.input.values.stride()) as i64,
        column_scale: product.input.scales,
        columns: product.columns as i32,
        parts: list.len() as i32,
        epilogue: product.epilogue as i32,
        row_tiles: row_tiles as i32,
        column_tiles: product.columns.div_ceil(width.tokens()) as i32,
        stages: width.stages() as i32,
        part,
    };
    let clusters = width.tiles(row_tiles, product.columns).min((sms / width.peers()).max(1));
    let grid = [(clusters * width.peers()) as u32, 1, 1];
    let how = Launch { grid, block: BLOCK, shared: width.shared_bytes() as u32 };
    // SAFETY: the struct is the kernel's parameter. Input and results are views whose shapes the recorder checked, or parts
    // of the workspace of those shapes; the grid is made of whole clusters.
    unsafe { queue.launch(backend, FAMILY, width.kernel(), how, &arguments) }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] =
    &[("e4m3_tile_", size_of::<TilesArg>()), ("e4m3_groups", size_of::<CodesArg>())];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_fits_into_shared_memory_with_stages_to_spare() {
        for width in [Width::One, Width::Two] {
            assert!(width.shared_bytes() <= SHARED && width.stages() >= 4, "{width:?}");
            assert!(width.stages() * 16 <= BARRIERS, "{width:?}");
            assert_eq!((SLOT_BYTES % 16, width.tokens() * COLUMNS % 1024), (0, 0), "{width:?}");
            assert_eq!(width.kernel(), format!("e4m3_tile_{}", width.tokens()));
        }
    }

    #[test]
    fn widths_fill_the_device() {
        assert_eq!(Width::best(1, 1, 132), Width::Two);
        assert_eq!(Width::best(1, 0, 132), Width::Two);
        assert_eq!(Width::best(20, 256, 132), Width::Two);
        // One wave instead of two.
        assert_eq!(Width::best(67, 64, 132), Width::One);
        assert_eq!(Width::best(68, 4096, 132), Width::Two);
    }
}
