/* tcgemm.Array: device memory that is ours, for callers whose input had no framework. It is shared with what it was
 * exported to by a count of owners in plain C, so that a consumer may drop it in any thread, with or without the GIL,
 * before or after the interpreter has gone. */
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

typedef struct memory {
    atomic_long owners;
    void *data;
    int device;
    atomic_uintptr_t stream; /* what works on it last, as far as it is known: freed in that order */
} memory;

struct tcg_array {
    PyObject_VAR_HEAD memory *memory; /* one of its owners */
    uintptr_t stream;                 /* where the result was written */
    int64_t count;
    int dtype, ndim;
    int64_t shape[]; /* packed and row-major */
};

static void memory_drop(memory *m) {
    if (atomic_fetch_sub_explicit(&m->owners, 1, memory_order_acq_rel) != 1)
        return;
    if (m->data)
        tcg_memory_free(m->device, atomic_load(&m->stream), m->data);
    free(m);
}

PyObject *tcg_array_new(tcg_state *state, int dtype, int ndim, const int64_t *shape, int device, uintptr_t stream) {
    PyTypeObject *type = (PyTypeObject *)state->array_type;
    tcg_array *array = NULL;
    memory *m = calloc(1, sizeof *m);
    const int64_t count = tcg_shape_count(ndim, shape);
    tcg_error err;
    int failed = 0;

    if (!m)
        return PyErr_NoMemory();
    atomic_init(&m->owners, 1);
    atomic_init(&m->stream, stream);
    m->device = device;
    if (count) {
        Py_BEGIN_ALLOW_THREADS failed =
            tcg_memory_alloc(device, stream, (size_t)count * (size_t)tcg_dtype_bytes[dtype], &m->data, &err);
        Py_END_ALLOW_THREADS
    }
    if (failed) {
        free(m);
        tcg_raise(state, &err);
        return NULL;
    }
    array = (tcg_array *)type->tp_alloc(type, ndim);
    if (!array) {
        memory_drop(m);
        return NULL;
    }
    array->memory = m;
    array->stream = stream;
    array->count = count;
    array->dtype = dtype;
    array->ndim = ndim;
    for (int i = 0; i < ndim; i++)
        array->shape[i] = shape[i];
    return (PyObject *)array;
}

int tcg_array_locate(tcg_tensor *tensor) {
    const tcg_array *array = (const tcg_array *)tensor->object;
    tcg_tensor_packed(tensor, array->memory->data, array->dtype, array->memory->device, array->ndim, array->shape);
    tensor->stream = array->stream;
    return 0;
}

static void array_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    memory *m = ((tcg_array *)self)->memory;
    if (m)
        memory_drop(m);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- exports --------------------------------------------------------------------------------------------------- */

/* What an exported tensor owns: a share of the memory, or a copy on the host. */
typedef struct owner {
    union {
        DLManagedTensor legacy;
        DLManagedTensorVersioned versioned;
    } managed;
    memory *memory;
    void *copy;
    int64_t sizes[]; /* shape, then strides */
} owner;

static void owner_drop(owner *o) {
    if (o->memory)
        memory_drop(o->memory);
    free(o->copy);
    free(o);
}

static void delete_legacy(DLManagedTensor *managed) { owner_drop(managed->manager_ctx); }

static void delete_versioned(DLManagedTensorVersioned *managed) { owner_drop(managed->manager_ctx); }

/* Acts on what nobody has consumed. */
static void capsule_destroy(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor"))
        delete_legacy(PyCapsule_GetPointer(capsule, "dltensor"));
    else if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
        delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}

static PyObject *export(const tcg_array *array, bool versioned, void *copy /* steals */) {
    size_t ndim = (size_t)array->ndim;
    owner *o = calloc(1, sizeof *o + 2 * ndim * sizeof(int64_t));
    PyObject *capsule;
    if (!o) {
        free(copy);
        return PyErr_NoMemory();
    }
    o->copy = copy;
    if (!copy) {
        o->memory = array->memory;
        atomic_fetch_add_explicit(&o->memory->owners, 1, memory_order_relaxed);
    }
    memcpy(o->sizes, array->shape, ndim * sizeof *array->shape);
    tcg_packed_strides(array->ndim, array->shape, 1, o->sizes + ndim);
    DLTensor tensor = {
        .data = copy ? copy : array->memory->data,
        .device = {copy ? kDLCPU : kDLCUDA, copy ? 0 : array->memory->device},
        .ndim = array->ndim,
        .dtype = tcg_dl_dtype(array->dtype),
        .shape = o->sizes,
        .strides = o->sizes + ndim,
    };
    if (array->count == 0)
        tensor.data = NULL;
    if (versioned) {
        o->managed.versioned = (DLManagedTensorVersioned){
            .version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION},
            .manager_ctx = o,
            .deleter = delete_versioned,
            .flags = copy ? DLPACK_FLAG_BITMASK_IS_COPIED : 0,
            .dl_tensor = tensor,
        };
        capsule = PyCapsule_New(&o->managed.versioned, "dltensor_versioned", capsule_destroy);
    } else {
        o->managed.legacy = (DLManagedTensor){.dl_tensor = tensor, .manager_ctx = o, .deleter = delete_legacy};
        capsule = PyCapsule_New(&o->managed.legacy, "dltensor", capsule_destroy);
    }
    if (!capsule)
        owner_drop(o);
    return capsule;
}

