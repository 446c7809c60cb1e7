// y = x · Wᵀ for prompts of E4M3 codes, weights and tokens, with the matrix instructions of warpgroups.
//
// A sum over 128 columns is made by four instructions in the order of the columns; times the scale of the weight's block,
// if it has one, it is added to the sum over K in f32, because matrix units keep fewer bits. Row scales and the token's
// scale multiply the sum. No column of a matrix instruction depends on another, and every width does the same, so neither
// the tokens of a call nor the width of its tiles change a bit.
//
// A block of three warpgroups stays on its multiprocessor and computes tile after tile: 16 row blocks of W (SwiGLU: 8 of
// the first half and the 8 of the second half that belong to them) for kWidth tokens. A warp of the third one brings 128
// columns a stage by bulk copies: two records of each row block, which are operands already (common/weight.cuh), and the
// tokens' codes as e4m3_groups has left them. The first two warpgroups multiply two sets of four row blocks each; while
// one adds what it has multiplied, the other one multiplies.
//
// Two blocks that form a cluster compute neighbouring tiles of tokens with the same rows of W: each brings half of the
// records for both. One of them may have no tokens.
//
// Codes of tokens: groups of eight tokens `group_bytes` apart; in a group, of m tokens, for every 128 columns m rows of 128
// bytes. The codes of column 32 q + 8 t + 4 j + (2, 0, 3, 1)[i] of them are byte i of word t of piece 2 q + j, and piece p
// of row r is found at place p ^ r of its row.
//
// Grid: as many blocks as multiprocessors, or tiles if those are fewer; 384 threads. Shared memory: tokens of all stages,
// records of all stages, where results are turned, barriers; the first is aligned here to 1,024 bytes.
#pragma once
#include "common/weight.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mma.cuh"
#include "ptx/multicast.cuh"
#include "ptx/wgmma_e4m3.cuh"

constexpr int kMaxParts = 6;
constexpr int kThreads = 384;
constexpr int kRowBlocks = 16;
// Column tiles that are computed for all rows before the next ones, so that their tokens stay in the L2 cache.
constexpr int kColumnGroup = 16;
// Floats between tokens, and of a row block, where results are turned.
constexpr int kTurnStride = 20, kTurn = 16 * kTurnStride;
// Bytes of a token's 128 columns, of two records, and of a row block's place in a stage: records and scales.
constexpr int kTokenBytes = 128, kRunBytes = 2 * record_bytes(kFp8), kScaleBytes = 64, kSlotBytes = kRunBytes + kScaleBytes;
// Warps that use a stage.
constexpr int kUsers = 8;

enum CodeEpilogue { kStore = 0, kAdd = 1, kFloat = 2 };

// One matrix and where its result goes; `PartArg` of src/cuda/tile_e4m3.rs.
struct CodePart {
    Weight weight;
    void* out;
    i64 out_stride;
    int first_tile;  // row tiles of the parts before
    int rows;        // columns of the result: rows of the matrix, half of them for SwiGLU
    int second_row;  // SwiGLU: first row of the second half; 0 otherwise
    int run;         // so many columns of the result are adjacent,
    int gap;         // then so many belong to another part
    int unused;
};

// `TilesArg` of src/cuda/tile_e4m3.rs.
struct CodeTiles {
    const u8* codes;
    i64 group_bytes;
    const float* column_scale;  // of each token
    int columns;                // tokens
    int parts;
    int epilogue;
    int row_tiles;
    int column_tiles;
    int stages;  // of the ring
    CodePart part[kMaxParts];
};

namespace {

// A tile: which rows of which matrix, which tokens.
struct Place {
    int part, row_tile, first, count;
};

// The ring: tokens of all stages, records of all stages, barriers of full and of empty stages; and a place in it.
struct Ring {
    u32 tokens, records, full, empty;
    int slot = 0, phase = 0;

