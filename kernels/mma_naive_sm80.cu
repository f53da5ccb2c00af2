/* Family mma_naive: mma.sync and ldmatrix in place of the WMMA API. Over wmma it adds what that API hides: the
 * layout of a fragment is known, so that ldmatrix can read a tile whose chunks are swizzled by xor, free of bank
 * conflicts without a byte of padding, and C is rounded in registers. sm_80 and later.
 *
 *   load (global memory -> registers -> shared memory) -> __syncthreads -> ldmatrix, mma -> __syncthreads -> load ...
 *
 * What holds it back: there is one buffer and no overlap. While a k-block is loaded a block's tensor cores wait,
 * and while it is multiplied the memory does; only another block on the same SM fills the gaps. Measured: about 138
 * TFLOP/s, 22 % of what mma.sync does from registers (H200, 8192^3, bfloat16; benchmarks/results/ladder.json). */
#include <stdint.h>

#include "abi.h"
#include "epilogue.cuh"
#include "ptx/cvta.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "schedule.cuh"
#include "swizzle.cuh"
#include "types.cuh"

/* A block's part of one operand for one k-block, as it lies in shared memory: MN (BLOCK_M or BLOCK_N) by BLOCK_K
 * elements of 16 bits, in lines along the operand's contiguous axis: of K (K_MAJOR), else of m or n. */
template <int MN, int BLOCK_K, bool K_MAJOR, bool IS_A, int THREADS> struct operand_tile {
    static constexpr int LINES = K_MAJOR ? MN : BLOCK_K;
    static constexpr int CHUNKS = (K_MAJOR ? BLOCK_K : MN) / 8; /* of 16 bytes, a line */
    static constexpr int BYTES = LINES * CHUNKS * 16;
    static constexpr int STEP = THREADS / CHUNKS; /* lines that the threads fill at once */
    static constexpr int COUNT = LINES / STEP;
    static_assert(THREADS % CHUNKS == 0 && LINES % STEP == 0 && STEP > 0, "threads fill whole lines");

    static __host__ __device__ constexpr int offset(int line, int chunk) {
        return (line * CHUNKS + swizzle<CHUNKS>(line, chunk)) * 16;
    }

    /* One chunk, of which `count` elements are the operand's: the others become zero and are not read. */
    static __device__ __forceinline__ uint4 load_chunk(const uint16_t *from, int count) {
        if (count >= 8) {
            return *reinterpret_cast<const uint4 *>(from);
        }
        uint32_t pairs[4];
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const uint32_t low = 2 * p < count ? from[2 * p] : 0;
            const uint32_t high = 2 * p + 1 < count ? from[2 * p + 1] : 0;
            pairs[p] = low | high << 16;
        }
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }

    /* Fills the tile from `origin`, the operand's element at its corner, line_stride elements from one line to the
     * next. Of MN and BLOCK_K, mn_left and k_left are the operand's. */
    static __device__ __forceinline__ void fill(char *tile, const uint16_t *origin, int64_t line_stride, int mn_left,
                                                int k_left) {
        const int chunk = threadIdx.x % CHUNKS;
        const int lines = K_MAJOR ? mn_left : k_left;
        const int count = (K_MAJOR ? k_left : mn_left) - chunk * 8;
        uint4 held[COUNT]; /* all loads before the first store: their latencies overlap */
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const int line = threadIdx.x / CHUNKS + j * STEP;
            held[j] = load_chunk(origin + line * line_stride + chunk * 8, line < lines ? count : 0);
        }
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const int line = threadIdx.x / CHUNKS + j * STEP;
            *reinterpret_cast<uint4 *>(tile + offset(line, chunk)) = held[j];
        }
    }

    /* The 16 x 16 block at (mn, k). Its four 8x8 matrices come in the order of the mma fragment: A (0, 0) (8, 0)
     * (0, 8) (8, 8) in (m, k); B, two n8 fragments, (0, 0) (0, 8) (8, 0) (8, 8) in (n, k). Where K is not the
     * contiguous axis, matrices are transposed on the way. */
    static __device__ __forceinline__ void load_fragment(uint32_t (&fragment)[4], uint32_t tile, int mn, int k,
                                                         int lane) {
        const int matrix_mn = mn + (IS_A ? lane / 8 : lane / 16) % 2 * 8;
        const int matrix_k = k + (IS_A ? lane / 16 : lane / 8) % 2 * 8;
        if (K_MAJOR) {
            ldmatrix_x4(fragment, tile + offset(matrix_mn + lane % 8, matrix_k / 8));
        } else {
            ldmatrix_x4_trans(fragment, tile + offset(matrix_k + lane % 8, matrix_mn / 8));
        }
    }
};

template <class In, int ORDER, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N>
struct mma_naive_kernel {
    static constexpr bool A_K_MAJOR = ORDER == TCG_nn || ORDER == TCG_nt;
    static constexpr bool B_K_MAJOR = ORDER == TCG_nt || ORDER == TCG_tt;
    static constexpr int WARPS = WARPS_M * WARPS_N;
    static constexpr int THREADS = TCG_MMA_NAIVE_THREADS(BLOCK_M, BLOCK_N, WARPS_M, WARPS_N);
    typedef operand_tile<BLOCK_M, BLOCK_K, A_K_MAJOR, true, THREADS> a_tile;
    typedef operand_tile<BLOCK_N, BLOCK_K, B_K_MAJOR, false, THREADS> b_tile;

