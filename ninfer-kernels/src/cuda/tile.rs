//! Products of prompts on Hopper: warpgroup matrix instructions over wide tiles of weights and tokens.

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::segment::Profile;

use super::Cuda;
use super::buffer::Matrix;
use super::driver::Launch;
use super::kernels::images;
use super::linear::{Epilogue, Part, Product};
use super::queue::CudaQueue;
use super::weight::{CudaWeight, ROW_BLOCK, RecordFormat, WeightArg};

/// Matrices of one launch.
const PARTS: usize = 6;
/// Threads of a block: two warpgroups that multiply, one that brings data.
const BLOCK: u32 = 384;
/// Row blocks of a tile.
const ROW_BLOCKS: usize = 16;
/// Bytes of a token's 64 columns.
const TOKEN_BYTES: usize = 128;
/// Most stages of the ring.
const STAGES: usize = 12;
/// Shared memory of a block.
const SHARED: usize = 227 << 10;
/// Of it, where results are turned, the barriers, and the room to align what follows.
const RESULTS: usize = 8 * 2 * 16 * 20 * 4;
const BARRIERS: usize = 256;
const ALIGNMENT: usize = 1024;
/// Widths of tiles in tokens, and the time of 64 columns of one, in cycles, as far as one tile is like another.
const WIDTHS: [(usize, usize); 5] = [(32, 450), (64, 600), (80, 700), (96, 810), (128, 1050)];

/// `TilePart` of `common/tile.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PartArg {
    weight: WeightArg,
    out: Matrix,
    first_tile: i32,
    rows: i32,
    second_row: i32,
    expert_rows: i32,
    run: i32,
    gap: i32,
}

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
    part: [PartArg; PARTS],
}

/// Form of a kernel's tiles, from which its name, its shared memory and its grid follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    format: RecordFormat,
    /// Tokens of a tile.
    width: usize,
}

impl Shape {
    const fn family(self) -> &'static str {
        match self.format {
            RecordFormat::Bf16 => "tile_bf16",
            RecordFormat::Fp8 => "tile_fp8",
            RecordFormat::Nvfp4 => "tile_nvfp4",
            RecordFormat::Q4 => "tile_q4",
            RecordFormat::Q5 => "tile_q5",
            RecordFormat::Q6 => "tile_q6",
            RecordFormat::W8 => "tile_w8",
        }
    }

    fn kernel(self) -> &'static str {
        macro_rules! names {
            ($($format:ident: $text:literal),+) => {
                match (self.format, self.width) {
                    $((RecordFormat::$format, 32) => concat!("tile_", $text, "_32"),
                    (RecordFormat::$format, 64) => concat!("tile_", $text, "_64"),
                    (RecordFormat::$format, 80) => concat!("tile_", $text, "_80"),
                    (RecordFormat::$format, 96) => concat!("tile_", $text, "_96"),
                    (RecordFormat::$format, _) => concat!("tile_", $text, "_128"),)+
                }
            };
        }
        names!(Bf16: "bf16", Fp8: "fp8", Nvfp4: "nvfp4", Q4: "q4", Q5: "q5", Q6: "q6", W8: "w8")
    }

    /// Bytes of a stage: 64 columns of the tokens, and a record of each row block with its scales, `stage_bytes` of
    /// `common/tile.cuh`.
    const fn stage_bytes(self) -> usize {
        let scales = if matches!(self.format, RecordFormat::Fp8) { 64 } else { 0 };
        self.width * TOKEN_BYTES + ROW_BLOCKS * (self.format.record_bytes() + scales)
    }

    /// Stages of the ring, `stages` of `common/tile.cuh`.
    const fn stages(self) -> usize {
        let fit = (SHARED - RESULTS - BARRIERS - ALIGNMENT) / self.stage_bytes();
        if fit < STAGES { fit } else { STAGES }
    }

    const fn shared_bytes(self) -> usize {
        self.stages() * self.stage_bytes() + RESULTS + BARRIERS + ALIGNMENT
    }
}

/// Whether products of a profile with weights of a format take this route. It depends on nothing else but the rows of a
/// matrix, so that all calls of a prompt are of one numeric class.
fn is_taken(backend: &Cuda, profile: Profile, format: RecordFormat) -> bool {
    let family = Shape { format, width: 128 }.family();
    let targets = &backend.kernels().selection().targets;
    profile == Profile::Prefill && images().iter().any(|i| i.family == family && targets.contains(&i.target))
}

