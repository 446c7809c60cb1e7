// y = x · Wᵀ for prompts, with the matrix instructions of warpgroups. The numeric class of prompts on sm_90a.
//
// A weight is rounded to bf16 once, code times scale; products are summed in f32 over 16 columns by an instruction, one
// instruction after the other in the order of the columns. Row scales, scales of E4M3 activations and the tensor's factor
// multiply the sum. No column of a matrix instruction depends on another, and every width does the same, so neither the
// tokens of a call nor the width of its tiles change a bit.
//
// A block of three warpgroups stays on its multiprocessor and computes tile after tile: 16 row blocks of W (SwiGLU: 8 of the
// first half and the 8 of the second half that belong to them) for kWidth tokens. The third warpgroup brings 64 columns a
// stage: tokens through registers, since a record's order of columns (common/weight.cuh) differs from what the instruction
// wants, and records by bulk copies. The first two decode a row block a warp, twice, into registers, and multiply: while
// one set of registers is being multiplied, the other one is filled.
//
// Columns of a stage: with column = 32 s + 8 t + 2 p + e, pair p of lane t belongs to the instruction 2 s + p / 2 as its
// elements 8 (p % 2) + 2 t + e. So piece 4 s + p of a token's 128 bytes holds, as its word t, word p of the piece of 16 bytes
// at column 32 s + 8 t.
//
// Grid: as many blocks as multiprocessors, or tiles if those are fewer; 384 threads. Shared memory: tokens of all stages,
// records of all stages, where results are turned, barriers; the first is aligned here to 1,024 bytes.
#pragma once
#include "common/fragment.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/pair.cuh"
#include "ptx/passing.cuh"
#include "ptx/wgmma.cuh"

constexpr int kMaxParts = 6;
constexpr int kThreads = 384;
constexpr int kRowBlocks = 16;
// Column tiles that are computed for all rows before the next ones, so that their tokens stay in the L2 cache.
constexpr int kColumnGroup = 16;
// Floats between tokens, and of a row block, where results are turned.
constexpr int kTurnStride = 20, kTurn = 16 * kTurnStride;
// The barriers take arrivals of the four warps that bring data and one for the records, and of the eight that use them.
constexpr int kFullArrivals = 5, kFreeArrivals = 8;

enum Epilogue { kStore = 0, kAdd = 1, kFloat = 2 };

// One matrix and where its result goes; `PartArg` of src/cuda/tile.rs.
struct TilePart {
    Weight weight;
    void* out;
    i64 out_stride;
    int first_tile;   // row tiles of the parts before
    int rows;         // columns of the result: rows of the matrix (of one expert), half of them for SwiGLU
    int second_row;   // SwiGLU: first row of the second half; 0 otherwise
    int expert_rows;  // rows of the matrix of one expert
    int run;          // so many columns of the result are adjacent,
    int gap;          // then so many belong to another part
};

// `TilesArg` of src/cuda/tile.rs.
struct Tiles {
    Matrix<const bf16> x;
    const float* column_scale;  // multiplies the result of each row of x, or null
    const int4* tiles;          // grouped: {expert, first, count, 0} of each column tile, or null
    const int* order;           // grouped: pairs (token · k + choice) in order of experts
    int columns;                // tokens
    int parts;
    int epilogue;
    int pairs_per_row;  // grouped: pair / this is its row of x
    int row_tiles;
    int column_tiles;
    int stages;      // of the ring
    int slot_bytes;  // of a record with its scales, the largest of all parts
    TilePart part[kMaxParts];
};

// Bytes of a token's 64 columns, and of the scales of a row block for 128 columns.
constexpr int kTokenBytes = 128, kScaleBytes = 64;

namespace {

// A tile: which rows of which matrix, which tokens.
struct Place {
    int part, row_tile, expert, first, count;
};

// The ring: tokens of all stages, records of all stages, barriers of full and of empty stages; and a place in it.
struct Ring {
    u32 tokens, records, full, empty;
    int slot = 0, phase = 0;

