/* The kernels around a product: tcg_copy packs an operand that no kernel can read where it lies, tcg_reduce adds
 * up the partial sums of a split K. Both run with any 1-D grid. */
#include <stdint.h>

#include "abi.h"
#include "schedule.cuh"
#include "types.cuh"

/* A space of fast x slow items a batch entry, cut into tiles for blocks of THREADS threads: a power of two of threads
 * side by side on the fast axis, the others and DEPTH repeats on the slow one. */
template <int THREADS, int DEPTH> struct walk {
    int64_t tiles_fast, tiles_slow, tiles;
    int width;

    __device__ __forceinline__ walk(int64_t fast, int64_t slow, int64_t batches) {
        width = 1;
        while (width < THREADS && width < fast) {
            width *= 2;
        }
        tiles_fast = (fast + width - 1) / width;
        tiles_slow = (slow + THREADS / width * DEPTH - 1) / (THREADS / width * DEPTH);
        tiles = tiles_fast * tiles_slow * batches;
    }

    struct place {
        /* This thread's first item; its next ones are `step` further on the slow axis. */
        int64_t fast, slow, batch;
        int step;
    };
    __device__ __forceinline__ place at(int64_t tile) const {
        place here;
        const int64_t outer = divide(tile, tiles_fast);
        here.batch = divide(outer, tiles_slow);
        here.step = THREADS / width;
        here.fast = (tile - outer * tiles_fast) * width + threadIdx.x % width;
        here.slow = (outer - here.batch * tiles_slow) * here.step * DEPTH + threadIdx.x / width;
        return here;
    }
};

/* ---- tcg_copy ----------------------------------------------------------------------------------------------- */

/* 16 bytes that start `shift` bytes into `low`, the rest of them from `high`. */
static __device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, int shift) {
    const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t by_8[6], by_4[5];
#pragma unroll
    for (int i = 0; i < 6; i++) {
        by_8[i] = shift & 8 ? w[i + 2] : w[i];
    }
#pragma unroll
    for (int i = 0; i < 5; i++) {
        by_4[i] = shift & 4 ? by_8[i + 1] : by_8[i];
    }
    const uint32_t bits = shift % 4 * 8;
    return make_uint4(__funnelshift_r(by_4[0], by_4[1], bits), __funnelshift_r(by_4[1], by_4[2], bits),
                      __funnelshift_r(by_4[2], by_4[3], bits), __funnelshift_r(by_4[3], by_4[4], bits));
}

/* 16 bytes of a row from its element `col` on, zeros past its end. */
template <class T> static __device__ __forceinline__ uint4 load_edge(const T *row, int64_t col, int64_t cols) {
    constexpr int ELEMS = 16 / static_cast<int>(sizeof(T));
    uint32_t w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < ELEMS; e++) {
        const uint32_t value = col + e < cols ? row[col + e] : 0;
        w[e * static_cast<int>(sizeof(T)) / 4] |= value << e * static_cast<int>(sizeof(T)) % 4 * 8;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Contiguous source rows to 16-byte aligned rows, whatever the source's alignment: inside a row 16 bytes are cut out of
 * the two aligned words that hold them. A thread's loads are all issued before the first is used. */
template <class T> static __device__ __forceinline__ void copy_rows(const tcg_copy_args &args) {
    constexpr int ELEMS = 16 / static_cast<int>(sizeof(T));
    constexpr int DEPTH = 4;
    const int64_t pieces = args.dst_row / ELEMS; /* 16-byte pieces of a written row */
    const int64_t all = pieces * args.rows * args.batches;
    const int64_t step = static_cast<int64_t>(gridDim.x) * TCG_COPY_THREADS;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * TCG_COPY_THREADS + threadIdx.x; first < all;
         first += step * DEPTH) {
        const T *row[DEPTH];
        T *to[DEPTH];
        int64_t col[DEPTH];
        int shift[DEPTH];
        bool inside[DEPTH];
        uint4 low[DEPTH], high[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int64_t piece = smaller(first + i * step, all - 1); /* past the end: the last one once more */
            const int64_t line = divide(piece, pieces);
            const int64_t entry = divide(line, args.rows);
            const batch_offsets offset = batch_offsets_of(args.batch, args.batch_ndim, entry);
            col[i] = (piece - line * pieces) * ELEMS;
            row[i] = static_cast<const T *>(args.src) + offset.a + (line - entry * args.rows) * args.src_row;
            to[i] = static_cast<T *>(args.dst) + offset.c + (line - entry * args.rows) * args.dst_row + col[i];
            shift[i] = static_cast<int>(reinterpret_cast<uint64_t>(row[i] + col[i]) % 16);
            const int before = shift[i] / static_cast<int>(sizeof(T)); /* elements of the first word not wanted */
            inside[i] = before <= col[i] && col[i] + (shift[i] == 0 ? ELEMS : 2 * ELEMS - before) <= args.cols;
            const uint4 *word =
                reinterpret_cast<const uint4 *>(reinterpret_cast<uint64_t>(row[i] + col[i]) - shift[i]);
            low[i] = high[i] = make_uint4(0, 0, 0, 0);
            if (inside[i]) {
                low[i] = word[0];
            }
            if (inside[i] && shift[i] != 0) {
                high[i] = word[1];
            }
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            uint4 value = shifted(low[i], high[i], shift[i]);
            if (!inside[i]) {
                value = load_edge(row[i], col[i], args.cols);
            }
            *reinterpret_cast<uint4 *>(to[i]) = value;
        }
    }
}

