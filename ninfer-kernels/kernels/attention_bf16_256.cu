// targets: sm_80
// Attention over bf16 pages with heads of 256 features: common/attend_step.cuh, common/attend_prefill.cuh.
#include "common/attend_prefill.cuh"
#include "common/attend_step.cuh"

ATTEND_STEP(attend_step_bf16_256_16, kKvBf16, 256, 1)
ATTEND_STEP(attend_step_bf16_256_32, kKvBf16, 256, 2)
ATTEND_PREFILL(attend_prefill_bf16_256_64, kKvBf16, 256, 4)
ATTEND_PREFILL(attend_prefill_bf16_256_32, kKvBf16, 256, 2)
