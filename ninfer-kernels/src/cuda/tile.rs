//! Products of prompts on Hopper: warpgroup matrix instructions over wide tiles of weights and tokens.

use ninfer_core::Result;
use ninfer_core::segment::Profile;

use super::Cuda;
use super::buffer::Matrix;
use super::driver::Launch;
use super::kernels::images;
use super::linear::{Groups, Part, PartArg, Product};
use super::queue::CudaQueue;
use super::weight::{CudaWeight, ROW_BLOCK, WeightLayout};

/// Matrices of one launch.
const PARTS: usize = 6;
/// Threads of a block: two warpgroups that multiply, one that brings data.
const BLOCK: u32 = 384;
/// Row blocks of a tile.
const ROW_BLOCKS: usize = 16;
/// Bytes of a token's 64 columns, and of the scales of a row block for 128 columns.
const TOKEN_BYTES: usize = 128;
const SCALE_BYTES: usize = 64;
/// Most stages of the ring.
const STAGES: usize = 12;
/// Shared memory of a block.
const SHARED: usize = 227 << 10;
/// Of it, where results are turned, the barriers, and the room to align what follows.
const RESULTS: usize = 8 * 2 * 16 * 20 * 4;
const BARRIERS: usize = 256;
const ALIGNMENT: usize = 1024;
/// Widths of tiles in tokens, and the time of 64 columns of one, in cycles, as far as one tile is like another.
const WIDTHS: [(usize, usize); 4] = [(32, 500), (64, 620), (96, 820), (128, 1070)];

/// `Tiles` of `common/tile.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct TilesArg {
    x: Matrix,
    column_scale: u64,
    tiles: u64,
    order: u64,
    columns: i32,
    parts: i32,
    epilogue: i32,
    pairs_per_row: i32,
    row_tiles: i32,
    column_tiles: i32,
    stages: i32,
    slot_bytes: i32,
    part: [PartArg; PARTS],
}

/// Form of a launch, from which the kernel's name and its shared memory follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    /// Tokens of a tile.
    width: usize,
    /// Bytes of a record with its scales, the largest of all parts.
    slot_bytes: usize,
}

impl Shape {
    /// Family and kernel have one name.
    const fn kernel(self) -> &'static str {
        match self.width {
            32 => "tile_32",
            64 => "tile_64",
            96 => "tile_96",
            _ => "tile_128",
        }
    }

    /// Bytes of a stage: 64 columns of the tokens, and a record of each row block with its scales.
    const fn stage_bytes(self) -> usize {
        self.width * TOKEN_BYTES + ROW_BLOCKS * self.slot_bytes
    }

    /// Stages of the ring.
    const fn stages(self) -> usize {
        let fit = (SHARED - RESULTS - BARRIERS - ALIGNMENT) / self.stage_bytes();
        if fit < STAGES { fit } else { STAGES }
    }

    const fn shared_bytes(self) -> usize {
        self.stages() * self.stage_bytes() + RESULTS + BARRIERS + ALIGNMENT
    }
}

/// Bytes of a record of a layout with its scales.
fn slot_bytes(layout: &WeightLayout) -> usize {
    layout.format.record_bytes() + if layout.block_scales { SCALE_BYTES } else { 0 }
}

/// Whether products of a profile take this route. With the rows of a matrix it is all that decides, so that all calls of
/// a prompt are of one numeric class.
fn is_taken(backend: &Cuda, profile: Profile) -> bool {
    let targets = &backend.kernels().selection().targets;
    let is_there = |name| images().iter().any(|i| i.family == name && targets.contains(&i.target));
    profile == Profile::Prefill && WIDTHS.iter().all(|w| is_there(Shape { width: w.0, slot_bytes: 0 }.kernel()))
}

/// Pairs in a tile for experts that get `likely` pairs each, if the products with these weights take this route.
pub(super) fn group_columns(
    backend: &Cuda,
    profile: Profile,
    weights: [&CudaWeight; 2],
    likely: usize,
) -> Option<usize> {
    let taken = is_taken(backend, profile) && weights.iter().all(|w| w.pieces().len() == 1);
    taken.then_some(match likely {
        0..=16 => 32,
        17..=64 => 64,
        _ => 128,
    })
}

/// The width with which a launch is done first, if tiles of all widths keep every multiprocessor as busy.
fn best_width(row_tiles: usize, columns: usize, sms: usize) -> usize {
    let time = |&(width, cycles): &(usize, usize)| (row_tiles * columns.div_ceil(width)).div_ceil(sms) * cycles;
    WIDTHS.iter().min_by_key(|w| time(w)).map_or(128, |w| w.0)
}

