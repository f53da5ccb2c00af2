/* DLPack in all its forms: the C exchange API of a type, __dlpack__, and bare capsules of both kinds. */
#include "tensor.h"

#include <string.h>

/* Of torch: meta, sparse and nested tensors, and those inside of its transforms. */
#define NO_PLAIN_MEMORY "this torch tensor has no plain memory"

/* ---- DLTensor -------------------------------------------------------------------------------------------------- */

DLDataType tcg_dl_dtype(int dtype) {
    return (DLDataType){
        .code = dtype == TCG_bf16 ? kDLBfloat : kDLFloat,
        .bits = (uint8_t)(8 * tcg_dtype_bytes[dtype]),
        .lanes = 1,
    };
}

/* The dtype, or -1 with its name in the tensor. */
static int dtype_from_dl(tcg_tensor *tensor, DLDataType dl) {
    static const char *const words[] = {
        "int",
        "uint",
        "float",
        "opaque",
        "bfloat",
        "complex",
        "bool",
        "float8_e3m4",
        "float8_e4m3",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float6_e2m3fn",
        "float6_e3m2fn",
        "float4_e2m1fn",
    };
    if (dl.lanes == 1 && dl.code == kDLFloat && dl.bits == 16)
        return TCG_f16;
    if (dl.lanes == 1 && dl.code == kDLBfloat && dl.bits == 16)
        return TCG_bf16;
    if (dl.lanes == 1 && dl.code == kDLFloat && dl.bits == 32)
        return TCG_f32;

    char *text = tensor->dtype_text;
    size_t size = sizeof tensor->dtype_text;
    if (dl.code >= sizeof words / sizeof words[0])
        snprintf(text, size, "DLPack type code %d", dl.code);
    else if (dl.code >= kDLBool) /* names that hold their width */
        snprintf(text, size, "%s", words[dl.code]);
    else
        snprintf(text, size, "%s%d", words[dl.code], dl.bits);
    if (dl.lanes != 1)
        snprintf(text + strlen(text), size - strlen(text), "x%d", dl.lanes);
    return -1;
}

static int device_from_dl(tcg_tensor *tensor, int64_t type, int64_t id) {
    switch (type) {
    case kDLCPU:
    case kDLCUDAHost:
        tensor->device = TCG_HOST;
        return 0;
    case kDLCUDAManaged: /* reachable from every device; producers differ in what its id says */
        tensor->any_device = true;
        /* fall through */
    case kDLCUDA:
        if (id < 0 || id > INT16_MAX) {
            PyErr_Format(PyExc_ValueError, "%s: CUDA device %lld does not exist", tensor->name, (long long)id);
            return -1;
        }
        tensor->device = (int)id;
        return 0;
    default:
        PyErr_Format(PyExc_ValueError, "%s: on DLPack device (%lld, %lld); expected host or CUDA memory",
                     tensor->name, (long long)type, (long long)id);
        return -1;
    }
}

int tcg_tensor_from_dl(tcg_tensor *tensor, const DLTensor *dl, uint64_t flags) {
    if (device_from_dl(tensor, (int64_t)dl->device.device_type, dl->device.device_id))
        return -1;
    if (dl->ndim < 0 || dl->ndim > TCG_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s: expected 0 to %d dimensions, got %d", tensor->name, TCG_MAX_NDIM,
                     dl->ndim);
        return -1;
    }
    if (dl->ndim > 0 && !dl->shape) {
        PyErr_Format(PyExc_ValueError, "%s: a NULL shape for %d dimensions", tensor->name, dl->ndim);
        return -1;
    }
    if (dl->byte_offset > INT64_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: byte_offset reaches beyond the address space", tensor->name);
        return -1;
    }
    tensor->dtype = dtype_from_dl(tensor, dl->dtype);
    tensor->data = dl->data ? (char *)((uintptr_t)dl->data + dl->byte_offset) : NULL;
    tensor->read_only = flags & DLPACK_FLAG_BITMASK_READ_ONLY;
    tensor->ndim = dl->ndim;
    for (int i = 0; i < dl->ndim; i++) {
        tensor->shape[i] = dl->shape[i];
        tensor->strides[i] = dl->strides ? dl->strides[i] : 0;
    }
    return tcg_tensor_layout(tensor, dl->strides != NULL);
}

