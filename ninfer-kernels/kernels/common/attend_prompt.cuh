// Attention of the Prefill profile where a block has much shared memory (sm_90 and newer, heads of 256 features).
//
// A warp owns 16 pairs (token, query head of one KV head) with their scores, weights and output in registers; the 4 to 8
// warps of a block share pages of 64 keys, decoded once in shared memory. Two pages lie there: while one is multiplied, the
// next one is decoded, by half of the warps before they multiply and by the others behind it. Codes are copied ahead by the
// thread that decodes them.
//
// Pages of bf16 are multiplied as bf16. Codes become f16, whose 11 bits hold code · scale and the weights eight times as
// exactly. So that its range is enough, keys, values and queries are kept as a 16th, weights times 2^15: f16 ends at a
// million then (a scale that leads beyond it counts as the largest that does not), and steps of 2^-20 are below what a
// scale, itself f16, tells apart.
//
// A leaf is 4,096 keys by absolute position. Inside, pages in ascending order with running maximum; a lane sums the weights
// of its own keys, and the lanes of a row are added (1, then 2 apart) at the end of the leaf. Leaves are merged in ascending
// order, through the workspace. With splits > 1, block z takes leaves z, z + splits, …, and attend_join merges them; else
// the block itself does. A row's bits depend neither on its tile nor on the splits.
//
// Grid (tiles of the call at most, Hkv, splits) of 32 · warps threads, longest tiles first.
#pragma once
#include "common/attend.cuh"
#include "common/fragment.cuh"
#include "ptx/bulk.cuh"
#include "ptx/half.cuh"
#include "ptx/half_pair.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/transpose.cuh"

constexpr int kPromptLeaf = 64;  // pages
constexpr int kPromptHead = 256;

namespace {

// Shared memory: two pages of keys and values in 16 bits, codes, scales of two pages, marks, queries of each warp.
template <int kFormat>
struct Prompt {
    static constexpr int kHalf = kPageTokens * kPromptHead * 2;  // keys or values
    static constexpr int kChunks = kPromptHead * kv_bytes(kFormat) / 16;
    static constexpr int kGroups = kv_groups(kFormat, kPromptHead);
    static constexpr int kCodes = kFormat == kKvBf16 ? 0 : 2 * kPageTokens * kPromptHead;
    static constexpr int kScales = 2 * kPageTokens * kGroups * 2;
    static constexpr int kScalesAt = 4 * kHalf + kCodes;
    static constexpr int kMarksAt = kScalesAt + 2 * kScales;
    static constexpr int kQueriesAt = kMarksAt + 128;
    // What scores are multiplied with besides the scale; what sums of weights are, for those of values to be the output;
    // log2 of the largest weight.
    static constexpr float kScores = kFormat == kKvBf16 ? 1.0f : 256.0f;
    static constexpr float kSums = kFormat == kKvBf16 ? 1.0f : 1.0f / 16.0f;
    static constexpr float kWeight = kFormat == kKvBf16 ? 0.0f : 15.0f;
};

// d += a · b of what the format's pages are multiplied as.
template <int kFormat>
__device__ __forceinline__ void mma_page(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (kFormat == kKvBf16) {
        mma_bf16(d, a, b0, b1);
    } else {
        mma_half(d, a, b0, b1);
    }
}

template <int kFormat>
__device__ __forceinline__ u32 pack_weights(float low, float high) {
    return kFormat == kKvBf16 ? pack_bf16(low, high) : round_half_pair(low, high);
}

// Byte of a chunk of 16 in rows of 256 elements.
__device__ __forceinline__ int tile_offset(int row, int chunk) { return row * 512 + ((chunk ^ (row & 7)) << 4); }

// One page of the block's sequence and head, and which of its keys any row sees.
struct PromptPage {
    i64 row;  // of its first key, or -1
    int begin, end;
    bool edge;  // some rows do not see all keys
};

// Begins to copy a page's codes, or its bf16 elements to their place.
template <int kFormat>
__device__ __forceinline__ void start_page(u8* codes, const Kv& kv, const PromptPage& p) {
    constexpr int kChunks = Prompt<kFormat>::kChunks;
    const int step = blockDim.x;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Matrix<u8>& m = half == 0 ? kv.keys : kv.values;
        const u32 to = shared_address(codes) + half * (kFormat == kKvBf16 ? Prompt<kFormat>::kHalf : Prompt<kFormat>::kCodes / 2);
#pragma unroll 2
        for (int i = threadIdx.x; i < kPageTokens * kChunks; i += step) {
            const int row = i / kChunks, chunk = i % kChunks;
            const bool seen = p.row >= 0 && row >= p.begin && row < p.end;
            copy_async(to + (kFormat == kKvBf16 ? tile_offset(row, chunk) : 16 * i), seen ? m.row(p.row + row) + 16 * chunk : m.data, seen);
        }
    }
}

