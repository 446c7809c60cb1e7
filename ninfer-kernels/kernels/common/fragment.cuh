// A lane's share of a weight record in registers, and its decoding to the bf16 pairs of a matrix instruction.
//
// Integer codes become bf16 exactly: or-ing a code of up to 7 bits into 0x4300 gives 128 + code, from which the bias is
// subtracted. E4M3 and E2M1 codes become bf16 of a shifted exponent, which one exact multiplication moves into place.
#pragma once
#include "common/weight.cuh"
#include "ptx/memory.cuh"

// Where a lane finds one of its two rows: `r` is the row's half of its block.
struct RowPlace {
    const u8* record;
    int lane, r;
};

// (a & mask) | rest in one instruction, whatever of it is constant.
__device__ __forceinline__ u32 insert_bits(u32 a, u32 mask, u32 rest) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(rest));
    return d;
}

// (a & mask) | (b & other)
__device__ __forceinline__ u32 select_bits(u32 a, u32 mask, u32 b, u32 other) { return (a & mask) | (b & other); }

// a · b of two bf16 pairs, rounded; −0 is the addend that changes nothing.
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
    return d;
}

// a − b of two bf16 pairs.
__device__ __forceinline__ u32 subtract_pair(u32 a, u32 b) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(b), "r"(0xbf80bf80u), "r"(a));
    return d;
}

// Records are read from wherever they are, global or shared memory.
__device__ __forceinline__ u32 load_word(const u8* p) { return *reinterpret_cast<const u32*>(p); }
__device__ __forceinline__ uint2 load_two_words(const u8* p) { return *reinterpret_cast<const uint2*>(p); }
__device__ __forceinline__ uint4 load_four_words(const u8* p) { return *reinterpret_cast<const uint4*>(p); }

__device__ __forceinline__ void load_f16_pair(const u8* p, float (&scale)[2]) {
    const u32 bits = load_word(p);
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&bits));
    scale[0] = both.x, scale[1] = both.y;
}

__device__ __forceinline__ float load_f16(const u8* p) { return __half2float(*reinterpret_cast<const __half*>(p)); }

// Codes and scales of a lane for both of its rows. `kSums` partial sums a record get a scale of their own (0: none).
template <int kFormat>
struct Fragment;

template <>
struct Fragment<kBf16> {
    static constexpr int kSums = 0;
    uint4 v[2][2];

    __device__ __forceinline__ void load(const u8* record, int lane) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i / 2][i % 2] = load_four_words(record + 512 * i + 16 * lane);
    }
    __device__ __forceinline__ void load_row(int r, RowPlace p) {
        for (int s = 0; s < 2; s++) v[s][r] = load_four_words(p.record + 512 * (2 * s + p.r) + 16 * p.lane);
    }
    __device__ __forceinline__ void decode(int s, int r, u32 (&w)[4]) const {
        w[0] = v[s][r].x, w[1] = v[s][r].y, w[2] = v[s][r].z, w[3] = v[s][r].w;
    }
    __device__ __forceinline__ float scale(int, int) const { return 1.0f; }
};

template <>
struct Fragment<kFp8> {
    static constexpr int kSums = 0;
    u32 v[2][2][2];

    __device__ __forceinline__ void load(const u8* record, int lane) {
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const uint4 q = load_four_words(record + 512 * s + 16 * lane);
            v[s][0][0] = q.x, v[s][0][1] = q.y, v[s][1][0] = q.z, v[s][1][1] = q.w;
        }
    }
    __device__ __forceinline__ void load_row(int r, RowPlace p) {
        for (int s = 0; s < 2; s++) {
            const uint2 q = load_two_words(p.record + 512 * s + 16 * p.lane + 8 * p.r);
            v[s][r][0] = q.x, v[s][r][1] = q.y;
        }
    }
    __device__ __forceinline__ void decode(int s, int r, u32 (&w)[4]) const {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u32 first = v[s][r][j], second = first << 8;
            // Exponent and mantissa at bits 10..4: the value times 2^-120.
            w[2 * j] = multiply_pair(select_bits(first >> 4, 0x07f007f0u, first, 0x80008000u), 0x7b807b80u);
            w[2 * j + 1] = multiply_pair(select_bits(second >> 4, 0x07f007f0u, second, 0x80008000u), 0x7b807b80u);
        }
    }
    __device__ __forceinline__ float scale(int, int) const { return 1.0f; }
};

template <>
struct Fragment<kNvfp4> {
    static constexpr int kSums = 0;
    u32 v[2][2];
    u32 scales;  // E4M3 bytes 2s + r

    __device__ __forceinline__ void load(const u8* record, int lane) {
        const uint4 q = load_four_words(record + 16 * lane);
        v[0][0] = q.x, v[0][1] = q.y, v[1][0] = q.z, v[1][1] = q.w;
        scales = load_word(record + 512 + 4 * (8 * (lane % 4 / 2) + lane / 4));
        // Sign-free bytes, spread so that two of them are the exponent and mantissa bits of a bf16 pair: done in decode.
    }
    __device__ __forceinline__ void load_row(int r, RowPlace p) {
        if (r == 0) scales = 0;
        for (int s = 0; s < 2; s++) {
            v[s][r] = load_word(p.record + 16 * p.lane + 8 * s + 4 * p.r);
            const u32 code = p.record[512 + 4 * (8 * (p.lane % 4 / 2) + p.lane / 4) + 2 * s + p.r];
            scales |= code << (8 * (2 * s + r));
        }
    }
    __device__ __forceinline__ void decode(int s, int r, u32 (&w)[4]) const {
        const u32 code = scales >> (8 * (2 * s + r)) & 0x7f;
        // The scale times 2^-120, then exactly times 2^120 and 2^118: two steps, since bf16 ends at 2^127.
        const u32 factor = multiply_pair(multiply_pair(code << 4 | code << 20, 0x7b807b80u), 0x7a807a80u);
        const u32 word = v[s][r];
#pragma unroll
        for (int p = 0; p < 4; p++) {
            // Bits 8..6 hold the value times 2^-126; with the factor's 2^118 the product is 2^-8 times the weight.
            const u32 low = p == 0 ? word << 6 : p == 1 ? word << 2 : word >> (4 * p - 6);
            const u32 sign = word << (12 - 4 * p);
            w[p] = multiply_pair(select_bits(low, 0x01c001c0u, sign, 0x80008000u), factor);
        }
    }
    __device__ __forceinline__ float scale(int, int) const { return 1.0f; }
};

