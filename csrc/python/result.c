/* Results and workspace in the framework of `a`: allocated by it, on its device, with the launch's stream current. */
#include "tensor.h"

#include <string.h>

/* ---- a framework's current device and stream ------------------------------------------------------------------- */

static int enter(tcg_state *state, tcg_current *current, PyObject *manager /* steals; NULL with an exception */) {
    manager = tcg_enter(state, manager);
    if (!manager)
        return -1;
    current->managers[current->count++] = manager;
    return 0;
}

int tcg_current_leave(tcg_state *state, tcg_current *current) {
    int failed = 0;
    if (!current->count)
        return 0;
    tcg_exception saved;
    tcg_exception_save(&saved);
    while (current->count) {
        PyObject *manager = current->managers[--current->count];
        PyObject *left = PyObject_CallMethodObjArgs(manager, state->str___exit__, Py_None, Py_None, Py_None, NULL);
        if (!left) {
            failed = -1;
            if (tcg_exception_is_set(&saved) || current->count)
                PyErr_WriteUnraisable(manager);
        }
        Py_XDECREF(left);
        Py_DECREF(manager);
    }
    if (tcg_exception_is_set(&saved))
        tcg_exception_restore(&saved);
    return failed && PyErr_Occurred() ? -1 : 0;
}

static PyObject *cupy_call(const char *name, long argument) {
    PyObject *cuda = PyImport_ImportModule("cupy.cuda"), *result = NULL;
    if (cuda)
        result = PyObject_CallMethod(cuda, name, "l", argument);
    Py_XDECREF(cuda);
    return result;
}

int tcg_current_device(tcg_state *state, const tcg_tensor *a, int device, tcg_current *current) {
    long ordinal = device;
    if (a->type->framework == TCG_FRAMEWORK_CUPY) {
        if (tcg_cupy_device(state, &ordinal))
            return -1;
        if (ordinal != device)
            return enter(state, current, cupy_call("Device", device));
    } else if (a->type->framework == TCG_FRAMEWORK_NUMBA) {
        PyObject *cuda = PyImport_ImportModule("numba.cuda"), *context = NULL, *where = NULL, *number = NULL,
                 *gpus = NULL;
        int failed = -1;
        if (cuda && (context = PyObject_CallMethodNoArgs(cuda, state->str_current_context)) &&
            (where = PyObject_GetAttr(context, state->str_device)) &&
            (number = PyObject_GetAttr(where, state->str_id)))
            ordinal = PyLong_AsLong(number);
        if (!PyErr_Occurred()) {
            if (ordinal == device)
                failed = 0;
            else if ((gpus = PyObject_GetAttr(cuda, state->str_gpus)))
                failed = enter(state, current, PySequence_GetItem(gpus, device));
        }
        Py_XDECREF(cuda);
        Py_XDECREF(context);
        Py_XDECREF(where);
        Py_XDECREF(number);
        Py_XDECREF(gpus);
        return failed;
    }
    return 0;
}

int tcg_current_stream(tcg_state *state, const tcg_tensor *a, int device, uintptr_t stream, tcg_current *current) {
    PyObject *cuda = NULL, *object = NULL, *manager = NULL;
    int failed = -1;
    if (a->type->framework == TCG_FRAMEWORK_TORCH) {
        if (!(cuda = PyImport_ImportModule("torch.cuda")))
            goto done;
        if (stream == TCG_STREAM_LEGACY)
            object = PyObject_CallMethod(cuda, "default_stream", "i", device);
        else
            object = PyObject_CallMethod(cuda, "ExternalStream", "Ki", (unsigned long long)stream, device);
        manager = object ? PyObject_CallMethodOneArg(cuda, state->str_stream, object) : NULL;
    } else if (a->type->framework == TCG_FRAMEWORK_CUPY) {
        if (!(cuda = PyImport_ImportModule("cupy.cuda")))
            goto done;
        if (stream == TCG_STREAM_LEGACY || stream == TCG_STREAM_PER_THREAD) {
            if ((object = PyObject_GetAttr(cuda, state->str_Stream)))
                manager = PyObject_GetAttr(object, stream == TCG_STREAM_LEGACY ? state->str_null : state->str_ptds);
        } else {
            manager = PyObject_CallMethod(cuda, "ExternalStream", "K", (unsigned long long)stream);
        }
    } else {
        return 0;
    }
    failed = enter(state, current, manager);
done:
    Py_XDECREF(cuda);
    Py_XDECREF(object);
    return failed;
}