/* Any source, element by element along the destination's rows. */
template <class T> static __device__ __forceinline__ void copy_elements(const tcg_copy_args &args) {
    constexpr int DEPTH = 8;
    const walk<TCG_COPY_THREADS, DEPTH> space(args.dst_row, args.rows, args.batches);
    for (int64_t tile = blockIdx.x; tile < space.tiles; tile += gridDim.x) {
        const auto here = space.at(tile);
        const batch_offsets offset = batch_offsets_of(args.batch, args.batch_ndim, here.batch);
        const int64_t col = here.fast;
        if (col >= args.dst_row) {
            continue;
        }
        const T *src = static_cast<const T *>(args.src) + offset.a + col * args.src_col;
        T *dst = static_cast<T *>(args.dst) + offset.c + col;
        T values[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int64_t row = here.slow + i * here.step;
            values[i] = row < args.rows && col < args.cols ? src[row * args.src_row] : 0;
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int64_t row = here.slow + i * here.step;
            if (row < args.rows) {
                dst[row * args.dst_row] = values[i];
            }
        }
    }
}

/* Contiguous source columns: square tiles turned in shared memory, so that both sides run along memory. */
template <class T> static __device__ __forceinline__ void copy_transposed(const tcg_copy_args &args) {
    constexpr int TILE = 64;
    constexpr int PAD = 4 / static_cast<int>(sizeof(T)); /* rows of an odd number of banks */
    constexpr int STEP = TCG_COPY_THREADS / TILE;
    constexpr int PAIR_STEP = TCG_COPY_THREADS / (TILE / 2);
    __shared__ __align__(16) T turned[TILE][TILE + PAD];

    uint64_t dst_bits = reinterpret_cast<uint64_t>(args.dst) | static_cast<uint64_t>(args.dst_row) * sizeof(T);
    for (int d = 0; d < args.batch_ndim; d++) {
        dst_bits |= static_cast<uint64_t>(args.batch[d].c) * sizeof(T);
    }
    const bool pairs = sizeof(T) == 2 && widest_access(dst_bits) >= 4;
    const int64_t tiles_row = (args.rows + TILE - 1) / TILE;
    const int64_t tiles_col = (args.dst_row + TILE - 1) / TILE;
    const int64_t tiles = tiles_row * tiles_col * args.batches;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t outer = divide(tile, tiles_row);
        const int64_t entry = divide(outer, tiles_col);
        const int64_t row = (tile - outer * tiles_row) * TILE;
        const int64_t col = (outer - entry * tiles_col) * TILE;
        const batch_offsets offset = batch_offsets_of(args.batch, args.batch_ndim, entry);
        const int64_t rows = smaller(args.rows - row, TILE);
        const int64_t cols = smaller(args.cols - col, TILE); /* may be negative: padding only */
        const int64_t written = smaller(args.dst_row - col, TILE);
        const T *src = static_cast<const T *>(args.src) + offset.a + row + col * args.src_col;
        T *dst = static_cast<T *>(args.dst) + offset.c + row * args.dst_row + col;

        {
            const int r = threadIdx.x % TILE;
            const int c = threadIdx.x / TILE;
            T values[TILE / STEP];
#pragma unroll
            for (int i = 0; i < TILE / STEP; i++) {
                values[i] = r < rows && c + i * STEP < cols ? src[r + (c + i * STEP) * args.src_col] : 0;
            }
#pragma unroll
            for (int i = 0; i < TILE / STEP; i++) {
                turned[r][c + i * STEP] = values[i];
            }
        }
        __syncthreads();
        if (pairs) {
            const int c = threadIdx.x % (TILE / 2) * 2;
            for (int r = threadIdx.x / (TILE / 2); r < rows; r += PAIR_STEP) {
                if (c < written) {
                    *reinterpret_cast<uint32_t *>(&dst[r * args.dst_row + c]) =
                        *reinterpret_cast<const uint32_t *>(&turned[r][c]);
                }
            }
        } else {
            const int c = threadIdx.x % TILE;
            for (int r = threadIdx.x / TILE; r < rows; r += STEP) {
                if (c < written) {
                    dst[r * args.dst_row + c] = turned[r][c];
                }
            }
        }
        __syncthreads();
    }
}

