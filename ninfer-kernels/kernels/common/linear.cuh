// y = x · Wᵀ for packed weights of every format; one numeric class for both profiles.
//
// A block of 8 warps computes 16 rows of W, or two times 16, for 8·kTiles columns, that is tokens. Each warp takes
// every eighth record of its rows, multiplies bf16 fragments (weights as a, tokens as b) into f32 sums, applies
// group scales to those, and the eight partial sums are added in warp order. Every column of a matrix instruction is
// computed by itself, so which tokens share a call never changes a bit.
//
// Weights come through a ring in shared memory (common/stream.cuh), started before the kernel waits for its input.
//
// Grid: (row blocks of all parts, column tiles); 256 threads; shared memory: the
// rings, or if that is more 8·16·8·kTiles·4 bytes for partial sums in their place.
#pragma once
#include "common/fragment.cuh"
#include "common/stream.cuh"
#include "ptx/mma.cuh"

constexpr int kWarps = 8;
constexpr int kMaxParts = 6;

enum Epilogue { kStore = 0, kAdd = 1, kFloat = 2 };

// One matrix and where its result goes; `PartArg` of src/cuda/linear.rs.
struct Part {
    Weight weight;
    void* out;
    i64 out_stride;
    int first_block;  // row blocks of the parts before
    int rows;         // columns of the result: rows of the matrix (of one expert), half of them for SwiGLU
    int second_row;   // SwiGLU: first row of the second half; 0 otherwise
    int expert_rows;  // rows of the matrix of one expert
    int run;          // so many columns of the result are adjacent,
    int gap;          // then so many belong to another part
};

// `LinearArg` of src/cuda/linear.rs.
struct Linear {
    Matrix<const bf16> x;
    const float* column_scale;  // multiplies the result of each row of x, or null
    const int* tiles;           // grouped: {expert, first, count, 0} of each column tile, or null
    const int* order;           // grouped: pairs (token · k + choice) in order of experts
    int columns;                // tokens
    int parts;
    int epilogue;
    int pairs_per_row;  // grouped: pair / this is its row of x
    Part part[kMaxParts];
};

