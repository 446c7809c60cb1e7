// Second kernel of a prompt: the state through the chunks of a segment, and the results.
//
// Grid (4 Hv, segments): a block has 32 columns of the state of a head, as f32 in registers, warp w rows 16w .. 16w + 15.
// Value features are taken in the order that gives a lane adjacent ones: its columns 2t + e of the four tiles n of eight
// are features 8t + 2n + e of the strip. A chunk takes three barriers:
//   products of keys (warps 0 .. 3) and queries (4 .. 7) with the state; x = v − decay · products
//   corrections u = T x, and as they are at the end of the chunk
//   state · decay + keysᵀ u; results = decay · products + weights · u
// What the next chunk needs is copied meanwhile: all but queries from the first barrier on, those from the second on.
//
// On sm_90 the four blocks of a head are a cluster. They pass each other the sums of squares of a chunk's results and write
// these, normed, one chunk later. Elsewhere the results go to the workspace for gdn_norm.
#pragma once
#include "common/chunk.cuh"
#include "common/columns.cuh"
#include "ptx/coherent.cuh"
#include "ptx/cluster.cuh"
#include "ptx/early.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/transpose.cuh"

namespace {

constexpr int kStrip = 32, kStrips = kHeadDim / kStrip;
#if __CUDA_ARCH__ >= 900
constexpr bool kJoined = true;
#else
constexpr bool kJoined = false;
#endif

struct alignas(256) ScanShared {
    u8 key[2][kChunk * 256];
    u8 query[kChunk * 256];
    uint4 solve[2][kTriangle * 32];
    uint4 weights[2][kTriangle * 32];
    u8 value[2][kChunk * 64];
    float decay[2][kChunk];
    u8 state[kHeadDim * 64];
    u8 x[kChunk * 64];
    u8 inner[kChunk * 64];   // corrections
    u8 behind[kChunk * 64];  // as they are at the end of the chunk
    float sums[2][kStrips][kChunk];
    float gain[kStrip];
};

static_assert(sizeof(ScanShared) <= 99 * 1024, "what a block may have anywhere");

// Where a thread finds its part of the operands of a block's chunks.
struct ChunkSource {
    const __half *key, *query, *value;  // in the segment's first row
    const uint4 *solve, *weights;       // in the segment's first chunk
    const float* decay;
    int keys, values, heads;

    __device__ __forceinline__ ChunkSource(const GdnChunks& c, const Segment& s, int first, int head, int strip) {
        const Gdn& a = c.gdn;
        const int thread = threadIdx.x;
        keys = a.key_heads * kHeadDim, values = a.value_heads * kHeadDim, heads = a.value_heads;
        const i64 row = s.row, place = static_cast<i64>(first) * heads + head;
        const i64 at = (row + thread / 16) * keys + head / (heads / a.key_heads) * kHeadDim + thread % 16 * 8;
        key = c.key + at, query = c.query + at;
        value = c.value + (row + thread / 4) * values + head * kHeadDim + strip * kStrip + thread % 4 * 8;
        solve = c.solve + place * kTriangle * 32 + thread, weights = c.weights + place * kTriangle * 32 + thread;
        decay = c.decay + place * kChunk + 4 * thread;
    }

    // Rows behind the last become zeros and are not read.
    __device__ __forceinline__ void copy_rows(u8* to, const __half* from, const ChunkRows& rows) const {
        const int row = threadIdx.x / 16;
        const u32 target = shared_address(to) + wide_offset(row, threadIdx.x % 16);
        from += static_cast<i64>(rows.begin) * keys;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            copy_async(target + 4096 * i, from, rows.begin + row + 16 * i < rows.end);
            from += 16 * keys;
        }
    }

    __device__ __forceinline__ void copy_queries(ScanShared& to, const ChunkRows& rows) const { copy_rows(to.query, query, rows); }

    __device__ __forceinline__ void copy_rest(ScanShared& to, const ChunkRows& rows, int chunk) const {
        const int half = chunk % 2, thread = threadIdx.x;
        copy_rows(to.key[half], key, rows);
        const bool live = rows.begin + thread / 4 < rows.end;
        copy_async(shared_address(to.value[half]) + 16 * thread, value + static_cast<i64>(rows.begin) * values, live);
        const i64 place = static_cast<i64>(chunk) * heads;
        const uint4 *solves = solve + place * kTriangle * 32, *weighs = weights + place * kTriangle * 32;
        const u32 solve_to = shared_address(to.solve[half]) + 16 * thread, weights_to = shared_address(to.weights[half]) + 16 * thread;
        copy_async(solve_to, solves, true);
        copy_async(weights_to, weighs, true);
        if (thread < kTriangle * 32 - kChunkThreads) {
            copy_async(solve_to + 16 * kChunkThreads, solves + kChunkThreads, true);
            copy_async(weights_to + 16 * kChunkThreads, weighs + kChunkThreads, true);
        }
        if (thread < kChunk / 4) copy_async(shared_address(to.decay[half]) + 16 * thread, decay + place * kChunk, true);
    }
};

