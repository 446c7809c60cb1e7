// targets: sm_80 sm_90
// Projections with q4 weights: common/linear.cuh.
#include "common/linear.cuh"

LINEAR_KERNELS(q4, kQ4)
