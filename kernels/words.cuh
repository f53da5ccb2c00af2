/* Aligned words of 16 bytes, and what begins somewhere within one. */
#ifndef TCG_WORDS_CUH
#define TCG_WORDS_CUH

#include <stdint.h>

/* The 16 bytes that begin `by` bytes into the first of two neighbours; `by` is even and below 16. */
static __device__ __forceinline__ uint4 cut_out(uint4 first, uint4 second, int by) {
    uint32_t w[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 6; i++) {
        w[i] = by & 8 ? w[i + 2] : w[i];
    }
#pragma unroll
    for (int i = 0; i < 5; i++) {
        w[i] = by & 4 ? w[i + 1] : w[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = __funnelshift_r(w[i], w[i + 1], (by & 2) * 8);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

#endif
