/* Tensor maps: rank 3 (the unit-stride axis, the other one, the batch), zero outside. */
#include "tma.h"

_Static_assert(sizeof(CUtensorMap) == sizeof(tcg_tensor_map), "abi.h's tensor map is CUDA's");
_Static_assert(_Alignof(tcg_tma_args) >= 64 && _Alignof(tcg_tma_args) % _Alignof(CUtensorMap) == 0,
               "cuTensorMapEncodeTiled wants its map aligned");

typedef struct tensor {
    const char *name; /* in messages */
    const void *data;
    int dtype;
    int64_t inner, outer, entries;      /* lengths */
    int64_t outer_stride, entry_stride; /* elements */
    uint32_t box_inner, box_outer;
    uint32_t swizzle_bytes; /* 128, 64, 32 or 0 */
} tensor;

static const CUtensorMapDataType data_types[TCG_DTYPE_COUNT] = {[TCG_f16] = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                                                [TCG_bf16] = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                                                [TCG_f32] = CU_TENSOR_MAP_DATA_TYPE_FLOAT32};

static int encode(const tcg_driver *driver, const tensor *of, tcg_tensor_map *map, tcg_error *err) {
    /* An axis of length 1 is never stepped along, but its stride has to be a legal one. */
    const int64_t bytes = tcg_dtype_bytes[of->dtype], outer_stride = of->outer > 1 ? of->outer_stride : 8,
                  entry_stride = of->entries > 1 ? of->entry_stride : 8;
    const cuuint64_t sizes[3] = {(cuuint64_t)of->inner, (cuuint64_t)of->outer, (cuuint64_t)of->entries};
    const cuuint64_t strides_bytes[2] = {(cuuint64_t)(outer_stride * bytes), (cuuint64_t)(entry_stride * bytes)};
    const cuuint32_t box[3] = {of->box_inner, of->box_outer, 1}, steps[3] = {1, 1, 1};
    /* Lines that do not start where the L2 cache's do share those with others: fetching 256 bytes for each made such products
     * 15 % slower. */
    CUtensorMapSwizzle swizzle = of->swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                 : of->swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                 : of->swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                           : CU_TENSOR_MAP_SWIZZLE_NONE;
    CUresult result = driver->cuTensorMapEncodeTiled(
        (CUtensorMap *)map, data_types[of->dtype], 3, (void *)of->data, sizes, strides_bytes, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        outer_stride * bytes % 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, driver, result,
                             "encoding the tensor map of %s: %lld x %lld x %lld elements at %p, "
                             "strides %lld and %lld bytes, box %u x %u",
                             of->name, (long long)of->entries, (long long)of->outer, (long long)of->inner, of->data,
                             (long long)strides_bytes[1], (long long)strides_bytes[0], of->box_inner, of->box_outer);
    return 0;
}

/* Lines of a K-major operand that one box brings. A short operand gets a short box; a shared one comes in equal slices. */
static uint32_t box_lines(int block, int sharers, int64_t lines) {
    return (uint32_t)(sharers == 1 && lines < block ? lines : block / sharers);
}

/* A or B as the kernel's blocks load it. */
typedef struct operand {
    const char *name;
    const void *data;
    bool k_major;
    int64_t own, stride, k_stride; /* its M or N, and elements from one to the next along that and along k */
    int64_t entries, entry_stride;
    int block, rows; /* of M or N to a tile, and what of it shared memory holds */
    int box;         /* elements of a box's lines */
    int sharers;     /* blocks of a cluster that load a slice of the tile each */
} operand;

/* Lines of a swizzle's period, or elements of 16 bytes. */
static int64_t round_up_8(int64_t count) { return tcg_div_up(count, 8) * 8; }

/* The operand's map and, where its last tile has less than the others, that tile's: of shorter boxes along k, or of its last
 * box, which is narrower. Lines of a narrow box lie in shared memory as those of a whole one do. */
static int encode_operand(const tcg_driver *driver, const tcg_kernel *kernel, const operand *of, int64_t k,
                          tcg_tensor_map *map, tcg_tensor_map *part_map, tcg_tma_side *side, tcg_error *err) {
    tensor t = {.name = of->name,
                .data = of->data,
                .dtype = kernel->in_dtype,
                .inner = of->k_major ? k : of->own,
                .outer = of->k_major ? of->own : k,
                .entries = of->entry_stride ? of->entries : 1,
                .outer_stride = of->k_major ? of->stride : of->k_stride,
                .entry_stride = of->entry_stride,
                .box_inner = (uint32_t)of->box,
                .swizzle_bytes = (uint32_t)of->box * 2,
                .box_outer = of->k_major ? box_lines(of->block, of->sharers, of->own) : (uint32_t)kernel->block_k};
    const int lines = of->k_major ? (int)t.box_outer * of->sharers : of->rows;
    side->bytes = side->part_bytes = lines * kernel->block_k * 2;
    side->batched = of->entry_stride != 0;
    if (encode(driver, &t, map, err))
        return -1;
    const int part = (int)(of->own % of->block);
    /* No part where the operand has whole tiles, or one, whose box is as short as it is. */
    if (kernel->family != TCG_FAMILY_wgmma || part == 0 || lines < of->block)
        return 0;
    int64_t share, last, part_lines;
    if (of->k_major) {
        share = last = of->sharers == 1 ? part : round_up_8(tcg_div_up(part, of->sharers));
        part_lines = share * of->sharers;
    } else {
        share = tcg_div_up(part, of->box);
        last = round_up_8(part - (share - 1) * of->box);
        part_lines = (share - 1) * of->box + last;
    }
    side->part_share = (int16_t)share;
    side->part_bytes = (int32_t)part_lines * kernel->block_k * 2;
    *(of->k_major ? &t.box_outer : &t.box_inner) = (uint32_t)last;
    return encode(driver, &t, part_map, err);
}

