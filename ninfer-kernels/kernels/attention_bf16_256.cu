// targets: sm_80 sm_90
// Attention over bf16 pages with heads of 256 features: common/attend_step.cuh, common/attend_prefill.cuh and, where a block
// has much shared memory, common/attend_prompt.cuh.
#include "common/attend_prefill.cuh"
#include "common/attend_prompt.cuh"
#include "common/attend_step.cuh"

ATTEND_STEP(attend_step_bf16_256_16, kKvBf16, 256, 1)
ATTEND_STEP(attend_step_bf16_256_32, kKvBf16, 256, 2)
#if __CUDA_ARCH__ >= 900
ATTEND_PROMPT(attend_prompt_bf16_256, kKvBf16)
#else
ATTEND_PREFILL(attend_prefill_bf16_256_64, kKvBf16, 256, 4)
ATTEND_PREFILL(attend_prefill_bf16_256_32, kKvBf16, 256, 2)
#endif
