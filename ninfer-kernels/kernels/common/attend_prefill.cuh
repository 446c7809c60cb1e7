// Attention of the Prefill profile: one tile of 64 (or, where memory is short, 32) pairs and one KV head a block; see common/attend.cuh.
//
// Grid (tiles of the call at most, Hkv) of 256 threads, longest tiles first; shared memory as in common/attend_step.cuh.
#pragma once
#include "common/attend_tile.cuh"

namespace {

template <int kFormat, int kD, int kM>
__device__ __forceinline__ void attend_prefill(const Attend& a) {
    using Shape = PageShape<kFormat, kD>;
    constexpr int kC = kD / (8 * kTileWarps);
    extern __shared__ __align__(128) u8 shared[];
    Side<kD, kM>& side = *reinterpret_cast<Side<kD, kM>*>(shared);
    u8* stage = shared + sizeof(Side<kD, kM>);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, stages = a.stages, head = blockIdx.y;

    int tile = gridDim.x - 1 - blockIdx.x, index = 0;
    Work work;
    for (; index < a.batch.segments; index++) {
        work = segment_work(a, index);
        if (tile < work.tiles) break;
        tile -= work.tiles;
    }
    if (index >= a.batch.segments) return;
    const Segment& segment = work.segment;
    TileRows<kM> rows;
    rows.set(a, segment, tile);
    const int begin = work.first_page, end = min(rows.most / kPageTokens + 1, work.first_page + work.pages);

    if (threadIdx.x < 16 * kM) side.total[threadIdx.x] = 0.0f;
    load_queries<kFormat, kD, kM>(side.queries, a, segment, head, tile);
    // Copies run `stages` pages ahead: keys and values in turn, each a group. A page's number is read one page earlier.
    int entry = a.kv.entry(segment.slot, begin), copied = -1;
    auto place = [&](int number, int page) -> Place {
        const int from = page * kPageTokens;
        return {number < 0 ? -1 : a.kv.row(number, head), a.first_key - from, number < 0 ? 0 : rows.most + 1 - from};
    };
    auto slot = [&](int page) { return stage + (page - begin) % stages * Shape::kBytes; };

    Partial run[kM][2];
    float o[kM][kC][4] = {};
#pragma unroll 1
    for (int page = begin - stages; page < end; page++) {
        const int ahead = page + stages;
        float s[kM][4];
        u8* keys = slot(max(page, begin));
        if (page >= begin) {
            wait_even(stages);
            __syncthreads();
        }
        if (ahead > begin) {
            if (ahead - 1 < end) {
                load_page<kFormat, kD>(slot(ahead - 1) + Shape::kHalf, a.kv.values, a.kv.value_scales, place(copied, ahead - 1));
            }
            copy_commit();
        }
        if (page >= begin) {
            multiply_keys<kFormat, kD, kM>(keys, side.queries, s);
            find_most(a, side, rows, page, s);
            if (kFormat == kKvFp8 || is_edge(a, rows, page)) wait_even(stages);
            __syncthreads();
        }
        if (ahead < end) {
            if (entry < 0 && threadIdx.x == 0) a.kv.report_missing(a.report, ahead);
            load_page<kFormat, kD>(slot(ahead), a.kv.keys, a.kv.key_scales, place(entry, ahead));
            copied = entry;
            if (ahead + 1 < end) entry = a.kv.entry(segment.slot, ahead + 1);
        }
        copy_commit();
        if (page < begin) continue;

        float kept[kM][2];
        make_weights<kFormat, kD, kM, true>(a, side, keys + Shape::kHalf, rows, page, s, run, kept);
#pragma unroll
        for (int i = 0; i < 2 * kM; i++) {
            if (threadIdx.x < 32 && t == 0) side.kept[8 * i + g] = kept[i / 2][i % 2];
        }
        wait_odd(stages);
        __syncthreads();
        bool changed = false;
#pragma unroll
        for (int i = 0; i < 2 * kM; i++) {
            const int m = i / 2, h = i % 2;
            changed |= kept[m][h] != 1.0f;
        }
        if (const int row = threadIdx.x; row < 16 * kM) side.total[row] = fmaf(side.total[row], side.kept[row], page_sum(side, row));
        if (__any_sync(kAllLanes, changed)) {
#pragma unroll
            for (int m = 0; m < kM; m++) {
                for (int j = 0; j < 4 * kC; j++) o[m][j / 4][j % 4] *= kept[m][j % 4 / 2];
            }
        }
        multiply_values<kFormat, kD, kM>(keys + Shape::kHalf, side.weights, o);
    }
    // Rows leave in 16s through shared memory, so that neighbouring threads write neighbouring columns.
    copy_wait<0>();
    float* block = reinterpret_cast<float*>(stage);
#pragma unroll
    for (int m = 0; m < kM; m++) {
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float inverse = reciprocal(side.total[16 * m + 8 * h + g]);
#pragma unroll
            for (int c = 0; c < 2 * kC; c += 2) {
                float2* to = reinterpret_cast<float2*>(block + (g + 8 * h) * kD + kD / kTileWarps * warp + 2 * kC * t + c);
                *to = {o[m][c % kC][2 * h + c / kC] * inverse, o[m][(c + 1) % kC][2 * h + (c + 1) / kC] * inverse};
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < 16 * kD / 2; i += kTileThreads) {
            const int pair = rows.first + 16 * m + i / (kD / 2), c = i % (kD / 2) * 2;
            if (pair >= rows.pairs) break;
            const int row = segment.row + pair / a.group, of = head * a.group + pair % a.group;
            const u32 gate = *reinterpret_cast<const u32*>(a.query_gate.row(row) + static_cast<i64>(of) * 2 * kD + kD + c);
            const float2 y = *reinterpret_cast<const float2*>(block + 2 * i);
            *reinterpret_cast<u32*>(a.output.row(row) + static_cast<i64>(of) * kD + c) =
                pack_bf16(y.x * sigmoid(low_float(gate)), y.y * sigmoid(high_float(gate)));
        }
    }
}

}  // namespace

#define ATTEND_PREFILL(name, format, d, m) \
    extern "C" __global__ void __launch_bounds__(256, 1) name(const __grid_constant__ Attend a) { attend_prefill<format, d, m>(a); }
