/* A plan on a stream: the copies it needs, the GEMM kernel, the sum of its partials. */
#include "gemm.h"

#include "launch.h"

/* Elements a thread of tcg_copy and tcg_reduce is given before the grid grows, and blocks an SM where it stops: both
 * kernels stride over what remains. */
enum { COPY_ELEMS_A_THREAD = 32, REDUCE_ELEMS_A_THREAD = 4, BLOCKS_AN_SM = 16 };

static uint32_t strided_grid(const tcg_scope *scope, double elems, int threads, int elems_a_thread) {
    double blocks = elems / ((double)threads * elems_a_thread) + 1,
           most = (double)scope->props->sm_count * BLOCKS_AN_SM;
    return (uint32_t)(blocks < most ? blocks : most);
}

static int launch_copy(const tcg_scope *scope, int ordinal, const tcg_plan *plan, bool is_b, char *workspace,
                       CUstream stream, tcg_error *err) {
    const tcg_plan_copy *copy = is_b ? &plan->copy_b : &plan->copy_a;
    tcg_copy_args args = {.src = copy->src,
                          .dst = workspace + copy->offset_bytes,
                          .rows = copy->rows,
                          .cols = copy->cols,
                          .src_row = copy->src_row,
                          .src_col = copy->src_col,
                          .dst_row = copy->row_elems,
                          .batches = copy->batches,
                          .elem_bytes = tcg_dtype_bytes[plan->kernel->in_dtype]};
    for (int d = 0; d < plan->args.batch_ndim; d++) {
        const tcg_batch_dim *dim = &plan->args.batch[d];
        int64_t dst = is_b ? dim->b : dim->a;
        if (dst == 0) /* broadcast: one entry serves them all */
            continue;
        args.batch[args.batch_ndim++] = (tcg_batch_dim){.size = dim->size, .a = copy->src_batch[d], .c = dst};
    }
    tcg_launch launch = {
        .slot = TCG_SLOT_COPY,
        .image = TCG_IMAGE_util,
        .name = "tcg_copy",
        .grid = strided_grid(scope, (double)copy->bytes / args.elem_bytes, TCG_COPY_THREADS, COPY_ELEMS_A_THREAD),
        .threads = TCG_COPY_THREADS,
        .args = &args};
    return tcg_launch_kernel(scope, ordinal, &launch, stream, err);
}

static int launch_reduce(const tcg_scope *scope, int ordinal, const tcg_plan *plan, int c_dtype,
                         const float *partials, CUstream stream, tcg_error *err) {
    tcg_reduce_args args = {.partials = partials,
                            .c = plan->result.c,
                            .m = plan->args.m,
                            .n = plan->args.n,
                            .batches = 1,
                            .c_row = plan->result.row,
                            .c_col = plan->result.col,
                            .c_split = plan->args.c_split,
                            .splits = plan->splits,
                            .c_dtype = c_dtype,
                            .batch_ndim = plan->args.batch_ndim};
    for (int d = 0; d < args.batch_ndim; d++) {
        args.batch[d] = (tcg_batch_dim){.size = plan->args.batch[d].size, .c = plan->result.batch[d]};
        args.batches *= args.batch[d].size;
    }
    tcg_launch launch = {.slot = TCG_SLOT_REDUCE,
                         .image = TCG_IMAGE_util,
                         .name = "tcg_reduce",
                         .grid = strided_grid(scope, (double)args.c_split, TCG_REDUCE_THREADS, REDUCE_ELEMS_A_THREAD),
                         .threads = TCG_REDUCE_THREADS,
                         .args = &args};
    return tcg_launch_kernel(scope, ordinal, &launch, stream, err);
}

/* In a scope of the device. */
static int launch_plan(const tcg_scope *scope, int ordinal, const tcg_plan *plan, const tcg_problem *problem,
                       char *workspace, CUstream stream, tcg_error *err) {
    if (plan->workspace_bytes == 0)
        return tcg_launch_gemm(scope, ordinal, plan, &plan->args, stream, err);
    tcg_gemm_args args = plan->args;
    float *partials = (float *)(workspace + plan->partials_offset_bytes);
    if (plan->copy_a.needed) {
        args.a = workspace + plan->copy_a.offset_bytes;
        if (launch_copy(scope, ordinal, plan, false, workspace, stream, err))
            return -1;
    }
    if (plan->copy_b.needed) {
        args.b = workspace + plan->copy_b.offset_bytes;
        if (launch_copy(scope, ordinal, plan, true, workspace, stream, err))
            return -1;
    }
    if (plan->splits > 1)
        args.c = partials;
    if (tcg_launch_gemm(scope, ordinal, plan, &args, stream, err))
        return -1;
    return plan->splits > 1 ? launch_reduce(scope, ordinal, plan, problem->out_dtype, partials, stream, err) : 0;
}

static int check_workspace(const tcg_plan *plan, const void *workspace, tcg_error *err) {
    if (plan->workspace_bytes > 0 && (!workspace || (uintptr_t)workspace % 256))
        return tcg_fail(err, TCG_ERR_VALUE, 0, "workspace: found %p, expected %zu bytes at a multiple of 256",
                        workspace, plan->workspace_bytes);
    return 0;
}

int tcg_gemm_launch(const tcg_plan *plan, const tcg_problem *problem, void *workspace, int device, uintptr_t stream,
                    tcg_error *err) {
    tcg_scope scope;
    if (!plan->kernel)
        return 0;
    if (check_workspace(plan, workspace, err) || tcg_scope_enter(device, &scope, err))
        return -1;
    int rc = launch_plan(&scope, device, plan, problem, workspace, (CUstream)stream, err);
    tcg_scope_leave(&scope);
    return rc;
}

int tcg_gemm_time(const tcg_plan *plan, const tcg_problem *problem, void *workspace, int device, uintptr_t stream,
                  int launches, float *milliseconds, tcg_error *err) {
    tcg_scope scope;
    CUevent events[2] = {NULL, NULL};
    CUresult result = CUDA_SUCCESS;
    int rc = -1;
    *milliseconds = 0;
    if (!plan->kernel || launches < 1)
        return 0;
    if (check_workspace(plan, workspace, err) || tcg_scope_enter(device, &scope, err))
        return -1;
    const tcg_driver *driver = scope.driver;
#define CHECK(call)                                               \
    do {                                                          \
        result = driver->call;                                    \
        if (result != CUDA_SUCCESS) {                             \
            tcg_cuda_fail(err, driver, result, "timing: " #call); \
            goto done;                                            \
        }                                                         \
    } while (0)
    CHECK(cuEventCreate(&events[0], CU_EVENT_DEFAULT));
    CHECK(cuEventCreate(&events[1], CU_EVENT_DEFAULT));
    CHECK(cuEventRecord(events[0], (CUstream)stream));
    for (int i = 0; i < launches; i++)
        if (launch_plan(&scope, device, plan, problem, workspace, (CUstream)stream, err))
            goto done;
    CHECK(cuEventRecord(events[1], (CUstream)stream));
    CHECK(cuEventSynchronize(events[1]));
    CHECK(cuEventElapsedTime(milliseconds, events[0], events[1]));
#undef CHECK
    *milliseconds /= (float)launches;
    rc = 0;
done:
    for (int i = 0; i < 2; i++)
        if (events[i])
            driver->cuEventDestroy(events[i]);
    tcg_scope_leave(&scope);
    return rc;
}
