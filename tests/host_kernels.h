/* Runs kernels/*.cu on the host, one thread of a block after the other, and records what they do to shared memory.
 * The text is the kernels' own but for inline PTX, which test_banks.py takes out, putting calls of the functions
 * below in its place: so what a thread computes is meaningless, and every address is right. TCG_SOURCE names the
 * kernel file. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "host_cuda.h"

#define __syncthreads()
#define __syncwarp(...)
using std::max;
using std::min;

enum { SMEM_BYTES = 232448 };
alignas(1024) static char host_smem[SMEM_BYTES];
alignas(16) static char image[SMEM_BYTES]; /* what copies wrote: no epilogue runs over it */

static struct {
    unsigned x, y;
} threadIdx, blockIdx, gridDim;

static inline size_t __cvta_generic_to_shared(const void *pointer) {
    return static_cast<size_t>(static_cast<const char *>(pointer) - host_smem);
}

enum kind { LDMATRIX, LDMATRIX_TRANS, STMATRIX, COPY_IN, COPY_OUT, WMMA_LOAD, MMA, COPY_IN_4, LOAD_FLOAT4 };

/* One instruction of one thread. COPY_IN, COPY_OUT, LOAD_FLOAT4: 16 bytes, COPY_IN_4: 4. WMMA_LOAD: extra[0] is the pitch in elements. MMA: extra is
 * where the six operand registers came from, 4 * (which ldmatrix of the thread) + register; value is the
 * accumulators' address. */
struct access {
    int32_t kind, thread;
    int64_t value;
    int32_t extra[6];
};
static std::vector<access> accesses;
static int loads; /* ldmatrix so far in this thread */

static inline void record(int kind, int64_t value) {
    accesses.push_back({kind, static_cast<int32_t>(threadIdx.x), value, {}});
}

static inline void record_ldmatrix(int kind, uint32_t (&regs)[4], uint32_t address) {
    record(kind, address);
    for (int i = 0; i < 4; i++) {
        regs[i] = static_cast<uint32_t>(loads * 4 + i);
    }
    loads++;
}

