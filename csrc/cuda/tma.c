/* Tensor maps: rank 3 (the unit-stride axis, the other one, the batch), 128-byte swizzle, zero outside. */
#include "tma.h"

_Static_assert(sizeof(CUtensorMap) == sizeof(tcg_tensor_map), "abi.h's tensor map is CUDA's");
_Static_assert(_Alignof(tcg_tma_args) >= 64 && _Alignof(tcg_tma_args) % _Alignof(CUtensorMap) == 0,
               "cuTensorMapEncodeTiled wants its map aligned");

typedef struct tensor {
    const char *name; /* in messages */
    const void *data;
    int64_t inner, outer, entries;      /* lengths */
    int64_t outer_stride, entry_stride; /* elements */
    uint32_t box_outer;                 /* lines of a box, which is TCG_TMA_BOX_ELEMS wide */
} tensor;

static int encode(const tcg_driver *driver, int dtype, const tensor *of, tcg_tensor_map *map, tcg_error *err) {
    /* An axis of length 1 is never stepped along, but its stride has to be a legal one. */
    int64_t outer_stride = of->outer > 1 ? of->outer_stride : 8,
            entry_stride = of->entries > 1 ? of->entry_stride : 8;
    cuuint64_t sizes[3] = {(cuuint64_t)of->inner, (cuuint64_t)of->outer, (cuuint64_t)of->entries};
    cuuint64_t strides_bytes[2] = {(cuuint64_t)outer_stride * 2, (cuuint64_t)entry_stride * 2};
    cuuint32_t box[3] = {TCG_TMA_BOX_ELEMS, of->box_outer, 1}, steps[3] = {1, 1, 1};
    CUresult result = driver->cuTensorMapEncodeTiled(
        (CUtensorMap *)map, dtype == TCG_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
        (void *)of->data, sizes, strides_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, driver, result,
                             "encoding the tensor map of %s: %lld x %lld x %lld elements at %p, "
                             "strides %lld and %lld bytes, box %d x %u",
                             of->name, (long long)of->entries, (long long)of->outer, (long long)of->inner, of->data,
                             (long long)strides_bytes[1], (long long)strides_bytes[0], TCG_TMA_BOX_ELEMS,
                             of->box_outer);
    return 0;
}

/* Lines of a K-major operand that one box brings. A short operand gets a short box: lines outside a tensor cost as much as
 * any. A shared one comes in equal slices. */
static uint32_t box_lines(int block, int sharers, int64_t lines) {
    return (uint32_t)(sharers == 1 && lines < block ? (lines + 7) / 8 * 8 : block / sharers);
}

int tcg_tma_encode(const tcg_driver *driver, const tcg_kernel *kernel, const tcg_gemm_args *args, tcg_tma_args *out,
                   tcg_error *err) {
    bool a_k_major = kernel->order == TCG_nn || kernel->order == TCG_nt;
    bool b_k_major = kernel->order == TCG_nt || kernel->order == TCG_tt;
    tcg_batch_dim batch = args->batch_ndim ? args->batch[0] : (tcg_batch_dim){.size = 1};
    tensor a = {.name = "A",
                .data = args->a,
                .inner = a_k_major ? args->k : args->m,
                .outer = a_k_major ? args->m : args->k,
                .entries = batch.a ? batch.size : 1,
                .outer_stride = a_k_major ? args->a_row : args->a_col,
                .entry_stride = batch.a,
                .box_outer =
                    a_k_major ? box_lines(kernel->block_m, kernel->cluster_n, args->m) : (uint32_t)kernel->block_k};
    tensor b = {.name = "B",
                .data = args->b,
                .inner = b_k_major ? args->k : args->n,
                .outer = b_k_major ? args->n : args->k,
                .entries = batch.b ? batch.size : 1,
                .outer_stride = b_k_major ? args->b_col : args->b_row,
                .entry_stride = batch.b,
                .box_outer =
                    b_k_major ? box_lines(kernel->block_n, kernel->cluster_m, args->n) : (uint32_t)kernel->block_k};
    bool rows = args->c_tma == TCG_C_TMA_ROWS;
    tensor c = {.name = "C",
                .data = args->c,
                .inner = rows ? args->n : args->m,
                .outer = rows ? args->m : args->n,
                .entries = batch.size,
                .outer_stride = rows ? args->c_row : args->c_col,
                .entry_stride = batch.c,
                .box_outer = (uint32_t)(rows || kernel->block_n > 64 ? 64 : kernel->block_n)};
    if (!driver->cuTensorMapEncodeTiled)
        return tcg_fail(err, TCG_ERR_NO_DRIVER, 0, "%s: this NVIDIA driver has no cuTensorMapEncodeTiled (CUDA 12.0)",
                        kernel->name);
    int a_lines = a_k_major ? (int)a.box_outer * kernel->cluster_n : kernel->block_m;
    int b_lines = b_k_major ? (int)b.box_outer * kernel->cluster_m : TCG_WGMMA_B_ROWS(kernel->block_n, false);
    out->gemm = *args;
    out->stage_bytes = (a_lines + b_lines) * kernel->block_k * 2;
    return encode(driver, kernel->in_dtype, &a, &out->a, err) || encode(driver, kernel->in_dtype, &b, &out->b, err) ||
                   ((rows || args->c_tma == TCG_C_TMA_COLUMNS) && encode(driver, kernel->in_dtype, &c, &out->c, err))
               ? -1
               : 0;
}
