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

// Adds to a counter and gives what it was. What this thread, or its block before a barrier, wrote is seen by whoever adds
// later, and what those wrote who added before is seen here.
__device__ __forceinline__ u32 add_acquire_release(u32* p, u32 value) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(value) : "memory");
    return before;
}
