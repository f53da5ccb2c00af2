/* __cuda_array_interface__, versions 2 and 3, and CuPy's arrays by their own attributes. The object itself owns the
 * memory: there is nothing to give back. */
#include "tensor.h"

#include <limits.h>
#include <string.h>

/* A borrowed entry of the dict; NULL without an exception when it is missing or None. */
static PyObject *entry(PyObject *interface, PyObject *key) {
    PyObject *found = PyDict_GetItemWithError(interface, key);
    return found == Py_None ? NULL : found;
}

/* Whether an array of two-byte voids is bfloat16: nothing in the interface says so, the array's own dtype does. */
static int is_bfloat16(tcg_state *state, tcg_tensor *tensor) {
    PyObject *dtype = NULL, *name = NULL;
    int is = tcg_optional_attr(tensor->object, state->str_dtype, &dtype);
    if (is > 0)
        is = tcg_optional_attr(dtype, state->str_name, &name);
    if (is > 0)
        is = PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
    Py_XDECREF(name);
    Py_XDECREF(dtype);
    return is;
}

static const char swapped = PY_BIG_ENDIAN ? '<' : '>';

static int64_t typestr_bytes(const char *text) {
    int64_t bytes = 0;
    for (const char *digit = text + 2; *digit >= '0' && *digit <= '9' && bytes < INT32_MAX; digit++)
        bytes = 10 * bytes + (*digit - '0');
    return bytes;
}

void tcg_typestr_text(tcg_tensor *tensor, const char *text) {
    static const struct {
        char kind;
        const char *word;
    } kinds[] = {{'i', "int"}, {'u', "uint"}, {'f', "float"}, {'c', "complex"}};
    char *name = tensor->dtype_text;
    const size_t size = sizeof tensor->dtype_text;
    snprintf(name, size, "typestr %.16s", text);
    if (text[0] == swapped)
        return;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (kinds[i].kind == text[1])
            snprintf(name, size, "%s%lld", kinds[i].word, 8 * (long long)typestr_bytes(text));
    if (text[1] == 'b')
        snprintf(name, size, "bool");
}

static int read_typestr(tcg_state *state, tcg_tensor *tensor, PyObject *object, int64_t *item_bytes) {
    const char *text = object && PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : NULL;
    if (!text || strlen(text) < 2 || !strchr("<>|=", text[0])) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_TypeError, "%s: the array interface's typestr is %R", tensor->name,
                         object ? object : Py_None);
        return -1;
    }
    *item_bytes = typestr_bytes(text);
    tensor->dtype = -1;
    if (text[0] != swapped) {
        if (!strcmp(text + 1, "f2"))
            tensor->dtype = TCG_f16;
        else if (!strcmp(text + 1, "f4"))
            tensor->dtype = TCG_f32;
        else if (!strcmp(text + 1, "V2")) {
            int is = is_bfloat16(state, tensor);
            if (is < 0)
                return -1;
            if (is)
                tensor->dtype = TCG_bf16;
        }
    }
    if (tensor->dtype < 0)
        tcg_typestr_text(tensor, text);
    return 0;
}

/* Reads a tuple of `count` sizes, or of any count when *count is -1. */
static int read_sizes(const tcg_tensor *tensor, PyObject *tuple, const char *what, int *count, int64_t *sizes) {
    if (!tuple || !PyTuple_Check(tuple)) {
        PyErr_Format(PyExc_TypeError, "%s: the array interface's %s is %R; expected a tuple of integers",
                     tensor->name, what, tuple ? tuple : Py_None);
        return -1;
    }
    Py_ssize_t length = PyTuple_GET_SIZE(tuple);
    if (*count < 0 ? length > TCG_MAX_NDIM : length != *count) {
        PyErr_Format(PyExc_ValueError, "%s: the array interface's %s has %zd entries; expected %s%d", tensor->name,
                     what, length, *count < 0 ? "at most " : "", *count < 0 ? TCG_MAX_NDIM : *count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        if (tcg_read_int(tensor->name, what, PyTuple_GET_ITEM(tuple, i), &sizes[i]))
            return -1;
    }
    *count = (int)length;
    return 0;
}

/* Strides in bytes, as read, into elements. */
static int strides_to_elements(tcg_tensor *tensor, int64_t item_bytes) {
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->dtype < 0 || tensor->shape[i] < 2) {
            tensor->strides[i] = 0; /* no element is ever reached by it */
            continue;
        }
        if (tensor->strides[i] % item_bytes) {
            PyErr_Format(PyExc_ValueError, "%s: a stride of %lld bytes is no multiple of the element's %lld",
                         tensor->name, (long long)tensor->strides[i], (long long)item_bytes);
            return -1;
        }
        tensor->strides[i] /= item_bytes;
    }
    return 0;
}

