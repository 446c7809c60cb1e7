// y = x · Wᵀ for many tokens, on the matrix units that every device has: what the kernels mma_tile_* share.
//
// A block of 4 warps computes 128 rows of W (64 of a pair) for up to 128 tokens; it leaves out what it can of 32 tokens at
// a time. A warp has two row blocks, whose records are operands already, and multiplies them with all tokens of the tile;
// both come through a ring of `stages` steps in shared memory. Each sum is one accumulator over K in the order of the
// columns, whatever else is in the call: neither the width of a tile nor the number of stages changes a bit.
//
// Grid: row tiles of all parts times column tiles, eight column tiles next to each other; 128 threads; shared memory:
// `kTable` bytes and the ring. A step of the ring holds the tokens' rows, then the records of the eight row blocks.
#pragma once
#include "common/weight.cuh"
#include "ptx/bulk.cuh"
#include "ptx/copy.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

constexpr int kTileWarps = 4;
constexpr int kTileThreads = 32 * kTileWarps;
constexpr int kTileParts = 6;
constexpr int kTileTokens = 128;
// Tokens that are computed or left out together, in columns of a matrix instruction.
constexpr int kGroup = 4;
// Where the row of each token of a tile begins.
constexpr int kTable = 4 * kTileTokens;

enum TileEpilogue { kTileStore = 0, kTileAdd = 1, kTileFloat = 2 };

// One matrix and where its result goes; `TilePartArg` of src/cuda/mma_tile.rs.
struct TilePart {
    Weight weight;
    void* out;
    i64 out_stride;
    int first_tile;   // row tiles of the parts before
    int rows;         // columns of the result: rows of the matrix (of one expert), half of them for a pair
    int second_row;   // pair: first row of the second half; 0 otherwise
    int expert_rows;  // rows of the matrix of one expert
    int run;          // so many columns of the result are adjacent,
    int gap;          // then so many belong to another part
};

// `TileArg` of src/cuda/mma_tile.rs.
struct TileProduct {
    Matrix<const u8> x;         // staged rows; the stride counts bytes
    const float* column_scale;  // multiplies the result of each row of x, or null
    const int* tiles;           // grouped: {expert, first, count, 0} of each column tile, or null
    const int* order;           // grouped: pairs (token · k + choice) in order of experts
    int columns;                // tokens
    int parts;
    int epilogue;
    int pairs_per_row;  // grouped: pair / this is its row of x
    int row_tiles;
    int column_tiles;
    int stages;  // 2, 3 or 4
    int width;   // tokens of a tile, at most kTileTokens
    TilePart part[kTileParts];
};

namespace {

// What one block computes.
struct TilePlace {
    const TilePart* part;
    int row;    // first column of the result
    int block[2];  // this warp's row blocks
    int expert, first, count;
    bool pair;
};

// Eight column tiles share the weights of a row tile before the next one is read. False: nothing to do.
__device__ __forceinline__ bool find_tile(const TileProduct& a, int warp, TilePlace& p) {
    const int id = blockIdx.x, band = 8 * a.row_tiles, at = id / band * 8, in = id % band;
    const int wide = min(8, a.column_tiles - at), row_tile = in / wide, column_tile = at + in % wide;
    int part = 0;
    while (part + 1 < a.parts && row_tile >= a.part[part + 1].first_tile) part++;
    p.part = &a.part[part];
    p.expert = 0, p.first = column_tile * a.width, p.count = min(a.width, a.columns - p.first);
    if (a.tiles != nullptr) {
        const int* tile = a.tiles + 4 * column_tile;
        p.expert = tile[0], p.first = tile[1], p.count = tile[2];
        if (p.count <= 0) return false;
    }
    p.pair = p.part->second_row > 0;
    const int own = row_tile - p.part->first_tile, start = p.expert * p.part->expert_rows / 16;
    p.row = own * (p.pair ? 64 : 128);
    const int last = divide_up(p.part->weight.rows, 16) - 1;
    // Behind the last row block it is read again, and its result dropped.
    p.block[0] = min(start + p.row / 16 + (p.pair ? warp : 2 * warp), last);
    p.block[1] = min(p.pair ? p.block[0] + p.part->second_row / 16 : start + p.row / 16 + 2 * warp + 1, last);
    return true;
}

// Copies of the ring's steps. A token has kRowBytes of a step (128, or 64), a row block kRun bytes of records; kScaleBytes
// more of a token, 0 or 8, are behind the records.
template <int kRowBytes, int kRun, int kScaleBytes = 0>
struct TileRing {
    static constexpr int kTokenBytes = kTileTokens * kRowBytes, kRecordBytes = 8 * kRun;
    static constexpr int kStep = kTokenBytes + kRecordBytes + kTileTokens * kScaleBytes;
    static constexpr int kChunks = kRowBytes / 16, kRows = kTileThreads / kChunks;

