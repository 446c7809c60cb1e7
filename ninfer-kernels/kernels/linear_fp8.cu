// targets: sm_80 sm_90
// Projections with fp8 weights: common/linear.cuh.
#include "common/linear.cuh"

LINEAR_KERNELS(fp8, kFp8)
