/* Device memory that is ours, the order between streams, and what is released once a stream has got so far. */
#include "driver.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* ---- blocking calls ------------------------------------------------------------------------------------------ */

int tcg_upload(int device, void *dst, const void *src, size_t bytes, tcg_error *err) {
    tcg_scope scope;
    if (bytes == 0)
        return 0;
    if (tcg_scope_enter(device, &scope, err))
        return -1;
    CUresult result = scope.driver->cuMemcpyHtoD((CUdeviceptr)dst, src, bytes);
    tcg_scope_leave(&scope);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, scope.driver, result, "cuMemcpyHtoD of %zu bytes to device %d", bytes, device);
    return 0;
}

int tcg_download(int device, void *dst, const void *src, size_t bytes, tcg_error *err) {
    tcg_scope scope;
    if (bytes == 0)
        return 0;
    if (tcg_scope_enter(device, &scope, err))
        return -1;
    CUresult result = scope.driver->cuMemcpyDtoH(dst, (CUdeviceptr)src, bytes);
    tcg_scope_leave(&scope);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, scope.driver, result, "cuMemcpyDtoH of %zu bytes from device %d", bytes, device);
    return 0;
}

int tcg_synchronize(int device, uintptr_t stream, tcg_error *err) {
    tcg_scope scope;
    if (tcg_scope_enter(device, &scope, err))
        return -1;
    CUresult result = scope.driver->cuStreamSynchronize((CUstream)stream);
    tcg_scope_leave(&scope);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, scope.driver, result, "cuStreamSynchronize of stream %#zx on device %d",
                             (size_t)stream, device);
    return 0;
}

/* Whether the stream is being captured. An error where that cannot be told, as for the legacy stream while another
 * one is: nothing may be queued there then. */
static CUresult is_capturing(const tcg_driver *driver, uintptr_t stream, bool *capturing) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = driver->cuStreamIsCapturing((CUstream)stream, &status);
    *capturing = status != CU_STREAM_CAPTURE_STATUS_NONE;
    return result;
}

/* ---- memory -------------------------------------------------------------------------------------------------- */

/* Memory is allocated in the stream's order. Within a capture that would make it a node of the graph, gone after one
 * replay, so there it is plain memory: a result lives until it is freed, and what is freed within the capture, which
 * every replay will use again, belongs to the graph and goes with it. */
struct block {
    struct block *next;
    void *pointer;
    int device;
    uintptr_t stream;
    bool plain;
    int tries;
};

enum { FREE_TRIES = 64 }; /* then the block is given up: its context is gone */

/* Guarded by memory_lock, under which nothing is called. */
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *plain_blocks, *deferred;
static atomic_int plain_count, deferred_count;

static void push(struct block **list, atomic_int *count, struct block *block) {
    pthread_mutex_lock(&memory_lock);
    block->next = *list;
    *list = block;
    pthread_mutex_unlock(&memory_lock);
    atomic_fetch_add(count, 1);
}

/* Takes the pointer's block off the list of plain ones; NULL where it is not there. */
static struct block *take_plain(const void *pointer) {
    struct block *found = NULL;
    if (atomic_load(&plain_count) == 0)
        return NULL;
    pthread_mutex_lock(&memory_lock);
    for (struct block **at = &plain_blocks; *at; at = &(*at)->next) {
        if ((*at)->pointer == pointer) {
            found = *at;
            *at = found->next;
            atomic_fetch_sub(&plain_count, 1);
            break;
        }
    }
    pthread_mutex_unlock(&memory_lock);
    return found;
}

/* On a thread of the driver's, where its functions may not be called: a later call of ours frees the block. */
static void CUDA_CB on_graph_destroyed(void *block) { push(&deferred, &deferred_count, block); }

