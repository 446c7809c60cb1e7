// targets: sm_80
// Products of many tokens with matrices of E4M3 codes: see common/mma_tile_bf16.cuh.
#include "common/mma_tile_bf16.cuh"

MMA_TILE_KERNEL(fp8, kFp8)
