/* Runs a kernel of families mma or mma_shift on the host and computes what it computes: a thread of a block is a thread
 * here, a warp's lanes meet for ldmatrix and mma, and cp.async copies at once. test_warps.py takes the inline PTX out of
 * the kernels' text and puts calls of the functions below in its place; TCG_SOURCE names the kernel file. */
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "host_cuda.h"

using std::max;
using std::min;

enum { SMEM_BYTES = 232448, WARPS_MAX = 32 };
alignas(1024) static char host_smem[SMEM_BYTES];

struct launch_index {
    unsigned x, y;
};
static thread_local launch_index threadIdx;
static launch_index blockIdx, gridDim;

static pthread_barrier_t block_barrier, warp_barriers[WARPS_MAX];
static inline void __syncthreads() { pthread_barrier_wait(&block_barrier); }
static inline void __syncwarp() { pthread_barrier_wait(&warp_barriers[threadIdx.x / 32]); }

static inline size_t __cvta_generic_to_shared(const void *pointer) {
    return static_cast<size_t>(static_cast<const char *>(pointer) - host_smem);
}
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

/* What was read of memory outside the words that a test allows: as an address, 0 if nothing. */
static const char *may_begin[2], *may_end[2];
static uintptr_t read_outside;

static inline void host_cp_async(uint32_t dst, const void *src, int src_bytes) {
    const char *from = static_cast<const char *>(src);
    const bool inside = (from >= may_begin[0] && from + src_bytes <= may_end[0]) ||
                        (from >= may_begin[1] && from + src_bytes <= may_end[1]);
    memset(host_smem + dst, 0, 16);
    if (src_bytes > 0 && inside && reinterpret_cast<uintptr_t>(src) % 16 == 0) {
        memcpy(host_smem + dst, from, static_cast<size_t>(src_bytes));
    } else if (src_bytes != 0) {
        read_outside = reinterpret_cast<uintptr_t>(src);
    }
}

/* What the lanes of a warp give each other. */
struct exchange {
    uint32_t address[32];
    uint32_t a[32][4], b[32][2];
};
static exchange exchanges[WARPS_MAX];

static inline void host_ldmatrix(uint32_t (&regs)[4], uint32_t address, bool transposed) {
    exchange &warp = exchanges[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    warp.address[lane] = address;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (int half = 0; half < 2; half++) {
            const int row = transposed ? lane % 4 * 2 + half : lane / 4,
                      column = transposed ? lane / 4 : lane % 4 * 2 + half;
            memcpy(&pair[half], host_smem + warp.address[i * 8 + row] + column * 2, 2);
        }
        memcpy(&regs[i], pair, 4);
    }
    __syncwarp();
}

static float host_value(uint16_t bits) { /* of bfloat16 */
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline void host_mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    exchange &warp = exchanges[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    memcpy(warp.a[lane], a, 16);
    warp.b[lane][0] = b0;
    warp.b[lane][1] = b1;
    __syncwarp();
    for (int e = 0; e < 4; e++) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        double sum = 0;
        for (int k = 0; k < 16; k++) {
            const uint32_t x = warp.a[row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8],
                           y = warp.b[column * 4 + k % 8 / 2][k / 8];
            sum += static_cast<double>(host_value(static_cast<uint16_t>(x >> k % 2 * 16))) *
                   static_cast<double>(host_value(static_cast<uint16_t>(y >> k % 2 * 16)));
        }
        d[e] += static_cast<float>(sum);
    }
    __syncwarp();
}

static inline uint16_t host_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return static_cast<uint16_t>(value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline uint32_t host_bf16x2(float low, float high) {
    return host_bf16(low) | static_cast<uint32_t>(host_bf16(high)) << 16;
}

#include TCG_SOURCE

struct row {
    const char *name;
    void (*kernel)(const tcg_gemm_args &);
    int order, block_m, block_n, block_k, threads;
};

static const row rows[] = {
#define TCG_MMA(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN, PTX)                                  \
    {#order " " #BM "x" #BN "x" #BK,                                                                \
     [](const tcg_gemm_args &g) { TCG_MMA_NAME(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)(g); }, \
     TCG_##order,                                                                                   \
     BM,                                                                                            \
     BN,                                                                                            \
     BK,                                                                                            \
     TCG_MMA_THREADS(WM, WN)},
#define TCG_MMA_SHIFT(in, order, BM, BN, BK, WARPS, STAGES)                                       \
    {#order " " #BM "x" #BN "x" #BK,                                                              \
     [](const tcg_gemm_args &g) { TCG_MMA_SHIFT_NAME(in, order, BM, BN, BK, WARPS, STAGES)(g); }, \
     TCG_##order,                                                                                 \
     BM,                                                                                          \
     BN,                                                                                          \
     BK,                                                                                          \
     TCG_MMA_SHIFT_THREADS(WARPS)},
#include "table.def"
};

extern "C" int row_count(void) { return static_cast<int>(sizeof(rows) / sizeof(rows[0])); }
extern "C" const row *row_at(int index) { return &rows[index]; }

/* One block after the other. may_read: two ranges of bytes. Returns an address that was read outside them, or 0. */
extern "C" uintptr_t run(int index, const tcg_gemm_args *args, int grid, const char *const *may_read) {
    const row &r = rows[index];
    memset(host_smem, 0xff, sizeof(host_smem)); /* NaN */
    read_outside = 0;
    for (int i = 0; i < 2; i++) {
        may_begin[i] = may_read[i * 2];
        may_end[i] = may_read[i * 2 + 1];
    }
    gridDim = {static_cast<unsigned>(grid), 1};
    pthread_barrier_init(&block_barrier, nullptr, static_cast<unsigned>(r.threads));
    for (pthread_barrier_t &barrier : warp_barriers) {
        pthread_barrier_init(&barrier, nullptr, 32);
    }
    for (int block = 0; block < grid; block++) {
        blockIdx = {static_cast<unsigned>(block), 0};
        std::vector<std::thread> threads;
        for (int i = 0; i < r.threads; i++) {
            threads.emplace_back([&r, args, i] {
                threadIdx = {static_cast<unsigned>(i), 0};
                r.kernel(*args);
            });
        }
        for (std::thread &thread : threads) {
            thread.join();
        }
    }
    return read_outside;
}
