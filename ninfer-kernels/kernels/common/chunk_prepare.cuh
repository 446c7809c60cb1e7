// First kernel of a prompt: everything of a chunk that does not depend on the state.
//
// Grid (Hk, chunks + 1): a block has a key head of a chunk with its value heads, three at a time; the last blocks clear padding.
// Warp w convolves rows 8w .. 8w + 7, a lane four channels. Products of keys and queries with keys are blocks of 16 × 16.
// Two warps a head invert I + A in f32, where it lies, a thread a column.
#pragma once
#include "common/chunk.cuh"
#include "ptx/block.cuh"
#include "ptx/math.cuh"

namespace {

constexpr int kTogether = 3;      // value heads at a time
constexpr int kSolveStride = 68;  // floats of a row of A
constexpr int kHalo = kChunkTaps - 1;
constexpr float kLeastLog = -150.0f;  // 2^-150 is zero in f32; sums of 64 stay exact to 2^-11

struct alignas(256) PrepareShared {
    u8 key[kChunk * 256];
    u8 query[kChunk * 256];
    float a[kTogether][kChunk][kSolveStride];
    float decay[kTogether][kChunk];
    float beta[kTogether][kChunk];
};

// A lane's four channels of the eight rows that its warp convolves: raw columns with those in front, and weights.
struct Columns {
    uint2 x[8 + kHalo];
    float4 taps[4];

    // `first` is the first of the rows in its segment; rows from `end` on are nothing.
    __device__ __forceinline__ void load(const Gdn& a, const Segment& s, int first, int end, int channel) {
        const bf16* from = a.qkv.row(s.row + first - kHalo) + channel;
#pragma unroll
        for (int j = 0; j < 8 + kHalo; j++) {
            const int at = first - kHalo + j;
            x[j] = {0, 0};
            if (at >= 0 && at < end) x[j] = __ldg(reinterpret_cast<const uint2*>(from));
            from += a.qkv.stride;
        }
        if (first < kHalo && s.start != 0) {
            const u16* window = reinterpret_cast<const u16*>(a.window) + (static_cast<i64>(s.slot) * a.channels() + channel) * kHalo;
#pragma unroll
            for (int j = 0; j < kHalo; j++) {
                const int at = first + j;
                if (at >= kHalo) continue;
                x[j].x = window[at] | static_cast<u32>(window[kHalo + at]) << 16;
                x[j].y = window[2 * kHalo + at] | static_cast<u32>(window[3 * kHalo + at]) << 16;
            }
        }
        const float4* weights = reinterpret_cast<const float4*>(a.conv) + channel;
#pragma unroll
        for (int e = 0; e < 4; e++) taps[e] = __ldg(weights + e);
    }

    __device__ __forceinline__ void convolve(int row, float (&y)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float w[kChunkTaps] = {taps[e].x, taps[e].y, taps[e].z, taps[e].w};
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kChunkTaps; j++) {
                const u32 pair = e < 2 ? x[row + j].x : x[row + j].y;
                sum = fmaf(w[j], e % 2 == 0 ? low_float(pair) : high_float(pair), sum);
            }
            y[e] = silu_approximate(sum);
        }
    }
};

// Convolves the chunk's keys, queries and values. The first two are normed and stay in shared memory too; rows behind the
// last are zeros there. What is next is loaded before the last is computed.
__device__ __forceinline__ void convolve_heads(const GdnChunks& c, const Segment& s, const ChunkRows& rows, PrepareShared& shared) {
    const Gdn& a = c.gdn;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, ratio = a.value_heads / a.key_heads;
    const int keys = a.key_heads * kHeadDim, values = a.value_heads * kHeadDim;
    const int key = blockIdx.x * kHeadDim + 4 * lane, value = blockIdx.x * ratio * kHeadDim + 4 * lane;
    const int first = rows.begin + 8 * warp;
    Columns next;
#pragma unroll 1
    for (int i = -1; i < 2 + ratio; i++) {
        const Columns now = next;
        if (i < 1 + ratio) next.load(a, s, first, rows.end, i < 0 ? keys + key : i == 0 ? key : 2 * keys + value + (i - 1) * kHeadDim);
        if (i < 0) continue;
        const int width = i < 2 ? keys : values;
        __half* to = i == 0 ? c.key + key : i == 1 ? c.query + key : c.value + value + (i - 2) * kHeadDim;
        to += (static_cast<i64>(s.row) + first) * width;
        u8* tile = (i == 0 ? shared.key : shared.query) + lane % 2 * 8;
#pragma unroll
        for (int r = 0; r < 8; r++) {
            const bool live = first + r < rows.end;
            float y[4];
            now.convolve(r, y);
            float factor = kValueScale;
            if (i < 2) {
                float sum = 0.0f;
#pragma unroll
                for (int e = 0; e < 4; e++) sum = fmaf(y[e], y[e], sum);
                factor = rsqrtf(warp_sum(sum) + 1e-6f);
            }
            uint2 packed = {pack_half(y[0] * factor, y[1] * factor), pack_half(y[2] * factor, y[3] * factor)};
            if (!live) packed = {0, 0};
            if (i < 2) *reinterpret_cast<uint2*>(tile + wide_offset(8 * warp + r, lane / 2)) = packed;
            if (live) *reinterpret_cast<uint2*>(to + static_cast<i64>(r) * width) = packed;
        }
    }
}

