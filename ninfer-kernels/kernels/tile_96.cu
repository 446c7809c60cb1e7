// targets: sm_90a
// Products of prompts in tiles of 96 tokens: common/tile.cuh.
#include "common/tile.cuh"

TILE_KERNEL(96)
