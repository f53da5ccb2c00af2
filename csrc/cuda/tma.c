/* Tensor maps: rank 3 (the unit-stride axis, the other one, the batch), 128-byte swizzle where lines are that long, zero outside. */
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
    CUresult result = driver->cuTensorMapEncodeTiled(
        (CUtensorMap *)map, data_types[of->dtype], 3, (void *)of->data, sizes, strides_bytes, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE,
        of->box_inner * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
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

/* Lines of a K-major operand that one box brings. A short operand gets a short box: lines outside a tensor cost more than
 * others. A shared one comes in equal slices. */
static uint32_t box_lines(int block, int sharers, int64_t lines) {
    return (uint32_t)(sharers == 1 && lines < block ? lines : block / sharers);
}

/* A or B: `own` is its M or N, with the strides along that and along k. */
static tensor operand(const char *name, const tcg_kernel *kernel, const void *data, bool k_major, int64_t own,
                      int64_t k, int64_t stride, int64_t k_stride, int64_t entries, int64_t entry_stride, int block,
                      int sharers) {
    return (tensor){.name = name,
                    .data = data,
                    .dtype = kernel->in_dtype,
                    .inner = k_major ? k : own,
                    .outer = k_major ? own : k,
                    .entries = entry_stride ? entries : 1,
                    .outer_stride = k_major ? stride : k_stride,
                    .entry_stride = entry_stride,
                    .box_inner = TCG_TMA_BOX_ELEMS,
                    .box_outer = k_major ? box_lines(block, sharers, own) : (uint32_t)kernel->block_k};
}

/* What of a last tile lies within the operand: `own` elements along M or N in tiles of `block`. Blocks of a cluster that
 * share an operand load whole slices. Nothing where the operand has whole tiles, or one, whose box is as short as it is. */
static int part_of_tile(int64_t own, int block, int sharers, bool k_major) {
    return sharers > 1 || (k_major && own < block) ? 0 : (int)(own % block);
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
                .inner = rows ? args->n : args->m,
                .outer = rows ? args->m : args->n,
                .entries = batches * args->splits,
                .outer_stride = rows ? args->c_row : args->c_col,
                .entry_stride = entry_stride,
                .box_inner = rows ? columns : 64,
                .box_outer = 64};
    if (stored >= columns && encode(driver, &c, &out->c, err))
        return -1;
    *(rows ? &c.box_inner : &c.box_outer) = tail;
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

int tcg_tma_encode(const tcg_driver *driver, const tcg_kernel *kernel, const tcg_gemm_args *args, bool fills_device,
                   tcg_tma_args *out, tcg_error *err) {
    bool a_k_major = kernel->order == TCG_nn || kernel->order == TCG_nt;
    bool b_k_major = kernel->order == TCG_nt || kernel->order == TCG_tt;
    tcg_batch_dim batch = args->batch_ndim ? args->batch[0] : (tcg_batch_dim){.size = 1};
    tensor a = operand("A", kernel, args->a, a_k_major, args->m, args->k, args->a_row, args->a_col, batch.size,
                       batch.a, kernel->block_m, kernel->cluster_n);
    tensor b = operand("B", kernel, args->b, b_k_major, args->n, args->k, args->b_col, args->b_row, batch.size,
                       batch.b, kernel->block_n, kernel->cluster_m);
    if (!driver->cuTensorMapEncodeTiled)
        return tcg_fail(err, TCG_ERR_NO_DRIVER, 0, "%s: this NVIDIA driver has no cuTensorMapEncodeTiled (CUDA 12.0)",
                        kernel->name);
    int a_lines = a_k_major ? (int)a.box_outer * kernel->cluster_n : kernel->block_m;
    int b_lines = b_k_major ? (int)b.box_outer * kernel->cluster_m : TCG_WGMMA_B_ROWS(kernel->block_n, false);
    bool wgmma = kernel->family == TCG_FAMILY_wgmma;
    int a_part = wgmma ? part_of_tile(args->m, kernel->block_m, kernel->cluster_n, a_k_major) : 0;
    int b_part = wgmma ? part_of_tile(args->n, kernel->block_n, kernel->cluster_m, b_k_major) : 0;
    int a_held = a_k_major ? a_part : (a_part + TCG_TMA_BOX_ELEMS - 1) / TCG_TMA_BOX_ELEMS * TCG_TMA_BOX_ELEMS;
    int b_held = b_k_major ? b_part : (b_part + TCG_TMA_BOX_ELEMS - 1) / TCG_TMA_BOX_ELEMS * TCG_TMA_BOX_ELEMS;
    out->gemm = *args;
    out->walk = (tcg_tma_walk){
        .tiles = (int32_t)args->tiles,
        .stage_bytes = (a_lines + b_lines) * kernel->block_k * 2,
        .a_bytes = a_lines * kernel->block_k * 2,
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
        .a_batched = batch.a != 0,
        .b_batched = batch.b != 0,
        .c_tma = (int16_t)args->c_tma,
        .c_dtype = (int16_t)args->c_dtype,
        .a_part_saves = a_part ? (a_lines - a_held) * kernel->block_k * 2 : 0,
        .b_part_saves = b_part ? (b_lines - b_held) * kernel->block_k * 2 : 0,
        .a_part_boxes = (int16_t)(a_held / TCG_TMA_BOX_ELEMS),
        .b_part_boxes = (int16_t)(b_held / TCG_TMA_BOX_ELEMS),
        .hands_over = fills_device ? TCG_AFTER_LOADS : TCG_AFTER_PRODUCTS,
    };
    if (args->tiles_m % args->raster_group)
        out->walk.last_rows = tcg_divisor_of(args->tiles_m % args->raster_group);
    if (encode(driver, &a, &out->a, err) || encode(driver, &b, &out->b, err))
        return -1;
    if (a_part && a_k_major) {
        a.box_outer = (uint32_t)a_part;
        if (encode(driver, &a, &out->a_part, err))
            return -1;
    }
    if (b_part && b_k_major) {
        b.box_outer = (uint32_t)b_part;
        if (encode(driver, &b, &out->b_part, err))
            return -1;
    }
    if (args->c_tma != TCG_C_TMA_ROWS && args->c_tma != TCG_C_TMA_COLUMNS)
        return 0;
    return encode_result(driver, kernel, args, batch.size, args->batch_ndim ? batch.c : args->c_split, out, err);
}