/* ---- capsules -------------------------------------------------------------------------------------------------- */

static int from_versioned(tcg_tensor *tensor) {
    const DLManagedTensorVersioned *managed = tensor->versioned;
    if (managed->version.major != DLPACK_MAJOR_VERSION) { /* nothing but the deleter may be used then */
        PyErr_Format(PyExc_BufferError, "%s: DLPack version %u.%u; version %d is understood", tensor->name,
                     managed->version.major, managed->version.minor, DLPACK_MAJOR_VERSION);
        return -1;
    }
    return tcg_tensor_from_dl(tensor, &managed->dl_tensor, managed->flags);
}

/* Takes ownership first and looks inside afterwards: whatever is wrong there, the deleter runs once. */
int tcg_capsule_take(tcg_tensor *tensor, PyObject *capsule) {
    const char *name = PyCapsule_GetName(capsule);
    if (!name && PyErr_Occurred())
        return -1;
    if (name && !strcmp(name, "dltensor_versioned")) {
        DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, name);
        if (!managed || PyCapsule_SetName(capsule, "used_dltensor_versioned"))
            return -1;
        tensor->versioned = managed;
        return from_versioned(tensor);
    }
    if (name && !strcmp(name, "dltensor")) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, name);
        if (!managed || PyCapsule_SetName(capsule, "used_dltensor"))
            return -1;
        tensor->legacy = managed;
        return tcg_tensor_from_dl(tensor, &managed->dl_tensor, 0);
    }
    if (name && (!strcmp(name, "used_dltensor") || !strcmp(name, "used_dltensor_versioned")))
        PyErr_Format(PyExc_ValueError, "%s: this DLPack capsule has already been consumed", tensor->name);
    else
        PyErr_Format(PyExc_TypeError, "%s: expected a DLPack capsule, got one named %s", tensor->name,
                     name ? name : "NULL");
    return -1;
}

/* ---- the C exchange API ---------------------------------------------------------------------------------------- */

int tcg_exchange_api(PyObject *attribute, const DLPackExchangeAPI **api) {
    const DLPackExchangeAPIHeader *header = NULL;
    *api = NULL;
    if (PyCapsule_IsValid(attribute, "dlpack_exchange_api"))
        header = PyCapsule_GetPointer(attribute, "dlpack_exchange_api");
    else if (PyLong_CheckExact(attribute)) /* DLPack 1.2 */
        header = PyLong_AsVoidPtr(attribute);
    if (PyErr_Occurred())
        return -1;
    while (header && header->version.major != DLPACK_MAJOR_VERSION)
        header = header->prev_api;
    const DLPackExchangeAPI *found = (const DLPackExchangeAPI *)header;
    if (found && (found->dltensor_from_py_object_no_sync || found->managed_tensor_from_py_object_no_sync))
        *api = found;
    return 0;
}

int tcg_exchange_stream(const DLPackExchangeAPI *api, int device, uintptr_t *stream) {
    void *found = NULL;
    if (api->current_work_stream && api->current_work_stream(kDLCUDA, device, &found)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "the DLPack exchange API gave no stream");
        return -1;
    }
    *stream = found ? (uintptr_t)found : TCG_STREAM_LEGACY;
    return 0;
}

/* What the exchange does not say of a torch tensor: that autograd follows it; and that its values are negated. */
static int check_grad(tcg_state *state, const tcg_tensor *tensor) {
    const tcg_type *type = tensor->type;
    PyObject *flag = type->requires_grad ? type->requires_grad->get(tensor->object, type->requires_grad->closure)
                                         : PyObject_GetAttr(tensor->object, state->str_requires_grad);
    if (!flag)
        return tcg_refuse(tensor, "torch gives no access to this tensor");
    Py_DECREF(flag); /* an immortal or otherwise referenced bool */
    if (flag == Py_True) {
        PyObject *enabled = TCG_CACHED(&state->torch_is_grad_enabled, "torch", state->str_is_grad_enabled);
        enabled = enabled ? PyObject_CallNoArgs(enabled) : NULL;
        if (!enabled)
            return -1;
        Py_DECREF(enabled);
        if (enabled == Py_True) {
            PyErr_Format(
                PyExc_RuntimeError,
                "%s: the tensor has requires_grad=True, and tcgemm has no backward pass; call .detach() on it, "
                "or use torch.no_grad()",
                tensor->name);
            return -1;
        }
    }
    return 0;
}

