// Matrix products of half-precision operands, and early reads into L2, one function each instruction.
#pragma once
#include "common/types.cuh"

// d += a · b, f16 operands, f32 accumulator; fragments as those of mma_bf16.
__device__ __forceinline__ void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two f16; what is too large for one becomes the largest, and no number stays none.
__device__ __forceinline__ u32 pack_half(float low, float high) {
    const __half2 most = __half2half2(__ushort_as_half(0x7bff)), least = __half2half2(__ushort_as_half(0xfbff));
    __half2 pair = __hmax2_nan(__hmin2_nan(__floats2half2_rn(low, high), most), least);
    return *reinterpret_cast<u32*>(&pair);
}

__device__ __forceinline__ float2 unpack_half(u32 pair) { return __half22float2(*reinterpret_cast<__half2*>(&pair)); }
