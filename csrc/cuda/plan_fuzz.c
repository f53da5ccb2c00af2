/* Random problems on random devices through the planner, and what must hold of every plan. */
#include "plan.h"

#include <stdio.h>
#include <string.h>

/* xorshift64*: good enough to draw test cases, the same everywhere. */
static uint64_t draw(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dULL;
}

static int64_t below(uint64_t *state, int64_t limit) { return (int64_t)(draw(state) % (uint64_t)limit); }

static int64_t pick(uint64_t *state, const int64_t *list, int count) { return list[below(state, count)]; }

/* Sizes crowd where plans change: tiny, near tiles, zero, and absurd. */
static int64_t draw_size(uint64_t *state) {
    static const int64_t near[] = {0,  1,  1,   1,   2,   7,   8,   15,  16,   17,  63,
                                   64, 65, 127, 128, 129, 255, 256, 257, 4096, 4097};
    switch (below(state, 16)) {
    case 0:
        return below(state, (int64_t)1 << 20);
    case 1:
        return below(state, (int64_t)1 << below(state, 48)) + 1;
    case 2:
        return below(state, 64) ? 1 + below(state, 8192) : (int64_t)(draw(state) >> 1);
    case 3:
    case 4:
    case 5:
        return 1 + below(state, 8192);
    case 6:
    case 7:
        return 8 * (1 + below(state, 1024));
    default:
        return pick(state, near, sizeof near / sizeof *near);
    }
}

static int64_t times(int64_t x, int64_t y) { return (int64_t)((uint64_t)x * (uint64_t)y); }

/* Two strides: packed either way, padded, unaligned, strided, broadcast, backwards, or junk. */
static void draw_strides(uint64_t *state, int64_t rows, int64_t cols, int64_t *row, int64_t *col) {
    int64_t pad = below(state, 3) ? 0 : below(state, 2) ? 8 * below(state, 9) : below(state, 9);
    bool turned = below(state, 2);
    int64_t line = (int64_t)((uint64_t)(turned ? rows : cols) + (uint64_t)pad), unit = 1;
    switch (below(state, 24)) {
    case 0:
        unit = 2 + below(state, 3);
        line = times(line, unit);
        break;
    case 1:
        unit = -1;
        break;
    case 2:
        line = -line;
        break;
    case 3:
        unit = 0;
        break;
    case 4:
        line = 0;
        break;
    case 5:
        line = 1;
        break;
    case 6:
        unit = (int64_t)draw(state);
        line = (int64_t)draw(state);
        break;
    }
    *row = turned ? unit : line;
    *col = turned ? line : unit;
}

/* Shapes of which tuned.def names the row, on the device that it was measured on. */
static const struct named_shape {
    int64_t m_from, m_to, n, k;
} named_shapes[] = {
#define TCG_EXCEPTION(m_from, m_to, n, k, ...) {m_from, m_to, n, k},
#include "tuned.def"
};

