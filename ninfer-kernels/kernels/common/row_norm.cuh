// The factor of the RMS norm of a bf16 row, in one order wherever a kernel needs it.
//
// A piece is eight adjacent columns. Thread t of 256 takes pieces t, t + 256, …, and adds the squares of their columns in
// ascending order by fmaf to one sum, from zero. The sums of a warp's lanes are added in a butterfly (lane distance 16, 8,
// 4, 2, 1), those of the eight warps in ascending order.
#pragma once
#include "common/types.cuh"

constexpr int kNormThreads = 256;
constexpr int kPiece = 8;
// Pieces of a thread that stay in registers: all of a row of up to 8,192 columns.
constexpr int kHeld = 4;

namespace {

// Whether all pieces of a row of `cols` columns are whole and begin at multiples of 16 bytes.
__device__ __forceinline__ bool is_wide(const void* row, int cols) {
    return ((reinterpret_cast<u64>(row) & 15) | (cols % kPiece)) == 0;
}

// The first pieces of a wide row; zeros behind the last column.
struct HeldRow {
    uint4 piece[kHeld];

    __device__ __forceinline__ void load(const bf16* x, int cols) {
#pragma unroll
        for (int i = 0; i < kHeld; i++) {
            const int first = kPiece * (kNormThreads * i + threadIdx.x);
            piece[i] = {0, 0, 0, 0};
            if (first < cols) piece[i] = *reinterpret_cast<const uint4*>(x + first);
        }
    }
};

__device__ __forceinline__ float add_squares(float sum, uint4 v) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float low = low_float(words[i]), high = high_float(words[i]);
        sum = fmaf(low, low, sum);
        sum = fmaf(high, high, sum);
    }
    return sum;
}

// rsqrt(mean + eps) from each thread's sum of squares. `partial` is shared memory of eight floats that nobody else uses
// before the next barrier; one barrier is inside.
__device__ __forceinline__ float factor_of_sums(float sum, int cols, float eps, float* partial) {
    const float inverse = 1.0f / static_cast<float>(cols);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kNormThreads / 32; w++) total += partial[w];
    return rsqrtf(fmaf(total, inverse, eps));
}

// The sum of a thread's squares of a row that is not wide, in the order of one that is. `load` gives a column.
template <class Load>
__device__ __forceinline__ float sum_of_squares(int cols, Load load) {
    float sum = 0.0f;
#pragma unroll 1
    for (int first = kPiece * threadIdx.x; first < cols; first += kPiece * kNormThreads) {
        for (int c = first; c < min(first + kPiece, cols); c++) {
            const float x = load(c);
            sum = fmaf(x, x, sum);
        }
    }
    return sum;
}

// 1 / √(mean(x²) + eps) of a wide row, for each thread of the block; `held` holds its first pieces.
__device__ __forceinline__ float norm_factor(const HeldRow& held, const bf16* x, int cols, float eps, float* partial) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; i++) sum = add_squares(sum, held.piece[i]);
#pragma unroll 1
    for (int first = kPiece * (kHeld * kNormThreads + threadIdx.x); first < cols; first += kPiece * kNormThreads) {
        sum = add_squares(sum, *reinterpret_cast<const uint4*>(x + first));
    }
    return factor_of_sums(sum, cols, eps, partial);
}

// The same of any row in global memory.
__device__ __forceinline__ float norm_factor(const bf16* x, int cols, float eps, float* partial) {
    if (is_wide(x, cols)) {
        HeldRow held;
        held.load(x, cols);
        return norm_factor(held, x, cols, eps, partial);
    }
    return factor_of_sums(sum_of_squares(cols, [&](int c) { return to_float(x[c]); }), cols, eps, partial);
}

}  // namespace
