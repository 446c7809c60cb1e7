// targets: sm_90
// A round of Gated DeltaNet in one launch, for heads of 128 key and 128 value features and four taps. Formulas, records
// and order of all sums are those of gdn.cu and gdn_delta.cu, and so are all bits.
//
// Grid (Hk · kBlocks, segments) in clusters of kBlocks = kRatio · kSlices: a cluster has a key head with its kRatio value
// heads, a block 128 / kSlices columns of the state of one of them, in the registers of 512 / kSlices threads. Every block
// convolves the keys and queries of its cluster for itself. The window is written when all have read it, and sums of squares
// for the gated norm go to the other blocks of the head: both wait at the cluster's barrier. Columns run in batches of 8.
//
// While the kernel in front still runs, a block has the state, the window, the columns to be folded and the parameters brought
// into L2. What kernels write may not be loaded then: a chain of waiting kernels may be longer than two, and a fold or a
// prompt of the same sequence may be in it. L2 takes later writes, so bringing them is right whoever writes them. The segment
// table says where they are; an old one brings other bytes near, within the same buffers.
#include "common/columns.cuh"
#include "common/delta.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/coherent.cuh"
#include "ptx/early.cuh"

namespace {

constexpr int kDim = 128, kTaps = 4, kBatch = 8, kParts = 4, kGroups = kDim / 32;

template <int kSlice>
struct alignas(16) Shared {
    float k[kBatch][kDim];
    float q[kBatch][kDim];
    float v[kBatch][kSlice];
    float o[kBatch][kSlice];
    float sums[2][kBatch][kGroups];  // Σo² over 32 features each, by turns for even and odd batches
    float decay[kBatch], beta[kBatch], kq[kBatch];
};

// A channel that a thread convolves.
struct Channel {
    Taps<kTaps> taps;
    History<kTaps> history;
    int place;     // of column 0 in shared memory, in floats; −1 if another thread has the channel
    int stride;    // from column to column there
    int c;         // channel
    int recorded;  // the same, or that of a key where queries are not recorded
    bool query;
    bool owned;  // written to record and window by this block
};

// Zeros in the results of padding rows, so that nothing that follows meets a number that is none.
__device__ __noinline__ void clear_padding(const Gdn& a, int from, int count) {
    for (int row = threadIdx.x; row < a.batch.rows; row += blockDim.x) {
        if (a.batch.find(row) >= 0) continue;
#pragma unroll 1
        for (int j = 0; j < count; j++) a.output.row(row)[from + j] = to_bf16(0.0f);
    }
}

// Norms key and query of a column, as `DeltaStage` does.
template <int kSlice>
__device__ __forceinline__ void normalise(float query_scale, Shared<kSlice>& shared, int c, int lane) {
    float k[kDim / 32], q[kDim / 32], kk = 0.0f, qq = 0.0f, kq = 0.0f;
#pragma unroll
    for (int i = 0; i < kDim / 32; i++) {
        k[i] = shared.k[c][lane + 32 * i], q[i] = shared.q[c][lane + 32 * i];
        kk = fmaf(k[i], k[i], kk);
        qq = fmaf(q[i], q[i], qq);
        kq = fmaf(k[i], q[i], kq);
    }
    kk = warp_sum(kk), qq = warp_sum(qq), kq = warp_sum(kq);
    const float key_factor = rsqrtf(kk + kL2Eps);
    const float query_factor = query_scale * rsqrtf(qq + kL2Eps);
#pragma unroll
    for (int i = 0; i < kDim / 32; i++) {
        shared.k[c][lane + 32 * i] = k[i] * key_factor;
        shared.q[c][lane + 32 * i] = q[i] * query_factor;
    }
    shared.kq[c] = kq * key_factor * query_factor;
}

template <int kRatio, int kSlices>
__device__ __forceinline__ void step(const Gdn& a) {
    constexpr int kSlice = kDim / kSlices, kThreads = kParts * kSlice, kWarps = kThreads / 32, kBlocks = kRatio * kSlices;
    constexpr int kEach = divide_up(2 * kDim + kSlice, kThreads);
    __shared__ Shared<kSlice> shared;
    float* floats = &shared.k[0][0];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = threadIdx.x % kParts, column = threadIdx.x / kParts;
    const int rank = blockIdx.x % kBlocks, key_head = blockIdx.x / kBlocks;
    const int head = key_head * kRatio + rank / kSlices, slice = rank % kSlices;
    const int feature = head * kDim + slice * kSlice;  // first value feature of the block
    grid_launch_next();
    const int keys = a.key_heads * kDim, values = a.value_heads * kDim, channels = 2 * keys + values;
    Channel channel[kEach];
#pragma unroll
    for (int e = 0; e < kEach; e++) {
        // The remainder tells the compiler which kinds of channels there can be.
        const int mine = threadIdx.x % kThreads + kThreads * e, i = min(mine, 2 * kDim + kSlice - 1);
        Channel& c = channel[e];
        c.query = i >= kDim && i < 2 * kDim;
        c.place = i < 2 * kDim ? i % kDim + (c.query ? kBatch * kDim : 0) : 2 * kBatch * kDim + i - 2 * kDim;
        if (i < mine) c.place = -1;
        c.owned = i == mine && (i >= 2 * kDim || rank == 0);
        c.stride = i < 2 * kDim ? kDim : kSlice;
        c.c = i < kDim ? keys + key_head * kDim + i : i < 2 * kDim ? (key_head - 1) * kDim + i : 2 * (keys - kDim) + feature + i;
        c.recorded = max(c.c, keys);
        c.taps.load(a.conv + static_cast<i64>(c.c) * kTaps, kTaps);
    }
    const int j = threadIdx.x % kSlice;
    const float gain = __ldg(a.gain + slice * kSlice + j);
    const int* table = a.batch.table + blockIdx.y * a.batch.stride;
    const int early_slot = load_l2(table), early_bank = load_l2(table + 5);
    if (static_cast<u32>(early_slot) < static_cast<u32>(a.slots) && static_cast<u32>(early_bank) < 2) {
        // A thread a line of the state: rows of the slice are kSlice floats.
        constexpr int kLines = kSlice / 32;
        const float* line = a.matrix + (static_cast<i64>(early_slot) * a.value_heads + head) * kDim * kDim + slice * kSlice;
        prefetch_l2(line + static_cast<int>(threadIdx.x) / kLines * kDim + threadIdx.x % kLines * 32);
        const i64 row = a.record.row(early_slot, 1 - early_bank, 0);
#pragma unroll
        for (int e = 0; e < kEach; e++) {
            prefetch_l2(a.conv + static_cast<i64>(channel[e].c) * kTaps);
            prefetch_l2(a.window + (static_cast<i64>(early_slot) * channels + channel[e].c) * (kTaps - 1));
            prefetch_l2(a.record.columns + row * channels + channel[e].c);
            prefetch_l2(a.record.key_value + row * (keys + values) + channel[e].recorded - keys);
        }
        if (threadIdx.x < 2) {
            prefetch_l2(a.record.gates + (row * 2 + threadIdx.x) * a.value_heads + head);
            prefetch_l2((threadIdx.x == 0 ? a.a_log : a.dt_bias) + head);
        }
    }
    grid_wait();

    const Segment s = a.batch.segment(blockIdx.y);
    const bool idle = a.idle(s);
    const GdnFault fault = idle ? GdnFault{0, 0, 0} : a.fault(s);
    if (idle || fault.code != 0) {
        if (fault.code != 0 && blockIdx.x == 0 && threadIdx.x == 0) a.report_fault(fault);
        if (blockIdx.y == 0) clear_padding(a, feature, kSlice);
        return;
    }
    const int fold = s.fold, count = fold + s.len;
    const bool zero = s.base() == 0, write = fold > 0 || zero;
    const i64 from_record = a.record.row(s.slot, 1 - s.bank, 0), to_record = a.record.row(s.slot, s.bank, 0);

    float* place = a.matrix + (static_cast<i64>(s.slot) * a.value_heads + head) * kDim * kDim + slice * kSlice + column;
    DeltaState<kDim / kParts, kParts> state;
    state.load(place, kDim, part, kDim, !zero);

    Window<kTaps> window[kEach];
#pragma unroll
    for (int e = 0; e < kEach; e++) {
        const bf16* at = a.window + (static_cast<i64>(s.slot) * channels + channel[e].c) * (kTaps - 1);
        window[e].load(at, kTaps, zero, a.record.columns + from_record * channels + channel[e].c, channels, fold);
    }
#pragma unroll 1
    for (int from = 0; from < count; from += kBatch) {
        const int n = min(kBatch, count - from);
        // All loads of a batch are on their way at once: those of what a thread writes at the end (columns threadIdx.x / kSlice
        // and 4 more), of the gates of one column, then raw columns of the call, or recorded keys and values.
        bf16 z[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int m = from + threadIdx.x / kSlice + kParts * i;
            z[i] = __ldg(a.z.row(s.row + min(max(m, fold), count - 1) - fold) + feature + j);
        }
        const int gated = from + min(static_cast<int>(threadIdx.x), n - 1), t = max(gated - fold, 0);
        const bool old = gated < fold;
        const float* gate = a.record.gates + (from_record + gated) * 2 * a.value_heads + head;
        const float gate0 = __ldg(old ? gate : a.a_log + head), gate1 = __ldg(old ? gate + a.value_heads : a.dt_bias + head);
        const bf16 rate = __ldg(a.a.row(s.row + t) + head), open = __ldg(a.b.row(s.row + t) + head);
        bf16 x[kEach][kBatch];
        const i64 recorded = from_record * (keys + values) - keys, width = keys + values;
        const bf16* call = a.qkv.row(s.row - fold);
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            if (i >= n) break;
            const int m = from + i;
            const bf16* row = m < fold ? a.record.key_value + recorded + m * width : call + m * a.qkv.stride;
#pragma unroll
            for (int e = 0; e < kEach; e++) x[e][i] = __ldg(row + (m < fold ? channel[e].recorded : channel[e].c));
        }
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
            if (i >= n) break;
#pragma unroll
            for (int e = 0; e < kEach; e++) {
                const Channel& c = channel[e];
                if (c.place >= 0) floats[c.place + i * c.stride] = from + i < fold && c.query ? 0.0f : to_float(x[e][i]);
            }
        }
        if (threadIdx.x < n) {
            const float g = old ? gate0 : gdn_log_decay(gate0, to_float(rate), gate1);
            const float beta = old ? gate1 : sigmoid(to_float(open));
            shared.decay[threadIdx.x] = expf(g), shared.beta[threadIdx.x] = beta;
            if (slice == 0 && !old) {
                float* to = a.record.gates + (to_record + t) * 2 * a.value_heads + head;
                to[0] = g, to[a.value_heads] = beta;
            }
        }
        if (from == 0) {
#pragma unroll
            for (int e = 0; e < kEach; e++) channel[e].history.start(window[e]);
            cluster_arrive();  // the windows have been read
        }
        // Each thread goes on with what it wrote itself.
#pragma unroll 1
        for (int i = max(0, fold - from); i < n; i++) {
            const i64 row = to_record + from + i - fold;
#pragma unroll
            for (int e = 0; e < kEach; e++) {
                Channel& c = channel[e];
                if (c.place < 0) continue;
                float& at = floats[c.place + i * c.stride];
                const float raw = at;
                float y = c.taps.apply(c.history, raw, kTaps);
                c.history.push(raw);
                if (c.owned) a.record.columns[row * channels + c.c] = to_bf16(raw);
                if (!c.query) {
                    const bf16 rounded = to_bf16(y);
                    if (c.owned) a.record.key_value[row * (keys + values) + c.c - keys] = rounded;
                    y = to_float(rounded);
                }
                at = y;
            }
        }
        __syncthreads();
        for (int c = warp; c < n; c += kWarps) normalise(a.query_scale, shared, c, lane);
        __syncthreads();
        if (from == 0) {
            cluster_wait();
#pragma unroll
            for (int e = 0; e < kEach; e++) {
                const Channel& c = channel[e];
                if (c.place < 0 || !c.owned || !write) continue;
                window[e].store(a.window + (static_cast<i64>(s.slot) * channels + c.c) * (kTaps - 1), kTaps);
            }
        }
#pragma unroll 1
        for (int i = 0; i < n; i++) {
            if (from + i == fold && write) state.store(place, kDim, part, kDim, true);
            const float o = state.column(shared.k[i], shared.q[i], part, shared.decay[i], shared.beta[i], shared.kq[i], shared.v[i][column]);
            if (part == 0) shared.o[i][column] = o;
        }
        __syncthreads();
        float(&sums)[kBatch][kGroups] = shared.sums[from / kBatch % 2];
        for (int c = warp; c < n; c += kWarps) {
#pragma unroll
            for (int g = 0; g < kSlice / 32; g++) {
                const float o = shared.o[c][32 * g + lane], sum = warp_sum(o * o);
                if (lane < kSlices) store_cluster(&sums[c][slice * (kSlice / 32) + g], rank / kSlices * kSlices + lane, sum);
            }
        }
        cluster_arrive();
        cluster_wait();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int c = threadIdx.x / kSlice + kParts * i, m = from + c;
            if (m < fold || m >= count) continue;
            float sum = 0.0f;
#pragma unroll
            for (int g = 0; g < kGroups; g++) sum += sums[c][g];
            const float factor = rsqrtf(sum / kDim + a.eps);
            a.output.row(s.row + m - fold)[feature + j] = to_bf16(shared.o[c][j] * factor * gain * gdn_gate(a, to_float(z[i])));
        }
    }
    if (blockIdx.y == 0) clear_padding(a, feature, kSlice);
}

}  // namespace

#define STEP_KERNEL(ratio, slices) \
    extern "C" __global__ void __cluster_dims__(ratio * slices, 1, 1) __launch_bounds__(512 / slices, slices == 4 ? 3 : 1) \
        gdn_step_##ratio(const __grid_constant__ Gdn a) { \
        step<ratio, slices>(a); \
    }

STEP_KERNEL(1, 4)
STEP_KERNEL(2, 4)
STEP_KERNEL(3, 2)
