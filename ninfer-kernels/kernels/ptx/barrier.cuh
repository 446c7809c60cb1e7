// Barriers in shared memory between warps that bring data and warps that use it, one function each. Plain sm_90.
#pragma once
#include "ptx/bulk.cuh"

#if __CUDA_ARCH__ >= 900
// The barrier's phases end after this many arrivals.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// What this thread wrote to shared memory is seen by matrix instructions that are ordered behind it.
__device__ __forceinline__ void fence_shared_for_matrices() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif
