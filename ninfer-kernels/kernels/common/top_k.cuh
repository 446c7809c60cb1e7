// Choice of experts by one warp.
#pragma once
#include "common/types.cuh"
#include "ptx/coherent.cuh"

// Order of a logit, larger is better, at least 1; NaN is worst. −0 equals 0.
__device__ __forceinline__ u32 logit_order(float x) {
    if (isnan(x)) return 1;
    const u32 bits = __float_as_uint(x + 0.0f);
    return (bits >> 31 ? ~bits : bits | 0x80000000u) + 1;
}

__device__ __forceinline__ float logit_of(u32 order) {
    if (order == 1) return not_a_number();
    const u32 bits = order - 1;
    return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// The logits of a token, `kEach` for a lane: lane l has those of experts l + 32 i; 0 means that there is none. With kEach
// of 0 they are read again whenever they are asked for.
template <int kEach>
struct Logits {
    const float* from;
    int count;
    u32 order[kEach == 0 ? 1 : kEach];

    __device__ __forceinline__ Logits(const float* from_, int count_, int lane) : from(from_), count(count_) {
        if constexpr (kEach > 0) {
#pragma unroll
            for (int i = 0; i < kEach; i++) {
                const int e = lane + 32 * i;
                order[i] = e < count ? logit_order(load_l2(from + e)) : 0;
            }
        }
    }

    template <class Visit>
    __device__ __forceinline__ void each(int lane, Visit visit) const {
        if constexpr (kEach > 0) {
#pragma unroll
            for (int i = 0; i < kEach; i++) visit(lane + 32 * i, order[i]);
        } else {
            for (int e = lane; e < count; e += 32) visit(e, logit_order(load_l2(from + e)));
        }
    }
};

// p = softmax of all logits; the k largest p, largest first, ties in order of experts; divided by their sum if
// `renormalise`. All lanes of a warp call it.
template <int kEach>
__device__ __forceinline__ void choose_experts(const float* from, int count, int k, bool renormalise, int* experts, float* weights) {
    const int lane = threadIdx.x % 32;
    const Logits<kEach> logits(from, count, lane);
    u32 best = 0;
    logits.each(lane, [&](int, u32 order) { best = max(best, order); });
    best = __reduce_max_sync(kAllLanes, best);
    const float most = logit_of(best);
    float sum = 0.0f;
    logits.each(lane, [&](int, u32 order) { sum += order > 0 ? expf(logit_of(order) - most) : 0.0f; });
    sum = warp_sum(sum);

    float chosen = 0.0f;
    u32 last = 0xffffffffu;
    int last_expert = -1;
    for (int j = 0; j < k; j++) {
        // The best behind the last one.
        u32 most_order = 0;
        u32 expert = 0xffffffffu;
        logits.each(lane, [&](int e, u32 order) {
            const bool left = order < last || (order == last && e > last_expert);
            if (left && order > most_order) most_order = order, expert = e;
        });
        const u32 next = __reduce_max_sync(kAllLanes, most_order);
        if (most_order != next) expert = 0xffffffffu;
        last = next;
        last_expert = static_cast<int>(__reduce_min_sync(kAllLanes, expert));
        const float w = expf(logit_of(next) - most) / sum;
        if (lane == 0) experts[j] = last_expert;
        if (lane == j % 32) weights[j] = w;
        chosen += w;
    }
    if (renormalise) {
        __syncwarp();
        for (int j = lane; j < k; j += 32) weights[j] = weights[j] / chosen;
    }
}

// For any number of experts.
__device__ __forceinline__ void choose_experts(const float* from, int count, int k, bool renormalise, int* experts, float* weights) {
    if (count <= 256) {
        choose_experts<8>(from, count, k, renormalise, experts, weights);
    } else {
        choose_experts<0>(from, count, k, renormalise, experts, weights);
    }
}
