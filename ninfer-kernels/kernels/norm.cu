// targets: sm_80 sm_90
// Norms, staging of the inputs of products, embedding, the input of the MTP block, row copies. Blocks of 256 threads; a
// thread takes pieces of eight adjacent columns, as common/row_norm.cuh says.
#include "common/kv.cuh"
#include "common/row_norm.cuh"
#include "common/weight_row.cuh"
#include "ptx/bulk.cuh"

constexpr int kThreads = kNormThreads;
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

// E4M3 value nearest to x, ties to even; x is at most 448 but for rounding. Behind three mantissa bits, or 2^-9, nothing is
// left when a number 2^20 times as large has been added and taken away.
__device__ __forceinline__ float round_e4m3(float x) {
    const float large = __uint_as_float(max(__float_as_uint(x) & 0x7f800000u, 0x3c800000u) + (20u << 23 | 1u << 22));
    return (x + large) - large;
}

// Largest of the block's words, every thread gets it. `partial` holds eight words.
__device__ __forceinline__ u32 block_max(u32 x, u32* partial) {
    x = __reduce_max_sync(kAllLanes, x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    u32 most = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) most = max(most, partial[w]);
    return most;
}

// Bits of the largest magnitude of a piece; above those of all numbers where one is no number.
__device__ __forceinline__ u32 most_bits(const float (&v)[kPiece]) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < kPiece; i++) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
    return most;
}

// E4M3 scale of a row whose largest magnitude has these bits.
struct RowScale {
    float scale, inverse;
    bool broken;

    __device__ __forceinline__ explicit RowScale(u32 bits) : broken(bits >= 0x7f800000u) {
        const float most = fmaxf(__uint_as_float(bits), kLeastAmax);
        scale = broken ? not_a_number() : most / kE4m3Max;
        inverse = kE4m3Max / most;
    }
};

// Eight floats of a wide row; zeros behind the last column.
__device__ __forceinline__ void load_floats(const float* x, int cols, int piece, float (&v)[kPiece]) {
    const int first = kPiece * piece;
    float4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
    if (first < cols) {
        low = reinterpret_cast<const float4*>(x + first)[0];
        high = reinterpret_cast<const float4*>(x + first)[1];
    }
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

// Rounds a piece to bf16 into a wide row.
__device__ __forceinline__ void store_piece(bf16* y, int piece, const float (&v)[kPiece]) {
    *reinterpret_cast<uint4*>(y + kPiece * piece) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
}

// Rounds a row of any layout, column by column: to bf16 or, with the place of its scale, to E4M3 codes.
template <class Value>
__device__ __forceinline__ void round_row(bf16* y, int padded, float* scales, u32* most, Value value) {
    u32 bits = 0;
    if (scales != nullptr) {
#pragma unroll 4
        for (int c = threadIdx.x; c < padded; c += kThreads) bits = max(bits, __float_as_uint(value(c)) & 0x7fffffffu);
        bits = block_max(bits, most);
    }
    const RowScale scale(bits);
    if (scales != nullptr && threadIdx.x == 0) scales[blockIdx.x] = scale.scale;
#pragma unroll 4
    for (int c = threadIdx.x; c < padded; c += kThreads) {
        float v = value(c);
        if (scales != nullptr) v = scale.broken ? 0.0f : round_e4m3(v * scale.inverse);
        y[c] = to_bf16(v);
    }
}

__device__ __forceinline__ void unpack_piece(uint4 x, float (&v)[kPiece]) {
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) v[2 * i] = low_float(words[i]), v[2 * i + 1] = high_float(words[i]);
}

}  // namespace

// y = N(x), or x itself, as bf16; or its E4M3 codes as bf16 values with the scale of the row. Grid rows.
extern "C" __global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ Stage a) {
    grid_launch_next();
    __shared__ __align__(16) float partial[kThreads / 32];
    __shared__ __align__(16) u32 most[kThreads / 32];
    const bf16* x = a.x.row(blockIdx.x);
    bf16* y = a.y.row(blockIdx.x);
    const bool norm = a.gain != nullptr;
    const bool held_all = a.padded <= kHeld * kNormThreads * kPiece && is_wide(x, a.cols) && is_wide(y, a.padded) && is_wide(a.gain, a.cols);
    if (held_all) {
        // Weights are there before the kernel in front has ended.
        float gains[kHeld][kPiece];
#pragma unroll
        for (int i = 0; i < kHeld; i++) {
            for (int j = 0; j < kPiece; j++) gains[i][j] = 0.0f;
            if (norm) load_floats(a.gain, a.cols, kThreads * i + threadIdx.x, gains[i]);
        }
        grid_wait();
        HeldRow held;
        held.load(x, a.cols);
        const float factor = norm ? norm_factor(held, x, a.cols, a.eps, partial) : 1.0f;
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < kHeld; i++) {
            float v[kPiece];
            unpack_piece(held.piece[i], v);
            for (int j = 0; j < kPiece; j++) gains[i][j] = v[j] * factor * (1.0f + gains[i][j]);
            bits = max(bits, most_bits(gains[i]));
        }
        if (a.scales != nullptr) {
            const RowScale scale(block_max(bits, most));
            if (threadIdx.x == 0) a.scales[blockIdx.x] = scale.scale;
#pragma unroll
            for (int i = 0; i < kHeld; i++) {
                for (int j = 0; j < kPiece; j++) gains[i][j] = scale.broken ? 0.0f : round_e4m3(gains[i][j] * scale.inverse);
            }
        }
#pragma unroll
        for (int i = 0; i < kHeld; i++) {
            const int piece = kThreads * i + threadIdx.x;
            if (kPiece * piece < a.padded) store_piece(y, piece, gains[i]);
        }
        return;
    }
    grid_wait();
    const float factor = norm ? norm_factor(x, a.cols, a.eps, partial) : 1.0f;
    auto value = [&](int c) {
        const float v = c < a.cols ? to_float(x[c]) : 0.0f;
        return norm && c < a.cols ? v * factor * (1.0f + a.gain[c]) : v;
    };
    round_row(y, a.padded, a.scales, most, value);
}

