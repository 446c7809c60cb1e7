// targets: sm_80 sm_90
// Prompts of Gated DeltaNet with heads of 128 key and 128 value features and four taps, in chunks of 64 tokens on tensor
// cores. Per head and chunk, with the state S before it, G_i the sum of log decays up to token i:
//
//   A_ij = β_i e^(G_i − G_j) k̂_i·k̂_j for j < i      T = (I + A)⁻¹ diag(β)       W_ij = e^(G_i − G_j) q̂_i·k̂_j for j ≤ i
//   x_i = v_i − e^(G_i) Sᵀk̂_i       u = T x       o_i = e^(G_i) Sᵀq̂_i + Σ_j W_ij u_j       S ← e^(G_64) S + Σ_j e^(G_64 − G_j) k̂_j u_jᵀ
//
// This is the recurrence of gdn_delta.cu (the WY form of its Householder-like factors), so T has no large elements. Chunks
// end at positions that are multiples of 64, so that bits do not depend on where a prompt is split at such positions. Decays
// are always differences of sums, at most 0. All operands of products are f16, whose rounding is an eighth of that of bf16:
// keys and queries are normed, T and W small, values and states are scaled by 1/16 and limited to 10^6. Sums, the inverse
// and the state from chunk to chunk are f32. common/chunk_prepare.cuh computes keys, queries, values, T and W of all chunks
// at once, common/chunk_scan.cuh brings the state through them.
#include "common/chunk_prepare.cuh"
#include "common/chunk_scan.cuh"

extern __shared__ __align__(1024) uint4 shared_memory[];

extern "C" __global__ void __launch_bounds__(kChunkThreads, 2) gdn_chunk_prepare(const __grid_constant__ GdnChunks c) {
    prepare(c, *reinterpret_cast<PrepareShared*>(shared_memory));
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(kStrips, 1, 1)
#else
extern "C" __global__ void
#endif
    __launch_bounds__(kChunkThreads, 2) gdn_chunk_scan(const __grid_constant__ GdnChunks c) {
    scan(c, *reinterpret_cast<ScanShared*>(shared_memory));
}
