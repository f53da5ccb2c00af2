/* The planner: problem, device and options -> table row, grid, split, copies. A pure function: it asks the driver
 * nothing. To add a family: its model_ function and its line in `families`, below; the rest reads the table. */
#include "plan.h"

#include <limits.h>
#include <stdatomic.h>
#include <string.h>

/* ---- the cost model ------------------------------------------------------------------------------------------ */

static const tcg_chip chips[] = {
    /* cc, tensor, fma, dram, l2, threads */
    {80, 2048, 128, 13, 40, 2048}, {86, 1024, 256, 6, 16, 1536},   {89, 1024, 256, 3.5, 16, 1536},
    {90, 2600, 256, 18, 32, 2048}, {100, 2600, 256, 28, 40, 2048}, {120, 1024, 256, 4.5, 16, 1536},
};

#define WGMMA_FLOPS 4096.0    /* a clock an SM, fp32 accumulation */
#define SLACK 0.07            /* of the blocks' own time, though memory takes longer: it never overlaps all */
#define INGEST_BYTES 71.1     /* what an SM takes in by TMA a clock */
#define STRADDLE 2.08         /* requests that a box line makes which starts within a sector of the L2 cache, */
#define PIECE_STRADDLE 2.3    /* the same of cp.async, along k */
#define SECTOR_BYTES 32       /* of the L2 cache */
#define OUTSIDE_CYCLES 2.6    /* for a box's line that is beyond K, once a tile */
#define BOX_CYCLES 73.2       /* the least a TMA box takes, however short */
#define HOT_LINE_CYCLES 0.035 /* and a line of less than 128 bytes, for each block that asks for it at once */
#define NARROW 32             /* BLOCK_N up to which a k-block has little arithmetic, */
#define KBLOCK_CYCLES 44.0    /* and then takes so much longer than its boxes */
#define PART_BOX 2.0          /* time of the arithmetic where a box of B is not all used */
#define WGMMA_START_CYCLES \
    2190.0 /* from one kernel to the next in a stream, up to a block's first data, and its last to the end */
#define EARLY_CYCLES 660.0  /* less where it sets itself up meanwhile: the device has room for both */
#define START_CYCLES 1190.0 /* the same without BLOCK_CYCLES, for blocks that load by themselves */
#define BOTH 0.19           /* arithmetic and memory in balance take so much longer than one of them */
#define HOT 0.24            /* the tensor cores' slow-down at the power limit, reached by HOT_CYCLES */
#define HOT_CYCLES 350000.0
#define PINGPONG_HIDES 0.45 /* of a tile's start and end, while the other warpgroup computes */
#define SPLIT_SHARED \
    0.6 /* of memory's time: clusters that split K lose so much where several read the same weights, */
#define CLUSTER_SHARED 0.12 /* and others */
#define SIMT_BOTH 0.34      /* FFMAs and the reads for them: of the shorter time, what the longer one does not hide */
#define SIMT_BOTH_MANY 0.24 /* the same with more than 8 warps an SM */
#define SIMT_READS 0.9      /* of their time by SMEM_BYTES */
#define SIMT_ANY 1.05       /* time of a kernel of no order, against the others */
#define SMEM_BYTES 128.0    /* shared memory: bytes a clock an SM */
#define MEMORY_LATENCY 800.0     /* clocks from a load's issue to its data */
#define COPY_CYCLES 2300.0       /* tcg_copy's own start and end, of one operand or both */
#define COPY_TURN_CYCLES 2900.0  /* and where it turns one */
#define BLOCK_CYCLES 2200.0      /* a block's start, pipeline fill and end */
#define COPY_SHARE 0.9           /* of memory bandwidth that tcg_copy reaches along rows */
#define COPY_TURNED_SHARE 0.26   /* the same for other strides */
#define COPY_BYTES_MAX 0x1p32    /* of a copy; */
#define PADDING_BYTES_MAX 0x1p26 /* of one that is */
#define PADDING_MAX 4.0          /* times its operand: */
#define LAST_RESORT 1e6          /* beyond that it is as slow as this, where there is another way */
#define COPY_ISSUE_CYCLES 4.0    /* a warp's load or copy instruction with its address and predicate */
#define CUT_CYCLES 0.71       /* an SM's, for a piece of 16 bytes that mma's rows for any alignment cut out of two */
#define CUT_START_CYCLES 46.0 /* and for a k-block of them */
#define CUT_LINE_CYCLES 10.7  /* and for a line of the tile, in the k-blocks in which lines begin or end */
#define SHIFT_ISSUE 2.2       /* cycles that a scheduler takes for an instruction of one of many warps of mma_shift */
#define SHIFT_LATENCY 7.3     /* and of a few */
#define SHIFT_WAIT 490.0      /* and for what a k-block waits for besides */
#define SHIFT_EDGES_BYTES \
    144.0 /* that its loads take more of the L2 cache a line and k-block: they begin anywhere in sectors */
#define SHIFT_START 480.0       /* for the k-blocks in which lines begin and end */
#define NEXT_TILE_CYCLES 1240.0 /* from one tile of a block to its next one, at least */
#define FP32_BYTES 28.0         /* of fp32 results a clock, through shared memory */
#define REDUCE_CYCLES 4700.0    /* tcg_reduce: one more kernel in the stream */
#define SPLIT_CYCLES 9.6        /* tcg_reduce: one more partial sum to add */
#define SCATTER 4.0             /* element-wise stores against full lines */

#define REGISTERS 65536
#define MMA_REGISTERS 80        /* a thread's, beside its sums: about */
#define WORDS_REGISTERS 144     /* the same for any alignment */
#define SHIFT_REGISTERS 128     /* all of a thread's, of rows that shift B: their launch bounds allow no more, */
#define SHIFT_REGISTERS_FEW 168 /* and so many with four warps */
#define SHIFT_PAIR 5            /* instructions to read and shift two registers of B */
#define SHIFT_COPIES 30         /* and for a k-block's copies */
#define SPLITS_MAX 64
#define EVEN_SPLITS_MAX 8
#define EVEN_ROUNDS_MAX 4      /* with more, the last one matters little */
#define SPLIT_ITERATIONS_MIN 4 /* k-blocks a split is worth starting for */
#define PARTIALS_BYTES_MAX (128.0 * 1024 * 1024)
#define RASTER_ROWS_MAX 16                /* rows of tiles to a group */
#define WRITES 4.0                        /* C's bytes over its operands' from which writing them decides */
#define SHIFT_LINES 32                    /* of B, that rows which shift it take */
#define THIN_BYTES 8192.0                 /* that a copy's padding has to have, for other lines to be tried, */
#define SMALL 12.0                        /* or so much less than the other operand's bytes it has */
#define SKINNY 64                         /* up to here the swapped product may fit the tiles better */
#define AXIS_MAX ((int64_t)1 << 48)       /* of an axis: larger cannot be memory, and keeps all sums below 2^63 */
#define ALIGN_BYTES 256                   /* of the workspace's parts */
#define COPY_ROW_BYTES 128                /* a copy's rows are a multiple of: whole lines of the L2 cache */
#define ROW_ALIGN_BYTES 16                /* of lines that cp.async and TMA move whole */
#define TMA_STRIDE_MAX ((int64_t)1 << 38) /* elements: tensor maps take strides below 2^40 bytes */

static double max2(double x, double y) { return x > y ? x : y; }
static double min2(double x, double y) { return x < y ? x : y; }
static int min_int(int x, int y) { return x < y ? x : y; }

/* For estimates: x >= 0, and whole numbers beyond 2^53 are as they are. */
static double floor_(double x) { return x < 0x1p52 ? (double)(int64_t)x : x; }
static double ceil_(double x) {
    double whole = floor_(x);
    return whole < x ? whole + 1 : whole;
}

static void model_simt(const tcg_kernel *kernel, const tcg_chip *chip, int *registers, double *cycles) {
    double flops = 2.0 * kernel->block_m * kernel->block_n * kernel->block_k;
    *registers = REGISTERS / (TCG_SIMT_BLOCKS(kernel->block_m, kernel->block_n, kernel->threads) * kernel->threads);
    /* A warp is 8 x 4 threads, the longer way along the longer side; each reads its own part of a row of A and of B. */
    double warp_m = (double)kernel->block_m / kernel->warps_m, warp_n = (double)kernel->block_n / kernel->warps_n;
    double thread = warp_m >= warp_n ? warp_m / 8 + warp_n / 4 : warp_m / 4 + warp_n / 8;
    double reads = SIMT_READS * kernel->threads * thread * kernel->block_k * 4 / SMEM_BYTES;
    double sums = flops / chip->fma_flops, both = REGISTERS / (*registers * 32) > 8 ? SIMT_BOTH_MANY : SIMT_BOTH;
    *cycles = (max2(sums, reads) + both * min2(sums, reads)) * (kernel->order < 0 ? SIMT_ANY : 1);
}

static void model_mma(const tcg_kernel *kernel, const tcg_chip *chip, int *registers, double *cycles) {
    int warp_m = kernel->block_m / kernel->warps_m, warp_n = kernel->block_n / kernel->warps_n;
    double flops = 2.0 * kernel->block_m * kernel->block_n * kernel->block_k;
    /* Every warp reads its own rows of A and of B from shared memory. */
    double reads = (double)kernel->warps_m * kernel->warps_n * (warp_m + warp_n) * kernel->block_k * 2;
    double writes = (double)(kernel->block_m + kernel->block_n) * kernel->block_k * 2;
    *registers = warp_m * warp_n / 32 + (kernel->align_bytes < ROW_ALIGN_BYTES ? WORDS_REGISTERS : MMA_REGISTERS);
    *cycles = max2(flops / chip->tensor_flops, (reads + writes) / SMEM_BYTES);
}

