// targets: sm_80 sm_90
// local memory: sample_draw: sixteen bytes on sm_120 alone, of a search that runs once a token
// Choice of the next token from a row of logits, as `sampling::choose` of ninfer-core defines it.
//
// Two launches serve every row, whatever its parameters, which are device data:
//
// 1. sample_scan, grid (chunks, rows): a chunk is one tile of 4,096 logits (several where a row has more than 64 tiles).
//    Penalties; NaN and finite flags; the best key; where top-k keeps at most 64 tokens, the chunk's best 64 keys.
// 2. sample_draw, grid (members, rows): the first block of a greedy row takes the best key of all chunks; of a short row it
//    merges the lists and draws, adding in the definition's own order. All blocks share a wide row, that is one whose
//    distribution may have more than 64 tokens, by tiles, which stay in shared memory, with barriers between the steps:
//      top-k   the k-th key by three digits of 11, 11 and 10 bits, counted in shared memory and added by integer atomics;
//      top-p   the same over weights in fixed point of 59 bits, so that sums are exact and in no order;
//      draw    the weight of each tile in f64 in a fixed order, then the tile that the uniform number falls into.
//    A set of kept tokens is always "better than an order, and the first q ids equal to it".
//
// A block that is to share a wide row first takes a ticket; rows are served in order of tickets. So of the blocks that hold
// an SM those of the first unfinished row wait for none that cannot start, as long as `members` blocks fit on the device.
//
// Nothing depends on which rows share a call: tiles and sums of a row are its own. 256 threads; shared memory: scan 19 KiB,
// draw 42 KiB. A row of 248,320 logits is read once, 1 MB, and once more from L2 where it is wide.
#include "common/choose.cuh"
#include "ptx/bulk.cuh"

namespace {

constexpr int kShift[kDigits] = {21, 10, 0};
constexpr int kWidth[kDigits] = {11, 11, 10};

// All tokens better than `order`, and the first `quota` ids of those equal to it.
struct Kept {
    u32 order, quota;
};

struct DrawShared {
    union {
        Select select;
        struct {
            Tile tile;
            u32 bin[3 * kBins];
        } wide;
        struct {
            double mass[kThreads];
            u32 ties[kThreads];
        } all;
    };
    Row row;  // the same for all threads, and rarely needed
    Mass mass_before;
    double partial[kThreads / 32];
    u64 partial_key[kThreads / 32];
    u32 partial_count[kThreads / 32];
    double weight[kFew];
    double total, base, threshold;
    u32 mask[kFew / 32];
    int order[kFew];
    int found, kept, cut, tile_index;
    u32 chosen_bin, count_before, quota, hit, last;
};

// Bins of digit `d` of the orders that begin with `prefix`.
__device__ __forceinline__ bool in_digit(u32 order, int d, u32 prefix) {
    return d == 0 || order >> (kShift[d] + kWidth[d]) == prefix;
}
__device__ __forceinline__ u32 digit_of(u32 order, int d) { return order >> kShift[d] & ((1u << kWidth[d]) - 1); }

enum Pass { kCount, kWeigh, kTotal };

// A row that several blocks share.
struct Wide {
    const Choose& a;
    const Row& row;
    DrawShared& s;
    float best;
    int local, member;
    u32 barriers;
    int loaded;  // tile in shared memory, or -1

    Kept kept;
    double tie;  // weight of the worst kept order, 0 below the floor
    u32 prefix;  // of the digits found so far
    u32 need;    // tokens to be found among those with the prefix
    Mass before;  // weight of what is better than the prefix
    double target;