    __device__ __forceinline__ void next(const CodeTiles& a) {
        if (++slot == a.stages) slot = 0, phase ^= 1;
    }
};

// Whether there is such a tile, of kPeers times kWidth tokens, and where this block's part of it is.
template <int kWidth, int kPeers>
__device__ __forceinline__ bool locate(const CodeTiles& a, int tile, Place& place) {
    const int wide_tiles = divide_up(a.column_tiles, kPeers);
    if (tile >= a.row_tiles * wide_tiles) return false;
    constexpr int kWide = kColumnGroup / kPeers;
    const int all = kWide * a.row_tiles, group = tile / all, rest = tile - group * all;
    const int width = min(kWide, wide_tiles - group * kWide);
    place.row_tile = rest / width;
    place.first = (group * kWide + rest % width) * kPeers * kWidth;
    if constexpr (kPeers > 1) place.first += cluster_rank() * kWidth;
    place.count = max(0, min(kWidth, a.columns - place.first));
    place.part = 0;
    while (place.part + 1 < a.parts && place.row_tile >= a.part[place.part + 1].first_tile) place.part++;
    place.row_tile -= a.part[place.part].first_tile;
    return true;
}

// First row of the result of row block `slot` of a tile: 8 (warpgroup) + 4 (set of row blocks) + warp.
__device__ __forceinline__ int slot_row(const CodePart& part, int row_tile, int slot) {
    if (part.second_row == 0) return (row_tile * kRowBlocks + slot) * 16;
    return (row_tile * (kRowBlocks / 2) + slot / 8 * 4 + slot % 4) * 16;
}

// The warp that brings data: lanes 0 to 15 groups of tokens, the others row blocks.
template <int kWidth, int kPeers>
__device__ __forceinline__ void bring(const CodeTiles& a, Ring ring) {
    const int lane = threadIdx.x % 32, slot = lane % 16;
    const bool tokens = lane < 16;
    bool records = !tokens;
    if constexpr (kPeers > 1) records = records && slot / (kRowBlocks / kPeers) == cluster_rank();
    Place place;
#pragma unroll 1
    for (int tile = blockIdx.x / kPeers; locate<kWidth, kPeers>(a, tile, place); tile += gridDim.x / kPeers) {
        const CodePart& part = a.part[place.part];
        const Weight& w = part.weight;
        const u8* from;          // codes, or records
        const u8* scale = nullptr;
        u32 size = kRunBytes;
        if (tokens) {
            size = kTokenBytes * max(0, min(8, place.count - 8 * slot));
            from = a.codes + (place.first / 8 + slot) * a.group_bytes;
        } else {
            const int row = slot_row(part, place.row_tile, slot) + (slot % 8 >= 4 ? part.second_row : 0);
            const i64 row_block = min(row / 16, divide_up(w.rows, 16) - 1);
            from = w.records + row_block * w.blocks * record_bytes(kFp8);
            if (w.block_scale != nullptr) {
                scale = reinterpret_cast<const u8*>(w.block_scale) + row_block * divide_up(w.cols, 128) * kScaleBytes;
            }
        }
        const u32 bytes = place.count * kTokenBytes + kRowBlocks * (kRunBytes + (w.block_scale != nullptr ? kScaleBytes : 0));
        int left = w.blocks;
#pragma unroll 1
        for (; left > 0; left -= 2) {
            const u32 barrier = ring.full + 8 * ring.slot;
            barrier_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);
            if (lane == 0) barrier_expect(barrier, bytes);
            __syncwarp();
            auto copy = [&](u32 to, const u8* source, u32 count) {
                if constexpr (kPeers > 1) {
                    copy_bulk_to(to, source, count, barrier, (1 << kPeers) - 1);
                } else {
                    copy_bulk(to, source, count, barrier);
                }
            };
            if (tokens) {
                if (size > 0) copy_bulk(ring.tokens + (ring.slot * kWidth + 8 * slot) * kTokenBytes, from, size, barrier);
            } else if (records) {
                const u32 to = ring.records + (ring.slot * kRowBlocks + slot) * kSlotBytes;
                if (left > 1) {
                    copy(to, from, kRunBytes);
                } else {
                    // Behind the last record its codes stand once more, for tokens that are zeros there.
                    copy(to, from, kRunBytes / 2);
                    copy(to + kRunBytes / 2, from, kRunBytes / 2);
                }
                if (scale != nullptr) {
                    copy(to + kRunBytes, scale, kScaleBytes);
                    scale += kScaleBytes;
                }
            }
            from += size;
            ring.next(a);
        }
    }
}

