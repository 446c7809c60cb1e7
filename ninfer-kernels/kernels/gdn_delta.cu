// targets: sm_80
// The gated delta rule for heads of 128 key and 128 value features: see common/delta.cuh.
#include "common/delta.cuh"

DELTA_KERNEL(gdn_round_full, 32, 4, true, true)
DELTA_KERNEL(gdn_prompt_full, 32, 4, false, true)
