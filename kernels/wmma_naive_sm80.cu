/* Family wmma_naive: the least that reaches the tensor cores. Over simt it adds nvcuda::wmma: a warp loads 16 x 16
 * fragments of A and B straight from global memory and multiplies them in one call, with fp32 sums in registers.
 * Warps share nothing and never wait for one another. sm_80 and later.
 *
 *   for each 16 of K: load_matrix_sync (A, B) from global memory -> mma_sync
 *
 * What holds it back: every warp fetches its own operands, each fragment is used only twice, and nothing is loaded
 * before it is needed, so that the tensor cores wait for memory, the caches at best. Measured: 55 TFLOP/s, about 9 %
 * of what mma.sync does from registers (H200, 8192^3, bfloat16; benchmarks/results/ladder.json). */
#include <stdint.h>

#include "abi.h"
#include "epilogue.cuh"
#include "schedule.cuh"
#include "types.cuh"
#include "wmma.cuh"

/* One warp's way to one operand, EXTENT rows of A or columns of B wide: 16 x 16 blocks at (mn, k). K_MAJOR: K is the
 * contiguous axis. */
template <class In, bool K_MAJOR, int EXTENT> struct operand_blocks {
    typedef typename wmma_element<In>::type element;

    const element *origin; /* at the warp's first row or column, k = 0 */
    int64_t stride;        /* elements from one contiguous line to the next */
    int64_t k;             /* elements of K */
    int left;              /* of EXTENT, how many are the operand's; may be negative */
    bool in_place;         /* wmma can load whole blocks as they lie */

    /* wmma wants blocks aligned to 32 bytes, of which lines of a multiple of 16 leave only the operand's start to
     * doubt, and an unsigned 32-bit stride. Far shorter ones keep 15 lines below 2^31 bytes, whatever the
     * compiler's arithmetic. */
    static constexpr int64_t LONGEST_LINE = 1 << 24;

    __device__ __forceinline__ void start(const void *operand, int64_t offset, int64_t mn, int64_t mn_end,
                                          int64_t line, int64_t k_count) {
        const element *base = static_cast<const element *>(operand) + offset;
        origin = base + (K_MAJOR ? mn * line : mn);
        stride = line;
        k = k_count;
        left = static_cast<int>(smaller(mn_end - mn, EXTENT));
        in_place = reinterpret_cast<uint64_t>(base) % 32 == 0 && line > 0 && line <= LONGEST_LINE;
    }

    /* The block at (mn, k_first) from the warp's corner. What lies outside the operand becomes zero: such blocks, and
     * those that wmma cannot take, go through the patch, half a line a lane. */
    template <class Fragment> __device__ __forceinline__ void load(Fragment &fragment, int mn, int64_t k_first,
                                                                   element *patch, int lane) const {
        const element *block = origin + (K_MAJOR ? mn * stride + k_first : mn + k_first * stride);
        const int mn_left = left - mn;
        const int k_left = static_cast<int>(smaller(k - k_first, 16));
        if (in_place && mn_left >= 16 && k_left == 16) {
            nvcuda::wmma::load_matrix_sync(fragment, block, static_cast<unsigned>(stride));
            return;
        }
        const int line = lane / 2;
        const int first = lane % 2 * 8;
        const bool inside = line < (K_MAJOR ? mn_left : k_left);
        const int count = (K_MAJOR ? k_left : mn_left) - first; /* elements from `first` on */
        /* Half a line starts at 16 bytes. Only bits are moved. */
        const uint16_t *from = reinterpret_cast<const uint16_t *>(block + line * stride + first);
        uint16_t *to = reinterpret_cast<uint16_t *>(patch + line * 16 + first);
        if (inside && count >= 8) {
            *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
        } else {
#pragma unroll
            for (int e = 0; e < 8; e++) {
                to[e] = inside && e < count ? from[e] : 0;
            }
        }
        __syncwarp();
        load_shared(fragment, patch, 16);
        __syncwarp();
    }
};

template <class In, int ORDER, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N>
struct wmma_naive_kernel {
    static constexpr bool A_K_MAJOR = ORDER == TCG_nn || ORDER == TCG_nt;
    static constexpr bool B_K_MAJOR = ORDER == TCG_nt || ORDER == TCG_tt;
    static_assert(BLOCK_K == 16, "one fragment deep");

    static constexpr int WARP_M = BLOCK_M / WARPS_M;
    static constexpr int WARP_N = BLOCK_N / WARPS_N;
    static constexpr int TILES_M = WARP_M / 16; /* fragments a warp */
    static constexpr int TILES_N = WARP_N / 16;
    static constexpr int PATCH_BYTES = 16 * 16 * 4; /* a fragment of sums, or of an operand */
    static_assert(WARPS_M * WARPS_N * PATCH_BYTES == TCG_WMMA_NAIVE_SMEM(0, 0, 0, WARPS_M, WARPS_N, 1, 0),
                  "what the host asks for");

