// Ragged batches: the segment table of ninfer-core's `segment` module.
#pragma once
#include "common/types.cuh"

// One segment; rows `row .. row + len` are positions `start ..` of the sequence in `slot`.
struct Segment {
    int slot, start, row, len, fold, bank;

    // Position to which the recurrent state in memory belongs; 0 means zeros.
    __device__ int base() const { return start - fold; }
};

// `BatchArg` of src/cuda/batch.rs.
struct Batch {
    const int* table;
    i64 stride;
    int segments;
    int rows;
    int step;  // 1 for the Step profile, 0 for Prefill
    int unused;

    __device__ Segment segment(int i) const {
        const int* w = table + i * stride;
        return {w[0], w[1], w[2], w[3], w[4], w[5]};
    }

    // Segment of a row, or -1 for padding.
    __device__ int find(int row) const {
        for (int i = 0; i < segments; i++) {
            const int* w = table + i * stride;
            if (row >= w[2] && row < w[2] + w[3]) return i;
        }
        return -1;
    }
};