    __device__ __forceinline__ void next(const Tiles& a) {
        if (++slot == a.stages) slot = 0, phase ^= 1;
    }
};

__device__ __forceinline__ int column_tile_of(const Tiles& a, int tile, int& row_tile) {
    if (a.tiles != nullptr) {
        row_tile = tile % a.row_tiles;
        return tile / a.row_tiles;
    }
    const int all = kColumnGroup * a.row_tiles, group = tile / all, rest = tile - group * all;
    const int width = min(kColumnGroup, a.column_tiles - group * kColumnGroup);
    row_tile = rest / width;
    return group * kColumnGroup + rest % width;
}

// What the table says of the column tile of a tile; past the last one nothing.
__device__ __forceinline__ int4 group_of(const Tiles& a, int tile) {
    if (a.tiles == nullptr || tile >= a.row_tiles * a.column_tiles) return make_int4(0, 0, 0, 0);
    return a.tiles[tile / a.row_tiles];
}

// Whether there is such a tile, and where it is.
template <int kWidth>
__device__ __forceinline__ bool locate(const Tiles& a, int tile, int4 group, Place& place) {
    if (tile >= a.row_tiles * a.column_tiles) return false;
    const int column_tile = column_tile_of(a, tile, place.row_tile);
    place.expert = group.x, place.first = group.y, place.count = group.z;
    if (a.tiles == nullptr) {
        place.first = column_tile * kWidth;
        place.count = min(kWidth, a.columns - place.first);
    }
    place.part = 0;
    while (place.part + 1 < a.parts && place.row_tile >= a.part[place.part + 1].first_tile) place.part++;
    place.row_tile -= a.part[place.part].first_tile;
    return place.count > 0;
}

// First row, within one expert's results, of row block `slot` of a tile: 8 (warpgroup) + 4 (set of registers) + warp.
__device__ __forceinline__ int slot_row(const TilePart& part, int row_tile, int slot) {
    if (part.second_row == 0) return (row_tile * kRowBlocks + slot) * 16;
    return (row_tile * (kRowBlocks / 2) + slot / 8 * 4 + slot % 4) * 16;
}

// What one thread brings of a stage.
template <int kPieces>
struct Load {
    uint4 piece[kPieces];
    const u8* from;  // a record, or scales; null: nothing
    u32 sizes;       // bytes of a record, from bit 16 on of all bulk copies of the stage; 0: no stage
};

// The warpgroup that brings data. A warp brings tokens 4 w .. 4 w + 3 of every 16, eight lanes one of them.
template <int kWidth>
__device__ __forceinline__ void bring(const Tiles& a, Ring ring) {
    constexpr int kPieces = kWidth / 16;
    const int thread = threadIdx.x - 256, lane = thread % 32, column = thread % 8, token = thread / 8;
    const bool copies = thread < 32;
    // Piece p of the token's half: its place and, within, this lane's word.
    const u32 target = ring.tokens + token * kTokenBytes + column % 4 * 4, swizzle = column / 4 * 4 ^ token % 8;

    // Where loading has got to.
    int tile = blockIdx.x, block = 0, blocks = 0, wrap = 1;
    u64 row = 0;  // address in x: lane 4 i + j has that of token 16 i + 4 w + j
    const u8* from = nullptr;  // a record, or scales for lanes from 16 on, of the tile's first columns
    u32 sizes = 0;
    int4 group = group_of(a, tile);
    auto load = [&](Load<kPieces>& to) {
        if (block == blocks) {
            Place place;
            to.sizes = 0;
            if (!locate<kWidth>(a, tile, group, place)) return;
            tile += gridDim.x;
            group = group_of(a, tile);
            const TilePart& part = a.part[place.part];
            const Weight& w = part.weight;
            block = 0, blocks = w.blocks, wrap = divide_up(w.cols, 64);
            const int n = lane / 4 * 16 + thread / 32 * 4 + lane % 4;
            const int at = place.first + (n < place.count ? n : 0);
            row = reinterpret_cast<u64>(a.x.row(a.tiles != nullptr ? a.order[at] / a.pairs_per_row : at));
            const int slot = lane % 16;
            const int first = place.expert * part.expert_rows + slot_row(part, place.row_tile, slot) +
                              (slot % 8 >= 4 ? part.second_row : 0);
            const int row_block = min(first / 16, divide_up(w.rows, 16) - 1);
            const u32 size = record_bytes(w.format);
            sizes = size | kRowBlocks * (size + (w.block_scale != nullptr ? kScaleBytes : 0)) << 16;
            from = w.records + static_cast<i64>(row_block) * w.blocks * static_cast<i64>(size);
            if (lane >= 16) {
                from = reinterpret_cast<const u8*>(w.block_scale);
                if (from != nullptr) from += static_cast<i64>(row_block) * divide_up(w.cols, 128) * kScaleBytes;
            }
        }
        to.sizes = sizes;
        const int size = sizes & 0xffff;
        to.from = from == nullptr ? from : from + (lane < 16 ? block * size : block / 2 * kScaleBytes);
        const u32 start = kTokenBytes * (block >= wrap ? block - wrap : block) + 16 * column;
#pragma unroll
        for (int i = 0; i < kPieces; i++) {
            to.piece[i] = load_once(reinterpret_cast<const u8*>(__shfl_sync(kAllLanes, row, 4 * i + token % 4)) + start);
        }
        block++;
    };
    auto store = [&](const Load<kPieces>& of) {
        const u32 barrier = ring.full + 8 * ring.slot;
        barrier_wait(ring.empty + 8 * ring.slot, ring.phase ^ 1);
        if (copies) {
            if (lane == 0) barrier_expect(barrier, of.sizes >> 16);
            __syncwarp();
            const u32 slot = ring.records + (ring.slot * kRowBlocks + lane % 16) * a.slot_bytes;
            if (of.from != nullptr) {
                const u32 size = of.sizes & 0xffff;
                copy_bulk(lane < 16 ? slot : slot + size, of.from, lane < 16 ? size : kScaleBytes, barrier);
            }
        }
        const u32 place = target + ring.slot * kWidth * kTokenBytes;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const u32 word = place + (p ^ swizzle) * 16;
#pragma unroll
            for (int i = 0; i < kPieces; i++) {
                const uint4 v = of.piece[i];
                store_shared(word + 16 * kTokenBytes * i, p == 0 ? v.x : p == 1 ? v.y : p == 2 ? v.z : v.w);
            }
        }
        fence_shared_for_matrices();
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
        ring.next(a);
    };
    // Two stages are on their way through registers.
    Load<kPieces> first, second;
    first.sizes = second.sizes = 0;
    bool ends = false;
    auto pass = [&](Load<kPieces>& set) {
        if (set.sizes > 0) {
            store(set);
        } else if (ends) {
            return false;
        }
        load(set);
        ends = set.sizes == 0;
        return true;
    };
    while (pass(first) && pass(second)) {
    }
}

