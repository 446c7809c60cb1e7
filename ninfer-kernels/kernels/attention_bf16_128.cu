// targets: sm_80
// Attention over bf16 pages with heads of 128 features: common/attend_step.cuh, common/attend_prefill.cuh.
#include "common/attend_prefill.cuh"
#include "common/attend_step.cuh"

ATTEND_STEP(attend_step_bf16_128_16, kKvBf16, 128, 1)
ATTEND_STEP(attend_step_bf16_128_32, kKvBf16, 128, 2)
ATTEND_PREFILL(attend_prefill_bf16_128_64, kKvBf16, 128, 4)