    typedef wmma_acc accumulators[TILES_M][TILES_N];

    static __device__ __forceinline__ void multiply(const tcg_gemm_args &args, const tile_place &place, int64_t m,
                                                    int64_t n, char *patch, int lane, accumulators &acc) {
        operand_blocks<In, A_K_MAJOR, WARP_M> a_blocks;
        operand_blocks<In, B_K_MAJOR, WARP_N> b_blocks;
        a_blocks.start(args.a, place.offset.a, m, args.m, A_K_MAJOR ? args.a_row : args.a_col, args.k);
        b_blocks.start(args.b, place.offset.b, n, args.n, B_K_MAJOR ? args.b_col : args.b_row, args.k);
        typename wmma_element<In>::type *operand_patch = reinterpret_cast<typename wmma_element<In>::type *>(patch);
#pragma unroll 1
        for (int64_t k = 0; k < args.k; k += 16) {
            wmma_a<In, A_K_MAJOR> a[TILES_M];
            wmma_b<In, B_K_MAJOR> b[TILES_N];
#pragma unroll
            for (int i = 0; i < TILES_M; i++) {
                a_blocks.load(a[i], i * 16, k, operand_patch, lane);
            }
#pragma unroll
            for (int j = 0; j < TILES_N; j++) {
                b_blocks.load(b[j], j * 16, k, operand_patch, lane);
            }
#pragma unroll
            for (int i = 0; i < TILES_M; i++) {
#pragma unroll
                for (int j = 0; j < TILES_N; j++) {
                    nvcuda::wmma::mma_sync(acc[i][j], a[i], b[j], acc[i][j]);
                }
            }
        }
    }

    /* C fragment by fragment through the patch, so that it can be rounded and any stride and edge be served. */
    template <class T, bool ALONG_M> static __device__ __forceinline__ void
    store(const accumulators &acc, char *patch, int lane, const epilogue_target &c) {
        float *sums = reinterpret_cast<float *>(patch);
#pragma unroll
        for (int i = 0; i < TILES_M; i++) {
#pragma unroll
            for (int j = 0; j < TILES_N; j++) {
                nvcuda::wmma::store_matrix_sync(sums, acc[i][j], 16,
                                                ALONG_M ? nvcuda::wmma::mem_col_major : nvcuda::wmma::mem_row_major);
                __syncwarp();
                store_patch<T, ALONG_M, 16, 16, 16>(sums, lane,
                                                    part_of(c, i * 16, j * 16, static_cast<int>(sizeof(T))));
                __syncwarp();
            }
        }
    }

    template <class T> static __device__ __forceinline__ void store(const accumulators &acc, char *patch, int lane,
                                                                    const epilogue_target &c) {
        if (c.col_stride != 1 && c.row_stride == 1) {
            store<T, true>(acc, patch, lane, c);
        } else {
            store<T, false>(acc, patch, lane, c);
        }
    }

    static __device__ __forceinline__ void run(const tcg_gemm_args &args, char *smem) {
        const int warp = threadIdx.x / 32;
        const int lane = threadIdx.x % 32;
        char *patch = smem + warp * PATCH_BYTES;
        for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
            const tile_place place = place_tile(args, tile);
            const epilogue_target c = warp_target(
                args, place.offset.c, static_cast<int64_t>(place.tile_m) * BLOCK_M + warp % WARPS_M * WARP_M,
                static_cast<int64_t>(place.tile_n) * BLOCK_N + warp / WARPS_M * WARP_N);
            if (c.rows <= 0 || c.cols <= 0) {
                continue;
            }
            accumulators acc;
#pragma unroll
            for (int i = 0; i < TILES_M; i++) {
#pragma unroll
                for (int j = 0; j < TILES_N; j++) {
                    nvcuda::wmma::fill_fragment(acc[i][j], 0.0f);
                }
            }
            multiply(args, place, c.row, c.col, patch, lane, acc);
            if (args.c_dtype == TCG_f32) {
                store<f32>(acc, patch, lane, c);
            } else {
                store<In>(acc, patch, lane, c);
            }
        }
    }
};

#define TCG_WMMA_NAIVE_KERNEL(in, order, BM, BN, BK, WM, WN, STAGES)                                          \
    extern "C" __global__ void __launch_bounds__(TCG_WMMA_NAIVE_THREADS(BM, BN, WM, WN), 4) TCG_WARPS_NAME(   \
        wmma_naive_sm80, in, order, BM, BN, BK, WM, WN, STAGES)(const __grid_constant__ tcg_gemm_args args) { \
        extern __shared__ __align__(1024) char smem[];                                                        \
        static_assert(STAGES == 1, "nothing is loaded ahead");                                                \
        wmma_naive_kernel<in, TCG_##order, BM, BN, BK, WM, WN>::run(args, smem);                              \
    }

#define TCG_WMMA_NAIVE(...) TCG_ROW(TCG_WMMA_NAIVE_KERNEL, __VA_ARGS__)
#include "table.def"
