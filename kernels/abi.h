/* What the host and the kernels agree on: argument structs, type codes and the shared-memory formulas.
 * Valid as C11 and as CUDA C++; every number here has no second home. */
#ifndef TCG_ABI_H
#define TCG_ABI_H

#include <stdint.h>

/* Element types. X(code name, bytes, name users see) */
#define TCG_DTYPES(X)      \
    X(f16, 2, "float16")   \
    X(bf16, 2, "bfloat16") \
    X(f32, 4, "float32")

enum {
#define X(code, bytes, text) TCG_##code,
    TCG_DTYPES(X)
#undef X
        TCG_DTYPE_COUNT
};

/* Operand orders of a product A[M,K] @ B[K,N], A's letter first. n: the last axis has unit stride; t: the
 * first one has. So "nt" is x @ w.T with both arrays contiguous (K-major both), and the index is 2*A + B. */
#define TCG_ORDERS(X) X(nn) X(nt) X(tn) X(tt)

enum {
    TCG_any = -1, /* kernels of no order: any strides */
#define X(order) TCG_##order,
    TCG_ORDERS(X)
#undef X
        TCG_ORDER_COUNT
};

/* Batch axes a launch can take after merging; the host loops over any further ones. */
#define TCG_MAX_BATCH_DIMS 6

/* One batch axis, innermost first: its length and each operand's stride in elements (0: broadcast). */
typedef struct tcg_batch_dim {
    int64_t size, a, b, c;
} tcg_batch_dim;

/* One product C[M,N] = A[M,K] @ B[K,N] per batch entry. All strides are in elements and may be negative or 0.
 * A kernel of order n/t relies on the unit stride its order names and ignores that field. */
typedef struct tcg_gemm_args {
    const void *a;
    const void *b;
    void *c; /* the result, or the first fp32 partial when splits > 1 */
    int64_t m, n, k;
    int64_t a_row, a_col;
    int64_t b_row, b_col;
    int64_t c_row, c_col;
    int64_t c_split;     /* elements from one split's partial to the next */
    int64_t k_per_split; /* a multiple of the kernel's BLOCK_K; the last split takes what remains */
    int64_t tiles_m, tiles_n;
    int64_t tiles; /* tiles_m * tiles_n * splits * batches: what the grid walks */
    int32_t splits;
    int32_t raster_group; /* tiles_m are walked in groups of this many rows of tiles, for L2 reuse */
    int32_t c_dtype;      /* TCG_f16 | TCG_bf16 | TCG_f32 */
    int32_t c_vec_bytes;  /* widest store that every row start of C allows: 16, 8, 4 or 2; c_col == 1 only */
    int32_t batch_ndim;
    int32_t c_tma; /* how a TMA family stores C: one of tcg_c_tma */
    tcg_batch_dim batch[TCG_MAX_BATCH_DIMS];
} tcg_gemm_args;

/* How C leaves a TMA family. By way of shared memory: a unit stride, along the rows (c_col == 1) or, 16-bit elements
 * only, along the columns (c_row == 1: what swapped plans use). By TMA: also lines of a multiple of 16 bytes, each of
 * them starting at one. */
enum tcg_c_tma {
    TCG_C_DIRECT, /* guarded stores from registers: any strides, any type */
    TCG_C_TMA_ROWS,
    TCG_C_TMA_COLUMNS,
    TCG_C_STAGED_ROWS, /* shared memory, then element stores along the lines */
    TCG_C_STAGED_COLUMNS,
};

/* A CUtensorMap, opaque here so that kernels and plans need no cuda.h. The driver wants 128-byte alignment. */
#ifdef __cplusplus
typedef struct alignas(128) tcg_tensor_map {
    uint64_t opaque[16];
} tcg_tensor_map;
#else
typedef struct tcg_tensor_map {
    _Alignas(128) uint64_t opaque[16];
} tcg_tensor_map;
#endif

/* Quotients of 0 <= x < 2^31 by a multiplication: x / by == (x * multiplier) >> shift. */
typedef struct tcg_divisor {
    uint32_t by, multiplier, shift;
} tcg_divisor;

/* From when on wgmma lets the next kernel's blocks start. They set themselves up and wait for this one's end, best from the
 * first on where the device has room for two such grids. Where a larger grid leaves SMs free, blocks that come early settle
 * there and crowd some parts of the chip: 96 of 132 SMs then stream weights 10 % slower. */
enum tcg_hand_over {
    TCG_AT_ONCE,
    TCG_AFTER_LOADS,    /* the last ones are issued */
    TCG_AFTER_PRODUCTS, /* the last main loop has ended */
};

