// The paged cache of one layer: row (page · Hkv + head) · 64 + token, in one of three formats.
//
//   Bf16  the elements
//   I8    codes with one f16 scale per 64 features
//   Fp8   E4M3 codes with one f16 scale per vector
#pragma once
#include "common/batch.cuh"
#include "common/report.cuh"

enum KvFormat { kKvBf16 = 0, kKvI8 = 1, kKvFp8 = 2 };

constexpr int kPageTokens = 64;
constexpr int kScaleGroup = 64;

__host__ __device__ constexpr int kv_bytes(int format) { return format == kKvBf16 ? 2 : 1; }

// Scales of a vector of d features.
__host__ __device__ constexpr int kv_groups(int format, int d) {
    return format == kKvBf16 ? 0 : format == kKvI8 ? divide_up(d, kScaleGroup) : 1;
}

// `KvArg` of src/cuda/attention.rs; strides of keys and values count bytes.
struct Kv {
    Matrix<u8> keys;
    Matrix<u8> values;
    Matrix<__half> key_scales;
    Matrix<__half> value_scales;
    Matrix<const int> table;
    int slots;         // rows of the table
    int per_sequence;  // columns of the table
    int heads;         // Hkv
    int pages;         // pages of the pool
    int format;
    int unused;

    // Number of a sequence's page in the pool, or -1 where it has none.
    __device__ int entry(int slot, int page) const {
        if (slot < 0 || slot >= slots || page < 0 || page >= per_sequence) return -1;
        const int e = table.row(slot)[page];
        return e >= 0 && e < pages ? e : -1;
    }

    // Row of a head's first token in a page of the pool.
    __device__ i64 row(int entry, int head) const { return (static_cast<i64>(entry) * heads + head) * kPageTokens; }

    __device__ void report_missing(Report* report, int page) const {
        report_error(report, kContext, static_cast<u32>(page + 1) * kPageTokens, static_cast<u32>(per_sequence) * kPageTokens);
    }
};

// Segment i of a batch; without rows if it is not inside the call, which is reported.
__device__ __forceinline__ Segment checked_segment(const Batch& batch, int i, Report* report) {
    Segment s = batch.segment(i);
    if (s.len > 0 && (s.row < 0 || s.start < 0 || s.len > batch.rows || s.row > batch.rows - s.len || s.start > 0x7fffffff - s.len)) {
        report_error(report, kSegmentRows, s.row + s.len, batch.rows + 1);
        s.len = 0;
    }
    return s;
}

// Segment of a row, or -1 for padding; the same for all lanes of a warp.
__device__ __forceinline__ int find_segment(const Batch& batch, int row) {
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < batch.segments; first += 32) {
        bool here = false;
        if (first + lane < batch.segments) {
            const int* w = batch.table + static_cast<i64>(first + lane) * batch.stride;
            here = row >= w[2] && row - w[2] < w[3];
        }
        const u32 found = __ballot_sync(kAllLanes, here);
        if (found != 0) return first + __ffs(found) - 1;
    }
    return -1;
}

// Code of the E4M3 number nearest to x, ties to even, saturating; x is no NaN.
__device__ __forceinline__ u8 encode_e4m3(float x) {
    const u32 bits = __float_as_uint(x), a = bits & 0x7fffffffu;
    // The subnormal step 2^-9 becomes the last bit of a sum with 2^14; a carry out of a mantissa raises the exponent.
    const u32 subnormal = __float_as_uint(__uint_as_float(a) + 16384.0f) - __float_as_uint(16384.0f);
    const u32 normal = ((bits >> 20 & 1) + a + 0x7ffffu - (120u << 23)) >> 20;
    const int code = static_cast<int>(a < 0x3c800000u ? subnormal : normal);
    return static_cast<u8>(min(code, 0x7e) | (bits >> 24 & 0x80));
}

// Scale of a group whose largest magnitude has these bits: f16(most / limit), NaN where a value is not finite.
__device__ __forceinline__ __half group_scale(u32 most, float limit) {
    if (most >= 0x7f800000u) return __ushort_as_half(0x7e00);
    const __half s = __float2half_rn(__uint_as_float(most) / limit);
    return __half_as_ushort(s) >= 0x7c00 ? __ushort_as_half(0x7bff) : s;
}

// Writes one vector of d floats from shared memory; one warp.
__device__ __forceinline__ void store_vector(int format, const float* x, int d, u8* to, __half* scales) {
    const int lane = threadIdx.x % 32;
    if (format == kKvBf16) {
        for (int c = lane; c < d; c += 32) reinterpret_cast<bf16*>(to)[c] = to_bf16(x[c]);
        return;
    }
    const int group = format == kKvI8 ? kScaleGroup : d;
    for (int first = 0; first < d; first += group) {
        const int end = min(first + group, d);
        u32 most = 0;
        for (int c = first + lane; c < end; c += 32) most = max(most, __float_as_uint(x[c]) & 0x7fffffffu);
        most = __reduce_max_sync(kAllLanes, most);
        const __half scale = group_scale(most, format == kKvI8 ? 127.0f : 448.0f);
        const float s = __half2float(scale);
        const bool codes = s > 0.0f;
        const float inverse = codes ? 1.0f / s : 0.0f;
        for (int c = first + lane; c < end; c += 32) {
            const float y = codes ? x[c] * inverse : 0.0f;
            to[c] = format == kKvFp8 ? (codes ? encode_e4m3(y) : 0)
                                     : static_cast<u8>(static_cast<int>(fminf(fmaxf(rintf(y), -127.0f), 127.0f)));
        }
        if (lane == 0) scales[first / group] = scale;
    }
}
