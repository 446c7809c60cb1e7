// Barriers of a part of a block.
#pragma once
#include "common/types.cuh"

// Waits until kThreads threads are at barrier `id`, 1 to 15.
template <int kThreads>
__device__ __forceinline__ void barrier_of(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
