// targets: sm_80
// local memory: attend_any: addresses of any layout, on some devices; this route is not made to be fast
// Attention around the products of common/attend.cuh: head norms, rotation and append; combination of leaves; and a plain
// kernel for head sizes and layouts that have no tiles.
#include "common/attend.cuh"
#include "common/weight.cuh"

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

}  // namespace

// Query heads to `query`, keys and values to their pages. A warp takes one head of one row; grid (rows, units / 4) of
// 128 threads; shared memory 4 · (R + 4 · D) bytes.
extern "C" __global__ void __launch_bounds__(32 * kUnits) rope_append(const __grid_constant__ RopeAppend a) {
    extern __shared__ float floats[];
    float *cosine = floats, *sine = floats + a.half;
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int index = find_segment(a.batch, row);
    if (index < 0) return;
    const Segment s = checked_segment(a.batch, index, a.report);
    if (s.len == 0) return;
    const int position = s.start + row - s.row;
    const float turned = static_cast<float>(max(position - a.shift, 0));
    for (int f = threadIdx.x; f < a.half; f += 32 * kUnits) {
        float si, co;
        sine_cosine(turned * a.frequencies[f], si, co);
        cosine[f] = co * a.magnitude, sine[f] = si * a.magnitude;
    }
    const int unit = blockIdx.y * kUnits + warp, heads = a.kv.heads;
    const bool is_query = unit < a.heads, is_key = !is_query && unit < a.heads + heads;
    const int head = is_query ? unit : is_key ? unit - a.heads : unit - a.heads - heads;
    float* x = floats + 2 * a.half + warp * a.d;
    const bool mine = unit < a.heads + 2 * heads;
    if (mine) {
        const bf16* from = is_query ? a.query_gate.row(row) + static_cast<i64>(head) * 2 * a.d
                                    : (is_key ? a.key.row(row) : a.value.row(row)) + static_cast<i64>(head) * a.d;
        float sum = 0.0f;
        for (int c = lane; c < a.d; c += 32) {
            const float v = to_float(from[c]);
            x[c] = v;
            sum = fmaf(v, v, sum);
        }
        if (is_query || is_key) {
            const float factor = 1.0f / sqrtf(warp_sum(sum) / a.d + a.eps);
            const float* gain = a.gains.row(is_query ? 0 : 1);
            for (int c = lane; c < a.d; c += 32) x[c] = x[c] * factor * (1.0f + gain[c]);
        }
    }
    __syncthreads();
    if (!mine) return;
    if (is_query || is_key) {
        for (int f = lane; f < a.half; f += 32) {
            const float u = x[f], v = x[f + a.half];
            x[f] = u * cosine[f] - v * sine[f];
            x[f + a.half] = v * cosine[f] + u * sine[f];
        }
        __syncwarp();
    }
    if (is_query) {
        bf16* to = a.query.row(row) + static_cast<i64>(head) * a.d;
        for (int c = lane; c < a.d; c += 32) to[c] = to_bf16(x[c]);
        return;
    }
    const int page = position / kPageTokens, entry = a.kv.entry(s.slot, page);
    if (entry < 0) {
        if (lane == 0) a.kv.report_missing(a.report, page);
        return;
    }
    const i64 place = a.kv.row(entry, head) + position % kPageTokens;
    const Matrix<u8>& pages = is_key ? a.kv.keys : a.kv.values;
    const Matrix<__half>& scales = is_key ? a.kv.key_scales : a.kv.value_scales;
    store_vector(a.kv.format, x, a.d, pages.row(place), a.kv.format == kKvBf16 ? nullptr : scales.row(place));
}