// 16 rows of a strip, two of its tiles of eight columns, as the second operand: r[0], r[1] of the first, r[2], r[3].
__device__ __forceinline__ void load_strip(u32 (&r)[4], u32 rows, int half) { load_matrix_x4_transposed(r, rows ^ (32 * half)); }

// A pair of a lane's columns of a tile in row `row`, which is g or g + 8 from a multiple of 16 on.
__device__ __forceinline__ void store_pair(u8* strip, int row, int tile, u32 pair) {
    const u32 lane = strip_offset(threadIdx.x % 32 / 4, 0) + threadIdx.x % 4 * 4;
    *reinterpret_cast<u32*>(strip + ((lane ^ (16 * tile)) + (row - static_cast<int>(threadIdx.x % 32 / 4)) * 64)) = pair;
}

// d += block row `row` of a triangle · strip, kTiles tiles of eight columns from 2 · `half` on.
template <int kTiles>
__device__ __forceinline__ void multiply_triangle(float (&d)[kTiles][4], const uint4* triangle, u32 rows, int row, int half) {
    const uint4* blocks = triangle + row * (row + 1) / 2 * 32 + threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        if (step > row) break;
        const uint4 block = blocks[step * 32];
        const u32 left[4] = {block.x, block.y, block.z, block.w};
#pragma unroll
        for (int h = 0; h < kTiles / 2; h++) {
            u32 right[4];
            load_strip(right, rows + 1024 * step, half + h);
            mma_half(d[2 * h], left, right[0], right[1]);
            mma_half(d[2 * h + 1], left, right[2], right[3]);
        }
    }
}

// The rows of a lane's state: 16w + g and + 8, features 8t .. 8t + 7 of the strip.
__device__ __forceinline__ float* state_row(const Gdn& a, const Segment& s, int head, int strip, int half) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 row = (static_cast<i64>(s.slot) * a.value_heads + head) * kHeadDim + 16 * warp + lane / 4 + 8 * half;
    return a.matrix + row * kHeadDim + strip * kStrip + 8 * (lane % 4);
}

__device__ __forceinline__ void store_state(u8* to, const float (&state)[4][4]) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        store_pair(to, row, n, pack_half(state[n][0], state[n][1]));
        store_pair(to, row + 8, n, pack_half(state[n][2], state[n][3]));
    }
}

// Results of a chunk that wait for the other strips of their head.
struct Results {
    float x[4][4];
    uint4 z[2];
    int row, live;  // first row of the lane in the call; bit h: the row of half h exists

    __device__ __forceinline__ void take(const Gdn& a, const Segment& s, const ChunkRows& rows, int feature, const float (&from)[4][4]) {
        const int i = (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4;
        row = s.row + rows.begin + i, live = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const bool exists = rows.begin + i + 8 * h < rows.end;
            live |= (exists ? 1 : 0) << h;
            z[h] = __ldg(reinterpret_cast<const uint4*>(a.z.row(exists ? row + 8 * h : s.row) + feature));
        }
#pragma unroll
        for (int i = 0; i < 16; i++) x[i / 4][i % 4] = from[i / 4][i % 4];
    }