/* Gives the block to the graph that is being captured in its stream. */
static bool give_to_graph(const tcg_driver *driver, struct block *block) {
    CUstreamCaptureStatus status;
    cuuint64_t id;
    CUgraph graph = NULL;
    CUuserObject object = NULL;
    const CUgraphNode *nodes;
    size_t node_count;
    if (driver->cuStreamGetCaptureInfo((CUstream)block->stream, &status, &id, &graph, &nodes, &node_count) !=
            CUDA_SUCCESS ||
        status != CU_STREAM_CAPTURE_STATUS_ACTIVE ||
        driver->cuUserObjectCreate(&object, block, on_graph_destroyed, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC) !=
            CUDA_SUCCESS)
        return false;
    /* Where the graph does not take it, the block stays for good: its replays may use it. */
    driver->cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
    return true;
}

/* In a scope of the device, with captures relaxed. False: try again later. */
static bool try_free(const tcg_driver *driver, struct block *block) {
    bool capturing;
    CUresult result = is_capturing(driver, block->stream, &capturing);
    if ((result == CUDA_SUCCESS && capturing) || result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return false;
    if (block->plain)
        result = driver->cuMemFree((CUdeviceptr)block->pointer);
    else if (result == CUDA_SUCCESS)
        result = driver->cuMemFreeAsync((CUdeviceptr)block->pointer, (CUstream)block->stream);
    if (result == CUDA_ERROR_INVALID_HANDLE) /* the stream is gone; the legacy stream follows what it had left */
        block->stream = (uintptr_t)CU_STREAM_LEGACY;
    return result == CUDA_SUCCESS || result == CUDA_ERROR_DEINITIALIZED ||
           result == CUDA_ERROR_CONTEXT_IS_DESTROYED || ++block->tries >= FREE_TRIES;
}

static void free_deferred(void) {
    tcg_error ignored;
    if (atomic_load_explicit(&deferred_count, memory_order_relaxed) == 0)
        return;
    pthread_mutex_lock(&memory_lock);
    struct block *list = deferred;
    deferred = NULL;
    pthread_mutex_unlock(&memory_lock);
    while (list) {
        struct block *block = list;
        tcg_scope scope;
        list = block->next;
        atomic_fetch_sub(&deferred_count, 1);
        bool done = false;
        if (!tcg_scope_enter(block->device, &scope, &ignored)) {
            CUstreamCaptureMode mode = tcg_capture_relax(scope.driver);
            done = try_free(scope.driver, block);
            tcg_capture_restore(scope.driver, mode);
            tcg_scope_leave(&scope);
        } else {
            done = ++block->tries >= FREE_TRIES;
        }
        if (done)
            free(block);
        else
            push(&deferred, &deferred_count, block);
    }
}

int tcg_memory_alloc(int device, uintptr_t stream, size_t bytes, void **pointer, tcg_error *err) {
    tcg_scope scope;
    CUdeviceptr address = 0;
    bool capturing;
    struct block *block = NULL;
    int rc = -1;
    *pointer = NULL;
    if (bytes == 0)
        return 0;
    if (tcg_scope_enter(device, &scope, err))
        return -1;
    free_deferred();
    const tcg_driver *driver = scope.driver;
    CUstreamCaptureMode mode = tcg_capture_relax(driver);
    CUresult result = is_capturing(driver, stream, &capturing);
    if (result == CUDA_SUCCESS && capturing) {
        block = malloc(sizeof *block);
        if (!block) {
            tcg_fail(err, TCG_ERR_MEMORY, 0, "out of host memory");
            goto done;
        }
    }
    if (result == CUDA_SUCCESS)
        result =
            block ? driver->cuMemAlloc(&address, bytes) : driver->cuMemAllocAsync(&address, bytes, (CUstream)stream);
    if (result != CUDA_SUCCESS) {
        tcg_cuda_fail(err, driver, result, "allocating %zu bytes on device %d", bytes, device);
        goto done;
    }
    *pointer = (void *)address;
    if (block) {
        *block = (struct block){.pointer = *pointer, .device = device, .stream = stream, .plain = true};
        push(&plain_blocks, &plain_count, block);
        block = NULL;
    }
    rc = 0;
done:
    free(block);
    tcg_capture_restore(driver, mode);
    tcg_scope_leave(&scope);
    return rc;
}

void tcg_memory_free(int device, uintptr_t stream, void *pointer) {
    tcg_scope scope;
    tcg_error ignored;
    bool capturing;
    if (!pointer || !tcg_driver_peek()) /* a forked child has no claim on its parent's memory */
        return;
    free_deferred();
    struct block here = {.pointer = pointer, .device = device, .stream = stream}, *block = take_plain(pointer);
    if (tcg_scope_enter(device, &scope, &ignored)) {
        here.plain = block != NULL;
        if (block || (block = malloc(sizeof *block))) {
            *block = here;
            push(&deferred, &deferred_count, block);
        }
        return;
    }
    const tcg_driver *driver = scope.driver;
    CUstreamCaptureMode mode = tcg_capture_relax(driver);
    if (block) {
        block->stream = stream;
        if (is_capturing(driver, stream, &capturing) == CUDA_SUCCESS && capturing) {
            if (!give_to_graph(driver, block))
                push(&plain_blocks, &plain_count, block);
        } else if (try_free(driver, block)) {
            free(block);
        } else {
            push(&deferred, &deferred_count, block);
        }
    } else if (!try_free(driver, &here) && (block = malloc(sizeof *block))) {
        *block = here;
        push(&deferred, &deferred_count, block);
    }
    tcg_capture_restore(driver, mode);
    tcg_scope_leave(&scope);
}

/* ---- events -------------------------------------------------------------------------------------------------- */

/* An event, idle or waiting for the work that was in `stream` when it was recorded. */
struct mark {
    struct mark *next;
    CUevent event;
    int device;
    uintptr_t stream;
    void (*release)(void *);
    void *arg;
};

static pthread_mutex_t mark_lock = PTHREAD_MUTEX_INITIALIZER;
static struct mark *idle[TCG_MAX_DEVICES];             /* guarded by mark_lock, as are the next two */
static struct mark *waiting, **waiting_end = &waiting; /* in order of recording */
static atomic_int waiting_count;

/* In a scope of the device, with captures relaxed. */
static struct mark *take_mark(const tcg_driver *driver, int device, tcg_error *err) {
    pthread_mutex_lock(&mark_lock);
    struct mark *mark = idle[device];
    if (mark)
        idle[device] = mark->next;
    pthread_mutex_unlock(&mark_lock);
    if (mark)
        return mark;
    mark = calloc(1, sizeof *mark);
    if (!mark) {
        tcg_fail(err, TCG_ERR_MEMORY, 0, "out of host memory");
        return NULL;
    }
    mark->device = device;
    CUresult result = driver->cuEventCreate(&mark->event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS) {
        free(mark);
        tcg_cuda_fail(err, driver, result, "cuEventCreate on device %d", device);
        return NULL;
    }
    return mark;
}

static void give_mark(struct mark *mark) {
    pthread_mutex_lock(&mark_lock);
    mark->next = idle[mark->device];
    idle[mark->device] = mark;
    pthread_mutex_unlock(&mark_lock);
}

int tcg_stream_wait(int device, uintptr_t waiter, uintptr_t stream, tcg_error *err) {
    tcg_scope scope;
    int rc = -1;
    /* 0 and 1 are the same stream. */
    if ((waiter ? waiter : 1) == (stream ? stream : 1))
        return 0;
    if (tcg_scope_enter(device, &scope, err))
        return -1;
    const tcg_driver *driver = scope.driver;
    CUstreamCaptureMode mode = tcg_capture_relax(driver);
    struct mark *mark = take_mark(driver, device, err);
    if (mark) {
        const char *step = "cuEventRecord";
        CUresult result = driver->cuEventRecord(mark->event, (CUstream)stream);
        if (result == CUDA_SUCCESS) {
            step = "cuStreamWaitEvent";
            result = driver->cuStreamWaitEvent((CUstream)waiter, mark->event, 0);
        }
        if (result == CUDA_SUCCESS)
            rc = 0;
        else
            tcg_cuda_fail(err, driver, result, "making stream %#zx of device %d wait for stream %#zx: %s",
                          (size_t)waiter, device, (size_t)stream, step);
        /* The wait keeps the record it was given: the event is free again. */
        give_mark(mark);
    }
    tcg_capture_restore(driver, mode);
    tcg_scope_leave(&scope);
    return rc;
}

/* Moves what has been reached off the list of waiting marks. */
static struct mark *take_reached(const tcg_driver *driver) {
    struct mark *reached = NULL, **reached_end = &reached;
    enum { BUSY_MAX = 8 };
    struct {
        int device;
        uintptr_t stream;
    } busy[BUSY_MAX];
    int busy_count = 0, current = -1;
    tcg_scope scope;
    tcg_error ignored;
    CUstreamCaptureMode mode = tcg_capture_relax(driver);
    pthread_mutex_lock(&mark_lock);
    for (struct mark **at = &waiting; *at;) {
        struct mark *mark = *at;
        bool done = true, behind = false;
        /* A stream's marks are reached in order: one that is not stands for the rest. */
        for (int i = 0; i < busy_count; i++)
            behind |= busy[i].device == mark->device && busy[i].stream == mark->stream;
        if (!behind) {
            if (current != mark->device) {
                if (current >= 0)
                    tcg_scope_leave(&scope);
                current = tcg_scope_enter(mark->device, &scope, &ignored) ? -1 : mark->device;
            }
            /* An error (a dead context) means that nothing is running any more. */
            done = current < 0 || driver->cuEventQuery(mark->event) != CUDA_ERROR_NOT_READY;
            if (!done && busy_count < BUSY_MAX && mark->stream != (uintptr_t)CU_STREAM_PER_THREAD) {
                busy[busy_count].device = mark->device;
                busy[busy_count++].stream = mark->stream;
            }
        }
        if (behind || !done) {
            at = &mark->next;
            continue;
        }
        *at = mark->next;
        mark->next = NULL;
        *reached_end = mark;
        reached_end = &mark->next;
    }
    waiting_end = &waiting;
    while (*waiting_end)
        waiting_end = &(*waiting_end)->next;
    pthread_mutex_unlock(&mark_lock);
    if (current >= 0)
        tcg_scope_leave(&scope);
    tcg_capture_restore(driver, mode);
    return reached;
}

void tcg_release_poll(void) {
    const tcg_driver *driver = tcg_driver_peek();
    if (!driver)
        return;
    free_deferred();
    if (atomic_load(&waiting_count) == 0)
        return;
    /* Released outside the lock: what runs may come back here. */
    for (struct mark *mark = take_reached(driver); mark;) {
        struct mark *next = mark->next;
        void (*release)(void *) = mark->release;
        void *arg = mark->arg;
        atomic_fetch_sub(&waiting_count, 1);
        give_mark(mark);
        release(arg);
        mark = next;
    }
}

int tcg_release_after(int device, uintptr_t stream, void (*release)(void *), void *arg, tcg_error *err) {
    tcg_scope scope;
    bool capturing;
    int rc = -1;
    if (tcg_scope_enter(device, &scope, err))
        return -1;
    const tcg_driver *driver = scope.driver;
    CUstreamCaptureMode mode = tcg_capture_relax(driver);
    CUresult result = is_capturing(driver, stream, &capturing);
    struct mark *mark = NULL;
    if (result == CUDA_SUCCESS && capturing) {
        rc = 0;
    } else if ((mark = take_mark(driver, device, err))) {
        result = result == CUDA_SUCCESS ? driver->cuEventRecord(mark->event, (CUstream)stream) : result;
        if (result != CUDA_SUCCESS) {
            tcg_cuda_fail(err, driver, result, "cuEventRecord in stream %#zx of device %d", (size_t)stream, device);
            give_mark(mark);
        } else {
            mark->stream = stream;
            mark->release = release;
            mark->arg = arg;
            mark->next = NULL;
            pthread_mutex_lock(&mark_lock);
            *waiting_end = mark;
            waiting_end = &mark->next;
            pthread_mutex_unlock(&mark_lock);
            atomic_fetch_add(&waiting_count, 1);
            rc = 0;
        }
    }
    tcg_capture_restore(driver, mode);
    tcg_scope_leave(&scope);
    if (rc == 0 && !mark)
        release(arg);
    tcg_release_poll();
    return rc;
}
