// A warp's records of packed weights, brought into shared memory ahead of their use.
//
// A ring of chunks for each warp; a chunk holds some records of each of kBlocks row blocks, every kWarps-th of them. On sm_90 and newer one lane
// starts bulk copies and all wait at a barrier that counts bytes; before, every lane copies 16 bytes at a time. Enough is
// on its way that the memory is busy, whatever the warps compute.
#pragma once
#include "common/weight.cuh"
#include "ptx/bulk.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

// Chunks of a ring.
constexpr int kChunks = 2;

// Records of a chunk: about 2 KiB.
__host__ __device__ constexpr int chunk_records(int format) {
    return format == kBf16 ? 1 : format == kFp8 || format == kW8 ? 2 : 4;
}

// Shared memory of the rings of all warps, barriers behind them.
__host__ __device__ constexpr int ring_bytes(int format, int warps, int blocks) {
    return warps * kChunks * (blocks * chunk_records(format) * record_bytes(format) + 16);
}

template <int kFormat, int kWarps, int kBlocks>
struct WeightStream {
    static constexpr int kRecords = chunk_records(kFormat), kBytes = record_bytes(kFormat);
    static constexpr int kRun = kRecords * kBytes, kPlace = kBlocks * kRun;

    u8* ring;                  // this warp's chunks
    u32 barriers;              // this warp's barriers
    const u8* from[kBlocks];   // the warp's first record of each row block
    int count;                 // its records of a row block
    int lane;

    // `shared` holds ring_bytes; all warps call this together.
    __device__ __forceinline__ WeightStream(u8* shared, int warp, int lane_) : lane(lane_) {
        ring = shared + warp * kChunks * kPlace;
        barriers = shared_address(shared + kWarps * kChunks * kPlace) + warp * kChunks * 8;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < kChunks; i++) barrier_init(barriers + 8 * i);
            barrier_init_fence();
        }
        __syncwarp();
#endif
    }

    // Starts the copy of a chunk into its place of the ring.
    __device__ __forceinline__ void start(int chunk) const {
        const int records = min(kRecords, count - chunk * kRecords);
        const int place = chunk % kChunks;
        u8* target = ring + place * kPlace;
        const i64 offset = static_cast<i64>(chunk) * kRecords * kWarps * kBytes;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            barrier_expect(barriers + 8 * place, kBlocks * records * kBytes);
#pragma unroll
            for (int b = 0; b < kBlocks; b++) {
                for (int u = 0; u < records; u++) {
                    const u8* record = from[b] + offset + static_cast<i64>(u) * kWarps * kBytes;
                    copy_bulk(shared_address(target + b * kRun + u * kBytes), record, kBytes, barriers + 8 * place);
                }
            }
        }
#else
#pragma unroll
        for (int b = 0; b < kBlocks; b++) {
            for (int u = 0; u < records; u++) {
                const u8* record = from[b] + offset + static_cast<i64>(u) * kWarps * kBytes;
                for (int at = 16 * lane; at < kBytes; at += 16 * 32) {
                    copy_async(shared_address(target + b * kRun + u * kBytes + at), record + at, true);
                }
            }
        }
#endif
    }

    // Starts as many chunks as the ring holds.
    __device__ __forceinline__ void begin() const {
#pragma unroll
        for (int i = 0; i < kChunks; i++) {
            if (i * kRecords < count) start(i);
#if __CUDA_ARCH__ < 900
            copy_commit();
#endif
        }
    }

    // Waits for a chunk and says where it is.
    __device__ __forceinline__ const u8* wait(int chunk) const {
#if __CUDA_ARCH__ >= 900
        barrier_wait(barriers + 8 * (chunk % kChunks), chunk / kChunks & 1);
#else
        copy_wait<kChunks - 1>();
        __syncwarp();
#endif
        return ring + chunk % kChunks * kPlace;
    }

    // Gives a chunk's place free and fills it with a later one, if there is one.
    __device__ __forceinline__ void refill(int chunk) const {
        __syncwarp();
        if ((chunk + kChunks) * kRecords < count) start(chunk + kChunks);
#if __CUDA_ARCH__ < 900
        copy_commit();
#endif
    }
};
