// Attention: arguments, the dealing-out of pages to blocks, and the merging of partial results.
//
// Rows of a tile are pairs (token, query head of one KV head), numbered token · group + head, so that keys and values are
// read once for all of them. A block deals with pages of 64 keys in ascending order.
//
// Step: every page gives a partial result of its own (largest score, sum of weights, weighted values); those of a leaf
// (256 keys by absolute position) are merged in ascending order, then the leaves by attend_combine. All pages of the call
// form one list (segment, KV head, tile, page), of which each block takes an equal share. A leaf that lies in one share is
// merged in registers; pages of a leaf that is cut go to the workspace and are merged by attend_combine with the same
// operations. So no bit depends on the shares, and these follow the lengths, which are device data.
//
// Prefill: one block for each tile and KV head, pages in ascending order with running maximum.
//
// Scores are kept times log2(e), so that weights are powers of two.
#pragma once
#include "common/kv.cuh"
#include "ptx/math.cuh"

constexpr int kLeafPages = 4;
// Pages of cut leaves in a share: up to three at its beginning and three at its end.
constexpr int kSplitPages = 6;
constexpr int kMaxSegments = 128;

// `AttendArg` of src/cuda/attention.rs.
struct Attend {
    Batch batch;
    Kv kv;
    Matrix<const bf16> query;
    Matrix<const bf16> query_gate;
    Matrix<bf16> output;
    float2* leaf_sums;   // [T · Hq][leaves]: largest score, sum of weights
    float* leaf_output;  // [T · Hq][leaves][D]
    float2* page_sums;   // [blocks][kSplitPages][tile rows]
    float* page_output;  // [blocks][kSplitPages][tile rows][D]
    Report* report;
    int heads;     // Hq
    int group;     // Hq / Hkv
    int head_dim;  // D
    int first_key;
    int leaves;     // of the longest sequence
    int blocks;     // shares
    int tile_rows;  // pairs of a tile
    float scale;    // log2(e) / √D
    int stages;     // pages in shared memory
    int splits;     // blocks that share the leaves of a tile of a prompt
};

namespace {

// What one segment needs.
struct Work {
    Segment segment;
    int first_page;
    int pages;  // from first_page on
    int tiles;  // for each KV head
};

__device__ __forceinline__ Work segment_work(const Attend& a, int i) {
    Work w;
    w.segment = checked_segment(a.batch, i, a.report);
    w.first_page = a.first_key / kPageTokens;
    w.tiles = divide_up(w.segment.len * a.group, a.tile_rows);
    const int end = w.segment.start + w.segment.len;
    int pages = w.segment.len > 0 ? (end - 1) / kPageTokens + 1 : 0;
    if (pages > a.kv.per_sequence) {
        a.kv.report_missing(a.report, pages - 1);
        pages = a.kv.per_sequence;
    }
    w.pages = max(pages - w.first_page, 0);
    return w;
}

// Item numbers of the first page of each segment, and behind the last; returns their number. Called by all threads of a
// block of at least 128.
__device__ __forceinline__ int list_work(const Attend& a, int* first) {
    const int i = threadIdx.x, lane = i % 32;
    int count = 0;
    if (i < min(a.batch.segments, kMaxSegments)) {
        const Work w = segment_work(a, i);
        count = a.kv.heads * w.tiles * w.pages;
    }
    int sum = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int below = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane >= offset) sum += below;
    }
    if (i < kMaxSegments) first[i + 1] = sum;
    __syncthreads();
    int before = 0;
    for (int warp = 0; warp < i / 32 && warp < kMaxSegments / 32; warp++) before += first[32 * warp + 32];
    __syncthreads();
    if (i < kMaxSegments) first[i + 1] = before + sum;
    if (i == 0) first[0] = 0;
    __syncthreads();
    return first[kMaxSegments];
}

// The list of all items in shares of equal length; the first `longer` ones have one item more.
struct Shares {
    int length, longer;

    __device__ __forceinline__ Shares(int total, int blocks) : length(total / blocks), longer(total % blocks) {}

    // First item of a block.
    __device__ __forceinline__ int begin(int block) const { return block * length + min(block, longer); }

    // The block of an item.
    __device__ __forceinline__ int owner(int item) const {
        const int border = longer * (length + 1);
        return item < border ? item / (length + 1) : longer + (item - border) / length;
    }
};

// Place of a page of a cut leaf among those of its block, whose share begins at `start`.
__device__ __forceinline__ int split_place(int item, int leaf, int start) {
    return leaf < start ? item - start : kLeafPages - 1 + item - leaf;
}

struct Weights {
    float kept, added;
};

// Largest score and sum of weights of some keys.
struct Partial {
    float most = -infinity();
    float sum = 0.0f;

    // Takes other keys in; says by what the values of both are to be multiplied.
    __device__ __forceinline__ Weights add(float other_most, float other_sum) {
        const float next = fmaxf(most, other_most), base = next == -infinity() ? 0.0f : next;
        const Weights by = {exp2_approximate(most - base), exp2_approximate(other_most - base)};
        sum = fmaf(other_sum, by.added, sum * by.kept);
        most = next;
        return by;
    }
};

// 1 / x; 0 where nothing was visible.
__device__ __forceinline__ float reciprocal(float x) { return x == 0.0f ? 0.0f : 1.0f / x; }

}  // namespace
