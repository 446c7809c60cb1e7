// Copies to all blocks of a cluster, and barriers of its other blocks, one function each. Plain sm_90.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"

__device__ __forceinline__ int cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Arrives at the barrier that has this address in the block of this rank.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, int rank) {
    asm volatile(
        "{ .reg .u32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// As copy_bulk, to this place of every block of the mask, each of which counts the bytes at its own barrier.
__device__ __forceinline__ void copy_bulk_to(u32 shared, const void* global, u32 bytes, u32 barrier, u16 blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            shared),
        "l"(global), "r"(bytes), "r"(barrier), "h"(blocks)
        : "memory");
}
