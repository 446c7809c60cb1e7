// Clusters of blocks, one function each instruction.
#pragma once
#include "common/types.cuh"

// All threads of all blocks of the cluster arrive, then all may pass; memory operations before the one are done for those
// behind the other.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes to the place in a block's shared memory that `place` has in this one's.
__device__ __forceinline__ void store_cluster(float* place, int rank, float value) {
    const u32 local = static_cast<u32>(__cvta_generic_to_shared(place));
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}
