// targets: sm_80 sm_90
// Norms, staging of the inputs of products, embedding, the input of the MTP block, row copies. One block a row.
#include "common/batch.cuh"
#include "common/report.cuh"
#include "common/weight.cuh"
#include "ptx/bulk.cuh"

constexpr int kThreads = 256;
constexpr float kE4m3Max = 448.0f;
constexpr float kLeastAmax = 0x1p-100f;

// `StageArg` of src/cuda/norm.rs.
struct Stage {
    Matrix<const bf16> x;
    Matrix<bf16> y;
    const float* gain;  // zero-centred; null: no norm
    float* scales;      // E4M3 activations: scale of each row; null: plain bf16
    int cols;
    int padded;  // columns written, zeros behind `cols`
    float eps;
    int unused;
};

namespace {

// E4M3 value nearest to x, ties to even, saturating; NaN stays.
__device__ __forceinline__ float round_e4m3(float x) {
    const float a = fabsf(x);
    if (!(a < 0x1p-6f)) {
        // Three mantissa bits.
        u32 bits = __float_as_uint(x);
        bits += 0x7ffffu + (bits >> 20 & 1);
        const float rounded = __uint_as_float(bits & 0xfff00000u);
        return isnan(x) ? x : fminf(fmaxf(rounded, -kE4m3Max), kE4m3Max);
    }
    return copysignf(rintf(a * 512.0f) * (1.0f / 512.0f), x);
}

template <int kThreadsHere>
__device__ __forceinline__ float block_max(float x, float* partial) {
    for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    float most = 0.0f;
    for (int w = 0; w < kThreadsHere / 32; w++) most = fmaxf(most, partial[w]);
    __syncthreads();
    return most;
}

// rsqrt(mean(x²) + eps) of a row.
template <class Load>
__device__ __forceinline__ float norm_factor(int cols, float eps, float* partial, Load load) {
    float sum = 0.0f;
    for (int c = threadIdx.x; c < cols; c += kThreads) {
        const float x = load(c);
        sum = fmaf(x, x, sum);
    }
    sum = block_sum<kThreads>(sum, partial);
    return 1.0f / sqrtf(sum / cols + eps);
}

}  // namespace

// y = N(x), or x itself, as bf16; or its E4M3 codes as bf16 values with the scale of the row.
extern "C" __global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ Stage a) {
    grid_launch_next();
    grid_wait();
    __shared__ float partial[kThreads / 32];
    const bf16* x = a.x.row(blockIdx.x);
    bf16* y = a.y.row(blockIdx.x);
    float factor = 1.0f;
    if (a.gain != nullptr) {
        factor = norm_factor(a.cols, a.eps, partial, [&](int c) { return to_float(x[c]); });
    }
    auto value = [&](int c) {
        const float v = to_float(x[c]);
        return a.gain != nullptr ? v * factor * (1.0f + a.gain[c]) : v;
    };
    if (a.scales == nullptr) {
        for (int c = threadIdx.x; c < a.padded; c += kThreads) y[c] = to_bf16(c < a.cols ? value(c) : 0.0f);
        return;
    }
    float most = 0.0f;
    bool broken = false;
    for (int c = threadIdx.x; c < a.cols; c += kThreads) {
        const float v = fabsf(value(c));
        broken |= !(v < infinity());
        most = fmaxf(most, v);
    }
    broken = __syncthreads_or(broken);
    most = fmaxf(block_max<kThreads>(most, partial), kLeastAmax);
    const float inverse = kE4m3Max / most;
    if (threadIdx.x == 0) a.scales[blockIdx.x] = broken ? not_a_number() : most / kE4m3Max;
    for (int c = threadIdx.x; c < a.padded; c += kThreads) {
        y[c] = to_bf16(c < a.cols && !broken ? round_e4m3(value(c) * inverse) : 0.0f);
    }
}

// `EmbedArg` of src/cuda/norm.rs.
struct Embed {
    Batch batch;
    Weight table;
    Matrix<const u32> ids;
    Matrix<bf16> y;
    Report* report;
};

// y = E[id]; zeros for padding rows and for the id that means none.
extern "C" __global__ void __launch_bounds__(kThreads) embed_rows(const __grid_constant__ Embed a) {
    grid_launch_next();
    grid_wait();
    const int row = blockIdx.x;
    u32 id = a.batch.find(row) >= 0 ? *a.ids.row(row) : kNone;
    if (id != kNone && id >= static_cast<u32>(a.table.rows)) {
        if (threadIdx.x == 0) report_error(a.report, kTokenId, id, a.table.rows);
        id = kNone;
    }
    bf16* y = a.y.row(row);
    for (int c = threadIdx.x; c < a.table.cols; c += kThreads) {
        y[c] = to_bf16(id == kNone ? 0.0f : weight_element(a.table, id, c));
    }
}