    static constexpr int SMEM_BYTES = a_tile::BYTES + b_tile::BYTES;
    static_assert(SMEM_BYTES == TCG_MMA_NAIVE_SMEM(BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, 1, ORDER),
                  "what the host asks for");
    static constexpr int STAGING =
        SMEM_BYTES / WARPS / 128 * 128; /* a warp's share of the buffer, for the epilogue */

    static constexpr int WARP_M = BLOCK_M / WARPS_M;
    static constexpr int WARP_N = BLOCK_N / WARPS_N;
    static constexpr int TILES_M = WARP_M / 16; /* mma tiles a warp, of 16 rows */
    static constexpr int TILES_N = WARP_N / 8;  /* and of 8 columns */
    static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "ldmatrix fetches 16 x 16 blocks");

    /* acc += A[m.., :] @ B[:, n..], one k16 step after the other. Ends with the buffer free. */
    static __device__ __forceinline__ void multiply(const tcg_gemm_args &args, const tile_place &place, char *smem,
                                                    int warp_m, int warp_n, float (&acc)[TILES_M][TILES_N][4]) {
        const int lane = threadIdx.x % 32;
        const uint32_t smem_address = cvta_to_shared(smem);
        const int64_t m = static_cast<int64_t>(place.tile_m) * BLOCK_M;
        const int64_t n = static_cast<int64_t>(place.tile_n) * BLOCK_N;
        const int m_left = static_cast<int>(smaller(args.m - m, BLOCK_M));
        const int n_left = static_cast<int>(smaller(args.n - n, BLOCK_N));
        const int64_t a_line = A_K_MAJOR ? args.a_row : args.a_col;
        const int64_t b_line = B_K_MAJOR ? args.b_col : args.b_row;
        const uint16_t *a = static_cast<const uint16_t *>(args.a) + place.offset.a + (A_K_MAJOR ? m * a_line : m);
        const uint16_t *b = static_cast<const uint16_t *>(args.b) + place.offset.b + (B_K_MAJOR ? n * b_line : n);
#pragma unroll 1
        for (int64_t k = 0; k < args.k; k += BLOCK_K) {
            const int k_left = static_cast<int>(smaller(args.k - k, BLOCK_K));
            a_tile::fill(smem, a, a_line, m_left, k_left);
            b_tile::fill(smem + a_tile::BYTES, b, b_line, n_left, k_left);
            a += A_K_MAJOR ? BLOCK_K : BLOCK_K * a_line;
            b += B_K_MAJOR ? BLOCK_K : BLOCK_K * b_line;
            __syncthreads();
#pragma unroll
            for (int step = 0; step < BLOCK_K; step += 16) {
                uint32_t a_fragments[TILES_M][4];
                uint32_t b_fragments[TILES_N / 2][4];
#pragma unroll
                for (int i = 0; i < TILES_M; i++) {
                    a_tile::load_fragment(a_fragments[i], smem_address, warp_m + i * 16, step, lane);
                }
#pragma unroll
                for (int j = 0; j < TILES_N / 2; j++) {
                    b_tile::load_fragment(b_fragments[j], smem_address + a_tile::BYTES, warp_n + j * 16, step, lane);
                }
#pragma unroll
                for (int i = 0; i < TILES_M; i++) {
#pragma unroll
                    for (int j = 0; j < TILES_N; j++) {
                        const uint32_t (&b16)[4] = b_fragments[j / 2];
                        mma_m16n8k16(In(), acc[i][j], a_fragments[i], b16[j % 2 * 2], b16[j % 2 * 2 + 1]);
                    }
                }
            }
            __syncthreads();
        }
    }

    static __device__ __forceinline__ void run(const tcg_gemm_args &args, char *smem) {
        const int warp = threadIdx.x / 32;
        const int warp_m = warp % WARPS_M * WARP_M;
        const int warp_n = warp / WARPS_M * WARP_N;
        for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
            const tile_place place = place_tile(args, tile);
            float acc[TILES_M][TILES_N][4] = {};
            multiply(args, place, smem, warp_m, warp_n, acc);

            const epilogue_target c =
                warp_target(args, place.offset.c, static_cast<int64_t>(place.tile_m) * BLOCK_M + warp_m,
                            static_cast<int64_t>(place.tile_n) * BLOCK_N + warp_n);
            store_result<In, STAGING>(args, acc, smem + warp * STAGING, threadIdx.x % 32, c);
            __syncthreads();
        }
    }
};

/* Two blocks an SM: one loads while the other multiplies. */
#define TCG_MMA_NAIVE_KERNEL(in, order, BM, BN, BK, WM, WN, STAGES)                                          \
    extern "C" __global__ void __launch_bounds__(TCG_MMA_NAIVE_THREADS(BM, BN, WM, WN), 2) TCG_WARPS_NAME(   \
        mma_naive_sm80, in, order, BM, BN, BK, WM, WN, STAGES)(const __grid_constant__ tcg_gemm_args args) { \
        extern __shared__ __align__(1024) char smem[];                                                       \
        static_assert(STAGES == 1, "one buffer");                                                            \
        mma_naive_kernel<in, TCG_##order, BM, BN, BK, WM, WN>::run(args, smem);                              \
    }

#define TCG_MMA_NAIVE(...) TCG_ROW(TCG_MMA_NAIVE_KERNEL, __VA_ARGS__)
#include "table.def"
