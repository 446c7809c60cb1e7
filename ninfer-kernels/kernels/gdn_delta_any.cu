// targets: sm_80
// The gated delta rule for heads of any number of value features, and of up to 32 or up to 256 key features: see
// common/delta.cuh.
#include "common/delta.cuh"

DELTA_KERNEL(gdn_round_32, 8, 4, true, false)
DELTA_KERNEL(gdn_round_256, 32, 8, true, false)
DELTA_KERNEL(gdn_prompt_32, 8, 4, false, false)
DELTA_KERNEL(gdn_prompt_256, 32, 8, false, false)