// Begins to copy the scales of a page; `i` numbers the threads that share this.
template <int kFormat>
__device__ __forceinline__ void start_scales(u8* to, const Kv& kv, const PromptPage& p, int i) {
    constexpr int kHalf = Prompt<kFormat>::kScales / 2;
    if (i < 2 * kHalf / 16) {
        const int half = i / (kHalf / 16), at = i % (kHalf / 16);
        const Matrix<__half>& m = half == 0 ? kv.key_scales : kv.value_scales;
        const u8* from = reinterpret_cast<const u8*>(p.row >= 0 ? m.row(p.row) : m.data);
        copy_async(shared_address(to) + 16 * i, from + 16 * at, p.row >= 0);
    }
}

// What codes are multiplied with, as an f16 pair, from the bits of a scale.
template <int kFormat>
__device__ __forceinline__ u32 scale_pair(u32 bits) {
    // With 127 / 16 and 448 / 16, 8,248 and 2,338 stay below 65,504. Infinity and NaN remain.
    constexpr u32 kMost = kFormat == kKvI8 ? 0x7007 : 0x6891;
    const u32 size = bits & 0x7fff;
    if (size > kMost && size < 0x7c00) bits = (bits & 0x8000) | kMost;
    // Codes of E4M3 come as a 256th.
    const u32 pair = bits | bits << 16;
    return kFormat == kKvI8 ? pair : multiply_half_pair(pair, 0x4c004c00u);
}

// Two neighbouring codes of a word, multiplied by the scale, as an f16 pair.
template <int kFormat>
__device__ __forceinline__ u32 decode_pair(u32 word, int j, u32 scale) {
    if constexpr (kFormat == kKvI8) {
        // `word` holds code + 128: 1,024 + byte, a 16th of which less 72 is a 16th of the code.
        const u32 codes = choose_bytes(word, 0x64646464u, 0x4040u | 2 * j | (2 * j + 1) << 8);
        return multiply_half_pair(multiply_add_half_pair(codes, 0x2c002c00u, 0xd480d480u), scale);
    } else {
        // Exponent and mantissa at bits 13 .. 7: the code's value times 2^-8.
        const u32 codes = choose_bytes(word, 0, 0x0404u | (2 * j) << 4 | (2 * j + 1) << 12);
        return multiply_half_pair(select_bits(codes >> 1, 0x3f803f80u, codes, 0x80008000u), scale);
    }
}