/* What a stage takes of A or of B. What of a box is outside a tensor takes TMA up to three times as long as what is inside,
 * so wgmma's last tile, where it reaches beyond the operand, has boxes of its own, in map a_part or b_part: all of them, or
 * (MN-major) the last of fewer. The blocks of a cluster share K-major operands' lines. */
typedef struct tcg_tma_side {
    int32_t bytes;
    int32_t part_bytes; /* of such a last tile; `bytes` where there is none */
    int16_t part_share; /* K-major: lines of it that a block loads; MN-major: boxes that it has */
    int16_t batched;    /* 0 where the operand is broadcast */
} tcg_tma_side;

/* What a TMA family's block reads first: 32-bit, in one or two lines of the constant cache, which is cold at a kernel's
 * start. The walk over tiles is place_tile's (schedule.cuh). */
typedef struct tcg_tma_walk {
    int32_t tiles; /* in all; the families that read this take fewer than 2^31 */
    tcg_tma_side a, b;
    int32_t k, k_per_split;
    int32_t m, n;
    int32_t tiles_m, batches;
    tcg_divisor product;   /* tiles_m * tiles_n */
    tcg_divisor group;     /* raster_group * tiles_n */
    tcg_divisor rows;      /* raster_group */
    tcg_divisor last_rows; /* tiles_m % raster_group, if that is not 0 */
    tcg_divisor splits;
    int16_t c_tma, c_dtype;
    int32_t hands_over; /* one of tcg_hand_over */
} tcg_tma_walk;

/* What the TMA-fed families take, as one __grid_constant__ parameter. Maps have rank 3: the unit-stride axis, the
 * other one, and the one batch axis these families take (of length 1 where an operand is broadcast; for partial sums
 * split * batches + entry). */
typedef struct tcg_tma_args {
    tcg_tensor_map a, b, c;
    tcg_tensor_map c_tail; /* C in boxes of the columns that a tile has beyond whole ones */
    tcg_tensor_map a_part, b_part;
    tcg_tma_walk walk;
    tcg_gemm_args gemm;
} tcg_tma_args;

/* How an operand is copied. */
enum tcg_copy_way {
    TCG_COPY_ELEMENTS, /* one by one, whatever the strides */
    TCG_COPY_TURNED,   /* source columns are contiguous: tiles of TCG_COPY_TURN rows and columns, turned */
    /* Source rows are contiguous, there is one batch axis at most, and dst is written in pieces of 16 bytes: thread i of
     * the job's writes i, i + step, ..., where step = blocks * TCG_COPY_THREADS is below 2^30, as are a row's pieces and the
     * rows of all entries. */
    TCG_COPY_PIECES,
};

/* One operand that tcg_copy packs: dst[batch][row][col] (packed, col contiguous, dst_row elements a row; dst and all rows
 * start at multiples of 16 bytes) = src[batch][row][col]. Columns cols .. dst_row-1 are written as zero. batch[].a is
 * src's stride. */
typedef struct tcg_copy_job {
    const void *src;
    void *dst;
    int64_t rows, cols;
    int64_t src_row, src_col;
    int64_t dst_row;
    int64_t batches;
    uint32_t blocks; /* of the grid */
    int32_t batch_ndim;
    int32_t way; /* tcg_copy_way; what follows is for TCG_COPY_PIECES */
    int32_t step_entry, step_row, step_piece; /* step as whole entries, rows of the rest, and pieces of the rest */
    tcg_divisor row_pieces, entry_rows;
    tcg_batch_dim batch[TCG_MAX_BATCH_DIMS];
} tcg_copy_job;

/* tcg_copy: the grid's first blocks are those of the first job, the others the second's, which may have none. */
typedef struct tcg_copy_args {
    tcg_copy_job job[2];
    int32_t elem_bytes; /* 2 or 4 */
    int32_t reserved;
} tcg_copy_args;

/* tcg_reduce: C = sum of the fp32 partials in an order that the number of splits alone decides, one rounding. Partials are
 * [split][batch][m] lines of n at multiples of 16 bytes, `partial_row` elements apart; batch[].a is C's stride. */
#define TCG_REDUCE_ELEMS 4 /* neighbours that a thread adds up: 16 bytes of a line of partials */
#define TCG_PARTIAL_ROW(n) (((n) + TCG_REDUCE_ELEMS - 1) / TCG_REDUCE_ELEMS * TCG_REDUCE_ELEMS)
typedef struct tcg_reduce_args {
    const float *partials;
    void *c;
    int64_t m, n;
    int64_t partial_row; /* TCG_PARTIAL_ROW(n) */
    int64_t batches;
    int64_t c_row, c_col;
    int64_t c_split;
    int32_t splits;
    int32_t c_dtype;
    int32_t batch_ndim;
    int16_t c_together; /* 1: c_col is 1, and C's rows start at multiples of four elements */
    int16_t shared;     /* 1: TCG_REDUCE_PARTS threads a sum; the result is the same */
    tcg_batch_dim batch[TCG_MAX_BATCH_DIMS];
} tcg_reduce_args;

