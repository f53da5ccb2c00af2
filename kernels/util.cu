/* The kernels around a product: tcg_copy packs an operand that no kernel can read where it lies, tcg_reduce adds
 * up the partial sums of a split K. Both run with any 1-D grid. */
#include <stdint.h>

#include "abi.h"
#include "ptx/griddepcontrol.cuh"
#include "schedule.cuh"
#include "types.cuh"
#include "words.cuh"

/* A space of fast x slow items a batch entry, cut into tiles for 2^threads_log2 threads: a power of two of them side by
 * side on the fast axis, the others and 2^DEPTH_LOG2 repeats on the slow one. */
template <int DEPTH_LOG2> struct walk {
    int64_t tiles_fast, tiles_slow, tiles;
    int width_log2, height_log2;

    __device__ __forceinline__ walk(int threads_log2, int64_t fast, int64_t slow, int64_t batches) {
        width_log2 = fast > 1 << threads_log2 ? threads_log2 : 32 - __clz(static_cast<int>(fast) - 1);
        height_log2 = threads_log2 - width_log2;
        tiles_fast = ((fast - 1) >> width_log2) + 1;
        tiles_slow = ((slow - 1) >> (height_log2 + DEPTH_LOG2)) + 1;
        tiles = tiles_fast * tiles_slow * batches;
    }

    struct place {
        /* This thread's first item; its next ones are `step` further on the slow axis. */
        int64_t fast, slow, batch;
        int step;
    };
    __device__ __forceinline__ place at(int64_t tile, int thread) const {
        place here;
        const int64_t outer = divide(tile, tiles_fast);
        here.batch = divide(outer, tiles_slow);
        here.step = 1 << height_log2;
        here.fast = ((tile - outer * tiles_fast) << width_log2) + (thread & ((1 << width_log2) - 1));
        here.slow = ((outer - here.batch * tiles_slow) << (height_log2 + DEPTH_LOG2)) + (thread >> width_log2);
        return here;
    }
};

/* Where a batch entry starts, in elements: of the axes' strides a. */
static __device__ __forceinline__ int64_t entry_offset(const tcg_batch_dim *batch, int ndim, int64_t entry) {
    int64_t offset = 0;
#pragma unroll 1
    for (int d = 0; d < ndim; d++) {
        const int64_t outer = d + 1 < ndim ? divide(entry, batch[d].size) : 0;
        offset += (entry - outer * batch[d].size) * batch[d].a;
        entry = outer;
    }
    return offset;
}

/* ---- tcg_copy ----------------------------------------------------------------------------------------------- */

enum { HALVES = 8 }; /* copy_rows counts in units of two bytes: so many are a piece of 16 */