static void draw_problem(uint64_t *state, tcg_problem *problem) {
    static const int64_t lengths[] = {0, 1, 2, 2, 3, 3, 4, 5, 7, 16, 64, 65536};
    memset(problem, 0, sizeof *problem);
    problem->m = draw_size(state);
    problem->n = draw_size(state);
    problem->k = draw_size(state);
    if (!below(state, 8)) {
        const struct named_shape *shape = &named_shapes[below(state, sizeof named_shapes / sizeof *named_shapes)];
        problem->m = shape->m_from + below(state, shape->m_to - shape->m_from + 1);
        problem->n = shape->n;
        problem->k = shape->k;
    }
    problem->in_dtype = (int)below(state, TCG_DTYPE_COUNT);
    problem->out_dtype = below(state, 3) ? problem->in_dtype : TCG_f32;
    draw_strides(state, problem->m, problem->k, &problem->a.row, &problem->a.col);
    draw_strides(state, problem->k, problem->n, &problem->b.row, &problem->b.col);
    draw_strides(state, problem->m, problem->n, &problem->c.row, &problem->c.col);
    int bytes = tcg_dtype_bytes[problem->in_dtype];
    int64_t shift_a = below(state, 4) ? 0 : below(state, 9), shift_b = below(state, 4) ? 0 : below(state, 9);
    problem->a.data = (void *)(uintptr_t)(0x700000000000 + shift_a * bytes);
    problem->b.data = (void *)(uintptr_t)(0x710000000000 + shift_b * bytes);
    problem->c.data = (void *)(uintptr_t)(0x720000000000 + below(state, 2) * tcg_dtype_bytes[problem->out_dtype]);
    problem->batch_ndim = below(state, 2) ? 0 : (int)below(state, TCG_MAX_BATCH_DIMS + 1);
    int64_t a = times(problem->m, problem->k), b = times(problem->k, problem->n), c = times(problem->m, problem->n);
    for (int i = 0; i < problem->batch_ndim; i++) {
        tcg_batch_dim *dim = &problem->batch[i];
        dim->size = lengths[1 + below(state, below(state, 4) ? 9 : 11)];
        if (!below(state, 64))
            dim->size = 0;
        dim->a = below(state, 3) ? a : 0;
        dim->b = below(state, 3) ? b : 0;
        dim->c = c;
        a = times(a, dim->a ? dim->size : 1);
        b = times(b, dim->b ? dim->size : 1);
        c = times(c, dim->size);
    }
}

static void draw_device(uint64_t *state, tcg_device_props *device) {
    static const int64_t ccs[] = {80, 86, 87, 89, 90, 100, 103, 110, 120, 121}, kbs[] = {48, 64, 99, 100, 163, 227};
    memset(device, 0, sizeof *device);
    device->cc = (int)pick(state, ccs, sizeof ccs / sizeof *ccs);
    device->sm_count = below(state, 4) ? 1 + (int)below(state, 200) : TCG_TUNED_SMS;
    device->smem_block_bytes = 1024 * (int)(below(state, 2) ? 48 + below(state, 180) : pick(state, kbs, 6));
    device->smem_sm_bytes = device->smem_block_bytes + 1024;
    device->l2_bytes = (int)(1 + below(state, 128)) << 20;
    snprintf(device->name, sizeof device->name, "device of the fuzzer");
}

/* Least and greatest offset in elements that strides over those lengths reach; false on overflow. */
struct extent {
    __int128 low, high;
};

static void reach(struct extent *extent, int64_t size, int64_t stride) {
    __int128 span = (__int128)(size - 1) * stride;
    *(span < 0 ? &extent->low : &extent->high) += span;
}

static bool same(struct extent x, struct extent y) { return x.low == y.low && x.high == y.high; }

static bool aligned(uint64_t bits, int bytes) { return bits % (uint64_t)bytes == 0; }

