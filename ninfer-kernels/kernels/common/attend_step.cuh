// Attention of the Step profile: each block deals with its share of the call's pages; see common/attend.cuh.
//
// Grid a.blocks of 256 threads; shared memory sizeof(Side) + stages · bytes of a page. Copies run `stages` pages ahead.
#pragma once
#include "common/attend_tile.cuh"
#include "ptx/bulk.cuh"

namespace {

// A place in the list of all pages: segment, KV head, tile, page.
struct Cursor {
    Work work;
    int index;  // of the segment
    int head, tile, page;

    __device__ __forceinline__ void seek(const Attend& a, const int* first, int item) {
        int low = 0, high = min(a.batch.segments, kMaxSegments) - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first[middle] <= item) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        index = low;
        work = segment_work(a, index);
        const int rest = item - first[index];
        page = work.first_page + rest % work.pages;
        tile = rest / work.pages % work.tiles;
        head = rest / work.pages / work.tiles;
    }

    // In front of every item.
    __device__ __forceinline__ void reset(const Attend& a) {
        work.first_page = work.pages = page = tile = 0;
        work.tiles = 1, head = a.kv.heads - 1;
    }

    // To the next item, which must exist. Says whether it is of another tile.
    __device__ __forceinline__ bool advance(const Attend& a, const int* first, int item) {
        if (++page < work.first_page + work.pages) return false;
        page = work.first_page;
        if (++tile == work.tiles) {
            tile = 0;
            if (++head == a.kv.heads) seek(a, first, item);
        }
        return true;
    }
};

// Writes the partial results of the tile's rows.
template <int kD, int kM>
__device__ __forceinline__ void store_partial(const Attend& a, const TileRows<kM>& rows, const Partial (&sums)[kM][2],
                                              const float (&o)[kM][kD / (8 * kTileWarps)][4], float2* to_sums, float* to_output, const i64 (&place)[kM][2]) {
    constexpr int kC = kD / (8 * kTileWarps);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * kM; i++) {
        const int m = i / 2, h = i % 2;
        if (rows.first + 8 * i + lane / 4 >= rows.pairs) continue;
        if (warp == 0 && t == 0) to_sums[place[m][h]] = {sums[m][h].most, sums[m][h].sum};
        float* to = to_output + place[m][h] * kD + kD / kTileWarps * warp + 2 * kC * t;
#pragma unroll
        for (int c = 0; c < 2 * kC; c += 4) {
            float v[4];
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = o[m][(c + e) % kC][2 * h + (c + e) / kC];
            *reinterpret_cast<float4*>(to + c) = {v[0], v[1], v[2], v[3]};
        }
    }
}

