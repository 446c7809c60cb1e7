// targets: sm_80
// How fast the memory of the device is: fill, copy, read. 16 bytes a thread and step, four of them in flight.
//
// Grid: any number of blocks of 256 threads, each with a contiguous share of the bytes. No shared memory.
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kAhead = 4;

// `ProbeArg` of src/cuda/bandwidth.rs.
struct Probe {
    const uint4* from;
    uint4* to;
    u32* sink;
    i64 share;  // of a block, in units of 16 bytes; a multiple of kThreads · kAhead
};

// Words that are not all equal.
extern "C" __global__ void __launch_bounds__(kThreads) probe_fill(const __grid_constant__ Probe a) {
    const i64 first = blockIdx.x * a.share;
    for (i64 i = first + threadIdx.x; i < first + a.share; i += kThreads) {
        const u32 x = static_cast<u32>(i) * 2654435761u;
        a.to[i] = {x, x ^ 0x5bd1e995u, x + 1, ~x};
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) probe_copy(const __grid_constant__ Probe a) {
    const i64 first = blockIdx.x * a.share;
    for (i64 i = first + threadIdx.x; i < first + a.share; i += kThreads * kAhead) {
        uint4 v[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; j++) v[j] = __ldcs(a.from + i + j * kThreads);
#pragma unroll
        for (int j = 0; j < kAhead; j++) a.to[i + j * kThreads] = v[j];
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) probe_read(const __grid_constant__ Probe a) {
    const i64 first = blockIdx.x * a.share;
    uint4 sum = {0, 0, 0, 0};
    for (i64 i = first + threadIdx.x; i < first + a.share; i += kThreads * kAhead) {
        uint4 v[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; j++) v[j] = __ldcs(a.from + i + j * kThreads);
#pragma unroll
        for (int j = 0; j < kAhead; j++) sum.x ^= v[j].x, sum.y ^= v[j].y, sum.z ^= v[j].z, sum.w ^= v[j].w;
    }
    // Depends on everything that was read, and never happens for the words of probe_fill in practice.
    if ((sum.x & sum.y & sum.z & sum.w) == 0xffffffffu) *a.sink = sum.x;
}