/* The plan's operand i against the caller's, and against what its kernel asks for. NULL, or the fault. */
static const char *check_operand(const tcg_problem *problem, const tcg_plan *plan, int i) {
    const tcg_gemm_args *args = &plan->args;
    const tcg_kernel *kernel = plan->kernel;
    const tcg_plan_copy *copy = i ? &plan->copy_b : &plan->copy_a;
    bool is_a = (i == 0) != plan->swap;
    int elem_bytes = tcg_dtype_bytes[problem->in_dtype];
    struct extent want = {0, 0}, got = {0, 0};
    int64_t size = i ? args->n : args->m, stride = i ? args->b_col : args->a_row;
    int64_t k_stride = i ? args->b_row : args->a_col, entries = 1;
    const void *data = i ? args->b : args->a;
    bool k_major = kernel->order >= 0 && (i ? (kernel->order & 1) : !(kernel->order & 2));

    if (problem->k == 0)
        return copy->needed ? "a copy although K is 0" : NULL;
    reach(&want, is_a ? problem->m : problem->n, is_a ? problem->a.row : problem->b.col);
    reach(&want, problem->k, is_a ? problem->a.col : problem->b.row);
    for (int d = 0; d < problem->batch_ndim; d++)
        reach(&want, problem->batch[d].size, is_a ? problem->batch[d].a : problem->batch[d].b);

    uint64_t bits = (uintptr_t)data;
    int64_t line = k_major ? stride : k_stride, lines = k_major ? size : args->k;
    bits |= lines > 1 ? (uint64_t)line * (uint64_t)elem_bytes : 0;
    for (int d = 0; d < args->batch_ndim; d++) {
        int64_t step = i ? args->batch[d].b : args->batch[d].a;
        bits |= (uint64_t)step * (uint64_t)elem_bytes;
        entries *= step ? args->batch[d].size : 1;
    }
    if (kernel->order >= 0) {
        if ((k_major ? k_stride : stride) != 1)
            return "an operand without the unit stride its order names";
        if (!aligned(bits, kernel->align_bytes))
            return "an operand less aligned than its kernel asks for";
    }
    if (!copy->needed) {
        if (data != (is_a ? problem->a.data : problem->b.data))
            return "an operand at another address";
        reach(&got, size, stride);
        reach(&got, args->k, k_stride);
        for (int d = 0; d < args->batch_ndim; d++)
            reach(&got, args->batch[d].size, i ? args->batch[d].b : args->batch[d].a);
        return same(want, got) ? NULL : "strides that reach other elements";
    }
    if (data || copy->src != (is_a ? problem->a.data : problem->b.data))
        return "a copy from another address";
    if (copy->rows != lines || copy->cols != (k_major ? args->k : size) || copy->row_elems < copy->cols ||
        copy->row_elems != line || copy->transposed != (i ? k_major : !k_major) || copy->batches != entries)
        return "a copy of another shape";
    if ((__int128)copy->rows * copy->row_elems * copy->batches * elem_bytes != (__int128)copy->bytes)
        return "a copy of another length";
    reach(&got, copy->rows, copy->src_row);
    reach(&got, copy->cols, copy->src_col);
    for (int d = 0; d < args->batch_ndim; d++)
        reach(&got, args->batch[d].size, copy->src_batch[d]);
    if (!same(want, got))
        return "a copy that reads other elements";
    struct extent written = {0, copy->cols - 1};
    reach(&written, copy->rows, copy->row_elems);
    for (int d = 0; d < args->batch_ndim; d++)
        reach(&written, args->batch[d].size, i ? args->batch[d].b : args->batch[d].a);
    if (written.low != 0 || (written.high + 1) * elem_bytes > (__int128)copy->bytes)
        return "a kernel that reads past its copy";
    return NULL;
}

static const char *check_result(const tcg_problem *problem, const tcg_plan *plan) {
    const tcg_gemm_args *args = &plan->args;
    struct extent want = {0, 0}, got = {0, 0}, partial = {0, 0};
    bool split = plan->splits > 1;
    reach(&want, problem->m, problem->c.row);
    reach(&want, problem->n, problem->c.col);
    for (int d = 0; d < problem->batch_ndim; d++)
        reach(&want, problem->batch[d].size, problem->batch[d].c);
    reach(&got, args->m, split ? plan->result.row : args->c_row);
    reach(&got, args->n, split ? plan->result.col : args->c_col);
    for (int d = 0; d < args->batch_ndim; d++)
        reach(&got, args->batch[d].size, split ? plan->result.batch[d] : args->batch[d].c);
    if ((split ? plan->result.c : args->c) != problem->c.data || !same(want, got))
        return "a result elsewhere";
    if (args->c_dtype != (split ? TCG_f32 : problem->out_dtype))
        return "a result of another type";
    int elem_bytes = tcg_dtype_bytes[args->c_dtype];
    if (args->c_vec_bytes != 2 && args->c_vec_bytes != 4 && args->c_vec_bytes != 8 && args->c_vec_bytes != 16)
        return "a store of no known width";
    if (args->c_col != 1 ? args->c_vec_bytes != elem_bytes : args->c_vec_bytes < elem_bytes)
        return "a store of another width";
    uint64_t bits = (uintptr_t)args->c | (args->m > 1 ? (uint64_t)args->c_row * (uint64_t)elem_bytes : 0);
    for (int d = 0; d < args->batch_ndim; d++)
        bits |= (uint64_t)args->batch[d].c * (uint64_t)elem_bytes;
    if (!aligned(bits, args->c_vec_bytes))
        return "a store wider than a row's alignment";
    if (!split)
        return plan->partials_bytes ? "partial sums without a split" : NULL;
    reach(&partial, args->m, args->c_row);
    reach(&partial, args->n, args->c_col);
    for (int d = 0; d < args->batch_ndim; d++)
        reach(&partial, args->batch[d].size, args->batch[d].c);
    if (partial.low != 0 || partial.high + 1 + args->c_row - args->n != args->c_split ||
        args->c_row != TCG_PARTIAL_ROW(args->n) ||
        (__int128)args->c_split * plan->splits * 4 != (__int128)plan->partials_bytes)
        return "partial sums of another size";
    return NULL;
}

