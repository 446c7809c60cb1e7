// targets: sm_80 sm_90
// local memory: attend_any: addresses of any layout, on some devices; this route is not made to be fast
// local memory: attend_combine: sixteen bytes by the oldest assembler before sm_90
// Attention around the products of common/attend.cuh: head norms, rotation and append (common/rope.cuh); combination of
// leaves (common/attend_join.cuh); and a plain kernel for head sizes and layouts that have no tiles.
#include "common/attend_join.cuh"
#include "common/rope.cuh"
#include "common/weight.cuh"
#include "ptx/bulk.cuh"

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
    grid_launch_next();
    grid_wait();
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
