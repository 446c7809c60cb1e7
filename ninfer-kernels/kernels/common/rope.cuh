// Head norms, rotation of queries and keys, and appending to pages.
#pragma once
#include "common/kv.cuh"
#include "ptx/bulk.cuh"

// `RopeAppendArg` of src/cuda/attention.rs.
struct RopeAppend {
    Batch batch;
    Kv kv;
    Matrix<const bf16> query_gate;
    Matrix<const bf16> key;
    Matrix<const bf16> value;
    Matrix<bf16> query;
    Matrix<const float> gains;  // [2, D], zero-centred
    const float* frequencies;
    Report* report;
    float eps;
    float magnitude;
    int shift;
    int heads;  // Hq
    int d;
    int half;  // R / 2
};

namespace {

// Sine and cosine of an angle of any size: reduced by multiples of π/2 in double, polynomials in single precision.
__device__ __forceinline__ void sine_cosine(float angle, float& sine, float& cosine) {
    const double turns = rint(static_cast<double>(angle) * 0.63661977236758134308);
    double rest = fma(turns, -1.57079632679489655800, static_cast<double>(angle));
    rest = fma(turns, -6.12323399573676603587e-17, rest);
    const float r = static_cast<float>(rest), r2 = r * r;
    const float s = fmaf(r * r2, fmaf(r2, fmaf(r2, -1.9515295891e-4f, 8.3321608736e-3f), -1.6666654611e-1f), r);
    const float c = fmaf(r2 * r2, fmaf(r2, fmaf(r2, 2.443315711809948e-5f, -1.388731625493765e-3f), 4.166664568298827e-2f),
                         fmaf(r2, -0.5f, 1.0f));
    const int quadrant = static_cast<int>(static_cast<i64>(turns) & 3);
    const float first = quadrant & 1 ? c : s, second = quadrant & 1 ? s : c;
    sine = quadrant & 2 ? -first : first;
    cosine = quadrant == 1 || quadrant == 2 ? -second : second;
}

constexpr int kUnits = 4;
constexpr int kWideHead = 256;

// Writes one vector of 256 floats, eight adjacent ones in each lane of a warp, as store_vector does.
__device__ __forceinline__ void store_wide(int format, const float (&x)[8], u8* to, __half* scales) {
    const int lane = threadIdx.x % 32;
    if (format == kKvBf16) {
        reinterpret_cast<uint4*>(to)[lane] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
        return;
    }
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    if (format == kKvI8) {
#pragma unroll
        for (int offset = 1; offset < kScaleGroup / 8; offset <<= 1) most = max(most, __shfl_xor_sync(kAllLanes, most, offset));
    } else {
        most = __reduce_max_sync(kAllLanes, most);
    }
    const __half scale = group_scale(most, format == kKvI8 ? 127.0f : 448.0f);
    const float s = __half2float(scale);
    const bool some = s > 0.0f;
    const float inverse = some ? 1.0f / s : 0.0f;
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float y = some ? x[i] * inverse : 0.0f;
        const u32 code = format == kKvFp8 ? (some ? encode_e4m3(y) : 0)
                                          : static_cast<u8>(static_cast<int>(fminf(fmaxf(rintf(y), -127.0f), 127.0f)));
        words[i / 4] |= code << i % 4 * 8;
    }
    reinterpret_cast<uint2*>(to)[lane] = {words[0], words[1]};
    const int lanes = format == kKvI8 ? kScaleGroup / 8 : 32;
    if (lane % lanes == 0) scales[lane / lanes] = scale;
}

}  // namespace

