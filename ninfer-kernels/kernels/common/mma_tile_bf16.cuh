// Products of many tokens in bf16, for records of every format: kernels mma_tile_<format>.
//
// Weights are bf16(code · scale): the value of the format, rounded once. E4M3 codes with a scale for the row or the
// matrix, E2M1 codes with their group's E4M3 scale, and bf16 elements are exact; what they are multiplied by besides goes
// to the sum. A step is one record of each row block and 64 columns of each token.
#pragma once
#include "common/fragment.cuh"
#include "common/mma_tile.cuh"

namespace {

// a · b + c of bf16 pairs, rounded once.
__device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ u32 scale_pair(u32 pair, float scale) {
    return pack_bf16(low_float(pair) * scale, high_float(pair) * scale);
}

// A lane's half s of a record, as half 0 of a fragment.
template <int kFormat>
__device__ __forceinline__ void load_half(Fragment<kFormat>& f, const u8* record, int lane, int s) {
    if constexpr (kFormat == kBf16) {
#pragma unroll
        for (int r = 0; r < 2; r++) f.v[0][r] = load_four_words(record + 1024 * s + 512 * r + 16 * lane);
    } else if constexpr (kFormat == kFp8 || kFormat == kW8) {
        const uint4 q = load_four_words(record + 512 * s + 16 * lane);
        f.v[0][0][0] = q.x, f.v[0][0][1] = q.y, f.v[0][1][0] = q.z, f.v[0][1][1] = q.w;
        if constexpr (kFormat == kW8) load_f16_pair(record + 1024 + 32 * s + 4 * (lane / 4), f.factor[0]);
    } else {
        const uint2 q = load_two_words(record + 16 * lane + 8 * s);
        f.v[0][0] = q.x, f.v[0][1] = q.y;
        if constexpr (kFormat == kNvfp4) {
            f.scales = load_word(record + 512 + 4 * (8 * (lane % 4 / 2) + lane / 4)) >> (16 * s);
        } else {
            if constexpr (kFormat == kQ5) {
                const u32 h = load_word(record + 512 + 4 * lane) >> (8 * s);
                f.high[0][0] = h, f.high[0][1] = h >> 4;
            }
            if constexpr (kFormat == kQ6) {
                const u32 h = load_word(record + 512 + 8 * lane + 4 * s);
                f.high[0][0] = h, f.high[0][1] = h >> 8;
            }
            load_f16_pair(record + Fragment<kFormat>::kScales + 4 * (lane / 4), f.factor);
        }
    }
}

// Columns 32s + 8t + (0..7) of rows g (r = 0) or g + 8 (r = 1) as bf16, scaled by what belongs to their group.
template <int kFormat>
__device__ __forceinline__ void decode_half(const Fragment<kFormat>& f, int r, bool blocks, const float (&block)[2], u32 (&w)[4]) {
    f.decode(0, r, w);
    if constexpr (Fragment<kFormat>::kSums == 1) {
        // The f16 scale in two bf16: its leading bits, and at most three more, whose product with a code is exact.
        const float scale = f.scale(0, r), leading = to_float(to_bf16(scale));
        const u32 high = pack_bf16(leading, leading), low = pack_bf16(scale - leading, scale - leading);
#pragma unroll
        for (int p = 0; p < 4; p++) w[p] = fma_pair(w[p], high, multiply_pair(w[p], low));
    }
    if constexpr (Fragment<kFormat>::kSums == 2) {
#pragma unroll
        for (int p = 0; p < 4; p++) w[p] = scale_pair(w[p], f.scale(0, r));
    }
    if constexpr (kFormat == kFp8) {
        if (blocks) {
#pragma unroll
            for (int p = 0; p < 4; p++) w[p] = scale_pair(w[p], block[r]);
        }
    }
}

template <int kFormat>
__device__ __forceinline__ void mma_tile(const TileProduct& a) {
    extern __shared__ __align__(128) u8 shared[];
    constexpr int kRun = record_bytes(kFormat);
    const int lane = threadIdx.x % 32;
    grid_launch_next();
    grid_wait();
    TilePlace p;
    if (!find_tile(a, threadIdx.x / 32, p)) return;
    const Weight& w = p.part->weight;
    const TileRing<128, kRun> ring(a, p, shared, kRun);
    const float* scales[2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
        scales[b] = w.block_scale + static_cast<i64>(p.block[b]) * divide_up(w.cols, 128) * 16 + lane / 4;
    }
    const bool blocks = kFormat == kFp8 && w.block_scale != nullptr;

    float sum[2][16][4] = {};
    run_ring(ring, w.blocks, divide_up(w.cols, 64), a.stages, [&](const u8* place, int step) {
        float block[2][2] = {};
        if (blocks) {
#pragma unroll
            for (int i = 0; i < 4; i++) block[i / 2][i % 2] = scales[i / 2][step / 2 * 16 + 8 * (i % 2)];
        }
#pragma unroll 1
        for (int s = 0; s < 2; s++) {
            u32 first[2][4], second[2][4];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                Fragment<kFormat> f;
                load_half(f, ring.records(place, b), lane, s);
                u32 w0[4], w1[4];
                decode_half(f, 0, blocks, block[b], w0);
                decode_half(f, 1, blocks, block[b], w1);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    first[b][2 * i] = w0[i], first[b][2 * i + 1] = w1[i];
                    second[b][2 * i] = w0[2 + i], second[b][2 * i + 1] = w1[2 + i];
                }
            }
            const u8* tokens = ring.tokens(place, s);
#pragma unroll
            for (int n0 = 0; n0 < 16; n0 += kGroup) {
                if (8 * n0 >= p.count) break;
#pragma unroll
                for (int n = n0; n < n0 + kGroup; n++) {
                    const uint4 x = load_token(tokens, n, 128);
#pragma unroll
                    for (int b = 0; b < 2; b++) mma_bf16(sum[b][n], first[b], x.x, x.y);
#pragma unroll
                    for (int b = 0; b < 2; b++) mma_bf16(sum[b][n], second[b], x.z, x.w);
                }
            }
        }
    });
    finish_tile(a, p, format_factor(kFormat), sum, shared + kTable);
}

}  // namespace

#define MMA_TILE_KERNEL(name, format) \
    extern "C" __global__ void __launch_bounds__(kTileThreads, 2) mma_tile_##name(const __grid_constant__ TileProduct a) { \
        mma_tile<format>(a); \
    }
