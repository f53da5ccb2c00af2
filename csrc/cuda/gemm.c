/* A plan on a stream: the copies it needs, the GEMM kernel, the sum of its partials. */
#include "gemm.h"

#include "launch.h"
#include "tma.h"

/* tcg_reduce: blocks an SM where the grid stops to grow: they stride over what remains. */
enum { REDUCE_BLOCKS_MAX = 16 };

/* tcg_copy: rounds of resident blocks where the grid stops to grow, and the least part of them for an operand. */
enum { COPY_ROUNDS = 4, COPY_LEAST = 8 };

/* What a thread of tcg_copy moves at once. */
enum { PIECE_BYTES = 16 };

/* Columns that are contiguous are turned in tiles; rows are walked piece by piece where 32 bits count those. */
static enum tcg_copy_way copy_way(const tcg_copy_job *job, int elem_bytes) {
    const int64_t pieces = job->dst_row * elem_bytes / PIECE_BYTES, most = (int64_t)1 << 30;
    if (job->src_col != 1)
        return job->src_row == 1 ? TCG_COPY_TURNED : TCG_COPY_ELEMENTS;
    return job->batch_ndim <= 1 && pieces < most && job->rows < most && job->batches < most &&
                   job->rows * job->batches < most
               ? TCG_COPY_PIECES
               : TCG_COPY_ELEMENTS;
}

/* One operand's part of the copy but for its blocks. Returns its pieces; 0 where nothing is copied. */
static int64_t copy_job(const tcg_plan *plan, bool is_b, char *workspace, tcg_copy_job *job) {
    const tcg_plan_copy *copy = is_b ? &plan->copy_b : &plan->copy_a;
    *job = (tcg_copy_job){.src = copy->src,
                          .dst = workspace + copy->offset_bytes,
                          .rows = copy->rows,
                          .cols = copy->cols,
                          .src_row = copy->src_row,
                          .src_col = copy->src_col,
                          .dst_row = copy->row_elems,
                          .batches = copy->batches};
    for (int d = 0; d < plan->args.batch_ndim; d++) {
        const tcg_batch_dim *dim = &plan->args.batch[d];
        if (is_b ? dim->b : dim->a) /* else broadcast: one entry serves them all */
            job->batch[job->batch_ndim++] = (tcg_batch_dim){.size = dim->size, .a = copy->src_batch[d]};
    }
    job->way = copy_way(job, tcg_dtype_bytes[plan->kernel->in_dtype]);
    return (int64_t)(copy->bytes / PIECE_BYTES);
}

/* Blocks beyond these would have nothing to do. */
static int64_t copy_blocks_most(const tcg_copy_job *job, int64_t pieces) {
    if (job->way == TCG_COPY_TURNED)
        return tcg_div_up(job->rows, TCG_COPY_TURN) * tcg_div_up(job->dst_row, TCG_COPY_TURN) * job->batches;
    return tcg_div_up(pieces, TCG_COPY_THREADS);
}

/* The walk piece by piece, whose grid is known. */
static void walk_pieces(tcg_copy_job *job, int elem_bytes) {
    const int64_t pieces = job->dst_row * elem_bytes / PIECE_BYTES, step = (int64_t)job->blocks * TCG_COPY_THREADS;
    job->step_entry = (int32_t)(step / pieces / job->rows);
    job->step_row = (int32_t)(step / pieces % job->rows);
    job->step_piece = (int32_t)(step % pieces);
    job->row_pieces = tcg_divisor_of(pieces);
    job->entry_rows = tcg_divisor_of(job->rows);
}

/* Blocks are shared out by the operands' sizes: as many as are resident at once, more where all threads still have DEPTH
 * pieces to copy. */