/* What cuTensorMapEncodeTiled or the kernel could not take. */
static const char *tma_fault(const tcg_plan *plan) {
    const tcg_gemm_args *args = &plan->args;
    bool a_k_major = !(plan->kernel->order & 2), b_k_major = plan->kernel->order & 1;
    int64_t a = a_k_major ? args->a_row : args->a_col, b = b_k_major ? args->b_col : args->b_row;
    int64_t a_lines = a_k_major ? args->m : args->k, b_lines = b_k_major ? args->n : args->k;
    const int64_t most = (int64_t)1 << 39;
    if (args->batch_ndim > 1 || args->m > INT32_MAX || args->n > INT32_MAX || args->k > INT32_MAX || args->k < 1)
        return "a problem that tensor maps do not describe";
    if ((a_lines > 1 && (a <= 0 || a >= most || a % 8)) || (b_lines > 1 && (b <= 0 || b >= most || b % 8)) ||
        (uintptr_t)args->a % 16 || (uintptr_t)args->b % 16)
        return "lines that TMA cannot read";
    for (int d = 0; d < args->batch_ndim; d++)
        if (args->batch[d].a < 0 || args->batch[d].a % 8 || args->batch[d].b < 0 || args->batch[d].b % 8)
            return "batch strides that TMA cannot read";
    if ((args->k < plan->k_per_split ? args->k : plan->k_per_split) <=
            (int64_t)(plan->kernel->cluster_k - 1) * plan->kernel->block_k ||
        (plan->splits > 1 && plan->kernel->cluster_k > 1))
        return "a block of the cluster without a part of K";
    bool rows = args->c_tma == TCG_C_TMA_ROWS;
    int64_t whole = 16 / tcg_dtype_bytes[args->c_dtype]; /* elements that TMA writes at once */
    if ((rows || args->c_tma == TCG_C_TMA_COLUMNS) &&
        ((!rows && args->c_dtype == TCG_f32) || (uintptr_t)args->c % 16 ||
         (rows ? tcg_row_length(args) : args->m) % whole || (rows ? args->c_col : args->c_row) != 1 ||
         (rows ? args->m > 1 && args->c_row % whole : args->n > 1 && args->c_col % whole) ||
         (args->batch_ndim && args->batch[0].c % whole) || (plan->splits > 1 && args->c_split % whole)))
        return "a result that TMA cannot write";
    return NULL;
}

