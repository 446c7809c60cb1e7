// targets: sm_80
// Gated DeltaNet in three launches: convolution and gates (here); delta rule (gdn_delta.cu); gated norm (here).
//
//   y_t = silu(Σ_j w_j x_{t−K+1+j}) per channel           g = −exp(A_log) softplus(a + dt_bias)        β = sigmoid(b)
//   S ← exp(g) S;  u = β (v − Sᵀk̂);  S ← S + k̂ uᵀ;  o = Sᵀq̂   per value head        out = N(o) · gain · act(z)
//
// Rounds (with a record) fold the columns of the round before into window and matrix, record raw columns, keys, values and
// gates as bf16 and f32, and run the rule on a copy of the state with the values as recorded, so that a later fold repeats
// the same arithmetic to the last bit. Prompts (without) advance window and matrix over all rows in f32.
#include "common/columns.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kTile = 16;   // tokens of a prompt that a thread convolves
constexpr int kGroup = 4;   // columns of a round that are loaded at once

// Log decay and β of the rows `row ..` of the call, as rows of `to`.
__device__ __forceinline__ void gates(const Gdn& a, int row, int count, float* to) {
    const int heads = a.value_heads;
    for (int i = threadIdx.x; i < count * heads; i += kThreads) {
        const int t = i / heads, h = i % heads;
        const float rate = to_float(__ldg(a.a.row(row + t) + h)), open = to_float(__ldg(a.b.row(row + t) + h));
        float* at = to + static_cast<i64>(t) * 2 * heads + h;
        at[0] = gdn_log_decay(a.a_log[h], rate, a.dt_bias[h]);
        at[heads] = sigmoid(open);
    }
}

// Grid (⌈C / 256⌉ + 1, segments): a thread has a channel, the last block the gates.
template <int kTaps>
__device__ __forceinline__ void round_columns(const Gdn& a) {
    const Segment s = a.batch.segment(blockIdx.y);
    if (a.idle(s)) return;
    const GdnFault fault = a.fault(s);
    if (fault.code != 0) {
        if (blockIdx.x == 0 && threadIdx.x == 0) a.report_fault(fault);
        return;
    }
    const int len = a.columns(s), channels = a.channels(), keys = a.keys();
    const i64 first = a.record.row(s.slot, s.bank, 0), folded = a.record.row(s.slot, 1 - s.bank, 0);
    if (blockIdx.x == gridDim.x - 1) {
        gates(a, s.row, len, a.record.gates + first * 2 * a.value_heads);
        return;
    }
    const int c = blockIdx.x * kThreads + threadIdx.x;
    if (c >= channels) return;

    Taps<kTaps> taps;
    taps.load(a.conv + static_cast<i64>(c) * a.taps, a.taps);
    bf16* window = a.window + (static_cast<i64>(s.slot) * channels + c) * (a.taps - 1);
    Window<kTaps> moved;
    moved.load(window, a.taps, s.base() == 0, a.record.columns + folded * channels + c, channels, s.fold);
    if (s.fold > 0 || s.base() == 0) moved.store(window, a.taps);
    History<kTaps> history;
    history.start(moved);

    const int kv = keys + a.values();
    for (int t0 = 0; t0 < len; t0 += kGroup) {
        bf16 x[kGroup];
#pragma unroll
        for (int t = 0; t < kGroup; t++) {
            if (t0 + t < len) x[t] = __ldg(a.qkv.row(s.row + t0 + t) + c);
        }
#pragma unroll
        for (int t = 0; t < kGroup; t++) {
            if (t0 + t >= len) break;
            const float y = taps.apply(history, to_float(x[t]), a.taps);
            history.push(to_float(x[t]));
            const i64 at = first + t0 + t;
            a.record.columns[at * channels + c] = x[t];
            if (c < keys) {
                a.mixed[static_cast<i64>(s.row + t0 + t) * keys + c] = y;
            } else {
                a.record.key_value[at * kv + c - keys] = to_bf16(y);
            }
        }
    }
}

