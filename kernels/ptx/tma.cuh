// TMA: bulk tensor copies between global and shared memory (PTX ISA, "cp.async.bulk.tensor"). Coordinates are in
// elements, innermost first; what lies outside the tensor is read as zero and not written.
#pragma once
#include <cstdint>

static __device__ __forceinline__ void prefetch_tensormap(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

static __device__ __forceinline__ void cp_async_bulk_tensor_3d(uint32_t dst, const void *map, int32_t x, int32_t y, int32_t z,
                                                        uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            dst),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// The same, to this block's shared memory by the .shared::cta form (PTX ISA 8.6): sm_120 code for the other form also
// holds a path for the memory of other blocks, with a call and a stack.
static __device__ __forceinline__ void cp_async_bulk_tensor_3d_shared_cta(uint32_t dst, const void *map, int32_t x, int32_t y,
                                                                          int32_t z, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

// The same box to the same offset in every block of `mask`; each block's barrier of that offset is signalled.
static __device__ __forceinline__ void cp_async_bulk_tensor_3d_multicast(uint32_t dst, const void *map, int32_t x, int32_t y,
                                                                  int32_t z, uint32_t barrier, uint16_t mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, "
        "%4}], [%5], %6;" ::"r"(dst),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(mask)
        : "memory");
}

static __device__ __forceinline__ void cp_async_bulk_tensor_3d_store(const void *map, uint32_t src, int32_t x, int32_t y,
                                                              int32_t z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(src),
                 "r"(x), "r"(y), "r"(z)
                 : "memory");
}

static __device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most N of this thread's groups have yet to read their shared memory.
template <int N>
static __device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Until at most N of this thread's groups are incomplete, their global writes included.
template <int N>
static __device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Orders this thread's ordinary shared-memory accesses before later ones of TMA and wgmma.
static __device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