// Results of a warp, 16 tokens at a time, four rows of a token a lane.
template <int kWidth>
__device__ __forceinline__ void finish(const CodeTiles& a, const Place& place, const float (&sum)[2][kWidth / 2],
                                       float* turned, int slot) {
    const CodePart& part = a.part[place.part];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool pair = part.second_row > 0;
    const float* row_scale = part.weight.row_scale;
    float* own = turned + kTurnStride * 2 * t + g;
#pragma unroll 1
    for (int c = 0; 16 * c < place.count; c++) {
        // Each lane knows the scale of one token of the 16.
        const int known = 16 * c + lane % 16;
        const float factor = known < place.count ? a.column_scale[place.first + known] : 0.0f;
#pragma unroll
        for (int k = 0; k < kWidth / 16; k++) {
            if (c != k) continue;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                // i: set of row blocks, eight of tokens, half of the rows, token of two.
                own[kTurn * (i / 8) + kTurnStride * (8 * (i / 4 % 2) + i % 2) + 8 * (i / 2 % 2)] = sum[i / 8][8 * k + i % 8];
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int pass = 0; pass < (pair ? 2 : 4); pass++) {
            const int m = pass / 2, token = pass % 2 * 8 + g;
            const int r = slot_row(part, place.row_tile, slot + 4 * m) + 4 * t;
            const i64 to = static_cast<i64>(place.first + 16 * c + token) * part.out_stride;
            const float times = __shfl_sync(kAllLanes, factor, token);
            if (16 * c + token >= place.count || r >= part.rows) continue;
            const float* from = turned + kTurn * m + kTurnStride * token + 4 * t;
            auto value = [&](int i) {
                float y = from[i] * times;
                if (row_scale != nullptr) y *= __ldg(row_scale + r + i);
                if (pair) {
                    float up = from[kTurn + i] * times;
                    if (row_scale != nullptr) up *= __ldg(row_scale + r + part.second_row + i);
                    y = silu(y) * up;
                }
                return y;
            };
            const i64 at = to + r + (part.gap > 0 ? static_cast<i64>(r / part.run) * part.gap : 0);
            const int size = a.epilogue == kFloat ? 4 : 2;
            u8* out = static_cast<u8*>(part.out) + at * size;
            // Four together where they are neighbours at a multiple of their size.
            if (r + 4 <= part.rows && (part.gap == 0 || r % part.run + 4 <= part.run) &&
                reinterpret_cast<u64>(out) % (4 * size) == 0) {
                float4 y = make_float4(value(0), value(1), value(2), value(3));
                if (a.epilogue == kFloat) {
                    *reinterpret_cast<float4*>(out) = y;
                    continue;
                }
                if (a.epilogue == kAdd) {
                    const uint2 old = *reinterpret_cast<const uint2*>(out);
                    y.x += low_float(old.x), y.y += high_float(old.x), y.z += low_float(old.y), y.w += high_float(old.y);
                }
                *reinterpret_cast<uint2*>(out) = make_uint2(pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
                continue;
            }
#pragma unroll 1
            for (int i = 0; i < min(4, part.rows - r); i++) {
                const i64 here = to + r + i + (part.gap > 0 ? static_cast<i64>((r + i) / part.run) * part.gap : 0);
                if (a.epilogue == kFloat) {
                    static_cast<float*>(part.out)[here] = value(i);
                } else {
                    bf16* element = static_cast<bf16*>(part.out) + here;
                    *element = to_bf16(a.epilogue == kAdd ? to_float(*element) + value(i) : value(i));
                }
            }
        }
        __syncwarp();
    }
}

// Codes of a row block as the operands of four instructions, and the scales of the lane's two rows.
struct Operand {
    u32 a[16];
    float scale[2];

    __device__ __forceinline__ void load(const u8* run, int lane, bool scaled) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 q = *reinterpret_cast<const uint4*>(run + 512 * i + 16 * lane);
            a[4 * i] = q.x, a[4 * i + 1] = q.z, a[4 * i + 2] = q.y, a[4 * i + 3] = q.w;
        }
        const float* scales = reinterpret_cast<const float*>(run + kRunBytes) + lane / 4;
        scale[0] = scaled ? scales[0] : 1.0f, scale[1] = scaled ? scales[8] : 1.0f;
    }
};

