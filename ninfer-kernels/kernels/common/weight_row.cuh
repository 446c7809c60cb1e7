// Rows of packed weights that are looked up: eight adjacent columns at a time, which are the codes of one lane.
#pragma once
#include "common/weight.cuh"

// Columns 8 · piece .. 8 · piece + 7 of a row; zeros behind the last one.
__device__ __forceinline__ void weight_piece(const Weight& w, int row, int piece, float (&v)[8]) {
    const int s = piece % 8 / 4, t = piece % 4, g = row % 8, r = row % 16 / 8, lane = 4 * g + t, bytes = record_bytes(w.format);
    const u8* record = w.records + (static_cast<i64>(row / 16) * w.blocks + piece / 8) * bytes;
    auto f16_at = [&](int byte) { return __half2float(*reinterpret_cast<const __half*>(record + byte)); };
    auto word_at = [&](int byte) { return *reinterpret_cast<const u32*>(record + byte); };
    auto pair_at = [&](int byte) { return *reinterpret_cast<const uint2*>(record + byte); };
    // Column i of a word of nibbles: 2p in nibble p, 2p + 1 in nibble 4 + p.
    auto shift = [](int i) { return 4 * (i / 2) + 16 * (i % 2); };
    const int nibbles = 16 * lane + 8 * s + 4 * r;
    switch (w.format) {
        case kBf16: {
            const int at = 512 * (2 * s + r) + 16 * lane, first = divide_up(w.cols, 64);
            const uint4 x = *reinterpret_cast<const uint4*>(record + at);
            const u32 words[4] = {x.x, x.y, x.z, x.w};
            for (int i = 0; i < 4; i++) v[2 * i] = low_float(words[i]), v[2 * i + 1] = high_float(words[i]);
            if (w.blocks > first) {
                const uint4 y = *reinterpret_cast<const uint4*>(record + static_cast<i64>(first) * bytes + at);
                const u32 rest[4] = {y.x, y.y, y.z, y.w};
                for (int i = 0; i < 4; i++) v[2 * i] += low_float(rest[i]), v[2 * i + 1] += high_float(rest[i]);
            }
            break;
        }
        case kFp8: {
            const uint2 x = pair_at(512 * s + 16 * lane + 8 * r);
            for (int i = 0; i < 8; i++) {
                const int byte = (i / 2 % 2 == 0 ? 1 : 0) + 2 * (i % 2);
                v[i] = e4m3_value((i < 4 ? x.x : x.y) >> 8 * byte & 0xff);
            }
            break;
        }
        case kNvfp4: {
            const u32 x = word_at(nibbles);
            const float scale = e4m3_value(record[512 + 4 * (8 * (t / 2) + g) + 2 * s + r]);
            for (int i = 0; i < 8; i++) v[i] = e2m1_value(x >> shift(i) & 15) * scale;
            break;
        }
        case kW8: {
            const uint2 x = pair_at(512 * s + 16 * lane + 8 * r);
            const float scale = f16_at(1024 + 2 * (16 * s + 2 * g + r));
            for (int i = 0; i < 8; i++) {
                const u32 code = (i < 4 ? x.x : x.y) >> 8 * (i / 2 % 2 + 2 * (i % 2)) & 0xff;
                v[i] = static_cast<signed char>(code) * scale;
            }
            break;
        }
        default: {
            // Q4, Q5, Q6: low nibbles, no, one or two high bits of each column, a scale.
            const u32 x = word_at(nibbles);
            const int place = 2 * (2 * g + r);
            u32 high = 0;
            int bits = 0, at = 512;
            if (w.format == kQ5) bits = 1, at = 640, high = word_at(512 + 4 * lane) >> 4 * (2 * s + r);
            if (w.format == kQ6) bits = 2, at = 768, high = word_at(512 + 4 * (2 * lane + s)) >> 8 * r;
            const float scale = f16_at(at + place);
            for (int i = 0; i < 8; i++) {
                const u32 above = high >> (bits * (i / 2) + 16 * (i % 2)) & ((1u << bits) - 1);
                v[i] = (static_cast<int>((x >> shift(i) & 15) | above << 4) - (8 << bits)) * scale;
            }
            break;
        }
    }
    float factor = 1.0f;
    if (w.block_scale != nullptr) {
        factor = w.block_scale[(static_cast<i64>(row / 16) * divide_up(w.cols, 128) + piece / 16) * 16 + row % 16];
    }
    const float last = w.row_scale != nullptr ? w.row_scale[row] : 1.0f;
    for (int i = 0; i < 8; i++) v[i] = v[i] * factor * last;
}
