// targets: sm_80 sm_90
// Projections with q6 weights: common/linear.cuh.
#include "common/linear.cuh"

LINEAR_KERNELS(q6, kQ6)
