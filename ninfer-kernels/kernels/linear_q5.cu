// targets: sm_80 sm_90
// Projections with q5 weights: common/linear.cuh.
#include "common/linear.cuh"

LINEAR_KERNELS(q5, kQ5)