/* Reads a pair of integers. */
static int read_pair(PyObject *object, const char *name, long pair[2]) {
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 2) {
        PyErr_Format(PyExc_TypeError, "%s: expected a pair of integers, got %R", name, object);
        return -1;
    }
    for (int i = 0; i < 2; i++)
        pair[i] = PyLong_AsLong(PyTuple_GET_ITEM(object, i));
    return PyErr_Occurred() ? -1 : 0;
}

static tcg_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

PyDoc_STRVAR(dlpack_doc, "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
                         "A DLPack capsule of the array.\n\n"
                         "The work on `stream` (None or 1: the legacy default stream, 2: the per-thread one, -1: no "
                         "wait, else a handle) waits\n"
                         "for the result. dl_device=(1, 0) copies to the host.");

static PyObject *py_array_dlpack(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    const tcg_array *array = (const tcg_array *)self;
    PyObject *stream_object = Py_None, *max_version = Py_None, *dl_device = Py_None, *copy = Py_None;
    uintptr_t stream = TCG_STREAM_LEGACY;
    bool wait = true, to_host = false;
    int device = array->memory->device, failed;
    long version[2] = {0, 0}, where[2];
    tcg_error err;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &stream_object, &max_version,
                                     &dl_device, &copy))
        return NULL;
    if (max_version != Py_None && read_pair(max_version, "max_version", version))
        return NULL;
    if (dl_device != Py_None) {
        if (read_pair(dl_device, "dl_device", where))
            return NULL;
        to_host = where[0] == kDLCPU;
        if (!to_host && (where[0] != kDLCUDA || where[1] != device)) {
            PyErr_Format(PyExc_BufferError, "dl_device: expected (%d, %d) or (%d, 0), got %R", kDLCUDA, device,
                         kDLCPU, dl_device);
            return NULL;
        }
    }
    if (to_host ? copy == Py_False : copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, to_host ? "copy=False: the array is not on the host"
                                                   : "copy=True: not supported on the device");
        return NULL;
    }
    if (stream_object != Py_None && !to_host) {
        long long number = PyLong_AsLongLong(stream_object);
        if (number == -1 && PyErr_Occurred())
            return NULL;
        if (number == 0 || number < -1) {
            PyErr_Format(PyExc_ValueError, "stream: expected None, -1, 1, 2 or a handle, got %lld", number);
            return NULL;
        }
        wait = number != -1;
        stream = (uintptr_t)number;
    }
    if (to_host) {
        size_t bytes = (size_t)array->count * (size_t)tcg_dtype_bytes[array->dtype];
        void *host = malloc(bytes ? bytes : 1);
        if (!host)
            return PyErr_NoMemory();
        Py_BEGIN_ALLOW_THREADS failed = bytes && (tcg_synchronize(device, array->stream, &err) ||
                                                  tcg_download(device, host, array->memory->data, bytes, &err));
        Py_END_ALLOW_THREADS if (failed) {
            free(host);
            tcg_raise(state_of(self), &err);
            return NULL;
        }
        return export(array, version[0] >= 1, host);
    }
    if (wait && array->count && stream != array->stream) {
        Py_BEGIN_ALLOW_THREADS failed = tcg_stream_wait(device, stream, array->stream, &err);
        Py_END_ALLOW_THREADS if (failed) {
            tcg_raise(state_of(self), &err);
            return NULL;
        }
        atomic_store(&array->memory->stream, stream);
    }
    return export(array, version[0] >= 1, NULL);
}

static PyObject *py_array_dlpack_device(PyObject *self, PyObject *unused) {
    (void)unused;
    return Py_BuildValue("(ii)", kDLCUDA, ((tcg_array *)self)->memory->device);
}

