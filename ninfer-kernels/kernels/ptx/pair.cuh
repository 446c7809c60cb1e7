// Arithmetic on pairs of bf16, one function each.
#pragma once
#include "common/types.cuh"

// a · b + c of two bf16 pairs, rounded once.
__device__ __forceinline__ u32 multiply_add_pair(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
