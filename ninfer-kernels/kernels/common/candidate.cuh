// Logits as candidates for the next token: penalties, order, weights, and the best few of a block's.
//
// The definition is `sampling::choose` of ninfer-core. A key is 64 bits, smaller is better: the order of the logit above
// the token id, so that all keys differ and ties take the lower id.
#pragma once
#include "common/types.cuh"

// Threads of a block, logits a thread holds, logits of a tile.
constexpr int kThreads = 256;
constexpr int kPerThread = 16;
constexpr int kTile = kThreads * kPerThread;
// Most candidates that are kept in a list.
constexpr int kFew = 64;
constexpr u64 kNoKey = ~0ull;
constexpr u32 kPromptBit = 0x80000000u;

// What `SamplingParams::to_words` holds, and what follows from it.
struct Sampling {
    double temperature;
    double floor;  // least weight that is kept; the largest is 1
    u64 seed;
    u32 top_k;
    float top_p;
    float reach;  // logits further below the best than this many temperatures weigh less than `floor`
    float presence, frequency, repetition;

    __device__ bool greedy() const { return temperature == 0.0; }
    __device__ bool penalties() const { return presence != 0.0f || frequency != 0.0f || repetition != 1.0f; }
};

__device__ inline Sampling read_sampling(const u32* words) {
    auto number = [&](int i) { return __uint_as_float(words[i]); };
    Sampling s;
    s.temperature = number(0);
    s.top_k = words[1];
    s.top_p = number(2);
    const float least = number(3);
    s.floor = fmax(static_cast<double>(least), 0x1p-1022);
    // ln 2^-1022 is −708.4; one more covers the rounding of the comparison in f32.
    s.reach = s.floor > 0x1p-140 ? 1.0f - logf(least) : 709.5f;
    s.presence = number(4), s.frequency = number(5), s.repetition = number(6);
    s.seed = static_cast<u64>(words[8]) << 32 | words[7];
    return s;
}

// The uniform number of `sampling::uniform` for a choice.
__device__ __forceinline__ u64 mix(u64 z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ __forceinline__ double uniform(u64 seed, u64 position) {
    // Purpose and index of a choice are 0.
    return static_cast<double>(mix(mix(mix(seed) ^ position)) >> 11) * 0x1p-53;
}

// Smaller is better; 0 and −0 are equal.
__device__ __forceinline__ u32 order_of(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

__device__ __forceinline__ float value_of(u32 order) {
    return __uint_as_float(order >> 31 ? order : ~order & 0x7fffffffu);
}

__device__ __forceinline__ u64 key_of(float x, int id) { return static_cast<u64>(order_of(x)) << 32 | static_cast<u32>(id); }
__device__ __forceinline__ u32 id_of(u64 key) { return static_cast<u32>(key); }
__device__ __forceinline__ float logit_of(u64 key) { return value_of(static_cast<u32>(key >> 32)); }
__device__ __forceinline__ u64 better(u64 a, u64 b) { return a < b ? a : b; }

// exp((x − best) / T), or 0 where that is surely below what counts. Not inlined: it is long, and rarely many of its
// places are live at once.
__device__ __noinline__ double weight_of(float x, float best, double temperature, float reach) {
    if (x == best) return 1.0;
    if (best - x > reach * static_cast<float>(temperature)) return 0.0;
    return exp((static_cast<double>(x) - static_cast<double>(best)) / temperature);
}

// A row of logits with what its penalties depend on.
struct LogitRow {
    const float* logits;
    const u32* counts;  // null: no penalties
    const u32* seen;    // inputs of the segment that count as generated
    i64 seen_stride;
    int seen_count;
    int limit;  // logits from here on are not looked at
    float presence, frequency, repetition;

    __device__ float penalised(float x, u32 id, u32 count, bool again) const {
        if (again) {
            for (int i = 0; i < seen_count; i++) {
                // Saturating, as the definition adds.
                count += seen[i * seen_stride] == id && count != 0xffffffffu;
            }
        }
        if (count == 0) return x;
        const u32 n = count & ~kPromptBit;
        x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
        if (n > 0) {
            x = __fsub_rn(x, __fmul_rn(frequency, __uint2float_rn(n)));
            x = __fsub_rn(x, presence);
        }
        return x;
    }
};

// A tile of penalised logits in shared memory. Thread t holds the places 256 · i + t.
struct Tile {
    float x[kTile + kTile / 32];
    u32 mark[kTile / 32];

    // One word is left out after 32, so that threads may also read 16 neighbours each without bank conflicts.
    __device__ float& at(int place) { return x[place + place / 32]; }
};

// Fills the tile, with all threads of the block. A thread may read its own places at once, others after a barrier. Gives
// bit 0 for a NaN and bit 1 for a finite number among the raw logits of this thread.
__device__ inline u32 load_tile(const LogitRow& row, int index, Tile& tile) {
    const int t = threadIdx.x, first = index * kTile;
    float v[kPerThread];
    u32 flags = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
        const int id = first + kThreads * i + t;
        v[i] = id < row.limit ? row.logits[id] : -infinity();
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
        flags |= isnan(v[i]) ? 1u : 0u;
        flags |= fabsf(v[i]) < infinity() ? 2u : 0u;
        tile.at(kThreads * i + t) = v[i];
    }
    if (row.counts == nullptr) return flags;
    // Few tokens have a count.
    u32 counted = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
        const int id = first + kThreads * i + t;
        if (id < row.limit && row.counts[id] != 0) counted |= 1u << i;
    }
    u32 again = 0;
    if (row.seen_count > 0) {
        if (t < kTile / 32) tile.mark[t] = 0;
        __syncthreads();
        for (int i = t; i < row.seen_count; i += kThreads) {
            const u32 at = row.seen[i * row.seen_stride] - static_cast<u32>(first);
            if (at < kTile) atomicOr(&tile.mark[at / 32], 1u << (at % 32));
        }
        __syncthreads();
        for (int i = 0; i < kPerThread; i++) {
            again |= (tile.mark[(kThreads * i + t) / 32] >> (t % 32) & 1) << i;
        }
    }
    for (u32 rest = counted | again; rest != 0; rest &= rest - 1) {
        const int i = __ffs(static_cast<int>(rest)) - 1, id = first + kThreads * i + t;
        if (id >= row.limit) break;
        float& x = tile.at(kThreads * i + t);
        x = row.penalised(x, id, row.counts[id], (again >> i & 1) != 0);
    }
    return flags;
}

