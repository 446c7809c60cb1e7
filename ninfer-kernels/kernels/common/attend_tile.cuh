// Products of one tile with one page of 64 keys, by eight warps.
//
// Scores: warp w multiplies all rows of the tile with keys 8w .. 8w + 7. Output: warp w multiplies all weights with its
// eighth of the values' columns. So each key and each value is decoded once, in registers, by the warp that needs it.
// Weights pass through shared memory as bf16; a row's bits do not depend on the other rows of its tile.
//
// Features of a key are taken in an order that suits its bytes, the same for queries. In a group of 64, lane t = l % 4 of
// one-byte formats holds features 16t .. 16t + 15, of bf16 features 8t .. 8t + 7 and 32 + 8t .. 32 + 8t + 7. A lane's columns
// of the output are 2C adjacent ones from D/8 · w + 2C · t on, C = D / 64.
//
// Rows of keys and values lie in shared memory as chunks of 16 bytes, chunk c of row r at c ^ swizzle(r): then eight lanes
// that load together never meet in a bank.
#pragma once
#include "common/attend.cuh"
#include "common/fragment.cuh"
#include "ptx/mma.cuh"

constexpr int kTileWarps = 8;
constexpr int kTileThreads = 32 * kTileWarps;

namespace {

template <int kFormat, int kD>
struct PageShape {
    static constexpr int kRow = kD * kv_bytes(kFormat);
    static constexpr int kChunks = kRow / 16;
    static constexpr int kGroups = kv_groups(kFormat, kD);
    static constexpr int kScaleBytes = 128 * kGroups;
    static constexpr int kHalf = 64 * kRow + kScaleBytes;  // keys or values with their scales
    static constexpr int kBytes = 2 * kHalf;

