//! Choice of tokens from rows of logits.

use ninfer_core::Result;
use ninfer_core::ops::Choose;
use ninfer_core::segment::MAX_STEP_ROWS;

use super::Cuda;
use super::batch::BatchArg;
use super::buffer::Matrix;
use super::driver::Launch;
use super::queue::CudaQueue;

/// Threads of a block.
const BLOCK: u32 = 256;
const FAMILY: &str = "sample_choose";
/// Logits of a tile: `kTile` of `common/candidate.cuh`.
const TILE: usize = 4096;
/// Most chunks of a row: `kChunks` of `common/choose.cuh`.
const CHUNKS: usize = 64;
/// Most candidates of a list: `kFew`.
const FEW: usize = 64;
/// Bins of all digits of an order: `kDigits · kBins`.
const BINS: usize = 3 * 2048;
/// Most blocks that share a row.
const MEMBERS: u32 = 64;
/// Rows of a launch.
pub(super) const ROWS: usize = MAX_STEP_ROWS;

/// `Choose` of `common/choose.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChooseArg {
    batch: BatchArg,
    logits: Matrix,
    ids: Matrix,
    params: Matrix,
    counts: Matrix,
    output: Matrix,
    report: u64,
    best: u64,
    top: u64,
    masses: u64,
    tile_mass: u64,
    bins: u64,
    tile_ties: u64,
    flags: u64,
    mode: u64,
    arrivals: u64,
    first_row: i32,
    rows: i32,
    slots: i32,
    limit: i32,
    tiles: i32,
    chunks: i32,
    chunk_tiles: i32,
    members: i32,
}

/// What is chosen from.
pub(super) struct Source {
    batch: BatchArg,
    logits: Matrix,
    ids: Matrix,
    params: Matrix,
    counts: Matrix,
    slots: usize,
    limit: usize,
    output: Matrix,
}

impl Source {
    /// Rows of an operation with parameters and counts.
    pub(super) fn of(op: &Choose<Cuda>) -> Self {
        Self {
            batch: (&op.batch).into(),
            logits: (&op.logits).into(),
            ids: (&op.ids).into(),
            params: (&op.params).into(),
            counts: (&op.counts).into(),
            slots: op.params.rows(),
            limit: op.limit,
            output: (&op.output).into(),
        }
    }

    /// The best of each row, whatever segment it belongs to.
    pub(super) fn greedy(batch: BatchArg, logits: Matrix, limit: usize, output: Matrix) -> Self {
        let none = Matrix::NONE;
        Self { batch, logits, ids: none, params: none, counts: none, slots: 0, limit, output }
    }
}

/// Lengths of the parts of the workspace, for one launch.
fn lengths(rows: usize, limit: usize) -> [usize; 9] {
    let tiles = limit.div_ceil(TILE);
    [
        rows * CHUNKS * 8,
        rows * CHUNKS * FEW * 8,
        rows * BINS * 16,
        rows * tiles * 8,
        rows * BINS * 4,
        rows * tiles * 4,
        rows * CHUNKS * 4,
        rows * 4,
        (rows + 1) * 4,
    ]
    .map(|bytes| bytes.next_multiple_of(256))
}

/// Bytes of workspace that [`choose`] takes for a number of rows.
pub(super) fn choose_bytes(rows: usize, limit: usize) -> usize {
    lengths(rows.min(ROWS), limit).iter().sum()
}

/// Chooses the tokens of `rows` rows, with [`choose_bytes`] bytes of workspace at `space`.
pub(super) fn choose(backend: &Cuda, queue: &mut CudaQueue, source: &Source, rows: usize, space: u64) -> Result<()> {
    let tiles = source.limit.div_ceil(TILE);
    let chunk_tiles = tiles.div_ceil(CHUNKS);
    let chunks = tiles.div_ceil(chunk_tiles.max(1));
    // Half of what the device holds at once, so that two queues can wait in barriers at the same time.
    let resident = backend.kernels().get(FAMILY, "sample_draw", 0)?.blocks_per_sm(BLOCK, 0)? * backend.sms() as u32;
    let members = (resident / 2).clamp(1, MEMBERS).min(tiles as u32);
    for first in (0..rows).step_by(ROWS) {
        let count = (rows - first).min(ROWS);
        let mut at = space;
        let [best, top, masses, tile_mass, bins, tile_ties, flags, mode, arrivals] =
            lengths(count, source.limit).map(|bytes| {
                let here = at;
                at += bytes as u64;
                here
            });
        let arguments = ChooseArg {
            batch: source.batch,
            logits: source.logits,
            ids: source.ids,
            params: source.params,
            counts: source.counts,
            output: source.output,
            report: queue.report_address(),
            best,
            top,
            masses,
            tile_mass,
            bins,
            tile_ties,
            flags,
            mode,
            arrivals,
            first_row: first as i32,
            rows: count as i32,
            slots: source.slots as i32,
            limit: source.limit as i32,
            tiles: tiles as i32,
            chunks: chunks as i32,
            chunk_tiles: chunk_tiles as i32,
            members: members as i32,
        };
        let scan = Launch { grid: [chunks as u32, count as u32, 1], block: BLOCK, shared: 0 };
        let draw = Launch { grid: [members, count as u32, 1], block: BLOCK, shared: 0 };
        // SAFETY: the struct is the parameter of both kernels. Shapes were checked by the recorder; slots are checked by the
        // kernel; the workspace has the lengths that the kernels use.
        unsafe {
            queue.launch(backend, FAMILY, "sample_scan", scan, &arguments)?;
            queue.launch(backend, FAMILY, "sample_draw", draw, &arguments)?;
        }
    }
    Ok(())
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] =
    &[("sample_scan", size_of::<ChooseArg>()), ("sample_draw", size_of::<ChooseArg>())];

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of the workspace stay aligned and cover the chunks of every vocabulary.
    #[test]
    fn workspace_covers_the_tiles() {
        for limit in [1usize, 300, 4096, 4097, 248_320, 262_144, 262_145, 1 << 20] {
            let tiles = limit.div_ceil(TILE);
            let chunk_tiles = tiles.div_ceil(CHUNKS);
            let chunks = tiles.div_ceil(chunk_tiles);
            assert!((1..=CHUNKS).contains(&chunks) && chunks * chunk_tiles >= tiles, "{limit}");
            assert!((chunks - 1) * chunk_tiles < tiles, "no chunk of {limit} is empty");
            assert!(lengths(3, limit).iter().all(|bytes| bytes % 256 == 0));
            assert_eq!(choose_bytes(1000, limit), choose_bytes(ROWS, limit));
        }
    }
}