// Gates of a head by one warp: a lane has two tokens. Behind the last there is no decay and no update.
__device__ __forceinline__ void chunk_gates(const Gdn& a, int row, int count, int head, float* decay, float* beta, float* to) {
    const int lane = threadIdx.x % 32;
    const float a_log = __ldg(a.a_log + head), dt_bias = __ldg(a.dt_bias + head);
    float g[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const int i = 2 * lane + e;
        const i64 at = row + min(i, count - 1);
        const float rate = to_float(__ldg(a.a.row(at) + head)), open = to_float(__ldg(a.b.row(at) + head));
        const float log = gdn_log_decay(a_log, rate, dt_bias) * kLog2E;
        g[e] = i >= count ? 0.0f : log < kLeastLog ? kLeastLog : log;
        beta[i] = i >= count ? 0.0f : sigmoid(open);
    }
    float sum = g[0] + g[1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const float before = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += before;
    }
    float before = __shfl_up_sync(kAllLanes, sum, 1);
    if (lane == 0) before = 0.0f;
    const float2 both = {before + g[0], before + g[0] + g[1]};
    *reinterpret_cast<float2*>(decay + 2 * lane) = both;
    *reinterpret_cast<float2*>(to + 2 * lane) = both;
}

// Waits for the other warp of a pair. Names that are constants keep the other barriers free.
__device__ __forceinline__ void wait_pair(int pair) { pair == 0 ? barrier_of<64>(1) : pair == 1 ? barrier_of<64>(2) : barrier_of<64>(3); }

// Turns A into (I + A)⁻¹ from the top to the bottom, 16 rows at a time: x_i = e_i − Σ_{j<i} A_ij x_j. Two warps have a
// column in each lane; the right one begins at the rows where it differs from zero. Rows become x when both have read them.
__device__ __forceinline__ void invert(float (*a)[kSolveStride], int pair) {
    const int warp = threadIdx.x / 32 % 2, column = threadIdx.x % 64;
#pragma unroll 1
    for (int b = 2 * warp; b < 4; b++) {
        const float(*rows)[kSolveStride] = a + 16 * b;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = 16 * b + i == column ? 1.0f : 0.0f;
#pragma unroll 1
        for (int m = 32 * warp; m < 16 * b; m += 4) {
            const float above[4] = {a[m][column], a[m + 1][column], a[m + 2][column], a[m + 3][column]};
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const float4 row = *reinterpret_cast<const float4*>(&rows[i][m]);
                x[i] = fmaf(-row.x, above[0], x[i]);
                x[i] = fmaf(-row.y, above[1], x[i]);
                x[i] = fmaf(-row.z, above[2], x[i]);
                x[i] = fmaf(-row.w, above[3], x[i]);
            }
        }
#pragma unroll
        for (int m = 0; m < 16; m += 4) {
#pragma unroll
            for (int i = m + 1; i < 16; i++) {
                const float4 row = *reinterpret_cast<const float4*>(&rows[i][16 * b + m]);
                x[i] = fmaf(-row.x, x[m], x[i]);
                if (i > m + 1) x[i] = fmaf(-row.y, x[m + 1], x[i]);
                if (i > m + 2) x[i] = fmaf(-row.z, x[m + 2], x[i]);
                if (i > m + 3) x[i] = fmaf(-row.w, x[m + 3], x[i]);
            }
        }
        if (b < 2) {
            __syncwarp();
        } else {
            wait_pair(pair);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) a[16 * b + i][column] = x[i];
        __syncwarp();
    }
    wait_pair(pair);
}

// Zeros in the results of padding rows, so that nothing that follows meets a number that is none.
__device__ __forceinline__ void clear_padding(const Gdn& a) {
    const int ratio = a.value_heads / a.key_heads, width = ratio * kHeadDim;
    for (int row = threadIdx.x / 32; row < a.batch.rows; row += kChunkThreads / 32) {
        if (a.batch.find(row) >= 0) continue;
        bf16* to = a.output.row(row) + blockIdx.x * width;
        for (int i = threadIdx.x % 32; i < width; i += 32) to[i] = to_bf16(0.0f);
    }
}

