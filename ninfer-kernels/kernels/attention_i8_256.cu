// targets: sm_80
// local memory: attend_prefill_i8_256_64: 256 output columns of 64 rows fill the registers; a few bytes of addresses are kept in memory
// Attention over i8 pages with heads of 256 features: common/attend_step.cuh, common/attend_prefill.cuh.
#include "common/attend_prefill.cuh"
#include "common/attend_step.cuh"

ATTEND_STEP(attend_step_i8_256_16, kKvI8, 256, 1)
ATTEND_STEP(attend_step_i8_256_32, kKvI8, 256, 2)
ATTEND_PREFILL(attend_prefill_i8_256_64, kKvI8, 256, 4)
