// targets: sm_80
// How fast the memory of the device is: fill, copy, read. 16 bytes a thread and step, four of them in flight.
//
// Grid: any number of blocks of 256 threads; best as many as are resident at once, since more would leave a part of the
// device idle at the end. The blocks advance through the bytes side by side. No shared memory.
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kAhead = 4;

// `ProbeArg` of src/cuda/bandwidth.rs.
struct Probe {
    const uint4* from;
    uint4* to;
    u32* sink;
    i64 steps;  // of all blocks together, each of kThreads · kAhead · 16 bytes
};

// Words that are not all equal.
extern "C" __global__ void __launch_bounds__(kThreads) probe_fill(const __grid_constant__ Probe a) {
    const i64 end = a.steps * kThreads * kAhead;
    for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < end; i += static_cast<i64>(gridDim.x) * kThreads) {
        const u32 x = static_cast<u32>(i) * 2654435761u;
        a.to[i] = {x, x ^ 0x5bd1e995u, x + 1, ~x};
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) probe_copy(const __grid_constant__ Probe a) {
    for (i64 step = blockIdx.x; step < a.steps; step += gridDim.x) {
        const i64 i = step * (kThreads * kAhead) + threadIdx.x;
        uint4 v[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; j++) v[j] = __ldcs(a.from + i + j * kThreads);
#pragma unroll
        for (int j = 0; j < kAhead; j++) __stcs(a.to + i + j * kThreads, v[j]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) probe_read(const __grid_constant__ Probe a) {
    uint4 sum = {0, 0, 0, 0};
    for (i64 step = blockIdx.x; step < a.steps; step += gridDim.x) {
        const i64 i = step * (kThreads * kAhead) + threadIdx.x;
        uint4 v[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; j++) v[j] = __ldcs(a.from + i + j * kThreads);
#pragma unroll
        for (int j = 0; j < kAhead; j++) sum.x ^= v[j].x, sum.y ^= v[j].y, sum.z ^= v[j].z, sum.w ^= v[j].w;
    }
    // Depends on everything that was read, and never happens for the words of probe_fill in practice.
    if ((sum.x & sum.y & sum.z & sum.w) == 0xffffffffu) *a.sink = sum.x;
}
