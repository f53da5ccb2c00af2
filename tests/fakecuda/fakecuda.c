/* A stand-in for libcuda.so.1: host memory plays device memory, every call is written down, any call can be told to
 * fail, and launches of tcgemm's kernels are computed on the host from their argument structs. It needs no toolkit:
 * what it knows of cuda.h is declared here. Rules that the real driver has, and that callers break, are enforced. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../kernels/abi.h"

/* ---- of cuda.h ----------------------------------------------------------------------------------------------- */

typedef int CUresult, CUdevice;
typedef uintptr_t CUdeviceptr, CUstream;
typedef struct context *CUcontext;
typedef struct library *CUlibrary;
typedef struct kernel *CUkernel;
typedef struct event *CUevent;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_MISALIGNED_ADDRESS = 716,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
};
enum {
    ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    ATTRIBUTE_L2_CACHE_SIZE = 38,
    ATTRIBUTE_CC_MAJOR = 75,
    ATTRIBUTE_CC_MINOR = 76,
    ATTRIBUTE_SMEM_SM = 81,
    ATTRIBUTE_SMEM_BLOCK_OPTIN = 97,
    POINTER_DEVICE_ORDINAL = 9,
    FUNC_MAX_DYNAMIC_SMEM = 8,
    PROC_LEGACY_STREAM = 1,
    CAPTURE_GLOBAL = 0,
    CAPTURE_RELAXED = 2,
    STREAM_LEGACY = 1,
    STREAM_PER_THREAD = 2,
    EVENT_DISABLE_TIMING = 2,
};
typedef struct CUlaunchConfig {
    unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    CUstream hStream;
    void *attrs;
    unsigned numAttrs;
} CUlaunchConfig;

#define API __attribute__((visibility("default")))

/* ---- state, all under one lock ------------------------------------------------------------------------------- */

enum { MAX_DEVICES = 16, MAX_SET = 64, MAX_STACK = 32, PARAMETER_BYTES = 2048 };

struct context {
    int device;
    bool primary;
    struct context *next;
};
struct kernel {
    struct kernel *next;
    char *name;
    int smem_limit[MAX_DEVICES];
};
struct library {
    const void *data;
};
struct event {
    CUstream stream;
    bool recorded, timing;
};

/* One launch, as fake_launch gives it. */
typedef struct fake_launch_record {
    char kernel[128];
    uint32_t grid[3], block[3], smem_bytes, attributes;
    int32_t device, primary; /* of the context that was current */
    uint64_t stream;
    uint64_t parameter_bytes;
    unsigned char parameters[PARAMETER_BYTES];
} fake_launch_record;

typedef struct fake_device {
    char name[64];
    int32_t cc, sm_count, smem_block_bytes, smem_sm_bytes, l2_bytes;
} fake_device;

struct object { /* a CUuserObject */
    struct object *next;
    void *arg;
    void (*destroy)(void *);
};

