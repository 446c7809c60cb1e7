// A barrier for the optimiser alone.
#pragma once
#include "common/types.cuh"

// Keeps the compiler from knowing a value.
__device__ __forceinline__ void hide(i64& x) { asm volatile("" : "+l"(x)); }
