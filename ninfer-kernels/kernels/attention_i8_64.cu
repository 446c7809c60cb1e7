// targets: sm_80
// Attention over i8 pages with heads of 64 features: common/attend_step.cuh, common/attend_prefill.cuh.
#include "common/attend_prefill.cuh"
#include "common/attend_step.cuh"

ATTEND_STEP(attend_step_i8_64_16, kKvI8, 64, 1)
ATTEND_STEP(attend_step_i8_64_32, kKvI8, 64, 2)
ATTEND_PREFILL(attend_prefill_i8_64_64, kKvI8, 64, 4)
