// Arithmetic on pairs of f16, one function each.
#pragma once
#include "common/types.cuh"

// a · b of two f16 pairs, rounded once.
__device__ __forceinline__ u32 multiply_half_pair(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// a · b + c of two f16 pairs, rounded once.
__device__ __forceinline__ u32 multiply_add_half_pair(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Two f16, the first one in the low half; what is too large becomes infinite.
__device__ __forceinline__ u32 round_half_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