    __device__ static __forceinline__ int swizzle(int row) {
        return kRow >= 128 ? (row & 1) << 2 ^ (row & 6) : row >> 1 & 3;
    }
    __device__ static __forceinline__ int offset(int row, int chunk) { return row * kRow + (chunk ^ swizzle(row)) * 16; }
};

// Where a page lies and which of its keys any row of the tile sees.
struct Place {
    i64 row;  // -1: no page
    int begin, end;
};

// Begins to copy the keys or the values of a page; keys that no row sees become zeros.
template <int kFormat, int kD>
__device__ __forceinline__ void load_page(u8* to, const Matrix<u8>& m, const Matrix<__half>& scales, Place at) {
    using Shape = PageShape<kFormat, kD>;
    // A thread copies one chunk of every kStep-th row.
    constexpr int kStep = kTileThreads / Shape::kChunks;
    const u32 target = shared_address(to);
    const int first = threadIdx.x / Shape::kChunks, chunk = threadIdx.x % Shape::kChunks;
    const u8* from = (at.row >= 0 ? m.row(at.row) : m.data) + first * m.stride + chunk * 16;
#pragma unroll 4
    for (int row = first; row < 64; row += kStep, from += kStep * m.stride) {
        const bool seen = row >= at.begin && row < at.end;
        copy_async(target + Shape::offset(row, chunk), seen ? from : m.data, seen);
    }
    if constexpr (Shape::kGroups > 0) {
        const int i = threadIdx.x;
        if (i < 8 * Shape::kGroups) {
            const u8* from = reinterpret_cast<const u8*>(at.row >= 0 ? scales.row(at.row) : scales.data);
            copy_async(target + 64 * Shape::kRow + 16 * i, from + 16 * i, at.row >= 0);
        }
    }
}

// Queries of a tile in the order of the lanes: [16 rows][16 features][lane] of 16 bytes.
template <int kFormat, int kD, int kM>
__device__ __forceinline__ void load_queries(uint4* to, const Attend& a, const Segment& s, int kv_head, int tile) {
    constexpr int kSteps = kD / 16;
    const int pairs = s.len * a.group;
    for (int i = threadIdx.x; i < kM * kSteps * 32; i += kTileThreads) {
        const int lane = i % 32, step = i / 32 % kSteps, m = i / 32 / kSteps, g = lane / 4, t = lane % 4, q = step % 4;
        const int feature = step / 4 * 64 + (kFormat == kKvBf16 ? q / 2 * 32 + 8 * t + q % 2 * 4 : 16 * t + 4 * q);
        uint2 w[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int pair = (tile * kM + m) * 16 + g + 8 * r;
            w[r] = {0, 0};
            if (pair < pairs) {
                const int head = kv_head * a.group + pair % a.group;
                w[r] = *reinterpret_cast<const uint2*>(a.query.row(s.row + pair / a.group) + head * kD + feature);
            }
        }
        if constexpr (kFormat == kKvBf16) {
            to[i] = {w[0].x, w[1].x, w[0].y, w[1].y};
        } else {
            // One-byte codes come apart as pairs (0, 2) and (1, 3).
            to[i] = {choose_bytes(w[0].x, w[0].y, 0x5410), choose_bytes(w[1].x, w[1].y, 0x5410),
                     choose_bytes(w[0].x, w[0].y, 0x7632), choose_bytes(w[1].x, w[1].y, 0x7632)};
        }
    }
}

// Codes 0, 2 and 1, 3 of a word as bf16 pairs.
template <int kFormat>
__device__ __forceinline__ void decode_keys(u32 w, u32& even, u32& odd) {
    if constexpr (kFormat == kKvI8) {
        // The low seven bits behind 128, less 128 or, for a negative code, 256.
        const u32 v = w >> 8;
        even = subtract_pair(select_bits(w, 0x007f007fu, 0x43004300u, kAllLanes), select_bits(w, 0x00800080u, 0x43004300u, kAllLanes));
        odd = subtract_pair(select_bits(v, 0x007f007fu, 0x43004300u, kAllLanes), select_bits(v, 0x00800080u, 0x43004300u, kAllLanes));
    } else {
        const u32 v = w << 8;
        even = multiply_pair(select_bits(v >> 4, 0x07f007f0u, v, 0x80008000u), 0x7b807b80u);
        odd = multiply_pair(select_bits(w >> 4, 0x07f007f0u, w, 0x80008000u), 0x7b807b80u);
    }
}

// s[m][i]: score of row 16m + g + 8 (i / 2) and key 8w + 2t + i % 2, not yet multiplied by a.scale.
template <int kFormat, int kD, int kM>
__device__ __forceinline__ void multiply_keys(const u8* keys, const uint4* queries, float (&s)[kM][4]) {
    using Shape = PageShape<kFormat, kD>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const __half* scales = reinterpret_cast<const __half*>(keys + 64 * Shape::kRow);
#pragma unroll
    for (int m = 0; m < kM; m++) {
        for (int i = 0; i < 4; i++) s[m][i] = 0.0f;
    }
#pragma unroll(kM == 1 ? 4 : 1)
    for (int group = 0; group < kD / 64; group++) {
        u32 b[4][2];
#pragma unroll
        for (int h = 0; h < kv_bytes(kFormat); h++) {
            const int chunk = kv_bytes(kFormat) * 4 * group + 4 * h + t;
            const uint4 v = *reinterpret_cast<const uint4*>(keys + Shape::offset(8 * warp + g, chunk));
            if constexpr (kFormat == kKvBf16) {
                b[2 * h][0] = v.x, b[2 * h][1] = v.y, b[2 * h + 1][0] = v.z, b[2 * h + 1][1] = v.w;
            } else {
                decode_keys<kFormat>(v.x, b[0][0], b[0][1]);
                decode_keys<kFormat>(v.y, b[1][0], b[1][1]);
                decode_keys<kFormat>(v.z, b[2][0], b[2][1]);
                decode_keys<kFormat>(v.w, b[3][0], b[3][1]);
            }
        }
        float scale[2];
        if constexpr (kFormat == kKvI8) {
#pragma unroll
            for (int i = 0; i < 2; i++) scale[i] = __half2float(scales[(8 * warp + 2 * t + i) * Shape::kGroups + group]);
        }
#pragma unroll
        for (int m = 0; m < kM; m++) {
            float part[4] = {};
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const uint4 v = queries[(m * (kD / 16) + 4 * group + q) * 32 + lane];
                const u32 a[4] = {v.x, v.y, v.z, v.w};
                mma_bf16(kFormat == kKvI8 ? part : s[m], a, b[q][0], b[q][1]);
            }
            if constexpr (kFormat == kKvI8) {
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][i] = fmaf(part[i], scale[i % 2], s[m][i]);
            }
        }
    }
    if constexpr (kFormat == kKvFp8) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float scale = __half2float(scales[8 * warp + 2 * t + e]);
            for (int m = 0; m < kM; m++) s[m][e] *= scale, s[m][e + 2] *= scale;
        }
    }
}

