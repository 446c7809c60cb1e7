// Matrices that are transposed on the way from shared memory, one function each instruction.
#pragma once
#include "common/types.cuh"

// Four 8×8 matrices of 16-bit elements, each transposed; lane l gives the address of row l%8 of matrix l/8.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