static inline void record_mma(const float *d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    record(MMA, reinterpret_cast<int64_t>(d));
    const uint32_t registers[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(accesses.back().extra, registers, sizeof(registers));
}

static inline void record_cp_async(uint32_t dst, const void *src, int src_bytes) {
    record(COPY_IN, dst);
    memset(image + dst, 0, 16);
    memcpy(image + dst, src, static_cast<size_t>(src_bytes));
}

static inline void record_wmma_load(uint32_t address, int stride) {
    record(WMMA_LOAD, address);
    accesses.back().extra[0] = stride;
}

/* Plain 16-byte accesses are recorded by what they assign. */
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
    uint4() = default;
    uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) : x(x), y(y), z(z), w(w) {}
    uint4(const uint4 &) = default;
    static bool shared(const void *p) { return p >= host_smem && p < host_smem + SMEM_BYTES; }
    uint4 &operator=(const uint4 &from) {
        if (shared(this)) {
            record(COPY_IN, reinterpret_cast<char *>(this) - host_smem);
            memcpy(image + (reinterpret_cast<char *>(this) - host_smem), &from, 16);
        } else if (shared(&from)) {
            record(COPY_OUT, reinterpret_cast<const char *>(&from) - host_smem);
        }
        memcpy(static_cast<void *>(this), &from, 16);
        return *this;
    }
};
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return uint4(x, y, z, w); }
struct alignas(16) float4 {
    float x, y, z, w;
    float4() = default;
    float4(float x, float y, float z, float w) : x(x), y(y), z(z), w(w) {}
    float4(const float4 &from) : x(from.x), y(from.y), z(from.z), w(from.w) {
        if (uint4::shared(&from)) {
            record(LOAD_FLOAT4, reinterpret_cast<const char *>(&from) - host_smem);
        }
    }
    float4 &operator=(const float4 &) = default;
};
static inline float4 make_float4(float x, float y, float z, float w) { return float4(x, y, z, w); }
static inline void __stwb(float4 *to, float4 value) { *to = value; }
static inline uint32_t __float_as_uint(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
static inline float __uint_as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* As much of <mma.h> as wmma.cuh names. */
struct __half {
    uint16_t bits;
};
struct __nv_bfloat16 {
    uint16_t bits;
};
namespace nvcuda {
namespace wmma {
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
template <class Use, int M, int N, int K, class T, class Layout = void> struct alignas(16) fragment {
    T x[M * N / 32];
};
template <class Fragment, class T> static inline void load_matrix_sync(Fragment &, const T *, unsigned) {}
template <class Fragment> static inline void store_matrix_sync(float *, const Fragment &, unsigned, layout_t) {}
template <class Fragment> static inline void fill_fragment(Fragment &, float) {}
template <class D, class A, class B> static inline void mma_sync(D &, const A &, const B &, const D &) {}
} // namespace wmma
} // namespace nvcuda

static inline void record_tma(uint32_t dst, const void *map, int32_t x, int32_t y);

#include TCG_SOURCE

struct row {
    const char *name;
    void (*kernel)(const tcg_gemm_args &);
    int order, block_m, block_n, block_k, threads, stages;
};

/* One tile of a product of `blocks` k-blocks; element (m, k) of A holds m * K + k, element (n, k) of B n * K + k. For
 * kernels of 4-byte elements there is as much room, and what it holds means nothing. */
static std::vector<uint16_t> a, b;
static std::vector<float> c;
static bool a_k_major, b_k_major;
static int box_lines[2];      /* of A's and B's boxes in lines */
static int line_elems[2];     /* of A and B */
static tcg_tma_args tma_args; /* a map's first word: which operand it stands for */

/* A box as TMA writes it with the 128-byte swizzle (CUDA driver API, CU_TENSOR_MAP_SWIZZLE_128B): bits 4..6 of the
 * shared address are xor-ed with bits 7..9. */
static inline void record_tma(uint32_t dst, const void *map, int32_t x, int32_t y) {
    const int which = static_cast<int>(static_cast<const tcg_tensor_map *>(map)->opaque[0]);
    const std::vector<uint16_t> &from = which ? b : a;
    for (int line = 0; line < box_lines[which]; line++) {
        for (int chunk = 0; chunk < 8; chunk++) {
            const uint32_t at = dst + static_cast<uint32_t>(line * 128 + chunk * 16);
            memcpy(image + (at ^ (at >> 3 & 0x70)),
                   &from[static_cast<size_t>((y + line) * line_elems[which] + x + chunk * 8)], 16);
        }
    }
}

static void fill(const row &r, int k_blocks, int c_dtype, bool c_columns, tcg_gemm_args *g) {
    const int k = k_blocks * r.block_k;
    /* Of no order: one with each layout of C. */
    const int order = r.order != TCG_any ? r.order : c_columns ? TCG_tn : TCG_nt;
    a_k_major = order == TCG_nn || order == TCG_nt;
    b_k_major = order == TCG_nt || order == TCG_tt;
    a.resize(static_cast<size_t>(r.block_m) * k * 2);
    b.resize(static_cast<size_t>(r.block_n) * k * 2);
    c.resize(static_cast<size_t>(r.block_m) * r.block_n);
    for (int i = 0; i < k; i++) {
        for (int m = 0; m < r.block_m; m++) {
            a[a_k_major ? m * k + i : i * r.block_m + m] = static_cast<uint16_t>(m * k + i);
        }
        for (int n = 0; n < r.block_n; n++) {
            b[b_k_major ? n * k + i : i * r.block_n + n] = static_cast<uint16_t>(n * k + i);
        }
    }
    box_lines[0] = a_k_major ? r.block_m : r.block_k;
    box_lines[1] = b_k_major ? r.block_n : r.block_k;
    line_elems[0] = a_k_major ? k : r.block_m;
    line_elems[1] = b_k_major ? k : r.block_n;
    *g = tcg_gemm_args();
    g->a = a.data();
    g->b = b.data();
    g->c = c.data();
    g->m = r.block_m;
    g->n = r.block_n;
    g->k = g->k_per_split = k;
    g->a_row = a_k_major ? k : 1;
    g->a_col = a_k_major ? 1 : r.block_m;
    g->b_row = b_k_major ? 1 : r.block_n;
    g->b_col = b_k_major ? k : 1;
    g->c_row = c_columns ? 1 : r.block_n;
    g->c_col = c_columns ? r.block_m : 1;
    g->tiles_m = g->tiles_n = g->tiles = g->splits = g->raster_group = 1;
    g->c_dtype = c_dtype;
    g->c_vec_bytes = 16;
}

/* How C leaves wgmma: 16-bit elements by TMA. */
static void launch_tma(void (*kernel)(tcg_tma_args), const tcg_gemm_args &g) {
    const tcg_divisor one = {1, 1, 0};
    tcg_tma_walk &walk = tma_args.walk;
    tma_args.gemm = g;
    tma_args.b.opaque[0] = 1;
    walk.tiles = walk.tiles_m = walk.batches = 1;
    walk.k = walk.k_per_split = static_cast<int32_t>(g.k);
    walk.m = static_cast<int32_t>(g.m);
    walk.n = static_cast<int32_t>(g.n);
    walk.product = walk.group = walk.rows = walk.last_rows = walk.splits = one;
    walk.c_tma = g.c_row == 1 ? TCG_C_TMA_COLUMNS : TCG_C_TMA_ROWS;
    walk.c_dtype = static_cast<int16_t>(g.c_dtype);
    kernel(tma_args);
}

#define WARPS_ROW(family, FAMILY, call, in, order, BM, BN, BK, WM, WN, STAGES)                            \
    {#in " " #order " " #BM "x" #BN "x" #BK " " #WM "x" #WN,                                              \
     [](const tcg_gemm_args &g) { call(TCG_WARPS_NAME(family, in, order, BM, BN, BK, WM, WN, STAGES)); }, \
     TCG_##order,                                                                                         \
     BM,                                                                                                  \
     BN,                                                                                                  \
     BK,                                                                                                  \
     TCG_##FAMILY##_THREADS(BM, BN, WM, WN),                                                              \
     STAGES},
#define PLAIN(kernel) kernel(g)
#define BY_TMA(kernel) launch_tma([](tcg_tma_args args) { kernel(args); }, g)

static const row rows[] = {
#define TCG_SIMT(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)                                       \
    {#in " " #order " " #BM "x" #BN "x" #BK " " #WM "x" #WN,                                         \
     [](const tcg_gemm_args &g) { TCG_SIMT_NAME(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)(g); }, \
     TCG_##order,                                                                                    \
     BM,                                                                                             \
     BN,                                                                                             \
     BK,                                                                                             \
     TCG_SIMT_THREADS(WM, WN),                                                                       \
     STAGES},
#define TCG_MMA(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN, PTX)                                  \
    {#in " " #order " " #BM "x" #BN "x" #BK " " #WM "x" #WN,                                        \
     [](const tcg_gemm_args &g) { TCG_MMA_NAME(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)(g); }, \
     TCG_##order,                                                                                   \
     BM,                                                                                            \
     BN,                                                                                            \
     BK,                                                                                            \
     TCG_MMA_THREADS(WM, WN),                                                                       \
     STAGES},
#define TCG_WMMA(...) WARPS_ROW(wmma_sm80, WMMA, PLAIN, __VA_ARGS__)
#define TCG_MMA_NAIVE(...) WARPS_ROW(mma_naive_sm80, MMA_NAIVE, PLAIN, __VA_ARGS__)
#define TCG_TMA_MMA(...) WARPS_ROW(tma_mma_sm90, TMA_MMA, BY_TMA, __VA_ARGS__)
#define TCG_WGMMA(in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK, C_BOXES)       \
    {#in " " #order " " #BM "x" #BN "x" #BK " " #WGS " " #SCHEDULE,                        \
     [](const tcg_gemm_args &g) {                                                          \
         BY_TMA(TCG_WGMMA_NAME(in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK)); \
     },                                                                                    \
     TCG_##order,                                                                          \
     BM,                                                                                   \
     BN,                                                                                   \
     BK,                                                                                   \
     TCG_WGMMA_THREADS(WGS),                                                               \
     STAGES},
#include "table.def"
};

extern "C" int row_count(void) { return static_cast<int>(sizeof(rows) / sizeof(rows[0])); }
extern "C" const row *row_at(int index) { return &rows[index]; }
extern "C" const access *access_data(void) { return accesses.data(); }
extern "C" const char *image_data(void) { return image; }

/* Returns the number of accesses. */
extern "C" int run(int index, int k_blocks, int f32, int c_columns) {
    const row &r = rows[index];
    tcg_gemm_args g;
    fill(r, k_blocks, f32 ? TCG_f32 : TCG_bf16, c_columns, &g);
    accesses.clear();
    memset(image, 0xff, sizeof(image));
    gridDim.x = 1;
    for (int thread = 0; thread < r.threads; thread++) {
        threadIdx.x = static_cast<unsigned>(thread);
        loads = 0;
        r.kernel(g);
    }
    return static_cast<int>(accesses.size());
}