// Largest of a row's scores among the lanes that share the row, and their sum.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Values that only some rows see must not reach the others through 0 · NaN: a key with such a value is marked, so that its
// weight becomes NaN where it is seen, and its values become numbers. Keys from `begin` to `end` are seen by some rows.
template <int kFormat, int kD>
__device__ __forceinline__ void isolate_values(u8* values, int first, int last, int begin, int end, u32* marked) {
    using Shape = PageShape<kFormat, kD>;
    if constexpr (kFormat == kKvBf16) {
        for (int i = begin * Shape::kChunks + threadIdx.x; i < end * Shape::kChunks; i += kTileThreads) {
            const int row = i / Shape::kChunks;
            uint4* at = reinterpret_cast<uint4*>(values + Shape::offset(row, i % Shape::kChunks));
            const u32 w[4] = {at->x, at->y, at->z, at->w};
            bool broken = false;
            for (int j = 0; j < 4; j++) broken |= (w[j] & 0x7f80u) == 0x7f80u || (w[j] & 0x7f800000u) == 0x7f800000u;
            if (broken) {
                *at = {0, 0, 0, 0};
                atomicOr(&marked[row / 32], 1u << row % 32);
            }
        }
    } else if constexpr (kFormat == kKvI8) {
        u16* scales = reinterpret_cast<u16*>(values + 64 * Shape::kRow);
        for (int i = threadIdx.x; i < 64 * Shape::kGroups; i += kTileThreads) {
            const int row = i / Shape::kGroups;
            const bool broken = (scales[i] & 0x7c00) == 0x7c00;
            if (row < first || row >= last) {
                scales[i] = 0;
            } else if (broken && row >= begin && row < end) {
                scales[i] = 0;
                atomicOr(&marked[row / 32], 1u << row % 32);
            }
        }
    }
}

// Values of keys `row`, `row` + 1, + 8 and + 9 for the lane's columns, ready for decoding.
template <int kFormat, int kD>
struct ValueRows {
    using Shape = PageShape<kFormat, kD>;
    static constexpr int kColumns = kD / (8 * kTileWarps);
    static constexpr int kWords = (kColumns * kv_bytes(kFormat) + 3) / 4;
    u32 w[4][kWords];
    float scale[4], bias[4];

    __device__ __forceinline__ void load(const u8* values, int row) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
        const int byte = (kD / kTileWarps * warp + kColumns * g) * kv_bytes(kFormat);
        const __half* scales = reinterpret_cast<const __half*>(values + 64 * Shape::kRow);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int key = row + r % 2 + r / 2 * 8;
            const u8* at = values + Shape::offset(key, byte / 16) + byte % 16;
            if constexpr (kColumns * kv_bytes(kFormat) == 16) {
                const uint4 v = *reinterpret_cast<const uint4*>(at);
                w[r][0] = v.x, w[r][1] = v.y, w[r][2] = v.z, w[r][3] = v.w;
            } else if constexpr (kColumns * kv_bytes(kFormat) == 8) {
                const uint2 v = *reinterpret_cast<const uint2*>(at);
                w[r][0] = v.x, w[r][1] = v.y;
            } else if constexpr (kColumns * kv_bytes(kFormat) == 4) {
                w[r][0] = *reinterpret_cast<const u32*>(at);
            } else {
                w[r][0] = *reinterpret_cast<const u16*>(at);
            }
            if constexpr (kFormat == kKvI8) {
                for (int i = 0; i < kWords; i++) w[r][i] ^= 0x80808080u;
                const float s = __half2float(scales[key * Shape::kGroups + kD / kTileWarps * warp / kScaleGroup]);
                scale[r] = s * 256.0f, bias[r] = s * -32896.0f;
            }
        }
    }

    // Column `column` of rows 2r and 2r + 1 as a bf16 pair.
    __device__ __forceinline__ u32 pair(int column, int r) const {
        if constexpr (kFormat == kKvBf16) {
            return choose_bytes(w[2 * r][column / 2], w[2 * r + 1][column / 2], column % 2 == 0 ? 0x5410 : 0x7632);
        } else if constexpr (kFormat == kKvI8) {
            float v[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // 128 + (code + 128) / 256; times 256 s, less 32896 s, it is code · s, exactly before it is rounded to bf16.
                const u32 bits = choose_bytes(w[2 * r + i][column / 4], 0x43000000u, 0x7404u | column % 4 << 4);
                v[i] = fmaf(__uint_as_float(bits), scale[2 * r + i], bias[2 * r + i]);
            }
            return pack_bf16(v[0], v[1]);
        } else {
            const u32 j = column % 4;
            const u32 codes = choose_bytes(w[2 * r][column / 4], w[2 * r + 1][column / 4], (4 + j) << 12 | j << 4);
            return multiply_pair(select_bits(codes >> 4, 0x07f007f0u, codes, 0x80008000u), 0x7b807b80u);
        }
    }
};

