/* From a warp's fp32 accumulators to C: one rounding, any strides of C, and exactly the m x n elements, never one
 * past a row. The warp turns its fragments through shared memory so that global stores run along C's contiguous
 * axis. */
#ifndef TCG_EPILOGUE_CUH
#define TCG_EPILOGUE_CUH

#include <stdint.h>

#include "abi.h"
#include "swizzle.cuh"
#include "types.cuh"

/* What is done to an accumulator before the rounding. row and col are C's. A fused bias or activation is another such
 * functor. */
struct epilogue_identity {
    __device__ __forceinline__ float operator()(float value, int64_t row, int64_t col) const { return value; }
};

/* C as one warp sees it: its own corner, and how many rows and columns from there on are C's (possibly none). */
struct epilogue_target {
    char *corner;
    int64_t row, col;               /* of the corner in C */
    int64_t rows, cols;             /* C's, from the corner on */
    int64_t row_stride, col_stride; /* elements */
};

/* C from (row, col) on of the batch entry and split whose elements start at `offset`. */
static __device__ __forceinline__ epilogue_target warp_target(const tcg_gemm_args &args, int64_t offset,
                                                              int64_t row, int64_t col) {
    epilogue_target c;
    c.row = row;
    c.col = col;
    c.rows = args.m - row;
    c.cols = args.n - col;
    c.row_stride = args.c_row;
    c.col_stride = args.c_col;
    c.corner = static_cast<char *>(args.c) +
               (offset + row * args.c_row + col * args.c_col) * (args.c_dtype == TCG_f32 ? 4 : 2);
    return c;
}

/* Copies LINES lines of LINE elements each from a warp's staging area to C, lanes along the line. ELEMS: elements
 * a lane moves at once; 1 also serves lines whose elements are not neighbours. */
template <class T, int LINES, int LINE, int ELEMS>
static __device__ __forceinline__ void store_lines(const char *staging, int lane, char *c, int64_t line_stride,
                                                   int64_t elem_stride, int64_t lines, int64_t elems) {
    constexpr int SIZE = static_cast<int>(sizeof(T));
    constexpr int BYTES = ELEMS * SIZE;
    constexpr int LINE_BYTES = LINE * SIZE;
    constexpr int LANES = LINE / ELEMS < 32 ? LINE / ELEMS : 32; /* on a line */
    constexpr int STEP = 32 / LANES;                             /* lines at once */
    c += (lane / LANES * line_stride + lane % LANES * ELEMS * elem_stride) * SIZE;
#pragma unroll 4
    for (int line = lane / LANES; line < LINES; line += STEP) {
#pragma unroll
        for (int first = 0; first < LINE; first += LANES * ELEMS) {
            const int elem = first + lane % LANES * ELEMS;
            const int byte = elem * SIZE;
            const char *from =
                staging + line * LINE_BYTES + swizzle<LINE_BYTES / 16>(line, byte / 16) * 16 + byte % 16;
            char *to = c + first * elem_stride * SIZE;
            if (line < lines && elem + ELEMS <= elems) {
                if (BYTES == 16) {
                    *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
                } else if (BYTES == 4) {
                    *reinterpret_cast<uint32_t *>(to) = *reinterpret_cast<const uint32_t *>(from);
                } else {
                    *reinterpret_cast<uint16_t *>(to) = *reinterpret_cast<const uint16_t *>(from);
                }
            } else if (ELEMS > 1 && line < lines) {
#pragma unroll 1
                for (int e = 0; elem + e < elems; e++) {
                    reinterpret_cast<T *>(to)[e] = reinterpret_cast<const T *>(from)[e];
                }
            }
        }
        c += STEP * line_stride * SIZE;
    }
}

/* In how many parts a tile goes through a staging area of `bytes`. */
static __host__ __device__ constexpr int epilogue_parts(int tile_bytes, int bytes) {
    return tile_bytes <= bytes ? 1 : 2 * epilogue_parts((tile_bytes + 1) / 2, bytes);
}

/* acc[i][j] is the m16n8 fragment at row 16 i, column 8 j of the warp's tile (the layout is in ptx/mma_sync.cuh).
 * C is written line by line, lines being ALONG_M ? columns : rows. `staging` is STAGING bytes of this warp's own,
 * aligned to 128. */
