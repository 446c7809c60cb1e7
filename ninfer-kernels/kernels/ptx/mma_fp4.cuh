// Matrix instruction on E2M1 codes with E4M3 scales for 16 columns: that of sm_120f, and where it does not exist a
// function of the same operands, for tests of what is around it.
#pragma once
#include "common/weight.cuh"

// d += a · b: a is 16×64 row-major, b is 64×8 column-major. Lane l: a[0] holds k = 8(l%4) .. +7 of row l/4, a[1] of row
// l/4 + 8, a[2] and a[3] the same + 32; b0, b1 likewise for column l/4; d as for bf16. Byte j of a scale word belongs to
// k = 16j .. +15: `scale_a` of lanes with l%4 = 0 to row l/4, with l%4 = 1 to row l/4 + 8; `scale_b` of lanes with l%4 = 0
// to column l/4.
#if __CUDA_ARCH__ >= 1200
__device__ __forceinline__ void mma_e2m1(float (&d)[4], const u32 (&a)[4], u32 scale_a, u32 b0, u32 b1, u32 scale_b) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {0,0}, {%11}, {0,0};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b));
}
#else
__device__ __noinline__ float4 emulate_e2m1(float4 c, uint4 a, u32 scale_a, u32 b0, u32 b1, u32 scale_b) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float d[4] = {c.x, c.y, c.z, c.w};
    u32 row_scale[2], column_scale[2];
    for (int i = 0; i < 2; i++) {
        row_scale[i] = __shfl_sync(kAllLanes, scale_a, 4 * g + i);
        column_scale[i] = __shfl_sync(kAllLanes, scale_b, 4 * (2 * t + i));
    }
#pragma unroll 1
    for (int k = 0; k < 8; k++) {
        const int from = k % 4;
        u32 row[2], column[2];
        for (int i = 0; i < 2; i++) {
            const u32 low = __shfl_sync(kAllLanes, i == 0 ? a.x : a.y, 4 * g + from);
            const u32 high = __shfl_sync(kAllLanes, i == 0 ? a.z : a.w, 4 * g + from);
            row[i] = k < 4 ? low : high;
            const u32 first = __shfl_sync(kAllLanes, b0, 4 * (2 * t + i) + from);
            const u32 second = __shfl_sync(kAllLanes, b1, 4 * (2 * t + i) + from);
            column[i] = k < 4 ? first : second;
        }
#pragma unroll 1
        for (int i = 0; i < 4; i++) {
            const u32 x = i / 2 == 0 ? row[0] : row[1], y = i % 2 == 0 ? column[0] : column[1];
            const u32 sx = i / 2 == 0 ? row_scale[0] : row_scale[1], sy = i % 2 == 0 ? column_scale[0] : column_scale[1];
            float sum = 0.0f;
#pragma unroll 1
            for (int n = 0; n < 32; n += 4) sum = fmaf(e2m1_value(x >> n & 15), e2m1_value(y >> n & 15), sum);
            sum *= e4m3_value(sx >> (8 * (k / 2)) & 0x7f) * e4m3_value(sy >> (8 * (k / 2)) & 0x7f);
            d[0] += i == 0 ? sum : 0.0f;
            d[1] += i == 1 ? sum : 0.0f;
            d[2] += i == 2 ? sum : 0.0f;
            d[3] += i == 3 ? sum : 0.0f;
        }
    }
    return {d[0], d[1], d[2], d[3]};
}

__device__ __forceinline__ void mma_e2m1(float (&d)[4], const u32 (&a)[4], u32 scale_a, u32 b0, u32 b1, u32 scale_b) {
    const float4 r = emulate_e2m1({d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, scale_a, b0, b1, scale_b);
    d[0] = r.x, d[1] = r.y, d[2] = r.z, d[3] = r.w;
}
#endif
