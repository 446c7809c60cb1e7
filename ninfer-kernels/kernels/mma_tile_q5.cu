// targets: sm_80
// Products of many tokens with matrices of 5-bit integers: see common/mma_tile_bf16.cuh.
#include "common/mma_tile_bf16.cuh"

MMA_TILE_KERNEL(q5, kQ5)
