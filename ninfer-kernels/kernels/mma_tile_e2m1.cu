// targets: sm_80 sm_120f
// Products of many tokens in E2M1: NVFP4 weights, tokens as E2M1 codes with an E4M3 scale for 16 columns and one f32 scale.
//
// A step is 128 columns, two records of each row block; the sum over them is added to the sum over K in f32.
//
// The codes of a row of x are nibbles in the order of a record's (common/weight.cuh): byte 64 b + 16 t + 8 h + 4 s of a row
// is the word of columns 128 b + 64 h + 32 s + 8 t + (0..7), column 2p in nibble p, 2p + 1 in nibble 4 + p. Behind the
// codes of all columns, which are a multiple of 128, byte c is the scale of columns 16 c .. +15.
#include "common/mma_tile.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_fp4.cuh"

constexpr int kRecord = record_bytes(kNvfp4);

extern "C" __global__ void __launch_bounds__(kTileThreads, 2) mma_tile_e2m1(const __grid_constant__ TileProduct a) {
    extern __shared__ __align__(128) u8 shared[];
    const int lane = threadIdx.x % 32, g = lane / 4;
    grid_launch_next();
    grid_wait();
    TilePlace p;
    if (!find_tile(a, threadIdx.x / 32, p)) return;
    const Weight& w = p.part->weight;
    const int steps = divide_up(w.cols, 128);
    TileRing<64, 2 * kRecord, 8> ring(a, p, shared, kRecord);
    ring.scales = 64 * steps;

    float sum[2][16][4] = {};
    run_ring(ring, steps, steps, a.stages, [&](const u8* place, int) {
        u32 weights[2][2][4], scales[2][2];  // row block, record
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int b = i / 2, half = i % 2;
            const u8* record = ring.records(place, b) + kRecord * half;
            const uint4 q = *reinterpret_cast<const uint4*>(record + 16 * lane);
            u32(&to)[4] = weights[b][half];
            to[0] = q.x, to[1] = q.y, to[2] = q.z, to[3] = q.w;
            const u32 first = *reinterpret_cast<const u32*>(record + 512 + 4 * g);
            const u32 second = *reinterpret_cast<const u32*>(record + 544 + 4 * g);
            // Bytes 2s + r of the words of columns 32s + 0..15 and 32s + 16..31; odd lanes have row g + 8.
            scales[b][half] = choose_bytes(first, second, lane % 2 == 0 ? 0x6240 : 0x7351);
        }
        const u8* tokens = ring.tokens(place, 0);
#pragma unroll
        for (int n0 = 0; n0 < 16; n0 += kGroup) {
            if (8 * n0 >= p.count) break;
#pragma unroll
            for (int n = n0; n < n0 + kGroup; n++) {
                const uint4 x = load_token(tokens, n, 64);
                const uint2 s = *reinterpret_cast<const uint2*>(ring.token_scales(place) + 8 * (8 * n + g));
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    float partial[4] = {};
                    mma_e2m1(partial, weights[b][0], scales[b][0], x.x, x.y, s.x);
                    mma_e2m1(partial, weights[b][1], scales[b][1], x.z, x.w, s.y);
#pragma unroll
                    for (int i = 0; i < 4; i++) sum[b][n][i] += partial[i];
                }
            }
        }
    });
    finish_tile(a, p, 1.0f, sum, shared + kTable);
}

namespace {

// Code of an E2M1 number x ≥ 0; of any other x it is that of one nearby.
__device__ __forceinline__ u32 e2m1_code(float x) {
    // Twice the value is 0, 1, 2, 3, 4, 6, 8 or 12; the exponent and one bit of fraction are the code.
    return x < 1.0f ? static_cast<u32>(rintf(2.0f * x)) : (__float_as_uint(fminf(x, 6.0f)) + 0x1fffffu >> 22) - 252u;
}

}  // namespace

// `CodesArg` of src/cuda/mma_tile.rs.
struct Codes {
    Matrix<u8> x;      // staged rows; the stride counts bytes
    const int* tiles;  // rows of pairs in the tiles of experts, or null: all rows
    const int* order;
    int cols;
    int width;  // pairs of a tile at most
};

// A row of bf16 values, each an E2M1 number times an E4M3 number of its 16 columns, becomes codes and scales. A group may
// have several pairs of these with the same products; any of them does. One block a row; shared memory: codes and scales.
extern "C" __global__ void __launch_bounds__(256) e2m1_rows(const __grid_constant__ Codes a) {
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
    const int stored = divide_up(a.cols, 64) * 64, groups = divide_up(a.cols, 128) * 8;
    u8* scales = shared + 8 * groups;
    for (int group = threadIdx.x; group < groups; group += 256) {
        const int c = 16 * group, count = c < stored ? 16 : 0;
        auto value = [&](int i) { return to_float(reinterpret_cast<const bf16*>(x)[c + i]); };
        float most = 0.0f;
#pragma unroll 1
        for (int i = 0; i < count; i++) most = fmaxf(most, fabsf(value(i)));
        // The largest code of a group is one of seven.
        float scale = 0.0f;
        if (most > 0.0f) {
#pragma unroll 1
            for (int m = 7; m > 0; m--) {
                const float s = most / e2m1_value(m);
                const u32 bits = __float_as_uint(s * 0x1p-120f);
                bool fits = s <= 448.0f && (bits & 0xfffffu) == 0;
#pragma unroll 1
                for (int i = 0; i < 16; i++) {
                    const float v = fabsf(value(i));
                    fits = fits && e2m1_value(e2m1_code(v / s)) * s == v;
                }
                if (fits) {
                    scale = s;
                    break;
                }
            }
        }
        u32 word[2] = {0, 0};
        if (scale > 0.0f) {
#pragma unroll 1
            for (int p = 0; p < 8; p++) {
                const int place = 4 * (p / 2 + 4 * (p % 2));
                const float low = value(p), high = value(8 + p);
                word[0] |= (e2m1_code(fabsf(low) / scale) | __float_as_uint(low) >> 28 & 8) << place;
                word[1] |= (e2m1_code(fabsf(high) / scale) | __float_as_uint(high) >> 28 & 8) << place;
            }
        }
        const int t = c % 32 / 8;
        u32* to = reinterpret_cast<u32*>(shared + c / 128 * 64 + c % 128 / 64 * 8 + c % 64 / 32 * 4);
        to[4 * t] = word[0], to[4 * t + 4] = word[1];
        scales[group] = static_cast<u8>(__float_as_uint(scale * 0x1p-120f) >> 20);
    }
    __syncthreads();
    const int words = 9 * groups / 4;
    for (int q = threadIdx.x; q < words; q += 256) reinterpret_cast<u32*>(x)[q] = reinterpret_cast<const u32*>(shared)[q];
}