template <int kFormat, int kD, int kM>
__device__ __forceinline__ void attend_step(const Attend& a) {
    grid_launch_next();
    grid_wait();
    const int stages = a.stages;
    using Shape = PageShape<kFormat, kD>;
    constexpr int kC = kD / (8 * kTileWarps);
    extern __shared__ __align__(128) u8 shared[];
    Side<kD, kM>& side = *reinterpret_cast<Side<kD, kM>*>(shared);
    u8* pages = shared + sizeof(Side<kD, kM>);
    const int lane = threadIdx.x % 32, g = lane / 4;
    const Shares shares(list_work(a, side.first), a.blocks);
    const int begin = shares.begin(blockIdx.x), count = shares.begin(blockIdx.x + 1) - begin;
    if (count == 0) return;

    // Copies run ahead: keys and values of an item in turn, each a group. A page's number is read one item earlier.
    Cursor lead, at;
    lead.reset(a), at.reset(a);
    Place place;
    int entry = -1;
    auto slot = [&](int item) { return pages + item % stages * Shape::kBytes; };

    TileRows<kM> rows;
    // Queries are read when the products with the tile before have ended; the barrier of the next turn follows.
    auto next_tile = [&](int item) {
        if (!at.advance(a, side.first, begin + item)) return;
        rows.set(a, at.work.segment, at.tile);
        load_queries<kFormat, kD, kM>(side.queries, a, at.work.segment, at.head, at.tile);
    };
    Partial leaf[kM][2];
    float o[kM][kC][4] = {};
#pragma unroll 1
    for (int item = -stages - 1; item < count; item++) {
        u8* keys = slot(max(item, 0));
        const int ahead = item + stages;
        float s[kM][4];
        if (item >= 0) {
            wait_even(stages);
            __syncthreads();
        }
        // The values of the item whose keys were copied last; then, below, the keys of the next.
        if (ahead > 0) {
            if (ahead - 1 < count) load_page<kFormat, kD>(slot(ahead - 1) + Shape::kHalf, a.kv.values, a.kv.value_scales, place);
            copy_commit();
        }
        if (item >= 0) {
            multiply_keys<kFormat, kD, kM>(keys, side.queries, s);
            find_most(a, side, rows, at.page, s);
            if (kFormat == kKvFp8 || is_edge(a, rows, at.page)) wait_even(stages);
            __syncthreads();
        }
        if (ahead >= 0) {
            if (ahead < count) {
                TileRows<kM> next;
                next.set(a, lead.work.segment, lead.tile);
                const int from = lead.page * kPageTokens;
                place = {entry < 0 ? -1 : a.kv.row(entry, lead.head), a.first_key - from, entry < 0 ? 0 : next.most + 1 - from};
                if (entry < 0 && threadIdx.x == 0) a.kv.report_missing(a.report, lead.page);
                load_page<kFormat, kD>(slot(ahead), a.kv.keys, a.kv.key_scales, place);
            }
            copy_commit();
        }
        if (ahead + 1 < count) {
            lead.advance(a, side.first, begin + ahead + 1);
            entry = a.kv.entry(lead.work.segment.slot, lead.page);
        }
        if (item == -1) next_tile(0);
        if (item < 0) continue;

        Partial own[kM][2];
        float kept[kM][2];
        make_weights<kFormat, kD, kM, false>(a, side, keys + Shape::kHalf, rows, at.page, s, own, kept);
        wait_odd(stages);
        __syncthreads();
        float page[kM][kC][4] = {};
        multiply_values<kFormat, kD, kM>(keys + Shape::kHalf, side.weights, page);
#pragma unroll
        for (int i = 0; i < 2 * kM; i++) own[i / 2][i % 2].sum = page_sum(side, 16 * (i / 2) + 8 * (i % 2) + g);

        // The pages of this leaf, and whether all of them are in this share.
        const int leaf_page = max(at.page / kLeafPages * kLeafPages, at.work.first_page);
        const int leaf_end = min(at.page / kLeafPages * kLeafPages + kLeafPages, at.work.first_page + at.work.pages);
        const int leaf_item = item - (at.page - leaf_page);
        const bool whole = leaf_item >= 0 && leaf_item + leaf_end - leaf_page <= count;
        i64 to[kM][2];
        if (whole) {
#pragma unroll
            for (int i = 0; i < 2 * kM; i++) {
                const int m = i / 2, h = i % 2;
                const Weights by = leaf[m][h].add(own[m][h].most, own[m][h].sum);
#pragma unroll
                for (int j = 0; j < kC; j++) {
                    o[m][j][2 * h] = fmaf(page[m][j][2 * h], by.added, o[m][j][2 * h] * by.kept);
                    o[m][j][2 * h + 1] = fmaf(page[m][j][2 * h + 1], by.added, o[m][j][2 * h + 1] * by.kept);
                }
            }
            if (at.page + 1 == leaf_end) {
#pragma unroll
                for (int i = 0; i < 2 * kM; i++) {
                    const int pair = rows.first + 8 * i + g;
                    const i64 row = at.work.segment.row + pair / a.group;
                    to[i / 2][i % 2] = (row * a.heads + at.head * a.group + pair % a.group) * a.leaves + at.page / kLeafPages;
                }
                store_partial<kD, kM>(a, rows, leaf, o, a.leaf_sums, a.leaf_output, to);
#pragma unroll
                for (int m = 0; m < kM; m++) {
                    for (int h = 0; h < 2; h++) leaf[m][h] = Partial{};
                    for (int j = 0; j < 4 * kC; j++) o[m][j / 4][j % 4] = 0.0f;
                }
            }
        } else {
            const i64 first = (static_cast<i64>(blockIdx.x) * kSplitPages + split_place(item, leaf_item, 0)) * a.tile_rows;
#pragma unroll
            for (int i = 0; i < 2 * kM; i++) to[i / 2][i % 2] = first + 8 * i + g;
            store_partial<kD, kM>(a, rows, own, page, a.page_sums, a.page_output, to);
        }
        if (item + 1 < count) next_tile(item + 1);
    }
    copy_wait<0>();
}

}  // namespace

#define ATTEND_STEP(name, format, d, m) \
    extern "C" __global__ void __launch_bounds__(256, m == 1 ? 2 : 1) name(const __grid_constant__ Attend a) { attend_step<format, d, m>(a); }
