/* Opens libcuda.so.1 (or $TCGEMM_LIBCUDA) once, and keeps what is asked of a device once: properties and context. */
#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- errors -------------------------------------------------------------------------------------------------- */

int tcg_fail(tcg_error *err, tcg_error_kind kind, int code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    err->kind = kind;
    err->code = code;
    vsnprintf(err->text, sizeof err->text, format, list);
    va_end(list);
    return -1;
}

int tcg_cuda_fail(tcg_error *err, const tcg_driver *driver, CUresult result, const char *format, ...) {
    char what[320];
    const char *name = NULL, *text = NULL;
    va_list list;
    va_start(list, format);
    vsnprintf(what, sizeof what, format, list);
    va_end(list);
    if (driver->cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
        name = "an unknown error";
    if (driver->cuGetErrorString(result, &text) != CUDA_SUCCESS || !text)
        text = "no text";
    tcg_error_kind kind = result == CUDA_ERROR_OUT_OF_MEMORY ? TCG_ERR_MEMORY : TCG_ERR_CUDA;
    return tcg_fail(err, kind, (int)result, "%s: %s (%s)", what, name, text);
}

/* ---- opening ------------------------------------------------------------------------------------------------- */

/* What the first call leaves behind. `ready` is written last and read first; a failure stays, told each time. */
static tcg_driver the_driver;
static const tcg_driver *_Atomic ready;
static tcg_error failure; /* guarded by init_lock */
static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool initialised; /* cuInit has been called: a child of fork() cannot use CUDA */
static atomic_bool forked;

/* In the child. A flag that is read before any lock is taken; and where CUDA was not in use yet, the child may start
 * anew even though another thread of its parent was about to. */
static void on_fork(void) {
    if (atomic_load_explicit(&initialised, memory_order_relaxed))
        atomic_store_explicit(&forked, true, memory_order_relaxed);
    else
        pthread_mutex_init(&init_lock, NULL);
}

static int watch_trouble; /* errno of pthread_atfork */
__attribute__((constructor)) static void watch_forks(void) { watch_trouble = pthread_atfork(NULL, NULL, on_fork); }

static int fail_forked(tcg_error *err) {
    return tcg_fail(err, TCG_ERR_FORKED, CUDA_ERROR_NOT_INITIALIZED,
                    "CUDA was initialised before fork() and cannot be used in the child: start workers with the "
                    "'spawn' or 'forkserver' method, or make the first CUDA call after the fork");
}

static int open_driver(tcg_driver *driver, tcg_error *err) {
    const char *path = secure_getenv("TCGEMM_LIBCUDA");
    path = path && *path ? path : "libcuda.so.1";
    void *library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (!library)
        return tcg_fail(err, TCG_ERR_NO_DRIVER, 0,
                        "cannot open the NVIDIA driver library (%s): is the NVIDIA driver "
                        "installed? Host arrays need none",
                        dlerror());
    PFN_cuGetProcAddress_v12000 get_address =
        (PFN_cuGetProcAddress_v12000)(uintptr_t)dlsym(library, "cuGetProcAddress_v2");
    PFN_cuDriverGetVersion_v2020 get_version =
        (PFN_cuDriverGetVersion_v2020)(uintptr_t)dlsym(library, "cuDriverGetVersion");
    driver->version = 0;
    if (get_version)
        get_version(&driver->version);
    if (!get_address)
        return tcg_fail(err, TCG_ERR_NO_DRIVER, 0,
                        "the NVIDIA driver (%s) is too old: found CUDA %d.%d, expected 12.0 "
                        "or later",
                        path, driver->version / 1000, driver->version % 1000 / 10);
    const struct {
        const char *name;
        int version;
        bool required;
        void *slot;
    } symbols[] = {
#define X(name, version, required) {#name, version, required, &driver->name},
        TCG_DRIVER_SYMBOLS(X)
#undef X
    };
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *address = NULL;
        /* With the per-thread entry points stream 0 would mean another stream than the caller's. */
        CUresult result =
            get_address(symbols[i].name, &address, symbols[i].version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, NULL);
        if (symbols[i].required && (result != CUDA_SUCCESS || !address))
            return tcg_fail(err, TCG_ERR_NO_DRIVER, (int)result,
                            "the NVIDIA driver (%s, CUDA %d.%d) has no %s of CUDA "
                            "%d.%d: expected a driver for CUDA 12.0 or later",
                            path, driver->version / 1000, driver->version % 1000 / 10, symbols[i].name,
                            symbols[i].version / 1000, symbols[i].version % 1000 / 10);
        memcpy(symbols[i].slot, &address, sizeof address);
    }

    if (watch_trouble)
        return tcg_fail(err, TCG_ERR_MEMORY, 0, "pthread_atfork: %s", strerror(watch_trouble));
    atomic_store(&initialised, true);
    CUresult result = driver->cuInit(0);
    if (result == CUDA_SUCCESS)
        result = driver->cuDeviceGetCount(&driver->device_count);
    if (result == CUDA_SUCCESS && driver->device_count < 1)
        result = CUDA_ERROR_NO_DEVICE;
    if (result == CUDA_SUCCESS) {
        if (driver->device_count > TCG_MAX_DEVICES)
            driver->device_count = TCG_MAX_DEVICES;
        return 0;
    }
    atomic_store(&initialised, false);
    if (result == CUDA_ERROR_NOT_INITIALIZED) /* what cuInit says in a child whose parent used CUDA through others */
        return fail_forked(err);
    tcg_cuda_fail(err, driver, result, "the NVIDIA driver (%s) finds no usable GPU: cuInit", path);
    err->kind = TCG_ERR_NO_DRIVER;
    return -1;
}

