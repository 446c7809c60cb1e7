// targets: sm_90a
// Products of prompts of E4M3 codes (common/tile_e4m3.cuh), and the codes of the tokens.
#include "common/tile_e4m3.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) e4m3_tile_64(const __grid_constant__ CodeTiles a) {
    multiply_codes<64, 1>(a);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    e4m3_tile_128(const __grid_constant__ CodeTiles a) {
    multiply_codes<128, 2>(a);
}

// `CodesArg` of src/cuda/tile_e4m3.rs.
struct Codes {
    Matrix<u8> x;  // staged rows; the stride counts bytes
    int rows;
    int cols;
};

// Eight rows of bf16 values that are E4M3 numbers become their codes, in the order that common/tile_e4m3.cuh tells, zeros
// behind the last column. Grid: groups of rows; 512 threads; shared memory: the codes of a group.
extern "C" __global__ void __launch_bounds__(512) e4m3_groups(const __grid_constant__ Codes a) {
    extern __shared__ __align__(128) u8 shared[];
    grid_launch_next();
    grid_wait();
    u8* x = a.x.row(8 * static_cast<i64>(blockIdx.x));
    const int rows = min(8, a.rows - 8 * static_cast<int>(blockIdx.x));
    const int stored = divide_up(a.cols, 64) * 64, pieces = divide_up(a.cols, 128) * 16;
#pragma unroll 1
    for (int r = 0; r < rows; r++) {
        const u8* row = x + r * a.x.stride;
#pragma unroll 4
        for (int piece = threadIdx.x; piece < pieces; piece += 512) {
            uint4 values = {};
            if (8 * piece < stored) values = *reinterpret_cast<const uint4*>(row + 16 * piece);
            auto code = [](u32 pair, bool second) {
                // The number times 2^-120 has exponent and fraction where a code has them, 20 bits higher.
                const u32 bits = __float_as_uint((second ? high_float(pair) : low_float(pair)) * 0x1p-120f);
                return bits >> 20 & 0x7f | bits >> 24 & 0x80;
            };
            auto word = [&](u32 first, u32 second) {
                return code(second, false) | code(first, false) << 8 | code(second, true) << 16 | code(first, true) << 24;
            };
            const int q = piece % 16 / 4, t = piece % 4;
            u8* to = shared + (piece / 16 * rows + r) * 128 + 4 * t;
            *reinterpret_cast<u32*>(to + ((2 * q) ^ r) * 16) = word(values.x, values.y);
            *reinterpret_cast<u32*>(to + ((2 * q + 1) ^ r) * 16) = word(values.z, values.w);
        }
    }
    __syncthreads();
    const uint4* codes = reinterpret_cast<const uint4*>(shared);
    for (int i = threadIdx.x; i < rows * pieces / 2; i += 512) reinterpret_cast<uint4*>(x)[i] = codes[i];
}
