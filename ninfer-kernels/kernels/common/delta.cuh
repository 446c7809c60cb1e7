// The gated delta rule with the state in registers, for prompts, rounds and folds alike.
#pragma once
#include "common/gdn.cuh"
#include "ptx/hide.cuh"

// A lane's part of one head's state: a column (value feature) is whole in kParts lanes, each with every kParts-th group of
// four rows (key features). Lane kParts · c + p of a warp has column c and rows 4 (kParts · i + p) + e for e in 0..4. Sums
// over rows run in ascending order inside a lane, even and odd rows apart, then over the lanes; this order is the same for
// prompts, rounds and folds.
template <int kRows, int kParts>
struct DeltaState {
    float s[kRows];

    __device__ static __forceinline__ int row(int part, int r) { return 4 * (r / 4 * kParts + part) + r % 4; }

    // `at` is the column's element of row 0, rows are `stride` apart; only rows below `rows` of columns that are `live` exist.
    __device__ __forceinline__ void load(const float* at, i64 stride, int part, int rows, bool live) {
#pragma unroll
        for (int r = 0; r < kRows; r++) s[r] = 0.0f;
        if (!live) return;
        at += 4 * part * stride;
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            if (row(part, r) < rows) s[r] = at[row(0, r) * stride];
        }
    }

    __device__ __forceinline__ void store(float* at, i64 stride, int part, int rows, bool live) const {
        if (!live) return;
        hide(stride);  // or else the addresses of `load` stay in registers
        at += 4 * part * stride;
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            if (row(part, r) < rows) at[row(0, r) * stride] = s[r];
        }
    }

    // One token: S ← αS; u = β (v − Sᵀk); S ← S + k uᵀ. Gives Sᵀq, as α(S₀ᵀq) + (k·q) u, so that both sums over rows run at
    // once. `k` and `q` are in shared memory, zeros behind the last feature.
    __device__ __forceinline__ float column(const float* k, const float* q, int part, float decay, float beta, float kq, float v) {
        const float4* k4 = reinterpret_cast<const float4*>(k) + part;
        const float4* q4 = reinterpret_cast<const float4*>(q) + part;
        float key[kRows];
        float sk0 = 0.0f, sk1 = 0.0f, sq0 = 0.0f, sq1 = 0.0f;
#pragma unroll
        for (int i = 0; i < kRows / 4; i++) {
            const float4 x = k4[kParts * i], y = q4[kParts * i];
            key[4 * i] = x.x, key[4 * i + 1] = x.y, key[4 * i + 2] = x.z, key[4 * i + 3] = x.w;
            sk0 = fmaf(s[4 * i], x.x, sk0), sk1 = fmaf(s[4 * i + 1], x.y, sk1);
            sq0 = fmaf(s[4 * i], y.x, sq0), sq1 = fmaf(s[4 * i + 1], y.y, sq1);
            sk0 = fmaf(s[4 * i + 2], x.z, sk0), sk1 = fmaf(s[4 * i + 3], x.w, sk1);
            sq0 = fmaf(s[4 * i + 2], y.z, sq0), sq1 = fmaf(s[4 * i + 3], y.w, sq1);
        }
        float sk = sk0 + sk1, sq = sq0 + sq1;
#pragma unroll
        for (int offset = 1; offset < kParts; offset *= 2) {
            sk += __shfl_xor_sync(kAllLanes, sk, offset);
            sq += __shfl_xor_sync(kAllLanes, sq, offset);
        }
        const float u = beta * fmaf(-decay, sk, v);
#pragma unroll
        for (int r = 0; r < kRows; r++) s[r] = fmaf(key[r], u, decay * s[r]);
        return fmaf(kq, u, decay * sq);
    }
};

// Columns on their way from device memory to shared memory, a batch of 8 at a time for a block of four warps, each of
// which brings two. Normalises keys and queries.
constexpr int kGdnBatch = 8;
constexpr int kDeltaThreads = 128;
constexpr float kL2Eps = 1e-6f;

template <int kDim, int kSlice>
struct alignas(16) DeltaColumns {
    float k[kGdnBatch][kDim];
    float q[kGdnBatch][kDim];
    float v[kGdnBatch][kSlice];
    float decay[kGdnBatch], beta[kGdnBatch], kq[kGdnBatch];
};

// Where a lane finds its elements of the columns of a segment: those to be folded, then those of the call. Pointers are those
// of column 0, as if all columns of a kind lay behind each other.
template <bool kRecorded>
struct DeltaSource {
    const bf16 *folded, *recorded;  // keys in a record
    const float *mixed;             // queries of rounds; keys of prompts
    const float *folded_gates, *gates;
    i64 recorded_stride, mixed_stride, gates_stride;
    i64 query, value;  // from keys to queries and values of the same column
    int fold, count;   // folded columns; all columns
    int keys, values;  // elements of the head behind this lane's first
    int heads;

    __device__ __forceinline__ DeltaSource(const Gdn& a, const Segment& s, int dk, int dv, int head, int first, int lane) {
        const int all_keys = a.key_heads * dk, all_values = a.value_heads * dv;
        const int key = head / (a.value_heads / a.key_heads) * dk + lane, at = head * dv + first + lane;
        fold = kRecorded ? s.fold : 0;
        count = fold + a.columns(s);
        keys = dk - lane, values = dv - first - lane;
        heads = a.value_heads;
        gates_stride = 2 * heads;
        if (kRecorded) {
            const i64 from = a.record.row(s.slot, 1 - s.bank, 0), to = a.record.row(s.slot, s.bank, 0) - fold;
            recorded_stride = all_keys + all_values, mixed_stride = all_keys;
            folded = a.record.key_value + from * recorded_stride + key;
            recorded = a.record.key_value + to * recorded_stride + key;
            mixed = a.mixed + (static_cast<i64>(s.row) - fold) * mixed_stride + key;
            folded_gates = a.record.gates + from * gates_stride + head;
            gates = a.record.gates + to * gates_stride + head;
            query = 0, value = all_keys + at - key;
        } else {
            recorded_stride = 0, mixed_stride = 2 * all_keys + all_values;
            folded = recorded = nullptr;
            mixed = a.mixed + s.row * mixed_stride + all_keys + key;
            folded_gates = gates = a.gates + s.row * gates_stride + head;
            query = -all_keys, value = all_keys + at - key;
        }
    }

    template <int kDim>
    __device__ __forceinline__ void fetch(int m, float (&k)[kDim / 32], float (&q)[kDim / 32], float& v, float& g, float& beta) const {
        const bool round = m >= fold;
        const bf16* kv = (round ? recorded : folded) + m * recorded_stride;
        const float* x = mixed + m * mixed_stride;
        const float* gate = (round ? gates : folded_gates) + m * gates_stride;
#pragma unroll
        for (int i = 0; i < kDim / 32; i++) {
            const bool live = 32 * i < keys;
            k[i] = !live ? 0.0f : kRecorded ? to_float(__ldg(kv + 32 * i)) : __ldg(x + 32 * i);
            q[i] = live && round ? __ldg(x + query + 32 * i) : 0.0f;
        }
        v = values <= 0 ? 0.0f : kRecorded ? to_float(__ldg(kv + value)) : __ldg(x + value);
        g = __ldg(gate), beta = __ldg(gate + heads);
    }
};

template <int kDim, bool kRecorded>
struct DeltaStage {
    static constexpr int kWarps = 4, kEach = kGdnBatch / kWarps;
    float k[kEach][kDim / 32], q[kEach][kDim / 32], v[kEach], g[kEach], beta[kEach];

    // Starts to load the columns `from ..` of a batch; those behind the last are the last one again.
    __device__ __forceinline__ void fetch(const DeltaSource<kRecorded>& source, int from, int warp) {
#pragma unroll
        for (int e = 0; e < kEach; e++) {
            const int m = min(from + warp + kWarps * e, source.count - 1);
            source.template fetch<kDim>(m, k[e], q[e], v[e], g[e], beta[e]);
        }
    }

