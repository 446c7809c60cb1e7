// Gated DeltaNet: what its kernels share. The operation is `GdnMix` and `GdnFold` of ninfer-core's `ops::gdn`.
#pragma once
#include "common/batch.cuh"
#include "common/report.cuh"

// Recorded columns of rounds, two banks of `width` for each slot; a round without a record has width 0.
struct GdnRecord {
    bf16* columns;    // [slots · 2 · W, C]: input of the convolution
    bf16* key_value;  // [slots · 2 · W, Kd + Vd]: convolved keys before their norm, then values
    float* gates;     // [slots · 2 · W, 2 Hv]: log decay, then β
    int width;
    int unused;

    __device__ i64 row(int slot, int bank, int column) const {
        return (static_cast<i64>(slot) * 2 + bank) * width + column;
    }
};

struct GdnFault {
    u32 code, got, limit;
};

// `GdnArg` of src/cuda/gdn.rs, the parameter of all kernels of the family.
struct Gdn {
    Batch batch;
    Matrix<const bf16> qkv, z, a, b;
    Matrix<bf16> output;
    GdnRecord record;
    const float* conv;     // [C, K], the newest column last
    const float* a_log;    // [Hv]
    const float* dt_bias;  // [Hv]
    const float* gain;     // [dv]
    bf16* window;          // [slots · C, K − 1], oldest first
    float* matrix;         // [slots · Hv · dk, dv]
    float* mixed;          // workspace: convolved columns [T, C] of prompts, queries [T, Kd] of rounds
    float* gates;          // workspace: [T, 2 Hv] as in a record, for prompts
    float* reads;          // workspace: read-outs [T, Vd]
    Report* report;
    int slots;
    int key_heads, value_heads, key_dim, value_dim;
    int taps;       // K
    int sigmoid;    // activation of the output gate: 1 for sigmoid, 0 for silu
    int fold_only;  // 1: nothing but the fold of recorded columns
    float eps;
    float query_scale;  // dk^(−1/2)

    __device__ int keys() const { return key_heads * key_dim; }
    __device__ int values() const { return value_heads * value_dim; }
    __device__ int channels() const { return 2 * keys() + values(); }
    __device__ int columns(const Segment& s) const { return fold_only ? 0 : s.len; }
    __device__ bool idle(const Segment& s) const { return (fold_only ? s.fold : s.len) == 0; }

    // What is wrong with a segment that is not idle; code 0 for nothing. Words below 0 are large here.
    __device__ GdnFault fault(const Segment& s) const {
        const u32 len = s.len, fold = s.fold, row = s.row, rows = batch.rows;
        if (len > 0 && (len > rows || row > rows - len)) return {kSegmentRows, row, rows};
        if (static_cast<u32>(s.bank) > 1) return {kBank, static_cast<u32>(s.bank), 2};
        if (fold > static_cast<u32>(s.start) || s.start < 0) return {kFold, fold, static_cast<u32>(s.start) + 1};
        if (static_cast<u32>(s.slot) >= static_cast<u32>(slots)) return {kSlot, static_cast<u32>(s.slot), static_cast<u32>(slots)};
        if (record.width == 0) return fold > 0 ? GdnFault{kFold, fold, 1} : GdnFault{0, 0, 0};
        const u32 width = record.width;
        if (fold > width) return {kFoldedColumns, fold, width + 1};
        if (!fold_only && len > width) return {kRecordedColumns, len, width + 1};
        return {0, 0, 0};
    }

    __device__ void report_fault(const GdnFault& f) const { report_error(report, f.code, f.got, f.limit); }
};

static_assert(sizeof(Gdn) == 264, "as on the host");

// log(1 + eˣ); the identity above 20, where the difference is below f32 resolution.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Log decay of a value head. exp(A_log) stays finite, so that it never meets a softplus of zero as infinity.
__device__ __forceinline__ float gdn_log_decay(float a_log, float a, float dt_bias) {
    return -fminf(expf(a_log), 0x1.fffffep127f) * softplus(a + dt_bias);
}

// act(z) of the output gate.
__device__ __forceinline__ float gdn_gate(const Gdn& a, float z) { return a.sigmoid ? sigmoid(z) : silu(z); }
