/* cp.async: asynchronous copies from global to shared memory (PTX ISA "cp.async", sm_80). The bytes past src_bytes
 * are written as zeros and are not read. A shared address is what cvta.cuh gives. */
#ifndef TCG_PTX_CP_ASYNC_CUH
#define TCG_PTX_CP_ASYNC_CUH

#include <stdint.h>

/* .cg: through L2 only. The 128-byte hint fetches the rest of the line, which the next chunk or k-block wants. */
static __device__ __forceinline__ void cp_async_cg_16(uint32_t dst, const void *src, int src_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(src_bytes)
                 : "memory");
}

/* .ca: through L1, which asks for a sector of L2 once where two chunks lie in it. */
static __device__ __forceinline__ void cp_async_ca_16(uint32_t dst, const void *src, int src_bytes) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(src_bytes)
                 : "memory");
}

static __device__ __forceinline__ void cp_async_ca_4(uint32_t dst, const void *src, int src_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(src_bytes) : "memory");
}

/* Whole copies, where `enabled`; nothing elsewhere. */
static __device__ __forceinline__ void cp_async_cg_16_if(uint32_t dst, const void *src, bool enabled) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.u32 p, %2, 0;\n"
                 "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n"
                 "}" ::"r"(dst),
                 "l"(src), "r"(static_cast<uint32_t>(enabled))
                 : "memory");
}

static __device__ __forceinline__ void cp_async_ca_4_if(uint32_t dst, const void *src, bool enabled) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.u32 p, %2, 0;\n"
                 "@p cp.async.ca.shared.global [%0], [%1], 4;\n"
                 "}" ::"r"(dst),
                 "l"(src), "r"(static_cast<uint32_t>(enabled))
                 : "memory");
}

static __device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Returns once all but the N newest groups of this thread have landed. */
template <int N> static __device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif
