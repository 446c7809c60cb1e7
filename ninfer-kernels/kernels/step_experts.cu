// targets: sm_80 sm_90
// The second half of the experts of a step of at most eight tokens: down projections, weighted sum, residual.
//
// r ← r + Σ_j w_j · (mid_j · W_{e_j}ᵀ) + w_s · (own · W_sᵀ), the sums over columns in the order of linear.cuh, then over j.
//
// A block computes 16 columns of the result. Each warp takes distinct experts, whole rows of them, and an eighth of the
// shared expert; row blocks come into shared memory whole. Results of pairs stay in shared memory.
//
// Grid: row blocks of one expert; 256 threads. Shared memory: row blocks of the warps, of the shared expert, and barriers.
#include "common/experts.cuh"
#include "common/linear.cuh"

// `StepDownArg` of src/cuda/step.rs.
struct StepDown {
    Weight routed;  // [E · H, M]
    Weight own;     // [H, S]
    Matrix<const bf16> mid;   // [T · k, M]
    Matrix<const bf16> shared;  // [T, S]
    Matrix<const int> experts;  // [T, k]
    Matrix<const float> weights;  // [T, k + 1]
    Matrix<bf16> residual;
    int columns;  // tokens
    int k;
    int count;   // experts
    int h;
    int places;  // row blocks that a warp has room for, 1 or 2
    int unused;
};

namespace {

// Records that a warp multiplies at once.
constexpr int kTogether = 2;

struct DownShared {
    ExpertGroups groups;
    float routed[kStepPairs][16];
    float partial[kWarps][128];
};

// One row block in shared memory times the columns of a lane: the records of warps `first` to `last` of common/linear.cuh,
// those of each summed by themselves and then added in order.
template <int kFormat>
__device__ __forceinline__ void multiply_block(const u8* place, const Weight& w, int row_block, int first, int last,
                                               const bf16* x, int lane, float (&total)[4]) {
    const int g = lane / 4, t = lane % 4, wrap = divide_up(w.cols, 64);
    const float* scales = nullptr;
    if (kFormat == kFp8 && w.block_scale != nullptr) {
        scales = w.block_scale + static_cast<i64>(row_block) * divide_up(w.cols, 128) * 16 + g;
    }
    auto add = [&](int record, float (&sum)[1][4]) {
        Fragment<kFormat> f;
        f.load(place + record * record_bytes(kFormat), lane);
        const int block = record < wrap ? record : record - wrap;
        const bf16* at = x + 64 * block + 8 * t;
        const uint4 input[2] = {*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + 32)};
        float factor[2] = {};
        if (scales != nullptr) factor[0] = scales[block / 2 * 16], factor[1] = scales[block / 2 * 16 + 8];
        multiply_record<kFormat, 1>(f, scales != nullptr, factor, [&](int s, int) { return input[s]; }, sum);
    };
    if (w.blocks == kWarps && (last - first + 1) % kTogether == 0) {
        // One record each: several at once, so that none waits for another.
#pragma unroll 1
        for (int warp = first; warp <= last; warp += kTogether) {
            float sum[kTogether][1][4] = {};
#pragma unroll
            for (int i = 0; i < kTogether; i++) add(warp + i, sum[i]);
#pragma unroll
            for (int i = 0; i < kTogether * 4; i++) total[i % 4] += sum[i / 4][0][i % 4];
        }
        return;
    }
#pragma unroll 1
    for (int warp = first; warp <= last; warp++) {
        float sum[1][4] = {};
#pragma unroll 1
        for (int record = warp; record < w.blocks; record += kWarps) add(record, sum);
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] += sum[0][i];
    }
}

__device__ __forceinline__ void multiply_any(const u8* place, const Weight& w, int row_block, int first, int last,
                                             const bf16* x, int lane, float (&total)[4]) {
    switch (w.format) {
        case kBf16: multiply_block<kBf16>(place, w, row_block, first, last, x, lane, total); break;
        case kFp8: multiply_block<kFp8>(place, w, row_block, first, last, x, lane, total); break;
        case kNvfp4: multiply_block<kNvfp4>(place, w, row_block, first, last, x, lane, total); break;
        case kQ4: multiply_block<kQ4>(place, w, row_block, first, last, x, lane, total); break;
        case kQ5: multiply_block<kQ5>(place, w, row_block, first, last, x, lane, total); break;
        case kQ6: multiply_block<kQ6>(place, w, row_block, first, last, x, lane, total); break;
        default: multiply_block<kW8>(place, w, row_block, first, last, x, lane, total); break;
    }
}