// `EmbedArg` of src/cuda/norm.rs.
struct Embed {
    Batch batch;
    Weight table;
    Matrix<const u32> ids;
    Matrix<bf16> y;
    Report* report;
};

namespace {

// The token of a row, or kNone where there is none: the row is padding, or the id is not one of the table.
__device__ __forceinline__ u32 checked_id(const Batch& batch, const Weight& table, u32 id, int row, Report* report) {
    if (find_segment(batch, row) < 0) return kNone;
    if (id != kNone && id >= static_cast<u32>(table.rows)) {
        if (threadIdx.x == 0) report_error(report, kTokenId, id, table.rows);
        return kNone;
    }
    return id;
}

}  // namespace

// y = E[id]; zeros for padding rows and for the id that means none. A thread takes one piece; grid (rows, H / 2,048).
extern "C" __global__ void __launch_bounds__(kThreads) embed_rows(const __grid_constant__ Embed a) {
    grid_launch_next();
    grid_wait();
    const int row = blockIdx.x, cols = a.table.cols, piece = blockIdx.y * kThreads + threadIdx.x;
    const u32 id = checked_id(a.batch, a.table, *a.ids.row(row), row, a.report);
    if (kPiece * piece >= cols) return;
    bf16* y = a.y.row(row);
    float v[kPiece] = {};
    if (id != kNone) weight_piece(a.table, id, piece, v);
    if (is_wide(y, cols)) {
        store_piece(y, piece, v);
        return;
    }
    for (int i = 0; i < kPiece; i++) {
        if (kPiece * piece + i < cols) y[kPiece * piece + i] = to_bf16(v[i]);
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
    __shared__ __align__(16) float partial[2][kThreads / 32];
    const int row = blockIdx.x, h = a.table.cols;
    int from = *a.index.row(row);
    const u32 id = checked_id(a.batch, a.table, *a.ids.row(row), row, a.report);
    if (find_segment(a.batch, row) < 0) from = -1;
    if (from >= a.hidden_rows) {
        if (threadIdx.x == 0) report_error(a.report, kHiddenRow, from, a.hidden_rows);
        from = -1;
    }
    // Each thread reads back only what it wrote itself.
    float* y = a.y.row(row);
    const bf16* x = a.hidden.row(max(from, 0));
    float sum = 0.0f;
#pragma unroll 1
    for (int piece = threadIdx.x; kPiece * piece < h; piece += kThreads) {
        float v[kPiece] = {};
        if (id != kNone) weight_piece(a.table, id, piece, v);
        for (int i = 0; i < kPiece; i++) {
            sum = fmaf(v[i], v[i], sum);
            if (kPiece * piece + i < h) y[kPiece * piece + i] = v[i];
        }
    }
    const float embedding = factor_of_sums(sum, h, a.embedding_eps, partial[0]);
    const float hidden = from < 0 ? 0.0f : norm_factor(x, h, a.hidden_eps, partial[1]);
#pragma unroll 1
    for (int piece = threadIdx.x; kPiece * piece < h; piece += kThreads) {
        float v[2][kPiece];
        for (int i = 0; i < kPiece; i++) {
            const int c = kPiece * piece + i;
            v[0][i] = c < h ? y[c] * embedding * (1.0f + a.embedding_gain[c]) : 0.0f;
            v[1][i] = c < h && from >= 0 ? to_float(x[c]) * hidden * (1.0f + a.hidden_gain[c]) : 0.0f;
        }
        for (int i = 0; i < kPiece; i++) {
            const int c = kPiece * piece + i;
            if (c < h) y[c] = v[0][i], y[h + c] = v[1][i];
        }
    }
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
    __shared__ __align__(16) u32 most[kThreads / 32];
    const float* x = a.x.row(blockIdx.x);
    bf16* y = a.y.row(blockIdx.x);
    if (a.padded > kHeld * kNormThreads * kPiece || !is_wide(x, a.cols) || !is_wide(y, a.padded)) {
        round_row(y, a.padded, a.scales, most, [&](int c) { return c < a.cols ? x[c] : 0.0f; });
        return;
    }
    float held[kHeld][kPiece];
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < kHeld; i++) load_floats(x, a.cols, kThreads * i + threadIdx.x, held[i]);
    if (a.scales != nullptr) {
#pragma unroll
        for (int i = 0; i < kHeld; i++) bits = max(bits, most_bits(held[i]));
        const RowScale scale(block_max(bits, most));
        if (threadIdx.x == 0) a.scales[blockIdx.x] = scale.scale;
#pragma unroll
        for (int i = 0; i < kHeld; i++) {
            for (int j = 0; j < kPiece; j++) held[i][j] = scale.broken ? 0.0f : round_e4m3(held[i][j] * scale.inverse);
        }
    }
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
        const int piece = kThreads * i + threadIdx.x;
        if (kPiece * piece < a.padded) store_piece(y, piece, held[i]);
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
