/* Family wmma: tensor cores by nvcuda::wmma, fed from shared memory. Over wmma_naive it adds what any fast product
 * needs: a block's tiles of A and B come into shared memory once, by cp.async several k-blocks ahead, and each
 * warp multiplies many fragments (64 x 64 of C), so that a fragment that has been loaded is used four times. sm_80
 * and later.
 *
 *   cp.async (k-block i + STAGES) -> commit -> wait_group -> __syncthreads -> load_shared (k-block i + 1) -> mma_sync
 *
 * What holds it back: the API hides which lane holds what. A tile can be kept free of bank conflicts only by
 * padding its lines, which costs shared memory that mma's xor swizzle does not, and C has to go through shared
 * memory as fp32 before anything can be done to it. Measured: about 410 TFLOP/s, 64 % of what mma.sync does from
 * registers (H200, 8192^3, bfloat16; benchmarks/results/ladder.json). */
#include <stdint.h>

#include "abi.h"
#include "epilogue.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvta.cuh"
#include "schedule.cuh"
#include "types.cuh"
#include "wmma.cuh"

/* A block's part of one operand for one k-block, as it lies in shared memory: MN (BLOCK_M or BLOCK_N) by BLOCK_K
 * elements, in lines along the operand's contiguous axis. A line is an odd number of 16-byte chunks apart from the
 * next, so that eight neighbours' chunks at the same place lie in different banks, which is how fragments are
 * loaded. With lines of four chunks, the number is the bank (of 16 bytes, modulo 8):
 *
 *   line 0 | 0 1 2 3 -
 *   line 1 | 5 6 7 0 -
 *   line 2 | 2 3 4 5 -
 *    ... */
template <int MN, int BLOCK_K, bool K_MAJOR> struct padded_tile {
    static constexpr int LINES = K_MAJOR ? MN : BLOCK_K;
    static constexpr int LINE = K_MAJOR ? BLOCK_K : MN; /* elements */
    static constexpr int PITCH = LINE + 8;              /* elements from one line to the next */
    static constexpr int BYTES = LINES * PITCH * 2;
    static_assert(BYTES == TCG_WMMA_TILE_BYTES(MN, BLOCK_K, K_MAJOR), "what the host asks for");
    static_assert(LINE % 16 == 0, "an odd number of chunks with the padding");
    static_assert(BYTES % 32 == 0, "wmma wants fragments aligned to 32 bytes");

    /* Of the 16 x 16 block at (mn, k), in elements. */
    static __host__ __device__ constexpr int fragment(int mn, int k) {
        return K_MAJOR ? mn * PITCH + k : k * PITCH + mn;
    }
};

/* One thread's share of filling an operand's tiles, k-block after k-block: COUNT chunks of 16 bytes, at the same
 * place of lines that are STEP apart. What lies outside the operand is written as zeros and never read. */
template <class Tile, int MN, int BLOCK_K, bool K_MAJOR, int THREADS> struct tile_copy {
    static constexpr int PER_LINE = Tile::LINE / 8; /* chunks */
    static constexpr int STEP = THREADS / PER_LINE;
    static constexpr int COUNT = Tile::LINES / STEP;
    static_assert(THREADS % PER_LINE == 0 && Tile::LINES % STEP == 0 && STEP > 0, "threads fill whole lines");

    const char *src;     /* the first chunk of the next k-block */
    int64_t step_bytes;  /* to the chunk STEP lines on */
    int64_t block_bytes; /* to the first chunk of the k-block after */
    int line, byte;      /* of the first chunk in the tile */
    int left;            /* of MN, how many are the operand's */

    /* Eight threads store together. With lines of four chunks they take two lines four apart, which is four banks, so
     * that they do not meet. */
    static __host__ __device__ constexpr int line_of(int thread) {
        const int at = thread / PER_LINE;
        return PER_LINE == 4 ? at / 8 * 8 + at % 2 * 4 + at / 2 % 4 : at;
    }

    /* origin: the operand's element at (0, 0); mn: the tile's first row or column; stride: elements from one of the
     * operand's contiguous lines to the next. */
    __device__ __forceinline__ void start(const void *origin, int64_t mn, int64_t mn_end, int64_t stride) {
        line = line_of(threadIdx.x);
        byte = threadIdx.x % PER_LINE * 16;
        left = static_cast<int>(smaller(mn_end - mn, MN));
        src = static_cast<const char *>(origin) + (K_MAJOR ? (mn + line) * stride : mn + line * stride) * 2 + byte;
        step_bytes = STEP * stride * 2;
        block_bytes = (K_MAJOR ? BLOCK_K : BLOCK_K * stride) * 2;
    }

    /* k_left: of BLOCK_K, how many are there; may be negative. tile: its shared address. */
    __device__ __forceinline__ void issue(uint32_t tile, int k_left) {
        const int lines = (K_MAJOR ? left : k_left) - line;
        const int bytes = min(max((K_MAJOR ? k_left : left) * 2 - byte, 0), 16);
        const uint32_t dst = tile + line * Tile::PITCH * 2 + byte;
        const char *chunk = src;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            cp_async_cg_16(dst + j * STEP * Tile::PITCH * 2, chunk, j * STEP < lines ? bytes : 0);
            chunk += step_bytes;
        }
        src += block_bytes;
    }
};

