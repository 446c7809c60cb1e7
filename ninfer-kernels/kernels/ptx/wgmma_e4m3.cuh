// Warpgroup matrix instructions on E4M3 codes, one function each; sm_90a only.
//
// d[64 × n] (+)= a[64 × 32] · b[32 × n] in the matrix unit's f32, which keeps fewer bits than f32 does. Warp w of the
// warpgroup holds rows 16 w .. 16 w + 15 of a and d, as mma_e4m3 does (ptx/mma_fp8.cuh). b lies in shared memory as for
// wgmma_bf16 (ptx/wgmma.cuh): a column of it 128 codes, of which one instruction takes 32.
#pragma once
#include "ptx/wgmma.cuh"

// Keeps results from being used before this point.
__device__ __forceinline__ void hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }

#define EIGHT_D(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_E4M3(n, places, a0, a1, a2, a3, b, add, ...) \
    __device__ __forceinline__ void wgmma_e4m3(float (&d)[n / 2], const u32* a, u64 descriptor, bool adds) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" #n \
                     "k32.f32.e4m3.e4m3 {" places "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1; }" \
                     : __VA_ARGS__ \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(static_cast<u32>(adds))); \
    }
#define P0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define P1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define P2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define P3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define P4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define P5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define P6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define P7 "%56, %57, %58, %59, %60, %61, %62, %63"

// d = a · b, or with `adds` d += a · b; begun here, done after wgmma_wait.
WGMMA_E4M3(64, P0 ", " P1 ", " P2 ", " P3, "%32", "%33", "%34", "%35", "%36", "%37",
           EIGHT_D(0), EIGHT_D(8), EIGHT_D(16), EIGHT_D(24))
WGMMA_E4M3(128, P0 ", " P1 ", " P2 ", " P3 ", " P4 ", " P5 ", " P6 ", " P7, "%64", "%65", "%66", "%67", "%68", "%69",
           EIGHT_D(0), EIGHT_D(8), EIGHT_D(16), EIGHT_D(24), EIGHT_D(32), EIGHT_D(40), EIGHT_D(48), EIGHT_D(56))
#undef WGMMA_E4M3
#undef EIGHT_D
#undef P0
#undef P1
#undef P2
#undef P3
#undef P4
#undef P5
#undef P6
#undef P7
