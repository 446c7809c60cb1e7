// targets: sm_80 sm_90
// Projections with nvfp4 weights: common/linear.cuh.
#include "common/linear.cuh"

LINEAR_KERNELS(nvfp4, kNvfp4)
