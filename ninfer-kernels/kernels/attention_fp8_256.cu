// targets: sm_80 sm_90
// local memory: attend_prompt_fp8_256: eight bytes or a few more, by some assemblers, beside 250 registers that hold the output
// Attention over fp8 pages with heads of 256 features: common/attend_step.cuh, common/attend_prefill.cuh and, where a block
// has much shared memory, common/attend_prompt.cuh.
#include "common/attend_prefill.cuh"
#include "common/attend_prompt.cuh"
#include "common/attend_step.cuh"

ATTEND_STEP(attend_step_fp8_256_16, kKvFp8, 256, 1)
ATTEND_STEP(attend_step_fp8_256_32, kKvFp8, 256, 2)
#if __CUDA_ARCH__ >= 900
ATTEND_PROMPT(attend_prompt_fp8_256, kKvFp8)
#else
ATTEND_PREFILL(attend_prefill_fp8_256_64, kKvFp8, 256, 4)
#endif
