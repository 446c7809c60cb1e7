// targets: sm_80 sm_90
// Products of steps of at most eight tokens: common/step.cuh.
#include "common/step.cuh"

// Blocks of a multiprocessor.
#if __CUDA_ARCH__ >= 900
#define STEP_ROWS 3
#define STEP_PAIR 2
#else
#define STEP_ROWS 2
#define STEP_PAIR 1
#endif

// One row block at a time.
extern "C" __global__ void __launch_bounds__(288, STEP_ROWS) step_rows(const __grid_constant__ Step a) { step<1>(a); }

// A row block of each half, for SwiGLU.
extern "C" __global__ void __launch_bounds__(288, STEP_PAIR) step_pair(const __grid_constant__ Step a) { step<2>(a); }
