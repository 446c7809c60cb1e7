// targets: sm_80 sm_90
// Mixture of experts around the products of linear: choice of experts, grouping of pairs by expert, weighted sum.
//
// A pair is (token, choice), numbered token · k + choice. Pairs are ordered by expert, so that the product kernels take
// tiles of up to `width` pairs of one expert; the order inside an expert is that of the pairs. Results are per pair, and
// each token adds its own in the order of its choices, so nothing depends on which tokens share an expert.
#include "common/batch.cuh"
#include "common/types.cuh"
#include "ptx/bulk.cuh"

constexpr int kThreads = 256;

// `TopKArg` of src/cuda/moe.rs.
struct TopK {
    Matrix<const float> logits;  // [T, E]
    const float* gate;           // [T]: logit of the shared expert's gate
    Matrix<int> experts;         // [T, k]
    Matrix<float> weights;       // [T, k + 1]
    int count;                   // E
    int k;
    int renormalise;
    int unused;
};

namespace {

// Order of a logit, larger is better; NaN is worst. −0 equals 0.
__device__ __forceinline__ u32 rank(float x) {
    if (isnan(x)) return 0;
    const u32 bits = __float_as_uint(x + 0.0f);
    return (bits >> 31 ? ~bits : bits | 0x80000000u);
}

}  // namespace

// Softmax over all experts, the k largest (ties take the lower id). One warp a token; shared memory 4 · E bytes.
extern "C" __global__ void __launch_bounds__(32) moe_top_k(const __grid_constant__ TopK a) {
    grid_launch_next();
    grid_wait();
    extern __shared__ float p[];
    const int token = blockIdx.x, lane = threadIdx.x;
    const float* logits = a.logits.row(token);
    float most = -infinity();
    for (int e = lane; e < a.count; e += 32) {
        p[e] = logits[e];
        most = fmaxf(most, logits[e]);
    }
    for (int offset = 16; offset > 0; offset >>= 1) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
    __syncwarp();
    float sum = 0.0f;
    for (int e = lane; e < a.count; e += 32) sum += expf(p[e] - most);
    sum = warp_sum(sum);
    int* experts = a.experts.row(token);
    float* weights = a.weights.row(token);
    float chosen = 0.0f;
    for (int j = 0; j < a.k; j++) {
        u64 best = 0;
        for (int e = lane; e < a.count; e += 32) {
            // Taken ones are marked by the quiet NaN with all bits set.
            if (__float_as_uint(p[e]) == 0xffffffffu) continue;
            const u64 key = (static_cast<u64>(rank(p[e])) << 32 | (0x7fffffffu - e)) + 1;
            best = key > best ? key : best;
        }
        for (int offset = 16; offset > 0; offset >>= 1) {
            const u64 other = __shfl_xor_sync(kAllLanes, best, offset);
            best = other > best ? other : best;
        }
        const int e = static_cast<int>(0x7fffffffu - static_cast<u32>(best - 1));
        const float w = expf(p[e] - most) / sum;
        __syncwarp();
        if (lane == 0) {
            p[e] = __uint_as_float(0xffffffffu);
            experts[j] = e;
            weights[j] = w;
        }
        __syncwarp();
        chosen += w;
    }
    if (a.renormalise) {
        __syncwarp();
        for (int j = lane; j < a.k; j += 32) weights[j] = weights[j] / chosen;
    }
    if (lane == 0) weights[a.k] = sigmoid(a.gate[token]);
}

// `GroupArg` of src/cuda/moe.rs.
struct Group {
    Batch batch;
    Matrix<const int> experts;  // [T, k]
    int* order;                 // [T · k]
    int* tiles;                 // [capacity][4]
    int count;                  // E
    int k;
    int width;     // pairs in a tile at most
    int capacity;  // tiles
};

// Orders the pairs by expert and cuts them into tiles; one block. Shared memory 4 · (E + 1) · 2 bytes.
extern "C" __global__ void __launch_bounds__(1024) moe_group(const __grid_constant__ Group a) {
    grid_launch_next();
    grid_wait();
    extern __shared__ int counts[];  // pairs of each expert, then where they start
    int* next = counts + a.count + 1;
    const int pairs = a.batch.rows * a.k;
    for (int e = threadIdx.x; e <= a.count; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    auto expert_of = [&](int pair) {
        const int e = a.experts.row(pair / a.k)[pair % a.k];
        return e >= 0 && e < a.count ? e : -1;
    };
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const int e = expert_of(pair);
        if (e >= 0) atomicAdd(&counts[e], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int first = 0, tile = 0;
        for (int e = 0; e < a.count; e++) {
            const int n = counts[e];
            next[e] = first;
            for (int at = 0; at < n; at += a.width) {
                int* t = a.tiles + 4 * tile++;
                t[0] = e, t[1] = first + at, t[2] = min(a.width, n - at), t[3] = 0;
            }
            first += n;
        }
        for (; tile < a.capacity; tile++) a.tiles[4 * tile + 2] = 0;
    }
    __syncthreads();
    // In whatever order: a pair's result does not depend on its place.
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const int e = expert_of(pair);
        if (e >= 0) a.order[atomicAdd(&next[e], 1)] = pair;
    }
}

// `CombineArg` of src/cuda/moe.rs.
struct Combine {
    Matrix<const float> routed;  // [T · k, H]
    Matrix<const float> shared;  // [T, H]
    Matrix<const float> weights;
    Matrix<bf16> residual;
    int h;
    int k;
};

// r ← r + Σ_j w_j · routed_j + w_s · shared, in this order.
extern "C" __global__ void __launch_bounds__(kThreads) moe_combine(const __grid_constant__ Combine a) {
    grid_launch_next();
    grid_wait();
    const int c = blockIdx.y * kThreads + threadIdx.x, token = blockIdx.x;
    if (c >= a.h) return;
    const float* w = a.weights.row(token);
    float sum = 0.0f;
    for (int j = 0; j < a.k; j++) sum = fmaf(w[j], a.routed.row(static_cast<i64>(token) * a.k + j)[c], sum);
    bf16* r = a.residual.row(token) + c;
    *r = to_bf16(to_float(*r) + fmaf(w[a.k], a.shared.row(token)[c], sum));
}
