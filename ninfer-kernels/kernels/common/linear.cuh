// y = x · Wᵀ for packed weights of every format; one numeric class for both profiles.
//
// A block of 8 warps computes 16 rows of W (for SwiGLU two times 16) for 8·kTiles columns, that is tokens. Each warp takes
// a fixed eighth of the records of its rows, multiplies bf16 fragments (weights as a, tokens as b) into f32 sums, applies
// group scales to those, and the eight partial sums are added in warp order. Every column of a matrix instruction is
// computed by itself, so which tokens share a call never changes a bit.
//
// Grid: (row blocks of all parts, column tiles); 256 threads; shared memory 8·16·8·kTiles·4 bytes.
#pragma once
#include "common/fragment.cuh"
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

// Sum over the warp's share of the records, for rows `row` and `row` + 8 of the lane's g.
template <int kFormat, int kTiles, bool kAligned>
__device__ __forceinline__ void accumulate(const Weight& w, int row, int warp, int lane, const bf16* const (&x)[kTiles],
                                           float (&sum)[kTiles][4]) {
    constexpr int kBytes = record_bytes(kFormat);
    constexpr int kUnroll = kTiles <= 2 ? 4 : 2;
    const int g = lane / 4, t = lane % 4;
    const int share = divide_up(w.blocks, kWarps), first = divide_up(w.cols, 64);
    const int begin = warp * share, end = min(begin + share, w.blocks);
    const u8* records = w.records + static_cast<i64>(row / 16) * w.blocks * kBytes;
    RowPlace place[2];
    if constexpr (!kAligned) {
        for (int r = 0; r < 2; r++) {
            const int at = min(row + g + 8 * r, (w.rows + 15) / 16 * 16 - 1);
            place[r] = {w.records + static_cast<i64>(at / 16) * w.blocks * kBytes, 4 * (at % 8) + t, at % 16 / 8};
        }
    }
    for (int block = begin; block < end; block += kUnroll) {
        Fragment<kFormat> f[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            if (block + u >= end) break;
            const i64 offset = static_cast<i64>(block + u) * kBytes;
            if constexpr (kAligned) {
                f[u].load(records + offset, lane);
            } else {
                for (int r = 0; r < 2; r++) f[u].load_row(r, {place[r].record + offset, place[r].lane, place[r].r});
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            if (block + u >= end) break;
            const int k = (block + u < first ? block + u : block + u - first) * 64 + 8 * t;
            float partial[kTiles][4];
#pragma unroll
            for (int s = 0; s < 2; s++) {
                u32 a0[4], a1[4];
                f[u].decode(s, 0, a0);
                f[u].decode(s, 1, a1);
                const u32 first_a[4] = {a0[0], a1[0], a0[1], a1[1]}, second_a[4] = {a0[2], a1[2], a0[3], a1[3]};
#pragma unroll
                for (int n = 0; n < kTiles; n++) {
                    uint4 b = {0, 0, 0, 0};
                    if (x[n] != nullptr && k + 32 * s < w.cols) b = __ldg(reinterpret_cast<const uint4*>(x[n] + k + 32 * s));
                    if constexpr (Fragment<kFormat>::kSums == 0) {
                        if (w.block_scale == nullptr) {
                            mma_bf16(sum[n], first_a, b.x, b.y);
                            mma_bf16(sum[n], second_a, b.z, b.w);
                            continue;
                        }
                    }
                    if (s == 0 || Fragment<kFormat>::kSums == 2) {
                        partial[n][0] = partial[n][1] = partial[n][2] = partial[n][3] = 0.0f;
                    }
                    mma_bf16(partial[n], first_a, b.x, b.y);
                    mma_bf16(partial[n], second_a, b.z, b.w);
                    if constexpr (Fragment<kFormat>::kSums == 2) {
                        for (int i = 0; i < 4; i++) sum[n][i] = fmaf(f[u].scale(s, i / 2), partial[n][i], sum[n][i]);
                    }
                }
            }
            if constexpr (Fragment<kFormat>::kSums == 1) {
#pragma unroll
                for (int n = 0; n < kTiles; n++) {
                    for (int i = 0; i < 4; i++) sum[n][i] = fmaf(f[u].scale(0, i / 2), partial[n][i], sum[n][i]);
                }
            }
            if constexpr (Fragment<kFormat>::kSums == 0) {
                if (w.block_scale != nullptr) {
                    float factor[2];
                    for (int r = 0; r < 2; r++) {
                        const int at = min(row + g + 8 * r, (w.rows + 15) / 16 * 16 - 1);
                        const i64 blocks = divide_up(w.cols, 128);
                        factor[r] = w.block_scale[(at / 16 * blocks + (block + u) / 2) * 16 + at % 16];
                    }
#pragma unroll
                    for (int n = 0; n < kTiles; n++) {
                        for (int i = 0; i < 4; i++) sum[n][i] = fmaf(factor[i / 2], partial[n][i], sum[n][i]);
                    }
                }
            }
        }
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

template <int kFormat, int kTiles, bool kAligned>
__device__ __forceinline__ void linear(const Linear& a) {
    __shared__ float shared[kWarps * 16 * 8 * kTiles];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    int p = 0;
    while (p + 1 < a.parts && static_cast<int>(blockIdx.x) >= a.part[p + 1].first_block) p++;
    const Part& part = a.part[p];
    const Weight& w = part.weight;
    const int row = (blockIdx.x - part.first_block) * 16;

    int expert = 0, first = blockIdx.y * 8 * kTiles, count = a.columns - first;
    if (a.tiles != nullptr) {
        const int* tile = a.tiles + 4 * blockIdx.y;
        expert = tile[0], first = tile[1], count = tile[2];
        if (count <= 0) return;
    }
    const bf16* x[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
        const int column = 8 * n + g;
        x[n] = nullptr;
        if (column < count) {
            const int at = a.tiles != nullptr ? a.order[first + column] / a.pairs_per_row : first + column;
            x[n] = a.x.row(at);
        }
    }

    float value[(kTiles + 1) / 2], second[(kTiles + 1) / 2];
    const int from = expert * part.expert_rows + row;
    const bool pair = part.second_row > 0;
#pragma unroll 1
    for (int half = 0; half <= pair; half++) {
#pragma unroll
        for (int v = 0; v < (kTiles + 1) / 2; v++) second[v] = half > 0 ? value[v] : 0.0f;
        float sum[kTiles][4] = {};
        accumulate<kFormat, kTiles, kAligned>(w, half > 0 ? from + part.second_row : from, warp, lane, x, sum);
        reduce<kTiles>(sum, shared, value);
    }
#pragma unroll
    for (int v = 0; v < (kTiles + 1) / 2; v++) {
        const int e = threadIdx.x + 256 * v, column = e / 16, r = row + e % 16;
        if (e >= 16 * 8 * kTiles || column >= count || r >= part.rows) continue;
        int target = first + column;
        int source = target;
        if (a.tiles != nullptr) {
            target = a.order[target];
            source = target / a.pairs_per_row;
        }
        const float token = (a.column_scale != nullptr ? a.column_scale[source] : 1.0f) * format_factor(kFormat);
        const int of = expert * part.expert_rows + r;
        float y = value[v] * token;
        if (w.row_scale != nullptr) y *= w.row_scale[of + part.second_row];
        if (pair) {
            float gate = second[v] * token;
            if (w.row_scale != nullptr) gate *= w.row_scale[of];
            y = silu(gate) * y;
        }
        const i64 at = target * part.out_stride + r;
        if (a.epilogue == kFloat) {
            static_cast<float*>(part.out)[at] = y;
        } else {
            bf16* out = static_cast<bf16*>(part.out);
            out[at] = to_bf16(a.epilogue == kAdd ? to_float(out[at]) + y : y);
        }
    }
}

}  // namespace

// Kernels of a format: linear_<format>_<columns of a tile>, and one for rows that do not start at multiples of 16.
#define LINEAR_KERNEL(name, format, tiles, aligned) \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Linear a) { \
        linear<format, tiles, aligned>(a); \
    }

#define LINEAR_KERNELS(name, format) \
    LINEAR_KERNEL(linear_##name##_8, format, 1, true) \
    LINEAR_KERNEL(linear_##name##_16, format, 2, true) \
    LINEAR_KERNEL(linear_##name##_64, format, 8, true) \
    LINEAR_KERNEL(linear_##name##_8_any, format, 1, false)
