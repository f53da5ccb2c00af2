/* Loads kernels from the embedded images at their first launch and launches them. */
#include "launch.h"

#include "tma.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* ---- loading ------------------------------------------------------------------------------------------------- */

/* Filled under load_lock and read without it: a device's function is there once its attributes are set. Launching by
 * function takes the driver a tenth less time than by kernel. */
static _Atomic(CUfunction) functions[TCG_SLOT_COUNT][TCG_MAX_DEVICES];
static CUkernel kernels[TCG_SLOT_COUNT];     /* guarded by load_lock */
static CUlibrary libraries[TCG_IMAGE_COUNT]; /* guarded by load_lock; kept until the process ends */
static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

static int load(const tcg_scope *scope, int ordinal, const tcg_launch *launch, tcg_error *err) {
    const tcg_driver *driver = scope->driver;
    CUkernel *kernel = &kernels[launch->slot];
    CUfunction function;
    int rc = -1;
    const char *step = NULL;
    CUresult result = CUDA_SUCCESS;
    /* Loading allocates, which a capture of this or another thread would forbid. */
    CUstreamCaptureMode mode = tcg_capture_relax(driver);
    pthread_mutex_lock(&load_lock);
    if (atomic_load_explicit(&functions[launch->slot][ordinal],
                             memory_order_relaxed)) { /* another thread was first */
        rc = 0;
        goto done;
    }
    if (!libraries[launch->image]) {
        const void *data = tcg_image_data(launch->image);
        if (!data) {
            tcg_fail(err, TCG_ERR_UNSUPPORTED, 0, "%s: this build holds no image %s", launch->name,
                     tcg_image_names[launch->image]);
            goto done;
        }
        step = "cuLibraryLoadData";
        result = driver->cuLibraryLoadData(&libraries[launch->image], data, NULL, NULL, 0, NULL, NULL, 0);
        if (result != CUDA_SUCCESS) {
            libraries[launch->image] = NULL;
            goto done;
        }
    }
    if (!*kernel) {
        step = "cuLibraryGetKernel";
        result = driver->cuLibraryGetKernel(kernel, libraries[launch->image], launch->name);
        if (result != CUDA_SUCCESS) {
            *kernel = NULL;
            goto done;
        }
    }
    /* Brings the code into the context now, so that the launch itself has nothing left to load. */
    step = "cuKernelGetFunction";
    result = driver->cuKernelGetFunction(&function, *kernel);
    if (result != CUDA_SUCCESS)
        goto done;
    if (launch->smem_bytes > 0) {
        step = "cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)";
        result = driver->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch->smem_bytes,
                                              *kernel, scope->device);
        if (result != CUDA_SUCCESS)
            goto done;
    }
    atomic_store_explicit(&functions[launch->slot][ordinal], function, memory_order_release);
    rc = 0;
done:
    if (result != CUDA_SUCCESS)
        tcg_cuda_fail(err, driver, result,
                      "%s of %s (image %s for [%s]) on device %d of compute capability %d.%d, "
                      "driver for CUDA %d.%d",
                      step, launch->name, tcg_image_names[launch->image], tcg_image_archs(launch->image), ordinal,
                      scope->props->cc / 10, scope->props->cc % 10, driver->version / 1000,
                      driver->version % 1000 / 10);
    pthread_mutex_unlock(&load_lock);
    tcg_capture_restore(driver, mode);
    return rc;
}

/* ---- launching ----------------------------------------------------------------------------------------------- */

int tcg_launch_kernel(const tcg_scope *scope, int ordinal, const tcg_launch *launch, CUstream stream,
                      tcg_error *err) {
    CUlaunchAttribute attributes[2]; /* on the stack: every launch has its own */
    _Atomic(CUfunction) *place = &functions[launch->slot][ordinal];
    CUfunction function = atomic_load_explicit(place, memory_order_acquire);
    if (!function) {
        if (load(scope, ordinal, launch, err))
            return -1;
        function = atomic_load_explicit(place, memory_order_relaxed);
    }
    CUlaunchConfig config = {.gridDimX = launch->grid,
                             .gridDimY = 1,
                             .gridDimZ = 1,
                             .blockDimX = (unsigned)launch->threads,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .sharedMemBytes = (unsigned)launch->smem_bytes,
                             .hStream = stream,
                             .attrs = attributes};
    if (launch->cluster > 1) {
        attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[config.numAttrs].value.clusterDim.x = (unsigned)launch->cluster;
        attributes[config.numAttrs].value.clusterDim.y = 1;
        attributes[config.numAttrs].value.clusterDim.z = 1;
        config.numAttrs++;
    }
    /* Its blocks may start, and set themselves up, while the last ones before it end. Proven on Hopper; other parts may run
     * the code of an architecture without the instruction. Streams capture it from CUDA 12.3 on. */
    if (launch->waits && scope->props->cc == 90 && scope->driver->version >= 12030) {
        attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[config.numAttrs].value.programmaticStreamSerializationAllowed = 1;
        config.numAttrs++;
    }
    void *parameters[1] = {(void *)launch->args};
    CUresult result = scope->driver->cuLaunchKernelEx(&config, function, parameters, NULL);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, scope->driver, result,
                             "launching %s on device %d, grid %u, block %d, %d bytes of "
                             "shared memory",
                             launch->name, ordinal, launch->grid, launch->threads, launch->smem_bytes);
    return 0;
}

/* The kernel's argument with its tensor maps, of this thread's last launches: loops come back to the same addresses, and a
 * launch copies its argument. Encoding takes a fifth of a microsecond. */
static const tcg_tma_args *tma_args(const tcg_scope *scope, const tcg_plan *plan, const tcg_gemm_args *args,
                                    tcg_error *err) {
    enum { SLOTS = 16 };
    static _Thread_local struct {
        tcg_tma_args args;
        const tcg_kernel *kernel; /* NULL: empty */
        int hands_over;
    } slots[SLOTS];
    const uintptr_t mixed = (uintptr_t)args->a + 3 * (uintptr_t)args->b + 5 * (uintptr_t)args->c;
    const size_t i = (mixed * 0x9E3779B97F4A7C15u >> 32) % SLOTS;
    if (slots[i].kernel == plan->kernel && slots[i].hands_over == plan->hands_over &&
        !memcmp(&slots[i].args.gemm, args, sizeof *args))
        return &slots[i].args;
    slots[i].kernel = NULL;
    if (tcg_tma_encode(scope->driver, plan->kernel, args, plan->hands_over, &slots[i].args, err))
        return NULL;
    slots[i].kernel = plan->kernel;
    slots[i].hands_over = plan->hands_over;
    return &slots[i].args;
}

int tcg_launch_gemm(const tcg_scope *scope, int ordinal, const tcg_plan *plan, const tcg_gemm_args *args,
                    CUstream stream, tcg_error *err) {
    const tcg_kernel *kernel = plan->kernel;
    tcg_launch launch = {.slot = plan->ptx ? TCG_KERNEL_COUNT + kernel->index : kernel->index,
                         .image = plan->ptx ? kernel->ptx_image : kernel->image,
                         .name = kernel->name,
                         .grid = plan->grid,
                         .threads = kernel->threads,
                         .smem_bytes = kernel->smem_bytes,
                         .args = args};
    launch.waits = tcg_families[kernel->family].waits;
    launch.cluster = kernel->cluster_m * kernel->cluster_n * kernel->cluster_k;
    if (tcg_families[kernel->family].tma) {
        launch.args = tma_args(scope, plan, args, err);
        if (!launch.args)
            return -1;
    }
    return tcg_launch_kernel(scope, ordinal, &launch, stream, err);
}
