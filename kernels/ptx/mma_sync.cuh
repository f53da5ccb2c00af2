/* mma.sync.m16n8k16: D = A B + D for one warp, fp32 accumulators (PTX ISA "Matrix Fragments for mma.m16n8k16",
 * sm_80). For lane l, with g = l / 4 and p = 2 * (l % 4):
 *   a[0] A[g][p..p+1]   a[1] A[g+8][p..p+1]   a[2] A[g][p+8..p+9]   a[3] A[g+8][p+8..p+9]
 *   b0   B[p..p+1][g]   b1   B[p+8..p+9][g]
 *   d[0] D[g][p]   d[1] D[g][p+1]   d[2] D[g+8][p]   d[3] D[g+8][p+1] */
#ifndef TCG_PTX_MMA_SYNC_CUH
#define TCG_PTX_MMA_SYNC_CUH

#include <stdint.h>

#include "../types.cuh"

static __device__ __forceinline__ void mma_m16n8k16(f16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_m16n8k16(bf16, float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