static int read_data(tcg_tensor *tensor, PyObject *data) {
    PyObject *pointer;
    uintptr_t address = 0;
    if (!data || !PyTuple_Check(data) || PyTuple_GET_SIZE(data) != 2) {
        PyErr_Format(PyExc_TypeError, "%s: the array interface's data is %R; expected (pointer, read-only)",
                     tensor->name, data ? data : Py_None);
        return -1;
    }
    pointer = PyTuple_GET_ITEM(data, 0);
    int read_only = PyObject_IsTrue(PyTuple_GET_ITEM(data, 1));
    if (read_only < 0)
        return -1;
    tensor->read_only = read_only;
    /* None has been seen where the array is empty. */
    if (pointer != Py_None && tcg_read_address(tensor->name, "the array interface's pointer", pointer, &address))
        return -1;
    tensor->data = (char *)address;
    return 0;
}

static int read_stream(tcg_state *state, tcg_tensor *tensor, PyObject *interface) {
    PyObject *object = entry(interface, state->str_version), *stream;
    int64_t version = 0;
    if (PyErr_Occurred() || (object && tcg_read_int(tensor->name, "the array interface's version", object, &version)))
        return -1;
    if (version != 2 && version != 3) {
        PyErr_Format(PyExc_ValueError, "%s: __cuda_array_interface__ version %lld; versions 2 and 3 are understood",
                     tensor->name, (long long)version);
        return -1;
    }
    if (entry(interface, state->str_mask)) {
        PyErr_Format(PyExc_TypeError, "%s: masked arrays are not supported", tensor->name);
        return -1;
    }
    stream = version == 3 ? entry(interface, state->str_stream) : NULL;
    if (!stream)
        return PyErr_Occurred() ? -1 : 0;
    if (tcg_read_address(tensor->name, "the array interface's stream", stream, &tensor->stream))
        return -1;
    if (!tensor->stream) {
        PyErr_Format(PyExc_ValueError,
                     "%s: __cuda_array_interface__ stream 0 is ambiguous; 1 is the legacy default stream, 2 the "
                     "per-thread one",
                     tensor->name);
        return -1;
    }
    return 0;
}

/* An interface names no device: the pointer's own, or where there is no memory, what the array says. */
static int find_device(tcg_state *state, tcg_tensor *tensor) {
    tcg_error err;
    int failed;
    if (tensor->count) {
        const void *pointer = tensor->data + tensor->low * tcg_elem_bytes(tensor);
        Py_BEGIN_ALLOW_THREADS failed = tcg_pointer_device(pointer, &tensor->device, &err);
        Py_END_ALLOW_THREADS if (failed) return tcg_raise(state, &err);
        if (tensor->device < 0) {
            PyErr_Format(PyExc_ValueError, "%s: __cuda_array_interface__ points to host memory", tensor->name);
            return -1;
        }
        return 0;
    }
    tensor->device = 0;
    tensor->any_device = true;
    if (tensor->type->framework == TCG_FRAMEWORK_CUPY) {
        PyObject *device = PyObject_GetAttr(tensor->object, state->str_device);
        PyObject *id = device ? PyObject_GetAttr(device, state->str_id) : NULL;
        long ordinal = id ? PyLong_AsLong(id) : -1;
        Py_XDECREF(device);
        Py_XDECREF(id);
        if (PyErr_Occurred())
            return -1;
        tensor->device = (int)ordinal;
        tensor->any_device = false;
    }
    return 0;
}

int tcg_interface_locate(tcg_state *state, tcg_tensor *tensor) {
    PyObject *interface = PyObject_GetAttr(tensor->object, state->str___cuda_array_interface__);
    PyObject *strides, *numba_strides = NULL;
    int64_t item_bytes = 0;
    int failed = -1, ndim = -1;

    if (!interface)
        return -1;
    if (!PyDict_Check(interface)) {
        PyErr_Format(PyExc_TypeError, "%s: the array interface is %s; expected a dict", tensor->name,
                     Py_TYPE(interface)->tp_name);
        goto done;
    }
    /* A copy: the array may give a dict of its own, and what is read from it below runs Python code. */
    Py_SETREF(interface, PyDict_Copy(interface));
    if (!interface)
        return -1;
    if (read_stream(state, tensor, interface) ||
        read_typestr(state, tensor, entry(interface, state->str_typestr), &item_bytes) ||
        read_sizes(tensor, entry(interface, state->str_shape), "shape", &ndim, tensor->shape) ||
        read_data(tensor, entry(interface, state->str_data)))
        goto done;
    tensor->ndim = ndim;
    strides = entry(interface, state->str_strides);
    /* Numba leaves strides of 0 out of account when it calls an array contiguous; its attribute tells them. */
    if (!strides && !PyErr_Occurred() && tensor->type->framework == TCG_FRAMEWORK_NUMBA) {
        numba_strides = PyObject_GetAttr(tensor->object, state->str_strides);
        if (!numba_strides)
            goto done;
        strides = numba_strides;
    }
    if (strides &&
        (read_sizes(tensor, strides, "strides", &ndim, tensor->strides) || strides_to_elements(tensor, item_bytes)))
        goto done;
    if (PyErr_Occurred() || tcg_tensor_layout(tensor, strides != NULL) || find_device(state, tensor))
        goto done;
    failed = 0;
done:
    Py_XDECREF(numba_strides);
    Py_DECREF(interface);
    return failed;
}