// The segment of a chunk of the call, −1 behind the last; `chunk` becomes the chunk of the segment.
__device__ __forceinline__ int find_chunk(const Gdn& a, int& chunk) {
    const int lane = threadIdx.x % 32;
    for (int from = 0; from < a.batch.segments; from += 32) {
        const int count = from + lane < a.batch.segments ? chunk_count(a, a.batch.segment(from + lane)) : 0;
        int sum = count;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int before = __shfl_up_sync(kAllLanes, sum, offset);
            if (lane >= offset) sum += before;
        }
        const u32 behind = __ballot_sync(kAllLanes, chunk < sum);
        if (behind != 0) {
            const int first = __ffs(behind) - 1;
            chunk -= __shfl_sync(kAllLanes, sum - count, first);
            return from + first;
        }
        chunk -= __shfl_sync(kAllLanes, sum, 31);
    }
    return -1;
}

__device__ __forceinline__ void prepare(const GdnChunks& c, PrepareShared& shared) {
    const Gdn& a = c.gdn;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    grid_launch_next();
    grid_wait();
    if (blockIdx.y == gridDim.y - 1) return clear_padding(a);
    int chunk = blockIdx.y;
    const int index = find_chunk(a, chunk);
    if (index < 0) return;
    const Segment s = a.batch.segment(index);
    const GdnFault fault = a.fault(s);
    if (fault.code != 0) {
        if (blockIdx.x == 0 && threadIdx.x == 0) a.report_fault(fault);
        return;
    }
    const ChunkRows rows(s, chunk);
    convolve_heads(c, s, rows, shared);
    __syncthreads();

    const u32 key_tile = shared_address(shared.key), query_tile = shared_address(shared.query);
    const int ratio = a.value_heads / a.key_heads;
#pragma unroll 1
    for (int from = 0; from < ratio; from += kTogether) {
        const int count = min(kTogether, ratio - from), first = blockIdx.x * ratio + from;
        const i64 place = static_cast<i64>(blockIdx.y) * a.value_heads + first;
        if (warp < count) {
            chunk_gates(a, s.row + rows.begin, rows.end - rows.begin, first + warp, shared.decay[warp], shared.beta[warp], c.decay + (place + warp) * kChunk);
        }
        __syncthreads();
        // Blocks 0 .. 9 are keys by keys, 10 .. 19 queries by keys.
#pragma unroll 1
        for (int i = warp; i < 2 * kTriangle; i += kChunkThreads / 32) {
            const bool key_block = i < kTriangle;
            const int block = key_block ? i : i - kTriangle;
            const int2 where = triangle_block(block);
            float products[2][4] = {};
            const u32 left_rows = (key_block ? key_tile : query_tile) + 4096 * where.x + wide_lane();
            const u32 right_rows = key_tile + 4096 * where.y + wide_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; step++) {
                u32 left[4], right[4];
                load_wide(left, left_rows, step);
                load_wide(right, right_rows, step);
                mma_half(products[0], left, right[0], right[1]);
                mma_half(products[1], left, right[2], right[3]);
            }
#pragma unroll 1
            for (int h = 0; h < count; h++) {
                u32 packed[2][2];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int row = 16 * where.x + g + 8 * half;
                    const float decay = shared.decay[h][row], beta = key_block ? shared.beta[h][row] : 1.0f;
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        const int column = 16 * where.y + 8 * n + 2 * t;
                        float x[2];
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const float power = exp2_approximate(decay - shared.decay[h][column + e]);
                            const bool seen = row > column + e || (!key_block && row == column + e);
                            x[e] = seen ? products[n][2 * half + e] * power * beta : 0.0f;
                        }
                        if (key_block) *reinterpret_cast<float2*>(&shared.a[h][row][column]) = {x[0], x[1]};
                        packed[n][half] = pack_half(x[0], x[1]);
                    }
                }
                if (!key_block) {
                    c.weights[((place + h) * kTriangle + block) * 32 + lane] = {packed[0][0], packed[0][1], packed[1][0], packed[1][1]};
                }
            }
        }
        __syncthreads();
        const int h = warp / 2;
        if (h < count) {
            invert(shared.a[h], h);
#pragma unroll 1
            for (int block = warp % 2; block < kTriangle; block += 2) {
                const int2 where = triangle_block(block);
                u32 packed[4];
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const int row = 16 * where.x + g + r % 2 * 8, column = 16 * where.y + 2 * t + r / 2 * 8;
                    const float2 x = *reinterpret_cast<const float2*>(&shared.a[h][row][column]);
                    packed[r] = pack_half(x.x * shared.beta[h][column], x.y * shared.beta[h][column + 1]);
                }
                c.solve[((place + h) * kTriangle + block) * 32 + lane] = {packed[0], packed[1], packed[2], packed[3]};
            }
        }
        __syncthreads();
    }
}

}  // namespace