    // One pass over the tiles of this member: counts or weighs what lies in a digit's bins, or weighs what is kept.
    //   kCount  numbers of tokens to `bins`
    //   kWeigh  weights of what is better than `kept.order` to `masses`
    //   kTotal  the same weights, and the number of ties, of each tile to `tile_mass` and `tile_ties`
    __device__ void pass(Pass kind, int d) {
        const Sampling& p = row.sampling;
        // In fixed point a weight beyond is 0.
        const float reach = kind == kWeigh ? fminf(p.reach, 43.0f) : p.reach;
        u32* bin = s.wide.bin;
#pragma unroll 1
        for (int tile = member; tile < a.tiles; tile += a.members) {
            if (tile != loaded) load_tile(row.logits, tile, s.wide.tile);
            loaded = tile;
            __syncthreads();
            for (int i = threadIdx.x; i < 3 * kBins && kind != kTotal; i += kThreads) bin[i] = 0;
            __syncthreads();
            double sum = 0.0;
            u32 ties = 0;
            each_logit<false>(tile, a.limit, s.wide.tile, [&](int, float x) {
                const u32 order = order_of(x);
                if (kind != kTotal && !in_digit(order, d, prefix)) return;
                u32* at = bin + digit_of(order, d);
                if (kind == kCount) {
                    atomicAdd(at, 1u);
                    return;
                }
                ties += order == kept.order;
                if (order >= kept.order) return;
                const double w = weight_of(x, best, p.temperature, reach);
                if (!(w >= p.floor)) return;
                if (kind == kTotal) {
                    sum += w;
                    return;
                }
                // Three limbs of 20 bits: the sums of a tile fit 32 bits.
                const u64 fixed = __double2ull_rn(w * 0x1p59);
                atomicAdd(at, static_cast<u32>(fixed >> 40));
                atomicAdd(at + kBins, static_cast<u32>(fixed >> 20) & 0xfffffu);
                atomicAdd(at + 2 * kBins, static_cast<u32>(fixed) & 0xfffffu);
            });
            if (kind == kTotal) {
                double total;
                u32 all;
                block_scan(sum, s.partial, total);
                block_scan(ties, s.partial_count, all);
                const i64 at = static_cast<i64>(local) * a.tiles + tile;
                if (threadIdx.x == 0) a.tile_mass[at] = total, a.tile_ties[at] = all;
                continue;
            }
            __syncthreads();
            const i64 digit = (static_cast<i64>(local) * kDigits + d) * kBins;
            for (int i = threadIdx.x; i < kBins; i += kThreads) {
                if (kind == kCount) {
                    if (bin[i] > 0) atomicAdd(a.bins + digit + i, bin[i]);
                    continue;
                }
                const u64 high = (static_cast<u64>(bin[i]) << 20) + bin[i + kBins];
                if (high > 0) atomicAdd(&a.masses[digit + i].high, high);
                if (bin[i + 2 * kBins] > 0) atomicAdd(&a.masses[digit + i].low, static_cast<u64>(bin[i + 2 * kBins]));
            }
        }
        barriers += a.members;
        row_barrier(a.arrivals + local, barriers);
    }

    // The bin of the counted digit that the `need`-th best token lies in.
    __device__ void find_count(int d) {
        constexpr int kEach = kBins / kThreads;
        const u32* own = a.bins + (static_cast<i64>(local) * kDigits + d) * kBins + threadIdx.x * kEach;
        u32 count[kEach], sum = 0, total;
#pragma unroll
        for (int j = 0; j < kEach; j++) {
            count[j] = load_l2(own + j);
            sum += count[j];
        }
        u32 before = block_scan(sum, s.partial_count, total);
        if (before < need && need <= before + sum) {
            bool found = false;
#pragma unroll
            for (int j = 0; j < kEach; j++) {
                if (!found && before + count[j] >= need) {
                    found = true;
                    s.chosen_bin = threadIdx.x * kEach + j;
                    s.count_before = before;
                }
                before += count[j];
            }
        }
        __syncthreads();
        prefix = prefix << kWidth[d] | s.chosen_bin;
        need -= s.count_before;
        if (d + 1 == kDigits) kept = {prefix, need};
    }

    // The bin of the weighed digit in which the shortest run, best first, whose weights reach the share `top_p` ends. True
    // if no further digit is needed.
    __device__ bool find_weight(int d) {
        constexpr int kEach = kBins / kThreads;
        const Mass* own = a.masses + (static_cast<i64>(local) * kDigits + d) * kBins + threadIdx.x * kEach;
        Mass sum = {0, 0}, total, at;
#pragma unroll
        for (int j = 0; j < kEach; j++) sum += {load_l2(&own[j].high), load_l2(&own[j].low)};
        at.high = block_scan(sum.high, s.partial_key, total.high);
        at.low = block_scan(sum.low, s.partial_key, total.low);
        if (d == 0) {
            const double ties = kept.quota * tie, all = total.value();
            // Not 0, so that a first bin reaches it whatever the parameters are.
            target = fmax(static_cast<double>(row.sampling.top_p) * (all + ties), 0x1p-60);
            if (all < target) {
                // It ends among the worst kept.
                const double more = ceil((target - all) / tie);
                if (ties > 0.0 && more < kept.quota) kept.quota = max(static_cast<u32>(more), 1u);
                return true;
            }
        }
        at += before;
        sum += at;
        if (at.value() < target && sum.value() >= target) {
            Mass next = at;
#pragma unroll 1
            for (int j = 0; j < kEach; j++) {
                next += {load_l2(&own[j].high), load_l2(&own[j].low)};
                if (next.value() >= target) {
                    s.chosen_bin = threadIdx.x * kEach + j;
                    s.mass_before = at;
                    break;
                }
                at = next;
            }
        }
        __syncthreads();
        prefix = prefix << kWidth[d] | s.chosen_bin;
        before = s.mass_before;
        if (d + 1 < kDigits) return false;
        const double last = weight_of(value_of(prefix), best, row.sampling.temperature, row.sampling.reach);
        const double more = ceil((target - before.value()) / last);
        kept = {prefix, more < 4294967295.0 ? max(static_cast<u32>(more), 1u) : kNone};
        return true;
    }