    template <int kSlice>
    __device__ __forceinline__ void place(float query_scale, int warp, int lane, DeltaColumns<kDim, kSlice>& to) const {
#pragma unroll
        for (int e = 0; e < kEach; e++) {
            const int c = warp + kWarps * e;
            float kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
            for (int i = 0; i < kDim / 32; i++) {
                kk = fmaf(k[e][i], k[e][i], kk);
                qq = fmaf(q[e][i], q[e][i], qq);
                kq = fmaf(k[e][i], q[e][i], kq);
            }
            kk = warp_sum(kk), qq = warp_sum(qq), kq = warp_sum(kq);
            const float key_factor = rsqrtf(kk + kL2Eps);
            const float query_factor = query_scale * rsqrtf(qq + kL2Eps);
#pragma unroll
            for (int i = 0; i < kDim / 32; i++) {
                to.k[c][lane + 32 * i] = k[e][i] * key_factor;
                to.q[c][lane + 32 * i] = q[e][i] * query_factor;
            }
            if (lane < kSlice) to.v[c][lane] = v[e];
            to.decay[c] = expf(g[e]), to.beta[c] = beta[e], to.kq[c] = kq * key_factor * query_factor;
        }
    }
};

// Grid (Hv · ⌈dv / slice⌉, segments), 128 threads: a block has a slice of 128 / kParts columns of a head's state in
// registers. With kFull all heads have kParts · kRows features, of keys and of values.
template <int kRows, int kParts, bool kRecorded, bool kFull>
__device__ __forceinline__ void delta(const Gdn& a) {
    constexpr int kDim = kParts * kRows, kSlice = kDeltaThreads / kParts;
    __shared__ DeltaColumns<kDim, kSlice> shared[2];
    const Segment s = a.batch.segment(blockIdx.y);
    if (a.idle(s) || a.fault(s).code != 0) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = threadIdx.x % kParts, column = threadIdx.x / kParts;
    const int dk = kFull ? kDim : a.key_dim, dv = kFull ? kDim : a.value_dim;
    const int slices = divide_up(dv, kSlice), head = blockIdx.x / slices;
    const int first = blockIdx.x % slices * kSlice, j = first + column;
    const bool live = kFull || j < dv;

    float* place = a.matrix + (static_cast<i64>(s.slot) * a.value_heads + head) * dk * dv + j;
    DeltaState<kRows, kParts> state;
    state.load(place, dv, part, dk, live && s.base() != 0);

    const DeltaSource<kRecorded> source(a, s, dk, dv, head, first, lane);
    const int fold = source.fold, count = source.count;
    DeltaStage<kDim, kRecorded> stage;
    stage.fetch(source, 0, warp);
    float* out = a.reads + static_cast<i64>(s.row) * a.values() + head * dv + j;
    // A prompt moves the state behind all columns, a round behind those that it folds.
    const int moved = kRecorded ? fold : count;
    const bool write = !kRecorded || fold > 0 || s.base() == 0;
#pragma unroll 1
    for (int m = 0;; m++) {
        if (m == moved && write) state.store(place, dv, part, dk, live);
        if (m == count) break;
        DeltaColumns<kDim, kSlice>& now = shared[m / kGdnBatch % 2];
        const int i = m % kGdnBatch;
        if (i == 0) {
            // The batch before the last is behind everybody since the barrier of the last one.
            stage.place(a.query_scale, warp, lane, now);
            __syncthreads();
            stage.fetch(source, m + kGdnBatch, warp);
        }
        const float o = state.column(now.k[i], now.q[i], part, now.decay[i], now.beta[i], now.kq[i], now.v[i][column]);
        if (m >= fold && part == 0 && live) out[static_cast<i64>(m - fold) * a.values()] = o;
    }
}

#define DELTA_KERNEL(name, rows, parts, recorded, full) \
    extern "C" __global__ void __launch_bounds__(kDeltaThreads) name(const __grid_constant__ Gdn a) { \
        delta<rows, parts, recorded, full>(a); \
    }