// Query heads to `query`, keys and values to their pages. A warp takes one head of one row; grid (rows, units / 4) of
// 128 threads; shared memory 4 · (R + 4 · D) bytes.
//
// Aligned heads of 256 features stay in registers, eight adjacent ones in a lane; others pass through shared memory.
extern "C" __global__ void __launch_bounds__(32 * kUnits) rope_append(const __grid_constant__ RopeAppend a) {
    grid_launch_next();
    extern __shared__ __align__(16) float floats[];
    float *cosine = floats, *sine = floats + a.half;
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int unit = blockIdx.y * kUnits + warp, heads = a.kv.heads;
    const bool is_query = unit < a.heads, is_key = !is_query && unit < a.heads + heads, turns = is_query || is_key;
    const int head = is_query ? unit : is_key ? unit - a.heads : unit - a.heads - heads;
    const bool mine = unit < a.heads + 2 * heads;
    const bf16* from = is_query ? a.query_gate.row(row) + static_cast<i64>(head) * 2 * a.d
                                : (is_key ? a.key.row(row) : a.value.row(row)) + static_cast<i64>(head) * a.d;
    bf16* to = a.query.row(row) + static_cast<i64>(head) * a.d;
    const float* gain = a.gains.row(is_key ? 1 : 0);
    // Lanes that exchange features are half / 8 apart.
    const int apart = a.half / 8;
    const u64 places = reinterpret_cast<u64>(from) | reinterpret_cast<u64>(gain) | (is_query ? reinterpret_cast<u64>(to) : 0) |
                       reinterpret_cast<u64>(a.kv.keys.data) | reinterpret_cast<u64>(a.kv.values.data) |
                       static_cast<u64>(a.kv.keys.stride | a.kv.values.stride);
    const bool wide = a.d == kWideHead && a.half % 8 == 0 && (apart & (apart - 1)) == 0 && (places & 15) == 0;
    float by[8], x[8];
    if (wide && mine && turns) {
        const float4 low = reinterpret_cast<const float4*>(gain)[2 * lane], high = reinterpret_cast<const float4*>(gain)[2 * lane + 1];
        by[0] = low.x, by[1] = low.y, by[2] = low.z, by[3] = low.w, by[4] = high.x, by[5] = high.y, by[6] = high.z, by[7] = high.w;
    }
    grid_wait();
    uint4 loaded = {0, 0, 0, 0};
    if (wide && mine) loaded = reinterpret_cast<const uint4*>(from)[lane];
    const int index = find_segment(a.batch, row);
    if (index < 0) return;
    const Segment s = checked_segment(a.batch, index, a.report);
    if (s.len == 0) return;
    const int position = s.start + row - s.row, page = position / kPageTokens;
    const int entry = mine && !is_query ? a.kv.entry(s.slot, page) : 0;
    const float turned = static_cast<float>(max(position - a.shift, 0));
    for (int f = threadIdx.x; f < a.half; f += 32 * kUnits) {
        float si, co;
        sine_cosine(turned * a.frequencies[f], si, co);
        cosine[f] = co * a.magnitude, sine[f] = si * a.magnitude;
    }
    float* shared = floats + 2 * a.half + warp * a.d;
    if (wide && mine) {
        const u32 words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
        for (int i = 0; i < 4; i++) x[2 * i] = low_float(words[i]), x[2 * i + 1] = high_float(words[i]);
        if (turns) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fmaf(x[i], x[i], sum);
            const float factor = 1.0f / sqrtf(warp_sum(sum) / a.d + a.eps);
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = x[i] * factor * (1.0f + by[i]);
        }
    } else if (mine) {
        float sum = 0.0f;
        for (int c = lane; c < a.d; c += 32) {
            const float v = to_float(from[c]);
            shared[c] = v;
            sum = fmaf(v, v, sum);
        }
        if (turns) {
            const float factor = 1.0f / sqrtf(warp_sum(sum) / a.d + a.eps);
            for (int c = lane; c < a.d; c += 32) shared[c] = shared[c] * factor * (1.0f + gain[c]);
        }
    }
    __syncthreads();
    if (!mine) return;
    if (!is_query && entry < 0) {
        if (lane == 0) a.kv.report_missing(a.report, page);
        return;
    }
    const i64 place = is_query ? 0 : a.kv.row(entry, head) + position % kPageTokens;
    u8* stored = is_query ? nullptr : (is_key ? a.kv.keys : a.kv.values).row(place);
    __half* scales = is_query || a.kv.format == kKvBf16 ? nullptr : (is_key ? a.kv.key_scales : a.kv.value_scales).row(place);
    if (wide) {
        if (turns && apart > 0) {
            const bool low = lane < apart;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float other = __shfl_xor_sync(kAllLanes, x[i], apart);
                const int f = lane % apart * 8 + i;
                const float turn = low ? x[i] * cosine[f] - other * sine[f] : x[i] * cosine[f] + other * sine[f];
                if (lane < 2 * apart) x[i] = turn;
            }
        }
        store_wide(is_query ? static_cast<int>(kKvBf16) : a.kv.format, x, is_query ? reinterpret_cast<u8*>(to) : stored, scales);
        return;
    }
    if (turns) {
        for (int f = lane; f < a.half; f += 32) {
            const float u = shared[f], v = shared[f + a.half];
            shared[f] = u * cosine[f] - v * sine[f];
            shared[f + a.half] = v * cosine[f] + u * sine[f];
        }
        __syncwarp();
    }
    if (is_query) {
        for (int c = lane; c < a.d; c += 32) to[c] = to_bf16(shared[c]);
        return;
    }
    store_vector(a.kv.format, shared, a.d, stored, scales);
}