    __device__ __forceinline__ void send(float (&sums)[kStrips][kChunk], int strip) const {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < 4; n++) sum = fmaf(x[n][2 * h], x[n][2 * h], sum), sum = fmaf(x[n][2 * h + 1], x[n][2 * h + 1], sum);
            sum += __shfl_xor_sync(kAllLanes, sum, 1);
            sum += __shfl_xor_sync(kAllLanes, sum, 2);
            // Lane t writes to block t.
            store_cluster(&sums[strip][(threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4 + 8 * h], t, sum);
        }
    }

    __device__ __forceinline__ void write(const Gdn& a, const float (&sums)[kStrips][kChunk], const float* gain, int feature) const {
        const int i = (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (!(live >> h & 1)) continue;
            float sum = 0.0f;
#pragma unroll
            for (int strip = 0; strip < kStrips; strip++) sum += sums[strip][i + 8 * h];
            const float factor = rsqrtf(sum / kHeadDim + a.eps);
            const u32 gates[4] = {z[h].x, z[h].y, z[h].z, z[h].w};
            u32 y[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float v[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float open = e == 0 ? low_float(gates[n]) : high_float(gates[n]);
                    const float gate = __fdividef(a.sigmoid ? 1.0f : open, 1.0f + __expf(-open));
                    v[e] = x[n][2 * h + e] * factor * gain[8 * (threadIdx.x % 4) + 2 * n + e] * gate;
                }
                y[n] = pack_bf16(v[0], v[1]);
            }
            *reinterpret_cast<uint4*>(a.output.row(row + 8 * h) + feature) = {y[0], y[1], y[2], y[3]};
        }
    }

    // Without the other strips: the plain results.
    __device__ __forceinline__ void leave(const Gdn& a, int feature) const {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (!(live >> h & 1)) continue;
            float4* to = reinterpret_cast<float4*>(a.reads + (static_cast<i64>(row) + 8 * h) * a.values() + feature);
            to[0] = {x[0][2 * h], x[0][2 * h + 1], x[1][2 * h], x[1][2 * h + 1]};
            to[1] = {x[2][2 * h], x[2][2 * h + 1], x[3][2 * h], x[3][2 * h + 1]};
        }
    }
};

// Moves the convolution's window behind the segment: a block has a part of the channels.
__device__ __forceinline__ void move_window(const Gdn& a, const Segment& s) {
    const int channels = a.channels(), part = divide_up(channels, gridDim.x);
    for (int i = threadIdx.x; i < part; i += kChunkThreads) {
        const int channel = blockIdx.x * part + i;
        if (channel >= channels) break;
        bf16* window = a.window + (static_cast<i64>(s.slot) * channels + channel) * (kChunkTaps - 1);
        Window<kChunkTaps> moved;
        moved.load(window, kChunkTaps, s.start == 0, a.qkv.row(s.row) + channel, a.qkv.stride, s.len);
        moved.store(window, kChunkTaps);
    }
}

