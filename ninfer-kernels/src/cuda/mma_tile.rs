//! Products of prompts on the matrix units that every device has: bf16, or the codes themselves where those are multiplied.

use ninfer_core::Result;
use ninfer_core::backend::DeviceWeight;
use ninfer_core::capability::{Feature, Target};
use ninfer_core::format::ActivationPrecision;
use ninfer_core::segment::Profile;

use super::Cuda;
use super::buffer::Matrix;
use super::driver::Launch;
use super::linear::{Part, PartArg, Product};
use super::queue::CudaQueue;
use super::weight::{CudaWeight, ROW_BLOCK, RecordFormat};

/// Matrices of one launch.
const PARTS: usize = 6;
/// Threads of a block.
const BLOCK: u32 = 128;
/// Row blocks of a tile.
const ROW_BLOCKS: usize = 8;
/// Most tokens of a tile, `kTileTokens` of `common/mma_tile.cuh`.
const TOKENS: usize = 128;
/// Tokens that are computed or left out together.
const GROUP: usize = 32;
/// Shared memory of the ring in which results are turned: 1 KiB, and 64 tokens of each of 4 warps.
#[cfg(test)]
const TURNED: usize = 1024 + 4 * 64 * 34 * 4;
/// Bytes in front of the ring.
const TABLE: usize = 4 * TOKENS;
/// Shared memory that the system keeps for each block.
const KEPT: usize = 1 << 10;
/// Stages of the ring.
const STAGES: std::ops::RangeInclusive<usize> = 2..=4;
/// Columns of codes in a step of the ring.
const CODES: usize = 128;
/// Most columns of a row of codes: they are gathered in shared memory.
const MOST_CODES: usize = 32 << 10;

/// `TileProduct` of `common/mma_tile.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProductArg {
    /// The stride counts bytes.
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
    width: i32,
    part: [PartArg; PARTS],
}

/// `Codes` of `mma_tile_e4m3.cu` and `mma_tile_e2m1.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct CodesArg {
    /// The stride counts bytes.
    x: Matrix,
    tiles: u64,
    order: u64,
    cols: i32,
    width: i32,
}

/// A kernel for tiles of weights in one record format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    /// bf16 products.
    Bf16(RecordFormat),
    /// Products of E4M3 codes with E4M3 codes.
    E4m3,
    /// Products of E2M1 codes with E2M1 codes, each with scales of 16 columns.
    E2m1,
}

impl Route {
    /// Family and kernel, which have one name.
    const fn name(self) -> &'static str {
        match self {
            Self::Bf16(RecordFormat::Bf16) => "mma_tile_bf16",
            Self::Bf16(RecordFormat::Fp8) => "mma_tile_fp8",
            Self::Bf16(RecordFormat::Nvfp4) => "mma_tile_nvfp4",
            Self::Bf16(RecordFormat::Q4) => "mma_tile_q4",
            Self::Bf16(RecordFormat::Q5) => "mma_tile_q5",
            Self::Bf16(RecordFormat::Q6) => "mma_tile_q6",
            Self::Bf16(RecordFormat::W8) => "mma_tile_w8",
            Self::E4m3 => "mma_tile_e4m3",
            Self::E2m1 => "mma_tile_e2m1",
        }
    }

    /// The kernel that turns staged values into codes, and its bytes for each 128 columns.
    const fn codes(self) -> Option<(&'static str, usize)> {
        match self {
            Self::Bf16(_) => None,
            Self::E4m3 => Some(("e4m3_rows", 128)),
            Self::E2m1 => Some(("e2m1_rows", 64 + 8)),
        }
    }

    /// Bytes of a step of the ring: 64 or 128 columns of each token, and one record or two of each row block.
    const fn step_bytes(self) -> usize {
        let (token, run) = match self {
            Self::Bf16(format) => (128, format.record_bytes()),
            Self::E4m3 => (128, 2 * RecordFormat::Fp8.record_bytes()),
            Self::E2m1 => (64 + 8, 2 * RecordFormat::Nvfp4.record_bytes()),
        };
        TOKENS * token + ROW_BLOCKS * run
    }

    /// Stages of the ring: as many as leave room for two blocks in a multiprocessor, or if that is too few, for one.
    fn stages(self, per_sm: usize, per_block: usize) -> usize {
        let two = (per_sm / 2).saturating_sub(KEPT + TABLE) / self.step_bytes();
        let one = per_block.saturating_sub(TABLE) / self.step_bytes();
        if two >= *STAGES.start() { two } else { one }.clamp(*STAGES.start(), *STAGES.end())
    }
}

