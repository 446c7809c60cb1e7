// targets: sm_80 sm_90
// local memory: linear_w8_64: two scales a record and 64 columns need a few bytes more than the registers of 8.6 and 8.9
// Projections with w8 weights: common/linear.cuh.
#include "common/linear.cuh"

LINEAR_KERNELS(w8, kW8)
