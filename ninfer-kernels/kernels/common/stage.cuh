// Stages in shared memory through which the packed weights of a block of the grid go, one row block after the other.
//
// A stage holds `records` neighbouring records of each of kBlocks row blocks; warp w uses every kStageWarps-th of them, from
// the w-th on. On sm_90 and newer one more warp starts a bulk copy for a whole stage as soon as all others are done with
// it; before, every warp copies its own records itself.
#pragma once
#include "common/weight.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

constexpr int kStageWarps = 8;
constexpr int kMostStages = 8;

// Records of a stage that one warp uses.
__host__ __device__ constexpr int stage_depth(int format) { return format == kBf16 ? 1 : 2; }

// Stages that are on their way at once where every warp copies for itself.
constexpr int kMostCopies = 4;

// Barriers of a block: a stage is full, and a stage is free again.
struct StageBarriers {
    u64 full[kMostStages], free[kMostStages];
};

template <int kBlocks>
struct Stages {
    u8* ring;
    u32 full, free;
    int format, count;  // of stages
    int stage, phase;   // the next one, and the parity of its barrier

    __device__ __forceinline__ int run_bytes() const { return kStageWarps * stage_depth(format) * record_bytes(format); }
    __device__ __forceinline__ int stage_bytes() const { return kBlocks * run_bytes(); }

    // All threads call it, and no warp uses a stage before a barrier of the block.
    __device__ __forceinline__ Stages(int format_, u8* shared, int bytes, StageBarriers& barriers)
        : ring(shared), format(format_), stage(0), phase(0) {
#if __CUDA_ARCH__ >= 900
        count = min(bytes / stage_bytes(), kMostStages);
#else
        count = min(bytes / stage_bytes(), kMostCopies);
#endif
        full = shared_address(barriers.full), free = shared_address(barriers.free);
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x == 0) {
            for (int i = 0; i < count; i++) barrier_init(full + 8 * i), barrier_init(free + 8 * i, kStageWarps);
            barrier_init_fence();
        }
#endif
    }

    __device__ __forceinline__ void next() {
        if (++stage == count) stage = 0, phase ^= 1;
    }

#if __CUDA_ARCH__ >= 900
    // Fills stages with `records` records of each row block that `runs` names; one thread does it.
    template <class Runs>
    __device__ __forceinline__ void produce(Runs& runs, int records) {
        const int depth = kStageWarps * stage_depth(format), bytes = record_bytes(format);
        const u8* from[kBlocks];
        bool again = false;
        while (runs(from)) {
            for (int at = 0; at < records; at += depth) {
                const int now = min(depth, records - at) * bytes;
                if (again) barrier_wait(free + 8 * stage, phase ^ 1);
                barrier_expect(full + 8 * stage, kBlocks * now);
                u8* to = ring + stage * stage_bytes();
#pragma unroll
                for (int b = 0; b < kBlocks; b++) {
                    copy_bulk(shared_address(to + b * run_bytes()), from[b] + static_cast<i64>(at) * bytes, now, full + 8 * stage);
                }
                next();
                again |= stage == 0;
            }
        }
    }
#endif
};

#if __CUDA_ARCH__ < 900
// A warp's own copies.
template <int kBlocks, class Runs>
struct StageCopies {
    Stages<kBlocks> stages;  // the next one to fill
    Runs runs;
    int records, warp, lane, at;
    const u8* from[kBlocks];

    __device__ __forceinline__ StageCopies(const Stages<kBlocks>& stages_, Runs runs_, int records_, int warp_, int lane_)
        : stages(stages_), runs(runs_), records(records_), warp(warp_), lane(lane_), at(records_) {}

    // Starts to fill the next stage, if there is something left.
    __device__ __forceinline__ void start() {
        const int depth = kStageWarps * stage_depth(stages.format), bytes = record_bytes(stages.format);
        if (at < records || runs(from)) {
            if (at >= records) at = 0;
            u8* to = stages.ring + stages.stage * stages.stage_bytes();
#pragma unroll
            for (int b = 0; b < kBlocks; b++) {
                for (int i = warp; i < min(depth, records - at); i += kStageWarps) {
                    const u8* record = from[b] + static_cast<i64>(at + i) * bytes;
                    u8* place = to + b * stages.run_bytes() + i * bytes;
                    for (int byte = 16 * lane; byte < bytes; byte += 16 * 32) {
                        copy_async(shared_address(place + byte), record + byte, true);
                    }
                }
            }
            at += depth;
            stages.next();
        }
        copy_commit();
    }

    __device__ __forceinline__ void begin() {
        for (int i = 0; i < stages.count; i++) start();
    }

    // Waits for the oldest.
    __device__ __forceinline__ void wait() const {
        if (stages.count == 2) {
            copy_wait<1>();
        } else if (stages.count == 3) {
            copy_wait<2>();
        } else {
            copy_wait<3>();
        }
        __syncwarp();
    }
};
#endif