static const tcg_driver *open_once(tcg_error *err) {
    const tcg_driver *driver = NULL;
    pthread_mutex_lock(&init_lock);
    driver = atomic_load_explicit(&ready, memory_order_relaxed);
    if (!driver) {
        if (failure.kind == TCG_OK && !open_driver(&the_driver, &failure)) {
            driver = &the_driver;
            atomic_store_explicit(&ready, driver, memory_order_release);
        } else {
            *err = failure;
        }
    }
    pthread_mutex_unlock(&init_lock);
    return driver;
}

const tcg_driver *tcg_driver_get(tcg_error *err) {
    if (atomic_load_explicit(&forked, memory_order_relaxed)) {
        fail_forked(err);
        return NULL;
    }
    const tcg_driver *driver = atomic_load_explicit(&ready, memory_order_acquire);
    return driver ? driver : open_once(err);
}

const tcg_driver *tcg_driver_peek(void) {
    if (atomic_load_explicit(&forked, memory_order_relaxed))
        return NULL;
    return atomic_load_explicit(&ready, memory_order_acquire);
}

CUstreamCaptureMode tcg_capture_relax(const tcg_driver *driver) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver->cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

void tcg_capture_restore(const tcg_driver *driver, CUstreamCaptureMode mode) {
    driver->cuThreadExchangeStreamCaptureMode(&mode);
}

/* ---- devices ------------------------------------------------------------------------------------------------- */

/* Written under device_lock, each flag last; read without it. */
static struct device {
    atomic_bool described;
    tcg_device_props props;
    CUdevice handle;
    _Atomic(CUcontext) context; /* the primary one, retained and kept until the process ends */
} devices[TCG_MAX_DEVICES];
static pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;

static int describe(const tcg_driver *driver, int ordinal, struct device *device, tcg_error *err) {
    int major = 0, minor = 0;
    tcg_device_props props = {0};
    const struct {
        CUdevice_attribute attribute;
        int *value;
    } asked[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &props.sm_count},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &props.smem_block_bytes},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, &props.smem_sm_bytes},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &props.l2_bytes},
    };
    CUresult result = driver->cuDeviceGet(&device->handle, ordinal);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, driver, result, "cuDeviceGet(%d)", ordinal);
    result = driver->cuDeviceGetName(props.name, (int)sizeof props.name, device->handle);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, driver, result, "cuDeviceGetName of device %d", ordinal);
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        result = driver->cuDeviceGetAttribute(asked[i].value, asked[i].attribute, device->handle);
        if (result != CUDA_SUCCESS)
            return tcg_cuda_fail(err, driver, result, "cuDeviceGetAttribute(%d) of device %d",
                                 (int)asked[i].attribute, ordinal);
    }
    props.cc = 10 * major + minor;
    device->props = props;
    return 0;
}

