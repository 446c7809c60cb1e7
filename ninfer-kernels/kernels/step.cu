// targets: sm_80 sm_90
// Products of steps of at most eight tokens: common/step.cuh.
#include "common/step.cuh"

// One row block at a time.
extern "C" __global__ void __launch_bounds__(288, 3) step_rows(const __grid_constant__ Step a) { step<1>(a); }

// A row block of each half, for SwiGLU.
extern "C" __global__ void __launch_bounds__(288, 2) step_pair(const __grid_constant__ Step a) { step<2>(a); }
