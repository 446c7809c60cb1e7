// Pairs of tokens and experts of a step of few tokens.
#pragma once
#include "common/types.cuh"

// Most tokens and pairs of a step that is grouped where it is used.
constexpr int kStepColumns = 8;
constexpr int kStepPairs = 64;

// The distinct experts of a step in order of their first pair, and the pairs of each; a token chooses an expert once, so
// they are at most as many as tokens.
struct ExpertGroups {
    int count;
    int choice[kStepPairs];
    int first[2];
    int expert[kStepPairs];
    int members[kStepPairs];
    int pair[kStepPairs][kStepColumns];

    // All threads of the block call it; at least kStepPairs of them.
    __device__ __forceinline__ void find(const Matrix<const int>& experts, int columns, int k, int limit) {
        if (columns * k <= 32) {
            if (threadIdx.x < 32) find_by_warp(experts, columns * k, k, limit);
            __syncthreads();
        } else {
            find_by_block(experts, columns, k, limit);
        }
    }

    __device__ __forceinline__ void find_by_warp(const Matrix<const int>& experts, int pairs, int k, int limit) {
        const int p = threadIdx.x;
        int mine = p < pairs ? experts.row(p / k)[p % k] : -1;
        if (mine >= limit) mine = -1;
        const u32 same = __match_any_sync(kAllLanes, mine);
        const bool leads = mine >= 0 && __ffs(same) - 1 == p;
        const u32 leaders = __ballot_sync(kAllLanes, leads);
        choice[p] = mine < 0 ? -1 : mine;
        if (p == 0) count = __popc(leaders);
        if (!leads) return;
        const int place = __popc(leaders & ((1u << p) - 1));
        expert[place] = mine;
        members[place] = min(__popc(same), kStepColumns);
        int n = 0;
        for (u32 rest = same; rest != 0 && n < kStepColumns; rest &= rest - 1) pair[place][n++] = __ffs(rest) - 1;
    }

    __device__ __forceinline__ void find_by_block(const Matrix<const int>& experts, int columns, int k, int limit) {
        const int p = threadIdx.x, pairs = columns * k;
        int mine = -1;
        if (p < pairs) {
            mine = experts.row(p / k)[p % k];
            if (mine < 0 || mine >= limit) mine = -1;
        }
        if (p < kStepPairs) choice[p] = mine;
        __syncthreads();
        bool leads = mine >= 0;
        for (int q = 0; q < p && leads && p < pairs; q++) leads = choice[q] != mine;
        const u32 votes = __ballot_sync(kAllLanes, leads && p < pairs);
        if (p < kStepPairs && p % 32 == 0) first[p / 32] = __popc(votes);
        __syncthreads();
        if (p == 0) count = first[0] + first[1];
        if (leads && p < pairs) {
            const int place = (p >= 32 ? first[0] : 0) + __popc(votes & ((1u << p % 32) - 1));
            int n = 0;
            for (int q = p; q < pairs && n < kStepColumns; q++) {
                if (choice[q] == mine) pair[place][n++] = q;
            }
            expert[place] = mine;
            members[place] = n;
        }
        __syncthreads();
    }
};