struct block {
    struct block *next;
    char *start;
    size_t bytes;
    int device;
    bool ours; /* allocated here; else declared */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fake_device devices[MAX_DEVICES];
static int device_count = -1; /* -1: not set up */
static int driver_version = 13000;
static struct context primaries[MAX_DEVICES], *foreigners;
static bool initialised;
static pid_t initialised_pid;

static char **calls;
static size_t call_count, call_room;
static fake_launch_record *launches;
static size_t launch_count, launch_room;
static struct kernel *kernels;
static struct block *blocks;
static struct object *graph_objects;
static int64_t live_blocks, live_bytes, live_events, broken_captures;
static int64_t memory_bytes = INT64_MAX;
static bool execute, quiet;

struct rule {
    char symbol[48];
    long nth; /* 0: every call; n: the n-th from now */
    CUresult result;
};
static struct rule rules[MAX_SET];
static int rule_count;
static char hidden[MAX_SET][48];
static int hidden_count;
static CUstream capturing[MAX_SET], busy[MAX_SET], dead[MAX_SET];
static int capturing_count, busy_count, dead_count;

static _Thread_local CUcontext stack[MAX_STACK];
static _Thread_local int depth;
static _Thread_local int capture_mode = CAPTURE_GLOBAL;

static void set_up(void) {
    if (device_count >= 0)
        return;
    device_count = 2;
    for (int i = 0; i < MAX_DEVICES; i++) {
        devices[i] = (fake_device){"Fake H200", 90, 132, 232448, 233472, 60 << 20};
        primaries[i] = (struct context){i, true, NULL};
    }
}

static bool in_set(const CUstream *set, int count, CUstream stream) {
    for (int i = 0; i < count; i++)
        if (set[i] == stream)
            return true;
    return false;
}

static void change_set(CUstream *set, int *count, CUstream stream, bool in) {
    for (int i = 0; i < *count; i++)
        if (set[i] == stream)
            set[i--] = set[--*count];
    if (in && *count < MAX_SET)
        set[(*count)++] = stream;
}

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

/* Writes the call down and decides whether it is told to fail. Takes the lock and, on success alone, keeps it. */
static CUresult begin(const char *symbol, const char *format, ...) {
    char text[512], where[32];
    va_list list;
    int used = snprintf(text, sizeof text, "%s ", symbol);
    va_start(list, format);
    used += vsnprintf(text + used, sizeof text - (size_t)used, format, list);
    va_end(list);
    CUcontext context = current();
    if (context)
        snprintf(where, sizeof where, "%s%d", context->primary ? "" : "foreign:", context->device);
    else
        snprintf(where, sizeof where, "none");
    if (used < (int)sizeof text)
        snprintf(text + used, sizeof text - (size_t)used, "%sctx=%s", *format ? " " : "", where);
    pthread_mutex_lock(&lock);
    set_up();
    if (!quiet) {
        if (call_count == call_room) {
            call_room = call_room ? 2 * call_room : 1024;
            calls = realloc(calls, call_room * sizeof *calls);
        }
        calls[call_count++] = strdup(text);
    }
    for (int i = 0; i < rule_count; i++) {
        struct rule *rule = &rules[i];
        if (strcmp(rule->symbol, symbol))
            continue;
        CUresult result = rule->nth <= 1 ? rule->result : CUDA_SUCCESS;
        if (rule->nth == 1)
            *rule = rules[--rule_count];
        else if (rule->nth > 1)
            rule->nth--;
        if (result != CUDA_SUCCESS) {
            pthread_mutex_unlock(&lock);
            return result;
        }
    }
    if (strcmp(symbol, "cuInit") && (!initialised || initialised_pid != getpid())) {
        pthread_mutex_unlock(&lock);
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    return CUDA_SUCCESS;
}

static CUresult end(CUresult result) {
    pthread_mutex_unlock(&lock);
    return result;
}

/* CALL(name, "format", ...) opens every function: past it the lock is held. */
#define CALL(symbol, ...)                               \
    do {                                                \
        CUresult result_ = begin(#symbol, __VA_ARGS__); \
        if (result_ != CUDA_SUCCESS)                    \
            return result_;                             \
    } while (0)
#define REQUIRE(condition, result) \
    do {                           \
        if (!(condition))          \
            return end(result);    \
    } while (0)

/* What a capture in global mode forbids all other threads, and their own unless they relaxed. */
static CUresult unsafe(void) {
    if (capturing_count && capture_mode != CAPTURE_RELAXED) {
        broken_captures++;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return CUDA_SUCCESS;
}

/* Whether work may go into the stream: it exists, a context is there to resolve it, and it is not the legacy stream
 * beside a capture. */
static CUresult usable(CUstream stream) {
    if (in_set(dead, dead_count, stream))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!current())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (stream <= STREAM_LEGACY && capturing_count) {
        broken_captures++;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    return CUDA_SUCCESS;
}

/* ---- what tests set and read --------------------------------------------------------------------------------- */

/* Forgets calls, launches, rules, captures, declared memory and counters; devices and loaded kernels stay. */
API void fake_reset(void) {
    pthread_mutex_lock(&lock);
    set_up();
    for (size_t i = 0; i < call_count; i++)
        free(calls[i]);
    call_count = launch_count = 0;
    rule_count = hidden_count = capturing_count = busy_count = dead_count = 0;
    broken_captures = 0;
    memory_bytes = INT64_MAX;
    for (struct block **at = &blocks; *at;) {
        struct block *block = *at;
        if (block->ours) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        free(block);
    }
    pthread_mutex_unlock(&lock);
}

API int64_t fake_call_count(void) { return (int64_t)call_count; }

/* "symbol argument=value ... ctx=0", ctx being the device whose primary context is current, foreign:0 or none. */
API const char *fake_call(int64_t i) { return i >= 0 && (size_t)i < call_count ? calls[i] : NULL; }

API int64_t fake_launch_count(void) { return (int64_t)launch_count; }

API int fake_launch(int64_t i, fake_launch_record *record) {
    pthread_mutex_lock(&lock);
    bool found = i >= 0 && (size_t)i < launch_count;
    if (found)
        *record = launches[i];
    pthread_mutex_unlock(&lock);
    return found ? 0 : -1;
}

/* The nth call of the symbol from now on (0: each) returns that error. */
API void fake_fail(const char *symbol, long nth, int result) {
    pthread_mutex_lock(&lock);
    if (rule_count < MAX_SET) {
        struct rule *rule = &rules[rule_count++];
        snprintf(rule->symbol, sizeof rule->symbol, "%s", symbol);
        rule->nth = nth;
        rule->result = result;
    }
    pthread_mutex_unlock(&lock);
}

/* cuGetProcAddress does not know the symbol: an old driver. */
API void fake_hide(const char *symbol) {
    pthread_mutex_lock(&lock);
    if (hidden_count < MAX_SET)
        snprintf(hidden[hidden_count++], sizeof hidden[0], "%s", symbol);
    pthread_mutex_unlock(&lock);
}

API void fake_set_version(int version) { driver_version = version; }

API void fake_set_devices(int count) {
    pthread_mutex_lock(&lock);
    set_up();
    device_count = count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : count;
    pthread_mutex_unlock(&lock);
}

API void fake_set_device(int device, const fake_device *properties) {
    pthread_mutex_lock(&lock);
    set_up();
    if (device >= 0 && device < MAX_DEVICES)
        devices[device] = *properties;
    pthread_mutex_unlock(&lock);
}

/* That host range is memory of the device; -1: plain again. */
API void fake_set_pointer_device(const void *start, int64_t bytes, int device) {
    pthread_mutex_lock(&lock);
    for (struct block **at = &blocks; *at;) {
        struct block *block = *at;
        if (block->ours || block->start != start) {
            at = &block->next;
            continue;
        }
        *at = block->next;
        free(block);
    }
    if (device >= 0) {
        struct block *block = malloc(sizeof *block);
        *block = (struct block){blocks, (char *)start, (size_t)bytes, device, false};
        blocks = block;
    }
    pthread_mutex_unlock(&lock);
}

API void fake_set_execute(int on) { execute = on; }
/* Keeps no calls and only the last launch, for long runs. */
API void fake_set_quiet(int on) { quiet = on; }
API void fake_set_memory(int64_t bytes) { memory_bytes = bytes; }

#define SETTER(name)                                           \
    API void fake_set_##name(uint64_t stream, int in) {        \
        pthread_mutex_lock(&lock);                             \
        change_set(name, &name##_count, (CUstream)stream, in); \
        pthread_mutex_unlock(&lock);                           \
    }
SETTER(capturing) /* a capture in global mode is in progress in the stream */
SETTER(busy)      /* work in the stream does not end: events recorded there are not reached */
SETTER(dead)      /* the stream has been destroyed */

API int64_t fake_live_blocks(void) { return live_blocks; }
API int64_t fake_live_bytes(void) { return live_bytes; }
API int64_t fake_live_events(void) { return live_events; }
API int64_t fake_broken_captures(void) { return broken_captures; }

/* A context of that device that is not its primary one; never freed. */
API void *fake_context(int device) {
    struct context *context = malloc(sizeof *context);
    pthread_mutex_lock(&lock);
    *context = (struct context){device, false, foreigners};
    foreigners = context;
    pthread_mutex_unlock(&lock);
    return context;
}
API void *fake_primary(int device) {
    set_up();
    return &primaries[device];
}

/* The calling thread's context stack, without a line in the log. */
API int fake_depth(void) { return depth; }
API void *fake_current(void) { return current(); }
API void fake_push(void *context) {
    if (depth < MAX_STACK)
        stack[depth++] = context;
}
API void fake_pop(void) { depth -= depth > 0; }
API int fake_capture_mode(void) { return capture_mode; }

/* ---- the product on the host --------------------------------------------------------------------------------- */

static float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, bits;
    float value;
    if (exponent == 0) {
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_f16(float value) {
    uint32_t bits, sign, magnitude;
    memcpy(&bits, &value, 4);
    sign = bits >> 16 & 0x8000;
    magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) /* from 65520 on the nearest is infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal: adding 0.5 rounds at 2^-24 */
        float shifted;
        memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        memcpy(&magnitude, &shifted, 4);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    return (uint16_t)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13));
}

static float from_bf16(uint16_t b) {
    uint32_t bits = (uint32_t)b << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float load(const void *base, int64_t index, int dtype) {
    if (dtype == TCG_f32)
        return ((const float *)base)[index];
    uint16_t half = ((const uint16_t *)base)[index];
    return dtype == TCG_f16 ? from_f16(half) : from_bf16(half);
}

static void store(void *base, int64_t index, int dtype, float value) {
    if (dtype == TCG_f32)
        ((float *)base)[index] = value;
    else
        ((uint16_t *)base)[index] = dtype == TCG_f16 ? to_f16(value) : to_bf16(value);
}

/* Steps through a batch: offsets of a, b and c of entry i, innermost axis first. */
static void entry_offsets(const tcg_batch_dim *batch, int ndim, int64_t i, int64_t *a, int64_t *b, int64_t *c) {
    *a = *b = *c = 0;
    for (int d = 0; d < ndim; d++) {
        int64_t at = i % batch[d].size;
        i /= batch[d].size;
        *a += at * batch[d].a;
        *b += at * batch[d].b;
        *c += at * batch[d].c;
    }
}

static int64_t entries(const tcg_batch_dim *batch, int ndim) {
    int64_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= batch[d].size;
    return count;
}

static bool lines_aligned(const void *base, int64_t lines, int64_t stride, const tcg_batch_dim *batch, int ndim,
                          bool b, int elem_bytes, int bytes) {
    uint64_t bits = (uintptr_t)base | (lines > 1 ? (uint64_t)stride * (uint64_t)elem_bytes : 0);
    for (int d = 0; d < ndim; d++)
        bits |= (uint64_t)(b ? batch[d].b : batch[d].a) * (uint64_t)elem_bytes;
    return bits % (uint64_t)bytes == 0;
}

/* tcg_<family>_<arch>_<in>[_<order>]_<BM>x<BN>x<BK>...[_c<CM>x<CN>x<CK>][_a<align>] */
static CUresult run_gemm(const char *name, const tcg_gemm_args *args, uint32_t grid) {
    char family[16], in[8], order_name[4] = "", tail[64];
    int in_dtype = -1, bm, bn, bk, align = 1, cm = 1, cn = 1, ck = 1;
    const char *at = strstr(name, "_sm");
    if (sscanf(name, "tcg_%15[a-z]_", family) != 1 || !at || !(at = strchr(at + 1, '_')))
        return CUDA_ERROR_LAUNCH_FAILED;
    if (sscanf(at, "_%7[a-z0-9]_%dx%dx%d", in, &bm, &bn, &bk) != 4 &&
        sscanf(at, "_%7[a-z0-9]_%3[a-z]_%dx%dx%d%63s", in, order_name, &bm, &bn, &bk, tail) < 5)
        return CUDA_ERROR_LAUNCH_FAILED;
    const char *align_at = strrchr(name, '_');
    if (align_at[1] == 'a')
        align = atoi(align_at + 2);
    const char *cluster_at = strstr(name, "_c");
    while (cluster_at && sscanf(cluster_at, "_c%dx%dx%d", &cm, &cn, &ck) != 3)
        cluster_at = strstr(cluster_at + 1, "_c");
    if (!strcmp(family, "wgmma"))
        align = 16;
#define X(code, bytes, text) \
    if (!strcmp(in, #code))  \
        in_dtype = TCG_##code;
    TCG_DTYPES(X)
#undef X
    int elem_bytes = in_dtype == TCG_f32 ? 4 : 2;
    int64_t a_row = args->a_row, a_col = args->a_col, b_row = args->b_row, b_col = args->b_col;
    /* A kernel relies on the unit stride of its order and never looks at that field. */
    if (*order_name && strcmp(order_name, "any")) {
        *(order_name[0] == 'n' ? &a_col : &a_row) = 1;
        *(order_name[1] == 'n' ? &b_col : &b_row) = 1;
        bool a_n = order_name[0] == 'n', b_n = order_name[1] == 'n';
        if (args->k > 0 && (!lines_aligned(args->a, a_n ? args->m : args->k, a_n ? a_row : a_col, args->batch,
                                           args->batch_ndim, false, elem_bytes, align) ||
                            !lines_aligned(args->b, b_n ? args->k : args->n, b_n ? b_row : b_col, args->batch,
                                           args->batch_ndim, true, elem_bytes, align)))
            return CUDA_ERROR_MISALIGNED_ADDRESS;
    }
    int64_t batches = entries(args->batch, args->batch_ndim);
    if (args->tiles_m != (args->m + bm * cm - 1) / (bm * cm) ||
        args->tiles_n != (args->n + bn * cn - 1) / (bn * cn) ||
        args->tiles != args->tiles_m * args->tiles_n * args->splits * batches || grid > args->tiles * cm * cn * ck ||
        grid % (uint32_t)(cm * cn * ck) || args->k_per_split % bk || args->k_per_split < bk ||
        args->k_per_split * args->splits < args->k || args->raster_group < 1)
        return CUDA_ERROR_LAUNCH_FAILED;
    if (args->c_col == 1) {
        uint64_t bits = (uintptr_t)args->c;
        int out_bytes = args->c_dtype == TCG_f32 ? 4 : 2;
        bits |= args->m > 1 ? (uint64_t)args->c_row * (uint64_t)out_bytes : 0;
        bits |= (uint64_t)args->c_split * (uint64_t)out_bytes;
        for (int d = 0; d < args->batch_ndim; d++)
            bits |= (uint64_t)args->batch[d].c * (uint64_t)out_bytes;
        if (args->c_vec_bytes < out_bytes || bits % (uint64_t)args->c_vec_bytes)
            return CUDA_ERROR_MISALIGNED_ADDRESS;
    }
    size_t depth_elems = args->k > 0 ? (size_t)args->k : 1;
    float *b_lines = malloc((size_t)args->n * depth_elems * sizeof *b_lines);
    float *a_line = malloc(depth_elems * sizeof *a_line);
    for (int64_t e = 0; e < batches; e++) {
        int64_t a_at, b_at, c_at;
        entry_offsets(args->batch, args->batch_ndim, e, &a_at, &b_at, &c_at);
        for (int64_t j = 0; j < args->n; j++)
            for (int64_t p = 0; p < args->k; p++)
                b_lines[j * args->k + p] = load(args->b, b_at + p * b_row + j * b_col, in_dtype);
        for (int64_t i = 0; i < args->m; i++) {
            for (int64_t p = 0; p < args->k; p++)
                a_line[p] = load(args->a, a_at + i * a_row + p * a_col, in_dtype);
            for (int64_t j = 0; j < args->n; j++) {
                for (int64_t s = 0; s < args->splits; s++) {
                    int64_t first = s * args->k_per_split, last = first + args->k_per_split;
                    float sum = 0;
                    last = last < args->k ? last : args->k;
                    for (int64_t p = first; p < last; p++)
                        sum += a_line[p] * b_lines[j * args->k + p];
                    store(args->c, c_at + s * args->c_split + i * args->c_row + j * args->c_col, args->c_dtype, sum);
                }
            }
        }
    }
    free(a_line);
    free(b_lines);
    return CUDA_SUCCESS;
}

/* What the walk over pieces of 16 bytes has to be told. */
static bool right_walk(const tcg_copy_job *job, int elem_bytes) {
    int64_t pieces = job->dst_row * elem_bytes / 16, step = (int64_t)job->blocks * TCG_COPY_THREADS;
    return job->src_col == 1 && job->step_row < job->rows && job->step_piece < pieces &&
           (job->step_entry * job->rows + job->step_row) * pieces + job->step_piece == step &&
           job->row_pieces.by == pieces && job->entry_rows.by == job->rows;
}

static CUresult run_copy(const tcg_copy_args *args, unsigned grid) {
    if ((args->elem_bytes != 2 && args->elem_bytes != 4) || args->job[0].blocks + args->job[1].blocks != grid)
        return CUDA_ERROR_LAUNCH_FAILED;
    for (int which = 0; which < 2; which++) {
        const tcg_copy_job *job = &args->job[which];
        if (job->blocks == 0)
            continue;
        if (job->batches != entries(job->batch, job->batch_ndim) ||
            (job->way == TCG_COPY_PIECES && !right_walk(job, args->elem_bytes)) ||
            (job->way == TCG_COPY_TURNED && job->src_row != 1))
            return CUDA_ERROR_LAUNCH_FAILED;
        if ((uintptr_t)job->dst % 16 || job->dst_row * args->elem_bytes % 16)
            return CUDA_ERROR_MISALIGNED_ADDRESS;
        for (int64_t e = 0; e < job->batches; e++) {
            int64_t src, unused[2];
            entry_offsets(job->batch, job->batch_ndim, e, &src, &unused[0], &unused[1]);
            for (int64_t i = 0; i < job->rows; i++) {
                for (int64_t j = 0; j < job->dst_row; j++) {
                    char *to = (char *)job->dst + ((e * job->rows + i) * job->dst_row + j) * args->elem_bytes;
                    const char *from =
                        (const char *)job->src + (src + i * job->src_row + j * job->src_col) * args->elem_bytes;
                    if (j < job->cols)
                        memcpy(to, from, (size_t)args->elem_bytes);
                    else
                        memset(to, 0, (size_t)args->elem_bytes);
                }
            }
        }
    }
    return CUDA_SUCCESS;
}

static CUresult run_reduce(const tcg_reduce_args *args) {
    if (args->batches != entries(args->batch, args->batch_ndim) || (uintptr_t)args->partials % 16 ||
        args->partial_row < args->n || args->partial_row % 4 || args->c_split % 4)
        return CUDA_ERROR_LAUNCH_FAILED;
    uint64_t bits = 0;
    int out_bytes = args->c_dtype == TCG_f32 ? 4 : 2;
    for (int64_t e = 0; e < args->batches; e++) {
        int64_t c, unused[2];
        entry_offsets(args->batch, args->batch_ndim, e, &c, &unused[0], &unused[1]);
        bits |= (uintptr_t)args->c + (uint64_t)c * (uint64_t)out_bytes;
        for (int64_t i = 0; i < args->m; i++) {
            bits |= (uint64_t)(i * args->c_row) * (uint64_t)out_bytes;
            for (int64_t j = 0; j < args->n; j++) {
                float sum = 0;
                for (int64_t s = 0; s < args->splits; s++)
                    sum += args->partials[s * args->c_split + (e * args->m + i) * args->partial_row + j];
                store(args->c, c + i * args->c_row + j * args->c_col, args->c_dtype, sum);
            }
        }
    }
    if (args->c_together && (args->c_col != 1 || bits % (4 * (uint64_t)out_bytes)))
        return CUDA_ERROR_MISALIGNED_ADDRESS;
    return CUDA_SUCCESS;
}

/* ---- the driver's functions ---------------------------------------------------------------------------------- */

API CUresult cuInit(unsigned flags) {
    CALL(cuInit, "flags=%u", flags);
    REQUIRE(device_count > 0, CUDA_ERROR_NO_DEVICE);
    REQUIRE(!initialised || initialised_pid == getpid(), CUDA_ERROR_NOT_INITIALIZED);
    initialised = true;
    initialised_pid = getpid();
    return end(CUDA_SUCCESS);
}

API CUresult cuDriverGetVersion(int *version) {
    *version = driver_version;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult result;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
};

API CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].result == error)
            *text = errors[i].name;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].result == error)
            *text = errors[i].text;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuDeviceGetCount(int *count) {
    CALL(cuDeviceGetCount, "");
    *count = device_count;
    return end(CUDA_SUCCESS);
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CALL(cuDeviceGet, "ordinal=%d", ordinal);
    REQUIRE(ordinal >= 0 && ordinal < device_count, CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return end(CUDA_SUCCESS);
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    CALL(cuDeviceGetName, "device=%d", device);
    REQUIRE(device >= 0 && device < device_count, CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, "%s", devices[device].name);
    return end(CUDA_SUCCESS);
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    CALL(cuDeviceGetAttribute, "attribute=%d device=%d", attribute, device);
    REQUIRE(device >= 0 && device < device_count, CUDA_ERROR_INVALID_DEVICE);
    const fake_device *d = &devices[device];
    switch (attribute) {
    case ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = d->sm_count;
        break;
    case ATTRIBUTE_L2_CACHE_SIZE:
        *value = d->l2_bytes;
        break;
    case ATTRIBUTE_CC_MAJOR:
        *value = d->cc / 10;
        break;
    case ATTRIBUTE_CC_MINOR:
        *value = d->cc % 10;
        break;
    case ATTRIBUTE_SMEM_SM:
        *value = d->smem_sm_bytes;
        break;
    case ATTRIBUTE_SMEM_BLOCK_OPTIN:
        *value = d->smem_block_bytes;
        break;
    default:
        return end(CUDA_ERROR_INVALID_VALUE);
    }
    return end(CUDA_SUCCESS);
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CALL(cuDevicePrimaryCtxRetain, "device=%d", device);
    REQUIRE(device >= 0 && device < device_count, CUDA_ERROR_INVALID_DEVICE);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    *context = &primaries[device];
    return end(CUDA_SUCCESS);
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    CALL(cuCtxGetCurrent, "");
    *context = current();
    return end(CUDA_SUCCESS);
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CALL(cuCtxPushCurrent, "device=%d", context ? context->device : -1);
    REQUIRE(context && depth < MAX_STACK, CUDA_ERROR_INVALID_CONTEXT);
    stack[depth++] = context;
    return end(CUDA_SUCCESS);
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    CALL(cuCtxPopCurrent, "");
    REQUIRE(depth > 0, CUDA_ERROR_INVALID_CONTEXT);
    *context = stack[--depth];
    return end(CUDA_SUCCESS);
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer) {
    CALL(cuPointerGetAttribute, "attribute=%d pointer=%#zx", attribute, (size_t)pointer);
    REQUIRE(attribute == POINTER_DEVICE_ORDINAL, CUDA_ERROR_INVALID_VALUE);
    for (struct block *block = blocks; block; block = block->next) {
        if (pointer >= (uintptr_t)block->start && pointer < (uintptr_t)block->start + block->bytes) {
            *(int *)data = block->device;
            return end(CUDA_SUCCESS);
        }
    }
    return end(CUDA_ERROR_INVALID_VALUE);
}

API CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    CALL(cuThreadExchangeStreamCaptureMode, "mode=%d", *mode);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return end(CUDA_SUCCESS);
}

API CUresult cuLibraryLoadData(CUlibrary *library, const void *code, void *o, void *p, unsigned q, void *r, void *s,
                               unsigned t) {
    (void)o, (void)p, (void)q, (void)r, (void)s, (void)t;
    CALL(cuLibraryLoadData, "");
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    REQUIRE(code, CUDA_ERROR_INVALID_VALUE);
    *library = malloc(sizeof **library);
    (*library)->data = code;
    return end(CUDA_SUCCESS);
}

API CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    CALL(cuLibraryGetKernel, "name=%s", name);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    REQUIRE(library && library->data, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(!strncmp(name, "tcg_", 4), CUDA_ERROR_NOT_FOUND);
    struct kernel *found = calloc(1, sizeof *found);
    found->name = strdup(name);
    found->next = kernels;
    kernels = found;
    *kernel = found;
    return end(CUDA_SUCCESS);
}

API CUresult cuKernelGetFunction(void **function, CUkernel kernel) {
    CALL(cuKernelGetFunction, "kernel=%s", kernel->name);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    REQUIRE(current(), CUDA_ERROR_INVALID_CONTEXT);
    *function = kernel;
    return end(CUDA_SUCCESS);
}

API CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device) {
    CALL(cuKernelSetAttribute, "attribute=%d value=%d kernel=%s device=%d", attribute, value, kernel->name, device);
    REQUIRE(device >= 0 && device < device_count, CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(attribute == FUNC_MAX_DYNAMIC_SMEM && value >= 0 && value <= devices[device].smem_block_bytes,
            CUDA_ERROR_INVALID_VALUE);
    kernel->smem_limit[device] = value;
    return end(CUDA_SUCCESS);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUkernel kernel, void **parameters, void **extra) {
    CALL(cuLaunchKernelEx, "kernel=%s grid=%u,%u,%u block=%u smem=%u stream=%#zx attributes=%u", kernel->name,
         config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX, config->sharedMemBytes,
         (size_t)config->hStream, config->numAttrs);
    CUresult result = usable(config->hStream);
    REQUIRE(result == CUDA_SUCCESS, result);
    int device = current()->device;
    REQUIRE(config->gridDimX >= 1 && config->gridDimX <= INT32_MAX && config->gridDimY == 1 &&
                config->gridDimZ == 1 && config->blockDimX >= 1 && config->blockDimX <= 1024 && !extra,
            CUDA_ERROR_INVALID_VALUE);
    int limit = kernel->smem_limit[device] > 48 * 1024 ? kernel->smem_limit[device] : 48 * 1024;
    REQUIRE((int64_t)config->sharedMemBytes <= limit, CUDA_ERROR_INVALID_VALUE);
    bool is_copy = !strcmp(kernel->name, "tcg_copy"), is_reduce = !strcmp(kernel->name, "tcg_reduce");
    /* Which struct the kernel takes: families that TMA feeds have theirs. */
    bool tma = !is_copy && !is_reduce && strncmp(kernel->name, "tcg_mma_", 8) &&
               strncmp(kernel->name, "tcg_simt_", 9) && strncmp(kernel->name, "tcg_wmma", 8);
    size_t bytes = is_copy     ? sizeof(tcg_copy_args)
                   : is_reduce ? sizeof(tcg_reduce_args)
                   : tma       ? sizeof(tcg_tma_args)
                               : sizeof(tcg_gemm_args);
    if (quiet)
        launch_count = 0; /* the last one alone is kept */
    if (launch_count == launch_room) {
        launch_room = launch_room ? 2 * launch_room : 64;
        launches = realloc(launches, launch_room * sizeof *launches);
    }
    fake_launch_record *record = &launches[launch_count++];
    memset(record, 0, sizeof *record);
    snprintf(record->kernel, sizeof record->kernel, "%s", kernel->name);
    record->grid[0] = config->gridDimX;
    record->grid[1] = config->gridDimY;
    record->grid[2] = config->gridDimZ;
    record->block[0] = config->blockDimX;
    record->block[1] = config->blockDimY;
    record->block[2] = config->blockDimZ;
    record->smem_bytes = config->sharedMemBytes;
    record->attributes = config->numAttrs;
    record->device = device;
    record->primary = current()->primary;
    record->stream = config->hStream;
    record->parameter_bytes = bytes;
    memcpy(record->parameters, parameters[0], bytes);
    if (!execute)
        return end(CUDA_SUCCESS);
    /* The struct may be gone once this returns, so the work is done here: in order, as on one stream. */
    return end(is_copy ? run_copy(parameters[0], config->gridDimX)
               : is_reduce
                   ? run_reduce(parameters[0])
                   : run_gemm(kernel->name, tma ? &((const tcg_tma_args *)parameters[0])->gemm : parameters[0],
                              config->gridDimX));
}

API CUresult cuTensorMapEncodeTiled(void *map, int dtype, uint32_t rank, void *address, const uint64_t *sizes,
                                    const uint64_t *strides_bytes, const uint32_t *box, const uint32_t *steps,
                                    int interleave, int swizzle, int promotion, int fill) {
    (void)steps, (void)promotion, (void)fill;
    CALL(cuTensorMapEncodeTiled, "dtype=%d rank=%u address=%#zx swizzle=%d box=%ux%u", dtype, rank, (size_t)address,
         swizzle, box[0], rank > 1 ? box[1] : 1);
    REQUIRE((uintptr_t)map % 128 == 0 && rank >= 1 && rank <= 5 && (uintptr_t)address % 16 == 0 && !interleave,
            CUDA_ERROR_INVALID_VALUE);
    for (uint32_t i = 0; i < rank; i++) {
        REQUIRE(sizes[i] >= 1 && sizes[i] <= (uint64_t)1 << 32 && box[i] >= 1 && box[i] <= 256,
                CUDA_ERROR_INVALID_VALUE);
        REQUIRE(i == 0 || (strides_bytes[i - 1] % 16 == 0 && strides_bytes[i - 1] < (uint64_t)1 << 40),
                CUDA_ERROR_INVALID_VALUE);
    }
    memset(map, 0, sizeof(tcg_tensor_map));
    memcpy(map, &address, sizeof address);
    return end(CUDA_SUCCESS);
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes) {
    if (bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes >= INT64_MAX / 2 || (int64_t)bytes > memory_bytes - live_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t room = (bytes + 255) / 256 * 256;
    char *start = aligned_alloc(256, room);
    if (!start)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memset(start, 0xff, room); /* NaN in every type */
    struct block *block = malloc(sizeof *block);
    *block = (struct block){blocks, start, bytes, current()->device, true};
    blocks = block;
    live_blocks++;
    live_bytes += (int64_t)bytes;
    *pointer = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

static CUresult release(CUdeviceptr pointer) {
    for (struct block **at = &blocks; *at; at = &(*at)->next) {
        struct block *block = *at;
        if (!block->ours || (CUdeviceptr)block->start != pointer)
            continue;
        *at = block->next;
        live_blocks--;
        live_bytes -= (int64_t)block->bytes;
        free(block->start);
        free(block);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    CALL(cuMemAllocAsync, "bytes=%zu stream=%#zx", bytes, (size_t)stream);
    CUresult result = usable(stream);
    REQUIRE(result == CUDA_SUCCESS, result);
    return end(allocate(pointer, bytes));
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    CALL(cuMemFreeAsync, "pointer=%#zx stream=%#zx", (size_t)pointer, (size_t)stream);
    CUresult result = usable(stream);
    REQUIRE(result == CUDA_SUCCESS, result);
    return end(release(pointer));
}

API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    CALL(cuMemAlloc, "bytes=%zu", bytes);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    REQUIRE(current(), CUDA_ERROR_INVALID_CONTEXT);
    return end(allocate(pointer, bytes));
}

API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    CALL(cuMemFree, "pointer=%#zx", (size_t)pointer);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    REQUIRE(current(), CUDA_ERROR_INVALID_CONTEXT);
    return end(release(pointer));
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    CALL(cuMemcpyHtoD, "bytes=%zu", bytes);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    REQUIRE(current(), CUDA_ERROR_INVALID_CONTEXT);
    memcpy((void *)to, from, bytes);
    return end(CUDA_SUCCESS);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    CALL(cuMemcpyDtoH, "bytes=%zu", bytes);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    REQUIRE(current(), CUDA_ERROR_INVALID_CONTEXT);
    memcpy(to, (const void *)from, bytes);
    return end(CUDA_SUCCESS);
}

API CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    CALL(cuStreamIsCapturing, "stream=%#zx", (size_t)stream);
    REQUIRE(!in_set(dead, dead_count, stream), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(stream > STREAM_LEGACY || !capturing_count, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    *status = in_set(capturing, capturing_count, stream);
    return end(CUDA_SUCCESS);
}

/* One graph stands for all captures. What it was given goes when fake_destroy_graph is called. */
API CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int *status, uint64_t *id, void **graph, const void ***nodes,
                                       size_t *node_count) {
    CALL(cuStreamGetCaptureInfo, "stream=%#zx", (size_t)stream);
    *status = in_set(capturing, capturing_count, stream);
    *id = 1;
    *graph = *status ? &graph_objects : NULL;
    *nodes = NULL;
    *node_count = 0;
    return end(CUDA_SUCCESS);
}

API CUresult cuUserObjectCreate(struct object **object, void *arg, void (*destroy)(void *), unsigned count,
                                unsigned flags) {
    CALL(cuUserObjectCreate, "count=%u flags=%u", count, flags);
    REQUIRE(count == 1 && flags == 1, CUDA_ERROR_INVALID_VALUE);
    *object = calloc(1, sizeof **object);
    (*object)->arg = arg;
    (*object)->destroy = destroy;
    return end(CUDA_SUCCESS);
}

API CUresult cuGraphRetainUserObject(void *graph, struct object *object, unsigned count, unsigned flags) {
    CALL(cuGraphRetainUserObject, "count=%u flags=%u", count, flags);
    REQUIRE(graph == &graph_objects && count == 1 && flags == 1, CUDA_ERROR_INVALID_VALUE);
    object->next = graph_objects;
    graph_objects = object;
    return end(CUDA_SUCCESS);
}

API void fake_destroy_graph(void) {
    pthread_mutex_lock(&lock);
    struct object *list = graph_objects;
    graph_objects = NULL;
    pthread_mutex_unlock(&lock);
    while (list) {
        struct object *next = list->next;
        list->destroy(list->arg);
        free(list);
        list = next;
    }
}

API CUresult cuStreamSynchronize(CUstream stream) {
    CALL(cuStreamSynchronize, "stream=%#zx", (size_t)stream);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    result = usable(stream);
    return end(result);
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    CALL(cuStreamWaitEvent, "stream=%#zx event_stream=%#zx flags=%u", (size_t)stream, (size_t)event->stream, flags);
    return end(usable(stream));
}

API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    CALL(cuEventCreate, "flags=%u", flags);
    REQUIRE(current(), CUDA_ERROR_INVALID_CONTEXT);
    *event = calloc(1, sizeof **event);
    (*event)->timing = !(flags & EVENT_DISABLE_TIMING);
    live_events++;
    return end(CUDA_SUCCESS);
}

API CUresult cuEventDestroy_v2(CUevent event) {
    CALL(cuEventDestroy, "");
    live_events--;
    free(event);
    return end(CUDA_SUCCESS);
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    CALL(cuEventRecord, "stream=%#zx", (size_t)stream);
    CUresult result = usable(stream);
    REQUIRE(result == CUDA_SUCCESS, result);
    event->stream = stream;
    event->recorded = true;
    return end(CUDA_SUCCESS);
}

API CUresult cuEventQuery(CUevent event) {
    CALL(cuEventQuery, "stream=%#zx", (size_t)event->stream);
    CUresult result = unsafe();
    REQUIRE(result == CUDA_SUCCESS, result);
    return end(event->recorded && in_set(busy, busy_count, event->stream) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

API CUresult cuEventSynchronize(CUevent event) {
    CALL(cuEventSynchronize, "stream=%#zx", (size_t)event->stream);
    return end(unsafe());
}

API CUresult cuEventElapsedTime(float *milliseconds, CUevent first, CUevent last) {
    CALL(cuEventElapsedTime, "");
    REQUIRE(first->recorded && last->recorded && first->timing && last->timing, CUDA_ERROR_INVALID_HANDLE);
    *milliseconds = 1;
    return end(CUDA_SUCCESS);
}

/* Symbol, the version its prototype here came with, address. */
static const struct {
    const char *symbol;
    int version;
    void *address;
} symbols[] = {
    {"cuInit", 2000, cuInit},
    {"cuDriverGetVersion", 2020, cuDriverGetVersion},
    {"cuGetErrorName", 6000, cuGetErrorName},
    {"cuGetErrorString", 6000, cuGetErrorString},
    {"cuDeviceGetCount", 2000, cuDeviceGetCount},
    {"cuDeviceGet", 2000, cuDeviceGet},
    {"cuDeviceGetName", 2000, cuDeviceGetName},
    {"cuDeviceGetAttribute", 2000, cuDeviceGetAttribute},
    {"cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain},
    {"cuCtxGetCurrent", 4000, cuCtxGetCurrent},
    {"cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2},
    {"cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2},
    {"cuPointerGetAttribute", 4000, cuPointerGetAttribute},
    {"cuThreadExchangeStreamCaptureMode", 10010, cuThreadExchangeStreamCaptureMode},
    {"cuLibraryLoadData", 12000, cuLibraryLoadData},
    {"cuLibraryGetKernel", 12000, cuLibraryGetKernel},
    {"cuKernelGetFunction", 12000, cuKernelGetFunction},
    {"cuKernelSetAttribute", 12000, cuKernelSetAttribute},
    {"cuLaunchKernelEx", 11060, cuLaunchKernelEx},
    {"cuTensorMapEncodeTiled", 12000, cuTensorMapEncodeTiled},
    {"cuMemAllocAsync", 11020, cuMemAllocAsync},
    {"cuMemFreeAsync", 11020, cuMemFreeAsync},
    {"cuMemAlloc", 3020, cuMemAlloc_v2},
    {"cuMemFree", 3020, cuMemFree_v2},
    {"cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2},
    {"cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2},
    {"cuStreamIsCapturing", 10000, cuStreamIsCapturing},
    {"cuStreamGetCaptureInfo", 11030, cuStreamGetCaptureInfo_v2},
    {"cuUserObjectCreate", 11030, cuUserObjectCreate},
    {"cuGraphRetainUserObject", 11030, cuGraphRetainUserObject},
    {"cuStreamSynchronize", 2000, cuStreamSynchronize},
    {"cuStreamWaitEvent", 3020, cuStreamWaitEvent},
    {"cuEventCreate", 2000, cuEventCreate},
    {"cuEventDestroy", 4000, cuEventDestroy_v2},
    {"cuEventRecord", 2000, cuEventRecord},
    {"cuEventQuery", 2000, cuEventQuery},
    {"cuEventSynchronize", 2000, cuEventSynchronize},
    {"cuEventElapsedTime", 2000, cuEventElapsedTime},
};

/* Only the version of the prototype above is served: any other is a caller that would call it wrongly. */
API CUresult cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *status) {
    *address = NULL;
    if (status)
        *status = 1;
    if (version > driver_version || flags != PROC_LEGACY_STREAM)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < hidden_count; i++)
        if (!strcmp(hidden[i], symbol))
            return CUDA_ERROR_NOT_FOUND;
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        if (strcmp(symbols[i].symbol, symbol) || symbols[i].version != version)
            continue;
        *address = symbols[i].address;
        if (status)
            *status = 0;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}