/* A warp's instructions for a k-block of a row that shifts B: per step, ldmatrix for A, and for every eight columns of B the
 * reads and shifts of two registers and an mma each sixteen lines of a class; and its copies. */
static double shift_instructions(const tcg_kernel *kernel) {
    double classes = 8.0 / kernel->warps_m, tiles = kernel->block_m / 128.0, steps = kernel->block_k / 16.0;
    return steps * classes * (tiles + kernel->block_n / 8.0 * (SHIFT_PAIR + tiles)) + SHIFT_COPIES;
}

static void model_mma_shift(const tcg_kernel *kernel, const tcg_chip *chip, int *registers, double *cycles) {
    (void)chip;
    *registers = kernel->warps_m > 4 ? SHIFT_REGISTERS : SHIFT_REGISTERS_FEW;
    *cycles = SHIFT_ISSUE * shift_instructions(kernel) * kernel->warps_m / 4;
}

static void model_wgmma(const tcg_kernel *kernel, const tcg_chip *chip, int *registers, double *cycles) {
    int warpgroups = kernel->threads / 128 - 1, fragments = kernel->block_m / 64;
    (void)chip;
    *registers = warpgroups > 1 ? 168 : fragments * kernel->block_n / 2 + 56;
    *cycles = 2.0 * kernel->block_m * kernel->block_n * kernel->block_k / WGMMA_FLOPS;
}

/* How tuned.def names a row of a family, in all orders and 16-bit types. */
typedef struct row_key {
    int block_m, block_n, block_k;
    bool pingpong;
    int cluster_m, cluster_n, cluster_k;
} row_key;

static bool is_row(const tcg_kernel *kernel, const row_key *key) {
    return kernel->block_m == key->block_m && kernel->block_n == key->block_n && kernel->block_k == key->block_k &&
           kernel->pingpong == key->pingpong && kernel->cluster_m == key->cluster_m &&
           kernel->cluster_n == key->cluster_n && kernel->cluster_k == key->cluster_k;
}

/* Constants of a wgmma row. */
typedef struct tuned {
    row_key key;
    double arithmetic;  /* time of the main loop over that at wgmma's full rate */
    double memory;      /* time where memory bounds it, over that at the chip's bandwidth */
    double tile_cycles; /* a tile's start and end, beside its main loop */
} tuned;