    u8* ring;
    const u32* table;  // bytes / 16 from x to the row of a token
    const u8* x;
    const u8* from[2];
    int bytes;  // of the records of a row block
    int count;  // tokens
    int scales;  // where they begin in a row
    int warp, lane;

    // `shared` begins with the table; all threads call this together.
    __device__ __forceinline__ TileRing(const TileProduct& a, const TilePlace& p, u8* shared, int record) {
        u32* rows = reinterpret_cast<u32*>(shared);
        // Places without a token compute the tile's first one again; nobody reads that.
        const int column = p.first + (static_cast<int>(threadIdx.x) < p.count ? threadIdx.x : 0);
        const i64 row = a.tiles != nullptr ? a.order[column] / a.pairs_per_row : column;
        rows[threadIdx.x] = static_cast<u32>(row * a.x.stride >> 4);
        ring = shared + kTable, table = rows, x = a.x.data, count = p.count;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const Weight& w = p.part->weight;
        bytes = w.blocks * record;
#pragma unroll
        for (int b = 0; b < 2; b++) from[b] = w.records + static_cast<i64>(p.block[b]) * bytes;
        __syncthreads();
    }

    // Starts the copies of the records of step `step`, and of the tokens' columns of step `column`.
    __device__ __forceinline__ void load(int step, int column, u8* place) const {
        const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
        const int at = kRowBytes == 128 ? chunk ^ 4 * (first & 1) : chunk;
        const u32 target = shared_address(place) + first * kRowBytes + 16 * at;
        const u8* source = x + static_cast<i64>(column) * kRowBytes + 16 * chunk;
#pragma unroll
        for (int i = 0; i < kTileTokens / kRows; i++) {
            if (kRows * i < count) {
                const u64 row = static_cast<u64>(table[first + kRows * i]) * 16;
                copy_async(target + kRows * kRowBytes * i, source + row, true);
            }
        }
        if constexpr (kScaleBytes == 8) {
            const u64 row = static_cast<u64>(table[threadIdx.x]) * 16;
            copy_async_8(shared_address(place) + kTokenBytes + kRecordBytes + 8 * threadIdx.x, x + row + scales + 8 * column);
        }
        const u32 records = shared_address(place) + kTokenBytes + 2 * warp * kRun;
        const int offset = step * kRun;
#pragma unroll
        for (int b = 0; b < 2; b++) {
#pragma unroll
            for (int i = 0; i < divide_up(kRun, 512); i++) {
                const int byte = 512 * i + 16 * lane;
                if (512 * i + 512 <= kRun || byte < kRun) {
                    // Behind the last record there are zeros.
                    const bool valid = offset + byte < bytes;
                    copy_async(records + b * kRun + byte, from[b] + (valid ? offset + byte : 0), valid);
                }
            }
        }
    }

    // Records of row block b of this warp.
    __device__ __forceinline__ const u8* records(const u8* place, int b) const {
        return place + kTokenBytes + (2 * warp + b) * kRun;
    }

    // The tokens' scales.
    __device__ __forceinline__ const u8* token_scales(const u8* place) const { return place + kTokenBytes + kRecordBytes; }