int tcg_framework_stream(tcg_state *state, const tcg_tensor *a, int device, const tcg_current *current,
                         uintptr_t *stream) {
    PyObject *get, *number = NULL;
    *stream = a->stream ? a->stream : TCG_STREAM_LEGACY;
    if (a->type->protocol == TCG_PROTOCOL_EXCHANGE)
        return tcg_exchange_stream(a->type->api, device, stream);
    if (a->type->framework == TCG_FRAMEWORK_TORCH) {
        PyObject *argument = PyLong_FromLong(device);
        get = TCG_CACHED(&state->torch_raw_stream, "torch", state->str__C, state->str__cuda_getCurrentRawStream);
        number = get && argument ? PyObject_CallOneArg(get, argument) : NULL;
        Py_XDECREF(argument);
    } else if (a->type->framework == TCG_FRAMEWORK_CUPY &&
               (a->type->protocol == TCG_PROTOCOL_CUPY || current->count)) {
        /* What the interface told is the current stream of the device that was current then. */
        return tcg_cupy_stream(state, stream);
    } else {
        return 0;
    }
    if (!number)
        return -1;
    *stream = (uintptr_t)PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (PyErr_Occurred())
        return -1;
    if (*stream == 0)
        *stream = TCG_STREAM_LEGACY;
    return 0;
}

/* ---- results --------------------------------------------------------------------------------------------------- */

static PyObject *torch_dtype(tcg_state *state, int dtype) {
    switch (dtype) {
    case TCG_f16:
        return TCG_CACHED(&state->torch_float16, "torch", state->str_float16);
    case TCG_bf16:
        return TCG_CACHED(&state->torch_bfloat16, "torch", state->str_bfloat16);
    default:
        return TCG_CACHED(&state->torch_float32, "torch", state->str_float32);
    }
}

/* Up to this size (its kSmallSize) torch's caching allocator takes memory from buffers of 2 MiB and calls cudaMalloc
 * for a new buffer alone. new_empty does so without the GIL, _empty_strided_cuda with it: a cudaMalloc that waits for a
 * stream in which a host function waits for the GIL never returns. Here that is rare, not impossible; code compiled by
 * torch runs the risk at every size. Products with larger results seldom wait for the host. */
#define TORCH_SMALL_BYTES (1 << 20)

/* By the function that code compiled by torch allocates with, in a third of new_empty's time: past the dispatcher, from
 * the same allocator. 0: that is left to new_empty, for the strides do not fit, the result is not small, another device
 * is current, a mode of torch wants to see what is done, or this release lacks a function. */
static int torch_new_at_once(tcg_state *state, PyObject *dtype, int64_t bytes, int ndim, const int64_t *shape,
                             int device, PyObject *size, PyObject **result) {
    const bool host = device == TCG_HOST;
    PyObject *empty, *dispatch, *function, *strides;
    int64_t steps[TCG_MAX_NDIM];
    long dispatch_modes, function_mode, current = device;
    if (!tcg_packed_strides(ndim, shape, 1, steps) || (!host && bytes > TORCH_SMALL_BYTES))
        return 0;
    empty = TCG_CACHED_OR_NONE(host ? &state->torch_empty_cpu : &state->torch_empty_cuda, "torch", state->str__C,
                               state->str__dynamo, state->str_guards,
                               host ? state->str__empty_strided_cpu : state->str__empty_strided_cuda);
    dispatch = TCG_CACHED_OR_NONE(&state->torch_dispatch_modes, "torch", state->str__C,
                                  state->str__len_torch_dispatch_stack);
    function = TCG_CACHED_OR_NONE(&state->torch_function_mode, "torch", state->str__C,
                                  state->str__is_torch_function_mode_enabled);
    if (!empty || !dispatch || !function)
        return -1;
    if (empty == Py_None || dispatch == Py_None || function == Py_None)
        return 0;
    if (tcg_call_for_long(dispatch, &dispatch_modes) || tcg_call_for_long(function, &function_mode) ||
        (!host && tcg_torch_device(state, &current)))
        return -1;
    if (dispatch_modes || function_mode || current != device)
        return 0;
    strides = tcg_shape_tuple(ndim, steps);
    if (strides) {
        PyObject *arguments[] = {size, strides, dtype};
        *result = PyObject_Vectorcall(empty, arguments, 3, NULL);
        Py_DECREF(strides);
    }
    return *result ? 1 : -1;
}