/* C in boxes of 64 lines x 128 bytes, and what a tile's N has beyond them. */
static int encode_result(const tcg_driver *driver, const tcg_kernel *kernel, const tcg_gemm_args *args,
                         int64_t batches, int64_t entry_stride, tcg_tma_args *out, tcg_error *err) {
    bool rows = args->c_tma == TCG_C_TMA_ROWS;
    uint32_t stored = (uint32_t)TCG_WGMMA_STORED_N(kernel->block_n, kernel->cluster_k);
    uint32_t columns = 128 / (uint32_t)tcg_dtype_bytes[args->c_dtype], tail = stored % columns;
    tensor c = {.name = "C",
                .data = args->c,
                .dtype = args->c_dtype,
                .inner = rows ? tcg_row_length(args) : args->m,
                .outer = rows ? args->m : args->n,
                .entries = batches * args->splits,
                .outer_stride = rows ? args->c_row : args->c_col,
                .entry_stride = entry_stride,
                .box_inner = rows ? columns : 64,
                .box_outer = 64,
                .swizzle_bytes = 128};
    if (stored >= columns && encode(driver, &c, &out->c, err))
        return -1;
    *(rows ? &c.box_inner : &c.box_outer) = tail;
    c.swizzle_bytes = rows ? 0 : 128; /* lines as short as they are */
    return tail ? encode(driver, &c, &out->c_tail, err) : 0;
}

tcg_divisor tcg_divisor_of(int64_t by) {
    tcg_divisor d = {.by = (uint32_t)by, .shift = 31};
    while (by > (int64_t)1 << (d.shift - 31))
        d.shift++;
    d.multiplier =
        (uint32_t)(((((uint64_t)1) << d.shift) + d.by - 1) / d.by); /* at most 2^31 * 2 - 1 but for by = 1 */
    return d;
}

int tcg_tma_encode(const tcg_driver *driver, const tcg_kernel *kernel, const tcg_gemm_args *args, int hands_over,
                   tcg_tma_args *out, tcg_error *err) {
    const tcg_batch_dim batch = args->batch_ndim ? args->batch[0] : (tcg_batch_dim){.size = 1};
    const operand a = {.name = "A",
                       .data = args->a,
                       .k_major = kernel->order == TCG_nn || kernel->order == TCG_nt,
                       .own = args->m,
                       .stride = args->a_row,
                       .k_stride = args->a_col,
                       .entries = batch.size,
                       .entry_stride = batch.a,
                       .block = kernel->block_m,
                       .rows = kernel->block_m,
                       .box = TCG_TMA_BOX_ELEMS,
                       .sharers = kernel->cluster_n};
    const bool b_k_major = kernel->order == TCG_nt || kernel->order == TCG_tt;
    const operand b = {.name = "B",
                       .data = args->b,
                       .k_major = b_k_major,
                       .own = args->n,
                       .stride = args->b_col,
                       .k_stride = args->b_row,
                       .entries = batch.size,
                       .entry_stride = batch.b,
                       .block = kernel->block_n,
                       .rows = TCG_WGMMA_B_ROWS(kernel->block_n, b_k_major),
                       .box = TCG_WGMMA_B_BOX(kernel->block_n, b_k_major),
                       .sharers = kernel->cluster_m};
    if (!driver->cuTensorMapEncodeTiled)
        return tcg_fail(err, TCG_ERR_NO_DRIVER, 0, "%s: this NVIDIA driver has no cuTensorMapEncodeTiled (CUDA 12.0)",
                        kernel->name);
    out->gemm = *args;
    out->walk = (tcg_tma_walk){
        .tiles = (int32_t)args->tiles,
        .k = (int32_t)args->k,
        .k_per_split = (int32_t)args->k_per_split,
        .m = (int32_t)args->m,
        .n = (int32_t)args->n,
        .tiles_m = (int32_t)args->tiles_m,
        .batches = (int32_t)batch.size,
        .product = tcg_divisor_of(args->tiles_m * args->tiles_n),
        .group = tcg_divisor_of(args->raster_group * args->tiles_n),
        .rows = tcg_divisor_of(args->raster_group),
        .splits = tcg_divisor_of(args->splits),
        .c_tma = (int16_t)args->c_tma,
        .c_dtype = (int16_t)args->c_dtype,
        .hands_over = hands_over,
    };
    if (args->tiles_m % args->raster_group)
        out->walk.last_rows = tcg_divisor_of(args->tiles_m % args->raster_group);
    if (encode_operand(driver, kernel, &a, args->k, &out->a, &out->a_part, &out->walk.a, err) ||
        encode_operand(driver, kernel, &b, args->k, &out->b, &out->b_part, &out->walk.b, err))
        return -1;
    if (args->c_tma != TCG_C_TMA_ROWS && args->c_tma != TCG_C_TMA_COLUMNS)
        return 0;
    return encode_result(driver, kernel, args, batch.size, args->batch_ndim ? batch.c : args->c_split, out, err);
}
