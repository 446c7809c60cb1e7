//! Gated DeltaNet of prompts in chunks of 64 tokens on tensor cores: see `gdn_chunk.cu`.

use ninfer_core::Result;
use ninfer_core::capability::Target;
use ninfer_core::ops::GdnMix;

use super::Cuda;
use super::driver::Launch;
use super::gdn::{GdnArg, TUNED};
use super::queue::CudaQueue;

/// Tokens of a chunk, which ends at a position that is a multiple of it.
const CHUNK: usize = 64;
/// Threads of a block.
const BLOCK: u32 = 256;
/// Blocks that share a head's state.
const STRIPS: u32 = 4;
/// Bytes of the lower triangle of 64 × 64 values in f16, in blocks of 16 × 16.
const TRIANGLE: usize = 10 * 512;
/// Shared memory of a block: `PrepareShared` and `ScanShared`.
const PREPARE_SHARED: u32 = 2 * 64 * 256 + 3 * (64 * 68 * 4 + 2 * 64 * 4);
const SCAN_SHARED: u32 =
    3 * 64 * 256 + 4 * 5120 + 2 * 64 * 64 + 2 * 64 * 4 + 128 * 64 + 3 * 64 * 64 + 2 * 4 * 64 * 4 + 128;

/// `GdnChunks` of `common/chunk.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ChunkArg {
    gdn: GdnArg,
    key: u64,
    query: u64,
    value: u64,
    solve: u64,
    weights: u64,
    decay: u64,
    chunks: i32,
    unused: i32,
}

/// Whether the chunk kernels take a prompt: heads of 128 features, four taps, rows that can be read in vectors.
pub(super) fn takes(op: &GdnMix<Cuda>, arguments: &GdnArg) -> bool {
    let d = &op.params.dims;
    op.record.is_none() && (d.key_dim, d.value_dim, d.conv_kernel) == (TUNED, TUNED, 4) && arguments.is_aligned()
}

/// Chunks that a call may have: a segment has one more than whole ones at each of its ends.
fn most_chunks(rows: usize, segments: usize) -> usize {
    (rows / CHUNK + 2 * segments).min(rows)
}

/// Runs a prompt. Where blocks form clusters the second kernel writes the results, elsewhere `gdn_norm` does.
pub(super) fn run(backend: &Cuda, queue: &mut CudaQueue, op: &GdnMix<Cuda>, arguments: GdnArg) -> Result<()> {
    let (d, t) = (&op.params.dims, op.batch.rows);
    let chunks = most_chunks(t, op.batch.segments);
    let joined = backend.kernels().selection().targets.contains(&Target::Sm90);
    let triangles = chunks * d.value_heads * TRIANGLE;
    let [key, query, value, solve, weights, decay, reads] = queue.scratch([
        t * d.keys() * 2,
        t * d.keys() * 2,
        t * d.values() * 2,
        triangles,
        triangles,
        chunks * d.value_heads * CHUNK * 4,
        if joined { 0 } else { t * d.values() * 4 },
    ])?;
    let gdn = arguments.with_reads(reads);
    let arguments = ChunkArg { gdn, key, query, value, solve, weights, decay, chunks: chunks as i32, unused: 0 };
    let (heads, segments) = (d.value_heads as u32, op.batch.segments as u32);
    let how = Launch { grid: [d.key_heads as u32, chunks as u32 + 1, 1], block: BLOCK, shared: PREPARE_SHARED };
    // SAFETY: the struct is the kernel's parameter; shapes were checked by the recorder, segments by the kernel.
    unsafe { queue.launch(backend, "gdn_chunk", "gdn_chunk_prepare", how, &arguments)? };
    let how = Launch { grid: [STRIPS * heads, segments, 1], block: BLOCK, shared: SCAN_SHARED };
    // SAFETY: as above.
    unsafe { queue.launch(backend, "gdn_chunk", "gdn_chunk_scan", how, &arguments)? };
    if joined {
        return Ok(());
    }
    arguments.gdn.norm(backend, queue, t, d)
}

/// Bytes of the parameter of the kernels whose names begin so.
#[cfg(test)]
pub(super) const PARAMETERS: &[(&str, usize)] = &[("gdn_chunk_", size_of::<ChunkArg>())];

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernels count, of one segment and of several, never exceeds the room for it.
    #[test]
    fn room_for_every_chunk() {
        let count = |start: usize, len: usize| (start % CHUNK + len).div_ceil(CHUNK);
        for len in 1..300 {
            for start in 0..CHUNK {
                assert!(count(start, len) <= most_chunks(len, 1), "{len} rows from {start} on");
            }
            assert!(3 * count(63, len) <= most_chunks(3 * len, 3), "3 times {len} rows");
        }
    }
}
