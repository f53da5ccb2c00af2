/* Family simt: exact float32 on the ordinary cores. A block computes one tile of C, a thread up to 8 x 16 elements
 * of it in registers, from a ring of shared-memory stages that cp.async fills. K in order, one fused multiply-add
 * an element, so every tile gives the same bits. sm_80 and later.
 *
 * What this rung shows: a scheduler issues one instruction a clock, at best an FFMA each time. Everything else is
 * overhead, of three kinds.
 *   - Other instructions. Both tiles lie as rows of m or n, so that a step of K takes (8 + 16) / 4 reads of 16 bytes
 *     for 128 FFMAs. Operands that are contiguous along K are turned on the way, by copies of single elements.
 *   - Registers. Their two banks, of the even and the odd ones, give one value each a clock, and an FFMA wants
 *     three. Neighbouring FFMAs share a factor, which is kept from one to the next, and the other two values have to
 *     come from different banks: see multiply() and store().
 *   - Shared memory. It gives 128 bytes a clock, so a warp's read of 16 bytes a lane takes it four. With 8 x 16 sums
 *     a thread the reads keep it busy for 3/4 of the FFMAs' time, with 4 x 8 for 3/2. Copies go between the reads, a
 *     few a step.
 *
 * What holds it back: FFMAs alone do 66 TFLOP/s on an H200 at 1980 MHz. One instruction in ten is another one, which
 * leaves 60, and reads of registers that still collide, where the compiler places or orders them otherwise, leave
 * 56. The rest is lost waiting for shared memory and at the barrier of every k-block: about 51 TFLOP/s at 8192^3, 0.99
 * of cuBLAS's float32 (benchmarks/results/ladder.json). */
#include <stdint.h>

#include "abi.h"
#include "ptx/cp_async.cuh"
#include "ptx/cvta.cuh"
#include "ptx/opaque.cuh"
#include "schedule.cuh"
#include "types.cuh"

/* A block's part of one operand for one k-block in shared memory: BLOCK_K rows of m or n, four banks apart, so that
 * eight neighbours along K times four along m or n, stored at once, do not collide. */
template <int BLOCK_MN, int BLOCK_K> struct simt_tile {
    static constexpr int ROW_BYTES = (BLOCK_MN + 4) * 4;
    static constexpr int BYTES = ROW_BYTES * BLOCK_K;
};

/* The axis of an operand that is contiguous. */
enum simt_axis { SIMT_MN, SIMT_K, SIMT_ANY };

/* One thread's share of filling an operand's tiles, k-block after k-block: COUNT pieces of PIECE_BYTES, one step
 * apart in memory and another in the tile. Along K eight lanes copy neighbours; where that is known at compile
 * time, a piece is repeated every eight elements of BLOCK_K. Rows and columns past the operand's last are left as
 * they are in the tile: they end in no element of C. */
