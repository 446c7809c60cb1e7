// Small asynchronous copies.
#pragma once
#include "common/types.cuh"

// 8 bytes from global to shared memory.
__device__ __forceinline__ void copy_async_8(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global));
}
