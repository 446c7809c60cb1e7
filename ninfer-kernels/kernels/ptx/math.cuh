// Arithmetic instructions, one function each.
#pragma once
#include "common/types.cuh"

// 2^x to about two units in the last place; 0 for −infinity and for results below the normal numbers.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Bytes of two words: nibble i of `choice` says which of the eight is byte i of the result.
__device__ __forceinline__ u32 choose_bytes(u32 low, u32 high, u32 choice) { return __byte_perm(low, high, choice); }
