// What the kernels of a choice share: arguments, the state of a row, barriers between the blocks of a row.
#pragma once
#include "common/batch.cuh"
#include "common/candidate.cuh"
#include "common/report.cuh"
#include "ptx/coherent.cuh"

// Most chunks of a row, digits of an order and their bins.
constexpr int kChunks = 64;
constexpr int kDigits = 3;
constexpr int kBins = 2048;

enum Mode { kIdle = 0, kGreedy = 1, kShort = 2, kWide = 3 };

// Weight of a bin: units of 2^-39 and of 2^-59.
struct Mass {
    u64 high, low;

    __device__ Mass& operator+=(const Mass& other) {
        high += other.high, low += other.low;
        return *this;
    }
    __device__ double value() const { return static_cast<double>(high) * 0x1p-39 + static_cast<double>(low) * 0x1p-59; }
};

// `ChooseArg` of src/cuda/choose.rs. The arrays are of the workspace, for `rows` rows from `first_row` on.
struct Choose {
    Batch batch;
    Matrix<const float> logits;
    Matrix<const u32> ids;
    Matrix<const u32> params;  // null: the best of the raw logits, for every row
    Matrix<const u32> counts;
    Matrix<u32> output;
    Report* report;
    u64* best;         // [rows][kChunks]: best key of a chunk
    u64* top;          // [rows][kChunks][kFew]: best keys of a chunk, of rows in mode kShort
    Mass* masses;      // [rows][kDigits][kBins]
    double* tile_mass; // [rows][tiles]
    u32* bins;         // [rows][kDigits][kBins]
    u32* tile_ties;    // [rows][tiles]
    u32* flags;        // [rows][kChunks]: bit 0: a NaN; bit 1: a finite logit
    u32* mode;         // [rows]
    u32* arrivals;     // [rows] barriers of wide rows, then the number of tickets taken
    int first_row;
    int rows;
    int slots;
    int limit;
    int tiles;
    int chunks;
    int chunk_tiles;
    int members;  // blocks that share a wide row
};

// A row that a block works on.
struct Row {
    LogitRow logits;
    Sampling sampling;
    u64 position;  // of the token that is chosen
    int keep;      // top-k, or the number of tokens
    int mode;
};

// Opens row `row` of the call, with all threads of the block; `found` is a word of shared memory.
__device__ inline void open_row(const Choose& a, int row, int* found, Row& out) {
    out.logits = {a.logits.row(row), nullptr, nullptr, 0, 0, a.limit, 0.0f, 0.0f, 1.0f};
    out.position = 0;
    out.keep = a.limit;
    out.mode = kGreedy;
    if (a.params.data == nullptr) return;
    if (threadIdx.x == 0) *found = a.batch.segments;
    __syncthreads();
    for (int i = threadIdx.x; i < a.batch.segments; i += kThreads) {
        const Segment s = a.batch.segment(i);
        if (row >= s.row && row < s.row + s.len) atomicMin(found, i);
    }
    __syncthreads();
    const int index = *found;
    __syncthreads();
    out.mode = kIdle;
    if (index >= a.batch.segments) return;
    const Segment s = a.batch.segment(index);
    if (s.slot < 0 || s.slot >= a.slots) return;
    const Sampling p = read_sampling(a.params.row(s.slot));
    out.sampling = p;
    out.position = static_cast<u64>(s.start) + (row - s.row) + 1;
    if (p.penalties()) {
        out.logits.counts = a.counts.row(s.slot);
        out.logits.presence = p.presence;
        out.logits.frequency = p.frequency;
        out.logits.repetition = p.repetition;
        if (a.batch.step && s.row >= 0) {
            out.logits.seen = a.ids.row(s.row);
            out.logits.seen_stride = a.ids.stride;
            out.logits.seen_count = row - s.row + 1;
        }
    }
    if (p.top_k > 0 && p.top_k < static_cast<u32>(a.limit)) out.keep = static_cast<int>(p.top_k);
    out.mode = p.greedy() ? kGreedy : out.keep <= kFew ? kShort : kWide;
}

// Waits until `count` arrivals at this counter, one of each block that shares a row.
__device__ inline void row_barrier(u32* counter, u32 count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(counter, 1u);
        while (load_acquire(counter) < count) {
        }
        __threadfence();
    }
    __syncthreads();
}
