// targets: sm_80
// Products of many tokens with matrices of E2M1 codes in groups of 16: see common/mma_tile_bf16.cuh.
#include "common/mma_tile_bf16.cuh"

MMA_TILE_KERNEL(nvfp4, kNvfp4)