static PyObject *array_cai(PyObject *self, void *closure) {
    static const char *const typestr[TCG_DTYPE_COUNT] = {[TCG_f16] = "<f2", [TCG_bf16] = "<V2", [TCG_f32] = "<f4"};
    const tcg_array *array = (const tcg_array *)self;
    (void)closure;
    return Py_BuildValue("{s:N,s:s,s:(KO),s:i,s:O,s:K}", "shape", tcg_shape_tuple(array->ndim, array->shape),
                         "typestr", typestr[array->dtype], "data", (unsigned long long)(uintptr_t)array->memory->data,
                         Py_False, "version", 3, "strides", Py_None, "stream", (unsigned long long)array->stream);
}

static PyObject *array_shape(PyObject *self, void *closure) {
    const tcg_array *array = (const tcg_array *)self;
    (void)closure;
    return tcg_shape_tuple(array->ndim, array->shape);
}

static PyObject *array_strides(PyObject *self, void *closure) {
    const tcg_array *array = (const tcg_array *)self;
    int64_t strides[TCG_MAX_NDIM];
    (void)closure;
    tcg_packed_strides(array->ndim, array->shape, tcg_dtype_bytes[array->dtype], strides);
    return tcg_shape_tuple(array->ndim, strides);
}

static PyObject *array_dtype(PyObject *self, void *closure) {
    (void)closure;
    return PyUnicode_FromString(tcg_dtype_names[((tcg_array *)self)->dtype]);
}

static PyObject *array_device(PyObject *self, void *closure) {
    (void)closure;
    return PyUnicode_FromFormat("cuda:%d", ((tcg_array *)self)->memory->device);
}

static PyObject *array_ndim(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(((tcg_array *)self)->ndim);
}

static PyObject *array_nbytes(PyObject *self, void *closure) {
    const tcg_array *array = (const tcg_array *)self;
    (void)closure;
    return PyLong_FromLongLong(array->count * tcg_dtype_bytes[array->dtype]);
}

static PyObject *array_repr(PyObject *self) {
    const tcg_array *array = (const tcg_array *)self;
    PyObject *text = NULL, *shape = tcg_shape_text(array->ndim, array->shape);
    if (shape)
        text = PyUnicode_FromFormat("tcgemm.Array(shape=%U, dtype=%s, device=cuda:%d)", shape,
                                    tcg_dtype_names[array->dtype], array->memory->device);
    Py_XDECREF(shape);
    return text;
}

static PyMethodDef array_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))py_array_dlpack, METH_VARARGS | METH_KEYWORDS, dlpack_doc},
    {"__dlpack_device__", py_array_dlpack_device, METH_NOARGS,
     PyDoc_STR("__dlpack_device__($self, /)\n--\n\nThe DLPack device: (2, ordinal).")},
    {0},
};

static PyGetSetDef array_getset[] = {
    {"__cuda_array_interface__", array_cai, NULL,
     PyDoc_STR("Version 3 of the CUDA array interface, with the result's stream."), NULL},
    {"shape", array_shape, NULL, PyDoc_STR("Sizes of the axes."), NULL},
    {"strides", array_strides, NULL, PyDoc_STR("Bytes from one element to the next along each axis."), NULL},
    {"dtype", array_dtype, NULL, PyDoc_STR("\"float16\", \"bfloat16\" or \"float32\"."), NULL},
    {"device", array_device, NULL, PyDoc_STR("\"cuda:<ordinal>\"."), NULL},
    {"ndim", array_ndim, NULL, PyDoc_STR("Number of axes."), NULL},
    {"nbytes", array_nbytes, NULL, PyDoc_STR("Bytes of all elements."), NULL},
    {0},
};

PyDoc_STRVAR(
    array_doc,
    "A result in device memory that tcgemm owns, packed and row-major.\n\n"
    "What matmul gives for device operands without a framework: DLPack capsules and objects that have\n"
    "__cuda_array_interface__ alone. Any framework takes it: torch.from_dlpack(x), cupy.from_dlpack(x); so does "
    "matmul.\n"
    "Work may still be under way when it is returned; both interfaces make the consumer's stream wait for it.");

static PyType_Slot array_slots[] = {
    {Py_tp_doc, (void *)array_doc}, {Py_tp_dealloc, array_dealloc}, {Py_tp_repr, array_repr},
    {Py_tp_methods, array_methods}, {Py_tp_getset, array_getset},   {0, NULL},
};

PyType_Spec tcg_array_spec = {
    .name = "tcgemm.Array",
    .basicsize = offsetof(struct tcg_array, shape),
    .itemsize = sizeof(int64_t),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = array_slots,
};