// Calls f(id, x) for each logit of a loaded tile that this thread holds, ids ascending. With kOrdered a thread has 16
// neighbours, so that ids also ascend with the thread.
template <bool kOrdered, class F>
__device__ __forceinline__ void each_logit(int index, int limit, Tile& tile, F f) {
#pragma unroll 1
    for (int i = 0; i < kPerThread; i++) {
        const int place = kOrdered ? kPerThread * threadIdx.x + i : kThreads * i + threadIdx.x;
        const int id = index * kTile + place;
        if (id < limit) f(id, tile.at(place));
    }
}

// Keys of a block: each thread gives 16 and, in the last place, one of those already selected.
constexpr int kGroups = kThreads / 2;
constexpr int kMostInList = kFew * 2 * (kPerThread + 1);

struct Select {
    union {
        u64 list[kMostInList];
        Tile tile;  // dead when keys are selected
    };
    u64 group[kGroups];
    u64 top[kFew];
    u64 bound;
    int count;
};

// The `keep` (at most kFew) best keys of the block, best first, to s.top; kNoKey where there are not so many.
//
// The keep-th best of the 128 group bests bounds the keep-th best key; since keys differ, exactly `keep` groups reach it,
// which bounds the list. What reaches it is ranked by counting.
__device__ inline void select_best(const u64 (&keys)[kPerThread + 1], int keep, Select& s) {
    const int t = threadIdx.x;
    u64 best = kNoKey;
#pragma unroll
    for (int i = 0; i <= kPerThread; i++) best = better(best, keys[i]);
    best = better(best, __shfl_xor_sync(kAllLanes, best, 1));
    if (t % 2 == 0) s.group[t / 2] = best;
    if (t == 0) s.count = 0;
    // Behind this barrier the tile is dead.
    __syncthreads();
    if (t < kGroups) {
        const u64 own = s.group[t];
        int rank = 0;
#pragma unroll 8
        for (int i = 0; i < kGroups; i++) {
            const u64 other = s.group[i];
            rank += other < own || (other == own && i < t);
        }
        if (rank == keep - 1) s.bound = own;
    }
    __syncthreads();
    const u64 bound = s.bound;
#pragma unroll
    for (int i = 0; i <= kPerThread; i++) {
        if (keys[i] <= bound && keys[i] != kNoKey) s.list[atomicAdd(&s.count, 1)] = keys[i];
    }
    __syncthreads();
    const int n = s.count;
    for (int i = t; i < n; i += kThreads) {
        const u64 own = s.list[i];
        int rank = 0;
        for (int j = 0; j < n; j++) rank += s.list[j] < own;
        if (rank < keep) s.top[rank] = own;
    }
    for (int i = n + t; i < keep; i += kThreads) s.top[i] = kNoKey;
    __syncthreads();
}

// Best key of the block; every thread gets it. `partial` holds kThreads / 32 values.
__device__ inline u64 block_best(u64 key, u64* partial) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) key = better(key, __shfl_xor_sync(kAllLanes, key, offset));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = key;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; w++) key = better(key, partial[w]);
    __syncthreads();
    return key;
}

// Sum over the threads before this one, and over all; the order is fixed. `partial` holds kThreads / 32 values.
template <class T>
__device__ __forceinline__ T block_scan(T x, T* partial, T& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T inclusive = x;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
        const T other = __shfl_up_sync(kAllLanes, inclusive, offset);
        if (lane >= offset) inclusive += other;
    }
    T before = __shfl_up_sync(kAllLanes, inclusive, 1);
    if (lane == 0) before = T();
    if (lane == 31) partial[warp] = inclusive;
    __syncthreads();
    T base = T();
    total = T();
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) {
        if (w == warp) base = total;
        total += partial[w];
    }
    __syncthreads();
    return base + before;
}
