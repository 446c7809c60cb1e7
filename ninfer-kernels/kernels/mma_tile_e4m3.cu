// targets: sm_89
// local memory: mma_tile_e4m3: twenty bytes on sm_90 and sm_100, which take other kernels for E4M3
// Products of many tokens in E4M3: weights of E4M3 codes, tokens as E4M3 codes with a scale each.
//
// A step is 128 columns, two records of each row block: the sum over them, times the scale of the 128×128 block if there
// is one, is added to the sum over K in f32, because matrix units keep fewer bits.
//
// The codes of a row of x are in the order of a record's (common/weight.cuh): byte 64 b + 16 t + 8 s + 4 j + i of a row
// is column 64 b + 32 s + 8 t + 4 j + (2, 0, 3, 1)[i].
#include "common/mma_tile.cuh"
#include "ptx/mma_fp8.cuh"

constexpr int kRecord = record_bytes(kFp8);

extern "C" __global__ void __launch_bounds__(kTileThreads, 2) mma_tile_e4m3(const __grid_constant__ TileProduct a) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32;
    grid_launch_next();
    grid_wait();
    TilePlace p;
    if (!find_tile(a, threadIdx.x / 32, p)) return;
    const Weight& w = p.part->weight;
    const TileRing<128, 2 * kRecord> ring(a, p, shared, kRecord);
    const int steps = divide_up(w.cols, 128);
    const float* scales[2];
#pragma unroll
    for (int b = 0; b < 2; b++) scales[b] = w.block_scale + static_cast<i64>(p.block[b]) * steps * 16 + lane / 4;

    float sum[2][16][4] = {};
    run_ring(ring, steps, steps, a.stages, [&](const u8* place, int step) {
        float factor[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
        if (w.block_scale != nullptr) {
#pragma unroll
            for (int i = 0; i < 4; i++) factor[i / 2][i % 2] = scales[i / 2][step * 16 + 8 * (i % 2)];
        }
        u32 weights[2][2][2][4];  // row block, record, half
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int b = i / 4, half = i / 2 % 2, s = i % 2;
            const uint4 q = *reinterpret_cast<const uint4*>(ring.records(place, b) + kRecord * half + 512 * s + 16 * lane);
            u32(&to)[4] = weights[b][half][s];
            to[0] = q.x, to[1] = q.z, to[2] = q.y, to[3] = q.w;
        }
        const u8* tokens[2] = {ring.tokens(place, 0), ring.tokens(place, 1)};
#pragma unroll
        for (int n0 = 0; n0 < 16; n0 += kGroup) {
            if (8 * n0 >= p.count) break;
#pragma unroll
            for (int n = n0; n < n0 + kGroup; n++) {
                float partial[2][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const uint4 x = load_token(tokens[half], n, 128);
#pragma unroll
                    for (int b = 0; b < 2; b++) {
                        if (half == 0) {
                            mma_e4m3_first(partial[b], weights[b][half][0], x.x, x.y);
                        } else {
                            mma_e4m3(partial[b], weights[b][half][0], x.x, x.y);
                        }
                    }
#pragma unroll
                    for (int b = 0; b < 2; b++) mma_e4m3(partial[b], weights[b][half][1], x.z, x.w);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float& total = sum[i / 4][n][i % 4];
                    total = fmaf(factor[i / 4][i / 2 % 2], partial[i / 4][i % 4], total);
                }
            }
        }
    });
    finish_tile(a, p, 1.0f, sum, shared + kTable);
}

// `CodesArg` of src/cuda/mma_tile.rs.
struct Codes {
    Matrix<u8> x;      // staged rows; the stride counts bytes
    const int* tiles;  // rows of pairs in the tiles of experts, or null: all rows
    const int* order;
    int cols;
    int width;  // pairs of a tile at most
};

// A row of bf16 values that are E4M3 numbers becomes their codes, zeros behind the last column. One block a row; shared
// memory: the codes.
extern "C" __global__ void __launch_bounds__(256) e4m3_rows(const __grid_constant__ Codes a) {
    extern __shared__ __align__(128) u8 shared[];
    grid_launch_next();
    grid_wait();
    int row = blockIdx.x;
    if (a.tiles != nullptr) {
        const int* tile = a.tiles + 4 * (row / a.width);
        const int place = row % a.width;
        if (place >= tile[2]) return;
        row = a.order[tile[1] + place];
    }
    u8* x = a.x.row(row);
    u32* codes = reinterpret_cast<u32*>(shared);
    const int stored = divide_up(a.cols, 64) * 64, words = divide_up(a.cols, 128) * 32;
    for (int q = threadIdx.x; q < words; q += 256) {
        const int c = 4 * q;
        u32 code[4] = {};
        if (c < stored) {
            const uint2 values = *reinterpret_cast<const uint2*>(x + 2 * c);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 pair = i / 2 == 0 ? values.x : values.y;
                const float value = i % 2 == 0 ? low_float(pair) : high_float(pair);
                // The number times 2^-120 has exponent and fraction where a code has them, 20 bits higher.
                const u32 bits = __float_as_uint(value * 0x1p-120f);
                code[i] = bits >> 20 & 0x7f | bits >> 24 & 0x80;
            }
        }
        const int s = c % 64 / 32, t = c % 32 / 8, j = c % 8 / 4;
        codes[(c / 64 * 64 + 16 * t + 8 * s + 4 * j) / 4] = code[2] | code[0] << 8 | code[3] << 16 | code[1] << 24;
    }
    __syncthreads();
    for (int q = threadIdx.x; q < words; q += 256) reinterpret_cast<u32*>(x)[q] = codes[q];
}