template <int BLOCK_MN, int BLOCK_K, int AXIS, int THREADS, int PIECE_BYTES> struct simt_copy {
    typedef simt_tile<BLOCK_MN, BLOCK_K> tile;
    static constexpr int ELEMS = PIECE_BYTES / 4;
    static constexpr int REPEATS = AXIS == SIMT_K ? BLOCK_K / 8 : 1;
    static constexpr int COUNT = BLOCK_MN * BLOCK_K / (ELEMS * REPEATS * THREADS);
    static constexpr int PER_ROW = BLOCK_MN / ELEMS;
    static constexpr int K_STEP = THREADS / PER_ROW;            /* between pieces of m or n */
    static constexpr int MN_STEP = THREADS / BLOCK_K * REPEATS; /* between pieces along K */
    static_assert(PIECE_BYTES == 4 || (PIECE_BYTES == 16 && AXIS == SIMT_MN),
                  "along K elements are turned one by one");
    static_assert(COUNT * ELEMS * REPEATS * THREADS == BLOCK_MN * BLOCK_K, "threads fill whole tiles");
    static_assert(AXIS == SIMT_K || (THREADS % PER_ROW == 0 && BLOCK_K % K_STEP == 0), "and whole rows");

    const char *src;    /* the next piece */
    int64_t step_bytes; /* from a piece to the next */
    int64_t wrap_bytes; /* from past the last piece of a k-block to the first of the next one */
    uint32_t dst;       /* of the first piece in the tile */
    int count;          /* of the pieces, the operand's */
    int size_bytes;     /* of each of them */
    int k;              /* of the first */
    bool is_k_major;    /* SIMT_ANY */

    __device__ __forceinline__ bool k_major() const { return AXIS == SIMT_ANY ? is_k_major : AXIS == SIMT_K; }
    __device__ __forceinline__ int tile_step() const { return k_major() ? MN_STEP * 4 : K_STEP * tile::ROW_BYTES; }

    /* origin: the operand at (0, k_begin). A tile's rows or columns are [first, end); strides are in elements. */
    __device__ __forceinline__ void start(const char *origin, int64_t first, int64_t end, int64_t mn_stride,
                                          int64_t k_stride) {
        const int thread = threadIdx.x;
        const int left = static_cast<int>(smaller(end - first, BLOCK_MN));
        int mn;
        is_k_major = k_stride == 1;
        if (k_major()) {
            k = thread / (MN_STEP * 8) * 8 + thread % 8;
            mn = thread / 8 % MN_STEP;
            count = (left - mn + MN_STEP - 1) / MN_STEP;
            step_bytes = MN_STEP * mn_stride * 4;
        } else {
            k = thread / PER_ROW;
            mn = thread % PER_ROW * ELEMS;
            count = mn < left ? COUNT : 0;
            step_bytes = K_STEP * k_stride * 4;
        }
        size_bytes = min(left - mn, ELEMS) * 4;
        dst = k * tile::ROW_BYTES + mn * 4;
        src = origin + ((first + mn) * mn_stride + k * k_stride) * 4;
        wrap_bytes = BLOCK_K * k_stride * 4 - COUNT * step_bytes;
    }

    /* Whether every piece is whole. */
    __device__ __forceinline__ bool even() const {
        return PIECE_BYTES == 4 || count == 0 || size_bytes == PIECE_BYTES;
    }

    __device__ __forceinline__ void copy(uint32_t to, const char *from, int bytes) const {
        if (PIECE_BYTES == 16) {
            cp_async_cg_16(to, from, bytes);
        } else {
            cp_async_ca_4(to, from, bytes);
        }
    }

    /* A k-block of which k_left elements (<= 0: none) are there; the others of the operand's are written as zeros.
     * Leaves src where it is. */
    __device__ __forceinline__ void issue(uint32_t stage, int k_left) const {
        const int there = k_major() ? count : min(count, (k_left - k + K_STEP - 1) / K_STEP);
        const char *from = src;
        uint32_t to = stage + dst;
#pragma unroll 4
        for (int i = 0; i < COUNT; i++) {
#pragma unroll
            for (int j = 0; j < REPEATS; j++) {
                const bool inside = i < there && (!k_major() || k + j * 8 < k_left);
                copy(to + j * 8 * tile::ROW_BYTES, from + j * 8 * 4, inside ? size_bytes : 0);
            }
            to += tile_step();
            from += step_bytes;
        }
    }

    /* Part `part` of PARTS of a whole k-block, if `enabled`; past it in any case. */
    template <int PARTS> __device__ __forceinline__ void issue_part(uint32_t stage, int part, bool enabled) {
        const int there = enabled ? count : 0;
#pragma unroll
        for (int i = COUNT * part / PARTS; i < COUNT * (part + 1) / PARTS; i++) {
            const uint32_t to = stage + dst + i * tile_step();
#pragma unroll
            for (int j = 0; j < REPEATS; j++) {
                if (PIECE_BYTES == 16) {
                    cp_async_cg_16_if(to, src, i < there);
                } else {
                    cp_async_ca_4_if(to + j * 8 * tile::ROW_BYTES, src + j * 8 * 4, i < there);
                }
            }
            src += step_bytes;
            opaque(src); /* else every multiple of step_bytes gets registers of its own */
        }
    }

    /* To the next k-block, after all parts or none. */
    __device__ __forceinline__ void wrap() { src += wrap_bytes; }
    __device__ __forceinline__ void skip() { src += COUNT * step_bytes + wrap_bytes; }
};

