/* cvta: from a generic address to the 32-bit shared-memory window that the other instructions take. */
#ifndef TCG_PTX_CVTA_CUH
#define TCG_PTX_CVTA_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t cvta_to_shared(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#endif
