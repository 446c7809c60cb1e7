// targets: sm_80
// Stored matrices to device records (layout: common/weight.cuh).
//
// One thread takes 16 columns of one row: grid (ceil(4 · blocks / 64), rows), 64 threads. `row` is where the first row of
// the piece goes. Records are zeros beforehand; bits that two rows share are set by atomic OR, whose order does not matter.
#include "common/weight.cuh"

// `PackArg` of src/cuda/pack.rs.
struct Pack {
    Weight to;
    const u8* codes;   // row-major, as `PackedData`
    const u8* high;    // high plane of Q5, Q6
    const u8* scales;  // E4M3 or f16 scales
    int rows;          // of this piece
    int row;           // first row in the stack
    int kind;          // Bf16: 0 f32, 1 f16, 2 bf16
    int unused;
};

namespace {

struct Place {
    int row, block, t, g, r, lane;
    u8* record;
};

__device__ __forceinline__ bool place(const Pack& a, int format, Place& at) {
    const int blocks = divide_up(a.to.cols, 64);
    const int item = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = blockIdx.y + 65535 * blockIdx.z;
    if (item >= 4 * blocks || row >= a.rows) return false;
    const int to = a.row + row;
    at.row = row;
    at.block = item / 4;
    at.t = item % 4;
    at.g = to % 8;
    at.r = to % 16 / 8;
    at.lane = 4 * at.g + at.t;
    at.record = const_cast<u8*>(a.to.records) +
                (static_cast<i64>(to / 16) * a.to.blocks + at.block) * record_bytes(format);
    return true;
}

// Groupwise planes: `group` columns a scale, 32 base bytes a group.
__device__ __forceinline__ i64 group_index(const Pack& a, int row, int col, int group) {
    const i64 groups = divide_up(a.to.cols, 128) * 128 / group;
    return row * groups + col / group;
}

}  // namespace

extern "C" __global__ void pack_plain(const __grid_constant__ Pack a) {
    Place at;
    if (!place(a, kBf16, at)) return;
    const int cols = a.to.cols, first = divide_up(cols, 64);
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < 8; i++) {
            const int col = 64 * at.block + record_column(s, at.t, i);
            if (col >= cols) continue;
            const i64 index = static_cast<i64>(at.row) * cols + col;
            float value = a.kind == 0   ? reinterpret_cast<const float*>(a.codes)[index]
                          : a.kind == 1 ? __half2float(reinterpret_cast<const __half*>(a.codes)[index])
                                        : to_float(reinterpret_cast<const bf16*>(a.codes)[index]);
            const int byte = 512 * (2 * s + at.r) + 16 * at.lane + 2 * i;
            const bf16 high = to_bf16(value);
            *reinterpret_cast<bf16*>(at.record + byte) = high;
            if (a.to.blocks > first) {
                u8* second = at.record + static_cast<i64>(first) * record_bytes(kBf16);
                // An infinity has no rounding error.
                const float rest = isinf(value) ? 0.0f : value - to_float(high);
                *reinterpret_cast<bf16*>(second + byte) = to_bf16(rest);
            }
        }
    }
}

extern "C" __global__ void pack_fp8(const __grid_constant__ Pack a) {
    Place at;
    if (!place(a, kFp8, at)) return;
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < 8; i++) {
            const int col = 64 * at.block + record_column(s, at.t, i);
            if (col >= a.to.cols) continue;
            const int j = i / 4, pair = i / 2 % 2;
            at.record[512 * s + 16 * at.lane + 8 * at.r + 4 * j + (pair == 0 ? 1 : 0) + 2 * (i % 2)] =
                a.codes[static_cast<i64>(at.row) * a.to.cols + col];
        }
    }
}

extern "C" __global__ void pack_nvfp4(const __grid_constant__ Pack a) {
    Place at;
    if (!place(a, kNvfp4, at)) return;
    for (int s = 0; s < 2; s++) {
        u32 word = 0;
        for (int i = 0; i < 8; i++) {
            const int col = 64 * at.block + record_column(s, at.t, i);
            if (col >= a.to.cols) continue;
            const i64 index = static_cast<i64>(at.row) * a.to.cols + col;
            const u32 code = a.codes[index / 2] >> (4 * (index % 2)) & 15;
            word |= code << (4 * (i / 2) + 16 * (i % 2));
        }
        *reinterpret_cast<u32*>(at.record + 16 * at.lane + 8 * s + 4 * at.r) = word;
        const int col = 64 * at.block + 32 * s + 8 * at.t;
        if (at.t % 2 == 0 && col < a.to.cols) {
            at.record[512 + 4 * (8 * (at.t / 2) + at.g) + 2 * s + at.r] =
                a.scales[static_cast<i64>(at.row) * (a.to.cols / 16) + col / 16];
        }
    }
}