static const char *check_plan(const tcg_problem *problem, const tcg_device_props *device, const tcg_options *options,
                              const tcg_plan *plan) {
    const tcg_gemm_args *args = &plan->args;
    const tcg_kernel *kernel = plan->kernel;
    bool empty = problem->m == 0 || problem->n == 0;
    __int128 elems = (__int128)problem->m * problem->n, covered, batches = 1;
    for (int i = 0; i < problem->batch_ndim; i++) {
        empty |= problem->batch[i].size == 0;
        elems *= problem->batch[i].size;
    }
    if (!plan->why)
        return "no reason";
    if (empty)
        return kernel ? "a launch for an empty result" : NULL;
    if (!kernel)
        return "an empty plan for a problem that is not";
    if (kernel->in_dtype != problem->in_dtype)
        return "a kernel of another type";
    tcg_runs runs = tcg_kernel_runs(kernel, device->cc);
    if (runs == TCG_RUNS_NOT || plan->ptx != (runs == TCG_RUNS_PTX))
        return "a kernel that does not run there";
    if (kernel->smem_bytes > device->smem_block_bytes)
        return "a kernel of more shared memory than there is";
    if (options->family >= 0 && (int)kernel->family != options->family)
        return "another family than was asked for";
    if (options->kernel >= 0 && kernel->index != options->kernel)
        return "another kernel than was asked for";
    for (int d = 0; d < args->batch_ndim; d++) {
        if (args->batch[d].size < 2)
            return "a batch axis of length 1";
        batches *= args->batch[d].size;
    }
    covered = (__int128)args->m * args->n * batches;
    if (covered != elems || args->k != problem->k)
        return "another product";
    int64_t block_m = kernel->block_m * kernel->cluster_m, block_n = kernel->block_n * kernel->cluster_n;
    int cluster = kernel->cluster_m * kernel->cluster_n * kernel->cluster_k;
    if (args->tiles_m < 1 || args->tiles_n < 1 || (__int128)args->tiles_m * block_m < args->m ||
        (__int128)(args->tiles_m - 1) * block_m >= args->m || (__int128)args->tiles_n * block_n < args->n ||
        (__int128)(args->tiles_n - 1) * block_n >= args->n)
        return "tiles that do not cover the result exactly";
    if ((__int128)args->tiles_m * args->tiles_n * batches * plan->splits != args->tiles ||
        plan->tiles != args->tiles || plan->tiles_m != args->tiles_m || plan->tiles_n != args->tiles_n)
        return "a wrong number of tiles";
    if (plan->grid < 1 || plan->grid > INT32_MAX || plan->grid % cluster ||
        (int64_t)plan->grid / cluster > plan->tiles)
        return "a wrong grid";
    const char *fault = tcg_families[kernel->family].tma ? tma_fault(plan) : NULL;
    if (fault)
        return fault;
    if (plan->splits < 1 || plan->splits != args->splits || plan->k_per_split != args->k_per_split ||
        plan->k_per_split < kernel->block_k || plan->k_per_split % kernel->block_k ||
        (__int128)plan->k_per_split * plan->splits < problem->k ||
        (plan->splits > 1 && (__int128)plan->k_per_split * (plan->splits - 1) >= problem->k))
        return "splits that do not cover K";
    if (options->batch_invariant && (plan->splits != 1 || !tcg_k_in_order(kernel)))
        return "a split although batch_invariant";
    if (plan->raster_group < 1 || plan->raster_group > plan->tiles_m || plan->raster_group != args->raster_group)
        return "a wrong raster group";
    size_t at = 0;
    const size_t parts[3][2] = {{plan->copy_a.offset_bytes, plan->copy_a.bytes},
                                {plan->copy_b.offset_bytes, plan->copy_b.bytes},
                                {plan->partials_offset_bytes, plan->partials_bytes}};
    for (int i = 0; i < 3; i++) {
        if (!parts[i][1])
            continue;
        if (parts[i][0] < at || parts[i][0] % 256)
            return "parts of the workspace that overlap";
        at = parts[i][0] + parts[i][1];
    }
    if (at > plan->workspace_bytes)
        return "a workspace that is too small";
    fault = check_operand(problem, plan, 0);
    fault = fault ? fault : check_operand(problem, plan, 1);
    return fault ? fault : check_result(problem, plan);
}

/* A refusal is right where something is larger than 64-bit arithmetic or memory, where a forced kernel cannot run, or
 * where the build has nothing for the device. */
