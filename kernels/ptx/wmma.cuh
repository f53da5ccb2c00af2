/* wmma.load.m16n16k16 of bf16 from shared memory (PTX ISA "wmma.load", sm_80): the 16 x 16 block whose rows (row) or
 * columns (col) start `stride` elements apart, address and stride multiples of 32 bytes and 8 elements. Which lane
 * receives what is not specified. */
#ifndef TCG_PTX_WMMA_CUH
#define TCG_PTX_WMMA_CUH

#include <stdint.h>

#define TCG_WMMA_LOAD_BF16(operand, layout)                                                                      \
    static __device__ __forceinline__ void wmma_load_##operand##_##layout##_bf16(uint32_t (&regs)[4],            \
                                                                                 uint32_t address, int stride) { \
        asm volatile("wmma.load." #operand ".sync.aligned." #layout                                              \
                     ".m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"                                        \
                     : "=r"(regs[0]), "=r"(regs[1]), "=r"(regs[2]), "=r"(regs[3])                                \
                     : "r"(address), "r"(stride)                                                                 \
                     : "memory");                                                                                \
    }
TCG_WMMA_LOAD_BF16(a, row)
TCG_WMMA_LOAD_BF16(a, col)
TCG_WMMA_LOAD_BF16(b, row)
TCG_WMMA_LOAD_BF16(b, col)
#undef TCG_WMMA_LOAD_BF16

#endif