// Makes elements of what this thread has copied. Values that only some rows see must not reach the others through
// 0 · NaN: at an edge a key with such a value is marked, so that its weight becomes NaN where it is seen, and its values 0.
template <int kFormat>
__device__ __forceinline__ void finish_page(u8* tile, const u8* codes, const u8* scales, u32* marks, const PromptPage& p) {
    constexpr int kChunks = Prompt<kFormat>::kChunks;
    const int step = blockDim.x;
    if constexpr (kFormat == kKvBf16) {
        if (!p.edge) return;
#pragma unroll 1
        for (int i = threadIdx.x; i < kPageTokens * kChunks; i += step) {
            const int row = i / kChunks;
            uint4* at = reinterpret_cast<uint4*>(tile + Prompt<kFormat>::kHalf + tile_offset(row, i % kChunks));
            const uint4 v = *at;
            const u32 w[4] = {v.x, v.y, v.z, v.w};
            bool broken = false;
            for (int j = 0; j < 4; j++) broken |= (w[j] & 0x7f80u) == 0x7f80u || (w[j] & 0x7f800000u) == 0x7f800000u;
            if (broken) {
                *at = {0, 0, 0, 0};
                atomicOr(&marks[row / 32], 1u << row % 32);
            }
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u16* of = reinterpret_cast<const u16*>(scales + half * Prompt<kFormat>::kScales / 2);
#pragma unroll 2
            for (int i = threadIdx.x; i < kPageTokens * kChunks; i += step) {
                const int row = i / kChunks, chunk = i % kChunks;
                u16 bits = of[row * Prompt<kFormat>::kGroups + (kFormat == kKvI8 ? chunk / 4 : 0)];
                if (row < p.begin || row >= p.end) bits = 0;
                if (half == 1 && p.edge && (bits & 0x7c00) == 0x7c00) {
                    bits = 0;
                    atomicOr(&marks[row / 32], 1u << row % 32);
                }
                const u32 scale = scale_pair<kFormat>(bits);
                const uint4 v = *reinterpret_cast<const uint4*>(codes + half * (Prompt<kFormat>::kCodes / 2) + 16 * i);
                const u32 flip = kFormat == kKvI8 ? 0x80808080u : 0;
                const u32 w[4] = {v.x ^ flip, v.y ^ flip, v.z ^ flip, v.w ^ flip};
                u32 pairs[8];
#pragma unroll
                for (int j = 0; j < 8; j++) pairs[j] = decode_pair<kFormat>(w[j / 2], j % 2, scale);
                // Four lanes write their first half first, four their second: so they never meet in a bank.
                const bool swap = chunk & 4;
                u8* to = tile + half * Prompt<kFormat>::kHalf;
#pragma unroll
                for (int turn = 0; turn < 2; turn++) {
                    const bool second = swap != (turn == 1);
                    *reinterpret_cast<uint4*>(to + tile_offset(row, 2 * chunk + second)) = {
                        second ? pairs[4] : pairs[0], second ? pairs[5] : pairs[1], second ? pairs[6] : pairs[2], second ? pairs[7] : pairs[3]};
                }
            }
        }
    }
}

// A warp's 16 rows; a lane holds rows g and g + 8.
template <int kFormat>
struct PromptRows {
    float most[2];  // not yet scaled
    float sum[2];   // of this lane's keys, times kSums
    float o[kPromptHead / 8][4];

    __device__ __forceinline__ void clear() {
        for (int h = 0; h < 2; h++) most[h] = -infinity(), sum[h] = 0.0f;
        for (int i = 0; i < kPromptHead / 2; i++) o[i / 4][i % 4] = 0.0f;
    }

    // Takes in one page. `queries`, `keys` and `values` are this lane's addresses; position[h] is that of its row.
    __device__ __forceinline__ void multiply(u32 queries, u32 keys, u32 values, float scale, bool edge, int from, int first_key,
                                             const int (&position)[2], const u32* marks) {
        const int t = threadIdx.x % 4;
        float s[8][4] = {};
#pragma unroll
        for (int k = 0; k < kPromptHead / 16; k++) {
            const u32 at = k % 4 << 5, group = k / 4 * 128;
            u32 a[4];
            load_matrix_x4(a, (queries ^ at) + group);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 b[4];
                load_matrix_x4(b, (keys ^ at) + group + n * 8192);
                mma_page<kFormat>(s[2 * n], a, b[0], b[1]);
                mma_page<kFormat>(s[2 * n + 1], a, b[2], b[3]);
            }
        }
        if (edge) {
#pragma unroll
            for (int i = 0; i < 32; i++) {
                const int key = from + i / 4 * 8 + 2 * t + i % 2;
                if (key > position[i % 4 / 2] || key < first_key) s[i / 4][i % 4] = -infinity();
            }
        }
        float kept[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float next = most[h];
#pragma unroll
            for (int n = 0; n < 8; n++) next = fmaxf(next, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            next = fmaxf(next, __shfl_xor_sync(kAllLanes, next, 1));
            next = fmaxf(next, __shfl_xor_sync(kAllLanes, next, 2));
            const float base = next == -infinity() ? 0.0f : next, less = Prompt<kFormat>::kWeight - base * scale;
            kept[h] = exp2_approximate((most[h] - base) * scale);
            most[h] = next;
            float all = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[n][2 * h + e];
                    x = exp2_approximate(fmaf(x, scale, less));
                    if (edge) {
                        const int key = 8 * n + 2 * t + e;
                        if (from + key <= position[h] && from + key >= first_key && (marks[key / 32] >> key % 32 & 1)) x = not_a_number();
                    }
                    all += x;
                }
            }
            sum[h] = fmaf(sum[h], kept[h], all * Prompt<kFormat>::kSums);
        }
        if (__any_sync(kAllLanes, kept[0] != 1.0f || kept[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < kPromptHead / 2; i++) o[i / 4][i % 4] *= kept[i % 4 / 2];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 a[4] = {pack_weights<kFormat>(s[2 * k][0], s[2 * k][1]), pack_weights<kFormat>(s[2 * k][2], s[2 * k][3]),
                              pack_weights<kFormat>(s[2 * k + 1][0], s[2 * k + 1][1]), pack_weights<kFormat>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
            for (int f = 0; f < kPromptHead / 16; f++) {
                u32 b[4];
                load_matrix_x4_transposed(b, (values ^ (f % 4 << 5)) + f / 4 * 128 + k * 8192);
                mma_page<kFormat>(o[2 * f], a, b[0], b[1]);
                mma_page<kFormat>(o[2 * f + 1], a, b[2], b[3]);
            }
        }
    }
};

