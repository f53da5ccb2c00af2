/* cvt.rn: float32 to 16-bit floats, to nearest even (PTX ISA "cvt", sm_80). Subnormals are kept, too large a value
 * gives infinity, NaN gives NaN. */
#ifndef TCG_PTX_CVT_CUH
#define TCG_PTX_CVT_CUH

#include <stdint.h>

static __device__ __forceinline__ uint16_t cvt_rn_f16_f32(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ uint16_t cvt_rn_bf16_f32(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

/* Two at once; `low` goes to bits 0-15. */
static __device__ __forceinline__ uint32_t cvt_rn_f16x2_f32(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

static __device__ __forceinline__ uint32_t cvt_rn_bf16x2_f32(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

#endif