static int check_negative(tcg_state *state, const tcg_tensor *tensor) {
    const tcg_type *type = tensor->type;
    PyObject *flag = type->is_neg ? type->is_neg(tensor->object, NULL)
                                  : PyObject_CallMethodNoArgs(tensor->object, state->str_is_neg);
    if (!flag)
        return tcg_refuse(tensor, "torch gives no access to this tensor");
    Py_DECREF(flag);
    if (flag == Py_True) {
        PyErr_Format(PyExc_TypeError,
                     "%s: the tensor's memory holds the negative of its values; call .resolve_neg() on it",
                     tensor->name);
        return -1;
    }
    return 0;
}

int tcg_exchange_locate(tcg_state *state, tcg_tensor *tensor) {
    const DLPackExchangeAPI *api = tensor->type->api;
    bool torch = tensor->type->framework == TCG_FRAMEWORK_TORCH;
    int failed;
    DLTensor dl;

    /* First: a subclass may run Python code here, and the view below is good only until something else runs. */
    const bool plain = torch && tensor->type->plain && tensor->type->is_neg;
    if (torch && (check_grad(state, tensor) || (!plain && check_negative(state, tensor))))
        return -1;
    if (api->dltensor_from_py_object_no_sync)
        failed = api->dltensor_from_py_object_no_sync(tensor->object, &dl);
    else
        failed = api->managed_tensor_from_py_object_no_sync(tensor->object, &tensor->versioned) || !tensor->versioned;
    if (failed) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_BufferError, "the DLPack exchange API gave no reason");
        return torch ? tcg_refuse(tensor, NO_PLAIN_MEMORY) : -1;
    }
    failed = tensor->versioned ? from_versioned(tensor) : tcg_tensor_from_dl(tensor, &dl, 0);
    if (failed && torch && !tensor->data && PyErr_ExceptionMatches(PyExc_ValueError))
        PyErr_Format(PyExc_TypeError, "%s: %s: it is traced or functional", tensor->name, NO_PLAIN_MEMORY);
    /* The negative bit is an imaginary part's: there is no complex type of bfloat16. Asking drops the GIL. */
    if (!failed && plain && tensor->dtype != TCG_bf16)
        failed = check_negative(state, tensor);
    return failed;
}

/* ---- __dlpack__ ------------------------------------------------------------------------------------------------ */

/* JAX itself says nothing useful of an array whose memory was donated or deleted. */
static int check_jax(tcg_state *state, const tcg_tensor *tensor) {
    PyObject *method = NULL, *deleted;
    int has = tcg_optional_attr(tensor->object, state->str_is_deleted, &method);
    if (has <= 0)
        return has;
    deleted = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    if (!deleted)
        return -1;
    Py_DECREF(deleted); /* a bool */
    if (deleted == Py_True) {
        PyErr_Format(PyExc_ValueError, "%s: the JAX array has been deleted or donated", tensor->name);
        return -1;
    }
    return 0;
}

int tcg_dlpack_locate(tcg_state *state, tcg_tensor *tensor) {
    if (tensor->type->framework == TCG_FRAMEWORK_JAX && check_jax(state, tensor))
        return -1;
    PyObject *device = PyObject_CallMethodNoArgs(tensor->object, state->str___dlpack_device__);
    int64_t type, id;
    int failed = -1;
    if (!device && tensor->type->framework == TCG_FRAMEWORK_TORCH)
        return tcg_refuse(tensor, NO_PLAIN_MEMORY);
    if (!device)
        return -1;
    if (!PyTuple_Check(device) || PyTuple_GET_SIZE(device) != 2) {
        PyErr_Format(PyExc_TypeError, "%s: __dlpack_device__ gave %R; expected a pair of integers", tensor->name,
                     device);
        goto done;
    }
    if (tcg_read_int(tensor->name, "the type of __dlpack_device__", PyTuple_GET_ITEM(device, 0), &type) ||
        tcg_read_int(tensor->name, "the id of __dlpack_device__", PyTuple_GET_ITEM(device, 1), &id) ||
        device_from_dl(tensor, type, id))
        goto done;
    tensor->pending = true;
    failed = 0;
done:
    Py_DECREF(device);
    return failed;
}