template <class In, int ORDER, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N, int STAGES>
struct wmma_kernel {
    static constexpr bool A_K_MAJOR = ORDER == TCG_nn || ORDER == TCG_nt;
    static constexpr bool B_K_MAJOR = ORDER == TCG_nt || ORDER == TCG_tt;
    typedef padded_tile<BLOCK_M, BLOCK_K, A_K_MAJOR> a_tile;
    typedef padded_tile<BLOCK_N, BLOCK_K, B_K_MAJOR> b_tile;
    typedef typename wmma_element<In>::type element;

    static constexpr int WARPS = WARPS_M * WARPS_N;
    static constexpr int THREADS = TCG_WMMA_THREADS(BLOCK_M, BLOCK_N, WARPS_M, WARPS_N);
    static constexpr int STAGE_BYTES = a_tile::BYTES + b_tile::BYTES;
    static constexpr int SMEM_BYTES = STAGES * STAGE_BYTES;
    static_assert(SMEM_BYTES == TCG_WMMA_SMEM(BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES, ORDER),
                  "what the host asks for");
    static_assert(STAGES >= 2, "a stage is refilled while the next is multiplied");

    static constexpr int WARP_M = BLOCK_M / WARPS_M;
    static constexpr int WARP_N = BLOCK_N / WARPS_N;
    static constexpr int TILES_M = WARP_M / 16; /* fragments a warp */
    static constexpr int TILES_N = WARP_N / 16;
    static constexpr int STEPS = BLOCK_K / 16;
    static_assert(STEPS % 2 == 0, "the fragment buffers alternate within a k-block");

    typedef wmma_acc accumulators[TILES_M][TILES_N];

    /* The fragments of a step are loaded while the step before is multiplied. */
    struct fragments {
        wmma_a<In, A_K_MAJOR> a[2][TILES_M];
        wmma_b<In, B_K_MAJOR> b[2][TILES_N];
        int warp_m, warp_n;

        __device__ __forceinline__ void load(const char *stage, int step) {
            const element *a_block = reinterpret_cast<const element *>(stage) + a_tile::fragment(warp_m, step * 16);
            const element *b_block =
                reinterpret_cast<const element *>(stage + a_tile::BYTES) + b_tile::fragment(warp_n, step * 16);
#pragma unroll
            for (int i = 0; i < TILES_M; i++) {
                load_shared(a[step % 2][i], a_block + a_tile::fragment(i * 16, 0), a_tile::PITCH);
            }
#pragma unroll
            for (int j = 0; j < TILES_N; j++) {
                load_shared(b[step % 2][j], b_block + b_tile::fragment(j * 16, 0), b_tile::PITCH);
            }
        }
        __device__ __forceinline__ void multiply(int step, accumulators &acc) const {
#pragma unroll
            for (int i = 0; i < TILES_M; i++) {
#pragma unroll
                for (int j = 0; j < TILES_N; j++) {
                    nvcuda::wmma::mma_sync(acc[i][j], a[step % 2][i], b[step % 2][j], acc[i][j]);
                }
            }
        }
    };

