// Warpgroup matrix instructions, one function each; sm_90a only.
//
// d[64 × n] += a[64 × 16] · b[16 × n] in f32 for bf16 operands. Warp w of the warpgroup holds rows 16 w .. 16 w + 15 of a and
// d, as mma_bf16 does (ptx/mma.cuh): a in four registers; d[4 j + i] is what d[i] is there for columns 8 j .. 8 j + 7. b lies
// in shared memory, a column of it 64 elements, that is 128 bytes, behind the one before, in eights of columns that start at
// multiples of 1,024 bytes; piece p of 16 bytes of column c is found at place p ^ (c % 8) of the column.
#pragma once
#include "common/types.cuh"

// Descriptor of 16 rows of b: address, 1,024 bytes between eights of columns, 128 bytes in which pieces change places.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// What is to be added to a descriptor for each further 16 rows.
constexpr u64 kNextRows = 2;

// Registers written before are seen by the instructions behind.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most so many of the latest groups are running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps registers from being used for anything else before this point.
__device__ __forceinline__ void hold(u32& x) { asm volatile("" : "+r"(x)::"memory"); }

template <int kRegisters>
__device__ __forceinline__ void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Places of eight operands.
#define EIGHT_D(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA(n, places, a0, a1, a2, a3, b, add, ...) \
    __device__ __forceinline__ void wgmma_bf16(float (&d)[n / 2], const u32* a, u64 descriptor, bool adds) { \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " add ", 0; wgmma.mma_async.sync.aligned.m64n" #n \
                     "k16.f32.bf16.bf16 {" places "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", p, 1, 1, 0; }" \
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
WGMMA(32, P0 ", " P1, "%16", "%17", "%18", "%19", "%20", "%21",
      EIGHT_D(0), EIGHT_D(8))
WGMMA(64, P0 ", " P1 ", " P2 ", " P3, "%32", "%33", "%34", "%35", "%36", "%37",
      EIGHT_D(0), EIGHT_D(8), EIGHT_D(16), EIGHT_D(24))
WGMMA(80, P0 ", " P1 ", " P2 ", " P3 ", " P4, "%40", "%41", "%42", "%43", "%44", "%45",
      EIGHT_D(0), EIGHT_D(8), EIGHT_D(16), EIGHT_D(24), EIGHT_D(32))
WGMMA(96, P0 ", " P1 ", " P2 ", " P3 ", " P4 ", " P5, "%48", "%49", "%50", "%51", "%52", "%53",
      EIGHT_D(0), EIGHT_D(8), EIGHT_D(16), EIGHT_D(24), EIGHT_D(32), EIGHT_D(40))
WGMMA(128, P0 ", " P1 ", " P2 ", " P3 ", " P4 ", " P5 ", " P6 ", " P7, "%64", "%65", "%66", "%67", "%68", "%69",
      EIGHT_D(0), EIGHT_D(8), EIGHT_D(16), EIGHT_D(24), EIGHT_D(32), EIGHT_D(40), EIGHT_D(48), EIGHT_D(56))
#undef WGMMA
#undef EIGHT_D
#undef P0
#undef P1
#undef P2
#undef P3
#undef P4
#undef P5
#undef P6
#undef P7