/// The route of a product with a weight, or `None`. It depends on the device, on the profile and on the weight, so that all
/// calls of a prompt are of one numeric class.
fn route(
    backend: &Cuda,
    profile: Profile,
    format: RecordFormat,
    precision: ActivationPrecision,
    cols: usize,
) -> Option<Route> {
    if profile != Profile::Prefill {
        return None;
    }
    let selection = backend.kernels().selection();
    let fits = |target| selection.targets.contains(&target) && cols <= MOST_CODES;
    // On 9.0 the instruction is accepted and made of f16 products; there it runs only where nothing newer is allowed.
    let native = backend.0.device.features().has(Feature::MmaFp8Native) || selection.base == Target::Sm89;
    Some(match (precision, format) {
        (ActivationPrecision::E4m3Token, RecordFormat::Fp8) if native && fits(Target::Sm89) => Route::E4m3,
        (ActivationPrecision::E2m1Group16, RecordFormat::Nvfp4) if fits(Target::Sm120f) => Route::E2m1,
        (ActivationPrecision::E2m1Group16, RecordFormat::Nvfp4)
            if backend.0.choice.emulates_fp4 && fits(Target::Sm80) =>
        {
            Route::E2m1
        }
        _ => Route::Bf16(format),
    })
}

/// Pairs in a tile for experts that get `likely` pairs each, if the products with all these weights take this route.
pub(super) fn group_columns(
    backend: &Cuda,
    profile: Profile,
    weights: [&CudaWeight; 2],
    likely: usize,
) -> Option<usize> {
    let taken =
        |w: &CudaWeight| route(backend, profile, RecordFormat::of(w.format()), w.activations(), w.cols()).is_some();
    weights.into_iter().all(taken).then(|| likely.next_multiple_of(GROUP).clamp(GROUP, TOKENS))
}

/// Launches what takes this route of a product; returns the rest.
pub(super) fn multiply<'a>(
    backend: &Cuda,
    queue: &mut CudaQueue,
    product: &Product<'_>,
    parts: Vec<Part<'a>>,
) -> Result<Vec<Part<'a>>> {
    let way = |p: &Part<'_>| {
        let rows = if p.target.pair || product.groups.is_some() { p.target.rows } else { 0 };
        let (format, precision) = (p.piece.layout.format, p.target.weight.activations());
        let way = route(backend, product.profile, format, precision, p.target.weight.cols());
        way.filter(|_| rows.is_multiple_of(ROW_BLOCK) && product.groups.is_none_or(|g| g.width <= TOKENS))
    };
    let (mut taken, mut rest) = (Vec::with_capacity(parts.len()), Vec::new());
    for part in parts {
        match way(&part) {
            Some(route) => taken.push((route, part)),
            None => rest.push(part),
        }
    }
    if let Some((route, part)) = taken.iter().find(|(route, _)| route.codes().is_some()) {
        // Codes take the place of the input, so all parts must want the same.
        if rest.is_empty() && taken.iter().all(|(other, _)| other == route) {
            make_codes(backend, queue, product, *route, part.target.weight.cols())?;
        } else {
            rest.extend(taken.drain(..).map(|(_, part)| part));
        }
    }
    while let Some(&(route, _)) = taken.first() {
        let (mut now, later): (Vec<_>, Vec<_>) = taken.into_iter().partition(|(r, _)| *r == route);
        taken = later;
        while !now.is_empty() {
            let more = now.split_off(now.len().min(PARTS));
            launch(backend, queue, product, route, &now)?;
            now = more;
        }
    }
    Ok(rest)
}

/// Turns staged bf16 values of codes into the codes, where they are.
fn make_codes(backend: &Cuda, queue: &mut CudaQueue, product: &Product<'_>, route: Route, cols: usize) -> Result<()> {
    let Some((kernel, bytes)) = route.codes() else { return Ok(()) };
    // The rows are the tokens, or if each belongs to one pair alone, the pairs in the tiles.
    let (rows, groups) = match product.groups {
        Some(groups) if groups.pairs_per_row == 1 => (groups.capacity * groups.width, Some(groups)),
        _ => (product.columns, None),
    };
    let arguments = CodesArg {
        x: Matrix::at(product.input.values.address(), 2 * product.input.values.stride()),
        tiles: groups.map_or(0, |g| g.tiles),
        order: groups.map_or(0, |g| g.order),
        cols: cols as i32,
        width: groups.map_or(1, |g| g.width) as i32,
    };
    let how = Launch { grid: [rows as u32, 1, 1], block: 256, shared: (cols.div_ceil(CODES) * bytes) as u32 };
    // SAFETY: the struct is the kernel's parameter. Inputs of this precision are always staged in the workspace, in rows of
    // whole records of bf16, which are at least as long as their codes.
    unsafe { queue.launch(backend, route.name(), kernel, how, &arguments) }
}