template <int kFormat>
__device__ __forceinline__ void attend_prompt(const Attend& a) {
    using Shape = Prompt<kFormat>;
    extern __shared__ __align__(1024) u8 shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head = blockIdx.y, splits = a.splits;
    const bool early = warp >= static_cast<int>(blockDim.x) / 64;
    const int helper = threadIdx.x - blockDim.x / 64 * 32;  // number among the early threads
    grid_launch_next();
    grid_wait();
    int tile = gridDim.x - 1 - blockIdx.x, index = 0;
    Work work;
    for (; index < a.batch.segments; index++) {
        work = segment_work(a, index);
        if (tile < work.tiles) break;
        tile -= work.tiles;
    }
    if (index >= a.batch.segments) return;
    const Segment& segment = work.segment;
    const int first = tile * a.tile_rows, pairs = segment.len * a.group;
    const int least = segment.start + first / a.group, last = segment.start + min(first + a.tile_rows - 1, pairs - 1) / a.group;
    const int begin = work.first_page, end = min(last / kPageTokens + 1, work.first_page + work.pages);
    const int first_leaf = begin / kPromptLeaf, leaves = end > begin ? (end - 1) / kPromptLeaf + 1 - first_leaf : 0;
    // Where nothing is visible the first block of a tile writes zeros.
    int page = blockIdx.z == 0 ? begin : (first_leaf + static_cast<int>(blockIdx.z)) * kPromptLeaf;
    if (page >= end && blockIdx.z > 0) return;
    auto next_page = [&](int p) { return (p + 1) % kPromptLeaf == 0 ? p + 1 + (splits - 1) * kPromptLeaf : p + 1; };
    auto describe = [&](int p, int entry) -> PromptPage {
        const int from = p * kPageTokens;
        const bool edge = from + kPageTokens - 1 > least || from < a.first_key;
        return {entry < 0 ? -1 : a.kv.row(entry, head), a.first_key - from, entry < 0 ? 0 : last + 1 - from, edge};
    };
    auto find_entry = [&](int p) {
        if (p >= end) return -1;
        const int entry = a.kv.entry(segment.slot, p);
        if (entry < 0 && threadIdx.x == 0) a.kv.report_missing(a.report, p);
        return entry;
    };
    u8* codes = shared + 4 * Shape::kHalf;
    u8* scales = shared + Shape::kScalesAt;
    u32* marks = reinterpret_cast<u32*>(shared + Shape::kMarksAt);  // [3][2]
    u8* own = shared + Shape::kQueriesAt + warp * 8192;

    const float scale = a.scale * Shape::kScores;
    PromptRows<kFormat> rows;
    rows.clear();
    int position[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int pair = first + 16 * warp + 8 * h + g;
        position[h] = pair < pairs ? segment.start + pair / a.group : -1;
    }
    // The workspace's place of a lane's row.
    auto place = [&](int h) {
        const int pair = first + 16 * warp + 8 * h + g;
        return ((segment.row + pair / a.group) * static_cast<i64>(a.heads) + head * a.group + pair % a.group) * a.leaves;
    };

    // Turn -1 only prepares the first page.
    int ahead = page, entry = -1;
    page = -1;
    PromptPage now = {}, next = describe(ahead, find_entry(ahead));
    if (threadIdx.x < 6) marks[threadIdx.x] = 0;
#pragma unroll 4
    for (int r = 0; r < 16; r++) {
        const int pair = first + 16 * warp + r;
        const bool some = pair < pairs;
        const bf16* from = a.query.data;
        if (some) from = a.query.row(segment.row + pair / a.group) + (head * a.group + pair % a.group) * kPromptHead + 8 * lane;
        copy_async(shared_address(own) + tile_offset(r, lane), from, some);
    }
    if (ahead < end) {
        if (kFormat != kKvBf16) start_page<kFormat>(codes, a.kv, next);
        if constexpr (Shape::kGroups > 0) start_scales<kFormat>(scales, a.kv, next, threadIdx.x);
        entry = find_entry(next_page(ahead));
    }
    copy_commit();
    copy_wait<0>();
    if constexpr (kFormat != kKvBf16) {
        // A lane's own chunks.
#pragma unroll 4
        for (int r = 0; r < 16; r++) {
            uint4* at = reinterpret_cast<uint4*>(own + tile_offset(r, lane));
            const uint4 v = *at;
            const u32 w[4] = {v.x, v.y, v.z, v.w};
            u32 half[4];
            for (int i = 0; i < 4; i++) half[i] = round_half_pair(low_float(w[i]) * 0.0625f, high_float(w[i]) * 0.0625f);
            *at = {half[0], half[1], half[2], half[3]};
        }
    }
    __syncthreads();

    const u32 queries = shared_address(own) + (lane % 16) * 512 + ((lane / 16 ^ (lane & 7)) << 4);
    const u32 keys = shared_address(shared) + (lane / 16 * 8 + lane % 8) * 512 + ((lane / 8 % 2 ^ (lane & 7)) << 4);
    const u32 values = shared_address(shared) + Shape::kHalf + (lane % 16) * 512 + ((lane / 16 ^ (lane & 7)) << 4);
#pragma unroll 1
    for (int turn = -1; page < end; turn++) {
        const int buffer = turn & 1, later = next_page(ahead);
        u8* other = shared + (1 - buffer) * 2 * Shape::kHalf;
        u32* next_marks = marks + (turn + 1) % 3 * 2;
        if (threadIdx.x < 2) marks[(turn + 2) % 3 * 2 + threadIdx.x] = 0;
        if constexpr (kFormat == kKvBf16) {
            if (ahead < end) start_page<kFormat>(other, a.kv, next);
            copy_commit();
        }
        const int after = find_entry(next_page(later));
#pragma unroll 1
        for (int phase = 0; phase < 2; phase++) {
            // The next page is decoded, and copies of the one behind it.
            if (phase == (early && kFormat != kKvBf16 ? 0 : 1)) {
                copy_wait<0>();
                __syncwarp();
                if (ahead < end) finish_page<kFormat>(other, codes, scales + (1 - buffer) * Shape::kScales, next_marks, next);
                if constexpr (kFormat != kKvBf16) {
                    __syncwarp();
                    if (later < end) {
                        const PromptPage p = describe(later, entry);
                        start_page<kFormat>(codes, a.kv, p);
                        if (early) start_scales<kFormat>(scales + buffer * Shape::kScales, a.kv, p, helper);
                    }
                    copy_commit();
                }
            }
            if (phase == 0 && turn >= 0) {
                rows.multiply(queries, keys + buffer * 2 * Shape::kHalf, values + buffer * 2 * Shape::kHalf, scale, now.edge,
                              page * kPageTokens, a.first_key, position, marks + turn % 3 * 2);
            }
        }
        if (early) copy_wait<0>();
        // The end of a leaf, unless it is the only one.
        const int leaf = page / kPromptLeaf - first_leaf;
        if (turn >= 0 && leaves > 1 && ((page + 1) % kPromptLeaf == 0 || page + 1 >= end)) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = rows.sum[h];
                sum += __shfl_xor_sync(kAllLanes, sum, 1);
                sum += __shfl_xor_sync(kAllLanes, sum, 2);
                Partial own_sum;
                own_sum.most = rows.most[h] * scale, own_sum.sum = sum;
                const bool some = position[h] >= 0;
                const i64 at = some ? place(h) + (splits > 1 ? leaf : 0) : 0;
                float* to = a.leaf_output + at * kPromptHead + 2 * t;
                if (splits > 1 || leaf == 0) {
                    if (some) {
#pragma unroll
                        for (int j = 0; j < kPromptHead / 8; j++) *reinterpret_cast<float2*>(to + 8 * j) = {rows.o[j][2 * h], rows.o[j][2 * h + 1]};
                        if (t == 0) a.leaf_sums[at] = {own_sum.most, own_sum.sum};
                    }
                } else {
                    const float2 before = a.leaf_sums[at];
                    Partial total;
                    total.most = before.x, total.sum = before.y;
                    const Weights by = total.add(own_sum.most, own_sum.sum);
                    __syncwarp();
                    if (some && t == 0) a.leaf_sums[at] = {total.most, total.sum};
                    const bool done = leaf + 1 == leaves;
#pragma unroll
                    for (int j = 0; j < kPromptHead / 8; j++) {
                        float2 o = {0.0f, 0.0f};
                        if (some) o = *reinterpret_cast<const float2*>(to + 8 * j);
                        o = {fmaf(rows.o[j][2 * h], by.added, o.x * by.kept), fmaf(rows.o[j][2 * h + 1], by.added, o.y * by.kept)};
                        rows.o[j][2 * h] = o.x, rows.o[j][2 * h + 1] = o.y;
                        if (some && !done) *reinterpret_cast<float2*>(to + 8 * j) = o;
                    }
                    // Only the first lane's part counts when the row is finished.
                    if (done) rows.sum[h] = t == 0 ? total.sum : 0.0f;
                }
            }
            if (leaf + 1 < leaves) rows.clear();
        }
        page = ahead, ahead = later, now = next, next = describe(later, entry), entry = after;
        __syncthreads();
    }
    if (splits > 1 && leaves > 1) return;
    // Rows leave through the place of their queries, half of the columns at a time.
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = rows.sum[h];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        inverse[h] = reciprocal(sum);
    }