    // Where the lane's 16 bytes of half h of the first eight tokens are; those of the next eight follow 8 · kRowBytes on.
    __device__ __forceinline__ const u8* tokens(const u8* place, int h) const {
        const int g = lane / 4, t = lane % 4;
        const int at = kRowBytes == 128 ? (4 * h + t) ^ 4 * (g & 1) : t;
        return place + g * kRowBytes + 16 * at;
    }
};

__device__ __forceinline__ uint4 load_token(const u8* tokens, int n, int row_bytes) {
    return *reinterpret_cast<const uint4*>(tokens + 8 * n * row_bytes);
}

__device__ __forceinline__ void wait_for_step(int stages) {
    if (stages == 2) {
        copy_wait<0>();
    } else if (stages == 3) {
        copy_wait<1>();
    } else {
        copy_wait<2>();
    }
    __syncthreads();
}

// Runs the ring: `multiply(place, step)` for each of `steps`; columns begin again at step `wrap`.
template <class Ring, class Multiply>
__device__ __forceinline__ void run_ring(const Ring& ring, int steps, int wrap, int stages, Multiply multiply) {
    int slot = 0, next = 0;
#pragma unroll 1
    for (int step = 1 - stages; step < steps; step++) {
        if (step >= 0) wait_for_step(stages);
        const int ahead = step + stages - 1;
        if (ahead < steps) ring.load(ahead, ahead < wrap ? ahead : ahead - wrap, ring.ring + next * Ring::kStep);
        copy_commit();
        next = next + 1 < stages ? next + 1 : 0;
        if (step < 0) continue;
        multiply(ring.ring + slot * Ring::kStep, step);
        slot = slot + 1 < stages ? slot + 1 : 0;
    }
    copy_wait<0>();
    __syncthreads();
}

// Floats between tokens of a warp's part of the transposed sums: two lanes of a store share a bank, and two steps of every
// ring are large enough.
constexpr int kTurnStride = 34;
// Tokens that are turned together, in columns of a matrix instruction.
constexpr int kTurn = 8;

// Scales the sums and writes them; `shared` is the ring, which nobody uses any more: 1 KiB and 8.5 KiB a warp of it.
__device__ __forceinline__ void finish_tile(const TileProduct& a, const TilePlace& p, float factor,
                                            const float (&sum)[2][16][4], u8* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const TilePart& part = *p.part;
    const float* scales = part.weight.row_scale;
    int* target_of = reinterpret_cast<int*>(shared);
    float* scale_of = reinterpret_cast<float*>(shared + 4 * kTileTokens);
    float* turn = reinterpret_cast<float*>(shared + 8 * kTileTokens) + warp * 8 * kTurn * kTurnStride;
    const int mine = threadIdx.x;
    if (mine < p.count) {
        int target = p.first + mine, source = target;
        if (a.tiles != nullptr) {
            target = a.order[target];
            source = target / a.pairs_per_row;
        }
        target_of[mine] = target;
        scale_of[mine] = (a.column_scale != nullptr ? a.column_scale[source] : 1.0f) * factor;
    }
    __syncthreads();
    // A lane writes one column of the result for all tokens, or for every other one of a pair.
    const bool pair = p.pair;
    const int height = pair ? 16 : 32, own = lane % height, r = p.row + warp * height + own;
    const i64 column = r + r / part.run * part.gap;
    const int block = lane >= 16 && !pair ? p.block[1] : p.block[0];
    const float scale = scales != nullptr ? scales[block * 16 + lane % 16] : 1.0f;
    const float second_scale = scales != nullptr ? scales[p.block[1] * 16 + lane % 16] : 1.0f;
    float* corner = turn + 2 * t * kTurnStride + g;
#pragma unroll 1
    for (int n0 = 0; 8 * n0 < p.count; n0 += kTurn) {
        auto put = [&](int n) {
#pragma unroll
            for (int m = 0; m < kTurn; m++) {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    corner[(8 * m + i % 2) * kTurnStride + 16 * (i / 4) + 8 * (i / 2 % 2)] = sum[i / 4][n + m][i % 4];
                }
            }
        };
        if (n0 == 0) {
            put(0);
        } else {
            put(kTurn);
        }
        __syncwarp();
        const int count = r < part.rows ? min(8 * kTurn, p.count - 8 * n0) : 0;
#pragma unroll 2
        for (int token = lane / height; token < count; token += 32 / height) {
            const int c = 8 * n0 + token;
            float y = turn[token * kTurnStride + own] * scale_of[c];
            if (scales != nullptr) y *= scale;
            if (pair) {
                float up = turn[token * kTurnStride + 16 + own] * scale_of[c];
                if (scales != nullptr) up *= second_scale;
                y = silu(y) * up;
            }
            const i64 at = target_of[c] * part.out_stride + column;
            if (a.epilogue == kTileFloat) {
                static_cast<float*>(part.out)[at] = y;
            } else {
                bf16* out = static_cast<bf16*>(part.out);
                out[at] = to_bf16(a.epilogue == kTileAdd ? to_float(out[at]) + y : y);
            }
        }
        __syncwarp();
    }
}

}  // namespace