template <class T> static __device__ __forceinline__ void copy_strided(const tcg_copy_args &args) {
    uint64_t dst_bits = reinterpret_cast<uint64_t>(args.dst) | static_cast<uint64_t>(args.dst_row) * sizeof(T);
    for (int d = 0; d < args.batch_ndim; d++) {
        dst_bits |= static_cast<uint64_t>(args.batch[d].c) * sizeof(T);
    }
    if (args.src_col == 1 && widest_access(dst_bits) == 16) {
        copy_rows<T>(args);
    } else if (args.src_row == 1 && args.src_col != 1) {
        copy_transposed<T>(args);
    } else {
        copy_elements<T>(args);
    }
}

extern "C" __global__ void __launch_bounds__(TCG_COPY_THREADS, 2)
    tcg_copy(const __grid_constant__ tcg_copy_args args) {
    if (args.elem_bytes == 2) {
        copy_strided<uint16_t>(args);
    } else {
        copy_strided<uint32_t>(args);
    }
}

/* ---- tcg_reduce --------------------------------------------------------------------------------------------- */

/* Four neighbours of C's row from their sums. */
template <class T> static __device__ __forceinline__ void store_four(T *to, const float (&sums)[4]) {
    uint2 bits;
    bits.x = pair_from_floats<T>(sums[0], sums[1]);
    bits.y = pair_from_floats<T>(sums[2], sums[3]);
    *reinterpret_cast<uint2 *>(to) = bits;
}

static __device__ __forceinline__ void store_four(f32 *to, const float (&sums)[4]) {
    *reinterpret_cast<float4 *>(to) = make_float4(sums[0], sums[1], sums[2], sums[3]);
}

/* ELEMS: partials a thread reads at once, along n. Neighbouring threads run along C's contiguous axis. */
template <class T, int ELEMS>
static __device__ __forceinline__ void reduce(const tcg_reduce_args &args, bool vectors) {
    const bool along_m = args.c_row == 1 && args.c_col != 1;
    const int64_t pieces = args.n / ELEMS;
    const walk<TCG_REDUCE_THREADS, 1> space(along_m ? args.m : pieces, along_m ? pieces : args.m, args.batches);
    for (int64_t tile = blockIdx.x; tile < space.tiles; tile += gridDim.x) {
        const auto here = space.at(tile);
        const int64_t row = along_m ? here.fast : here.slow;
        const int64_t piece = along_m ? here.slow : here.fast;
        if (row >= args.m || piece >= pieces) {
            continue;
        }
        const batch_offsets offset = batch_offsets_of(args.batch, args.batch_ndim, here.batch);
        const float *partial = args.partials + (here.batch * args.m + row) * args.n + piece * ELEMS;
        float sums[ELEMS];
#pragma unroll 8
        for (int split = 0; split < args.splits; split++) {
            float values[ELEMS];
            if (ELEMS == 4) {
                const float4 four = *reinterpret_cast<const float4 *>(partial);
                values[0] = four.x, values[ELEMS / 4] = four.y, values[ELEMS / 2] = four.z,
                values[ELEMS - 1] = four.w;
            } else {
                values[0] = *partial;
            }
#pragma unroll
            for (int e = 0; e < ELEMS; e++) {
                sums[e] = split == 0 ? values[e] : sums[e] + values[e];
            }
            partial += args.c_split;
        }
        T *to = static_cast<T *>(args.c) + offset.c + row * args.c_row + piece * ELEMS * args.c_col;
        if constexpr (ELEMS == 4) {
            if (vectors) {
                store_four(to, sums);
                continue;
            }
        }
#pragma unroll
        for (int e = 0; e < ELEMS; e++) {
            to[e * args.c_col] = from_float<T>(sums[e]);
        }
    }
}

template <class T> static __device__ __forceinline__ void reduce_any(const tcg_reduce_args &args) {
    uint64_t bits = reinterpret_cast<uint64_t>(args.c) | static_cast<uint64_t>(args.c_row) * sizeof(T);
    for (int d = 0; d < args.batch_ndim; d++) {
        bits |= static_cast<uint64_t>(args.batch[d].c) * sizeof(T);
    }
    const bool vectors = args.c_col == 1 && widest_access(bits) >= 4 * static_cast<int>(sizeof(T));
    if (widest_access(reinterpret_cast<uint64_t>(args.partials) | static_cast<uint64_t>(args.n | args.c_split) * 4) ==
        16) {
        reduce<T, 4>(args, vectors);
    } else {
        reduce<T, 1>(args, false);
    }
}

extern "C" __global__ void __launch_bounds__(TCG_REDUCE_THREADS)
    tcg_reduce(const __grid_constant__ tcg_reduce_args args) {
    if (args.c_dtype == TCG_f32) {
        reduce_any<f32>(args);
    } else if (args.c_dtype == TCG_f16) {
        reduce_any<f16>(args);
    } else {
        reduce_any<bf16>(args);
    }
}