static int launch_copies(const tcg_scope *scope, int ordinal, const tcg_plan *plan, char *workspace, CUstream stream,
                         tcg_error *err) {
    tcg_copy_args args = {.elem_bytes = tcg_dtype_bytes[plan->kernel->in_dtype]};
    const int64_t pieces[2] = {copy_job(plan, false, workspace, &args.job[0]),
                               copy_job(plan, true, workspace, &args.job[1])};
    const double all = (double)pieces[0] + (double)pieces[1], resident = scope->props->sm_count * TCG_COPY_BLOCKS,
                 most = resident * COPY_ROUNDS, busy = all / (TCG_COPY_THREADS * TCG_COPY_DEPTH),
                 room = busy < resident ? resident
                        : busy < most   ? busy
                                        : most;
    bool turned = false; /* shared memory that is not asked for is room for the next kernel's first blocks */
    for (int i = 0; i < 2; i++) {
        const int64_t share = (int64_t)(room * ((double)pieces[i] / all)), least = (int64_t)resident / COPY_LEAST;
        args.job[i].blocks = pieces[i] ? (uint32_t)tcg_smaller(copy_blocks_most(&args.job[i], pieces[i]),
                                                               share > least ? share : least)
                                       : 0;
        turned |= args.job[i].blocks && args.job[i].way == TCG_COPY_TURNED;
        if (args.job[i].blocks && args.job[i].way == TCG_COPY_PIECES)
            walk_pieces(&args.job[i], args.elem_bytes);
    }
    tcg_launch launch = {.slot = TCG_SLOT_COPY,
                         .image = TCG_IMAGE_util,
                         .name = "tcg_copy",
                         .grid = args.job[0].blocks + args.job[1].blocks,
                         .threads = TCG_COPY_THREADS,
                         .smem_bytes = turned ? TCG_COPY_PATCH_BYTES : 0,
                         .waits = true,
                         .args = &args};
    return tcg_launch_kernel(scope, ordinal, &launch, stream, err);
}

static int launch_reduce(const tcg_scope *scope, int ordinal, const tcg_plan *plan, int c_dtype,
                         const float *partials, CUstream stream, tcg_error *err) {
    tcg_reduce_args args = {
        .partials = partials,
        .c = plan->result.c,
        .m = plan->args.m,
        .n = plan->args.n,
        .partial_row = plan->args.c_row,
        .batches = 1,
        .c_row = plan->result.row,
        .c_col = plan->result.col,
        .c_split = plan->args.c_split,
        .splits = plan->splits,
        .c_dtype = c_dtype,
        .c_together = plan->result.col == 1 && plan->result.row % TCG_REDUCE_ELEMS == 0 &&
                      (uintptr_t)plan->result.c % (TCG_REDUCE_ELEMS * (size_t)tcg_dtype_bytes[c_dtype]) == 0,
        .batch_ndim = plan->args.batch_ndim};
    for (int d = 0; d < args.batch_ndim; d++) {
        args.batch[d] = (tcg_batch_dim){.size = plan->args.batch[d].size, .a = plan->result.batch[d]};
        args.batches *= args.batch[d].size;
        args.c_together = args.c_together && args.batch[d].a % TCG_REDUCE_ELEMS == 0;
    }
    const int64_t sums = args.c_split / TCG_REDUCE_ELEMS, sms = scope->props->sm_count; /* a thread each */
    int64_t blocks = tcg_div_up(sums * TCG_REDUCE_PARTS, TCG_REDUCE_THREADS);
    args.shared = args.splits >= TCG_REDUCE_PARTS && blocks <= sms * TCG_REDUCE_BLOCKS; /* all resident at once */
    if (!args.shared)
        blocks = tcg_smaller(tcg_div_up(sums, TCG_REDUCE_THREADS), sms * REDUCE_BLOCKS_MAX);
    tcg_launch launch = {.slot = TCG_SLOT_REDUCE,
                         .image = TCG_IMAGE_util,
                         .name = "tcg_reduce",
                         .grid = (uint32_t)blocks,
                         .threads = TCG_REDUCE_THREADS,
                         .waits = true,
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
    if (plan->copy_a.needed)
        args.a = workspace + plan->copy_a.offset_bytes;
    if (plan->copy_b.needed)
        args.b = workspace + plan->copy_b.offset_bytes;
    if ((plan->copy_a.needed || plan->copy_b.needed) && launch_copies(scope, ordinal, plan, workspace, stream, err))
        return -1;
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