// Sums of a tile over all its stages.
template <int kWidth, int kPeers>
__device__ __forceinline__ void sum_tile(const CodeTiles& a, const Weight& w, Ring& ring, const u8* records, u64 tokens,
                                         float (&sum)[2][kWidth / 2]) {
    const int lane = threadIdx.x % 32;
    const bool scaled = w.block_scale != nullptr;
#pragma unroll
    for (int i = 0; i < kWidth; i++) sum[i / (kWidth / 2)][i % (kWidth / 2)] = 0.0f;
#pragma unroll 1
    for (int left = w.blocks; left > 0; left -= 2) {
        barrier_wait(ring.full + 8 * ring.slot, ring.phase);
        const u64 descriptor = tokens + ring.slot * (kWidth * kTokenBytes / 16);
        const u8* run = records + ring.slot * kRowBlocks * kSlotBytes;
        Operand operand;
        operand.load(run, lane, scaled);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            float part[kWidth / 2];
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) wgmma_e4m3(part, operand.a + 4 * i, descriptor + kNextRows * i, i > 0);
            wgmma_commit();
            const float scale[2] = {operand.scale[0], operand.scale[1]};
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < kWidth / 2; i++) hold(part[i]);
            if (m == 0) {
                operand.load(run + 4 * kSlotBytes, lane, scaled);
            } else {
                // All lanes have read the second operand long ago: its instructions are done.
                const u32 barrier = ring.empty + 8 * ring.slot;
                if constexpr (kPeers > 1) {
                    if (lane < kPeers) barrier_arrive_at(barrier, lane);
                } else {
                    if (lane == 0) barrier_arrive(barrier);
                }
            }
#pragma unroll
            for (int i = 0; i < kWidth / 2; i++) sum[m][i] = fmaf(scale[i / 2 % 2], part[i], sum[m][i]);
        }
        ring.next(a);
    }
}

// The warpgroups that multiply.
template <int kWidth, int kPeers>
__device__ __forceinline__ void use(const CodeTiles& a, Ring ring, const u8* records, float* turned) {
    const int slot = threadIdx.x / 128 * 8 + threadIdx.x % 128 / 32;
    turned += threadIdx.x / 32 * 2 * kTurn;
    records += slot * kSlotBytes;
    const u64 tokens = matrix_descriptor(ring.tokens);
    Place place;
#pragma unroll 1
    for (int tile = blockIdx.x / kPeers; locate<kWidth, kPeers>(a, tile, place); tile += gridDim.x / kPeers) {
        float sum[2][kWidth / 2];
        sum_tile<kWidth, kPeers>(a, a.part[place.part].weight, ring, records, tokens, sum);
        finish<kWidth>(a, place, sum, turned, slot);
    }
}

template <int kWidth, int kPeers>
__device__ __forceinline__ void multiply_codes(const CodeTiles& a) {
    extern __shared__ u8 shared[];
    u8* tokens = shared + (0u - shared_address(shared)) % 1024;
    u8* records = tokens + a.stages * kWidth * kTokenBytes;
    float* turned = reinterpret_cast<float*>(records + a.stages * kRowBlocks * kSlotBytes);
    Ring ring;
    ring.tokens = shared_address(tokens), ring.records = shared_address(records);
    ring.full = shared_address(turned + 8 * 2 * kTurn), ring.empty = ring.full + 8 * a.stages;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < a.stages; i++) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, kUsers * kPeers);
        }
        barrier_init_fence();
    }
    grid_launch_next();
    if constexpr (kPeers > 1) {
        // Nobody arrives at a barrier of the other block, or writes there, before it is ready, or after it has ended.
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    grid_wait();
    if (threadIdx.x >= 256) {
        registers_fewer<40>();
        if (threadIdx.x < 288) bring<kWidth, kPeers>(a, ring);
        __syncwarp();
    } else {
        registers_more<232>();
        use<kWidth, kPeers>(a, ring, records, turned);
    }
    if constexpr (kPeers > 1) {
        cluster_arrive();
        cluster_wait();
    }
}

}  // namespace