enum { SCHEDULE_coop, SCHEDULE_pingpong };
static const tuned tuned_rows[] = {
#define TCG_TUNED(bm, bn, bk, schedule, cm, cn, ck, arithmetic, memory, tile_cycles) \
    {{bm, bn, bk, SCHEDULE_##schedule, cm, cn, ck}, arithmetic, memory, tile_cycles},
#include "tuned.def"
};

/* Products A[M, K] @ W[N, K]^T, `batch` of them, where another row than the estimate's was measured to be faster on that
 * chip. */
static const struct exception {
    int64_t m_from, m_to, n, k, batch;
    tcg_family family;
    row_key key;
    bool swap, splits;
} exceptions[] = {
#define TCG_EXCEPTION(m_from, m_to, n, k, batch, family, bm, bn, bk, schedule, cm, cn, ck, swap, splits) \
    {m_from, m_to, n, k, batch, TCG_FAMILY_##family, {bm, bn, bk, SCHEDULE_##schedule, cm, cn, ck}, swap, splits},
#include "tuned.def"
};

static tuned tuned_row(const tcg_kernel *kernel) {
    for (size_t i = 0; i < sizeof tuned_rows / sizeof *tuned_rows; i++)
        if (is_row(kernel, &tuned_rows[i].key))
            return tuned_rows[i];
    return (tuned){.arithmetic = 1.1, .memory = 1, .tile_cycles = 400 + kernel->block_m * kernel->block_n / 8.0};
}

/* What the planner has to know of a family. model: registers a thread and cycles of one block's BLOCK_K.
 * splits: the kernel takes splits > 1. persistent: the grid is what the device holds at once. shown: a rung to look at,
 * run where it is asked for and never chosen. */
static const struct family {
    void (*model)(const tcg_kernel *kernel, const tcg_chip *chip, int *registers, double *cycles);
    bool splits;
    bool persistent;
    bool shown;
} families[TCG_FAMILY_COUNT] = {
    [TCG_FAMILY_simt] = {model_simt, true, false, false},  [TCG_FAMILY_wmma_naive] = {model_mma, false, false, true},
    [TCG_FAMILY_wmma] = {model_mma, false, false, true},   [TCG_FAMILY_mma_naive] = {model_mma, false, false, true},
    [TCG_FAMILY_mma] = {model_mma, true, false, false},    [TCG_FAMILY_tma_mma] = {model_mma, true, true, false},
    [TCG_FAMILY_wgmma] = {model_wgmma, true, true, false},
};

static int cluster_blocks(const tcg_kernel *kernel) {
    return kernel->cluster_m * kernel->cluster_n * kernel->cluster_k;
}

/* Whether it cuts every piece of its operands out of the words that they lie in. */
static bool cuts(const tcg_kernel *kernel) {
    return kernel->family == TCG_FAMILY_mma && kernel->align_bytes < ROW_ALIGN_BYTES && !kernel->shifted;
}

/* A cluster stays within a processor group, of 16 or 18 SMs on Hopper: of 132 SMs, clusters of 4 or 8 fill 120. */
static int usable_sms(int sm_count, const tcg_kernel *kernel) {
    return cluster_blocks(kernel) > 2 ? sm_count - sm_count / 11 : sm_count;
}

/* Whether the next kernel's blocks find room while all of these still run. Not before tcg_reduce, whose grid is another. */
static bool room_for_next(const tcg_candidate *row, double splits, double blocks) {
    return splits == 1 && 2 * blocks <= row->slots;
}

/* How much longer the arithmetic takes with so few warps an SM to hide its latencies. */
static double warps_factor(double warps) {
    return warps <= 4 ? 1 / 0.6 : warps <= 8 ? 1 / 0.85 : warps <= 12 ? 1 / 0.93 : 1;
}

/* ---- a device's rows ----------------------------------------------------------------------------------------- */

static int bucket_of(int dtype, int order, bool fine) { return (dtype * (TCG_ORDER_COUNT + 1) + order) * 2 + fine; }

static int kernel_bucket(const tcg_kernel *kernel) {
    return bucket_of(kernel->in_dtype, kernel->order < 0 ? TCG_ANY_ORDER : kernel->order,
                     kernel->align_bytes < ROW_ALIGN_BYTES);
}

/* constants: TCG_TUNED's, or NULL: as the table has them. */
static void candidate_build(const tcg_kernel *kernel, const tcg_plan_view *view, bool ptx, const double *constants,
                            tcg_candidate *row) {
    int registers;
    double cycles;
    (kernel->shifted ? model_mma_shift : families[kernel->family].model)(kernel, view->chip, &registers, &cycles);
    registers = min_int((registers + 7) / 8 * 8, 255);
    int blocks = min_int(view->chip->sm_threads / kernel->threads, REGISTERS / (registers * kernel->threads));
    blocks = min_int(blocks, view->smem_sm_bytes / (kernel->smem_bytes + 1024)); /* the driver keeps 1 KB a block */
    row->kernel = kernel;
    row->ptx = ptx;
    row->occupancy = blocks > 1 ? blocks : 1;
    row->slots = max2(usable_sms(view->sm_count, kernel), 1) * row->occupancy;
    row->per_slot = 1 / row->slots;
    row->per_m = 1.0 / (kernel->block_m * kernel->cluster_m);
    row->per_n = 1.0 / (kernel->block_n * kernel->cluster_n);
    row->per_k = 1.0 / kernel->block_k;
    row->block_cycles = cycles;
    row->latency_cycles = MEMORY_LATENCY / (kernel->stages > 1 ? kernel->stages - 1 : 1);
    if (kernel->shifted)
        row->latency_cycles = SHIFT_WAIT + SHIFT_LATENCY * shift_instructions(kernel) * kernel->warps_m / 4;
    if (kernel->family == TCG_FAMILY_wgmma) {
        tuned t = tuned_row(kernel);
        if (constants)
            t.arithmetic = constants[0], t.memory = constants[1], t.tile_cycles = constants[2];
        row->block_cycles *= t.arithmetic;
        if (kernel->order % 2 == 0 && TCG_WGMMA_B_ROWS(kernel->block_n, 0) != kernel->block_n) /* in whole boxes */
            row->block_cycles *= PART_BOX;
        row->memory = t.memory;
        row->tile_cycles = t.tile_cycles;
    }
}

void tcg_plan_view_build(const tcg_device_props *device, tcg_plan_view *view) {
    tcg_runs runs[TCG_KERNEL_COUNT];
    bool machine_code[TCG_DTYPE_COUNT] = {false};
    int count[TCG_BUCKETS] = {0};
    view->cc = device->cc;
    view->sm_count = device->sm_count;
    view->smem_block_bytes = device->smem_block_bytes;
    view->smem_sm_bytes = device->smem_sm_bytes;
    view->l2_bytes = device->l2_bytes;
    view->util = tcg_image_runs(TCG_IMAGE_util, TCG_IMAGE_util, device->cc) != TCG_RUNS_NOT;
    view->tma = view->wgmma = false;
    view->chip = &chips[0];
    for (size_t i = 1; i < sizeof chips / sizeof *chips; i++)
        if (device->cc >= chips[i].cc)
            view->chip = &chips[i];
    view->per_sm = 1 / max2(view->sm_count, 1);
    view->per_l2_byte = 1 / view->chip->l2_bytes;
    view->per_dram_byte = view->per_sm / view->chip->dram_bytes;

    const tcg_kernel *last = NULL;
    for (int i = 0; i < TCG_KERNEL_COUNT; i++) {
        const tcg_kernel *kernel = tcg_kernel_at(i);
        bool same_images = last && last->image == kernel->image && last->ptx_image == kernel->ptx_image;
        tcg_runs image_runs = same_images ? runs[i - 1] : tcg_kernel_runs(kernel, device->cc);
        runs[i] = image_runs;
        last = kernel;
        if (runs[i] == TCG_RUNS_SASS && kernel->smem_bytes <= view->smem_block_bytes)
            machine_code[kernel->in_dtype] = true;
    }
    /* Machine code where there is any for the type: what is compiled at first use stands back. */
#define TAKEN(i, kernel)                                                          \
    (runs[i] != TCG_RUNS_NOT && (kernel)->smem_bytes <= view->smem_block_bytes && \
     (runs[i] == TCG_RUNS_SASS || !machine_code[(kernel)->in_dtype]))
    for (int i = 0; i < TCG_KERNEL_COUNT; i++)
        if (TAKEN(i, tcg_kernel_at(i)))
            count[kernel_bucket(tcg_kernel_at(i))]++;
    view->first[0] = 0;
    for (int i = 0; i < TCG_BUCKETS; i++) {
        view->first[i + 1] = view->first[i] + count[i];
        count[i] = view->first[i];
    }
    for (int i = 0; i < TCG_KERNEL_COUNT; i++)
        if (TAKEN(i, tcg_kernel_at(i))) {
            candidate_build(tcg_kernel_at(i), view, runs[i] == TCG_RUNS_PTX, NULL,
                            &view->rows[count[kernel_bucket(tcg_kernel_at(i))]++]);
            view->tma |= tcg_families[tcg_kernel_at(i)->family].tma;
            view->wgmma |= tcg_kernel_at(i)->family == TCG_FAMILY_wgmma;
        }
#undef TAKEN
}

/* Views of the devices met so far, never changed once ready; what finds no room is built anew each time. */
enum { VIEW_EMPTY, VIEW_BUILDING, VIEW_READY, VIEW_SLOTS = 16 };
static tcg_plan_view views[VIEW_SLOTS];
static _Atomic int view_states[VIEW_SLOTS];

static const tcg_plan_view *find_view(const tcg_device_props *device, tcg_plan_view *room) {
    for (int i = 0; i < VIEW_SLOTS; i++) {
        int state = atomic_load_explicit(&view_states[i], memory_order_acquire);
        if (state == VIEW_READY) {
            const tcg_plan_view *view = &views[i];
            if (view->cc == device->cc && view->sm_count == device->sm_count &&
                view->smem_block_bytes == device->smem_block_bytes && view->smem_sm_bytes == device->smem_sm_bytes &&
                view->l2_bytes == device->l2_bytes)
                return view;
        } else if (state == VIEW_EMPTY && atomic_compare_exchange_strong(&view_states[i], &state, VIEW_BUILDING)) {
            tcg_plan_view_build(device, &views[i]);
            atomic_store_explicit(&view_states[i], VIEW_READY, memory_order_release);
            return &views[i];
        }
    }
    tcg_plan_view_build(device, room);
    return room;
}

/* ---- the problem, normalised --------------------------------------------------------------------------------- */

/* A or B: its own axis (m or n) and k, which makes the two alike. Strides in elements. */
struct operand {
    void *data;
    int64_t size;
    int64_t stride, k_stride;
    int64_t batch[TCG_MAX_BATCH_DIMS];
    int64_t entries; /* batch entries that differ: broadcast axes count once */
    int align_k;     /* alignment in bytes of its lines along k, at most 16; 0 where k has no unit stride */
    int align_own;   /* the same along its own axis */
    bool k_major;    /* the better of the two */
    bool turn;       /* a copy in its other lines is tried too: these are short, and padding makes them far longer, or
                      * there is little to copy */
    double bytes;
};

struct job {
    int64_t m, n, k;
    int dtype, out_dtype, elem_bytes;
    int batch_ndim;
    int64_t batches;
    int64_t batch_size[TCG_MAX_BATCH_DIMS];
    int64_t c_batch[TCG_MAX_BATCH_DIMS];
    struct operand side[2];    /* the caller's a and b */
    double c_elems, out_bytes; /* an element's bytes */
    void *c;
    int64_t c_stride[2]; /* along a's own axis and along b's */
};

/* Wraps around for absurd strides; only low bits are looked at. */
static uint64_t stride_bits(int64_t stride, int elem_bytes) { return (uint64_t)stride * (uint64_t)elem_bytes; }

static int alignment(uint64_t bits) {
    bits |= 16;
    return (int)(bits & -bits);
}

/* Takes batch axis i into the own axis of side s: the other operand is broadcast along it, and this one and C step
 * on as one longer matrix would. Never changes a result's bits. */
static bool fold_axis(struct job *job, const tcg_batch_dim *dim, int s) {
    struct operand *own = &job->side[s];
    int64_t other = s ? dim->a : dim->b, mine = s ? dim->b : dim->a, span, c_span, size;
    if (other != 0 || __builtin_mul_overflow(own->size, dim->size, &size))
        return false;
    if (own->size == 1) {
        own->stride = mine;
        job->c_stride[s] = dim->c;
    } else if (__builtin_mul_overflow(own->size, own->stride, &span) ||
               __builtin_mul_overflow(own->size, job->c_stride[s], &c_span) || span != mine || c_span != dim->c) {
        return false;
    }
    own->size = size;
    return true;
}

/* Elements of a line of a copy. */
static int64_t copy_row_elems(const struct job *job, int64_t cols) {
    const int64_t whole = COPY_ROW_BYTES / job->elem_bytes;
    return tcg_div_up(cols, whole) * whole;
}

/* k_major: how a copy of the operand is written. */
static double copy_bytes(const struct job *job, const struct operand *side, bool k_major) {
    return (double)side->entries * (double)(k_major ? side->size : job->k) *
           (double)copy_row_elems(job, k_major ? job->k : side->size) * job->elem_bytes;
}

/* Whether a tensor map describes the operand as it lies, in lines along k or along its own axis. */
static bool tma_describes(const struct job *job, const struct operand *side, bool k_major) {
    int64_t lines = k_major ? side->size : job->k, length = k_major ? job->k : side->size;
    int64_t stride = k_major ? side->stride : side->k_stride;
    if (lines > 1 && (stride < length || stride >= TMA_STRIDE_MAX))
        return false;
    return !job->batch_ndim || (side->batch[0] >= 0 && side->batch[0] < TMA_STRIDE_MAX);
}

/* Of its lines along k or along its own axis. */
static int align_along(const struct operand *side, bool k_major) { return k_major ? side->align_k : side->align_own; }

/* Whether side s is few lines against many that begin anywhere along k: what the rows that shift B are for. */
static bool few_lines(const struct job *job, int s) {
    const struct operand *few = &job->side[s], *many = &job->side[!s];
    return few->size <= SHIFT_LINES && few->size < many->size && many->k_major && many->align_k > 0 &&
           many->align_k < ROW_ALIGN_BYTES && job->elem_bytes == 2;
}

static int describe(const tcg_problem *problem, struct job *job, tcg_error *err) {
    job->m = problem->m;
    job->n = problem->n;
    job->k = problem->k;
    job->dtype = problem->in_dtype;
    job->out_dtype = problem->out_dtype;
    job->elem_bytes = tcg_dtype_bytes[problem->in_dtype];
    job->c = problem->c.data;
    job->c_stride[0] = problem->c.row;
    job->c_stride[1] = problem->c.col;
    job->side[0].data = problem->a.data;
    job->side[0].size = problem->m;
    job->side[0].stride = problem->a.row;
    job->side[0].k_stride = problem->a.col;
    job->side[1].data = problem->b.data;
    job->side[1].size = problem->n;
    job->side[1].stride = problem->b.col;
    job->side[1].k_stride = problem->b.row;
    job->batch_ndim = 0;
    job->batches = 1;
    for (int i = 0; i < problem->batch_ndim; i++) {
        const tcg_batch_dim *dim = &problem->batch[i];
        if (dim->size == 1 || fold_axis(job, dim, 0) || fold_axis(job, dim, 1))
            continue;
        int to = job->batch_ndim++;
        job->batch_size[to] = dim->size;
        job->c_batch[to] = dim->c;
        job->side[0].batch[to] = dim->a;
        job->side[1].batch[to] = dim->b;
        if (__builtin_mul_overflow(job->batches, dim->size, &job->batches))
            return tcg_fail(err, TCG_ERR_VALUE, 0, "the batch axes multiply to more than 2^63 products");
    }
    job->m = job->side[0].size;
    job->n = job->side[1].size;
    if (job->m > AXIS_MAX || job->n > AXIS_MAX || job->k > AXIS_MAX || job->batches > AXIS_MAX)
        return tcg_fail(err, TCG_ERR_VALUE, 0,
                        "found M=%lld, N=%lld, K=%lld, %lld products in the batch: expected at most 2^48 each",
                        (long long)job->m, (long long)job->n, (long long)job->k, (long long)job->batches);

    job->c_elems = (double)job->m * (double)job->n * (double)job->batches;
    job->out_bytes = tcg_dtype_bytes[job->out_dtype];

    for (int s = 0; s < 2; s++) {
        struct operand *side = &job->side[s];
        if (side->size == 1) {
            side->stride = 0; /* of a length-1 axis: means nothing, and 0 is aligned */
            job->c_stride[s] = s == 1 ? 1 : 0;
        }
        if (job->k <= 1)
            side->k_stride = 0;
        uint64_t base = (uintptr_t)side->data;
        side->entries = 1;
        for (int i = 0; i < job->batch_ndim; i++) {
            base |= stride_bits(side->batch[i], job->elem_bytes);
            if (side->batch[i] != 0)
                side->entries *= job->batch_size[i];
        }
        side->bytes = (double)side->entries * (double)side->size * (double)job->k * job->elem_bytes;
        if (job->k == 0) { /* never read */
            side->align_k = side->align_own = ROW_ALIGN_BYTES;
            side->k_major = true;
            side->turn = false;
            continue;
        }
        if ((uintptr_t)side->data & (uintptr_t)(job->elem_bytes - 1))
            return tcg_fail(err, TCG_ERR_VALUE, 0, "%c: found data at %p, expected a multiple of the %d-byte element",
                            'a' + s, side->data, job->elem_bytes);
        bool unit_k = job->k == 1 || side->k_stride == 1, unit_own = side->size == 1 || side->stride == 1;
        side->align_k = unit_k ? alignment(base | stride_bits(side->stride, job->elem_bytes)) : 0;
        side->align_own = unit_own ? alignment(base | stride_bits(side->k_stride, job->elem_bytes)) : 0;
        if (side->align_k || side->align_own) {
            side->k_major = side->align_k != side->align_own ? side->align_k > side->align_own : job->k >= side->size;
        } else { /* a copy writes lines along the axis that is read with the smaller steps */
            uint64_t along_k = (uint64_t)side->k_stride, along_own = (uint64_t)side->stride;
            along_k = side->k_stride < 0 ? -along_k : along_k;
            along_own = side->stride < 0 ? -along_own : along_own;
            side->k_major = along_own == 0 || (along_k != 0 && along_k <= along_own);
        }
        side->turn =
            (align_along(side, side->k_major) < ROW_ALIGN_BYTES || !tma_describes(job, side, side->k_major)) &&
            (side->k_major ? job->k : side->size) < COPY_ROW_BYTES / job->elem_bytes &&
            copy_bytes(job, side, side->k_major) - side->bytes > THIN_BYTES;
    }
    for (int s = 0; s < 2 && job->k > 0; s++) { /* a small copy may save a large one, or slower loads all along */
        struct operand *side = &job->side[s];
        if (!side->k_major && (few_lines(job, s) || side->bytes * SMALL < job->side[!s].bytes))
            side->turn = true;
    }
    return 0;
}

/* ---- choosing ------------------------------------------------------------------------------------------------ */

/* A way to run the job. [0] is the kernel's A, [1] its B, that is after the swap. */
struct choice {
    const tcg_candidate *row; /* NULL: none yet */
    bool swap;
    bool k_major[2];
    bool copy[2];
    bool exception; /* one of the measured ones */
    double splits;  /* wanted; the exact number follows from whole BLOCK_K */
    double cycles;
};

/* Rounds of blocks through the SMs. */
struct waves {
    double iterations;          /* k-blocks a block walks */
    double cycles, traffic;     /* of one k-block of one block: arithmetic at full rate, loading */
    double latency, end, warps; /* warps: 0 where arithmetic needs none to hide its latencies */
};

static double wave_cycles(const struct waves *w, double resident) {
    double factor = w->warps > 0 ? warps_factor(w->warps * resident) : 1;
    double work = max2(w->cycles * factor, w->traffic) * resident;
    return w->iterations * max2(work, w->latency) + resident * w->end + BLOCK_CYCLES;
}

static double all_waves(const struct waves *w, const tcg_plan_view *view, const tcg_candidate *row, double blocks) {
    double full = floor_(blocks * row->per_slot), rest = blocks - full * row->slots;
    double cycles = full > 0 ? full * wave_cycles(w, row->occupancy) : 0;
    return rest > 0 ? cycles + wave_cycles(w, ceil_(rest * view->per_sm)) : cycles;
}

/* One over an alignment of 4 to 16 bytes. */
static double per_width(int bytes) { return bytes >= 16 ? 1 / 16.0 : bytes >= 8 ? 1 / 8.0 : 1 / 4.0; }

/* What a choice costs whatever its splits. */
struct shape_costs {
    double m, n, k;    /* the kernel's */
    double blocks;     /* without splits */
    double iterations; /* k-blocks of a block, without splits */
    double lines_a, lines_b;
    double cycles, traffic; /* of one k-block of one block: arithmetic, loading */
    double outside;         /* loading what is beyond K, in a tile's last k-block */
    double partials;        /* elements of C as a split's partial sums */
    double moved_bytes;     /* of A and B, once each */
    double fixed;           /* copies of operands */
    bool scattered;         /* C is stored element by element, or line by line with gaps */
};

/* Cycles from the launch to the end for blocks of cp.async or plain loads, and of tma_mma. */
static double block_estimate(const struct job *job, const tcg_plan_view *view, const tcg_candidate *row,
                             const struct shape_costs *c, double splits) {
    const bool tma = tcg_families[row->kernel->family].tma, simt = row->kernel->family == TCG_FAMILY_simt;
    const double written = splits > 1 ? 4 : job->out_bytes;
    struct waves w = {.iterations = splits > 1 ? ceil_(c->iterations / splits) : c->iterations,
                      .cycles = c->cycles,
                      .traffic = c->traffic,
                      .latency = row->latency_cycles,
                      .end = c->lines_a * c->lines_b * written * view->per_l2_byte *
                             (c->scattered && splits == 1 ? SCATTER : 1),
                      .warps = tma || simt ? 0 : row->kernel->threads / 32};
    double moved = (c->moved_bytes + job->c_elems * written) * view->per_dram_byte;
    double waves = all_waves(&w, view, row, c->blocks * splits);
    if (row->kernel->shifted)
        waves += SHIFT_START;
    else if (cuts(row->kernel))
        waves += CUT_LINE_CYCLES * (row->kernel->block_m + row->kernel->block_n);
    return START_CYCLES + max2(waves, moved + BLOCK_CYCLES + w.end) + SLACK * waves;
}

/* The same for wgmma, whose blocks keep the tensor cores busy by themselves: rounds of tiles through the SMs, against
 * the time of memory; both together take longer than the longer one. */
static double wgmma_estimate(const struct job *job, const tcg_plan_view *view, const tcg_candidate *row,
                             const struct shape_costs *c, double splits) {
    const double written = splits > 1 ? 4 : job->out_bytes;
    const double iterations = splits > 1 ? ceil_(c->iterations / splits) : c->iterations;
    const double blocks = c->blocks * splits;
    double resident = 1, rounds = ceil_(blocks * row->per_slot);
    if (row->occupancy > 1) { /* blocks that share what an SM takes in and computes */
        const double sms = row->slots / row->occupancy;
        resident = min2(ceil_(blocks / sms), row->occupancy);
        rounds = ceil_(blocks / (sms * resident));
    }
    double end = row->tile_cycles * (c->scattered && splits == 1 ? SCATTER : 1) + c->outside;
    if (written > 2) /* a warpgroup writes it box by box */
        end +=
            row->kernel->block_m * row->kernel->block_n * 4 / (row->kernel->pingpong ? FP32_BYTES / 2 : FP32_BYTES);
    const double next = max2(end, NEXT_TILE_CYCLES) * (row->kernel->pingpong ? 1 - PINGPONG_HIDES : 1);
    double loop = rounds * iterations * max2(c->cycles, c->traffic) * resident;
    loop *= 1 + HOT * min2(1, loop / HOT_CYCLES);
    loop += (rounds - 1) * next;
    double memory = (c->moved_bytes + job->c_elems * written) * view->per_dram_byte * row->memory;
    if (cluster_blocks(row->kernel) > 1) {
        const double readers = ceil_(c->m > c->n ? c->n * row->per_n : c->m * row->per_m);
        memory *= 1 + (row->kernel->cluster_k > 1 ? SPLIT_SHARED : CLUSTER_SHARED) * (1 - 1 / readers);
    }
    double longer = max2(loop, memory), part = min2(loop, memory) / longer;
    part *= part;
    const bool early = c->fixed == 0 && room_for_next(row, splits, blocks);
    const double start = WGMMA_START_CYCLES - (early ? EARLY_CYCLES : 0);
    return start + longer * (1 + BOTH * part * part) + end;
}

/* Whether the lines of a 16-bit operand start within the L2 cache's sectors. Those of a copy do not. */
static bool straddles(const struct operand *side, bool k_major, bool copied) {
    return !copied &&
           (((uint64_t)(k_major ? side->stride : side->k_stride) * 2) | (uintptr_t)side->data) % SECTOR_BYTES != 0;
}

/* What cp.async takes of the L2 cache, over the bytes that a tile wants: along k, where pieces do not go by way of L1, a sector
 * for each piece that lies in one. */
static double copied_sectors(const struct operand *side, bool k_major, bool copied, const tcg_kernel *kernel) {
    if (kernel->shifted)
        return 1 + SHIFT_EDGES_BYTES / (kernel->block_k * 2);
    return kernel->family == TCG_FAMILY_mma && !cuts(kernel) && k_major && straddles(side, true, copied)
               ? PIECE_STRADDLE
               : 1;
}

/* For `copied` bytes, beside COPY_CYCLES. What the L2 cache can hold is not written to memory before it is read. */
static double copy_cycles(const tcg_plan_view *view, const struct operand *side, bool k_major, double copied) {
    const bool turned = (k_major ? side->k_stride : side->stride) != 1;
    const double moved = side->bytes + (2 * copied < view->l2_bytes ? 0 : copied);
    return (turned ? COPY_TURN_CYCLES : 0) + moved / (turned ? COPY_TURNED_SHARE : COPY_SHARE) * view->per_dram_byte;
}

/* Whether a copy takes memory that a caller does not expect, whatever time it saves. */
static bool too_much(const struct operand *side, double copied) {
    return copied > COPY_BYTES_MAX || (copied > PADDING_BYTES_MAX && copied > PADDING_MAX * side->bytes);
}

/* Loading `lines` of a tile of one k-block of an operand by TMA in boxes `width` elements wide. An SM takes in all of them; it
 * asks for those that it does not get by another block's multicast, for more where they straddle the L2 cache's sectors. */
static void boxes_cycles(int block_k, int width, int sharers, double lines, bool k_major, bool straddles,
                         double blocks, double cycles[2]) {
    const double boxes = k_major ? block_k / width : ceil_(lines / width);
    const double box_lines = k_major ? lines : block_k, box_width = k_major ? width : lines / boxes;
    const double taken = boxes * box_lines * max2(box_width * 2 / INGEST_BYTES, 1);
    cycles[0] += max2(boxes * BOX_CYCLES, taken);
    cycles[1] += taken / sharers * (straddles ? STRADDLE : 1);
    if (box_width < TCG_TMA_BOX_ELEMS)
        cycles[1] += box_lines * boxes * HOT_LINE_CYCLES * blocks;
}

/* Lines of the last k-block's boxes that are all beyond K. */
static double lines_outside(double k, int block_k, double lines, bool k_major) {
    const double beyond = ceil_(k / block_k) * block_k - k;
    return k_major ? lines * floor_(beyond / TCG_TMA_BOX_ELEMS) : beyond * ceil_(lines / TCG_TMA_BOX_ELEMS);
}

/* Splits that leave every block enough of K, and their partial sums a bounded size. */
static double splits_most(const struct shape_costs *c) {
    return min2(min2(floor_(c->iterations * (1.0 / SPLIT_ITERATIONS_MIN)), SPLITS_MAX),
                floor_(PARTIALS_BYTES_MAX / (c->partials * 4)));
}

/* Splits from 2 on with which rounds, the last of them a part of one, become wholer and wholer ones. */
static int even_splits(const tcg_candidate *row, const struct shape_costs *c, double most, double *tried) {
    int count = 0;
    double least = ceil_(c->blocks * row->per_slot);
    for (double splits = 2; splits <= min2(most, EVEN_SPLITS_MAX); splits++) {
        double rounds = ceil_(c->blocks * splits * row->per_slot) / splits;
        if (rounds < least) {
            least = rounds;
            tried[count++] = splits;
        }
    }
    return count;
}

/* Estimates the choice for each split worth trying and keeps it in `best` where it beats that. */
static void consider(const struct job *job, const tcg_plan_view *view, bool may_split, struct choice *choice,
                     struct choice *best) {
    const tcg_candidate *row = choice->row;
    const tcg_kernel *kernel = row->kernel;
    const struct operand *a = &job->side[choice->swap], *b = &job->side[!choice->swap];
    const bool tma = tcg_families[kernel->family].tma, wgmma = kernel->family == TCG_FAMILY_wgmma;
    struct shape_costs c = {.m = (double)a->size, .n = (double)b->size, .k = (double)job->k};
    c.blocks = ceil_(c.m * row->per_m) * ceil_(c.n * row->per_n) * (double)job->batches * cluster_blocks(kernel);
    c.partials = c.m * (double)TCG_PARTIAL_ROW(b->size) * (double)job->batches;
    c.iterations = max2(ceil_(c.k * row->per_k), 1);
    if (kernel->cluster_k > 1)
        c.iterations = ceil_(c.iterations / kernel->cluster_k);

    /* Bytes of a k-block that exist, and the instructions that fetch them. */
    c.lines_a = min2(c.m, kernel->block_m);
    c.lines_b = min2(c.n, kernel->block_n);
    double depth_bytes = min2(c.k, kernel->block_k) * job->elem_bytes;
    if (tma) {
        /* B's last box along N is a whole one but in the last tile. */
        const double taken_b = min2(c.n, TCG_WGMMA_B_ROWS(kernel->block_n, choice->k_major[1]));
        const double together = min2(c.blocks, row->slots);
        double cycles[2] = {0, 0};
        boxes_cycles(kernel->block_k, TCG_TMA_BOX_ELEMS, kernel->cluster_n, c.lines_a, choice->k_major[0],
                     straddles(a, choice->k_major[0], choice->copy[0]), together, cycles);
        boxes_cycles(kernel->block_k, TCG_WGMMA_B_BOX(kernel->block_n, choice->k_major[1]), kernel->cluster_m,
                     taken_b, choice->k_major[1], straddles(b, choice->k_major[1], choice->copy[1]), together,
                     cycles);
        c.traffic = max2(cycles[0], cycles[1]) + (kernel->block_n <= NARROW ? KBLOCK_CYCLES : 0);
        c.outside = OUTSIDE_CYCLES * (lines_outside(c.k, kernel->block_k, c.lines_a, choice->k_major[0]) +
                                      lines_outside(c.k, kernel->block_k, taken_b, choice->k_major[1]));
    } else {
        const double a_sectors = copied_sectors(a, choice->k_major[0], choice->copy[0], kernel),
                     b_sectors = copied_sectors(b, choice->k_major[1], choice->copy[1], kernel);
        c.traffic = (c.lines_a * a_sectors + c.lines_b * b_sectors) * depth_bytes * view->per_l2_byte;
    }
    c.cycles = row->block_cycles;
    if (cuts(kernel)) {
        c.cycles += CUT_START_CYCLES +
                    CUT_CYCLES * (kernel->block_m + kernel->block_n) * kernel->block_k * job->elem_bytes / 16;
    } else if (kernel->order >= 0 && !tma) {
        const bool words = kernel->shifted; /* whole ones are copied, wherever lines begin */
        int width_a = choice->copy[0] || words ? ROW_ALIGN_BYTES : align_along(a, choice->k_major[0]);
        int width_b = choice->copy[1] || words ? ROW_ALIGN_BYTES : align_along(b, choice->k_major[1]);
        double issue = (c.lines_a * per_width(width_a) + c.lines_b * per_width(width_b)) * depth_bytes *
                       (COPY_ISSUE_CYCLES / 32);
        c.traffic = max2(c.traffic, issue);
    }
    if (choice->copy[0] || choice->copy[1]) /* one launch for both */
        c.fixed += COPY_CYCLES;
    for (int i = 0; i < 2; i++) {
        const struct operand *side = i ? b : a;
        const double copied = choice->copy[i] ? copy_bytes(job, side, choice->k_major[i]) : 0;
        if (choice->copy[i])
            c.fixed +=
                copy_cycles(view, side, choice->k_major[i], copied) * (too_much(side, copied) ? LAST_RESORT : 1);
        c.moved_bytes += choice->copy[i] ? copied : side->bytes;
    }
    /* Every SM at work all the time would take this; most rows end here. */
    if (best->row && c.fixed + c.blocks * c.iterations * max2(c.cycles, c.traffic) * view->per_sm >= best->cycles)
        return;
    c.scattered = job->c_stride[!choice->swap] != 1 &&
                  !(job->c_stride[choice->swap] == 1 && (kernel->shifted || (wgmma && job->out_bytes == 2)));

    double tried[EVEN_SPLITS_MAX + 1] = {1};
    int count = 1;
    if (may_split && families[kernel->family].splits && kernel->cluster_k == 1) {
        const double most = splits_most(&c);
        if (2 * c.blocks <= row->slots) {
            const double fit = min2(most, floor_(row->slots / c.blocks));
            tried[count++] = min2(floor_(view->sm_count / c.blocks), fit); /* one an SM */
            tried[count++] = fit;
        } else if (!families[kernel->family].persistent && c.blocks < EVEN_ROUNDS_MAX * row->slots) {
            count += even_splits(row, &c, most, tried + 1);
        }
    }
    for (int i = 0; i < count; i++) {
        double splits = tried[i];
        if (i > 0 && splits <= tried[i - 1])
            continue;
        double total = c.fixed + (wgmma ? wgmma_estimate(job, view, row, &c, splits)
                                        : block_estimate(job, view, row, &c, splits));
        if (splits > 1) {
            double partials = c.partials * 4 * splits;
            double reduce = 2 * partials + job->c_elems * job->out_bytes * (c.scattered ? SCATTER : 1);
            total += REDUCE_CYCLES + SPLIT_CYCLES * splits + reduce * view->per_dram_byte;
        }
        if (!best->row || total < best->cycles) {
            *best = *choice;
            best->splits = splits;
            best->cycles = total;
        }
    }
}

/* What of a problem no tensor map of that family describes, whatever is copied; NULL when it fits. */
static const char *tma_refuses(const struct job *job, const tcg_kernel *kernel) {
    const int64_t most = INT32_MAX - 4096; /* coordinates are 32-bit, and tiles end past the edges */
    if (job->batch_ndim > 1)
        return "more than one batch axis that cannot be merged";
    if (job->m > most || job->n > most || job->k > most || job->batches > most)
        return "an axis of 2^31 elements or more";
    if (job->k == 0)
        return "K = 0";
    if (kernel && (double)tcg_div_up(job->m, kernel->block_m) * (double)tcg_div_up(job->n, kernel->block_n) *
                          (double)job->batches >=
                      INT32_MAX)
        return "2^31 tiles or more";
    if (kernel && tcg_div_up(job->k, kernel->block_k) < kernel->cluster_k)
        return "a K shorter than the cluster that splits it";
    return NULL;
}

/* Fits the row to the job: the directions its order names, copies where an operand is not so or not so aligned. */
static void consider_row(const struct job *job, const tcg_plan_view *view, const tcg_candidate *row, bool swap,
                         bool may_split, struct choice *best) {
    if (!may_split && !tcg_k_in_order(row->kernel))
        return;
    struct choice choice = {.row = row, .swap = swap};
    int order = row->kernel->order;
    bool tma = tcg_families[row->kernel->family].tma;
    if (tma && tma_refuses(job, row->kernel))
        return;
    for (int i = 0; i < 2 && order >= 0; i++) {
        const struct operand *side = &job->side[swap ^ i];
        /* A's n and B's t run along k. */
        bool k_major = i == 0 ? !(order & 2) : (order & 1);
        choice.k_major[i] = k_major;
        choice.copy[i] =
            align_along(side, k_major) < row->kernel->align_bytes || (tma && !tma_describes(job, side, k_major));
        if (choice.copy[i] && !view->util)
            return;
    }
    consider(job, view, may_split && view->util, &choice, best);
}

/* A cluster of more tiles than there are along an axis: blocks that only fetch for the others. */
static bool idle_blocks(const struct job *job, const tcg_candidate *row, bool swap) {
    const tcg_kernel *kernel = row->kernel;
    return tcg_div_up(job->side[swap].size, kernel->block_m) < kernel->cluster_m ||
           tcg_div_up(job->side[!swap].size, kernel->block_n) < kernel->cluster_n;
}

static void consider_bucket(const struct job *job, const tcg_plan_view *view, int bucket, int family, bool swap,
                            bool may_split, struct choice *best) {
    int first = view->first[bucket], last = view->first[bucket + 1] - 1;
    /* The table goes from large tiles to small: few rows begin at its end, so that most rows are soon ruled out. */
    bool backwards = job->side[swap].size <= SKINNY;
    for (int i = first; i <= last; i++) {
        const tcg_candidate *row = &view->rows[backwards ? first + last - i : i];
        if (idle_blocks(job, row, swap))
            continue;
        if (row->kernel->shifted &&
            job->side[!swap].size > row->kernel->block_n) /* another tile would read A again */
            continue;
        if (family < 0
                ? !families[row->kernel->family].shown && !(view->wgmma && row->kernel->family == TCG_FAMILY_tma_mma)
                : (int)row->kernel->family == family)
            consider_row(job, view, row, swap, may_split, best);
    }
}

/* The row that was measured to be the fastest, where the estimate would choose another. */
static void choose_exception(const struct job *job, const tcg_plan_view *view, bool may_split, struct choice *best) {
    if (view->cc != TCG_TUNED_CC || view->sm_count != TCG_TUNED_SMS || job->elem_bytes != 2 || job->out_bytes != 2 ||
        job->c_stride[1] != 1 || tma_refuses(job, NULL))
        return;
    for (int i = 0; i < 2; i++)
        if (job->side[i].align_k < ROW_ALIGN_BYTES || !tma_describes(job, &job->side[i], true))
            return;
    for (size_t i = 0; i < sizeof exceptions / sizeof *exceptions && !best->row; i++) {
        const struct exception *e = &exceptions[i];
        if (job->n != e->n || job->k != e->k || job->m < e->m_from || job->m > e->m_to || job->batches != e->batch ||
            (!may_split && (e->splits || e->key.cluster_k > 1)))
            continue;
        const int bucket = bucket_of(job->dtype, TCG_nt, false);
        for (int r = view->first[bucket]; r < view->first[bucket + 1]; r++) {
            const tcg_kernel *kernel = view->rows[r].kernel;
            if (kernel->family == e->family && is_row(kernel, &e->key)) {
                struct choice choice = {.row = &view->rows[r], .swap = e->swap, .k_major = {true, true}};
                consider(job, view, e->splits, &choice, best);
            }
        }
    }
    best->exception = best->row != NULL;
}

/* The rows for the operands' better lines, and for the others where a copy may turn them. */
static void consider_orders(const struct job *job, const tcg_plan_view *view, const tcg_options *options, bool swap,
                            struct choice *best) {
    const struct operand *a = &job->side[swap], *b = &job->side[!swap];
    const int any = bucket_of(job->dtype, TCG_ANY_ORDER, false);
    const bool may_split = !options->batch_invariant;
    for (int turned = 0; turned < 4; turned++) {
        const bool turn_a = turned & 1, turn_b = turned & 2;
        if ((turn_a && !a->turn) || (turn_b && !b->turn))
            continue;
        const bool a_k_major = a->k_major != turn_a, b_k_major = b->k_major != turn_b;
        const bool aligned =
            align_along(a, a_k_major) >= ROW_ALIGN_BYTES && align_along(b, b_k_major) >= ROW_ALIGN_BYTES;
        const int coarse = bucket_of(job->dtype, 2 * !a_k_major + b_k_major, false);
        consider_bucket(job, view, coarse, options->family, swap, may_split, best);
        if (!aligned || !best->row)
            consider_bucket(job, view, coarse + 1, options->family, swap, may_split, best);
    }
    consider_bucket(job, view, any, options->family, swap, may_split, best);
    consider_bucket(job, view, any + 1, options->family, swap, may_split, best);
}

static void choose(const struct job *job, const tcg_plan_view *view, const tcg_options *options,
                   struct choice *best) {
    bool may_split = !options->batch_invariant;
    best->row = NULL;
    best->exception = false;
    if (options->family < 0)
        choose_exception(job, view, may_split, best);
    if (best->row)
        return;
    /* Stores run along the axis of C that has unit stride: either axis with TMA, so both ways round are estimated, else
     * rows, and the other way is estimated where a short side would lie along the long one of the tiles, or is few lines. */
    bool swap = job->c_stride[1] != 1 && job->c_stride[0] == 1;
    int64_t side = job->side[!swap].size, other = job->side[swap].size;
    bool both = view->tma || (side <= SKINNY && side < other) || few_lines(job, swap);
    for (int i = 0; i <= both; i++, swap = !swap)
        consider_orders(job, view, options, swap, best);
    /* A build or a device without the wanted order: copies make any other do. */
    for (int bucket = bucket_of(job->dtype, 0, false); !best->row && bucket < bucket_of(job->dtype + 1, 0, false);
         bucket++)
        for (int i = 0; i < 2; i++)
            consider_bucket(job, view, bucket, options->family, i, may_split, best);
}

static void choose_kernel(const struct job *job, const tcg_plan_view *view, const tcg_options *options,
                          const tcg_kernel *kernel, tcg_candidate *room, struct choice *best) {
    /* Built anew: the view leaves out what it would never choose. */
    candidate_build(kernel, view, tcg_kernel_runs(kernel, view->cc) == TCG_RUNS_PTX, options->tuned, room);
    best->row = NULL;
    for (int swap = 0; swap < 2; swap++)
        if (options->swap < 0 || options->swap == swap)
            consider_row(job, view, room, swap, !options->batch_invariant, best);
}

/* ---- why not ------------------------------------------------------------------------------------------------- */

static size_t append(char *text, size_t size, size_t used, const char *word) {
    size_t length = strlen(word);
    if (used + length < size) {
        memcpy(text + used, word, length + 1);
        used += length;
    }
    return used;
}

/* "mma_f16 [80 90 120], ...": the images of a family, of a dtype, or all (-1). */
static void list_images(char *text, size_t size, int family, int dtype) {
    bool listed[TCG_IMAGE_COUNT] = {false};
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < TCG_KERNEL_COUNT; i++) {
        const tcg_kernel *kernel = tcg_kernel_at(i);
        if ((family >= 0 && (int)kernel->family != family) || (dtype >= 0 && kernel->in_dtype != dtype))
            continue;
        int images[2] = {kernel->image, kernel->ptx_image};
        for (int j = 0; j < 2; j++) {
            if (images[j] < 0 || listed[images[j]])
                continue;
            const char *archs = tcg_image_archs(images[j]);
            listed[images[j]] = true;
            used = append(text, size, used, used ? ", " : "");
            used = append(text, size, used, tcg_image_names[images[j]]);
            used = append(text, size, used, " [");
            used = append(text, size, used, *archs ? archs : "nothing");
            used = append(text, size, used, "]");
        }
    }
    if (!used)
        append(text, size, 0, "nothing");
}

static int fail_dtype(tcg_error *err, const char *name, int takes, int found) {
    return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0, "kernel=%s takes %s operands, found %s", name,
                    tcg_dtype_names[takes], tcg_dtype_names[found]);
}

static int check_kernel(const tcg_kernel *kernel, const struct job *job, const tcg_plan_view *view,
                        const tcg_options *options, const char *device, tcg_error *err) {
    char images[256];
    if (kernel->in_dtype != job->dtype)
        return fail_dtype(err, kernel->name, kernel->in_dtype, job->dtype);
    if (tcg_kernel_runs(kernel, view->cc) == TCG_RUNS_NOT) {
        list_images(images, sizeof images, kernel->family, kernel->in_dtype);
        return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0,
                        "kernel=%s does not run on %s of compute capability %d.%d: this build holds %s%s",
                        kernel->name, device, view->cc / 10, view->cc % 10, images,
                        kernel->ptx_image < 0 ? "; the PTX is of other rows" : "");
    }
    if (kernel->smem_bytes > view->smem_block_bytes)
        return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0, "kernel=%s needs %d bytes of shared memory a block, %s has %d",
                        kernel->name, kernel->smem_bytes, device, view->smem_block_bytes);
    if (options->batch_invariant && !tcg_k_in_order(kernel))
        return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0, "kernel=%s %s, which batch_invariant=True excludes",
                        kernel->name,
                        kernel->shifted ? "counts K from the start of a word" : "splits K over a cluster");
    const char *refused = tcg_families[kernel->family].tma ? tma_refuses(job, kernel) : NULL;
    if (refused)
        return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0, "kernel=%s cannot take %s", kernel->name, refused);
    return 0;
}