// Adds the leaves of each row and head, divides, and applies the gate. Leaf i belongs to lane i % 32 of eight threads,
// which adds its leaves in ascending order; the lanes are added in ascending order. Grid (T · Hq, D / 32) of 256 threads.
extern "C" __global__ void __launch_bounds__(256) attend_combine(const __grid_constant__ Attend a) {
    __shared__ int first[kMaxSegments + 1];
    __shared__ float most[8];
    __shared__ float outputs[32][32];
    __shared__ float sums[32];
    const int row = blockIdx.x / a.heads, head = blockIdx.x % a.heads, d = a.head_dim;
    const int column = blockIdx.y * 32 + threadIdx.x % 8 * 4, lane = threadIdx.x / 8;
    bf16* out = a.output.row(row) + static_cast<i64>(head) * d;
    const int index = find_segment(a.batch, row);
    const Shares shares(list_work(a, first), a.blocks);
    Work w;
    if (index >= 0) w = segment_work(a, index);
    const int position = index >= 0 ? w.segment.start + row - w.segment.row : -1;
    if (index < 0 || w.pages == 0 || position < a.first_key) {
        if (lane == 0) {
            for (int i = 0; i < 4; i++) out[column + i] = to_bf16(0.0f);
        }
        return;
    }
    const int pair = (row - w.segment.row) * a.group + head % a.group, tile = pair / a.tile_rows;
    // Item of the sequence's page 0, if that were visible.
    const int item = first[index] + ((head / a.group) * w.tiles + tile) * w.pages - w.first_page;
    const i64 slot = (static_cast<i64>(row) * a.heads + head) * a.leaves;
    const int begin = w.first_page / kLeafPages, end = position / kPageTokens / kLeafPages + 1;
    const int last_page = w.first_page + w.pages;

    // Visits the partial results of leaf i: the leaf's own, or those of its pages.
    auto visit = [&](int leaf, auto&& one) {
        const int from = max(leaf * kLeafPages, w.first_page), to = min((leaf + 1) * kLeafPages, last_page);
        if (shares.owner(item + from) == shares.owner(item + to - 1)) {
            one(a.leaf_sums[slot + leaf], a.leaf_output + (slot + leaf) * d);
            return;
        }
        for (int page = from; page < to; page++) {
            const int x = item + page, block = shares.owner(x), nth = split_place(x, item + from, shares.begin(block));
            const i64 place = (static_cast<i64>(block) * kSplitPages + nth) * a.tile_rows + pair % a.tile_rows;
            one(a.page_sums[place], a.page_output + place * d);
        }
    };

    float top = -infinity();
    for (int leaf = begin + threadIdx.x; leaf < end; leaf += 256) {
        visit(leaf, [&](float2 sum, const float*) { top = fmaxf(top, sum.x); });
    }
    for (int offset = 16; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = top;
    __syncthreads();
    for (int i = 0; i < 8; i++) top = fmaxf(top, most[i]);
    const float base = top == -infinity() ? 0.0f : top;

    float l = 0.0f, o[4] = {};
#pragma unroll 2
    for (int leaf = begin / 32 * 32 + lane; leaf < end; leaf += 32) {
        if (leaf < begin) continue;
        Partial p;
        float part[4] = {};
        visit(leaf, [&](float2 sum, const float* output) {
            const float4 v = *reinterpret_cast<const float4*>(output + column);
            const float next[4] = {v.x, v.y, v.z, v.w};
            const Weights by = p.add(sum.x, sum.y);
            for (int i = 0; i < 4; i++) part[i] = fmaf(next[i], by.added, part[i] * by.kept);
        });
        const float weight = exp2_approximate(p.most - base);
        l = fmaf(p.sum, weight, l);
        for (int i = 0; i < 4; i++) o[i] = fmaf(part[i], weight, o[i]);
    }
    for (int i = 0; i < 4; i++) outputs[lane][threadIdx.x % 8 * 4 + i] = o[i];
    if (threadIdx.x % 8 == 0) sums[lane] = l;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float y = 0.0f;
    l = 0.0f;
    for (int i = 0; i < 32; i++) y += outputs[i][threadIdx.x], l += sums[i];
    const int c = blockIdx.y * 32 + threadIdx.x;
    const float gate = to_float(a.query_gate.row(row)[static_cast<i64>(head) * 2 * d + d + c]);
    out[c] = to_bf16(y * reciprocal(l) * sigmoid(gate));
}

namespace {

__device__ __forceinline__ float kv_element(int format, const u8* vector, const __half* scales, int c) {
    if (format == kKvBf16) return to_float(reinterpret_cast<const bf16*>(vector)[c]);
    if (format == kKvI8) return static_cast<float>(static_cast<signed char>(vector[c])) * __half2float(scales[c / kScaleGroup]);
    return e4m3_value(vector[c]) * __half2float(scales[0]);
}

}  // namespace

// Any head size and layout: one block of 128 threads for one head of one row, 64 keys at a time in ascending order. Grid
// (T, Hq); shared memory 4 · (2 · D + 64) bytes.
extern "C" __global__ void __launch_bounds__(128) attend_any(const __grid_constant__ Attend a) {
    extern __shared__ float floats[];
    const int d = a.head_dim, row = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *query = floats, *output = floats + d, *scores = floats + 2 * d;
    bf16* out = a.output.row(row) + static_cast<i64>(head) * d;
    const int index = find_segment(a.batch, row);
    const Segment s = index >= 0 ? checked_segment(a.batch, index, a.report) : Segment{};
    if (s.len == 0) {
        for (int c = threadIdx.x; c < d; c += 128) out[c] = to_bf16(0.0f);
        return;
    }
    const int position = s.start + row - s.row;
    for (int c = threadIdx.x; c < d; c += 128) {
        query[c] = to_float(a.query.row(row)[static_cast<i64>(head) * d + c]);
        output[c] = 0.0f;
    }
    float most = -infinity(), sum = 0.0f;
    for (int page = a.first_key / kPageTokens; page <= position / kPageTokens; page++) {
        const int entry = a.kv.entry(s.slot, page);
        if (entry < 0) {
            if (threadIdx.x == 0) a.kv.report_missing(a.report, page);
            break;
        }
        const i64 place = a.kv.row(entry, head / a.group);
        const int begin = max(a.first_key - page * kPageTokens, 0), end = min(position - page * kPageTokens + 1, kPageTokens);
        auto scales = [&](const Matrix<__half>& m, int key) { return a.kv.format == kKvBf16 ? nullptr : m.row(place + key); };
        __syncthreads();
        for (int key = begin + warp; key < end; key += 4) {
            const u8* vector = a.kv.keys.row(place + key);
            float dot = 0.0f;
            for (int c = lane; c < d; c += 32) {
                dot = fmaf(query[c], kv_element(a.kv.format, vector, scales(a.kv.key_scales, key), c), dot);
            }
            dot = warp_sum(dot);
            if (lane == 0) scores[key] = dot * a.scale;
        }
        __syncthreads();
        float next = most;
        for (int key = begin; key < end; key++) next = fmaxf(next, scores[key]);
        const float base = next == -infinity() ? 0.0f : next, kept = exp2_approximate(most - base);
        __syncthreads();
        for (int key = begin + threadIdx.x; key < end; key += 128) scores[key] = exp2_approximate(scores[key] - base);
        __syncthreads();
        sum *= kept;
        for (int key = begin; key < end; key++) sum += scores[key];
        for (int c = threadIdx.x; c < d; c += 128) {
            float o = output[c] * kept;
            for (int key = begin; key < end; key++) {
                o = fmaf(scores[key], kv_element(a.kv.format, a.kv.values.row(place + key), scales(a.kv.value_scales, key), c), o);
            }
            output[c] = o;
        }
        most = next;
    }
    const bf16* gate = a.query_gate.row(row) + static_cast<i64>(head) * 2 * d + d;
    for (int c = threadIdx.x; c < d; c += 128) out[c] = to_bf16(output[c] * reciprocal(sum) * sigmoid(to_float(gate[c])));
}