#pragma unroll
    for (int part = 0; part < 2; part++) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int h = i % 2, j = i / 2, row = 8 * h + g;
            float2* to = reinterpret_cast<float2*>(own + tile_offset(row, 2 * j + t / 2) + t % 2 * 8);
            *to = {rows.o[16 * part + j][2 * h] * inverse[h], rows.o[16 * part + j][2 * h + 1] * inverse[h]};
        }
        __syncwarp();
#pragma unroll 4
        for (int i = lane; i < 256; i += 32) {
            const int row = i / 16, chunk = i % 16, pair = first + 16 * warp + row, c = 128 * part + 8 * chunk;
            if (pair >= pairs) continue;
            const int token = segment.row + pair / a.group, of = head * a.group + pair % a.group;
            const uint4 gate = *reinterpret_cast<const uint4*>(a.query_gate.row(token) + (2 * of + 1) * kPromptHead + c);
            const float4 x = *reinterpret_cast<const float4*>(own + tile_offset(row, 2 * chunk));
            const float4 y = *reinterpret_cast<const float4*>(own + tile_offset(row, 2 * chunk + 1));
            *reinterpret_cast<uint4*>(a.output.row(token) + of * kPromptHead + c) = {
                pack_bf16(x.x * sigmoid(low_float(gate.x)), x.y * sigmoid(high_float(gate.x))),
                pack_bf16(x.z * sigmoid(low_float(gate.y)), x.w * sigmoid(high_float(gate.y))),
                pack_bf16(y.x * sigmoid(low_float(gate.z)), y.y * sigmoid(high_float(gate.z))),
                pack_bf16(y.z * sigmoid(low_float(gate.w)), y.w * sigmoid(high_float(gate.w)))};
        }
    }
}

}  // namespace

#define ATTEND_PROMPT(name, format) \
    extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ Attend a) { attend_prompt<format>(a); }
