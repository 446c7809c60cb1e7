// Gated DeltaNet over chunks of 64 tokens: what its two kernels share. See gdn_chunk.cu.
#pragma once
#include "common/gdn.cuh"
#include "ptx/bulk.cuh"
#include "ptx/half.cuh"
#include "ptx/mma.cuh"

constexpr int kChunk = 64, kHeadDim = 128;
constexpr int kChunkTaps = 4;
constexpr int kChunkThreads = 256;
constexpr int kTriangle = 10;                      // blocks of 16 × 16 on and below the diagonal of 64 × 64
constexpr float kValueScale = 0.0625f;             // values and states are f16 times this: up to 10^6
constexpr float kLog2E = 1.44269504088896340736f;  // gates are kept as powers of two

// `ChunkArg` of src/cuda/gdn_chunk.rs. Chunks of a call are numbered in the order of its segments.
struct GdnChunks {
    Gdn gdn;
    __half* key;     // [T, Kd], normed
    __half* query;   // [T, Kd], normed, without dk^(−1/2)
    __half* value;   // [T, Vd] · kValueScale
    uint4* solve;    // [chunks, Hv, 10, 32]: (I + A)⁻¹ β, blocks in the order of rows, each as the first operand of mma_half
    uint4* weights;  // [chunks, Hv, 10, 32]: decayed products of queries with keys, likewise
    float* decay;    // [chunks, Hv, 64]: log₂ of the decay from the begin of the chunk on
    int chunks;      // room for these
    int unused;
};

static_assert(sizeof(GdnChunks) == 320, "as on the host");

// Chunks of a segment: they end at positions that are multiples of 64. One for a segment with a fault.
__device__ __forceinline__ int chunk_count(const Gdn& a, const Segment& s) {
    if (a.idle(s)) return 0;
    if (a.fault(s).code != 0) return 1;
    return divide_up(s.start % kChunk + s.len, kChunk);
}

// First row of a chunk of a segment, behind the segment's first, and the row behind its last.
struct ChunkRows {
    int begin, end;

    __device__ __forceinline__ ChunkRows(const Segment& s, int chunk)
        : begin(max(chunk * kChunk - s.start % kChunk, 0)), end(min((chunk + 1) * kChunk - s.start % kChunk, s.len)) {}
};

// x · sigmoid(x) to about 2^-21 of it.
__device__ __forceinline__ float silu_approximate(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// Block on or below the diagonal: row and column of blocks.
__device__ __forceinline__ int2 triangle_block(int i) {
    const int row = i >= 6 ? 3 : i >= 3 ? 2 : i >= 1 ? 1 : 0;
    return {row, i - row * (row + 1) / 2};
}

// Byte of a chunk of 16 bytes in a wide tile, whose rows are 128 f16, and in a strip, whose rows are 32: eight lanes that load
// rows of a column of chunks never meet in a bank. Tiles begin at multiples of 256, so that a step along a row is one XOR.
__device__ __forceinline__ u32 wide_offset(int row, int chunk) { return row * 256 + (chunk ^ (row & 7)) * 16; }
__device__ __forceinline__ u32 strip_offset(int row, int chunk) { return row * 64 + (chunk ^ (row >> 1 & 3)) * 16; }

// What a lane loads of 16 rows from a multiple of 16 on: row lane % 16, chunk lane / 16.
__device__ __forceinline__ u32 wide_lane() { return wide_offset(threadIdx.x % 16, threadIdx.x % 32 / 16); }
__device__ __forceinline__ u32 strip_lane() { return strip_offset(threadIdx.x % 16, threadIdx.x % 32 / 16); }

// 16 features from 16 `step` on of 16 rows of a wide tile, the first operand.
__device__ __forceinline__ void load_wide(u32 (&a)[4], u32 rows, int step) { load_matrix_x4(a, rows ^ (32 * step)); }