// Copies a row block; the lanes of a warp call it together.
__device__ __forceinline__ void copy_block(u8* to, const u8* from, int bytes, u32 barrier, int lane) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
        barrier_expect(barrier, bytes);
        copy_bulk(shared_address(to), from, bytes, barrier);
    }
#else
    for (int at = 16 * lane; at < bytes; at += 16 * 32) copy_async(shared_address(to + at), from + at, true);
    copy_commit();
#endif
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 1) step_down(const __grid_constant__ StepDown a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ DownShared s;
    __shared__ __align__(8) u64 barriers[2 * kWarps + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int block = blockIdx.x, row_blocks = gridDim.x;
    const int bytes = a.routed.blocks * record_bytes(a.routed.format), own_bytes = a.own.blocks * record_bytes(a.own.format);
    u8* own = shared;
    u8* places = shared + divide_up(own_bytes, 128) * 128 + warp * a.places * bytes;
    const u32 mine = shared_address(barriers + 2 * warp), common = shared_address(barriers + 2 * kWarps);
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
        barrier_init(mine), barrier_init(mine + 8);
        if (warp == 0) barrier_init(common);
        barrier_init_fence();
    }
    __syncthreads();
#endif
    if (warp == 0) copy_block(own, a.own.records + static_cast<i64>(block) * own_bytes, own_bytes, common, lane);
    // The kernel before lets this one begin behind its own wait, so that what the router chose can be read before the wait.
    s.groups.find(a.experts, a.columns, a.k, a.count);
    auto start = [&](int group) {
        const int n = group / kWarps, place = n % a.places;
        const i64 row_block = static_cast<i64>(s.groups.expert[group]) * row_blocks + block;
        copy_block(places + place * bytes, a.routed.records + row_block * bytes, bytes, mine + 8 * place, lane);
    };
    for (int i = 0; i < a.places; i++) {
        if (warp + i * kWarps < s.groups.count) start(warp + i * kWarps);
    }
    grid_wait();
    grid_launch_next();
    for (int i = threadIdx.x; i < a.columns * a.k; i += blockDim.x) {
        if (s.groups.choice[i] < 0) {
            for (int r = 0; r < 16; r++) s.routed[i][r] = 0.0f;
        }
    }
    for (int group = warp; group < s.groups.count; group += kWarps) {
        const int n = group / kWarps, place = n % a.places, count = s.groups.members[group];
        const int expert = s.groups.expert[group];
        const bf16* x = a.mid.row(s.groups.pair[group][g < count ? g : 0]) ;
#if __CUDA_ARCH__ >= 900
        barrier_wait(mine + 8 * place, n / a.places & 1);
#else
        copy_wait<0>();
        __syncwarp();
#endif
        float total[4] = {};
        multiply_any(places + place * bytes, a.routed, expert * row_blocks + block, 0, kWarps - 1, x, lane, total);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = 2 * t + i % 2, r = g + 8 * (i / 2);
            float y = total[i] * format_factor(a.routed.format);
            if (a.routed.row_scale != nullptr) y *= a.routed.row_scale[expert * a.h + 16 * block + r];
            if (column < count) s.routed[s.groups.pair[group][column]][r] = y;
        }
        __syncwarp();
        if (group + a.places * kWarps < s.groups.count) start(group + a.places * kWarps);
    }
#if __CUDA_ARCH__ >= 900
    barrier_wait(common, 0);
#else
    copy_wait<0>();
    __syncthreads();
#endif
    float total[4] = {};
    multiply_any(own, a.own, block, warp, warp, a.shared.row(g < a.columns ? g : 0), lane, total);
#pragma unroll
    for (int i = 0; i < 4; i++) s.partial[warp][16 * (2 * t + i % 2) + g + 8 * (i / 2)] = total[i];
    __syncthreads();
    const int token = threadIdx.x / 16, r = threadIdx.x % 16;
    if (token >= a.columns) return;
    float y = 0.0f;
#pragma unroll
    for (int v = 0; v < kWarps; v++) y += s.partial[v][threadIdx.x];
    y *= format_factor(a.own.format);
    if (a.own.row_scale != nullptr) y *= a.own.row_scale[16 * block + r];
    const float* w = a.weights.row(token);
    float sum = 0.0f;
    for (int j = 0; j < a.k; j++) sum = fmaf(w[j], s.routed[token * a.k + j][r], sum);
    bf16* out = a.residual.row(token) + 16 * block + r;
    *out = to_bf16(to_float(*out) + fmaf(w[a.k], y, sum));
}