template <int ORDER, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N, int STAGES, int ALIGN>
struct simt_kernel {
    static constexpr int A_AXIS = ORDER == TCG_any ? SIMT_ANY : ORDER == TCG_nn || ORDER == TCG_nt ? SIMT_K : SIMT_MN;
    static constexpr int B_AXIS = ORDER == TCG_any ? SIMT_ANY : ORDER == TCG_nt || ORDER == TCG_tt ? SIMT_K : SIMT_MN;
    static constexpr int THREADS = TCG_SIMT_THREADS(WARPS_M, WARPS_N);
    typedef simt_tile<BLOCK_M, BLOCK_K> a_tile;
    typedef simt_tile<BLOCK_N, BLOCK_K> b_tile;
    typedef simt_copy<BLOCK_M, BLOCK_K, A_AXIS, THREADS, A_AXIS == SIMT_MN ? ALIGN : 4> a_copy;
    typedef simt_copy<BLOCK_N, BLOCK_K, B_AXIS, THREADS, B_AXIS == SIMT_MN ? ALIGN : 4> b_copy;
    static constexpr int A_BYTES = STAGES * a_tile::BYTES;
    static_assert(A_BYTES + STAGES * b_tile::BYTES == TCG_SIMT_SMEM(BLOCK_M, BLOCK_N, BLOCK_K, STAGES),
                  "what the host asks for");

    /* A warp is LANES_M x LANES_N threads; a thread has fours of neighbours, LANES fours apart. Of the operand that
     * eight lanes share out, neighbouring lanes read the same 16 bytes, of the other one lanes two apart do: half a
     * warp reads no two words of one bank. */
    static constexpr int WARP_M = BLOCK_M / WARPS_M;
    static constexpr int WARP_N = BLOCK_N / WARPS_N;
    static constexpr int LANES_M = WARP_M >= WARP_N ? 8 : 4;
    static constexpr int LANES_N = 32 / LANES_M;
    static constexpr int THREAD_M = WARP_M / LANES_M;
    static constexpr int THREAD_N = WARP_N / LANES_N;
    static_assert(THREAD_M % 4 == 0 && THREAD_N % 4 == 0, "fragments are read in fours");

    /* Steps of K over which the copies of a k-block are spread, so that they do not hold up the reads. */
    static constexpr int PARTS = 8;
    static_assert(PARTS < BLOCK_K, "the last step comes after the barrier");

    struct fragments {
        float a[2][THREAD_M];
        float b[2][THREAD_N];

