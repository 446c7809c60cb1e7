// The causal convolution of Gated DeltaNet: one channel in a thread.
#pragma once
#include "common/gdn.cuh"

// The window of a channel as it is stored, moved by `count` of its columns, which are `stride` apart: `taps` − 1 columns, at
// the end. Older ones have no weight and are zeros, as all are with `zero`. No load waits for another or is in a branch.
template <int kTaps>
struct Window {
    bf16 raw[kTaps - 1];
    u32 none;  // bit j: column j is zero

    __device__ __forceinline__ void load(const bf16* window, int taps, bool zero, const bf16* columns, i64 stride, int count) {
        none = 0;
#pragma unroll
        for (int j = 0; j < kTaps - 1; j++) {
            const int from = j + count, at = max(from - (kTaps - taps), 0);
            raw[j] = *(from >= kTaps - 1 ? columns + (from - (kTaps - 1)) * stride : window + at);
            none |= (from < kTaps - 1 && (zero || from < kTaps - taps) ? 1u : 0u) << j;
        }
    }

    __device__ __forceinline__ bf16 column(int j) const { return none >> j & 1 ? to_bf16(0.0f) : raw[j]; }

    __device__ __forceinline__ void store(bf16* window, int taps) const {
#pragma unroll
        for (int j = 0; j < kTaps - 1; j++) {
            const int at = j - (kTaps - taps);
            if (at >= 0) window[at] = column(j);
        }
    }
};

// The last columns of a channel, the newest at the end.
template <int kTaps>
struct History {
    float x[kTaps - 1];

    __device__ __forceinline__ void start(const Window<kTaps>& window) {
#pragma unroll
        for (int j = 0; j < kTaps - 1; j++) x[j] = to_float(window.column(j));
    }

    __device__ __forceinline__ void push(float next) {
#pragma unroll
        for (int j = 0; j + 2 < kTaps; j++) x[j] = x[j + 1];
        x[kTaps - 2] = next;
    }
};

template <int kTaps>
struct Taps {
    float w[kTaps];

    __device__ __forceinline__ void load(const float* weight, int taps) {
#pragma unroll
        for (int j = 0; j < kTaps; j++) {
            const int at = j - (kTaps - taps);
            w[j] = at >= 0 ? __ldg(weight + at) : 0.0f;
        }
    }

    __device__ __forceinline__ float apply(const History<kTaps>& h, float x, int taps) const {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < kTaps; j++) {
            if (j >= kTaps - taps) sum = fmaf(w[j], j < kTaps - 1 ? h.x[j < kTaps - 1 ? j : 0] : x, sum);
        }
        return silu(sum);
    }
};