namespace {

// Adds one record's product to the sums of a lane's rows.
template <int kFormat, int kTiles, class Input>
__device__ __forceinline__ void multiply_record(const Fragment<kFormat>& f, bool scaled, const float (&factor)[2],
                                                Input input, float (&sum)[kTiles][4]) {
    constexpr int kSums = Fragment<kFormat>::kSums;
    float partial[kTiles][4];
#pragma unroll
    for (int s = 0; s < 2; s++) {
        u32 a0[4], a1[4];
        f.decode(s, 0, a0);
        f.decode(s, 1, a1);
        const u32 first[4] = {a0[0], a1[0], a0[1], a1[1]}, second[4] = {a0[2], a1[2], a0[3], a1[3]};
#pragma unroll
        for (int n = 0; n < kTiles; n++) {
            const uint4 b = input(s, n);
            if constexpr (kSums == 0) {
                if (!scaled) {
                    mma_bf16(sum[n], first, b.x, b.y);
                    mma_bf16(sum[n], second, b.z, b.w);
                    continue;
                }
            }
            if (s == 0 || kSums == 2) {
                mma_bf16_first(partial[n], first, b.x, b.y);
            } else {
                mma_bf16(partial[n], first, b.x, b.y);
            }
            mma_bf16(partial[n], second, b.z, b.w);
            if constexpr (kSums == 2) {
                for (int i = 0; i < 4; i++) sum[n][i] = fmaf(f.scale(s, i / 2), partial[n][i], sum[n][i]);
            }
        }
    }
    if constexpr (kSums == 1) {
#pragma unroll
        for (int n = 0; n < kTiles; n++) {
            for (int i = 0; i < 4; i++) sum[n][i] = fmaf(f.scale(0, i / 2), partial[n][i], sum[n][i]);
        }
    }
    if constexpr (kSums == 0) {
        if (scaled) {
#pragma unroll
            for (int n = 0; n < kTiles; n++) {
                for (int i = 0; i < 4; i++) sum[n][i] = fmaf(factor[i / 2], partial[n][i], sum[n][i]);
            }
        }
    }
}

// Records of a row block that a warp takes: every kWarps-th, from its own number on.
__device__ __forceinline__ int warp_records(const Weight& w, int warp) { return max(divide_up(w.blocks - warp, kWarps), 0); }

// Sums over the warp's records for rows + g and rows + g + 8 of each row block; the copies have begun.
template <int kFormat, int kTiles, int kBlocks>
__device__ __forceinline__ void accumulate(const WeightStream<kFormat, kWarps, kBlocks>& stream, const Weight& w,
                                           const int (&rows)[kBlocks], int warp, int lane, const bf16* const (&x)[kTiles],
                                           float (&sum)[kBlocks][kTiles][4]) {
    constexpr int kRecords = chunk_records(kFormat);
    const int g = lane / 4, t = lane % 4, wrap = divide_up(w.cols, 64);
    const float* scales[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
        scales[b] = nullptr;
        if (kFormat == kFp8 && w.block_scale != nullptr) {
            scales[b] = w.block_scale + static_cast<i64>(rows[b] / 16) * divide_up(w.cols, 128) * 16 + g;
        }
    }
#pragma unroll 1
    for (int chunk = 0; chunk * kRecords < stream.count; chunk++) {
        const int rest = stream.count - chunk * kRecords;
        const u8* place = stream.wait(chunk);
#pragma unroll
        for (int u = 0; u < kRecords; u++) {
            if (u >= rest) break;
            int block = warp + kWarps * (chunk * kRecords + u);
            if (kFormat == kBf16 && block >= wrap) block -= wrap;
            const int k = block * 64 + 8 * t;
#pragma unroll
            for (int b = 0; b < kBlocks; b++) {
                Fragment<kFormat> f;
                f.load(place + b * stream.kRun + u * record_bytes(kFormat), lane);
                float factor[2] = {};
                const bool scaled = scales[b] != nullptr;
                if (scaled) {
                    factor[0] = scales[b][block / 2 * 16];
                    factor[1] = scales[b][block / 2 * 16 + 8];
                }
                multiply_record<kFormat, kTiles>(
                    f, scaled, factor,
                    [&](int s, int n) { return __ldg(reinterpret_cast<const uint4*>(x[n] + k + 32 * s)); }, sum[b]);
            }
        }
        stream.refill(chunk);
    }
}

// The same for rows that start anywhere, read where they are.
template <int kFormat, int kTiles>
__device__ __forceinline__ void accumulate_any(const Weight& w, int row, int warp, int lane, const bf16* const (&x)[kTiles],
                                               float (&sum)[kTiles][4]) {
    constexpr int kBytes = record_bytes(kFormat);
    const int g = lane / 4, t = lane % 4, first = divide_up(w.cols, 64), scales = divide_up(w.cols, 128);
    int rows[2];
    for (int r = 0; r < 2; r++) rows[r] = min(row + g + 8 * r, divide_up(w.rows, 16) * 16 - 1);
    for (int record = warp; record < w.blocks; record += kWarps) {
        const int block = record < first ? record : record - first;
        Fragment<kFormat> f;
        for (int r = 0; r < 2; r++) {
            const u8* at = w.records + (static_cast<i64>(rows[r] / 16) * w.blocks + record) * kBytes;
            f.load_row(r, {at, 4 * (rows[r] % 8) + t, rows[r] % 16 / 8});
        }
        float factor[2] = {};
        const bool scaled = kFormat == kFp8 && w.block_scale != nullptr;
        if (scaled) {
            for (int r = 0; r < 2; r++) {
                factor[r] = w.block_scale[(static_cast<i64>(rows[r] / 16) * scales + block / 2) * 16 + rows[r] % 16];
            }
        }
        const int k = block * 64 + 8 * t;
        multiply_record<kFormat, kTiles>(
            f, scaled, factor,
            [&](int s, int n) { return __ldg(reinterpret_cast<const uint4*>(x[n] + k + 32 * s)); }, sum);
    }
}

// Adds the partial sums of the warps; element e = 16·column + row of the block's result is value[e / 256] of thread e % 256.
template <int kTiles>
__device__ __forceinline__ void reduce(const float (&sum)[kTiles][4], float* shared, float (&value)[(kTiles + 1) / 2]) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr int kElements = 16 * 8 * kTiles;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
        for (int i = 0; i < 4; i++) {
            const int row = g + 8 * (i / 2), column = 8 * n + 2 * t + i % 2;
            shared[warp * kElements + 16 * column + row] = sum[n][i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < (kTiles + 1) / 2; v++) {
        const int e = threadIdx.x + 256 * v;
        float total = 0.0f;
        if (e < kElements) {
#pragma unroll
            for (int w = 0; w < kWarps; w++) total += shared[w * kElements + e];
        }
        value[v] = total;
    }
}

// kBlocks row blocks: neighbours, or one of each half for SwiGLU.
template <int kFormat, int kTiles, int kBlocks, bool kAligned>
__device__ __forceinline__ void linear(const Linear& a) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    int p = 0;
    while (p + 1 < a.parts && static_cast<int>(blockIdx.x) >= a.part[p + 1].first_block) p++;
    const Part& part = a.part[p];
    const Weight& w = part.weight;
    const bool pair = kBlocks == 2 && part.second_row > 0;
    const int row = (blockIdx.x - part.first_block) * (pair ? 16 : 16 * kBlocks);

