/* ldmatrix: four 8x8 matrices of 16-bit elements from shared memory (PTX ISA "ldmatrix", sm_75). Lane l gives the
 * address of row l % 8 of matrix l / 8; of matrix i it receives, in regs[i], row l / 4, columns 2 * (l % 4) and
 * the next. */
#ifndef TCG_PTX_LDMATRIX_CUH
#define TCG_PTX_LDMATRIX_CUH

#include <stdint.h>

static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&regs)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(regs[0]), "=r"(regs[1]), "=r"(regs[2]), "=r"(regs[3])
                 : "r"(address)
                 : "memory");
}

/* The same, each matrix transposed on the way. */
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&regs)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(regs[0]), "=r"(regs[1]), "=r"(regs[2]), "=r"(regs[3])
                 : "r"(address)
                 : "memory");
}

#endif