        template <int COUNT, int LANES> static __device__ __forceinline__ void read(float *to, const char *from) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 4) {
                const float4 four = *reinterpret_cast<const float4 *>(from + i * LANES * 4);
                to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
            }
        }
        __device__ __forceinline__ void load(int step, const char *a_from, const char *b_from) {
            read<THREAD_M, LANES_M>(a[step % 2], a_from);
            read<THREAD_N, LANES_N>(b[step % 2], b_from);
        }
        /* Down one column and up the next one, so that neighbouring FFMAs share a factor everywhere. */
        __device__ __forceinline__ void multiply(int step, float (&acc)[THREAD_M][THREAD_N]) const {
#pragma unroll
            for (int j = 0; j < THREAD_N; j++) {
#pragma unroll
                for (int down = 0; down < THREAD_M; down++) {
                    const int i = j % 2 ? THREAD_M - 1 - down : down;
                    acc[i][j] = fmaf(a[step % 2][i], b[step % 2][j], acc[i][j]);
                }
            }
        }
    };

    /* acc += A[m.., k_begin..k_end) @ B[.., n..]. Ends with the stages free. */
    static __device__ __forceinline__ void multiply(const tcg_gemm_args &args, const tile_place &place, char *smem,
                                                    int thread_m, int thread_n, float (&acc)[THREAD_M][THREAD_N]) {
        const int64_t m = static_cast<int64_t>(place.tile_m) * BLOCK_M;
        const int64_t n = static_cast<int64_t>(place.tile_n) * BLOCK_N;
        const int64_t k_count = place.k_end > place.k_begin ? place.k_end - place.k_begin : 0;
        /* Constants where the order says so. */
        const int64_t a_row = A_AXIS == SIMT_MN ? 1 : args.a_row;
        const int64_t a_col = A_AXIS == SIMT_K ? 1 : args.a_col;
        const int64_t b_row = B_AXIS == SIMT_K ? 1 : args.b_row;
        const int64_t b_col = B_AXIS == SIMT_MN ? 1 : args.b_col;
        a_copy a;
        b_copy b;
        a.start(static_cast<const char *>(args.a) + (place.offset.a + place.k_begin * a_col) * 4, m, args.m, a_row,
                a_col);
        b.start(static_cast<const char *>(args.b) + (place.offset.b + place.k_begin * b_row) * 4, n, args.n, b_col,
                b_row);
        const bool even = a.even() && b.even();

        /* 32 bits of k-blocks are more than a kernel could finish. */
        int blocks = static_cast<int>((k_count + BLOCK_K - 1) / BLOCK_K);
        const int tail = static_cast<int>(k_count - (static_cast<int64_t>(blocks) - 1) * BLOCK_K);
        uint32_t a_write = cvta_to_shared(smem);
        uint32_t b_write = a_write + A_BYTES;
        const uint32_t b_first = b_write;
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; stage++) {
            const int left = blocks - stage;
            const int k_left = left > 1 ? BLOCK_K : left == 1 ? tail : 0;
            a.issue(a_write, k_left);
            b.issue(b_write, k_left);
            cp_async_commit_group();
            a.skip();
            b.skip();
            a_write += a_tile::BYTES;
            b_write += b_tile::BYTES;
        }
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();

        fragments fragment;
        const char *a_read = smem + thread_m * 4;
        const char *b_read = smem + A_BYTES + thread_n * 4;
        const char *const a_end = a_read + A_BYTES;
        fragment.load(0, a_read, b_read);