/* torch before the exchange API exports from the current device alone, and never where requires_grad is set. */
static PyObject *enter_torch_device(tcg_state *state, int device) {
    PyObject *cuda, *manager;
    long current;
    if (tcg_torch_device(state, &current))
        return NULL;
    if (current == device)
        return Py_NewRef(Py_None);
    if (!(cuda = PyImport_ImportModule("torch.cuda")))
        return NULL;
    manager = tcg_enter(state, PyObject_CallMethod(cuda, "device", "i", device));
    Py_DECREF(cuda);
    return manager;
}

static void exit_torch_device(tcg_state *state, PyObject *manager) /* steals */
{
    tcg_exception saved;
    tcg_exception_save(&saved);
    if (manager && manager != Py_None) {
        PyObject *left = PyObject_CallMethodObjArgs(manager, state->str___exit__, Py_None, Py_None, Py_None, NULL);
        if (!left)
            PyErr_WriteUnraisable(manager);
        Py_XDECREF(left);
    }
    Py_XDECREF(manager);
    tcg_exception_restore(&saved);
}

/* Asks for a versioned capsule first, then as producers older than DLPack 1.0 know it. */
static PyObject *call_dlpack(tcg_state *state, PyObject *producer, PyObject *stream) {
    PyObject *arguments[3] = {producer, stream ? stream : state->dlpack_version, state->dlpack_version};
    PyObject *capsule =
        PyObject_VectorcallMethod(state->str___dlpack__, arguments, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                  stream ? state->kwnames_stream_max_version : state->kwnames_max_version);
    if (capsule || !PyErr_ExceptionMatches(PyExc_TypeError))
        return capsule;
    PyErr_Clear();
    arguments[0] = producer;
    arguments[1] = stream;
    return PyObject_VectorcallMethod(state->str___dlpack__, arguments, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                     stream ? state->kwnames_stream : NULL);
}

int tcg_dlpack_finish(tcg_state *state, tcg_tensor *tensor, uintptr_t stream) {
    bool torch = tensor->type->framework == TCG_FRAMEWORK_TORCH;
    int promised = tensor->device, failed = -1;
    PyObject *producer = Py_NewRef(tensor->object), *number = NULL, *capsule = NULL, *scope = NULL;

    tensor->pending = false;
    if (torch) {
        if (check_grad(state, tensor) || check_negative(state, tensor))
            goto done;
        PyObject *detached = PyObject_CallMethodNoArgs(producer, state->str_detach);
        if (!detached)
            goto done;
        Py_SETREF(producer, detached);
    }
    if (promised != TCG_HOST) {
        number = stream ? PyLong_FromUnsignedLongLong(stream) : PyLong_FromLong(-1);
        if (!number || (torch && !(scope = enter_torch_device(state, promised))))
            goto done;
    }
    capsule = call_dlpack(state, producer, number);
    if (!capsule) {
        if (torch)
            tcg_refuse(tensor, NO_PLAIN_MEMORY);
        goto done;
    }
    if (!PyCapsule_CheckExact(capsule)) {
        PyErr_Format(PyExc_TypeError, "%s: __dlpack__ gave %s; expected a capsule", tensor->name,
                     Py_TYPE(capsule)->tp_name);
        goto done;
    }
    tensor->any_device = false;
    if (tcg_capsule_take(tensor, capsule))
        goto done;
    if (tensor->device != promised) {
        PyErr_Format(PyExc_ValueError, "%s: __dlpack_device__ and the capsule differ in the device", tensor->name);
        goto done;
    }
    if (tensor->type->framework == TCG_FRAMEWORK_JAX) /* immutable, and its capsules are older than the flag */
        tensor->read_only = true;
    failed = 0;
done:
    if (scope)
        exit_torch_device(state, scope);
    Py_XDECREF(number);
    Py_XDECREF(capsule);
    Py_DECREF(producer);
    return failed;
}
