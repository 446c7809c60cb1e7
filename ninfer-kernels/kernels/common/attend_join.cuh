// The end of attention: partial results of leaves become rows; see common/attend.cuh and common/attend_prompt.cuh.
#pragma once
#include "common/attend_prompt.cuh"
#include "ptx/bulk.cuh"

// Step: merges the leaves of each row and head, divides, and applies the gate. Leaf i belongs to lane i % 32 of eight
// threads, which merges its leaves in ascending order, and first the pages of each; the lanes are weighed by the largest
// score of all and added in ascending order. Grid (T · Hq, D / 32) of 256 threads.
extern "C" __global__ void __launch_bounds__(256) attend_combine(const __grid_constant__ Attend a) {
    grid_launch_next();
    grid_wait();
    __shared__ int first[kMaxSegments + 1];
    __shared__ float outputs[32][32];
    __shared__ float2 lanes[32];
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
    const int c = blockIdx.y * 32 + threadIdx.x % 32;
    float gate = 0.0f;
    if (threadIdx.x < 32) gate = to_float(a.query_gate.row(row)[static_cast<i64>(head) * 2 * d + d + c]);
    Partial run;
    float o[4] = {};
#pragma unroll 2
    for (int leaf = begin / 32 * 32 + lane; leaf < end; leaf += 32) {
        if (leaf < begin) continue;
        // The leaf's own result, or those of its pages; all are read before the first is used.
        const int from = max(leaf * kLeafPages, w.first_page), to = min((leaf + 1) * kLeafPages, last_page);
        const bool whole = shares.owner(item + from) == shares.owner(item + to - 1);
        const int count = whole ? 1 : to - from;
        float2 sums[kLeafPages];
        float4 values[kLeafPages];
#pragma unroll
        for (int i = 0; i < kLeafPages; i++) {
            if (i >= count) continue;
            const int x = item + from + i, block = shares.owner(x), nth = split_place(x, item + from, shares.begin(block));
            const i64 at = whole ? slot + leaf : (static_cast<i64>(block) * kSplitPages + nth) * a.tile_rows + pair % a.tile_rows;
            sums[i] = (whole ? a.leaf_sums : a.page_sums)[at];
            values[i] = *reinterpret_cast<const float4*>((whole ? a.leaf_output : a.page_output) + at * d + column);
        }
        Partial p;
        float part[4] = {};
#pragma unroll
        for (int i = 0; i < kLeafPages; i++) {
            if (i >= count) continue;
            const float next[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
            const Weights by = p.add(sums[i].x, sums[i].y);
            for (int j = 0; j < 4; j++) part[j] = fmaf(next[j], by.added, part[j] * by.kept);
        }
        const Weights by = run.add(p.most, p.sum);
        for (int j = 0; j < 4; j++) o[j] = fmaf(part[j], by.added, o[j] * by.kept);
    }
    for (int i = 0; i < 4; i++) outputs[lane][threadIdx.x % 8 * 4 + i] = o[i];
    if (threadIdx.x % 8 == 0) lanes[lane] = {run.most, run.sum};
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const float2 own = lanes[threadIdx.x];
    float top = own.x;
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
    const float weight = exp2_approximate(own.x - (top == -infinity() ? 0.0f : top));
    float y = 0.0f, l = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const float by = __shfl_sync(kAllLanes, weight, i);
        y = fmaf(outputs[i][threadIdx.x], by, y);
        l = fmaf(__shfl_sync(kAllLanes, own.y, i), by, l);
    }
    out[c] = to_bf16(y * reciprocal(l) * sigmoid(gate));
}

// Prefill with more than one split: merges the leaves of each row and head in ascending order, divides, and applies the
// gate; nothing where a tile had one leaf. A warp a row and head; grid (T · Hq / 8) of 256 threads, D = 256.
extern "C" __global__ void __launch_bounds__(256) attend_join(const __grid_constant__ Attend a) {
    grid_launch_next();
    grid_wait();
    const int which = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = which / a.heads, head = which % a.heads;
    if (row >= a.batch.rows) return;
    const int index = find_segment(a.batch, row);
    if (index < 0) return;
    const Work w = segment_work(a, index);
    const Segment& s = w.segment;
    if (s.len == 0) return;
    const int first = ((row - s.row) * a.group + head % a.group) / a.tile_rows * a.tile_rows, pairs = s.len * a.group;
    const int last = s.start + min(first + a.tile_rows - 1, pairs - 1) / a.group;
    const int begin = w.first_page, end = min(last / kPageTokens + 1, begin + w.pages), first_leaf = begin / kPromptLeaf;
    const int leaves = end > begin ? (end - 1) / kPromptLeaf + 1 - first_leaf : 0;
    if (leaves <= 1) return;
    // Leaves behind the row's position add nothing.
    const int own = min(max((s.start + row - s.row) / kPageTokens / kPromptLeaf + 1 - first_leaf, 1), leaves);
    const i64 at = (static_cast<i64>(row) * a.heads + head) * a.leaves;
    const float4* values = reinterpret_cast<const float4*>(a.leaf_output + at * kPromptHead) + 2 * lane;
    const uint4 gate = reinterpret_cast<const uint4*>(a.query_gate.row(row) + (2 * head + 1) * kPromptHead)[lane];
    Partial total;
    total.most = a.leaf_sums[at].x, total.sum = a.leaf_sums[at].y;
    float4 x = values[0], y = values[1];
#pragma unroll 4
    for (int i = 1; i < own; i++) {
        const float2 sum = a.leaf_sums[at + i];
        const float4 u = values[i * (kPromptHead / 4)], v = values[i * (kPromptHead / 4) + 1];
        const Weights by = total.add(sum.x, sum.y);
        x = {fmaf(u.x, by.added, x.x * by.kept), fmaf(u.y, by.added, x.y * by.kept), fmaf(u.z, by.added, x.z * by.kept), fmaf(u.w, by.added, x.w * by.kept)};
        y = {fmaf(v.x, by.added, y.x * by.kept), fmaf(v.y, by.added, y.y * by.kept), fmaf(v.z, by.added, y.z * by.kept), fmaf(v.w, by.added, y.w * by.kept)};
    }
    const float inverse = reciprocal(total.sum);
    reinterpret_cast<uint4*>(a.output.row(row) + head * kPromptHead)[lane] = {
        pack_bf16(x.x * inverse * sigmoid(low_float(gate.x)), x.y * inverse * sigmoid(high_float(gate.x))),
        pack_bf16(x.z * inverse * sigmoid(low_float(gate.y)), x.w * inverse * sigmoid(high_float(gate.y))),
        pack_bf16(y.x * inverse * sigmoid(low_float(gate.z)), y.y * inverse * sigmoid(high_float(gate.z))),
        pack_bf16(y.z * inverse * sigmoid(low_float(gate.w)), y.w * inverse * sigmoid(high_float(gate.w)))};
}