// Byte of a chunk of weights: rows of 64 bf16.
__device__ __forceinline__ int weight_offset(int row, int chunk) { return row * 128 + (chunk ^ (row & 7)) * 16; }

// o += weights · values. o[m][j][i]: row 16m + g + 8 (i / 2), column D/8 · w + C (2t + i % 2) + j.
template <int kFormat, int kD, int kM>
__device__ __forceinline__ void multiply_values(const u8* values, const u8* weights, float (&o)[kM][kD / (8 * kTileWarps)][4]) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const u32 base = shared_address(weights);
#pragma unroll(kM == 1 ? 2 : 1)
    for (int step = 0; step < 4; step++) {
        ValueRows<kFormat, kD> v;
        v.load(values, 16 * step + 2 * t);
        u32 a[kM][4];
#pragma unroll
        for (int m = 0; m < kM; m++) {
            load_matrix_x4(a[m], base + weight_offset(16 * m + lane % 16, 2 * step + lane / 16));
        }
#pragma unroll
        for (int j = 0; j < kD / (8 * kTileWarps); j++) {
            const u32 b0 = v.pair(j, 0), b1 = v.pair(j, 1);
#pragma unroll
            for (int m = 0; m < kM; m++) mma_bf16(o[m][j], a[m], b0, b1);
        }
    }
}

// Shared memory of a block besides the pages.
template <int kD, int kM>
struct alignas(16) Side {
    uint4 queries[kM * (kD / 16) * 32];
    u8 weights[kM * 16 * 128];
    float most[kTileWarps][kM * 16];
    float sum[kTileWarps][kM * 16];
    float kept[kM * 16], total[kM * 16];  // Prefill
    int first[kMaxSegments + 1];
    u32 marked[2];
};

// The rows of a tile; a lane holds 8i + g for i < 2 kM.
template <int kM>
struct TileRows {
    int start, group;
    int first, pairs;  // first pair of the tile, pairs of the segment
    int least, most;   // positions of the tile

    __device__ __forceinline__ void set(const Attend& a, const Segment& s, int tile) {
        start = s.start, group = a.group, first = tile * kM * 16, pairs = s.len * a.group;
        least = start + first / group;
        most = start + min(first + kM * 16 - 1, pairs - 1) / group;
    }

    // Position of the lane's row i, or -1.
    __device__ __forceinline__ int position(int i) const {
        const int pair = first + 8 * i + threadIdx.x % 32 / 4;
        return pair < pairs ? start + pair / group : -1;
    }
};

// Whether some row of the tile does not see all keys of a page.
template <int kM>
__device__ __forceinline__ bool is_edge(const Attend& a, const TileRows<kM>& rows, int page) {
    return page * kPageTokens + kPageTokens - 1 > rows.least || page * kPageTokens < a.first_key;
}