#define TCG_COPY_THREADS_LOG2 8
#define TCG_COPY_THREADS (1 << TCG_COPY_THREADS_LOG2)
#define TCG_COPY_BLOCKS 4 /* that fit an SM */
#define TCG_COPY_TURN 64  /* rows and columns of a tile, where contiguous source columns are turned */
#define TCG_COPY_PATCH_BYTES (TCG_COPY_TURN * (TCG_COPY_TURN + 1) * 4) /* of shared memory, for such tiles */
#define TCG_COPY_DEPTH 2  /* pieces of 16 bytes that a thread has on the way at once */
#define TCG_REDUCE_THREADS_LOG2 8
#define TCG_REDUCE_THREADS (1 << TCG_REDUCE_THREADS_LOG2)
#define TCG_REDUCE_BLOCKS 3 /* that fit an SM */
#define TCG_REDUCE_PARTS_LOG2 3 /* of a sum; as many threads can share it */
#define TCG_REDUCE_PARTS (1 << TCG_REDUCE_PARTS_LOG2)

/* By family: a row's kernel, threads a block, dynamic shared memory in bytes. */
#define TCG_MMA_NAME(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN) \
    tcg_mma_sm80_##in##_##order##_##BM##x##BN##x##BK##_w##WM##x##WN##_s##STAGES##_a##ALIGN
#define TCG_MMA_THREADS(wm, wn) ((wm) * (wn) * 32)
/* Rows for any alignment: stages of 16-byte words as they lie in memory, one more a line than it has, and two of tiles. */
#define TCG_MMA_RAW_BYTES(mn, bk, k_major) ((k_major) ? (mn) * ((bk) * 2 + 16) : (bk) * ((mn) * 2 + 16))
#define TCG_MMA_SMEM(bm, bn, bk, stages, align, order)                                            \
    ((align) == 16 ? ((bm) + (bn)) * (bk) * 2 * (stages)                                          \
                   : ((bm) + (bn)) * (bk) * 4 + (stages) * (TCG_MMA_RAW_BYTES(bm, bk, (order) < TCG_tn) + \
                                                            TCG_MMA_RAW_BYTES(bn, bk, (order) % 2 == 1)))

/* Rows that shift B instead: B's lines as they come have two words more than a k-block, and B's two tiles one. */
#define TCG_MMA_SHIFT_NAME(in, order, BM, BN, BK, WARPS, STAGES) \
    tcg_mma_shift_sm80_##in##_##order##_##BM##x##BN##x##BK##_w##WARPS##_s##STAGES
#define TCG_MMA_SHIFT_THREADS(warps) ((warps) * 32)
#define TCG_MMA_SHIFT_SMEM(bm, bn, bk, stages) \
    (((bm) * (bk) * 2 + (bn) * ((bk) * 2 + 32)) * (stages) + 2 * (bn) * ((bk) * 2 + 16))

/* wgmma: boxes are 64 elements wide (128 bytes, the swizzle's span), so an MN-major tile is rounded up to that; those of
 * an MN-major B of 16 or 32 columns are as wide as it is, with the swizzle of that span. wgs consumer warpgroups and one
 * for the producer. C goes through c_boxes boxes a consumer warpgroup. Where a cluster of ck
 * blocks splits K, each adds up and stores its share of the columns: the others' sums of those come in, and C goes through
 * their area. */
#define TCG_TMA_BOX_ELEMS 64
#define TCG_WGMMA_THREADS(wgs) (((wgs) + 1) * 128)
#define TCG_WGMMA_C_BOX_BYTES (64 * 128) /* 64 rows of 128 bytes: 64 elements, or 32 of fp32 */
#define TCG_WGMMA_B_BOX(bn, b_k_major) ((b_k_major) || (bn) > 32 ? TCG_TMA_BOX_ELEMS : (bn))
#define TCG_WGMMA_B_ROWS(bn, b_k_major) \
    ((b_k_major) ? (bn) : ((bn) - 1 + TCG_WGMMA_B_BOX(bn, 0)) / TCG_WGMMA_B_BOX(bn, 0) * TCG_WGMMA_B_BOX(bn, 0))