static int fail_nothing(const struct job *job, const tcg_plan_view *view, int family, const char *device,
                        tcg_error *err) {
    char images[256];
    int takes = -1, least_bytes = INT_MAX;
    bool runs = false;
    for (int i = 0; i < TCG_KERNEL_COUNT; i++) {
        const tcg_kernel *kernel = tcg_kernel_at(i);
        if (family >= 0 && (int)kernel->family != family)
            continue;
        if (kernel->in_dtype != job->dtype) {
            takes = takes < 0 ? kernel->in_dtype : takes;
            continue;
        }
        takes = job->dtype;
        if (tcg_kernel_runs(kernel, view->cc) != TCG_RUNS_NOT) {
            runs = true;
            least_bytes = min_int(least_bytes, kernel->smem_bytes);
        }
    }
    const char *what = family >= 0 ? tcg_families[family].name : "any kernel";
    const char *refused = family >= 0 && tcg_families[family].tma && runs ? tma_refuses(job, NULL) : NULL;
    if (refused)
        return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0, "kernel=%s cannot take %s", what, refused);
    if (family >= 0 && takes >= 0 && takes != job->dtype)
        return fail_dtype(err, what, takes, job->dtype);
    if (runs && least_bytes > view->smem_block_bytes)
        return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0,
                        "%s for %s needs at least %d bytes of shared memory a block, %s has %d", what,
                        tcg_dtype_names[job->dtype], least_bytes, device, view->smem_block_bytes);
    if (runs && !view->util)
        return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0,
                        "these strides need a copy first, and this build holds tcg_copy for [%s] only, not for %s of "
                        "compute capability %d.%d",
                        tcg_image_archs(TCG_IMAGE_util), device, view->cc / 10, view->cc % 10);
    list_images(images, sizeof images, family, job->dtype);
    return tcg_fail(err, TCG_ERR_UNSUPPORTED, 0,
                    "%s for %s: none that runs on %s of compute capability %d.%d; this build holds %s", what,
                    tcg_dtype_names[job->dtype], device, view->cc / 10, view->cc % 10, images);
}

