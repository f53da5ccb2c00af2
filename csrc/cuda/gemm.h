/* The plain-C side that csrc/python calls: a problem in pointers and strides, a plan, a launch. No Python, no cuda.h. */
#ifndef TCG_GEMM_H
#define TCG_GEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../kernels/abi.h"

static inline int64_t tcg_div_up(int64_t x, int64_t y) { return x / y + (x % y != 0); }
static inline int64_t tcg_smaller(int64_t x, int64_t y) { return x < y ? x : y; }

/* Elements of C's rows that a kernel may write: partials are padded. */
static inline int64_t tcg_row_length(const tcg_gemm_args *args) {
    return args->splits > 1 ? TCG_PARTIAL_ROW(args->n) : args->n;
}

/* ---- errors ---------------------------------------------------------------------------------------------- */

/* What went wrong, for the binding to map to an exception. */
typedef enum tcg_error_kind {
    TCG_OK = 0,
    TCG_ERR_CUDA,        /* the driver refused: tcgemm.CudaError */
    TCG_ERR_NO_DRIVER,   /* libcuda.so.1 missing, too old, or no device: RuntimeError */
    TCG_ERR_FORKED,      /* CUDA was initialised before fork(): RuntimeError */
    TCG_ERR_VALUE,       /* the request has no meaning: ValueError */
    TCG_ERR_UNSUPPORTED, /* nothing compiled runs this here, or the forced kernel cannot: RuntimeError */
    TCG_ERR_MEMORY,      /* out of host or device memory: MemoryError */
} tcg_error_kind;

typedef struct tcg_error {
    tcg_error_kind kind;
    int code; /* the CUresult, or 0 */
    char text[480];
} tcg_error;