// Grid (⌈C / 256⌉ + 1, ⌈T / 16⌉ + segments): a thread has a channel of 16 tokens of one segment, the last block their gates.
template <int kTaps>
__device__ __forceinline__ void prompt_columns(const Gdn& a) {
    int tile = blockIdx.y, i = 0;
    for (; i < a.batch.segments; i++) {
        const int len = a.batch.segment(i).len;
        const int tiles = len < 0 ? 1 : divide_up(min(len, a.batch.rows), kTile);
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (i == a.batch.segments) return;
    const Segment s = a.batch.segment(i);
    const GdnFault fault = a.fault(s);
    if (fault.code != 0) {
        if (tile == 0 && blockIdx.x == 0 && threadIdx.x == 0) a.report_fault(fault);
        return;
    }
    const int begin = tile * kTile, count = min(kTile, s.len - begin), channels = a.channels();
    const int row = s.row + begin;
    if (blockIdx.x == gridDim.x - 1) {
        gates(a, row, count, a.gates + static_cast<i64>(row) * 2 * a.value_heads);
        return;
    }
    const int c = blockIdx.x * kThreads + threadIdx.x;
    if (c >= channels) return;

    bf16 x[kTile];
#pragma unroll
    for (int t = 0; t < kTile; t++) {
        if (t < count) x[t] = __ldg(a.qkv.row(row + t) + c);
    }
    Taps<kTaps> taps;
    taps.load(a.conv + static_cast<i64>(c) * a.taps, a.taps);
    History<kTaps> history;
    if (begin == 0) {
        // The window is read and written by this thread alone: the next tile begins 16 columns later.
        bf16* window = a.window + (static_cast<i64>(s.slot) * channels + c) * (a.taps - 1);
        const bool zero = s.base() == 0;
        const bf16* columns = a.qkv.row(s.row) + c;
        Window<kTaps> before, behind;
        before.load(window, a.taps, zero, columns, a.qkv.stride, 0);
        behind.load(window, a.taps, zero, columns, a.qkv.stride, s.len);
        history.start(before);
        behind.store(window, a.taps);
    } else {
#pragma unroll
        for (int j = 0; j < kTaps - 1; j++) history.x[j] = to_float(__ldg(a.qkv.row(row - (kTaps - 1) + j) + c));
    }
#pragma unroll
    for (int t = 0; t < kTile; t++) {
        if (t >= count) break;
        a.mixed[static_cast<i64>(row + t) * channels + c] = taps.apply(history, to_float(x[t]), a.taps);
        history.push(to_float(x[t]));
    }
}

}  // namespace

#define COLUMNS_KERNEL(name, columns) \
    extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ Gdn a) { columns(a); }

// Convolutions of up to 4 and up to 8 taps.
COLUMNS_KERNEL(gdn_round_columns_4, round_columns<4>)
COLUMNS_KERNEL(gdn_round_columns_8, round_columns<8>)
COLUMNS_KERNEL(gdn_prompt_columns_4, prompt_columns<4>)
COLUMNS_KERNEL(gdn_prompt_columns_8, prompt_columns<8>)

// Grid (T, ⌈Hv / 8⌉): a warp has a head of a row. Zeros for padding rows.
extern "C" __global__ void __launch_bounds__(kThreads) gdn_norm(const __grid_constant__ Gdn a) {
    const int lane = threadIdx.x % 32, head = blockIdx.y * (kThreads / 32) + threadIdx.x / 32, row = blockIdx.x;
    if (head >= a.value_heads) return;
    const int dv = a.value_dim, at = head * dv;
    const float* x = a.reads + static_cast<i64>(row) * a.values() + at;
    const bf16* z = a.z.row(row) + at;
    bf16* y = a.output.row(row) + at;
    const bool owned = a.batch.find(row) >= 0;
    float sum = 0.0f;
    for (int d = 0; d < dv; d += 32) {
        const float v = owned && d + lane < dv ? x[d + lane] : 0.0f;
        sum += warp_sum(v * v);
    }
    const float factor = rsqrtf(sum / dv + a.eps);
    for (int d = lane; d < dv; d += 32) {
        y[d] = to_bf16(owned ? x[d] * factor * a.gain[d] * gdn_gate(a, to_float(z[d])) : 0.0f);
    }
}
