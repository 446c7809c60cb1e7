// targets: sm_80 sm_90
// Projections with bf16 weights: common/linear.cuh.
#include "common/linear.cuh"

LINEAR_KERNELS(bf16, kBf16)