/* ---- writing the plan down ----------------------------------------------------------------------------------- */

static int too_large(tcg_error *err, const char *what) {
    return tcg_fail(err, TCG_ERR_VALUE, 0, "%s of this problem: found more than 2^63", what);
}

/* Operand i of the kernel, in place or through the workspace: its pointer and strides in args. */
static int place_operand(const struct job *job, const struct choice *choice, int i, tcg_plan *plan, tcg_error *err) {
    const struct operand *side = &job->side[choice->swap ^ i];
    bool k_major = choice->k_major[i], any = choice->row->kernel->order < 0;
    tcg_plan_copy *copy = i ? &plan->copy_b : &plan->copy_a;
    tcg_gemm_args *args = &plan->args;
    int64_t stride = side->stride, k_stride = side->k_stride;
    const void *data = side->data;
    if (!any && !choice->copy[i]) { /* the unit stride that the order names; of a length-1 axis it is not given */
        stride = k_major ? stride : 1;
        k_stride = k_major ? 1 : k_stride;
    }
    if (choice->copy[i]) {
        int64_t entry, bytes;
        copy->needed = true;
        copy->rows = k_major ? side->size : job->k;
        copy->cols = k_major ? job->k : side->size;
        copy->row_elems = copy_row_elems(job, copy->cols);
        copy->batches = side->entries;
        copy->src = side->data;
        copy->src_row = k_major ? side->stride : side->k_stride;
        copy->src_col = k_major ? side->k_stride : side->stride;
        /* The kernel's A is [m, k]: written along m it is transposed. Its B is [k, n]. */
        copy->transposed = i == 0 ? !k_major : k_major;
        if (__builtin_mul_overflow(copy->rows, copy->row_elems, &entry) ||
            __builtin_mul_overflow(entry, copy->batches, &bytes) ||
            __builtin_mul_overflow(bytes, (int64_t)job->elem_bytes, &bytes) || bytes > INT64_MAX / 4)
            return too_large(err, "a copy of an operand");
        copy->bytes = (size_t)bytes;
        copy->offset_bytes = plan->workspace_bytes;
        plan->workspace_bytes += (copy->bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
        for (int d = 0; d < job->batch_ndim; d++) {
            copy->src_batch[d] = side->batch[d];
            *(i ? &args->batch[d].b : &args->batch[d].a) = side->batch[d] ? entry : 0;
            entry = side->batch[d] ? entry * job->batch_size[d] : entry;
        }
        stride = k_major ? copy->row_elems : 1;
        k_stride = k_major ? 1 : copy->row_elems;
        data = NULL;
    } else {
        for (int d = 0; d < job->batch_ndim; d++)
            *(i ? &args->batch[d].b : &args->batch[d].a) = side->batch[d];
    }
    if (i == 0) {
        args->a = data;
        args->a_row = stride;
        args->a_col = k_stride;
    } else {
        args->b = data;
        args->b_row = k_stride;
        args->b_col = stride;
    }
    return 0;
}

/* How wgmma stores C. `bits`: its address, row stride and batch strides in bytes, or-ed together. */
static int c_tma(const tcg_plan *plan, uint64_t bits, int elem_bytes) {
    const tcg_gemm_args *args = &plan->args;
    const bool rows = args->c_col == 1, columns = args->c_row == 1 && elem_bytes == 2;
    const bool boxes = TCG_WGMMA_STORED_N(plan->kernel->block_n, plan->kernel->cluster_k) % 16 == 0;
    if (!boxes || (!rows && !columns))
        return TCG_C_DIRECT;
    if (!rows)
        bits = (uintptr_t)args->c | stride_bits(args->c_col, elem_bytes) |
               (args->batch_ndim ? stride_bits(args->batch[0].c, elem_bytes) : 0);
    int64_t lines = rows ? args->m : args->n, length = rows ? tcg_row_length(args) : args->m,
            step = rows ? args->c_row : args->c_col;
    bool by_tma =
        length * elem_bytes % ROW_ALIGN_BYTES == 0 && alignment(bits) == ROW_ALIGN_BYTES &&
        (lines == 1 || (step > 0 && step < TMA_STRIDE_MAX)) &&
        (!args->batch_ndim || (args->batch[0].c > 0 && args->batch[0].c < TMA_STRIDE_MAX)) &&
        (plan->splits == 1 || (args->c_split < TMA_STRIDE_MAX && args->batch[0].size * plan->splits < INT32_MAX));
    return rows ? by_tma ? TCG_C_TMA_ROWS : TCG_C_STAGED_ROWS : by_tma ? TCG_C_TMA_COLUMNS : TCG_C_STAGED_COLUMNS;
}

/* C, or the partials at the end of the workspace. */
static int place_result(const struct job *job, const struct choice *choice, tcg_plan *plan, tcg_error *err) {
    tcg_gemm_args *args = &plan->args;
    int64_t row = job->c_stride[choice->swap], col = job->c_stride[!choice->swap];
    uint64_t bits = (uintptr_t)job->c;
    args->c_dtype = job->out_dtype;
    if (plan->splits > 1) {
        int64_t entry, all, bytes;
        plan->result.c = job->c;
        plan->result.row = job->c_stride[choice->swap];
        plan->result.col = job->c_stride[!choice->swap];
        row = TCG_PARTIAL_ROW(args->n);
        col = 1;
        if (__builtin_mul_overflow(args->m, row, &entry) || __builtin_mul_overflow(entry, job->batches, &all) ||
            __builtin_mul_overflow(all, 4 * (int64_t)plan->splits, &bytes) || bytes > INT64_MAX / 4)
            return too_large(err, "the partial sums");
        args->c_split = all;
        plan->partials_bytes = (size_t)bytes;
        plan->partials_offset_bytes = plan->workspace_bytes;
        plan->workspace_bytes += (plan->partials_bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
        for (int d = 0; d < job->batch_ndim; d++) {
            plan->result.batch[d] = job->c_batch[d];
            args->batch[d].c = entry;
            entry *= job->batch_size[d];
        }
        args->c = NULL;
        args->c_dtype = TCG_f32;
        bits = 0;
    } else {
        args->c = job->c;
        for (int d = 0; d < job->batch_ndim; d++)
            args->batch[d].c = job->c_batch[d];
    }
    args->c_row = row;
    args->c_col = col;
    int elem_bytes = tcg_dtype_bytes[args->c_dtype];
    bits |= args->m > 1 ? stride_bits(row, elem_bytes) : 0;
    bits |= plan->splits > 1 ? stride_bits(args->c_split, elem_bytes) : 0;
    for (int d = 0; d < job->batch_ndim; d++)
        bits |= stride_bits(args->batch[d].c, elem_bytes);
    args->c_vec_bytes = col == 1 ? alignment(bits) : elem_bytes;
    args->c_tma = plan->kernel->family == TCG_FAMILY_wgmma ? c_tma(plan, bits, elem_bytes) : TCG_C_DIRECT;
    return 0;
}

/* Rows of tiles to a group. Where C's bytes outweigh its operands' by far, memory takes them in fastest in C's own order.
 * Else the blocks that run together read a near-square part of C, which needs the fewest
 * lines of A and B; less where a group's A does not stay in the L2 cache. Each group reads all of B: so the fewest groups
 * that this allows, of equal height. */
static int raster_group(const tcg_plan *plan, const struct job *job, const tcg_plan_view *view, int occupancy) {
    const tcg_kernel *kernel = plan->kernel;
    int block_m = kernel->block_m * kernel->cluster_m, block_n = kernel->block_n * kernel->cluster_n;
    if (job->c_elems * job->out_bytes > WRITES * (job->side[0].bytes + job->side[1].bytes))
        return job->c_stride[!plan->swap] == 1 ? 1 : (int)tcg_smaller(plan->tiles_m, INT_MAX);
    double together = (double)view->sm_count * occupancy / cluster_blocks(kernel) * block_n / block_m;
    double panel = (double)block_m * (double)job->k * job->elem_bytes;
    int64_t most = 1;
    while (most < RASTER_ROWS_MAX && (most + 1) * (most + 1) <= together && (most + 1) * panel <= view->l2_bytes)
        most++;
    return (int)tcg_div_up(plan->tiles_m, tcg_div_up(plan->tiles_m, most));
}

static const char *explain(const struct job *job, const struct choice *choice, const tcg_plan *plan,
                           const tcg_options *options) {
    const tcg_kernel *kernel = plan->kernel;
    bool missing = false;
    for (int i = 0; i < 2; i++)
        missing |= choice->copy[i] && !job->side[i].align_k && !job->side[i].align_own;
    if (options->kernel >= 0)
        return "the kernel that was asked for";
    if (options->family >= 0)
        return "the cheapest row of the family that was asked for";
    if (choice->exception)
        return "measured: the fastest row for this shape on this chip";
    if (kernel->order < 0)
        return "exact float32, any strides";
    if (missing)
        return "an operand without a unit stride is copied first";
    if (choice->copy[0] || choice->copy[1])
        return "unaligned or very short rows: a padded copy costs less than taking them as they lie";
    if (kernel->shifted)
        return "unaligned rows: taken as they lie, and the few of the other operand shifted to match";
    if (kernel->align_bytes < ROW_ALIGN_BYTES)
        return "unaligned rows: cut out of the words that they lie in, which costs less than a padded copy";
    if (plan->splits > 1)
        return "few tiles and a long K: split over K, fp32 partial sums added in order";
    if (kernel->block_m <= 16)
        return choice->swap ? "few columns: computed as B^T A^T so that they are the short side of the tile"
                            : "few rows: a short tile";
    if (choice->swap)
        return "computed as C^T = B^T A^T for C's layout; the tile of least estimated time";
    return "the tile of least estimated time";
}

static int write_plan(const struct job *job, const tcg_plan_view *view, const struct choice *choice,
                      const tcg_options *options, tcg_plan *plan, tcg_error *err) {
    const tcg_kernel *kernel = choice->row->kernel;
    tcg_gemm_args *args = &plan->args;
    int64_t tiles;
    plan->kernel = kernel;
    plan->swap = choice->swap;
    plan->cycles = choice->cycles;
    plan->ptx = choice->row->ptx;
    args->m = job->side[choice->swap].size;
    args->n = job->side[!choice->swap].size;
    args->k = job->k;
    args->batch_ndim = job->batch_ndim;
    for (int d = 0; d < job->batch_ndim; d++)
        args->batch[d].size = job->batch_size[d];

    int64_t iterations = job->k ? tcg_div_up(job->k, kernel->block_k) : 1;
    int64_t splits = (int64_t)choice->splits;
    int64_t per_split = tcg_div_up(iterations, splits);
    plan->splits = args->splits = (int32_t)tcg_div_up(iterations, per_split);
    plan->k_per_split = args->k_per_split = per_split * kernel->block_k;
    plan->tiles_m = args->tiles_m = tcg_div_up(args->m, kernel->block_m * kernel->cluster_m);
    plan->tiles_n = args->tiles_n = tcg_div_up(args->n, kernel->block_n * kernel->cluster_n);
    if (__builtin_mul_overflow(plan->tiles_m, plan->tiles_n, &tiles) ||
        __builtin_mul_overflow(tiles, (int64_t)plan->splits, &tiles) ||
        __builtin_mul_overflow(tiles, job->batches, &tiles))
        return too_large(err, "the number of tiles");
    plan->tiles = args->tiles = tiles;
    int cluster = cluster_blocks(kernel);
    int64_t most = families[kernel->family].persistent
                       ? (int64_t)usable_sms(view->sm_count, kernel) * choice->row->occupancy
                       : INT32_MAX;
    most = most >= cluster ? most / cluster : 1; /* clusters, or blocks */
    plan->grid = (uint32_t)((tiles < most ? tiles : most) * cluster);
    /* Of a split, tcg_reduce comes next, which is small. */
    plan->hands_over = room_for_next(choice->row, plan->splits, plan->grid) ? TCG_AT_ONCE
                       : plan->grid >= (uint32_t)max2(view->sm_count, 1)    ? TCG_AFTER_LOADS
                                                                            : TCG_AFTER_PRODUCTS;
    plan->raster_group = args->raster_group = raster_group(plan, job, view, choice->row->occupancy);
    if (place_operand(job, choice, 0, plan, err) || place_operand(job, choice, 1, plan, err) ||
        place_result(job, choice, plan, err))
        return -1;
    plan->why = explain(job, choice, plan, options);
    return 0;
}

/* ---- the entry ----------------------------------------------------------------------------------------------- */

static int check_problem(const tcg_problem *problem, const tcg_options *options, tcg_error *err) {
    int in = problem->in_dtype, out = problem->out_dtype;
    if (in < 0 || in >= TCG_DTYPE_COUNT || (out != in && out != TCG_f32))
        return tcg_fail(err, TCG_ERR_VALUE, 0,
                        "dtypes: found codes %d -> %d, expected float16, bfloat16 or float32 to "
                        "itself or to float32",
                        in, out);
    if (problem->batch_ndim < 0 || problem->batch_ndim > TCG_MAX_BATCH_DIMS)
        return tcg_fail(err, TCG_ERR_VALUE, 0, "found %d batch axes, expected at most %d", problem->batch_ndim,
                        TCG_MAX_BATCH_DIMS);
    if (problem->m < 0 || problem->n < 0 || problem->k < 0)
        return tcg_fail(err, TCG_ERR_VALUE, 0, "found M=%lld, N=%lld, K=%lld, expected sizes of 0 or more",
                        (long long)problem->m, (long long)problem->n, (long long)problem->k);
    for (int i = 0; i < problem->batch_ndim; i++)
        if (problem->batch[i].size < 0)
            return tcg_fail(err, TCG_ERR_VALUE, 0, "found a batch axis of length %lld, expected 0 or more",
                            (long long)problem->batch[i].size);
    if (options->kernel >= TCG_KERNEL_COUNT || options->family >= TCG_FAMILY_COUNT)
        return tcg_fail(err, TCG_ERR_VALUE, 0,
                        "kernel=: found row %d of family %d, there are %d rows and %d families", options->kernel,
                        options->family, TCG_KERNEL_COUNT, TCG_FAMILY_COUNT);
    return 0;
}

static bool is_empty(const tcg_problem *problem) {
    bool empty = problem->m == 0 || problem->n == 0;
    for (int i = 0; i < problem->batch_ndim; i++)
        empty |= problem->batch[i].size == 0;
    return empty;
}

int tcg_plan_make_view(const tcg_problem *problem, const tcg_plan_view *view, const char *name,
                       const tcg_options *options, tcg_plan *plan, tcg_error *err) {
    static const tcg_options defaults = {.family = -1, .kernel = -1, .swap = -1};
    struct job job;
    struct choice best;
    tcg_candidate forced;
    const char *device = name && *name ? name : "a device";
    options = options ? options : &defaults;
    memset(plan, 0, sizeof *plan);
    if (check_problem(problem, options, err))
        return -1;
    if (is_empty(problem)) {
        plan->why = "an empty result: nothing to launch";
        return 0;
    }
    if (describe(problem, &job, err))
        return -1;
    if (options->kernel >= 0) {
        const tcg_kernel *kernel = tcg_kernel_at(options->kernel);
        if (check_kernel(kernel, &job, view, options, device, err))
            return -1;
        choose_kernel(&job, view, options, kernel, &forced, &best);
    } else {
        choose(&job, view, options, &best);
    }
    if (!best.row)
        return fail_nothing(&job, view, options->kernel >= 0 ? -1 : options->family, device, err);
    return write_plan(&job, view, &best, options, plan, err);
}

int tcg_plan_make(const tcg_problem *problem, const tcg_device_props *device, const tcg_options *options,
                  tcg_plan *plan, tcg_error *err) {
    tcg_plan_view room;
    return tcg_plan_make_view(problem, find_view(device, &room), device->name, options, plan, err);
}