static bool may_refuse(const tcg_problem *problem, const tcg_device_props *device, const tcg_options *options,
                       const tcg_error *err) {
    if (err->kind == TCG_ERR_VALUE) {
        long double work = (long double)problem->m * problem->n,
                    largest = (long double)problem->m + problem->n + problem->k;
        for (int i = 0; i < problem->batch_ndim; i++)
            work *= problem->batch[i].size;
        /* A kernel that was asked for may pad lines of one element to 64. */
        return work * problem->k >= (options->kernel >= 0 ? 0x1p52L : 0x1p58L) || work >= 0x1p48L ||
               largest >= 0x1p48L;
    }
    if (err->kind != TCG_ERR_UNSUPPORTED)
        return false;
    /* Tensor maps describe fewer problems, which matters where their family is asked for. */
    long double longest = (long double)problem->m + problem->n + problem->k;
    for (int i = 0; i < problem->batch_ndim; i++)
        longest *= problem->batch[i].size;
    long double results = (long double)problem->m * problem->n;
    for (int i = 0; i < problem->batch_ndim; i++)
        results *= problem->batch[i].size;
    const tcg_kernel *forced = tcg_kernel_at(options->kernel);
    bool no_tma = problem->batch_ndim > 1 || longest >= 0x1p30L ||
                  results >= 0x1p30L * (forced ? forced->block_m * forced->block_n : 1024);
    if (options->family >= 0 && tcg_families[options->family].tma && (no_tma || problem->k == 0))
        return true;
    if (options->kernel >= 0) {
        const tcg_kernel *kernel = tcg_kernel_at(options->kernel);
        if (options->batch_invariant && !tcg_k_in_order(kernel))
            return true;
        if (tcg_families[kernel->family].tma && (no_tma || problem->k <= kernel->block_k * (kernel->cluster_k - 1)))
            return true;
        return kernel->in_dtype != problem->in_dtype || tcg_kernel_runs(kernel, device->cc) == TCG_RUNS_NOT ||
               kernel->smem_bytes > device->smem_block_bytes;
    }
    for (int i = 0; i < TCG_KERNEL_COUNT; i++) {
        const tcg_kernel *kernel = tcg_kernel_at(i);
        if (kernel->in_dtype == problem->in_dtype && kernel->smem_bytes <= device->smem_block_bytes &&
            tcg_kernel_runs(kernel, device->cc) != TCG_RUNS_NOT &&
            (options->family < 0 || (int)kernel->family == options->family) &&
            problem->k > kernel->block_k * (kernel->cluster_k - 1) &&
            (tcg_k_in_order(kernel) || !options->batch_invariant))
            return false;
    }
    return true;
}

int tcg_plan_fuzz(long count, uint64_t seed, char *failure, size_t size) {
    uint64_t state = seed * 2 + 1;
    tcg_device_props device;
    tcg_plan_view view;
    for (long i = 0; i < count; i++) {
        tcg_problem problem;
        tcg_plan plan;
        tcg_error err = {0};
        tcg_options options = {.family = -1, .kernel = -1, .swap = -1, .batch_invariant = !below(&state, 4)};
        if (i % 16 == 0) {
            draw_device(&state, &device);
            tcg_plan_view_build(&device, &view);
        }
        draw_problem(&state, &problem);
        if (!below(&state, 8))
            options.kernel = (int)below(&state, TCG_KERNEL_COUNT);
        else if (!below(&state, 16))
            options.family = (int)below(&state, TCG_FAMILY_COUNT);
        int rc = tcg_plan_make_view(&problem, &view, device.name, &options, &plan, &err);
        const char *fault = rc == 0      ? check_plan(&problem, &device, &options, &plan)
                            : !*err.text ? "an error without a text"
                            : may_refuse(&problem, &device, &options, &err) ? NULL
                                                                            : err.text;
        if (!fault)
            continue;
        snprintf(
            failure, size,
            "problem %ld of seed %llu: %s (m=%lld n=%lld k=%lld %s->%s a=%lld,%lld b=%lld,%lld c=%lld,%lld batch "
            "axes %d; cc %d, %d SMs, %d bytes of shared memory; kernel %d family %d -> %s)",
            i, (unsigned long long)seed, fault, (long long)problem.m, (long long)problem.n, (long long)problem.k,
            tcg_dtype_names[problem.in_dtype], tcg_dtype_names[problem.out_dtype], (long long)problem.a.row,
            (long long)problem.a.col, (long long)problem.b.row, (long long)problem.b.col, (long long)problem.c.row,
            (long long)problem.c.col, problem.batch_ndim, device.cc, device.sm_count, device.smem_block_bytes,
            options.kernel, options.family, rc == 0 && plan.kernel ? plan.kernel->name : "none");
        return -1;
    }
    return 0;
}
