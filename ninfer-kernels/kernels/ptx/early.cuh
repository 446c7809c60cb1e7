// Requests that change nothing but the time at which data is near, one function each instruction.
#pragma once
#include "common/types.cuh"

// Begins to bring a line of 128 bytes into L2. Legal before grid_wait() for anything that is allocated: L2 holds what the
// kernel before writes later.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