/* Formats into err and returns -1, so that `return tcg_fail(err, ...)` reads well. */
int tcg_fail(tcg_error *err, tcg_error_kind kind, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* ---- kernels (registry.c) -------------------------------------------------------------------------------- */

/* Families in the order of the ladder. X(name, 1 where operands go by tensor map: the kernels take tcg_tma_args,
 * 1 where the kernels wait by griddepcontrol) */
#define TCG_FAMILIES(X) \
    X(simt, 0, 0)       \
    X(wmma_naive, 0, 0) \
    X(wmma, 0, 0)       \
    X(mma_naive, 0, 0)  \
    X(mma, 0, 1)        \
    X(tma_mma, 1, 0)    \
    X(wgmma, 1, 1)

typedef enum tcg_family {
#define X(name, tma, waits) TCG_FAMILY_##name,
    TCG_FAMILIES(X)
#undef X
        TCG_FAMILY_COUNT
} tcg_family;

/* One row of kernels/table.def. */
typedef struct tcg_kernel {
    const char *name; /* the kernel's symbol */
    int index;        /* its place in the registry */
    int image;        /* where its machine code is */
    int ptx_image;    /* where its PTX is, or -1 */
    tcg_family family;
    int in_dtype;
    int order; /* TCG_nn .. TCG_tt, or -1: any strides */
    int block_m, block_n, block_k, stages;
    int warps_m, warps_n;                /* 0 where it has no meaning */
    int cluster_m, cluster_n, cluster_k; /* blocks of a cluster along C's rows and columns, and along K; 1: none */
    bool pingpong;                       /* wgmma: two warpgroups take tiles in turn, else they share each */
    int align_bytes;                     /* what every line start of A and B must be a multiple of */
    bool shifted;                        /* mma: K is counted from the start of a 16-byte word, line by line of A */
    int threads;
    int smem_bytes; /* dynamic */
} tcg_kernel;

/* Whether one accumulator runs through K in order, as batch_invariant asks: such rows give the same bits. */
static inline bool tcg_k_in_order(const tcg_kernel *kernel) { return kernel->cluster_k == 1 && !kernel->shifted; }

typedef struct tcg_family_traits {
    const char *name;
    bool tma, waits;
} tcg_family_traits;

extern const tcg_family_traits tcg_families[TCG_FAMILY_COUNT];
extern const char *const tcg_dtype_names[TCG_DTYPE_COUNT]; /* "float16" ... */
extern const int tcg_dtype_bytes[TCG_DTYPE_COUNT];
extern const char *const tcg_order_names[TCG_ORDER_COUNT];

int tcg_kernel_count(void);
const tcg_kernel *tcg_kernel_at(int index);
const tcg_kernel *tcg_kernel_find(const char *name); /* NULL when there is none */
const char *tcg_image_archs(int image);              /* what was built, e.g. "80 90 120"; "" when nothing was */

/* ---- devices --------------------------------------------------------------------------------------------- */

typedef struct tcg_device_props {
    int cc; /* 10 * major + minor */
    int sm_count;
    int smem_block_bytes; /* the opt-in limit of a block */
    int smem_sm_bytes;
    int l2_bytes;
    char name[96];
} tcg_device_props;

/* Whether this build holds code for the kernel on a device of that compute capability, and whether the driver
 * would have to compile it from PTX. */
typedef enum tcg_runs { TCG_RUNS_NOT, TCG_RUNS_SASS, TCG_RUNS_PTX } tcg_runs;
tcg_runs tcg_kernel_runs(const tcg_kernel *kernel, int cc);

/* ---- the problem ----------------------------------------------------------------------------------------- */

typedef struct tcg_matrix {
    void *data;       /* the element [0, 0] of the first batch entry */
    int64_t row, col; /* strides in elements; those of axes of length 1 mean nothing */
} tcg_matrix;

/* C = A @ B over up to TCG_MAX_BATCH_DIMS batch axes (already merged, length > 1, innermost first). */
typedef struct tcg_problem {
    int64_t m, n, k;
    int in_dtype, out_dtype;
    int batch_ndim;
    tcg_batch_dim batch[TCG_MAX_BATCH_DIMS];
    tcg_matrix a, b, c;
} tcg_problem;

typedef struct tcg_options {
    int family; /* -1: the planner's choice */
    int kernel; /* registry index, -1: the planner's choice */
    int swap;   /* with `kernel`: 0 as the problem is, 1 as C^T = B^T @ A^T, -1 the planner's choice */
    bool batch_invariant;
    const double
        *tuned; /* with `kernel`: TCG_TUNED's last three constants (csrc/cuda/tuned.def), or NULL: those there */
} tcg_options;

/* ---- the plan (plan.c): a pure function of problem, device and options ----------------------------------------- */

typedef struct tcg_plan_copy {
    bool needed;
    int64_t rows, cols;         /* as written: cols is the unit-stride axis */
    bool transposed;            /* the written rows are the operand's columns */
    int64_t row_elems;          /* leading dimension of the copy */
    int64_t batches;            /* entries that are materialised: broadcast axes are not */
    size_t offset_bytes, bytes; /* in the workspace */
    const void *src;            /* what is copied, and its strides by written row, column and batch axis of args */
    int64_t src_row, src_col;
    int64_t src_batch[TCG_MAX_BATCH_DIMS];
} tcg_plan_copy;

/* Where tcg_reduce writes when splits > 1 (args.c is then the partials): the result as the kernel's [M, N]. */
typedef struct tcg_plan_result {
    void *c;
    int64_t row, col;
    int64_t batch[TCG_MAX_BATCH_DIMS];
} tcg_plan_result;

typedef struct tcg_plan {
    const tcg_kernel *kernel; /* NULL: nothing to launch (an empty result) */
    const char *why;          /* static text */
    double cycles;            /* the estimate that it was chosen by, from its launch to its end */
    bool swap;                /* computes C^T = B^T @ A^T: args.a is the caller's b */
    bool ptx;                 /* the driver compiles it at first use */
    int64_t tiles_m, tiles_n, tiles;
    uint32_t grid;
    int hands_over; /* one of tcg_hand_over */
    int splits;
    int64_t k_per_split;
    int raster_group;
    tcg_plan_copy copy_a, copy_b; /* of the kernel's A and B, that is after the swap */
    size_t partials_offset_bytes, partials_bytes;
    size_t workspace_bytes; /* 256-byte aligned base expected */
    tcg_plan_result result;
    tcg_gemm_args args; /* complete but for the workspace's addresses */
} tcg_plan;

int tcg_plan_make(const tcg_problem *problem, const tcg_device_props *device, const tcg_options *options,
                  tcg_plan *plan, tcg_error *err);

/* Plans `count` random problems for random devices and checks what every plan must hold (plan_fuzz.c). 0, or -1
 * with the problem and what was wrong with its plan in `failure`. */
int tcg_plan_fuzz(long count, uint64_t seed, char *failure, size_t size);

/* ---- the driver (driver.c, launch.c, gemm.c). Everything below may load the driver. ------------------------------- */

int tcg_device_count(int *count, tcg_error *err);
/* Properties of a device, read once; the pointer stays valid. Makes no context: that happens when something first
 * runs there. */
int tcg_device(int ordinal, const tcg_device_props **props, tcg_error *err);
/* The device a pointer belongs to (cuPointerGetAttribute), -1 for plain host memory. */
int tcg_pointer_device(const void *pointer, int *ordinal, tcg_error *err);

/* Launches the plan on the stream (1: legacy default, 2: per-thread default, else a CUstream). Makes the device's
 * primary context current around it where it is not, and restores what was current. Blocks only while a kernel is
 * loaded for the first time, and is legal during stream capture even then. */
int tcg_gemm_launch(const tcg_plan *plan, const tcg_problem *problem, void *workspace, int device, uintptr_t stream,
                    tcg_error *err);

/* Memory that is ours (results for callers without an allocator, their workspace), ordered by the stream. Freeing
 * never fails and never breaks a capture in progress: what cannot be freed now is freed at a later call. Memory that
 * is allocated and freed within one capture lives as long as its graph. */
int tcg_memory_alloc(int device, uintptr_t stream, size_t bytes, void **pointer, tcg_error *err);
void tcg_memory_free(int device, uintptr_t stream, void *pointer);

/* Makes `waiter` wait for the work that is in `stream` now. Equal streams: nothing. */
int tcg_stream_wait(int device, uintptr_t waiter, uintptr_t stream, tcg_error *err);

/* Runs release(arg) once the work that is in the stream now is done: at a later call of this function, or of
 * tcg_release_poll, never from a driver thread. During capture it runs at once (a graph's owner keeps its operands). */
int tcg_release_after(int device, uintptr_t stream, void (*release)(void *), void *arg, tcg_error *err);
void tcg_release_poll(void);

/* For `python -m tcgemm` and tests: blocking copies, and the time in ms of one launch by events. */
int tcg_upload(int device, void *dst, const void *src, size_t bytes, tcg_error *err);
int tcg_download(int device, void *dst, const void *src, size_t bytes, tcg_error *err);
int tcg_synchronize(int device, uintptr_t stream, tcg_error *err);
int tcg_gemm_time(const tcg_plan *plan, const tcg_problem *problem, void *workspace, int device, uintptr_t stream,
                  int launches, float *milliseconds, tcg_error *err);

#endif