int tcg_cupy_locate(tcg_state *state, tcg_tensor *tensor) {
    PyObject *memory = PyObject_GetAttr(tensor->object, state->str_data), *pointer = NULL, *device = NULL,
             *shape = NULL, *packed = NULL, *strides = NULL, *dtype = NULL;
    uintptr_t address;
    int64_t ordinal;
    int failed = -1, ndim = -1;
    if (!memory || !(pointer = PyObject_GetAttr(memory, state->str_ptr)) ||
        !(device = PyObject_GetAttr(memory, state->str_device_id)) ||
        !(shape = PyObject_GetAttr(tensor->object, state->str_shape)) ||
        !(dtype = PyObject_GetAttr(tensor->object, state->str_dtype)) ||
        tcg_optional_attr(tensor->object, state->str__c_contiguous, &packed) < 0)
        goto done;
    if (tcg_read_address(tensor->name, "the array's pointer", pointer, &address) ||
        tcg_read_int(tensor->name, "the array's device", device, &ordinal) ||
        tcg_numpy_read_dtype(state, dtype, tensor) || read_sizes(tensor, shape, "shape", &ndim, tensor->shape))
        goto done;
    tensor->data = (char *)address;
    tensor->ndim = ndim;
    if (packed != Py_True && (!(strides = PyObject_GetAttr(tensor->object, state->str_strides)) ||
                              read_sizes(tensor, strides, "strides", &ndim, tensor->strides) ||
                              strides_to_elements(tensor, tcg_elem_bytes(tensor))))
        goto done;
    if (tcg_tensor_layout(tensor, packed != Py_True))
        goto done;
    if (ordinal < 0 || ordinal >= INT_MAX) {
        failed = find_device(state, tensor);
    } else {
        tensor->device = (int)ordinal;
        failed = 0;
    }
done:
    Py_XDECREF(memory);
    Py_XDECREF(pointer);
    Py_XDECREF(device);
    Py_XDECREF(shape);
    Py_XDECREF(packed);
    Py_XDECREF(strides);
    Py_XDECREF(dtype);
    return failed;
}

/* A C function that one of CuPy's modules offers to others under that name, if it has that signature (Cython's way:
 * capsules in __pyx_capi__ that are called what they hold), else NULL, perhaps with an exception. A call of one takes a
 * tenth of the same by Python. */
static void *cupy_function(tcg_state *state, PyObject **slot, const char *module, PyObject *name,
                           const char *signature) {
    PyObject *functions = TCG_CACHED_OR_NONE(slot, module, state->str___pyx_capi__);
    PyObject *capsule =
        functions && PyDict_Check(functions) ? PyDict_GetItemWithError(functions, name) : NULL; /* borrowed */
    return capsule && PyCapsule_IsValid(capsule, signature) ? PyCapsule_GetPointer(capsule, signature) : NULL;
}

int tcg_cupy_device(tcg_state *state, long *ordinal) {
    int (*function)(int skip_dispatch) =
        (int (*)(int))cupy_function(state, &state->cupy_device_functions, "cupy_backends.cuda.api.runtime",
                                    state->str_getDevice, "int (int __pyx_skip_dispatch)");
    if (function)
        *ordinal = function(0);
    else if (!PyErr_Occurred())
        return tcg_call_for_long(
            TCG_CACHED(&state->cupy_get_device, "cupy.cuda", state->str_runtime, state->str_getDevice), ordinal);
    return PyErr_Occurred() ? -1 : 0;
}

int tcg_cupy_stream(tcg_state *state, uintptr_t *stream) {
    intptr_t (*function)(void) =
        (intptr_t (*)(void))cupy_function(state, &state->cupy_stream_functions, "cupy.cuda.stream",
                                          state->str_get_current_stream_ptr, "intptr_t (void)");
    if (function) {
        *stream = (uintptr_t)function();
    } else if (!PyErr_Occurred()) {
        PyObject *get = TCG_CACHED(&state->cupy_get_current_stream, "cupy.cuda", state->str_get_current_stream);
        PyObject *object = get ? PyObject_CallNoArgs(get) : NULL;
        PyObject *number = object ? PyObject_GetAttr(object, state->str_ptr) : NULL;
        if (number)
            tcg_read_address("stream", "CuPy's current stream", number, stream);
        Py_XDECREF(object);
        Py_XDECREF(number);
    }
    if (PyErr_Occurred())
        return -1;
    if (*stream == 0)
        *stream = TCG_STREAM_LEGACY;
    return 0;
}