    // The token at which the sum in order of ids exceeds u times the total.
    __device__ void draw(u32* output) {
        const Sampling& p = row.sampling;
        kept = {kNone, 0};
        need = row.keep;
        int step = row.keep < a.limit ? 0 : p.top_p < 1.0f ? kDigits : 2 * kDigits;
#pragma unroll 1
        for (;;) {
            const Pass kind = static_cast<Pass>(step / kDigits);
            const int d = step % kDigits;
            if (d == 0 && kind != kCount) {
                const double w = weight_of(value_of(kept.order), best, p.temperature, p.reach);
                tie = w >= p.floor ? w : 0.0;
                if (!(tie > 0.0)) kept.quota = 0;
            }
            if (d == 0) prefix = 0;
            pass(kind, d);
            if (kind == kTotal) break;
            step++;
            if (kind == kCount) {
                find_count(d);
                if (step == kDigits && !(p.top_p < 1.0f)) step = 2 * kDigits;
            } else if (find_weight(d)) {
                step = 2 * kDigits;
            }
        }
        find_tile();
        if (s.tile_index < 0) {
            if (member == 0 && threadIdx.x == 0) *output = kNone;
        } else if (s.tile_index % a.members == member) {
            find_token(output);
        }
    }

    // The tile that the uniform number falls into; its first sum and its share of the ties. −1 if nothing is kept.
    __device__ void find_tile() {
        const double u = uniform(row.sampling.seed, row.position);
        const i64 begin = static_cast<i64>(local) * a.tiles;
        double threshold = 0.0;
        loaded = -1;  // the tile makes room
        if (threadIdx.x == 0) s.tile_index = -1;
#pragma unroll 1
        for (int turn = 0; turn < 2; turn++) {
            double sum = 0.0;
            u32 left = kept.quota;
            bool found = false;
#pragma unroll 1
            for (int first = 0; first < a.tiles; first += kThreads) {
                const int count = min(a.tiles - first, kThreads);
                __syncthreads();
                if (static_cast<int>(threadIdx.x) < count) {
                    s.all.mass[threadIdx.x] = load_l2(a.tile_mass + begin + first + threadIdx.x);
                    s.all.ties[threadIdx.x] = load_l2(a.tile_ties + begin + first + threadIdx.x);
                }
                __syncthreads();
                if (threadIdx.x != 0 || found) continue;
                for (int i = 0; i < count && !found; i++) {
                    const u32 ties = min(s.all.ties[i], left);
                    const double mass = s.all.mass[i] + ties * tie;
                    if (turn == 1 && mass > 0.0) {
                        // The last tile with a weight stands if rounding keeps the sum below.
                        s.tile_index = first + i, s.base = sum, s.quota = ties;
                        found = sum + mass > threshold;
                    }
                    sum += mass, left -= ties;
                }
            }
            if (turn == 0) threshold = u * sum;
        }
        if (threadIdx.x == 0) s.threshold = threshold;
        __syncthreads();
    }