/// Tokens of a tile: so many that the device is busy to the end.
fn width(row_tiles: usize, columns: usize, sms: usize) -> usize {
    let time = |width: &usize| (row_tiles * columns.div_ceil(*width)).div_ceil(2 * sms) * (width + GROUP / 2);
    (1..=TOKENS / GROUP).map(|groups| groups * GROUP).min_by_key(time).unwrap_or(TOKENS)
}

fn launch(
    backend: &Cuda,
    queue: &mut CudaQueue,
    product: &Product<'_>,
    route: Route,
    list: &[(Route, Part<'_>)],
) -> Result<()> {
    let mut part = [PartArg::NONE; PARTS];
    let mut row_tiles = 0;
    for (arg, (_, p)) in part.iter_mut().zip(list) {
        *arg = p.argument(row_tiles, product.epilogue);
        row_tiles += p.rows().div_ceil(ROW_BLOCKS * ROW_BLOCK / p.halves());
    }
    let (width, column_tiles) = match &product.groups {
        Some(groups) => (groups.width, groups.capacity),
        None => {
            let width = width(row_tiles, product.columns, backend.sms());
            (width, product.columns.div_ceil(width))
        }
    };
    let device = &backend.0.device;
    let stages = route.stages(device.shared_per_sm as usize, device.shared_per_block_optin as usize);
    let arguments = ProductArg {
        x: Matrix::at(product.input.values.address(), 2 * product.input.values.stride()),
        column_scale: product.input.scales,
        tiles: product.groups.map_or(0, |g| g.tiles),
        order: product.groups.map_or(0, |g| g.order),
        columns: product.columns as i32,
        parts: list.len() as i32,
        epilogue: product.epilogue as i32,
        pairs_per_row: product.groups.map_or(1, |g| g.pairs_per_row) as i32,
        row_tiles: row_tiles as i32,
        column_tiles: column_tiles as i32,
        stages: stages as i32,
        width: width as i32,
        part,
    };
    let shared = (TABLE + stages * route.step_bytes()) as u32;
    let how = Launch { grid: [(row_tiles * column_tiles) as u32, 1, 1], block: BLOCK, shared };
    // SAFETY: the struct is the kernel's parameter. Input and results are views whose shapes the recorder checked, or parts
    // of the workspace of those shapes.
    unsafe { queue.launch(backend, route.name(), route.name(), how, &arguments) }
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[
    ("mma_tile_", size_of::<ProductArg>()),
    ("e4m3_rows", size_of::<CodesArg>()),
    ("e2m1_rows", size_of::<CodesArg>()),
];

#[cfg(test)]
mod tests {
    use ninfer_core::capability::Capability;

    use super::*;

    const ROUTES: [Route; 9] = [
        Route::Bf16(RecordFormat::Bf16),
        Route::Bf16(RecordFormat::Fp8),
        Route::Bf16(RecordFormat::Nvfp4),
        Route::Bf16(RecordFormat::Q4),
        Route::Bf16(RecordFormat::Q5),
        Route::Bf16(RecordFormat::Q6),
        Route::Bf16(RecordFormat::W8),
        Route::E4m3,
        Route::E2m1,
    ];

    #[test]
    fn every_ring_fits_into_every_device() {
        for capability in Capability::KNOWN {
            let (per_sm, per_block) =
                (capability.shared_per_sm() as usize, capability.shared_per_block_optin() as usize);
            for route in ROUTES {
                let stages = route.stages(per_sm, per_block);
                let bytes = TABLE + stages * route.step_bytes();
                assert!(STAGES.contains(&stages) && bytes <= per_block, "{route:?} on {capability}: {stages} stages");
                assert!(bytes - TABLE >= TURNED);
                assert_eq!(route.step_bytes() % 16, 0);
            }
        }
        let four_bits = Route::Bf16(RecordFormat::Q4);
        assert_eq!(four_bits.stages(100 << 10, 99 << 10), 2);
        assert_eq!(four_bits.stages(228 << 10, 227 << 10), 4);
    }

    #[test]
    fn widths_fill_the_device() {
        assert_eq!(width(1, 1, 170), 32);
        assert_eq!(width(2, 4096, 170), 32);
        assert_eq!(width(272, 4096, 170), 128);
        assert_eq!(width(1, 0, 170), 32);
    }
}