// bf16 pairs of the nearest bf16 of a scale and of what it leaves.
struct PairScale {
    u32 high, low;

    __device__ __forceinline__ explicit PairScale(float scale) {
        high = pack_bf16(scale, scale);
        const float rest = scale - high_float(high);
        low = pack_bf16(rest, rest);
    }
    // c times the scale for codes of at most 8 bits; one rounding, but for a part in 2^16.
    __device__ __forceinline__ u32 times(u32 c) const { return multiply_add_pair(c, high, multiply_pair(c, low)); }
};

// A row block's record as the operands of four matrix instructions.
template <int kFormat>
__device__ __forceinline__ void decode_record(const u8* record, int lane, bool scaled, u32 (&a)[16]) {
    Fragment<kFormat> f;
    f.load(record, lane);
#pragma unroll
    for (int s = 0; s < 2; s++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 w[4];
            f.decode(s, r, w);
            if constexpr (Fragment<kFormat>::kSums > 0) {
                const PairScale scale(f.scale(s, r));
#pragma unroll
                for (int p = 0; p < 4; p++) w[p] = scale.times(w[p]);
            }
            if constexpr (kFormat == kFp8) {
                if (scaled) {
                    const u8* at = record + record_bytes(kFp8) + 4 * (lane / 4 + 8 * r);
                    const PairScale scale(*reinterpret_cast<const float*>(at));
#pragma unroll
                    for (int p = 0; p < 4; p++) w[p] = scale.times(w[p]);
                }
            }
            a[8 * s + r] = w[0], a[8 * s + 2 + r] = w[1], a[8 * s + 4 + r] = w[2], a[8 * s + 6 + r] = w[3];
        }
    }
}

