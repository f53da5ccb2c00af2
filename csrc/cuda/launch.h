/* Kernels by handle: loaded once, set up once a device, launched on a stream. */
#ifndef TCG_LAUNCH_H
#define TCG_LAUNCH_H

#include "driver.h"
#include "plan.h"

/* A place for every kernel's handle: the rows as machine code, the rows as PTX, the two of image util. */
enum {
    TCG_SLOT_COPY = 2 * TCG_KERNEL_COUNT,
    TCG_SLOT_REDUCE,
    TCG_SLOT_COUNT,
};

typedef struct tcg_launch {
    int slot;
    int image;
    const char *name; /* the symbol in the image */
    uint32_t grid;    /* blocks, along x */
    int threads, smem_bytes;
    int cluster;      /* blocks a cluster; 0: none */
    bool waits;       /* on Hopper it waits by itself for what comes before it in the stream */
    const void *args; /* the kernel's one parameter */
} tcg_launch;

/* In a scope of the device. Loads the kernel where that has not been done, legally even during a capture. */
int tcg_launch_kernel(const tcg_scope *scope, int ordinal, const tcg_launch *launch, CUstream stream, tcg_error *err);

/* The plan's GEMM kernel with these arguments, which are the plan's with the workspace filled in. */
int tcg_launch_gemm(const tcg_scope *scope, int ordinal, const tcg_plan *plan, const tcg_gemm_args *args,
                    CUstream stream, tcg_error *err);

#endif
