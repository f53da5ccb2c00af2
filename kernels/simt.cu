/* Family simt: exact float32 on the ordinary cores. A block computes one tile of C from two buffers in shared
 * memory, a thread 8 x 8 elements of it in registers. Any strides of A, B and C; K in order, one fused
 * multiply-add an element. */
#include <stdint.h>

#include "abi.h"
#include "schedule.cuh"

/* One thread's share of an operand's tiles: BLOCK_MN x BLOCK_K elements, kept in shared memory as rows of m or n.
 * Zeros stand for what is outside the operand. */
template <int BLOCK_MN, int BLOCK_K> struct simt_copy {
    static constexpr int COUNT = BLOCK_MN * BLOCK_K / TCG_SIMT_THREADS;
    static constexpr int ROW = BLOCK_MN + 4; /* rows start four banks apart, so that stores along K do not collide */

    const float *src; /* this thread's first element of the next k-block */
    int64_t step;     /* elements to its next one, in memory */
    int64_t k_stride;
    int mn_left, k;      /* of the operand's rows or columns, from the first element on; and its place along K */
    int mn_step, k_step; /* to the next one, in the tile */
    int place;           /* of the first element in the tile */
    float held[COUNT];

    /* Neighbouring threads take neighbours along the axis that is contiguous in memory. */
    __device__ __forceinline__ void start(const float *origin, int64_t first, int64_t end, int64_t mn_stride,
                                          int64_t k_stride_) {
        const int thread = threadIdx.x;
        const bool along_k = k_stride_ == 1;
        const int mn = along_k ? thread / BLOCK_K : thread % BLOCK_MN;
        k = along_k ? thread % BLOCK_K : thread / BLOCK_MN;
        k_stride = k_stride_;
        mn_step = along_k ? TCG_SIMT_THREADS / BLOCK_K : 0;
        k_step = along_k ? 0 : TCG_SIMT_THREADS / BLOCK_MN;
        mn_left = static_cast<int>(smaller(end - first, BLOCK_MN)) - mn;
        place = k * ROW + mn;
        src = origin + (first + mn) * mn_stride + k * k_stride;
        step = mn_step * mn_stride + k_step * k_stride;
    }

    /* k_left (<= 0: none) of the k-block's elements along K are there. */
    __device__ __forceinline__ void load(int k_left) {
        const float *from = src;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const bool inside = i * mn_step < mn_left && k + i * k_step < k_left;
            held[i] = inside ? *from : 0.0f;
            from += step;
        }
        src += BLOCK_K * k_stride;
    }

    /* tile: BLOCK_K rows of ROW elements. */
    __device__ __forceinline__ void store(float *tile) const {
        float *to = tile + place;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            to[i * (k_step * ROW + mn_step)] = held[i];
        }
    }
};

/* Eight elements of a row of a tile: four from `first`, four from half a tile on, which keeps a warp's reads
 * apart. */
template <int BLOCK_MN> static __device__ __forceinline__ void load_eight(float (&values)[8], const float *first) {
    const float4 low = *reinterpret_cast<const float4 *>(first);
    const float4 high = *reinterpret_cast<const float4 *>(first + BLOCK_MN / 2);
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

template <int BLOCK_M, int BLOCK_N, int BLOCK_K>
static __device__ __forceinline__ void simt(const tcg_gemm_args &args) {
    static_assert(BLOCK_M * BLOCK_N == 64 * TCG_SIMT_THREADS, "8 x 8 elements a thread");
    typedef simt_copy<BLOCK_M, BLOCK_K> a_copy;
    typedef simt_copy<BLOCK_N, BLOCK_K> b_copy;
    __shared__ __align__(16) float a_tiles[2][BLOCK_K * a_copy::ROW];
    __shared__ __align__(16) float b_tiles[2][BLOCK_K * b_copy::ROW];
    const int thread_m = threadIdx.x / (BLOCK_N / 8) * 4;
    const int thread_n = threadIdx.x % (BLOCK_N / 8) * 4;

    for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
        const tile_place place = place_tile(args, tile);
        const int64_t m = static_cast<int64_t>(place.tile_m) * BLOCK_M;
        const int64_t n = static_cast<int64_t>(place.tile_n) * BLOCK_N;
        int64_t k_left =
            place.k_end > place.k_begin ? place.k_end - place.k_begin : 0; /* from the tile in `read` on */

        a_copy a;
        b_copy b;
        a.start(static_cast<const float *>(args.a) + place.offset.a + place.k_begin * args.a_col, m, args.m,
                args.a_row, args.a_col);
        b.start(static_cast<const float *>(args.b) + place.offset.b + place.k_begin * args.b_row, n, args.n,
                args.b_col, args.b_row);
        float acc[8][8] = {};
        int read = 0;
        a.load(static_cast<int>(smaller(k_left, BLOCK_K)));
        b.load(static_cast<int>(smaller(k_left, BLOCK_K)));
        a.store(a_tiles[read]);
        b.store(b_tiles[read]);
        __syncthreads();

        for (; k_left > 0; k_left -= BLOCK_K) {
            const int next_left = static_cast<int>(smaller(k_left - BLOCK_K, BLOCK_K));
            a.load(next_left);
            b.load(next_left);
            /* Unrolled further, two blocks an SM would not have the registers. */
#pragma unroll 2
            for (int k = 0; k < BLOCK_K; k++) {
                float a_row[8], b_row[8];
                load_eight<BLOCK_M>(a_row, &a_tiles[read][k * a_copy::ROW + thread_m]);
                load_eight<BLOCK_N>(b_row, &b_tiles[read][k * b_copy::ROW + thread_n]);
#pragma unroll
                for (int i = 0; i < 8; i++) {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        acc[i][j] = fmaf(a_row[i], b_row[j], acc[i][j]);
                    }
                }
            }
            a.store(a_tiles[read ^ 1]);
            b.store(b_tiles[read ^ 1]);
            __syncthreads();
            read ^= 1;
        }

        float *c = static_cast<float *>(args.c) + place.offset.c;
        const bool vectors = args.c_col == 1 && args.c_vec_bytes == 16;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int64_t row = m + i / 4 * (BLOCK_M / 2) + thread_m + i % 4;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int64_t col = n + half * (BLOCK_N / 2) + thread_n;
                float *to = c + row * args.c_row + col * args.c_col;
                const float (&values)[8] = acc[i];
                if (row < args.m && vectors && col + 4 <= args.n) {
                    *reinterpret_cast<float4 *>(to) = make_float4(values[4 * half], values[4 * half + 1],
                                                                  values[4 * half + 2], values[4 * half + 3]);
                } else if (row < args.m) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        if (col + j < args.n) {
                            to[j * args.c_col] = values[4 * half + j];
                        }
                    }
                }
            }
        }
        __syncthreads();
    }
}

#define TCG_SIMT(in, BM, BN, BK)                                                              \
    extern "C" __global__ void __launch_bounds__(TCG_SIMT_THREADS, 2)                         \
        tcg_simt_sm80_##in##_##BM##x##BN##x##BK(const __grid_constant__ tcg_gemm_args args) { \
        simt<BM, BN, BK>(args);                                                               \
    }
#include "table.def"