    __device__ void find_token(u32* output) {
        const Sampling& p = row.sampling;
        const int tile = s.tile_index;
        load_tile(row.logits, tile, s.wide.tile);
        if (threadIdx.x == 0) s.hit = kNone, s.last = 0;
        __syncthreads();
        u32 ties = 0, all;
        each_logit<true>(tile, a.limit, s.wide.tile, [&](int, float x) { ties += order_of(x) == kept.order; });
        const u32 first_tie = block_scan(ties, s.partial_count, all);
        double at = 0.0, total;
        // First the sum of the thread, then its place in the whole.
#pragma unroll 1
        for (int turn = 0; turn < 2; turn++) {
            ties = first_tie;
            each_logit<true>(tile, a.limit, s.wide.tile, [&](int id, float x) {
                const u32 order = order_of(x);
                if (order > kept.order) return;
                double w = tie;
                if (order == kept.order) {
                    if (ties++ >= s.quota) return;
                } else {
                    w = weight_of(x, best, p.temperature, p.reach);
                }
                if (!(w >= p.floor)) return;
                at += w;
                if (turn == 0) return;
                atomicMax(&s.last, static_cast<u32>(id));
                if (at > s.threshold) atomicMin(&s.hit, static_cast<u32>(id));
            });
            if (turn == 0) at = s.base + block_scan(at, s.partial, total);
        }
        __syncthreads();
        if (threadIdx.x == 0) *output = s.hit != kNone ? s.hit : s.last;
    }
};

// Draws from the best `row.keep` keys, which s.select.top holds best first; sums are those of the definition, one by one.
__device__ inline void draw_short(const Row& row, float best, DrawShared& s, u32* output) {
    const Sampling& p = row.sampling;
    const int t = threadIdx.x;
    u32 id = kNone;
    bool kept = false;
    if (t < kFew) {
        const u64 key = t < row.keep ? s.select.top[t] : kNoKey;
        double w = 0.0;
        if (key != kNoKey) {
            w = weight_of(logit_of(key), best, p.temperature, p.reach);
            id = id_of(key);
        }
        kept = w >= p.floor;
        s.weight[t] = w;
        const u32 mask = __ballot_sync(kAllLanes, kept);
        if (t % 32 == 0) s.mask[t / 32] = mask;
    }
    __syncthreads();
    if (kept) {
        int rank = 0;
        for (int i = 0; i < row.keep; i++) {
            rank += (s.mask[i / 32] >> (i % 32) & 1) != 0 && id_of(s.select.top[i]) < id;
        }
        s.order[rank] = t;
    }
    __syncthreads();
    if (t == 0) {
        const int count = __popc(s.mask[0]) + __popc(s.mask[1]);
        double total = 0.0;
        for (int i = 0; i < count; i++) total += s.weight[s.order[i]];
        int cut = kFew;
        if (p.top_p < 1.0f) {
            const double target = static_cast<double>(p.top_p) * total;
            double sum = 0.0;
            for (int i = 0; i < row.keep; i++) {
                if ((s.mask[i / 32] >> (i % 32) & 1) == 0) continue;
                sum += s.weight[i];
                if (sum >= target) {
                    cut = i;
                    break;
                }
            }
            total = 0.0;
            for (int i = 0; i < count; i++) {
                if (s.order[i] <= cut) total += s.weight[s.order[i]];
            }
        }
        s.kept = count, s.cut = cut, s.total = total;
    }
    __syncthreads();
    if (t < kFew) s.weight[t] = s.weight[t] / s.total;
    __syncthreads();
    if (t == 0) {
        const double u = uniform(p.seed, row.position);
        double sum = 0.0;
        u32 chosen = kNone;
        for (int i = 0; i < s.kept; i++) {
            const int at = s.order[i];
            if (at > s.cut) continue;
            sum += s.weight[at];
            chosen = id_of(s.select.top[at]);
            if (u < sum) break;
        }
        *output = chosen;
    }
}

// The wide row, counted from the first of the launch, that the block's ticket is for, and the block's number in it.
__device__ inline int take_ticket(const Choose& a, u32* shared, int& member) {
    const int t = threadIdx.x;
    const bool wide = t < a.rows && a.mode[t] == kWide;
    const u32 mask = __ballot_sync(kAllLanes, wide);
    if (t % 32 == 0) shared[t / 32] = mask;
    if (t == 0) shared[kThreads / 32] = atomicAdd(a.arrivals + a.rows, 1u);
    __syncthreads();
    const u32 ticket = shared[kThreads / 32];
    member = static_cast<int>(ticket % a.members);
    int left = static_cast<int>(ticket / a.members), row = -1;
    for (int w = 0; w < kThreads / 32 && row < 0; w++) {
        u32 bits = shared[w];
        if (left >= __popc(bits)) {
            left -= __popc(bits);
            continue;
        }
        for (; left > 0; left--) bits &= bits - 1;
        row = 32 * w + __ffs(static_cast<int>(bits)) - 1;
    }
    __syncthreads();
    return row;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) sample_scan(const __grid_constant__ Choose a) {
    __shared__ Select select;
    __shared__ u64 partial[kThreads / 32];
    __shared__ int found;
    const int local = blockIdx.y, chunk = blockIdx.x, t = threadIdx.x;
    grid_launch_next();
    grid_wait();
    if (chunk == 0 && t == 0) {
        a.arrivals[local] = 0;
        if (local == 0) a.arrivals[a.rows] = 0;
    }
    if (a.params.data != nullptr && a.first_row + local == 0 && chunk == 0) {
        for (int i = t; i < a.batch.segments; i += kThreads) {
            const int slot = a.batch.segment(i).slot;
            if (slot < 0 || slot >= a.slots) report_error(a.report, kSlot, slot, a.slots);
        }
    }
    Row row;
    open_row(a, a.first_row + local, &found, row);
    if (chunk == 0 && t == 0) a.mode[local] = row.mode;
    if (row.mode == kIdle) return;
    const bool few = row.mode == kShort;

    u64 best = kNoKey;
    u32 flags = 0;
    const int end = min((chunk + 1) * a.chunk_tiles, a.tiles);
    for (int tile = chunk * a.chunk_tiles; tile < end; tile++) {
        u64 keys[kPerThread + 1];
        // What the tiles before this one left.
        keys[kPerThread] = few && tile > chunk * a.chunk_tiles && t < row.keep ? select.top[t] : kNoKey;
        flags |= load_tile(row.logits, tile, select.tile);
#pragma unroll
        for (int i = 0; i < kPerThread; i++) {
            const int id = tile * kTile + kThreads * i + t;
            const float x = select.tile.at(kThreads * i + t);
            keys[i] = id < a.limit ? key_of(x, id) : kNoKey;
            if (x > -infinity()) best = better(best, keys[i]);
        }
        if (few) select_best(keys, row.keep, select);
    }
    const bool broken = __syncthreads_or(flags & 1), finite = __syncthreads_or(flags & 2);
    best = block_best(best, partial);
    const i64 at = static_cast<i64>(local) * kChunks + chunk;
    if (t == 0) {
        a.best[at] = best;
        a.flags[at] = (broken ? 1u : 0u) | (finite ? 2u : 0u);
    }
    if (few && t < row.keep) a.top[at * kFew + t] = select.top[t];
    if (row.mode == kWide) {
        u32* bins = a.bins + static_cast<i64>(local) * kDigits * kBins;
        Mass* masses = a.masses + static_cast<i64>(local) * kDigits * kBins;
        for (int i = chunk * kThreads + t; i < kDigits * kBins; i += a.chunks * kThreads) {
            bins[i] = 0;
            masses[i] = {0, 0};
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) sample_draw(const __grid_constant__ Choose a) {
    __shared__ DrawShared s;
    const int t = threadIdx.x;
    int local = blockIdx.y, member = 0;
    grid_launch_next();
    grid_wait();
    u64 key = kNoKey;
    u32 flags = 0;
    auto load_best = [&]() {
        if (t >= a.chunks) return;
        key = a.best[static_cast<i64>(local) * kChunks + t];
        flags = a.flags[static_cast<i64>(local) * kChunks + t];
    };
    const u32 mode = a.mode[local];
    if (blockIdx.x == 0) load_best();
    if (mode == kIdle || (mode != kWide && blockIdx.x != 0)) return;
    if (mode == kWide) {
        local = take_ticket(a, s.wide.bin, member);
        if (local < 0) return;
        load_best();
    }
    u32* output = a.output.row(a.first_row + local);
    const bool broken = __syncthreads_or(flags & 1), finite = __syncthreads_or(flags & 2);
    key = block_best(key, s.partial_key);
    const bool none = broken || !finite || key == kNoKey;
    if (none || mode == kGreedy) {
        if (member == 0 && t == 0) *output = none ? kNone : id_of(key);
        return;
    }
    {
        Row opened;
        open_row(a, a.first_row + local, &s.found, opened);
        if (t == 0) s.row = opened;
    }
    __syncthreads();
    const Row& row = s.row;
    const float best = logit_of(key);
    if (row.mode == kShort) {
        u64 keys[kPerThread + 1];
        const u64* top = a.top + static_cast<i64>(local) * kChunks * kFew;
#pragma unroll
        for (int i = 0; i < kPerThread; i++) {
            const int at = i * kThreads + t, chunk = at / row.keep;
            keys[i] = chunk < a.chunks ? top[chunk * kFew + at % row.keep] : kNoKey;
        }
        keys[kPerThread] = kNoKey;
        select_best(keys, row.keep, s.select);
        draw_short(row, best, s, output);
        return;
    }
    Wide wide = {a, row, s, best, local, member, 0, -1, {kNone, 0}, 0.0, 0, 0, {0, 0}, 0.0};
    wide.draw(output);
}