// Scales and masks the scores, and leaves the largest of each row in shared memory. A barrier must follow.
template <int kD, int kM>
__device__ __forceinline__ void find_most(const Attend& a, Side<kD, kM>& side, const TileRows<kM>& rows, int page, float (&s)[kM][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, from = page * kPageTokens;
    const bool edge = is_edge(a, rows, page);
#pragma unroll
    for (int i = 0; i < 2 * kM; i++) {
        const int m = i / 2, h = i % 2;
        float most = -infinity();
        const int last = edge ? rows.position(i) : 0;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float& x = s[m][2 * h + j];
            x *= a.scale;
            if (edge) {
                const int key = from + 8 * warp + 2 * t + j;
                if (key > last || key < a.first_key) x = -infinity();
            }
            most = fmaxf(most, x);
        }
        most = quad_max(most);
        if (t == 0) side.most[warp][16 * m + 8 * h + g] = most;
    }
    if (threadIdx.x < 2) side.marked[threadIdx.x] = 0;
}

// Turns scores into weights in shared memory. With kRunning `run` goes on, and `kept` is the factor for what was summed
// before; without, `run` becomes that of this page alone. At an edge it contains a barrier; another one must follow.
template <int kFormat, int kD, int kM, bool kRunning>
__device__ __forceinline__ void make_weights(const Attend& a, Side<kD, kM>& side, u8* values, const TileRows<kM>& rows, int page,
                                             const float (&s)[kM][4], Partial (&run)[kM][2], float (&kept)[kM][2]) {
    using Shape = PageShape<kFormat, kD>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, from = page * kPageTokens;
    const bool edge = is_edge(a, rows, page);
    if (edge && kFormat != kKvFp8) {
        const int begin = max(rows.least + 1 - from, 0), end = min(rows.most + 1 - from, kPageTokens);
        isolate_values<kFormat, kD>(values, a.first_key - from, end, begin, end, side.marked);
        __syncthreads();
    }
    const __half* scales = reinterpret_cast<const __half*>(values + 64 * Shape::kRow);
#pragma unroll
    for (int i = 0; i < 2 * kM; i++) {
        const int m = i / 2, h = i % 2, row = 16 * m + 8 * h + g;
        const int last = edge ? rows.position(i) : 0;
        float next = kRunning ? run[m][h].most : -infinity();
#pragma unroll
        for (int w = 0; w < kTileWarps; w++) next = fmaxf(next, side.most[w][row]);
        const float base = next == -infinity() ? 0.0f : next;
        kept[m][h] = kRunning ? exp2_approximate(run[m][h].most - base) : 0.0f;
        run[m][h].most = next;
        float sum = 0.0f, p[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = 8 * warp + 2 * t + e;
            p[e] = exp2_approximate(s[m][2 * h + e] - base);
            const bool seen = !edge || (from + key <= last && from + key >= a.first_key);
            if (kFormat != kKvFp8 && edge && seen && (side.marked[key / 32] >> key % 32 & 1)) p[e] = not_a_number();
            sum += p[e];
            if constexpr (kFormat == kKvFp8) p[e] = seen ? p[e] * __half2float(scales[key]) : 0.0f;
        }
        *reinterpret_cast<u32*>(side.weights + weight_offset(row, warp) + 4 * t) = pack_bf16(p[0], p[1]);
        sum = quad_sum(sum);
        if (t == 0) side.sum[warp][row] = sum;
    }
}

// Sum of weights of a page's keys for one row: warps in ascending order.
template <int kD, int kM>
__device__ __forceinline__ float page_sum(const Side<kD, kM>& side, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kTileWarps; w++) sum += side.sum[w][row];
    return sum;
}

// Waits until at most `stages` · 2 − 2 (or − 1) groups of copies are pending.
__device__ __forceinline__ void wait_even(int stages) {
    if (stages == 1) {
        copy_wait<0>();
    } else if (stages == 2) {
        copy_wait<2>();
    } else {
        copy_wait<4>();
    }
}
__device__ __forceinline__ void wait_odd(int stages) {
    if (stages == 1) {
        copy_wait<1>();
    } else if (stages == 2) {
        copy_wait<3>();
    } else {
        copy_wait<5>();
    }
}

}  // namespace
