/* What CUDA C++ has and a host compiler has not, for the kernels' text on the host (host_*.h). */
#ifndef TCG_HOST_CUDA_H
#define TCG_HOST_CUDA_H

#include <stdint.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define TCG_ASM(...)

static inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t bits) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (bits & 31));
}

struct alignas(8) float2 {
    float x, y;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }

#endif
