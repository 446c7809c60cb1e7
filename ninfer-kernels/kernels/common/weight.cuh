// Packed weights in device memory, in the order in which lanes of a matrix instruction consume them.
//
// Rows are taken in blocks of 16, columns in blocks of 64; one record holds a block: [row block][column block][record].
// Lane l = 4g + t (g in 0..8, t in 0..4) works on rows g and g + 8 (r = 0, 1) and on columns 32s + 8t + i of the block
// (s in 0..2, i in 0..8), paired (2p, 2p + 1). With this choice of columns a lane's activations are 16 adjacent bytes for
// each s, and each format's codes for a lane are one vector:
//
//   Bf16   byte 512 (2s + r) + 16 l: eight elements
//   Fp8    byte 512 s + 16 l + 8 r: two words; word j holds columns 4j + 2, 4j, 4j + 3, 4j + 1 in bytes 0..3
//   Nvfp4  byte 16 l + 8 s + 4 r: a word, column 2p in nibble p, column 2p + 1 in nibble 4 + p; E4M3 scales from byte 512:
//          byte 4 (8 (t / 2) + g) + 2 s + r
//   Q4     as Nvfp4 with code + 8 in each nibble; f16 scales from byte 512: element 2 g + r
//   Q5     code + 16: low nibbles as Q4; fifth bits in word l from byte 512: with q = 4 (2s + r) + p column 2p in bit q,
//          2p + 1 in bit 16 + q; scales from byte 640
//   Q6     code + 32: low nibbles as Q4; two high bits in words 2 l + s from byte 512: with q = 4 r + p in bits 2q and
//          16 + 2q; scales from byte 768
//   W8     byte 512 s + 16 l + 8 r: two words; word j holds columns 4j, 4j + 2, 4j + 1, 4j + 3 in bytes 0..3; f16 scales
//          from byte 1024: element 16 s + 2 g + r
//
// Rows behind the last and columns behind the last are zeros. A Bf16 matrix may hold a second run of column blocks, the
// rounding error of the first, for weights stored with more than 8 significant bits.
#pragma once
#include "common/types.cuh"

enum Format { kBf16 = 0, kFp8 = 1, kNvfp4 = 2, kQ4 = 3, kQ5 = 4, kQ6 = 5, kW8 = 6 };

// `WeightArg` of src/cuda/weight.rs.
struct Weight {
    const u8* records;
    const float* row_scale;    // [rows padded to 16], or null: multiplies the sum of a row
    const float* block_scale;  // [row blocks][column blocks of 128][16], or null: multiplies the sum over 128 columns
    int rows, cols;
    int blocks;  // records of a row block
    int format;
};

__host__ __device__ constexpr int record_bytes(int format) {
    return format == kBf16    ? 2048
           : format == kFp8   ? 1024
           : format == kNvfp4 ? 576
           : format == kQ4    ? 544
           : format == kQ5    ? 672
           : format == kQ6    ? 800
                              : 1088;
}

// Column of a record for (s, t, i).
__device__ __forceinline__ int record_column(int s, int t, int i) { return 32 * s + 8 * t + i; }

__device__ __forceinline__ float e4m3_value(u32 code) {
    u32 bits = (code & 0x7f) << 20 | (code & 0x80) << 24;
    return __uint_as_float(bits) * 0x1p120f;
}

__device__ __forceinline__ float e2m1_value(u32 code) {
    u32 bits = (code & 7) << 22 | (code & 8) << 28;
    return __uint_as_float(bits) * 0x1p126f;
}

// One element, for rows that are looked up; slow.
__device__ inline float weight_element(const Weight& w, int row, int col) {
    const int block = col / 64, s = col % 64 / 32, t = col % 32 / 8, i = col % 8;
    const int g = row % 8, r = row % 16 / 8, lane = 4 * g + t;
    const int bytes = record_bytes(w.format);
    const int first = w.cols > 0 ? divide_up(w.cols, 64) : 0;
    const u8* record = w.records + (static_cast<i64>(row / 16) * w.blocks + block) * bytes;
    const int p = i / 2, odd = i % 2;
    float value = 0.0f;
    auto f16_at = [&](int byte) { return __half2float(*reinterpret_cast<const __half*>(record + byte)); };
    auto word_at = [&](int byte) { return *reinterpret_cast<const u32*>(record + byte); };
    const u32 nibble = w.format >= kNvfp4 && w.format <= kQ6
                           ? word_at(16 * lane + 8 * s + 4 * r) >> (4 * p + 16 * odd) & 15
                           : 0;
    switch (w.format) {
        case kBf16: {
            const int byte = 512 * (2 * s + r) + 16 * lane + 2 * i;
            value = to_float(*reinterpret_cast<const bf16*>(record + byte));
            if (w.blocks > first) {
                value += to_float(*reinterpret_cast<const bf16*>(record + static_cast<i64>(first) * bytes + byte));
            }
            break;
        }
        case kFp8: {
            const int j = i / 4, pair = i / 2 % 2;
            value = e4m3_value(record[512 * s + 16 * lane + 8 * r + 4 * j + (pair == 0 ? 1 : 0) + 2 * odd]);
            break;
        }
        case kNvfp4:
            value = e2m1_value(nibble) * e4m3_value(record[512 + 4 * (8 * (t / 2) + g) + 2 * s + r]);
            break;
        case kQ4: value = (static_cast<int>(nibble) - 8) * f16_at(512 + 2 * (2 * g + r)); break;
        case kQ5: {
            const u32 high = word_at(512 + 4 * lane) >> (4 * (2 * s + r) + p + 16 * odd) & 1;
            value = (static_cast<int>(nibble | high << 4) - 16) * f16_at(640 + 2 * (2 * g + r));
            break;
        }
        case kQ6: {
            const u32 high = word_at(512 + 4 * (2 * lane + s)) >> (2 * (4 * r + p) + 16 * odd) & 3;
            value = (static_cast<int>(nibble | high << 4) - 32) * f16_at(768 + 2 * (2 * g + r));
            break;
        }
        case kW8: {
            const int j = i / 4, pair = i / 2 % 2;
            const signed char code = static_cast<signed char>(record[512 * s + 16 * lane + 8 * r + 4 * j + pair + 2 * odd]);
            value = code * f16_at(1024 + 2 * (16 * s + 2 * g + r));
            break;
        }
    }
    if (w.block_scale != nullptr) {
        value *= w.block_scale[(static_cast<i64>(row / 16) * divide_up(w.cols, 128) + col / 128) * 16 + row % 16];
    }
    return w.row_scale != nullptr ? value * w.row_scale[row] : value;
}