    /* acc += A[m.., :] @ B[:, n..], one k16 step after the other. Ends with the stages free. */
    static __device__ __forceinline__ void multiply(const tcg_gemm_args &args, const tile_place &place, char *smem,
                                                    int warp_m, int warp_n, accumulators &acc) {
        tile_copy<a_tile, BLOCK_M, BLOCK_K, A_K_MAJOR, THREADS> a_copy;
        tile_copy<b_tile, BLOCK_N, BLOCK_K, B_K_MAJOR, THREADS> b_copy;
        a_copy.start(static_cast<const char *>(args.a) + place.offset.a * 2,
                     static_cast<int64_t>(place.tile_m) * BLOCK_M, args.m, A_K_MAJOR ? args.a_row : args.a_col);
        b_copy.start(static_cast<const char *>(args.b) + place.offset.b * 2,
                     static_cast<int64_t>(place.tile_n) * BLOCK_N, args.n, B_K_MAJOR ? args.b_col : args.b_row);
        const uint32_t smem_address = cvta_to_shared(smem);
        int64_t k_left = args.k; /* not yet copied; negative beyond the end */
        auto copy = [&](int stage) {
            const int count = static_cast<int>(smaller(k_left, BLOCK_K));
            a_copy.issue(smem_address + stage, count);
            b_copy.issue(smem_address + stage + a_tile::BYTES, count);
            cp_async_commit_group();
            k_left -= k_left > 0 ? BLOCK_K : 0;
        };
#pragma unroll 1
        for (int stage = 0; stage < SMEM_BYTES; stage += STAGE_BYTES) {
            copy(stage);
        }
        cp_async_wait_group<STAGES - 1>();
        __syncthreads();

        fragments fragment;
        fragment.warp_m = warp_m;
        fragment.warp_n = warp_n;
        fragment.load(smem, 0);
        int stage = 0;
#pragma unroll 1
        for (int64_t k = 0; k < args.k; k += BLOCK_K) {
#pragma unroll
            for (int step = 0; step < STEPS - 1; step++) {
                fragment.load(smem + stage, step + 1);
                fragment.multiply(step, acc);
            }
            /* The next k-block has come in, and all warps have read the whole of this one. */
            cp_async_wait_group<STAGES - 2>();
            __syncthreads();
            const int next = stage == SMEM_BYTES - STAGE_BYTES ? 0 : stage + STAGE_BYTES;
            fragment.load(smem + next, 0);
            copy(stage);
            fragment.multiply(STEPS - 1, acc);
            stage = next;
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* C by way of shared memory, 16 lines at a time. The pitch keeps the stores of a fragment as sm_80's compiler
     * lays it out, two neighbours of a row a lane, out of each other's banks. */
    template <class T, bool ALONG_M> static __device__ __forceinline__ void
    store(const accumulators &acc, char *smem, int warp, int lane, const epilogue_target &c) {
        constexpr int LINE = ALONG_M ? WARP_M : WARP_N;
        constexpr int PITCH = LINE + (ALONG_M ? 4 : 8);
        constexpr int STAGING = SMEM_BYTES / WARPS / 128 * 128; /* bytes, a warp's share of the stages */
        static_assert(16 * PITCH * 4 <= STAGING, "room for 16 lines");
        float *patch = reinterpret_cast<float *>(smem + warp * STAGING);
#pragma unroll
        for (int line = 0; line < (ALONG_M ? TILES_N : TILES_M); line++) {
#pragma unroll
            for (int tile = 0; tile < LINE / 16; tile++) {
                nvcuda::wmma::store_matrix_sync(patch + tile * 16, ALONG_M ? acc[tile][line] : acc[line][tile], PITCH,
                                                ALONG_M ? nvcuda::wmma::mem_col_major : nvcuda::wmma::mem_row_major);
            }
            __syncwarp();
            const epilogue_target part =
                part_of(c, ALONG_M ? 0 : line * 16, ALONG_M ? line * 16 : 0, static_cast<int>(sizeof(T)));
            store_patch<T, ALONG_M, 16, LINE, PITCH>(patch, lane, part);
            __syncwarp();
        }
    }

    template <class T> static __device__ __forceinline__ void store(const accumulators &acc, char *smem, int warp,
                                                                    int lane, const epilogue_target &c) {
        if (c.col_stride != 1 && c.row_stride == 1) {
            store<T, true>(acc, smem, warp, lane, c);
        } else {
            store<T, false>(acc, smem, warp, lane, c);
        }
    }

    static __device__ __forceinline__ void run(const tcg_gemm_args &args, char *smem) {
        const int warp = threadIdx.x / 32;
        const int lane = threadIdx.x % 32;
        const int warp_m = warp % WARPS_M * WARP_M;
        const int warp_n = warp / WARPS_M * WARP_N;
        for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
            const tile_place place = place_tile(args, tile);
            accumulators acc;
#pragma unroll
            for (int i = 0; i < TILES_M; i++) {
#pragma unroll
                for (int j = 0; j < TILES_N; j++) {
                    nvcuda::wmma::fill_fragment(acc[i][j], 0.0f);
                }
            }
            multiply(args, place, smem, warp_m, warp_n, acc);

            const epilogue_target c =
                warp_target(args, place.offset.c, static_cast<int64_t>(place.tile_m) * BLOCK_M + warp_m,
                            static_cast<int64_t>(place.tile_n) * BLOCK_N + warp_n);
            if (args.c_dtype == TCG_f32) {
                store<f32>(acc, smem, warp, lane, c);
            } else {
                store<In>(acc, smem, warp, lane, c);
            }
            __syncthreads();
        }
    }
};

#define TCG_WMMA_KERNEL(in, order, BM, BN, BK, WM, WN, STAGES)                                               \
    extern "C" __global__ void __launch_bounds__(TCG_WMMA_THREADS(BM, BN, WM, WN), (WM) * (WN) >= 8 ? 1 : 2) \
        TCG_WARPS_NAME(wmma_sm80, in, order, BM, BN, BK, WM, WN,                                             \
                       STAGES)(const __grid_constant__ tcg_gemm_args args) {                                 \
        extern __shared__ __align__(1024) char smem[];                                                       \
        wmma_kernel<in, TCG_##order, BM, BN, BK, WM, WN, STAGES>::run(args, smem);                           \
    }

#define TCG_WMMA(...) TCG_ROW(TCG_WMMA_KERNEL, __VA_ARGS__)
#include "table.def"
