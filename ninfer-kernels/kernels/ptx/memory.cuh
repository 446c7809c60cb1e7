// Memory instructions, one function each.
#pragma once
#include "common/types.cuh"

// 16 bytes that are read often, or zeros, without a branch.
__device__ __forceinline__ uint4 load_or_zero(const void* p, bool valid) {
    uint4 v;
    asm("{ .reg .pred q; setp.ne.u32 q, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
        " @q ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(static_cast<u32>(valid)));
    return v;
}

// 16 bytes from global to shared memory, asynchronously; zeros if `valid` is false.
__device__ __forceinline__ void copy_async(u32 shared, const void* global, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending));
}

// Brings a line of memory that no kernel writes into L1.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
