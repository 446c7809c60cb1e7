// Types and small helpers that all families share.
//
// Kernels are compiled without contraction of a·b + c; where one rounding is meant, fmaf stands in the text.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef __nv_bfloat16 bf16;

constexpr u32 kAllLanes = 0xffffffffu;
constexpr u32 kNone = 0xffffffffu;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

// A matrix with rows `stride` elements apart; `Matrix` of src/cuda/buffer.rs.
template <class T>
struct Matrix {
    T* data;
    i64 stride;

    __device__ T* row(i64 r) const { return data + r * stride; }
};

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ bf16 to_bf16(float x) { return __float2bfloat16_rn(x); }

// Both halves of a register of two bf16.
__device__ __forceinline__ float low_float(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<u32*>(&pair);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

// Sum over the lanes of a warp, every lane gets it; the order is fixed.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(kAllLanes, x, offset);
    return x;
}

// Sum over a block of kThreads threads, every thread gets it; the order is fixed. `partial` holds kThreads / 32 values.
template <int kThreads>
__device__ __forceinline__ float block_sum(float x, float* partial) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) sum += partial[w];
    __syncthreads();
    return sum;
}
