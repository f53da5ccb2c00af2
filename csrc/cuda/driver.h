/* The CUDA driver, opened at run time: its symbols, errors, devices and contexts. Only csrc/cuda sees cuda.h. */
#ifndef TCG_DRIVER_H
#define TCG_DRIVER_H

#include <cuda.h>
#include <cudaTypedefs.h>

#include "gemm.h"

/* Every driver function that is called. X(name, version, required): the version is the one whose prototype
 * cudaTypedefs.h gives, and cuGetProcAddress is asked for exactly that one: a later one may take other arguments
 * under the same name. What is not required may be NULL. */
#define TCG_DRIVER_SYMBOLS(X)                      \
    X(cuInit, 2000, 1)                             \
    X(cuGetErrorName, 6000, 1)                     \
    X(cuGetErrorString, 6000, 1)                   \
    X(cuDeviceGetCount, 2000, 1)                   \
    X(cuDeviceGet, 2000, 1)                        \
    X(cuDeviceGetName, 2000, 1)                    \
    X(cuDeviceGetAttribute, 2000, 1)               \
    X(cuDevicePrimaryCtxRetain, 7000, 1)           \
    X(cuCtxGetCurrent, 4000, 1)                    \
    X(cuCtxPushCurrent, 4000, 1)                   \
    X(cuCtxPopCurrent, 4000, 1)                    \
    X(cuPointerGetAttribute, 4000, 1)              \
    X(cuThreadExchangeStreamCaptureMode, 10010, 1) \
    X(cuLibraryLoadData, 12000, 1)                 \
    X(cuLibraryGetKernel, 12000, 1)                \
    X(cuKernelGetFunction, 12000, 1)               \
    X(cuKernelSetAttribute, 12000, 1)              \
    X(cuLaunchKernelEx, 11060, 1)                  \
    X(cuTensorMapEncodeTiled, 12000, 0)            \
    X(cuMemAllocAsync, 11020, 1)                   \
    X(cuMemFreeAsync, 11020, 1)                    \
    X(cuMemAlloc, 3020, 1)                         \
    X(cuMemFree, 3020, 1)                          \
    X(cuMemcpyHtoD, 3020, 1)                       \
    X(cuMemcpyDtoH, 3020, 1)                       \
    X(cuStreamIsCapturing, 10000, 1)               \
    X(cuStreamGetCaptureInfo, 11030, 1)            \
    X(cuUserObjectCreate, 11030, 1)                \
    X(cuGraphRetainUserObject, 11030, 1)           \
    X(cuStreamSynchronize, 2000, 1)                \
    X(cuStreamWaitEvent, 3020, 1)                  \
    X(cuEventCreate, 2000, 1)                      \
    X(cuEventDestroy, 4000, 1)                     \
    X(cuEventRecord, 2000, 1)                      \
    X(cuEventQuery, 2000, 1)                       \
    X(cuEventSynchronize, 2000, 1)                 \
    X(cuEventElapsedTime, 2000, 1)

typedef struct tcg_driver {
#define X(name, version, required) PFN_##name##_v##version name;
    TCG_DRIVER_SYMBOLS(X)
#undef X
    int version; /* CUDA version * 1000, as cuDriverGetVersion counts */
    int device_count;
} tcg_driver;

/* The driver, opened and initialised at the first call; NULL with err filled. Takes no lock once that is done. */
const tcg_driver *tcg_driver_get(tcg_error *err);

/* The driver where it is already in use by this process (not before the first tcg_driver_get, not in a forked child);
 * for what must never fail. */
const tcg_driver *tcg_driver_peek(void);

/* Fills err with the result's name and text, after what was being done. Returns -1. */
int tcg_cuda_fail(tcg_error *err, const tcg_driver *driver, CUresult result, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

enum { TCG_MAX_DEVICES = 64 };

/* A device's primary context, made current where it is not. Every enter that returned 0 has its leave. */
typedef struct tcg_scope {
    const tcg_driver *driver;
    const tcg_device_props *props;
    CUdevice device;
    bool pushed;
} tcg_scope;

int tcg_scope_enter(int ordinal, tcg_scope *scope, tcg_error *err);
void tcg_scope_leave(tcg_scope *scope);

/* Between these two, the calling thread may make calls that a capture of another stream would forbid. */
CUstreamCaptureMode tcg_capture_relax(const tcg_driver *driver);
void tcg_capture_restore(const tcg_driver *driver, CUstreamCaptureMode mode);

#endif