/// Launches what takes this route of a product; returns the rest.
pub(super) fn multiply<'a>(
    backend: &Cuda,
    queue: &mut CudaQueue,
    product: &Product<'_>,
    parts: Vec<Part<'a>>,
) -> Result<Vec<Part<'a>>> {
    // Experts whose rows begin anywhere come in other tiles.
    let other = |g: &Groups| WIDTHS.iter().all(|w| w.0 != g.width);
    if !is_taken(backend, product.profile) || product.groups.as_ref().is_some_and(other) {
        return Ok(parts);
    }
    let (mut now, rest): (Vec<_>, Vec<_>) = parts.into_iter().partition(|p| {
        let rows = if p.target.pair || product.groups.is_some() { p.target.rows } else { 0 };
        rows.is_multiple_of(ROW_BLOCK)
    });
    while !now.is_empty() {
        let more = now.split_off(now.len().min(PARTS));
        launch(backend, queue, product, &now)?;
        now = more;
    }
    Ok(rest)
}

fn launch(backend: &Cuda, queue: &mut CudaQueue, product: &Product<'_>, list: &[Part<'_>]) -> Result<()> {
    let mut part = [PartArg::NONE; PARTS];
    let mut row_tiles = 0;
    for (arg, p) in part.iter_mut().zip(list) {
        *arg = p.argument(row_tiles, product.epilogue);
        row_tiles += p.rows().div_ceil(ROW_BLOCKS * ROW_BLOCK / p.halves());
    }
    let sms = backend.sms();
    let (width, column_tiles) = match &product.groups {
        Some(groups) => (groups.width, groups.capacity),
        None => {
            let width = best_width(row_tiles, product.columns, sms);
            (width, product.columns.div_ceil(width))
        }
    };
    let shape = Shape { width, slot_bytes: list.iter().map(|p| slot_bytes(&p.piece.layout)).max().unwrap_or(0) };
    let arguments = TilesArg {
        x: product.input.values,
        column_scale: product.input.scales,
        tiles: product.groups.map_or(0, |g| g.tiles),
        order: product.groups.map_or(0, |g| g.order),
        columns: product.columns as i32,
        parts: list.len() as i32,
        epilogue: product.epilogue as i32,
        pairs_per_row: product.groups.map_or(1, |g| g.pairs_per_row) as i32,
        row_tiles: row_tiles as i32,
        column_tiles: column_tiles as i32,
        stages: shape.stages() as i32,
        slot_bytes: shape.slot_bytes as i32,
        part,
    };
    let blocks = (row_tiles * column_tiles).min(sms);
    let how = Launch { grid: [blocks as u32, 1, 1], block: BLOCK, shared: shape.shared_bytes() as u32 };
    // SAFETY: the struct is the kernel's parameter. Input and results are views whose shapes the recorder checked, or parts
    // of the workspace of those shapes.
    unsafe { queue.launch(backend, shape.kernel(), shape.kernel(), how, &arguments) }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[("tile_", size_of::<TilesArg>())];

#[cfg(test)]
mod tests {
    use super::*;

    use ninfer_core::WeightFormat;
    use ninfer_core::format::GroupFormat;

    const GROUPS: [WeightFormat; 4] = [
        WeightFormat::Group(GroupFormat::Q4),
        WeightFormat::Group(GroupFormat::Q5),
        WeightFormat::Group(GroupFormat::Q6),
        WeightFormat::Group(GroupFormat::W8),
    ];

    #[test]
    fn every_shape_fits_into_shared_memory_with_stages_to_spare() {
        for format in [WeightFormat::Bf16, WeightFormat::Fp8Block, WeightFormat::Nvfp4].into_iter().chain(GROUPS) {
            for (width, _) in WIDTHS {
                let shape = Shape { width, slot_bytes: slot_bytes(&WeightLayout::new(format, 16, 64)) };
                assert!(shape.shared_bytes() <= SHARED && (4..=STAGES).contains(&shape.stages()), "{shape:?}");
                assert!(shape.stages() * 16 <= BARRIERS, "{shape:?}");
                assert_eq!((shape.slot_bytes % 16, shape.width * TOKEN_BYTES % 1024), (0, 0), "{shape:?}");
                assert_eq!(shape.kernel(), format!("tile_{width}"));
            }
        }
    }

    #[test]
    fn widths_fill_the_device() {
        assert_eq!(best_width(1, 1, 132), 32);
        assert_eq!(best_width(1, 1024, 132), 32);
        // Two waves of narrower tiles instead of two of the widest.
        assert_eq!(best_width(20, 1024, 132), 96);
        assert_eq!(best_width(272, 4096, 132), 128);
    }
}
