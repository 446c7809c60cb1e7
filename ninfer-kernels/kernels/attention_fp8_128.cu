// targets: sm_80
// Attention over fp8 pages with heads of 128 features: common/attend_step.cuh, common/attend_prefill.cuh.
#include "common/attend_prefill.cuh"
#include "common/attend_step.cuh"

ATTEND_STEP(attend_step_fp8_128_16, kKvFp8, 128, 1)
ATTEND_STEP(attend_step_fp8_128_32, kKvFp8, 128, 2)
ATTEND_PREFILL(attend_prefill_fp8_128_64, kKvFp8, 128, 4)