/* A packed torch.Tensor on the device of `a`; *result is NULL before. */
static int torch_new(tcg_state *state, const tcg_tensor *a, PyObject *dtype, int64_t bytes, int ndim,
                     const int64_t *shape, int device, PyObject **result) {
    PyObject *size = dtype ? tcg_shape_tuple(ndim, shape) : NULL, *empty, *where = NULL;
    if (!size)
        return -1;
    if (a->type->plain) {
        if (torch_new_at_once(state, dtype, bytes, ndim, shape, device, size, result) == 0) {
            PyObject *arguments[] = {a->object, size, dtype};
            *result = PyObject_VectorcallMethod(state->str_new_empty, arguments, 2, state->kwnames_dtype);
        }
    } else { /* a subclass's new_empty would make another of its kind */
        empty = TCG_CACHED(&state->torch_empty, "torch", state->str_empty);
        if (empty && (where = PyObject_GetAttr(a->object, state->str_device))) {
            PyObject *arguments[] = {size, dtype, where};
            *result = PyObject_Vectorcall(empty, arguments, 1, state->kwnames_dtype_device);
        }
        Py_XDECREF(where);
    }
    Py_DECREF(size);
    return *result ? 0 : -1;
}

/* Where the new tensor's memory is. Modes of torch can put another kind of tensor in its place. */
static int torch_pointer(tcg_state *state, const tcg_tensor *a, PyObject *object, void **data) {
    PyObject *tensor = TCG_CACHED(&state->torch_tensor, "torch", state->str_Tensor), *number;
    if (!tensor)
        return -1;
    if ((PyObject *)Py_TYPE(object) != tensor) {
        PyErr_Format(PyExc_TypeError,
                     "torch made a %s where tcgemm needs memory; call it outside of traces and fake-tensor modes",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (a->type->api && a->type->api->dltensor_from_py_object_no_sync) {
        DLTensor dl;
        if (a->type->api->dltensor_from_py_object_no_sync(object, &dl))
            return -1;
        *data = (void *)((uintptr_t)dl.data + dl.byte_offset);
        return 0;
    }
    number = PyObject_CallMethod(object, "data_ptr", NULL);
    if (!number)
        return -1;
    *data = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int torch_result(tcg_state *state, const tcg_tensor *a, int dtype, int ndim, const int64_t *shape, int device,
                        void **data, PyObject **result) {
    const int64_t bytes = tcg_shape_count(ndim, shape) * tcg_dtype_bytes[dtype];
    if (torch_new(state, a, torch_dtype(state, dtype), bytes, ndim, shape, device, result) ||
        torch_pointer(state, a, *result, data))
        return -1;
    if (bytes && !*data) {
        PyErr_SetString(PyExc_TypeError,
                        "torch made a tensor without memory; call tcgemm outside of traces and fake-tensor modes");
        return -1;
    }
    return 0;
}

static int cupy_pointer(tcg_state *state, PyObject *object, void **data) {
    PyObject *memory = PyObject_GetAttr(object, state->str_data);
    PyObject *number = memory ? PyObject_GetAttr(memory, state->str_ptr) : NULL;
    if (number)
        *data = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(number);
    Py_XDECREF(memory);
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* The dtype of `a` itself where the result has it, so that bfloat16 needs no import. */
static PyObject *array_dtype(tcg_state *state, const tcg_tensor *a, int dtype) {
    if (dtype == a->dtype && (a->type->framework == TCG_FRAMEWORK_CUPY || a->type->framework == TCG_FRAMEWORK_NUMPY ||
                              a->type->framework == TCG_FRAMEWORK_NUMBA))
        return PyObject_GetAttr(a->object, state->str_dtype);
    return Py_XNewRef(tcg_numpy_dtype(state, dtype));
}

/* cupy.ndarray's own constructor is Python code around these two steps and takes twice their time. Elsewhere (other
 * releases) it is called. */
static PyObject *cupy_new(tcg_state *state, PyObject *ndarray, PyObject *size, PyObject *dtype) {
    PyObject *base = TCG_CACHED_OR_NONE(&state->cupy_ndarray_base, "cupy", state->str__core, state->str_core,
                                        state->str__ndarray_base);
    PyObject *init = TCG_CACHED_OR_NONE(&state->cupy_ndarray_init, "cupy", state->str__core, state->str_core,
                                        state->str__ndarray_base, state->str__init);
    PyObject *arguments[] = {NULL, size, dtype}, *nothing, *array, *none;
    if (!base || !init)
        return NULL;
    if (init == Py_None || !PyType_Check(base) || !PyType_IsSubtype((PyTypeObject *)ndarray, (PyTypeObject *)base))
        return PyObject_Vectorcall(ndarray, arguments + 1, 2, NULL);
    nothing = PyTuple_New(0);
    array = nothing ? ((PyTypeObject *)base)->tp_new((PyTypeObject *)ndarray, nothing, NULL) : NULL;
    Py_XDECREF(nothing);
    if (!array)
        return NULL;
    arguments[0] = array;
    none = PyObject_Vectorcall(init, arguments, 3, NULL);
    if (!none)
        Py_CLEAR(array);
    Py_XDECREF(none);
    return array;
}

static int cupy_result(tcg_state *state, PyObject *dtype, int ndim, const int64_t *shape, void **data,
                       PyObject **result) {
    PyObject *ndarray = TCG_CACHED(&state->cupy_ndarray, "cupy", state->str_ndarray);
    PyObject *size = ndarray ? tcg_shape_tuple(ndim, shape) : NULL;
    if (size && dtype)
        *result = cupy_new(state, ndarray, size, dtype);
    Py_XDECREF(size);
    return *result ? cupy_pointer(state, *result, data) : -1;
}

static int numba_result(tcg_state *state, const tcg_tensor *a, PyObject *dtype, int ndim, const int64_t *shape,
                        tcg_result *result, tcg_tensor *c) {
    PyObject *make = TCG_CACHED(&state->numba_device_array, "numba.cuda", state->str_device_array);
    PyObject *size = make ? tcg_shape_tuple(ndim, shape) : NULL;
    if (size && dtype) {
        PyObject *arguments[] = {size, dtype};
        result->object = PyObject_Vectorcall(make, arguments, 2, NULL);
    }
    Py_XDECREF(size);
    if (!result->object)
        return -1;
    tcg_tensor_init(c, "the result", result->object);
    c->own_type = *a->type;
    c->own_type.type = Py_TYPE(result->object);
    c->type = &c->own_type;
    if (tcg_interface_locate(state, c))
        return -1;
    c->stream = 0; /* new memory: nothing to wait for */
    return 0;
}

/* What an allocator's error was called; the rest of it is not used. */
static void note_error(void *context, const char *kind, const char *message) {
    (void)message;
    snprintf(context, 32, "%s", kind ? kind : "");
}

/* 1: made by the exchange API's allocator; 0: it has none that works; -1: an exception. */
static int exchange_result(const tcg_tensor *a, int dtype, int ndim, const int64_t *shape, int device,
                           tcg_result *result, tcg_tensor *c) {
    const DLPackExchangeAPI *api = a->type->api;
    int64_t sizes[TCG_MAX_NDIM + 1];
    char kind[32] = "";
    if (!api || !api->managed_tensor_allocator || !api->managed_tensor_to_py_object_no_sync)
        return 0;
    memcpy(sizes, shape, (size_t)ndim * sizeof *sizes);
    DLTensor prototype = {
        .device = {device == TCG_HOST ? kDLCPU : kDLCUDA, device == TCG_HOST ? 0 : device},
        .ndim = ndim,
        .dtype = tcg_dl_dtype(dtype),
        .shape = sizes,
    };
    int failed = api->managed_tensor_allocator(&prototype, &result->versioned, kind, note_error);
    if (failed || !result->versioned) {
        result->versioned = NULL;
        bool memory = !strcmp(kind, "MemoryError") || (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_MemoryError));
        if (memory && !PyErr_Occurred())
            PyErr_NoMemory();
        if (memory)
            return -1;
        PyErr_Clear();
        return 0;
    }
    if (result->versioned->version.major != DLPACK_MAJOR_VERSION) {
        PyErr_SetString(PyExc_BufferError, "the result has another version of DLPack");
        return -1;
    }
    if (tcg_tensor_from_dl(c, &result->versioned->dl_tensor, 0))
        return -1;
    bool same = c->dtype == dtype && c->ndim == ndim && c->device == device;
    for (int i = 0; same && i < ndim; i++)
        same = c->shape[i] == shape[i];
    if (!same) {
        PyErr_SetString(PyExc_BufferError,
                        "the allocator of the DLPack exchange API gave another array than it was asked for");
        return -1;
    }
    return 1;
}

int tcg_result_new(tcg_state *state, const tcg_tensor *a, int dtype, int ndim, const int64_t *shape, int device,
                   uintptr_t stream, tcg_result *result, tcg_tensor *c) {
    tcg_framework framework = a->type->framework;
    PyObject *wanted = NULL;
    void *data = NULL;
    int failed = -1, made;

    if (framework == TCG_FRAMEWORK_TORCH) {
        failed = torch_result(state, a, dtype, ndim, shape, device, &data, &result->object);
        goto done;
    }
    if (framework == TCG_FRAMEWORK_NONE) {
        made = exchange_result(a, dtype, ndim, shape, device, result, c);
        if (made)
            return made < 0 ? -1 : 0;
    }
    if (device != TCG_HOST && framework != TCG_FRAMEWORK_CUPY && framework != TCG_FRAMEWORK_NUMBA) {
        result->object = tcg_array_new(state, dtype, ndim, shape, device, stream);
        if (!result->object)
            return -1;
        c->object = result->object;
        tcg_array_locate(c);
        c->stream = 0;
        return 0;
    }
    wanted = array_dtype(state, a, dtype);
    if (!wanted)
        return -1;
    if (device == TCG_HOST)
        failed = (result->object = tcg_numpy_empty(wanted, ndim, shape, &data)) ? 0 : -1;
    else if (framework == TCG_FRAMEWORK_CUPY)
        failed = cupy_result(state, wanted, ndim, shape, &data, &result->object);
    else {
        failed = numba_result(state, a, wanted, ndim, shape, result, c);
        Py_DECREF(wanted);
        return failed;
    }
done:
    Py_XDECREF(wanted);
    if (!failed)
        tcg_tensor_packed(c, data, dtype, device, ndim, shape);
    return failed;
}

PyObject *tcg_result_finish(tcg_state *state, const tcg_tensor *a, tcg_result *result) {
    PyObject *object = result->object, *convert, *converted = NULL;
    if (result->versioned) {
        void *made = NULL;
        DLManagedTensorVersioned *managed = result->versioned;
        result->versioned = NULL; /* stolen, whatever comes of it */
        if (a->type->api->managed_tensor_to_py_object_no_sync(managed, &made) || !made) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_BufferError, "the DLPack exchange API gave no array for the result");
            return NULL;
        }
        return made;
    }
    if (a->type->framework == TCG_FRAMEWORK_JAX) {
        if (Py_TYPE(object) == (PyTypeObject *)state->array_type)
            convert = TCG_CACHED(&state->jax_from_dlpack, "jax.dlpack", state->str_from_dlpack);
        else
            convert = TCG_CACHED(&state->jax_asarray, "jax.numpy", state->str_asarray);
        if (convert)
            converted = PyObject_CallOneArg(convert, object);
        return converted;
    }
    result->object = NULL;
    /* A scalar for two vectors, as numpy.matmul gives. */
    return a->type->framework == TCG_FRAMEWORK_NUMPY ? tcg_numpy_return(object) : object;
}

void tcg_result_release(tcg_result *result) {
    if (!result->object && !result->versioned)
        return;
    tcg_exception saved;
    tcg_exception_save(&saved);
    Py_CLEAR(result->object);
    if (result->versioned && result->versioned->deleter)
        result->versioned->deleter(result->versioned);
    result->versioned = NULL;
    tcg_exception_restore(&saved);
}

int tcg_workspace_new(tcg_state *state, const tcg_tensor *a, size_t bytes, int device, uintptr_t stream,
                      PyObject **owner, void **data) {
    int64_t size = (int64_t)bytes;
    tcg_error err;
    int failed;
    if (a->type->framework == TCG_FRAMEWORK_TORCH) {
        PyObject *dtype = TCG_CACHED(&state->torch_uint8, "torch", state->str_uint8);
        failed = torch_new(state, a, dtype, size, 1, &size, device, owner) || torch_pointer(state, a, *owner, data);
        return failed ? -1 : 0;
    }
    if (a->type->framework == TCG_FRAMEWORK_CUPY)
        return cupy_result(state, TCG_CACHED(&state->numpy_uint8, "numpy", state->str_uint8), 1, &size, data, owner);
    *owner = NULL;
    Py_BEGIN_ALLOW_THREADS failed = tcg_memory_alloc(device, stream, bytes, data, &err);
    Py_END_ALLOW_THREADS return failed ? tcg_raise(state, &err) : 0;
}