// `StemArg` of src/cuda/norm.rs.
struct Stem {
    Batch batch;
    Weight table;
    Matrix<const u32> ids;
    Matrix<const bf16> hidden;
    Matrix<const int> index;
    Matrix<float> y;  // f32 [T, 2H]: normed embedding, then normed hidden state
    const float* embedding_gain;
    const float* hidden_gain;
    Report* report;
    float embedding_eps;
    float hidden_eps;
    int hidden_rows;
    int unused;
};

extern "C" __global__ void __launch_bounds__(kThreads) stem_rows(const __grid_constant__ Stem a) {
    grid_launch_next();
    grid_wait();
    __shared__ float partial[kThreads / 32];
    const int row = blockIdx.x, h = a.table.cols;
    float* y = a.y.row(row);
    const bool owned = a.batch.find(row) >= 0;
    u32 id = owned ? *a.ids.row(row) : kNone;
    int from = owned ? *a.index.row(row) : -1;
    if (id != kNone && id >= static_cast<u32>(a.table.rows)) {
        if (threadIdx.x == 0) report_error(a.report, kTokenId, id, a.table.rows);
        id = kNone;
    }
    if (from >= a.hidden_rows) {
        if (threadIdx.x == 0) report_error(a.report, kHiddenRow, from, a.hidden_rows);
        from = -1;
    }
    // Each thread reads back only what it wrote itself.
    for (int c = threadIdx.x; c < h; c += kThreads) y[c] = id == kNone ? 0.0f : weight_element(a.table, id, c);
    float factor = norm_factor(h, a.embedding_eps, partial, [&](int c) { return y[c]; });
    for (int c = threadIdx.x; c < h; c += kThreads) y[c] = y[c] * factor * (1.0f + a.embedding_gain[c]);
    if (from < 0) {
        for (int c = threadIdx.x; c < h; c += kThreads) y[h + c] = 0.0f;
        return;
    }
    const bf16* x = a.hidden.row(from);
    factor = norm_factor(h, a.hidden_eps, partial, [&](int c) { return to_float(x[c]); });
    for (int c = threadIdx.x; c < h; c += kThreads) y[h + c] = to_float(x[c]) * factor * (1.0f + a.hidden_gain[c]);
}

// `RoundArg` of src/cuda/norm.rs: f32 rows to the input of a product.
struct Round {
    Matrix<const float> x;
    Matrix<bf16> y;
    float* scales;
    int cols;
    int padded;
};

extern "C" __global__ void __launch_bounds__(kThreads) round_rows(const __grid_constant__ Round a) {
    grid_launch_next();
    grid_wait();
    __shared__ float partial[kThreads / 32];
    const float* x = a.x.row(blockIdx.x);
    bf16* y = a.y.row(blockIdx.x);
    float inverse = 1.0f;
    bool broken = false;
    if (a.scales != nullptr) {
        float most = 0.0f;
        for (int c = threadIdx.x; c < a.cols; c += kThreads) {
            const float v = fabsf(x[c]);
            broken |= !(v < infinity());
            most = fmaxf(most, v);
        }
        broken = __syncthreads_or(broken);
        most = fmaxf(block_max<kThreads>(most, partial), kLeastAmax);
        inverse = kE4m3Max / most;
        if (threadIdx.x == 0) a.scales[blockIdx.x] = broken ? not_a_number() : most / kE4m3Max;
    }
    for (int c = threadIdx.x; c < a.padded; c += kThreads) {
        float v = c < a.cols && !broken ? x[c] : 0.0f;
        if (a.scales != nullptr) v = round_e4m3(v * inverse);
        y[c] = to_bf16(v);
    }
}

// `CopyArg` of src/cuda/norm.rs. Strides and width count bytes.
struct Copy {
    Matrix<const u8> src;
    Matrix<u8> dst;
    Matrix<const int> src_index;
    Matrix<const int> dst_index;
    Report* report;
    i64 width;
    int src_rows;
    int dst_rows;
};

extern "C" __global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ Copy a) {
    grid_launch_next();
    grid_wait();
    const int from = *a.src_index.row(blockIdx.x), to = *a.dst_index.row(blockIdx.x);
    if (from < 0 || to < 0) return;
    if (from >= a.src_rows || to >= a.dst_rows) {
        if (threadIdx.x == 0) {
            const bool source = from >= a.src_rows;
            report_error(a.report, source ? kSourceRow : kDestinationRow, source ? from : to, source ? a.src_rows : a.dst_rows);
        }
        return;
    }
    const u8* src = a.src.row(from);
    u8* dst = a.dst.row(to);
    const bool wide = ((reinterpret_cast<u64>(src) | reinterpret_cast<u64>(dst) | static_cast<u64>(a.width)) & 15) == 0;
    if (wide) {
        const i64 n = a.width / 16;
        for (i64 i = threadIdx.x; i < n; i += kThreads) {
            reinterpret_cast<uint4*>(dst)[i] = reinterpret_cast<const uint4*>(src)[i];
        }
    } else {
        for (i64 i = threadIdx.x; i < a.width; i += kThreads) dst[i] = src[i];
    }
}