/* The first `count` halves of a piece, then zeros. */
static __device__ __forceinline__ uint4 load_edge(const uint16_t *from, int count) {
    uint32_t w[HALVES / 2];
#pragma unroll
    for (int i = 0; i < HALVES / 2; i++) {
        const uint32_t low = 2 * i < count ? from[2 * i] : 0;
        const uint32_t high = 2 * i + 1 < count ? from[2 * i + 1] : 0;
        w[i] = low | high << 16;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Contiguous source rows, whatever their alignment: inside a row 16 bytes are cut out of the two aligned words that hold
 * them, at its ends they are put together from halves, so that nothing outside the row is read. The destination is one
 * row of pieces of 16 bytes, over which the job's threads stride together; a thread's place in the source follows without
 * a division. Its loads are all issued before the first is used. */
static __device__ __forceinline__ void copy_rows(const tcg_copy_job &job, uint32_t block, int elem_halves) {
    constexpr int DEPTH = TCG_COPY_DEPTH;
    const int32_t batches = static_cast<int32_t>(job.batches), rows = static_cast<int32_t>(job.rows);
    const int32_t pieces = static_cast<int32_t>(job.row_pieces.by);
    const int64_t cols = job.cols * elem_halves, src_row = job.src_row * elem_halves,
                  src_entry = job.batch_ndim > 0 ? job.batch[0].a * elem_halves : 0;
    const int32_t first = static_cast<int32_t>(block * TCG_COPY_THREADS + threadIdx.x);
    const int32_t line = divide(first, job.row_pieces);
    int32_t entry = divide(line, job.entry_rows);
    int32_t row = line - entry * rows;
    int32_t piece = first - line * pieces;
    const uint16_t *src = static_cast<const uint16_t *>(job.src);
    uint4 *to = static_cast<uint4 *>(job.dst) + first;

    griddepcontrol_wait();
    while (entry < batches) {
        const uint16_t *from[DEPTH];
        int count[DEPTH];   /* halves before the row's end, as far as they matter */
        bool inside[DEPTH]; /* both words are in the row */
        bool exists[DEPTH];
        uint4 low[DEPTH], high[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int64_t col = static_cast<int64_t>(piece) * HALVES;
            from[i] = src + entry * src_entry + row * src_row + col;
            exists[i] = entry < batches;
            count[i] = exists[i] ? static_cast<int>(smaller(cols - col, 2 * HALVES)) : 0;
            const int shift = static_cast<int>(reinterpret_cast<uint64_t>(from[i]) % 16);
            const int before = shift / 2; /* halves of the first word not wanted */
            inside[i] = (before == 0 || piece > 0) && count[i] >= (before == 0 ? HALVES : 2 * HALVES - before);
            const uint4 *word = reinterpret_cast<const uint4 *>(from[i] - before);
            low[i] = high[i] = make_uint4(0, 0, 0, 0);
            if (inside[i]) {
                low[i] = word[0];
            }
            if (inside[i] && before != 0) {
                high[i] = word[1];
            }
            piece += job.step_piece;
            row += job.step_row;
            entry += job.step_entry;
            if (piece >= pieces) {
                piece -= pieces;
                row++;
            }
            if (row >= rows) {
                row -= rows;
                entry++;
            }
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (!inside[i] && exists[i]) {
                low[i] = load_edge(from[i], count[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (exists[i]) {
                const int shift = static_cast<int>(reinterpret_cast<uint64_t>(from[i]) % 16);
                *to = cut_out(low[i], high[i], inside[i] ? shift : 0);
            }
            to += job.blocks * TCG_COPY_THREADS;
        }
    }
}

/* Any source, element by element along the destination's rows. */
template <class T> static __device__ __forceinline__ void copy_elements(const tcg_copy_job &job, uint32_t block) {
    constexpr int DEPTH_LOG2 = 3, DEPTH = 1 << DEPTH_LOG2;
    const walk<DEPTH_LOG2> space(TCG_COPY_THREADS_LOG2, job.dst_row, job.rows, job.batches);
    griddepcontrol_wait();
    for (int64_t tile = block; tile < space.tiles; tile += job.blocks) {
        const auto here = space.at(tile, threadIdx.x);
        const int64_t col = here.fast;
        if (col >= job.dst_row) {
            continue;
        }
        const T *src =
            static_cast<const T *>(job.src) + entry_offset(job.batch, job.batch_ndim, here.batch) + col * job.src_col;
        T *dst = static_cast<T *>(job.dst) + here.batch * job.rows * job.dst_row + col;
        T values[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int64_t row = here.slow + i * here.step;
            values[i] = row < job.rows && col < job.cols ? src[row * job.src_row] : 0;
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int64_t row = here.slow + i * here.step;
            if (row < job.rows) {
                dst[row * job.dst_row] = values[i];
            }
        }
    }
}

/* Contiguous source columns: square tiles turned in shared memory, so that both sides run along memory. `patch`:
 * TCG_COPY_TURN rows of an odd number of words. */
template <class T>
static __device__ __forceinline__ void copy_transposed(const tcg_copy_job &job, uint32_t block, char *patch) {
    constexpr int PITCH = TCG_COPY_TURN + 4 / static_cast<int>(sizeof(T));
    constexpr int STEP = TCG_COPY_THREADS / TCG_COPY_TURN;
    constexpr int WIDE = 4 / static_cast<int>(sizeof(T)); /* elements of a store */
    constexpr int WIDE_STEP = STEP * WIDE;
    T *turned = reinterpret_cast<T *>(patch);

    const int64_t tiles_row = (job.rows + TCG_COPY_TURN - 1) / TCG_COPY_TURN;
    const int64_t tiles_col = (job.dst_row + TCG_COPY_TURN - 1) / TCG_COPY_TURN;
    const int64_t tiles = tiles_row * tiles_col * job.batches;
    griddepcontrol_wait();
    for (int64_t tile = block; tile < tiles; tile += job.blocks) {
        const int64_t outer = divide(tile, tiles_row);
        const int64_t entry = divide(outer, tiles_col);
        const int64_t row = (tile - outer * tiles_row) * TCG_COPY_TURN;
        const int64_t col = (outer - entry * tiles_col) * TCG_COPY_TURN;
        const int64_t rows = smaller(job.rows - row, TCG_COPY_TURN);
        const int64_t cols = smaller(job.cols - col, TCG_COPY_TURN); /* may be negative: padding only */
        const int64_t written = smaller(job.dst_row - col, TCG_COPY_TURN);
        const T *src = static_cast<const T *>(job.src) + entry_offset(job.batch, job.batch_ndim, entry) + row +
                       col * job.src_col;
        T *dst = static_cast<T *>(job.dst) + (entry * job.rows + row) * job.dst_row + col;

        {
            const int r = threadIdx.x % TCG_COPY_TURN;
            const int c = threadIdx.x / TCG_COPY_TURN;
            T values[TCG_COPY_TURN / STEP];
#pragma unroll
            for (int i = 0; i < TCG_COPY_TURN / STEP; i++) {
                values[i] = r < rows && c + i * STEP < cols ? src[r + (c + i * STEP) * job.src_col] : 0;
            }
#pragma unroll
            for (int i = 0; i < TCG_COPY_TURN / STEP; i++) {
                turned[r * PITCH + c + i * STEP] = values[i];
            }
        }
        __syncthreads();
        const int c = threadIdx.x % (TCG_COPY_TURN / WIDE) * WIDE;
        for (int r = threadIdx.x / (TCG_COPY_TURN / WIDE); r < rows; r += WIDE_STEP) {
            if (c < written) {
                *reinterpret_cast<uint32_t *>(&dst[r * job.dst_row + c]) =
                    *reinterpret_cast<const uint32_t *>(&turned[r * PITCH + c]);
            }
        }
        __syncthreads();
    }
}

template <class T>
static __device__ __forceinline__ void copy_strided(const tcg_copy_job &job, uint32_t block, char *patch) {
    if (job.way == TCG_COPY_TURNED) {
        copy_transposed<T>(job, block, patch);
    } else {
        copy_elements<T>(job, block);
    }
}

extern "C" __global__ void __launch_bounds__(TCG_COPY_THREADS, TCG_COPY_BLOCKS)
    tcg_copy(const __grid_constant__ tcg_copy_args args) {
    extern __shared__ __align__(16) char patch[]; /* where a job is TCG_COPY_TURNED */
    griddepcontrol_launch_dependents();
    const int which = blockIdx.x >= args.job[0].blocks;
    const uint32_t block = blockIdx.x - (which ? args.job[0].blocks : 0);
    if (args.job[which].way == TCG_COPY_PIECES) {
        copy_rows(args.job[which], block, args.elem_bytes / 2);
    } else if (args.elem_bytes == 2) {
        copy_strided<uint16_t>(args.job[which], block, patch);
    } else {
        copy_strided<uint32_t>(args.job[which], block, patch);
    }
}

/* ---- tcg_reduce --------------------------------------------------------------------------------------------- */

enum { ELEMS = TCG_REDUCE_ELEMS };
static_assert(ELEMS == 4, "what float4 holds");

/* Neighbours of C's row from their sums, together: at a multiple of their bytes. By __stwb, a plain store that the compiler
 * does not take apart for what it shares with the stores of single elements. */
template <class T> static __device__ __forceinline__ void store_together(void *to, const float (&sums)[ELEMS]) {
    __stwb(static_cast<uint2 *>(to),
           make_uint2(pair_from_floats<T>(sums[0], sums[1]), pair_from_floats<T>(sums[2], sums[3])));
}

template <> __device__ __forceinline__ void store_together<f32>(void *to, const float (&sums)[ELEMS]) {
    __stwb(static_cast<float4 *>(to), make_float4(sums[0], sums[1], sums[2], sums[3]));
}

/* The first `count` of four neighbours' sums, from C's element `at` on. */
template <class T>
static __device__ __forceinline__ void store_sums(const tcg_reduce_args &args, int64_t at, const float (&sums)[ELEMS],
                                                  int64_t count) {
    T *to = static_cast<T *>(args.c) + at;
    if (args.c_together && count >= ELEMS) {
        store_together<T>(to, sums);
        return;
    }
#pragma unroll
    for (int e = 0; e < ELEMS; e++) {
        if (e < count) {
            to[e * args.c_col] = from_float<T>(sums[e]);
        }
    }
}

/* The order of a sum depends on the number of splits alone, not on the grid or the shape: each PARTS-th split goes to one
 * part, which adds its own in order, and then the parts are added in order. One thread does it all, or PARTS do, each of
 * another warp. */
enum { PARTS = TCG_REDUCE_PARTS, PART_THREADS = TCG_REDUCE_THREADS / PARTS };

static __device__ __forceinline__ void load_partials(float (&to)[ELEMS], const float *partial) {
    const float4 four = *reinterpret_cast<const float4 *>(partial);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

static __device__ __forceinline__ void add(float (&sums)[ELEMS], const float (&more)[ELEMS]) {
#pragma unroll
    for (int e = 0; e < ELEMS; e++) {
        sums[e] += more[e];
    }
}

/* One thread's sums of `count` > 0 times four values a `step` apart: in order where they are one part's, else by parts.
 * PARTS or half as many loads are on the way at once. */
template <bool ONE_PART>
static __device__ __forceinline__ void add_up(float (&sums)[ELEMS], const float *partial, int count, int64_t step) {
    float parts[PARTS][ELEMS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        if (i < count) {
            load_partials(parts[i], partial + i * step);
        }
    }
    if constexpr (!ONE_PART) {
#pragma unroll 1
        for (int first = PARTS; first < count; first += PARTS) {
            partial += PARTS * step;
#pragma unroll
            for (int half = 0; half < PARTS; half += PARTS / 2) {
                float more[PARTS / 2][ELEMS];
#pragma unroll
                for (int i = 0; i < PARTS / 2; i++) {
                    if (first + half + i < count) {
                        load_partials(more[i], partial + (half + i) * step);
                    }
                }
#pragma unroll
                for (int i = 0; i < PARTS / 2; i++) {
                    if (first + half + i < count) {
                        add(parts[half + i], more[i]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int e = 0; e < ELEMS; e++) {
        sums[e] = parts[0][e];
    }
#pragma unroll
    for (int i = 1; i < PARTS; i++) {
        if (i < count) {
            add(sums, parts[i]);
        }
    }
    if constexpr (ONE_PART) {
#pragma unroll 1
        for (int i = PARTS; i < count; i++) {
            float more[ELEMS];
            load_partials(more, partial + i * step);
            add(sums, more);
        }
    }
}

/* A thread adds up a piece, four neighbours of a line of partials, of which a line's last may hold fewer. Neighbouring threads
 * run along C's contiguous axis; where that is m, two of them share a line, so that both the partials' sectors of the L2
 * cache and C's are used whole. part_sums: PARTS * PART_THREADS * ELEMS of them. */
template <bool SHARED>
static __device__ __forceinline__ void reduce(const tcg_reduce_args &args, float *part_sums) {
    const bool along_m = args.c_row == 1 && args.c_col != 1;
    const int64_t pieces = args.partial_row / ELEMS;
    const int thread = SHARED ? threadIdx.x % PART_THREADS : threadIdx.x;
    const int part = SHARED ? threadIdx.x / PART_THREADS : 0;
    const int threads_log2 = SHARED ? TCG_REDUCE_THREADS_LOG2 - TCG_REDUCE_PARTS_LOG2 : TCG_REDUCE_THREADS_LOG2;
    const walk<0> space(threads_log2 - along_m, along_m ? args.m : pieces, along_m ? (pieces + 1) / 2 : args.m,
                        args.batches);
    for (int64_t tile = blockIdx.x; tile < space.tiles; tile += gridDim.x) {
        const auto here = space.at(tile, thread >> along_m);
        const int64_t row = along_m ? here.fast : here.slow;
        const int64_t piece = along_m ? here.slow * 2 + thread % 2 : here.fast;
        const bool exists = row < args.m && piece < pieces;
        const float *partial = args.partials + (here.batch * args.m + row) * args.partial_row + piece * ELEMS;
        float sums[ELEMS];
        griddepcontrol_wait();
        if constexpr (!SHARED) {
            if (exists) {
                add_up<false>(sums, partial, args.splits, args.c_split);
            }
        } else {
            if (exists && part < args.splits) {
                add_up<true>(sums, partial + part * args.c_split, (args.splits - part + PARTS - 1) / PARTS,
                             PARTS * args.c_split);
                /* A warp's lie side by side for each of their elements: no bank conflicts. */
#pragma unroll
                for (int e = 0; e < ELEMS; e++) {
                    part_sums[(part * ELEMS + e) * PART_THREADS + thread] = sums[e];
                }
            }
            __syncthreads();
            if (exists && part == 0) {
#pragma unroll
                for (int p = 1; p < PARTS; p++) {
#pragma unroll
                    for (int e = 0; e < ELEMS && p < args.splits; e++) {
                        sums[e] += part_sums[(p * ELEMS + e) * PART_THREADS + thread];
                    }
                }
            }
            __syncthreads();
        }
        if (!exists || part > 0) {
            continue;
        }
        const int64_t at =
            entry_offset(args.batch, args.batch_ndim, here.batch) + row * args.c_row + piece * ELEMS * args.c_col;
        const int64_t count = args.n - piece * ELEMS;
        if (args.c_dtype == TCG_f32) {
            store_sums<f32>(args, at, sums, count);
        } else if (args.c_dtype == TCG_f16) {
            store_sums<f16>(args, at, sums, count);
        } else {
            store_sums<bf16>(args, at, sums, count);
        }
    }
}

extern "C" __global__ void __launch_bounds__(TCG_REDUCE_THREADS, TCG_REDUCE_BLOCKS)
    tcg_reduce(const __grid_constant__ tcg_reduce_args args) {
    __shared__ float part_sums[TCG_REDUCE_THREADS * ELEMS];
    griddepcontrol_launch_dependents();
    args.shared ? reduce<true>(args, part_sums) : reduce<false>(args, part_sums);
}