// Results of a warp, 16 tokens at a time, four rows of a token a lane.
template <int kWidth>
__device__ __forceinline__ void finish(const Tiles& a, const Place& place, const float (&sum)[2][kWidth / 2], float* turned,
                                       int slot) {
    const TilePart& part = a.part[place.part];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool pair = part.second_row > 0;
    const float* row_scale = part.weight.row_scale;
    float* own = turned + kTurnStride * 2 * t + g;
    // Each lane knows the row of the result of one token of the 16, and of the 16 after them.
    auto target_of = [&](int c) {
        const int column = 16 * c + lane % 16, at = place.first + column;
        return column >= place.count || a.tiles == nullptr ? at : a.order[at];
    };
    int next = target_of(0);
#pragma unroll 1
    for (int c = 0; 16 * c < place.count; c++) {
        const int target = next;
        float factor = format_factor(part.weight.format);
        if (a.column_scale != nullptr && 16 * c + lane % 16 < place.count) {
            factor *= a.column_scale[a.tiles != nullptr ? target / a.pairs_per_row : target];
        }
        next = target_of(c + 1);
#pragma unroll
        for (int k = 0; k < kWidth / 16; k++) {
            if (c != k) continue;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                // i: set of registers, eight of tokens, half of the rows, token of two.
                own[kTurn * (i / 8) + kTurnStride * (8 * (i / 4 % 2) + i % 2) + 8 * (i / 2 % 2)] = sum[i / 8][8 * k + i % 8];
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int pass = 0; pass < (pair ? 2 : 4); pass++) {
            const int m = pass / 2, token = pass % 2 * 8 + g;
            const int r = slot_row(part, place.row_tile, slot + 4 * m) + 4 * t;
            const i64 to = static_cast<i64>(__shfl_sync(kAllLanes, target, token)) * part.out_stride;
            const float times = __shfl_sync(kAllLanes, factor, token);
            if (16 * c + token >= place.count || r >= part.rows) continue;
            const float* from = turned + kTurn * m + kTurnStride * token + 4 * t;
            const int scale = place.expert * part.expert_rows + r;
            auto value = [&](int i) {
                float y = from[i] * times;
                if (row_scale != nullptr) y *= __ldg(row_scale + scale + i);
                if (pair) {
                    float up = from[kTurn + i] * times;
                    if (row_scale != nullptr) up *= __ldg(row_scale + scale + part.second_row + i);
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

// The same for a format that is known at run time.
__device__ __forceinline__ void decode_any(int format, const u8* record, int lane, bool scaled, u32 (&a)[16]) {
    switch (format) {
        case kFp8: decode_record<kFp8>(record, lane, scaled, a); break;
        case kNvfp4: decode_record<kNvfp4>(record, lane, scaled, a); break;
        case kQ4: decode_record<kQ4>(record, lane, scaled, a); break;
        case kQ5: decode_record<kQ5>(record, lane, scaled, a); break;
        case kQ6: decode_record<kQ6>(record, lane, scaled, a); break;
        case kW8: decode_record<kW8>(record, lane, scaled, a); break;
        default: decode_record<kBf16>(record, lane, scaled, a); break;
    }
}

// Sums of a tile over all its stages.
template <int kWidth>
__device__ __forceinline__ void sum_tile(const Tiles& a, const Weight& w, Ring& ring, const u8* records, u64 tokens,
                                         float (&sum)[2][kWidth / 2]) {
    const int lane = threadIdx.x % 32, blocks = w.blocks;
    const bool scaled = w.block_scale != nullptr;
    int before = 0;
    u32 operand[2][16] = {};
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        barrier_wait(ring.full + 8 * ring.slot, ring.phase);
        const u64 descriptor = tokens + ring.slot * (kWidth * kTokenBytes / 16);
        const u8* record = records + ring.slot * kRowBlocks * a.slot_bytes;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            // The instructions that read these registers are done, and with the second set those of the stage before.
            wgmma_wait<1>();
#pragma unroll
            for (int i = 0; i < 16; i++) hold(operand[m][i]);
            if (m == 1 && block > 0 && lane == 0) barrier_arrive(ring.empty + 8 * before);
            decode_any(w.format, record + m * 4 * a.slot_bytes, lane, scaled, operand[m]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; i++) {
                wgmma_bf16(sum[m], operand[m] + 4 * i, descriptor + kNextRows * i, block > 0 || i > 0);
            }
            wgmma_commit();
        }
        before = ring.slot;
        ring.next(a);
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(ring.empty + 8 * before);
}


// The warpgroups that multiply.
template <int kWidth>
__device__ __forceinline__ void use(const Tiles& a, Ring ring, const u8* records, float* turned) {
    const int slot = threadIdx.x / 128 * 8 + threadIdx.x % 128 / 32;
    turned += threadIdx.x / 32 * 2 * kTurn;
    records += slot * a.slot_bytes;
    const u64 tokens = matrix_descriptor(ring.tokens);
    int4 group = group_of(a, blockIdx.x);
    Place place;
#pragma unroll 1
    for (int tile = blockIdx.x; locate<kWidth>(a, tile, group, place); tile += gridDim.x) {
        group = group_of(a, tile + gridDim.x);
        float sum[2][kWidth / 2];
        sum_tile<kWidth>(a, a.part[place.part].weight, ring, records, tokens, sum);
        finish<kWidth>(a, place, sum, turned, slot);
    }
}

template <int kWidth>
__device__ __forceinline__ void multiply_tiles(const Tiles& a) {
    extern __shared__ u8 shared[];
    u8* tokens = shared + (0u - shared_address(shared)) % 1024;
    u8* records = tokens + a.stages * kWidth * kTokenBytes;
    float* turned = reinterpret_cast<float*>(records + a.stages * kRowBlocks * a.slot_bytes);
    Ring ring;
    ring.tokens = shared_address(tokens), ring.records = shared_address(records);
    ring.full = shared_address(turned + 8 * 2 * kTurn), ring.empty = ring.full + 8 * a.stages;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < a.stages; i++) {
            barrier_init(ring.full + 8 * i, kFullArrivals);
            barrier_init(ring.empty + 8 * i, kFreeArrivals);
        }
        barrier_init_fence();
    }
    __syncthreads();
    grid_launch_next();
    grid_wait();
    if (threadIdx.x >= 256) {
        registers_fewer<120>();
        bring<kWidth>(a, ring);
    } else {
        registers_more<192>();
        use<kWidth>(a, ring, records, turned);
    }
}

}  // namespace

// The kernel for tiles of so many tokens.
#define TILE_KERNEL(width) \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) tile_##width(const __grid_constant__ Tiles a) { \
        multiply_tiles<width>(a); \
    }
