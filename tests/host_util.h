/* Runs kernels/util.cu on the host. test_util.py puts load() in the place of copy_rows' loads from the source: each byte read
 * has to be marked as the operand's. Blocks that synchronise run as threads, the others one thread after the other. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <thread>
#include <vector>

#include "host_cuda.h"

#define __shared__ static
#define __align__(x) __attribute__((aligned(x)))

static thread_local struct {
    unsigned x;
} threadIdx;
static struct {
    unsigned x;
} blockIdx, gridDim;

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }

static pthread_barrier_t barrier;
static bool faulty; /* read outside the operand, or not aligned */
static const char *marks_of, *marks_end, *marks;

static inline void __syncthreads() { pthread_barrier_wait(&barrier); }
template <class T> static inline void __stwb(T *to, T value) {
    faulty = faulty || reinterpret_cast<uintptr_t>(to) % sizeof(T) != 0;
    *to = value;
}
template <class T> static inline T load(const T *from) {
    const char *at = reinterpret_cast<const char *>(from);
    faulty = faulty || reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0 || at < marks_of ||
             at + sizeof(T) > marks_end || memchr(marks + (at - marks_of), 0, sizeof(T));
    return faulty ? T() : *from;
}

#include "abi.h"

alignas(16) static char host_smem[TCG_COPY_PATCH_BYTES];

#include "util.cu"

static int run(unsigned grid, unsigned threads, bool synchronises, const std::function<void()> &kernel) {
    faulty = false;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        std::vector<std::thread> all;
        pthread_barrier_init(&barrier, nullptr, threads);
        for (unsigned i = 0; i < threads; i++) {
            const auto one = [&kernel, i] {
                threadIdx.x = i;
                kernel();
            };
            if (synchronises) {
                all.emplace_back(one);
            } else {
                one();
            }
        }
        for (std::thread &thread : all) {
            thread.join();
        }
        pthread_barrier_destroy(&barrier);
    }
    return faulty;
}

/* marks: of each of the `bytes` bytes from `from` on, whether it may be read. Returns whether anything was wrong. */
extern "C" int copy(const tcg_copy_args *args, int synchronises, const char *from, int64_t bytes,
                    const char *may_read) {
    marks_of = from, marks_end = from + bytes, marks = may_read;
    return run(args->job[0].blocks + args->job[1].blocks, TCG_COPY_THREADS, synchronises,
               [args] { tcg_copy(*args); });
}

extern "C" int reduce(const tcg_reduce_args *args, int grid) {
    return run(static_cast<unsigned>(grid), TCG_REDUCE_THREADS, args->shared, [args] { tcg_reduce(*args); });
}
