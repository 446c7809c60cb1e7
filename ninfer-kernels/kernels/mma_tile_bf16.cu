// targets: sm_80
// Products of many tokens with matrices of plain elements: see common/mma_tile_bf16.cuh.
#include "common/mma_tile_bf16.cuh"

MMA_TILE_KERNEL(bf16, kBf16)