__device__ __forceinline__ void scan(const GdnChunks& c, ScanShared& shared) {
    const Gdn& a = c.gdn;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.x / kStrips, strip = blockIdx.x % kStrips, feature = head * kHeadDim + strip * kStrip + 8 * t;
    grid_launch_next();
    // The table may still be that of the call before, and then another state comes nearer: no harm.
    const int early = load_l2(a.batch.table + blockIdx.y * a.batch.stride);
    if (threadIdx.x < kHeadDim && static_cast<u32>(early) < static_cast<u32>(a.slots)) {
        prefetch_l2(a.matrix + ((static_cast<i64>(early) * a.value_heads + head) * kHeadDim + threadIdx.x) * kHeadDim + strip * kStrip);
    }
    if (kJoined && threadIdx.x < kStrip) shared.gain[threadIdx.x] = __ldg(a.gain + strip * kStrip + threadIdx.x);
    grid_wait();
    const Segment s = a.batch.segment(blockIdx.y);
    if (a.idle(s) || a.fault(s).code != 0) return;
    int first = 0;
    for (int i = lane; i < blockIdx.y; i += 32) first += chunk_count(a, a.batch.segment(i));
    first = __reduce_add_sync(kAllLanes, first);
    const int count = chunk_count(a, s);
    if (first + count > c.chunks) return;  // segments that share rows

    const ChunkSource source(c, s, first, head, strip);
    float state[4][4] = {};
    if (s.start != 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4* from = reinterpret_cast<const float4*>(state_row(a, s, head, strip, h));
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                const float4 v = from[n / 2];
                state[n][2 * h] = v.x * kValueScale, state[n][2 * h + 1] = v.y * kValueScale;
                state[n + 1][2 * h] = v.z * kValueScale, state[n + 1][2 * h + 1] = v.w * kValueScale;
            }
        }
    }

    // Addresses of what this lane loads of the tiles.
    const u32 state_rows = shared_address(shared.state) + strip_lane(), x_rows = shared_address(shared.x) + strip_lane();
    const u32 inner_rows = shared_address(shared.inner) + strip_lane(), behind_rows = shared_address(shared.behind) + strip_lane();
    const u32 key_rows = shared_address(shared.key[0]) + wide_lane() + warp % 4 * 4096;
    const u32 query_rows = shared_address(shared.query) + wide_lane() + warp % 4 * 4096;
    const u32 key_columns = shared_address(shared.key[0]) + wide_offset(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
    const float result_scale = a.query_scale / kValueScale;
    Results results;
#pragma unroll 1
    for (int chunk = -1; chunk < count; chunk++) {
        // The first time the operands of the next chunk are brought, and nothing else.
        const int half = chunk & 1;
        const ChunkRows next(s, chunk + 1);
        if (chunk >= 0) {
            copy_wait<0>();
            __syncthreads();
        }
        if (chunk + 1 < count) source.copy_rest(shared, next, chunk + 1);
        if (chunk < 0) {
            source.copy_queries(shared, next);
            copy_commit();
            store_state(shared.state, state);
            if (kJoined) cluster_arrive();
            continue;
        }
        const float* decay = shared.decay[half];

        float products[4][4] = {};
        const u32 left_rows = warp < 4 ? key_rows + half * kChunk * 256 : query_rows;
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; step++) {
            u32 left[4];
            load_wide(left, left_rows, step);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 right[4];
                load_strip(right, state_rows + 1024 * step, h);
                mma_half(products[2 * h], left, right[0], right[1]);
                mma_half(products[2 * h + 1], left, right[2], right[3]);
            }
        }
        {
            // Decay before the rows; queries keep it for their results.
            const int row = warp % 4 * 16 + g;
            const float kept[2] = {exp2_approximate(decay[row]), exp2_approximate(decay[row + 8])};
#pragma unroll
            for (int i = 0; i < 16; i++) products[i / 4][i % 4] *= kept[i % 4 / 2];
            if (warp < 4) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const uint4 v = *reinterpret_cast<const uint4*>(shared.value[half] + (row + 8 * h) * 64 + 16 * t);
                    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        const float2 pair = unpack_half(pairs[n]);
                        store_pair(shared.x, row + 8 * h, n, pack_half(pair.x - products[n][2 * h], pair.y - products[n][2 * h + 1]));
                    }
                }
            }
        }
        __syncthreads();
        if (chunk + 1 < count) source.copy_queries(shared, next);
        copy_commit();

        {
            float u[2][4] = {};
            const int part = warp / 4, row = warp % 4 * 16 + g;
            multiply_triangle<2>(u, shared.solve[half], x_rows, warp % 4, part);
            const float last = decay[kChunk - 1];
            const float kept[2] = {exp2_approximate(last - decay[row]), exp2_approximate(last - decay[row + 8])};
#pragma unroll
            for (int n = 0; n < 2; n++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float u0 = u[n][2 * h], u1 = u[n][2 * h + 1];
                    store_pair(shared.inner, row + 8 * h, 2 * part + n, pack_half(u0, u1));
                    store_pair(shared.behind, row + 8 * h, 2 * part + n, pack_half(u0 * kept[h], u1 * kept[h]));
                }
            }
        }
        __syncthreads();

        const float moved = exp2_approximate(decay[kChunk - 1]);
#pragma unroll
        for (int i = 0; i < 16; i++) state[i / 4][i % 4] *= moved;
#pragma unroll
        for (int step = 0; step < kChunk / 16; step++) {
            u32 left[4];
            load_matrix_x4_transposed(left, key_columns + half * kChunk * 256 + 4096 * step);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 right[4];
                load_strip(right, behind_rows + 1024 * step, h);
                mma_half(state[2 * h], left, right[0], right[1]);
                mma_half(state[2 * h + 1], left, right[2], right[3]);
            }
        }
        store_state(shared.state, state);

        if (warp >= 4) {
            multiply_triangle<4>(products, shared.weights[half], inner_rows, warp - 4, 0);
#pragma unroll
            for (int i = 0; i < 16; i++) products[i / 4][i % 4] *= result_scale;
        }
        if (kJoined) cluster_wait();
        if (warp >= 4) {
            if (kJoined && chunk > 0) results.write(a, shared.sums[1 - half], shared.gain, feature);
            results.take(a, s, ChunkRows(s, chunk), feature, products);
            if (kJoined) {
                results.send(shared.sums[half], strip);
            } else {
                results.leave(a, feature);
            }
        }
        if (kJoined) cluster_arrive();
    }
    if (kJoined) {
        cluster_wait();
        if (warp >= 4) results.write(a, shared.sums[(count - 1) % 2], shared.gain, feature);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float4* to = reinterpret_cast<float4*>(state_row(a, s, head, strip, h));
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            constexpr float kBack = 1.0f / kValueScale;
            to[n / 2] = {state[n][2 * h] * kBack, state[n][2 * h + 1] * kBack, state[n + 1][2 * h] * kBack, state[n + 1][2 * h + 1] * kBack};
        }
    }
    move_window(a, s);
}

}  // namespace