    WeightStream<kFormat, kWarps, kBlocks> stream(shared, warp, lane);
    stream.count = warp_records(w, warp);
    int rows[kBlocks];
    auto place = [&](int expert) {
        rows[0] = expert * part.expert_rows + row;
        if (kBlocks == 2) {
            // Behind the last row block it is read again, and its result dropped.
            const int last = (divide_up(w.rows, 16) - 1) * 16;
            rows[kBlocks - 1] = pair ? rows[0] + part.second_row : min(rows[0] + 16, last);
        }
        if constexpr (kAligned) {
#pragma unroll
            for (int b = 0; b < kBlocks; b++) {
                stream.from[b] = w.records + (static_cast<i64>(rows[b] / 16) * w.blocks + warp) * record_bytes(kFormat);
            }
            stream.begin();
        }
    };
    // Weights do not depend on the kernels before; what is read behind the wait does.
    int expert = 0, first = blockIdx.y * 8 * kTiles, count = a.columns - first;
    if (a.tiles == nullptr) place(0);
    grid_launch_next();
    grid_wait();
    if (a.tiles != nullptr) {
        const int* tile = a.tiles + 4 * blockIdx.y;
        expert = tile[0], first = tile[1], count = tile[2];
        if (count <= 0) return;
        place(expert);
    }
    // Columns without a token compute the tile's first one again; nobody reads that.
    const bf16* x[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
        const int column = first + (8 * n + g < count ? 8 * n + g : 0);
        x[n] = a.x.row(a.tiles != nullptr ? a.order[column] / a.pairs_per_row : column);
    }

    float sum[kBlocks][kTiles][4] = {};
    if constexpr (kAligned) {
        accumulate<kFormat, kTiles, kBlocks>(stream, w, rows, warp, lane, x, sum);
    } else {
        for (int b = 0; b < kBlocks; b++) accumulate_any<kFormat, kTiles>(w, rows[b], warp, lane, x, sum[b]);
    }
    float value[kBlocks][(kTiles + 1) / 2];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) reduce<kTiles>(sum[b], reinterpret_cast<float*>(shared), value[b]);

#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
        if (pair && b > 0) break;
#pragma unroll
        for (int v = 0; v < (kTiles + 1) / 2; v++) {
            const int e = threadIdx.x + 256 * v, column = e / 16, r = row + 16 * b + e % 16;
            if (e >= 16 * 8 * kTiles || column >= count || r >= part.rows) continue;
            int target = first + column;
            int source = target;
            if (a.tiles != nullptr) {
                target = a.order[target];
                source = target / a.pairs_per_row;
            }
            const float token = (a.column_scale != nullptr ? a.column_scale[source] : 1.0f) * format_factor(kFormat);
            const int of = expert * part.expert_rows + r;
            float y = value[b][v] * token;
            if (w.row_scale != nullptr) y *= w.row_scale[of];
            if (pair) {
                float up = value[kBlocks - 1][v] * token;
                if (w.row_scale != nullptr) up *= w.row_scale[of + part.second_row];
                y = silu(y) * up;
            }
            const i64 at = target * part.out_stride + r + r / part.run * part.gap;
            if (a.epilogue == kFloat) {
                static_cast<float*>(part.out)[at] = y;
            } else {
                bf16* out = static_cast<bf16*>(part.out);
                out[at] = to_bf16(a.epilogue == kAdd ? to_float(out[at]) + y : y);
            }
        }
    }
}

}  // namespace

// Kernels of a format: linear_<format>_<columns of a tile>[_two][_any]. `two` takes two row blocks at once, `any` rows
// that do not start at multiples of 16.
#define LINEAR_KERNEL(name, format, tiles, blocks, aligned, resident) \
    extern "C" __global__ void __launch_bounds__(256, resident) name(const __grid_constant__ Linear a) { \
        linear<format, tiles, blocks, aligned>(a); \
    }

#define LINEAR_KERNELS(name, format) \
    LINEAR_KERNEL(linear_##name##_16, format, 2, 1, true, 2) \
    LINEAR_KERNEL(linear_##name##_64, format, 8, 1, true, 1) \
    LINEAR_KERNEL(linear_##name##_16_two, format, 2, 2, true, 2) \
    LINEAR_KERNEL(linear_##name##_8_any, format, 1, 1, false, 1) \
    LINEAR_KERNEL(linear_##name##_8_two_any, format, 1, 2, false, 1)