static int find_device(const tcg_driver *driver, int ordinal, struct device **found, tcg_error *err) {
    if (ordinal < 0 || ordinal >= driver->device_count)
        return tcg_fail(err, TCG_ERR_VALUE, 0, "found device %d, expected 0 to %d", ordinal,
                        driver->device_count - 1);
    struct device *device = &devices[ordinal];
    int rc = 0;
    if (!atomic_load_explicit(&device->described, memory_order_acquire)) {
        pthread_mutex_lock(&device_lock);
        if (!atomic_load_explicit(&device->described, memory_order_relaxed)) {
            rc = describe(driver, ordinal, device, err);
            if (!rc)
                atomic_store_explicit(&device->described, true, memory_order_release);
        }
        pthread_mutex_unlock(&device_lock);
    }
    *found = device;
    return rc;
}

int tcg_device_count(int *count, tcg_error *err) {
    const tcg_driver *driver = tcg_driver_get(err);
    if (!driver)
        return -1;
    *count = driver->device_count;
    return 0;
}

int tcg_device(int ordinal, const tcg_device_props **props, tcg_error *err) {
    struct device *device;
    const tcg_driver *driver = tcg_driver_get(err);
    if (!driver || find_device(driver, ordinal, &device, err))
        return -1;
    *props = &device->props;
    return 0;
}

int tcg_pointer_device(const void *pointer, int *ordinal, tcg_error *err) {
    const tcg_driver *driver = tcg_driver_get(err);
    int found = -1;
    if (!driver)
        return -1;
    CUresult result =
        driver->cuPointerGetAttribute(&found, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (CUdeviceptr)pointer);
    if (result == CUDA_ERROR_INVALID_CONTEXT) { /* a driver that wants one current, whichever */
        tcg_scope scope;
        if (tcg_scope_enter(0, &scope, err))
            return -1;
        result = driver->cuPointerGetAttribute(&found, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (CUdeviceptr)pointer);
        tcg_scope_leave(&scope);
    }
    if (result == CUDA_ERROR_INVALID_VALUE) /* not CUDA's */
        found = -1;
    else if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, driver, result, "cuPointerGetAttribute of %p", pointer);
    *ordinal = found;
    return 0;
}

/* ---- contexts ------------------------------------------------------------------------------------------------ */

static CUcontext retain(const tcg_driver *driver, int ordinal, struct device *device, tcg_error *err) {
    pthread_mutex_lock(&device_lock);
    CUcontext context = atomic_load_explicit(&device->context, memory_order_relaxed);
    if (!context) {
        /* May create the context, which a capture in another thread would forbid. */
        CUstreamCaptureMode mode = tcg_capture_relax(driver);
        CUresult result = driver->cuDevicePrimaryCtxRetain(&context, device->handle);
        tcg_capture_restore(driver, mode);
        if (result == CUDA_SUCCESS) {
            atomic_store_explicit(&device->context, context, memory_order_release);
        } else {
            context = NULL;
            tcg_cuda_fail(err, driver, result, "cuDevicePrimaryCtxRetain of device %d", ordinal);
        }
    }
    pthread_mutex_unlock(&device_lock);
    return context;
}

int tcg_scope_enter(int ordinal, tcg_scope *scope, tcg_error *err) {
    struct device *device;
    CUcontext current = NULL;
    const tcg_driver *driver = tcg_driver_get(err);
    if (!driver || find_device(driver, ordinal, &device, err))
        return -1;
    CUcontext context = atomic_load_explicit(&device->context, memory_order_acquire);
    if (!context && !(context = retain(driver, ordinal, device, err)))
        return -1;
    scope->driver = driver;
    scope->props = &device->props;
    scope->device = device->handle;
    scope->pushed = false;
    /* The handle and not the device's number: another context on the same device is as wrong as another device's. */
    CUresult result = driver->cuCtxGetCurrent(&current);
    if (result != CUDA_SUCCESS)
        return tcg_cuda_fail(err, driver, result, "cuCtxGetCurrent");
    if (current != context) {
        result = driver->cuCtxPushCurrent(context);
        if (result != CUDA_SUCCESS)
            return tcg_cuda_fail(err, driver, result, "cuCtxPushCurrent of device %d", ordinal);
        scope->pushed = true;
    }
    return 0;
}

void tcg_scope_leave(tcg_scope *scope) {
    CUcontext popped;
    if (scope->pushed)
        scope->driver->cuCtxPopCurrent(&popped);
    scope->pushed = false;
}
