// targets: sm_80 sm_90
// Mixture of experts around the products of linear: choice of experts, grouping of pairs by expert, weighted sum.
//
// A pair is (token, choice), numbered token · k + choice. Pairs are ordered by expert, so that the product kernels take
// tiles of up to `width` pairs of one expert; the order inside an expert is that of the pairs. Results are per pair, and
// each token adds its own in the order of its choices, so nothing depends on which tokens share an expert.
#include "common/batch.cuh"
#include "common/top_k.cuh"
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
    int tokens;
};

// Softmax over all experts and the k largest, a warp for each token: common/top_k.cuh.
extern "C" __global__ void __launch_bounds__(kThreads) moe_top_k(const __grid_constant__ TopK a) {
    grid_wait();
    grid_launch_next();
    const int token = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (token >= a.tokens) return;
    float* weights = a.weights.row(token);
    choose_experts(a.logits.row(token), a.count, a.k, a.renormalise != 0, a.experts.row(token), weights);
    if (threadIdx.x % 32 == 0) weights[a.k] = sigmoid(a.gate[token]);
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

// Orders the pairs by expert and cuts them into tiles; one block. Shared memory 4 · E bytes.
extern "C" __global__ void __launch_bounds__(1024) moe_group(const __grid_constant__ Group a) {
    grid_wait();
    grid_launch_next();
    extern __shared__ int next[];  // pairs of each expert, then where the next of them goes
    __shared__ int totals[2][32];
    const int pairs = a.batch.rows * a.k, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int e = threadIdx.x; e < a.count; e += blockDim.x) next[e] = 0;
    __syncthreads();
    auto expert_of = [&](int pair) {
        const int e = a.experts.row(pair / a.k)[pair % a.k];
        return e >= 0 && e < a.count ? e : -1;
    };
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const int e = expert_of(pair);
        if (e >= 0) atomicAdd(&next[e], 1);
    }
    __syncthreads();
    // Pairs and tiles of the experts before, for one expert in a thread and 1,024 experts at a time.
    int pairs_before = 0, tiles_before = 0;
    for (int from = 0; from < a.count; from += blockDim.x) {
        const int e = from + threadIdx.x, n = e < a.count ? next[e] : 0, tiles = divide_up(n, a.width);
        int first = n, tile = tiles;
        for (int offset = 1; offset < 32; offset *= 2) {
            const int p = __shfl_up_sync(kAllLanes, first, offset), q = __shfl_up_sync(kAllLanes, tile, offset);
            if (lane >= offset) first += p, tile += q;
        }
        if (lane == 31) totals[0][warp] = first, totals[1][warp] = tile;
        __syncthreads();
        int more_pairs = 0, more_tiles = 0;
        for (int w = 0; w < 32; w++) {
            if (w == warp) first += pairs_before + more_pairs - n, tile += tiles_before + more_tiles - tiles;
            more_pairs += totals[0][w], more_tiles += totals[1][w];
        }
        pairs_before += more_pairs, tiles_before += more_tiles;
        if (e < a.count) next[e] = first;
        for (int i = 0; i < tiles; i++) {
            int* t = a.tiles + 4 * (tile + i);
            t[0] = e, t[1] = first + i * a.width, t[2] = min(a.width, n - i * a.width), t[3] = 0;
        }
        __syncthreads();
    }
    for (int tile = tiles_before + threadIdx.x; tile < a.capacity; tile += blockDim.x) a.tiles[4 * tile + 2] = 0;
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
    grid_wait();
    grid_launch_next();
    const int c = blockIdx.y * kThreads + threadIdx.x, token = blockIdx.x;
    if (c >= a.h) return;
    const float* w = a.weights.row(token);
    float sum = 0.0f;
    for (int j = 0; j < a.k; j++) sum = fmaf(w[j], a.routed.row(static_cast<i64>(token) * a.k + j)[c], sum);
    bf16* r = a.residual.row(token) + c;
    *r = to_bf16(to_float(*r) + fmaf(w[a.k], a.shared.row(token)[c], sum));
}