template <class T, bool ALONG_M, int STAGING, int TILES_M, int TILES_N, class Op>
static __device__ __forceinline__ void store_warp_tile(const float (&acc)[TILES_M][TILES_N][4], const Op &op,
                                                       char *staging, int lane, const epilogue_target &c) {
    constexpr int SIZE = static_cast<int>(sizeof(T));
    constexpr int LINE = ALONG_M ? TILES_M * 16 : TILES_N * 8; /* elements */
    constexpr int LINE_BYTES = LINE * SIZE;
    constexpr int PARTS = epilogue_parts(TILES_M * 16 * TILES_N * 8 * SIZE, STAGING);
    constexpr int PART_M = ALONG_M ? TILES_M : TILES_M / PARTS; /* fragments a part */
    constexpr int PART_N = ALONG_M ? TILES_N / PARTS : TILES_N;
    constexpr int LINES = ALONG_M ? PART_N * 8 : PART_M * 16; /* a part */
    static_assert(PART_M > 0 && PART_N > 0, "a part is at least a fragment");
    const int group = lane / 4;
    const int pair = lane % 4 * 2;

    const int64_t line_stride = ALONG_M ? c.col_stride : c.row_stride;
    const int64_t elem_stride = ALONG_M ? c.row_stride : c.col_stride;
    const int64_t lines = ALONG_M ? c.cols : c.rows;
    const int64_t elems = ALONG_M ? c.rows : c.cols;
    /* A single line's stride means nothing. */
    const int width = elem_stride != 1 ? SIZE
                                       : widest_access(reinterpret_cast<uint64_t>(c.corner) |
                                                       (lines > 1 ? static_cast<uint64_t>(line_stride) * SIZE : 0));

#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int first_i = ALONG_M ? 0 : part * PART_M;
        const int first_j = ALONG_M ? part * PART_N : 0;
#pragma unroll
        for (int i = 0; i < PART_M; i++) {
#pragma unroll
            for (int j = 0; j < PART_N; j++) {
                float value[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    value[e] = op(acc[first_i + i][first_j + j][e], c.row + (first_i + i) * 16 + group + e / 2 * 8,
                                  c.col + (first_j + j) * 8 + pair + e % 2);
                }
#pragma unroll
                for (int e = 0; e < 4; e += ALONG_M ? 1 : 2) {
                    const int m = i * 16 + e / 2 * 8 + group;
                    const int n = j * 8 + pair + e % 2;
                    const int line = ALONG_M ? n : m;
                    const int byte = (ALONG_M ? m : n) * SIZE;
                    char *to =
                        staging + line * LINE_BYTES + swizzle<LINE_BYTES / 16>(line, byte / 16) * 16 + byte % 16;
                    if (ALONG_M) {
                        *reinterpret_cast<T *>(to) = from_float<T>(value[e]);
                    } else {
                        *reinterpret_cast<typename pair_of<T>::bits *>(to) =
                            pair_from_floats<T>(value[e], value[e + 1]);
                    }
                }
            }
        }
        __syncwarp();
        char *to = c.corner + part * LINES * line_stride * SIZE;
        const int64_t lines_left = lines - part * LINES;
        if (width == 16) {
            store_lines<T, LINES, LINE, 16 / SIZE>(staging, lane, to, line_stride, 1, lines_left, elems);
        } else if (SIZE == 2 && width >= 4) {
            store_lines<T, LINES, LINE, 4 / SIZE>(staging, lane, to, line_stride, 1, lines_left, elems);
        } else {
            store_lines<T, LINES, LINE, 1>(staging, lane, to, line_stride, elem_stride, lines_left, elems);
        }
        __syncwarp();
    }
}

/* Along the contiguous axis, which for a plan with swapped operands is C's rows. */
template <class T, int STAGING, int TILES_M, int TILES_N, class Op>
static __device__ __forceinline__ void store_accumulators(const float (&acc)[TILES_M][TILES_N][4], const Op &op,
                                                          char *staging, int lane, const epilogue_target &c) {
    if (c.col_stride != 1 && c.row_stride == 1) {
        store_warp_tile<T, true, STAGING>(acc, op, staging, lane, c);
    } else {
        store_warp_tile<T, false, STAGING>(acc, op, staging, lane, c);
    }
}

/* In C's type: the operands', or fp32. */
template <class In, int STAGING, int TILES_M, int TILES_N>
static __device__ __forceinline__ void store_result(const tcg_gemm_args &args, const float (&acc)[TILES_M][TILES_N][4],
                                                    char *staging, int lane, const epilogue_target &c) {
    if (args.c_dtype == TCG_f32) {
        store_accumulators<f32, STAGING>(acc, epilogue_identity(), staging, lane, c);
    } else {
        store_accumulators<In, STAGING>(acc, epilogue_identity(), staging, lane, c);
    }
}

#endif
