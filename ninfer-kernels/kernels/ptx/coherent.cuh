// Loads of what other blocks of the same launch write, one function each.
#pragma once
#include "common/types.cuh"

// A word, with everything that was written before it.
__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// Past L1.
template <class T>
__device__ __forceinline__ T load_l2(const T* p) {
    return __ldcg(p);
}