#pragma unroll 1
        for (; blocks > 0; blocks--) {
            /* A whole k-block is copied part by part below, a shorter one, or one of uneven pieces, here. */
            const bool more = blocks >= STAGES;
            const int k_left = blocks > STAGES ? BLOCK_K : tail;
            const bool whole = more && even && k_left == BLOCK_K;
            if (more && !whole) {
                a.issue(a_write, k_left);
                b.issue(b_write, k_left);
            }
#pragma unroll
            for (int step = 0; step < BLOCK_K; step++) {
                if (step < BLOCK_K - 1) {
                    fragment.load(step + 1, a_read + (step + 1) * a_tile::ROW_BYTES,
                                  b_read + (step + 1) * b_tile::ROW_BYTES);
                } else {
                    a_read += a_tile::BYTES;
                    b_read += b_tile::BYTES;
                    if (a_read == a_end) {
                        a_read -= A_BYTES;
                        b_read -= STAGES * b_tile::BYTES;
                    }
                    fragment.load(step + 1, a_read, b_read);
                }
                if (step < PARTS) {
                    a.template issue_part<PARTS>(a_write, step, whole);
                    b.template issue_part<PARTS>(b_write, step, whole);
                }
                fragment.multiply(step, acc);
                if (step == BLOCK_K - 2) {
                    cp_async_commit_group();
                    cp_async_wait_group<STAGES - 2>();
                    __syncthreads();
                }
            }
            a.wrap();
            b.wrap();
            a_write += a_tile::BYTES;
            b_write += b_tile::BYTES;
            if (a_write == b_first) {
                a_write -= A_BYTES;
                b_write -= STAGES * b_tile::BYTES;
            }
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* Fours along the axis of C that is contiguous, if its lines allow. c: at (0, 0) of this thread. */
    template <bool ALONG_M>
    static __device__ __forceinline__ void store(const float (&acc)[THREAD_M][THREAD_N], float *c, int64_t rows,
                                                 int64_t cols, int64_t row_stride, int64_t col_stride, bool fours) {
        /* A store of four would have the sums in registers one after the other, as the factors are that four came at
         * once of: half of the FFMAs would then read a sum and a factor of one bank. A block has no second row of
         * threads, but the compiler has to allow for one, and so may keep the sums where it likes. */
        const uint32_t zero = threadIdx.y;
#pragma unroll
        for (int i = 0; i < THREAD_M; i += ALONG_M ? 4 : 1) {
#pragma unroll
            for (int j = 0; j < THREAD_N; j += ALONG_M ? 1 : 4) {
                const int row = i / 4 * 4 * LANES_M + i % 4;
                const int col = j / 4 * 4 * LANES_N + j % 4;
                const int64_t left = ALONG_M ? rows - row : cols - col;
                const int64_t step = ALONG_M ? row_stride : col_stride;
                float *to = c + row * row_stride + col * col_stride;
                if (ALONG_M ? col < cols : row < rows) {
                    float four[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float sum = acc[i + (ALONG_M ? e : 0)][j + (ALONG_M ? 0 : e)];
                        four[e] = __uint_as_float(__float_as_uint(sum) ^ zero);
                    }
                    if (fours && left >= 4) {
                        /* A plain assignment is made into stores of single elements for most of the sums. */
                        __stwb(reinterpret_cast<float4 *>(to), make_float4(four[0], four[1], four[2], four[3]));
                    } else {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            if (e < left) {
                                to[e * step] = four[e];
                            }
                        }
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ void run(const tcg_gemm_args &args, char *smem) {
        const int warp = threadIdx.x / 32;
        const int lane = threadIdx.x % 32;
        const int eighth = lane / 2 % 8;
        const int quarter = lane % 2 + lane / 16 * 2;
        const int thread_m = warp % WARPS_M * WARP_M + (LANES_M == 8 ? eighth : quarter) * 4;
        const int thread_n = warp / WARPS_M * WARP_N + (LANES_N == 8 ? eighth : quarter) * 4;
#pragma unroll 1
        for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
            const tile_place place = place_tile(args, tile);
            float acc[THREAD_M][THREAD_N] = {};
            multiply(args, place, smem, thread_m, thread_n, acc);

            const int64_t row = static_cast<int64_t>(place.tile_m) * BLOCK_M + thread_m;
            const int64_t col = static_cast<int64_t>(place.tile_n) * BLOCK_N + thread_n;
            float *c = static_cast<float *>(args.c) + place.offset.c + row * args.c_row + col * args.c_col;
            if (args.c_col != 1 && args.c_row == 1) {
                uint64_t bits = reinterpret_cast<uint64_t>(args.c) | args.c_col * 4 | args.c_split * 4;
                for (int d = 0; d < args.batch_ndim; d++) {
                    bits |= args.batch[d].c * 4;
                }
                store<true>(acc, c, args.m - row, args.n - col, 1, args.c_col, widest_access(bits) == 16);
            } else {
                store<false>(acc, c, args.m - row, args.n - col, args.c_row, args.c_col,
                             args.c_col == 1 && args.c_vec_bytes == 16);
            }
        }
    }
};

#define TCG_SIMT(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)                                                    \
    extern "C" __global__ void __launch_bounds__(TCG_SIMT_THREADS(WM, WN),                                        \
                                                 TCG_SIMT_BLOCKS(BM, BN, TCG_SIMT_THREADS(WM, WN)))               \
        TCG_SIMT_NAME(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)(const __grid_constant__ tcg_gemm_args args) { \
        extern __shared__ __align__(16) char smem[];                                                              \
        simt_kernel<TCG_##order, BM, BN, BK, WM, WN, STAGES, ALIGN>::run(args, smem);                             \
    }
#include "table.def"
