/* What the families on nvcuda::wmma share: the names of its fragments, and the way from its fp32 accumulators to C.
 * The API does not say which lane holds what of a fragment, so that C is rounded and stored from shared memory. */
#ifndef TCG_WMMA_CUH
#define TCG_WMMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
#include <stdint.h>

#include "epilogue.cuh"
#include "ptx/cvta.cuh"
#include "ptx/wmma.cuh"
#include "types.cuh"

template <class In> struct wmma_element;
template <> struct wmma_element<f16> {
    typedef __half type;
};
template <> struct wmma_element<bf16> {
    typedef __nv_bfloat16 type;
};

/* The layout of an operand's 16 x 16 block in memory, in wmma's words. A is m by k, B k by n. */
template <bool ROWS> struct wmma_layout {
    typedef nvcuda::wmma::row_major type;
};
template <> struct wmma_layout<false> {
    typedef nvcuda::wmma::col_major type;
};

template <class In, bool A_K_MAJOR> using wmma_a =
    nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, typename wmma_element<In>::type,
                           typename wmma_layout<A_K_MAJOR>::type>;
template <class In, bool B_K_MAJOR> using wmma_b =
    nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, typename wmma_element<In>::type,
                           typename wmma_layout<!B_K_MAJOR>::type>;
using wmma_acc = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

/* load_matrix_sync from shared memory. For bf16 nvcc 13.0 forgets that it is shared, whatever it knows of the
 * pointer, and makes generic loads of 4 bytes where f16 gets ldmatrix: here the instruction names the space. Its
 * registers are the fragment, as in <crt/mma.hpp>. */
template <class Fragment>
static __device__ __forceinline__ void load_shared(Fragment &fragment, const __half *block, int pitch) {
    nvcuda::wmma::load_matrix_sync(fragment, block, pitch);
}

#define TCG_WMMA_LOAD_SHARED(fragment_type, instruction)                                                    \
    static __device__ __forceinline__ void load_shared(fragment_type &fragment, const __nv_bfloat16 *block, \
                                                       int pitch) {                                         \
        static_assert(sizeof(fragment) == 16, "four registers");                                            \
        instruction(reinterpret_cast<uint32_t (&)[4]>(fragment), cvta_to_shared(block), pitch);             \
    }
typedef wmma_a<bf16, true> wmma_a_row_bf16;
typedef wmma_a<bf16, false> wmma_a_col_bf16;
typedef wmma_b<bf16, false> wmma_b_row_bf16;
typedef wmma_b<bf16, true> wmma_b_col_bf16;
TCG_WMMA_LOAD_SHARED(wmma_a_row_bf16, wmma_load_a_row_bf16)
TCG_WMMA_LOAD_SHARED(wmma_a_col_bf16, wmma_load_a_col_bf16)
TCG_WMMA_LOAD_SHARED(wmma_b_row_bf16, wmma_load_b_row_bf16)
TCG_WMMA_LOAD_SHARED(wmma_b_col_bf16, wmma_load_b_col_bf16)
#undef TCG_WMMA_LOAD_SHARED

/* A part of C, `m` rows and `n` columns from c's corner on. size: bytes an element. */
static __device__ __forceinline__ epilogue_target part_of(const epilogue_target &c, int m, int n, int size) {
    epilogue_target part = c;
    part.corner += (m * c.row_stride + n * c.col_stride) * size;
    part.row += m;
    part.col += n;
    part.rows -= m;
    part.cols -= n;
    return part;
}

/* ELEMS neighbouring floats, rounded, as one store of 16 bytes. */
template <class T, int ELEMS> static __device__ __forceinline__ void round_16_bytes(const float *from, T *to) {
    static_assert(ELEMS * sizeof(T) == 16, "one store");
    union {
        typename pair_of<T>::bits pairs[ELEMS / 2];
        uint4 all;
    } out;
#pragma unroll
    for (int e = 0; e < ELEMS; e += 4) {
        const float4 four = *reinterpret_cast<const float4 *>(from + e);
        out.pairs[e / 2] = pair_from_floats<T>(four.x, four.y);
        out.pairs[e / 2 + 1] = pair_from_floats<T>(four.z, four.w);
    }
    *reinterpret_cast<uint4 *>(to) = out.all;
}

/* Rounds LINES lines of LINE floats that lie PITCH apart and stores what is C's, lanes along the lines. VECTOR: C's
 * lines are made of aligned 16 bytes; else an element at a time, neighbours in a line or not. */
template <class T, bool VECTOR, int LINES, int LINE, int PITCH>
static __device__ __forceinline__ void store_patch_lines(const float *patch, int lane, char *c, int64_t line_stride,
                                                         int64_t elem_stride, int64_t lines, int64_t elems) {
    constexpr int ELEMS = VECTOR ? 16 / static_cast<int>(sizeof(T)) : 1;
    constexpr int PER_LINE = LINE / ELEMS;
    static_assert(LINES * PER_LINE % 32 == 0, "whole warps");
#pragma unroll 4
    for (int piece = lane; piece < LINES * PER_LINE; piece += 32) {
        const int line = piece / PER_LINE;
        const int elem = piece % PER_LINE * ELEMS;
        const float *from = patch + line * PITCH + elem;
        T *to = reinterpret_cast<T *>(c) + line * line_stride + elem * elem_stride;
        if (line >= lines) {
            break;
        }
        if constexpr (VECTOR) {
            if (elem + ELEMS <= elems) {
                round_16_bytes<T, ELEMS>(from, to);
                continue;
            }
        }
#pragma unroll 1
        for (int e = 0; e < ELEMS && elem + e < elems; e++) {
            to[e] = from_float<T>(from[e]);
        }
    }
}

/* A warp's patch of fp32 sums to the corner of C: LINES lines, columns of C where ALONG_M and rows elsewhere. */
template <class T, bool ALONG_M, int LINES, int LINE, int PITCH>
static __device__ __forceinline__ void store_patch(const float *patch, int lane, const epilogue_target &c) {
    const int64_t line_stride = ALONG_M ? c.col_stride : c.row_stride;
    const int64_t elem_stride = ALONG_M ? c.row_stride : c.col_stride;
    const int64_t lines = ALONG_M ? c.cols : c.rows;
    const int64_t elems = ALONG_M ? c.rows : c.cols;
    /* A single line's stride means nothing. */
    const uint64_t bits =
        reinterpret_cast<uint64_t>(c.corner) | (lines > 1 ? static_cast<uint64_t>(line_stride) * sizeof(T) : 0);
    if (elem_stride == 1 && widest_access(bits) == 16) {
        store_patch_lines<T, true, LINES, LINE, PITCH>(patch, lane, c.corner, line_stride, 1, lines, elems);
    } else {
        store_patch_lines<T, false, LINES, LINE, PITCH>(patch, lane, c.corner, line_stride, elem_stride, lines,
                                                        elems);
    }
}

#endif