namespace {

template <int kFormat>
__device__ __forceinline__ void pack_group(const Pack& a) {
    Place at;
    if (!place(a, kFormat, at)) return;
    constexpr int kBias = kFormat == kQ4 ? 8 : kFormat == kQ5 ? 16 : 32;
    constexpr int kScales = kFormat == kQ4 ? 512 : kFormat == kQ5 ? 640 : 768;
    u32 fifth = 0;
    for (int s = 0; s < 2; s++) {
        u32 word = 0, high = 0;
        for (int i = 0; i < 8; i++) {
            const int lane = record_column(s, at.t, i);  // of the group
            const i64 group = group_index(a, at.row, 64 * at.block, 64);
            const u32 low = a.codes[group * 32 + lane / 2] >> (4 * (lane % 2)) & 15;
            u32 code = low;
            if (kFormat == kQ5) code |= (a.high[group * 8 + lane / 8] >> (lane % 8) & 1) << 4;
            if (kFormat == kQ6) code |= (a.high[group * 16 + lane / 4] >> (2 * (lane % 4)) & 3) << 4;
            code = (code + kBias) & (2 * kBias - 1);  // two's complement to offset
            word |= (code & 15) << (4 * (i / 2) + 16 * (i % 2));
            if (kFormat == kQ5) fifth |= (code >> 4) << (4 * (2 * s + at.r) + i / 2 + 16 * (i % 2));
            if (kFormat == kQ6) high |= (code >> 4) << (2 * (4 * at.r + i / 2) + 16 * (i % 2));
        }
        *reinterpret_cast<u32*>(at.record + 16 * at.lane + 8 * s + 4 * at.r) = word;
        if (kFormat == kQ6) atomicOr(reinterpret_cast<u32*>(at.record + 512) + 2 * at.lane + s, high);
    }
    if (kFormat == kQ5) atomicOr(reinterpret_cast<u32*>(at.record + 512) + at.lane, fifth);
    if (at.t == 0) {
        const i64 group = group_index(a, at.row, 64 * at.block, 64);
        reinterpret_cast<u16*>(at.record + kScales)[2 * at.g + at.r] = reinterpret_cast<const u16*>(a.scales)[group];
    }
}

}  // namespace

extern "C" __global__ void pack_q4(const __grid_constant__ Pack a) { pack_group<kQ4>(a); }
extern "C" __global__ void pack_q5(const __grid_constant__ Pack a) { pack_group<kQ5>(a); }
extern "C" __global__ void pack_q6(const __grid_constant__ Pack a) { pack_group<kQ6>(a); }

extern "C" __global__ void pack_w8(const __grid_constant__ Pack a) {
    Place at;
    if (!place(a, kW8, at)) return;
    for (int s = 0; s < 2; s++) {
        const i64 group = group_index(a, at.row, 64 * at.block + 32 * s, 32);
        for (int i = 0; i < 8; i++) {
            const int j = i / 4, pair = i / 2 % 2;
            at.record[512 * s + 16 * at.lane + 8 * at.r + 4 * j + pair + 2 * (i % 2)] =
                a.codes[group * 32 + 8 * at.t + i];
        }
        if (at.t == 0) {
            reinterpret_cast<u16*>(at.record + 1024)[16 * s + 2 * at.g + at.r] =
                reinterpret_cast<const u16*>(a.scales)[group];
        }
    }
}

// `FillArg` of src/cuda/pack.rs.
struct Fill {
    Weight to;
    u64 seed;
    i64 records;
    float scale;  // f16 scale of groups, or largest bf16 value
    int unused;
};

namespace {

// Finaliser of SplitMix64.
__device__ __forceinline__ u64 mix(u64 z) {
    z += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

}  // namespace

// Random codes and one scale for all groups; a grid of any size, 256 threads.
extern "C" __global__ void __launch_bounds__(256) fill_records(const __grid_constant__ Fill a) {
    const int bytes = record_bytes(a.to.format), words = bytes / 4;
    const int codes = a.to.format == kBf16 || a.to.format == kFp8 ? bytes
                      : a.to.format == kW8                        ? 1024
                      : a.to.format == kQ5                        ? 640
                      : a.to.format == kQ6                        ? 768
                                                                  : 512;
    const u32 scale = __half_as_ushort(__float2half_rn(a.scale));
    const i64 total = a.records * words;
    for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < total; i += gridDim.x * 256ll) {
        const u64 random = mix(a.seed ^ mix(i));
        u32 word = static_cast<u32>(random);
        if (i % words * 4 >= codes) {
            word = a.to.format == kNvfp4 ? 0x38383838u : scale | scale << 16;
        } else if (a.to.format == kFp8) {
            word &= 0xbfbfbfbfu;  // no NaN
        } else if (a.to.format == kBf16) {
            auto value = [&](u32 bits) { return (static_cast<float>(bits) * (1.0f / 8388608.0f) - 1.0f) * a.scale; };
            word = pack_bf16(value(static_cast<u32>(random >> 8 & 0xffffff)), value(static_cast<u32>(random >> 40)));
        }
        reinterpret_cast<u32*>(const_cast<u8*>(a.to.records))[i] = word;
    }
}