// Q4, Q5, Q6: low nibbles, and high bits where there are any.
template <int kFormat>
struct Fragment {
    static_assert(kFormat == kQ4 || kFormat == kQ5 || kFormat == kQ6, "a format of its own");
    static constexpr int kSums = 1;
    static constexpr int kScales = kFormat == kQ4 ? 512 : kFormat == kQ5 ? 640 : 768;
    // 128 + bias as a bf16 pair.
    static constexpr u32 kBias = kFormat == kQ4 ? 0x43084308u : kFormat == kQ5 ? 0x43104310u : 0x43204320u;
    u32 v[2][2];
    u32 high[2][2];  // Q5: [0][r] for both s; Q6: [s][r]
    float factor[2];

    __device__ __forceinline__ void load(const u8* record, int lane) {
        const uint4 q = load_four_words(record + 16 * lane);
        v[0][0] = q.x, v[0][1] = q.y, v[1][0] = q.z, v[1][1] = q.w;
        if constexpr (kFormat == kQ5) {
            const u32 h = load_word(record + 512 + 4 * lane);
            high[0][0] = h, high[0][1] = h >> 4;
        }
        if constexpr (kFormat == kQ6) {
            const uint2 h = load_two_words(record + 512 + 8 * lane);
            high[0][0] = h.x, high[0][1] = h.x >> 8, high[1][0] = h.y, high[1][1] = h.y >> 8;
        }
        load_f16_pair(record + kScales + 4 * (lane / 4), factor);
    }
    __device__ __forceinline__ void load_row(int r, RowPlace p) {
        for (int s = 0; s < 2; s++) {
            v[s][r] = load_word(p.record + 16 * p.lane + 8 * s + 4 * p.r);
            if constexpr (kFormat == kQ6) high[s][r] = load_word(p.record + 512 + 8 * p.lane + 4 * s) >> (8 * p.r);
        }
        if constexpr (kFormat == kQ5) high[0][r] = load_word(p.record + 512 + 4 * p.lane) >> (4 * p.r);
        factor[r] = load_f16(p.record + kScales + 2 * (2 * (p.lane / 4) + p.r));
    }
    __device__ __forceinline__ void decode(int s, int r, u32 (&w)[4]) const {
#pragma unroll
        for (int p = 0; p < 4; p++) {
            u32 rest = 0x43004300u;
            if constexpr (kFormat == kQ5) {
                const int at = 8 * s + p;
                rest = insert_bits(at < 4 ? high[0][r] << (4 - at) : high[0][r] >> (at - 4), 0x00100010u, rest);
            }
            if constexpr (kFormat == kQ6) {
                const int at = 2 * p;
                rest = insert_bits(at < 4 ? high[s][r] << (4 - at) : high[s][r] >> (at - 4), 0x00300030u, rest);
            }
            w[p] = subtract_pair(insert_bits(v[s][r] >> (4 * p), 0x000f000fu, rest), kBias);
        }
    }
    __device__ __forceinline__ float scale(int, int r) const { return factor[r]; }
};

template <>
struct Fragment<kW8> {
    static constexpr int kSums = 2;
    u32 v[2][2][2];
    float factor[2][2];

    __device__ __forceinline__ void load(const u8* record, int lane) {
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const uint4 q = load_four_words(record + 512 * s + 16 * lane);
            v[s][0][0] = q.x, v[s][0][1] = q.y, v[s][1][0] = q.z, v[s][1][1] = q.w;
            load_f16_pair(record + 1024 + 32 * s + 4 * (lane / 4), factor[s]);
        }
    }
    __device__ __forceinline__ void load_row(int r, RowPlace p) {
        for (int s = 0; s < 2; s++) {
            const uint2 q = load_two_words(p.record + 512 * s + 16 * p.lane + 8 * p.r);
            v[s][r][0] = q.x, v[s][r][1] = q.y;
            factor[s][r] = load_f16(p.record + 1024 + 32 * s + 2 * (2 * (p.lane / 4) + p.r));
        }
    }
    __device__ __forceinline__ void decode(int s, int r, u32 (&w)[4]) const {
#pragma unroll
        for (int p = 0; p < 4; p++) {
            // Two's complement: the low seven bits less 128 times the sign bit, which makes 128 into 256.
            const u32 bytes = v[s][r][p / 2] >> (8 * (p % 2));
            w[p] = subtract_pair(insert_bits(bytes, 0x007f007fu, 0x43004300u), insert_bits(bytes, 0x00800080u, 0x43004300u));
        }
    }
    __device__ __forceinline__ float scale(int s, int r) const { return factor[s][r]; }
};

// What the result of a row is multiplied by, besides its row scale.
__host__ __device__ constexpr float format_factor(int format) { return format == kNvfp4 ? 256.0f : 1.0f; }