#define TCG_WGMMA_STAGE_BYTES(bm, bn, bk, b_k_major) (((bm) + TCG_WGMMA_B_ROWS(bn, b_k_major)) * (bk) * 2)
#define TCG_WGMMA_STORED_N(bn, ck) ((bn) / (ck))
#define TCG_WGMMA_C_BYTES(bm, bn, wgs, ck, c_boxes)                         \
    ((ck) > 1 ? ((ck) - 1) * (bm) * TCG_WGMMA_STORED_N(bn, ck) * 4          \
              : (wgs) * (c_boxes) * TCG_WGMMA_C_BOX_BYTES)
#define TCG_WGMMA_SMEM(bm, bn, bk, stages, wgs, ck, c_boxes, b_k_major)                                             \
    (1024 + (stages) * TCG_WGMMA_STAGE_BYTES(bm, bn, bk, b_k_major) + TCG_WGMMA_C_BYTES(bm, bn, wgs, ck, c_boxes) + \
     ((stages) * 2 + 2) * 8)
#define TCG_WGMMA_NAME(in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK) \
    tcg_wgmma_sm90_##in##_##order##_##BM##x##BN##x##BK##_s##STAGES##_w##WGS##_##SCHEDULE##_c##CM##x##CN##x##CK

/* The other families of WM x WN warps. family_sm: "wmma_sm80" ... */
#define TCG_WARPS_NAME(family_sm, in, order, BM, BN, BK, WM, WN, STAGES) \
    tcg_##family_sm##_##in##_##order##_##BM##x##BN##x##BK##_w##WM##x##WN##_s##STAGES

/* wmma_naive: a patch of 16 x 16 floats a warp, for what wmma cannot load or store in place. */
#define TCG_WMMA_NAIVE_THREADS(bm, bn, wm, wn) ((wm) * (wn) * 32)
#define TCG_WMMA_NAIVE_SMEM(bm, bn, bk, wm, wn, stages, order) ((wm) * (wn) * 1024)

/* wmma: lines of shared memory are 16 bytes longer than their elements, an odd number of chunks, against bank conflicts.
 * Of the orders, A is K-major in those before tn, B in the odd ones. */
#define TCG_WMMA_THREADS(bm, bn, wm, wn) ((wm) * (wn) * 32)
#define TCG_WMMA_TILE_BYTES(mn, bk, k_major) (((k_major) ? (mn) * ((bk) + 8) : (bk) * ((mn) + 8)) * 2)
#define TCG_WMMA_SMEM(bm, bn, bk, wm, wn, stages, order) \
    ((stages) * (TCG_WMMA_TILE_BYTES(bm, bk, (order) < TCG_tn) + TCG_WMMA_TILE_BYTES(bn, bk, (order) % 2 == 1)))

/* mma_naive: one buffer. */
#define TCG_MMA_NAIVE_THREADS(bm, bn, wm, wn) ((wm) * (wn) * 32)
#define TCG_MMA_NAIVE_SMEM(bm, bn, bk, wm, wn, stages, order) (((bm) + (bn)) * (bk) * 2)

/* tma_mma: one warp more than multiply, the producer, unless theirs are of 64 x 64 elements: beside three of those, a
 * scheduler's registers would not hold it, and the first of them loads. Blocks of more than 128 x 128 have a staging area
 * of C of their own, 4 KB a warp; in the others a tile's last stage serves. Two mbarriers a stage. */
#define TCG_TMA_MMA_THREADS(bm, bn, wm, wn) (((wm) * (wn) + ((bm) * (bn) < (wm) * (wn) * 4096)) * 32)
#define TCG_TMA_MMA_STAGE_BYTES(bm, bn, bk) (((bm) + (bn)) * (bk) * 2)
#define TCG_TMA_MMA_C_BYTES(bm, bn, wm, wn) ((bm) * (bn) > 128 * 128 ? (wm) * (wn) * 4096 : 0)
#define TCG_TMA_MMA_SMEM(bm, bn, bk, wm, wn, stages, order) \
    ((stages) * TCG_TMA_MMA_STAGE_BYTES(bm, bn, bk) + TCG_TMA_MMA_C_BYTES(bm, bn, wm, wn) + (stages) * 16)

/* simt: lines of shared memory are four elements longer than the tile. Blocks an SM that its registers are shared out to:
 * a thread has 255 of them for more than 64 sums, else 128. */
#define TCG_SIMT_NAME(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN) \
    tcg_simt_sm80_##in##_##order##_##BM##x##BN##x##BK##_w##WM##x##WN##_s##STAGES##_a##ALIGN
#define TCG_SIMT_THREADS(wm, wn) ((wm) * (wn) * 32)
#define TCG_SIMT_SMEM(bm, bn, bk, stages) (((bm) + 4 + (bn) + 4) * (bk) * 4 * (stages))
#define TCG_SIMT_BLOCKS(bm, bn, threads) (((bm) * (bn) > 64 * (threads) ? 256 : 512) / (threads))

#endif
