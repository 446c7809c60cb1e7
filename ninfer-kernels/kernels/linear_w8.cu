// targets: sm_80 sm_90
// Projections with w8 weights: common/linear.cuh.
#include "common/linear.cuh"

LINEAR_KERNELS(w8, kW8)