/// Pairs in a tile for experts that get `likely` pairs each, if the products with all these weights take this route.
pub(super) fn group_columns(
    backend: &Cuda,
    profile: Profile,
    weights: [&CudaWeight; 2],
    likely: usize,
) -> Option<usize> {
    let taken = weights.iter().all(|w| is_taken(backend, profile, RecordFormat::of(w.format())));
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
    let (mut taken, rest): (Vec<_>, Vec<_>) = parts.into_iter().partition(|p| {
        let rows = if p.target.pair || product.groups.is_some() { p.target.rows } else { 0 };
        rows.is_multiple_of(ROW_BLOCK) && is_taken(backend, product.profile, p.piece.layout.format)
    });
    while let Some(first) = taken.first() {
        let format = first.piece.layout.format;
        let (mut now, later): (Vec<_>, Vec<_>) = taken.into_iter().partition(|p| p.piece.layout.format == format);
        taken = later;
        while !now.is_empty() {
            let more = now.split_off(now.len().min(PARTS));
            launch(backend, queue, product, format, &now)?;
            now = more;
        }
    }
    Ok(rest)
}

fn launch(
    backend: &Cuda,
    queue: &mut CudaQueue,
    product: &Product<'_>,
    format: RecordFormat,
    list: &[Part<'_>],
) -> Result<()> {
    let empty = PartArg {
        weight: WeightArg::NONE,
        out: Matrix::NONE,
        first_tile: 0,
        rows: 0,
        second_row: 0,
        expert_rows: 0,
        run: i32::MAX,
        gap: 0,
    };
    let mut part = [empty; PARTS];
    let size = if product.epilogue == Epilogue::Float { 4 } else { 2 };
    let mut row_tiles = 0;
    for (part, Part { target, piece }) in part.iter_mut().zip(list) {
        let whole = target.weight.pieces().len() == 1;
        let rows = if whole { target.rows } else { piece.layout.rows };
        let halves = if target.pair { 2 } else { 1 };
        *part = PartArg {
            weight: target.weight.argument_of(piece),
            out: Matrix::at(target.out.address() + (piece.first * size) as u64, target.out.stride()),
            first_tile: row_tiles as i32,
            rows: rows as i32,
            second_row: if target.pair { rows as i32 } else { 0 },
            expert_rows: (rows * halves) as i32,
            run: if whole { i32::MAX } else { piece.run as i32 },
            gap: if whole { 0 } else { (piece.stride - piece.run) as i32 },
        };
        row_tiles += rows.div_ceil(ROW_BLOCKS * ROW_BLOCK / halves);
    }
    let sms = backend.sms();
    let (width, column_tiles) = match &product.groups {
        Some(groups) => (groups.width, groups.capacity),
        None => {
            let width = best_width(row_tiles, product.columns, sms);
            (width, product.columns.div_ceil(width))
        }
    };
    let shape = Shape { format, width };
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
        part,
    };
    let blocks = (row_tiles * column_tiles).min(sms);
    let how = Launch { grid: [blocks as u32, 1, 1], block: BLOCK, shared: shape.shared_bytes() as u32 };
    // SAFETY: the struct is the kernel's parameter. Input and results are views whose shapes the recorder checked, or parts
    // of the workspace of those shapes.
    unsafe { queue.launch(backend, shape.family(), shape.kernel(), how, &arguments) }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[("tile_", size_of::<TilesArg>())];

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [RecordFormat; 7] = [
        RecordFormat::Bf16,
        RecordFormat::Fp8,
        RecordFormat::Nvfp4,
        RecordFormat::Q4,
        RecordFormat::Q5,
        RecordFormat::Q6,
        RecordFormat::W8,
    ];

    #[test]
    fn every_shape_fits_into_shared_memory_with_stages_to_spare() {
        for format in FORMATS {
            for (width, _) in WIDTHS {
                let shape = Shape { format, width };
                assert!(shape.shared_bytes() <= SHARED && shape.stages() >= 4, "{shape:?}");
                assert_eq!(shape.stage_bytes() % 16, 0, "{shape:?}");
                assert_eq!(shape.kernel(), format!("{}_{width}", shape.family()));
            }
        }
    }

    #[test]
    fn widths_fill_the_device() {
        assert_eq!(best_width(1, 1, 132), 32);
        assert_eq!(best_width(1, 1024, 132), 32);
        // 20 row tiles of 13 column tiles: two waves.
        assert_eq!(best_width(20, 1024, 132), 80);
        assert_eq!(best_width(272, 4096, 132), 128);
    }
}
