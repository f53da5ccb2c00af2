/* What the planner knows of one device: the rows that run there, with their costs, sorted for look-up. */
#ifndef TCG_PLAN_H
#define TCG_PLAN_H

#include "registry.h"

/* The chip that tuned.def's exceptions were measured on. */
enum { TCG_TUNED_CC = 90, TCG_TUNED_SMS = 132 };

/* Rates a clock an SM. They rank kernels against each other; nothing depends on them being exact. */
typedef struct tcg_chip {
    int cc;              /* holds from this compute capability on */
    double tensor_flops; /* mma.sync with fp32 accumulation */
    double fma_flops;
    double dram_bytes, l2_bytes;
    int sm_threads;
} tcg_chip;

/* A row of the table on a device. */
typedef struct tcg_candidate {
    const tcg_kernel *kernel;
    bool ptx;
    int occupancy;              /* blocks an SM holds */
    double slots, per_slot;     /* blocks the device holds, and 1 over it */
    double per_m, per_n, per_k; /* 1 / BLOCK_M, ... */
    double block_cycles;        /* one block, one BLOCK_K: arithmetic or shared memory, whichever is slower */
    double latency_cycles;      /* the least one BLOCK_K takes, however little there is to do */
    double memory, tile_cycles; /* wgmma: see tuned.def */
} tcg_candidate;

enum { TCG_ANY_ORDER = TCG_ORDER_COUNT, TCG_BUCKETS = TCG_DTYPE_COUNT * (TCG_ORDER_COUNT + 1) * 2 };

typedef struct tcg_plan_view {
    int cc, sm_count, smem_block_bytes, smem_sm_bytes, l2_bytes; /* the key */
    const tcg_chip *chip;
    double per_sm, per_l2_byte, per_dram_byte; /* 1 / SMs; cycles for a byte of one SM, of the device */
    bool util;                                 /* tcg_copy and tcg_reduce run there */
    bool tma;                                  /* and so does a family that takes tensor maps */
    bool wgmma; /* which tma_mma is not chosen beside: it takes no more and is slower */
    int first[TCG_BUCKETS + 1];
    tcg_candidate rows[TCG_KERNEL_COUNT];
} tcg_plan_view;

void tcg_plan_view_build(const tcg_device_props *device, tcg_plan_view *view);

/* tcg_plan_make for a view; `name` is the device's, for messages. */
int tcg_plan_make_view(const tcg_problem *problem, const tcg_plan_view *view, const char *name,
                       const tcg_options *options, tcg_plan *plan, tcg_error *err);

#endif
