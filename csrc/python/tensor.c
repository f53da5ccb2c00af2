/* Operands whatever their protocol: which protocol a type speaks, checked sizes and strides, overlap, release. */
#include "tensor.h"

#include <string.h>

/* ---- small helpers --------------------------------------------------------------------------------------------- */

int tcg_optional_attr(PyObject *object, PyObject *name, PyObject **result) {
#if PY_VERSION_HEX >= 0x030D0000
    return PyObject_GetOptionalAttr(object, name, result);
#else
    *result = PyObject_GetAttr(object, name);
    if (*result)
        return 1;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    return 0;
#endif
}

int tcg_call_for_long(PyObject *function, long *value) {
    PyObject *number = function ? PyObject_CallNoArgs(function) : NULL;
    if (!number)
        return -1;
    *value = PyLong_AsLong(number);
    Py_DECREF(number);
    return *value == -1 && PyErr_Occurred() ? -1 : 0;
}

PyObject *tcg_enter(tcg_state *state, PyObject *manager) {
    PyObject *entered = manager ? PyObject_CallMethodNoArgs(manager, state->str___enter__) : NULL;
    if (!entered)
        Py_CLEAR(manager);
    Py_XDECREF(entered);
    return manager;
}

PyObject *tcg_imported(const char *name) {
    PyObject *module = NULL, *text = PyUnicode_FromString(name);
    if (text)
        module = PyImport_GetModule(text);
    Py_XDECREF(text);
    if (!module)
        PyErr_Clear();
    return module;
}

static PyObject *cached(PyObject **slot, const char *root, PyObject *const *names, bool or_none) {
    PyObject *found = __atomic_load_n(slot, __ATOMIC_ACQUIRE), *none = NULL;
    if (found)
        return found;
    found = PyImport_ImportModule(root);
    for (; found && *names; names++) {
        PyObject *next = PyObject_GetAttr(found, *names);
        Py_SETREF(found, next);
    }
    if (!found && or_none &&
        (PyErr_ExceptionMatches(PyExc_AttributeError) || PyErr_ExceptionMatches(PyExc_ImportError))) {
        PyErr_Clear();
        found = Py_NewRef(Py_None);
    }
    if (!found)
        return NULL;
    if (__atomic_compare_exchange_n(slot, &none, found, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return found;
    Py_DECREF(found); /* another thread was first */
    return none;
}

PyObject *tcg_cached(PyObject **slot, const char *root, PyObject *const *names) {
    return cached(slot, root, names, false);
}

PyObject *tcg_cached_or_none(PyObject **slot, const char *root, PyObject *const *names) {
    return cached(slot, root, names, true);
}

int tcg_torch_device(tcg_state *state, long *ordinal) {
    return tcg_call_for_long(TCG_CACHED(&state->torch_get_device, "torch", state->str__C, state->str__cuda_getDevice),
                             ordinal);
}

static int refuse_int(const char *argument, const char *what, PyObject *object) {
    PyErr_Format(PyExc_TypeError, "%s: %s is %R; expected an integer", argument, what, object);
    return -1;
}

int tcg_read_int(const char *argument, const char *what, PyObject *object, int64_t *value) {
    if (!PyIndex_Check(object))
        return refuse_int(argument, what, object);
    *value = PyLong_AsLongLong(object);
    if (*value == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError))
            PyErr_Format(PyExc_ValueError, "%s: %s does not fit in 64 bits", argument, what);
        return -1;
    }
    return 0;
}

int tcg_read_address(const char *argument, const char *what, PyObject *object, uintptr_t *value) {
    PyObject *number;
    if (!PyIndex_Check(object))
        return refuse_int(argument, what, object);
    number = PyNumber_Index(object);
    if (!number)
        return -1;
    *value = (uintptr_t)PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError))
            PyErr_Format(PyExc_ValueError, "%s: %s is %R; expected 0 to 2**64 - 1", argument, what, object);
        return -1;
    }
    return 0;
}

const char *tcg_device_text(int device, char text[24]) {
    if (device == TCG_HOST)
        strcpy(text, "the host");
    else
        snprintf(text, 24, "cuda:%d", device);
    return text;
}

PyObject *tcg_shape_tuple(int ndim, const int64_t *shape) {
    PyObject *tuple = PyTuple_New(ndim);
    for (int i = 0; tuple && i < ndim; i++) {
        PyObject *size = PyLong_FromLongLong(shape[i]);
        if (!size)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, size);
    }
    return tuple;
}

PyObject *tcg_shape_text(int ndim, const int64_t *shape) {
    PyObject *text = NULL, *tuple = tcg_shape_tuple(ndim, shape);
    if (tuple)
        text = PyObject_Repr(tuple);
    Py_XDECREF(tuple);
    return text;
}

int tcg_raise(const tcg_state *state, const tcg_error *err) {
    switch (err->kind) {
    case TCG_ERR_CUDA: {
        PyObject *code = NULL, *error = PyObject_CallFunction(state->cuda_error, "s", err->text);
        if (error && (code = PyLong_FromLong(err->code)) && !PyObject_SetAttrString(error, "code", code))
            PyErr_SetObject(state->cuda_error, error);
        Py_XDECREF(code);
        Py_XDECREF(error);
        break;
    }
    case TCG_ERR_VALUE:
        PyErr_SetString(PyExc_ValueError, err->text);
        break;
    case TCG_ERR_MEMORY:
        PyErr_SetString(PyExc_MemoryError, err->text);
        break;
    default:
        PyErr_SetString(PyExc_RuntimeError, err->text);
    }
    return -1;
}

int tcg_refuse(const tcg_tensor *tensor, const char *what) {
    PyObject *type, *value, *traceback, *text = NULL, *cause = NULL;
    /* Not the interpreter's own: those are the caller's to see. */
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError))
        return -1;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback)
        PyException_SetTraceback(value, traceback);
    text = PyObject_Str(value);
    if (text) { /* the first line: torch appends a C++ stack */
        Py_ssize_t length = PyUnicode_GET_LENGTH(text);
        Py_ssize_t line = PyUnicode_FindChar(text, '\n', 0, length, 1);
        if (line >= 0)
            Py_SETREF(text, PyUnicode_Substring(text, 0, line));
    }
    if (text)
        PyErr_Format(PyExc_TypeError, "%s: %s: %U", tensor->name, what, text);
    Py_XDECREF(text);
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyObject *new_type, *new_value, *new_traceback;
        PyErr_Fetch(&new_type, &new_value, &new_traceback);
        PyErr_NormalizeException(&new_type, &new_value, &new_traceback);
        cause = Py_XNewRef(value);
        PyException_SetCause(new_value, cause); /* steals cause */
        PyErr_Restore(new_type, new_value, new_traceback);
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

/* ---- which protocol -------------------------------------------------------------------------------------------- */

/* Whether the type's module is `root` or inside it. */
static bool from_module(tcg_state *state, PyObject *type, const char *root) {
    PyObject *module = NULL;
    bool found = false;
    if (tcg_optional_attr(type, state->str___module__, &module) > 0 && PyUnicode_Check(module)) {
        const char *text = PyUnicode_AsUTF8(module);
        size_t length = strlen(root);
        found = text && !strncmp(text, root, length) && (text[length] == '.' || text[length] == 0);
    }
    PyErr_Clear();
    Py_XDECREF(module);
    return found;
}

static bool any_base_from(tcg_state *state, PyTypeObject *type, const char *root) {
    PyObject *bases = Py_XNewRef(type->tp_mro); /* attributes of types can run code that changes it */
    bool found = false;
    for (Py_ssize_t i = 0; bases && i < PyTuple_GET_SIZE(bases) && !found; i++)
        found = from_module(state, PyTuple_GET_ITEM(bases, i), root);
    Py_XDECREF(bases);
    return found;
}

/* Whether a base of the type is the named class of a module that lies in `root`. */
static bool has_base(tcg_state *state, PyTypeObject *type, const char *root, const char *name) {
    PyObject *bases = Py_XNewRef(type->tp_mro);
    bool found = false;
    for (Py_ssize_t i = 0; bases && i < PyTuple_GET_SIZE(bases) && !found; i++) {
        PyTypeObject *base = (PyTypeObject *)PyTuple_GET_ITEM(bases, i);
        const char *dot = strrchr(base->tp_name, '.');
        found = !strcmp(dot ? dot + 1 : base->tp_name, name) && from_module(state, (PyObject *)base, root);
    }
    Py_XDECREF(bases);
    return found;
}

/* Whether the type is, or (with `subtypes`) derives from, the class `name` of an already imported module. */
static bool is_class(PyTypeObject *type, const char *module_name, PyObject *name, bool subtypes) {
    PyObject *found = NULL, *module = tcg_imported(module_name);
    bool is = false;
    if (module && tcg_optional_attr(module, name, &found) > 0 && PyType_Check(found))
        is = type == (PyTypeObject *)found || (subtypes && PyType_IsSubtype(type, (PyTypeObject *)found));
    PyErr_Clear();
    Py_XDECREF(found);
    Py_XDECREF(module);
    return is;
}

/* 1 when the type itself has the attribute, -1 with an exception. */
static int type_has(PyTypeObject *type, PyObject *name) {
    PyObject *found = NULL;
    int has = tcg_optional_attr((PyObject *)type, name, &found);
    Py_XDECREF(found);
    return has;
}

static int classify_exchange(tcg_state *state, tcg_type *entry) {
    PyObject *const names[] = {state->str___dlpack_c_exchange_api__, state->str___c_dlpack_exchange_api__};
    for (int i = 0; i < 2; i++) {
        PyObject *attribute = NULL;
        int has = tcg_optional_attr((PyObject *)entry->type, names[i], &attribute);
        if (has > 0)
            has = tcg_exchange_api(attribute, &entry->api);
        Py_XDECREF(attribute);
        if (has < 0)
            return -1;
        if (entry->api) {
            entry->protocol = TCG_PROTOCOL_EXCHANGE;
            return 0;
        }
    }
    return 0;
}

/* Finds the C functions behind two attributes of torch.Tensor: the lookup costs as much as what it gives. */
static int find_torch_functions(tcg_state *state, tcg_type *entry) {
    PyObject *property = NULL, *method = NULL;
    if (tcg_optional_attr((PyObject *)entry->type, state->str_requires_grad, &property) < 0 ||
        tcg_optional_attr((PyObject *)entry->type, state->str_is_neg, &method) < 0) {
        Py_XDECREF(property);
        return -1;
    }
    if (property && Py_IS_TYPE(property, &PyGetSetDescr_Type) &&
        PyType_IsSubtype(entry->type, PyDescr_TYPE(property)))
        entry->requires_grad = ((PyGetSetDescrObject *)property)->d_getset;
    if (method && Py_IS_TYPE(method, &PyMethodDescr_Type) && PyType_IsSubtype(entry->type, PyDescr_TYPE(method))) {
        const PyMethodDef *def = ((PyMethodDescrObject *)method)->d_method;
        if (def->ml_flags == METH_NOARGS)
            entry->is_neg = def->ml_meth;
    }
    Py_XDECREF(property);
    Py_XDECREF(method);
    return 0;
}

static int refuse_type(tcg_state *state, const tcg_tensor *tensor) {
    PyTypeObject *type = Py_TYPE(tensor->object);
    if (any_base_from(state, type, "jax") && has_base(state, type, "jax", "Tracer"))
        PyErr_Format(PyExc_TypeError,
                     "%s: a traced JAX value (%s) has no memory yet; call tcgemm outside of jit, grad and vmap",
                     tensor->name, type->tp_name);
    else
        PyErr_Format(PyExc_TypeError,
                     "%s: expected an array of PyTorch, CuPy, JAX, Numba or NumPy, an object with __dlpack__ or "
                     "__cuda_array_interface__, or a DLPack capsule, got %s",
                     tensor->name, type->tp_name);
    return -1;
}

/* Fills in *entry; *by_type: what was found holds for every object of the type. */
static int classify(tcg_state *state, tcg_tensor *tensor, tcg_type *entry, bool *by_type) {
    PyObject *object = tensor->object, *found = NULL;
    PyTypeObject *type = Py_TYPE(object);
    int has;

    *entry = (tcg_type){.type = type};
    *by_type = true;
    if (type == (PyTypeObject *)state->array_type) {
        entry->protocol = TCG_PROTOCOL_ARRAY;
        return 0;
    }
    if (PyCapsule_CheckExact(object)) {
        entry->protocol = TCG_PROTOCOL_CAPSULE;
        return 0;
    }
    if (PyType_Check(object) || has_base(state, type, "jax", "Tracer"))
        return refuse_type(state, tensor);
    if (has_base(state, type, "torch", "FakeTensor") || has_base(state, type, "torch", "FunctionalTensor")) {
        PyErr_Format(PyExc_TypeError, "%s: a torch %s has no memory; tcgemm needs real tensors", tensor->name,
                     type->tp_name);
        return -1;
    }
    if (any_base_from(state, type, "torch")) {
        entry->framework = TCG_FRAMEWORK_TORCH;
        entry->plain = is_class(type, "torch", state->str_Tensor, false) ||
                       is_class(type, "torch.nn", state->str_Parameter, false);
        if (find_torch_functions(state, entry))
            return -1;
    }
    if (classify_exchange(state, entry))
        return -1;
    if (entry->protocol == TCG_PROTOCOL_EXCHANGE)
        return 0;
    if (tcg_numpy_is_array(type)) {
        if (is_class(type, "numpy.ma", state->str_MaskedArray, true)) {
            PyErr_Format(PyExc_TypeError, "%s: masked arrays are not supported", tensor->name);
            return -1;
        }
        entry->protocol = TCG_PROTOCOL_NUMPY;
        entry->framework = TCG_FRAMEWORK_NUMPY;
        return 0;
    }
    if ((has = type_has(type, state->str___cuda_array_interface__)) < 0)
        return -1;
    if (has) {
        if (any_base_from(state, type, "cupy"))
            entry->framework = TCG_FRAMEWORK_CUPY;
        else if (any_base_from(state, type, "numba") || any_base_from(state, type, "numba_cuda"))
            entry->framework = TCG_FRAMEWORK_NUMBA;
        if (entry->framework == TCG_FRAMEWORK_CUPY || entry->framework == TCG_FRAMEWORK_NUMBA) {
            entry->protocol =
                entry->framework == TCG_FRAMEWORK_CUPY && is_class(type, "cupy", state->str_ndarray, false)
                    ? TCG_PROTOCOL_CUPY
                    : TCG_PROTOCOL_INTERFACE;
            return 0;
        }
    }
    if (any_base_from(state, type, "jax") || any_base_from(state, type, "jaxlib"))
        entry->framework = TCG_FRAMEWORK_JAX;
    if ((has = type_has(type, state->str___dlpack__)) < 0)
        return -1;
    if (has) {
        entry->protocol = TCG_PROTOCOL_DLPACK;
        return 0;
    }
    /* From here on what one object has says nothing about the next one. */
    *by_type = false;
    if ((has = tcg_optional_attr(object, state->str___dlpack__, &found)) > 0)
        entry->protocol = TCG_PROTOCOL_DLPACK;
    else if (has == 0 && (has = tcg_optional_attr(object, state->str___cuda_array_interface__, &found)) > 0)
        entry->protocol = TCG_PROTOCOL_INTERFACE;
    Py_XDECREF(found);
    if (has < 0)
        return -1;
    return has ? 0 : refuse_type(state, tensor);
}

static int find_type(tcg_state *state, tcg_tensor *tensor) {
    PyTypeObject *type = Py_TYPE(tensor->object);
    bool by_type = false;
    int count = atomic_load_explicit(&state->type_count, memory_order_acquire);
    for (int i = 0; i < count; i++) {
        if (state->types[i].type == type) {
            tensor->type = &state->types[i];
            return 0;
        }
    }
    if (classify(state, tensor, &tensor->own_type, &by_type))
        return -1;
    tensor->type = &tensor->own_type;
    if (!by_type || count == TCG_MAX_TYPES)
        return 0;

    pthread_mutex_lock(&state->types_lock);
    count = atomic_load_explicit(&state->type_count, memory_order_relaxed);
    bool known = count == TCG_MAX_TYPES;
    for (int i = 0; i < count && !known; i++)
        known = state->types[i].type == type;
    if (!known) {
        state->types[count] = tensor->own_type;
        Py_INCREF(type);
        atomic_store_explicit(&state->type_count, count + 1, memory_order_release);
    }
    pthread_mutex_unlock(&state->types_lock);
    return 0;
}

/* ---- acquire and release --------------------------------------------------------------------------------------- */

void tcg_tensor_init(tcg_tensor *tensor, const char *name, PyObject *object) {
    tensor->name = name;
    tensor->object = object;
    tensor->type = NULL;
    tensor->data = NULL;
    tensor->dtype = -1;
    tensor->device = TCG_HOST;
    tensor->ndim = 0;
    tensor->any_device = tensor->read_only = tensor->pending = tensor->write_back = false;
    tensor->stream = 0;
    tensor->held = NULL;
    tensor->legacy = NULL;
    tensor->versioned = NULL;
}

int tcg_tensor_locate(tcg_state *state, tcg_tensor *tensor) {
    if (find_type(state, tensor))
        return -1;
    switch (tensor->type->protocol) {
    case TCG_PROTOCOL_EXCHANGE:
        return tcg_exchange_locate(state, tensor);
    case TCG_PROTOCOL_NUMPY:
        return tcg_numpy_locate(state, tensor);
    case TCG_PROTOCOL_INTERFACE:
        return tcg_interface_locate(state, tensor);
    case TCG_PROTOCOL_CUPY:
        return tcg_cupy_locate(state, tensor);
    case TCG_PROTOCOL_DLPACK:
        return tcg_dlpack_locate(state, tensor);
    case TCG_PROTOCOL_CAPSULE:
        return tcg_capsule_take(tensor, tensor->object);
    case TCG_PROTOCOL_ARRAY:
        return tcg_array_locate(tensor);
    default:
        return refuse_type(state, tensor);
    }
}

int tcg_tensor_finish(tcg_state *state, tcg_tensor *tensor, uintptr_t stream) {
    return tensor->pending ? tcg_dlpack_finish(state, tensor, stream) : 0;
}

static void release(PyObject *held, DLManagedTensor *legacy, DLManagedTensorVersioned *versioned) {
    tcg_exception saved;
    tcg_exception_save(&saved);
    if (legacy && legacy->deleter)
        legacy->deleter(legacy);
    if (versioned && versioned->deleter)
        versioned->deleter(versioned);
    Py_XDECREF(held);
    tcg_exception_restore(&saved);
}

void tcg_tensor_release(tcg_tensor *tensor) {
    PyObject *held = tensor->held;
    DLManagedTensor *legacy = tensor->legacy;
    DLManagedTensorVersioned *versioned = tensor->versioned;
    if (!held && !legacy && !versioned)
        return;
    tensor->held = NULL;
    tensor->legacy = NULL;
    tensor->versioned = NULL;
    release(held, legacy, versioned);
}

/* What tensors owned, until the device has done with it. */
typedef struct tcg_hold {
    int count;
    struct {
        PyObject *held;
        DLManagedTensor *legacy;
        DLManagedTensorVersioned *versioned;
    } items[3];
} tcg_hold;

/* With the GIL or without it. Once the interpreter is on its way out there is nobody left to give anything to. */
static void hold_release(void *arg) {
    tcg_hold *hold = arg;
    if (!Py_IsInitialized() || Py_IsFinalizing())
        return;
    PyGILState_STATE gil = PyGILState_Ensure();
    for (int i = 0; i < hold->count; i++)
        release(hold->items[i].held, hold->items[i].legacy, hold->items[i].versioned);
    PyMem_RawFree(hold);
    PyGILState_Release(gil);
}

int tcg_tensors_release_after(const tcg_state *state, tcg_tensor *const *tensors, int count, int device,
                              uintptr_t stream) {
    tcg_hold *hold = PyMem_RawCalloc(1, sizeof *hold);
    tcg_error err, ignored;
    int failed;
    if (!hold)
        tcg_fail(&err, TCG_ERR_MEMORY, 0, "out of host memory");
    for (int i = 0; hold && i < count; i++) {
        tcg_tensor *t = tensors[i];
        hold->items[i].held = t->held || t->legacy || t->versioned ? t->held : Py_NewRef(t->object);
        hold->items[i].legacy = t->legacy;
        hold->items[i].versioned = t->versioned;
        t->held = NULL;
        t->legacy = NULL;
        t->versioned = NULL;
        hold->count = i + 1;
    }
    Py_BEGIN_ALLOW_THREADS failed = !hold || tcg_release_after(device, stream, hold_release, hold, &err);
    if (failed)
        tcg_synchronize(device, stream, &ignored);
    Py_END_ALLOW_THREADS if (failed && hold) hold_release(hold);
    return failed ? tcg_raise(state, &err) : 0;
}

/* ---- sizes and strides ----------------------------------------------------------------------------------------- */

bool tcg_packed_strides(int ndim, const int64_t *shape, int64_t step, int64_t *strides) {
    bool overflow = false;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[i] = step;
        overflow |= __builtin_mul_overflow(step, shape[i] ? shape[i] : 1, &step);
    }
    return !overflow;
}

int64_t tcg_shape_count(int ndim, const int64_t *shape) {
    int64_t count = 1;
    for (int i = 0; i < ndim; i++)
        __builtin_mul_overflow(count, shape[i], &count); /* wraps around; with a factor of 0 it is 0 all the same */
    return count;
}

int tcg_tensor_layout(tcg_tensor *tensor, bool has_strides) {
    int64_t bytes = tcg_elem_bytes(tensor);
    int64_t count = 1, low = 0, high = 0, extent, length;
    bool empty = false, overflow = false;

    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s: the shape has a negative size, %lld", tensor->name,
                         (long long)tensor->shape[i]);
            return -1;
        }
        empty |= tensor->shape[i] == 0;
    }
    if (!has_strides)
        overflow = !tcg_packed_strides(tensor->ndim, tensor->shape, 1, tensor->strides) && !empty;
    if (empty) {
        count = 0;
    } else {
        for (int i = 0; i < tensor->ndim; i++) {
            overflow |= __builtin_mul_overflow(count, tensor->shape[i], &count);
            if (tensor->shape[i] == 1)
                continue;
            overflow |= __builtin_mul_overflow(tensor->strides[i], tensor->shape[i] - 1, &extent);
            overflow |= __builtin_add_overflow(extent < 0 ? low : high, extent, extent < 0 ? &low : &high);
            if (overflow)
                break;
        }
        /* The kernels and tcg_tensors_overlap add a few such lengths; a quarter of the range keeps them exact. */
        overflow |= __builtin_sub_overflow(high, low, &length) || __builtin_mul_overflow(length, 4 * bytes, &length);
        overflow |= __builtin_mul_overflow(count, 4 * bytes, &length);
        if (!overflow && !tensor->data) {
            PyErr_Format(PyExc_ValueError, "%s: a NULL pointer where %lld elements should be", tensor->name,
                         (long long)count);
            return -1;
        }
        if (!overflow) {
            uintptr_t address = (uintptr_t)tensor->data, edge;
            overflow |= __builtin_sub_overflow(address, (uintptr_t)(-low * bytes), &edge);
            overflow |= __builtin_add_overflow(address, (uintptr_t)((high + 1) * bytes), &edge);
        }
    }
    if (overflow) {
        PyErr_Format(PyExc_ValueError, "%s: shape and strides reach beyond the address space", tensor->name);
        return -1;
    }
    tensor->count = count;
    tensor->low = low;
    tensor->high = high;
    return 0;
}

void tcg_tensor_packed(tcg_tensor *tensor, void *data, int dtype, int device, int ndim, const int64_t *shape) {
    const int64_t count = tcg_shape_count(ndim, shape);
    tensor->data = data;
    tensor->dtype = dtype;
    tensor->device = device;
    tensor->ndim = ndim;
    memcpy(tensor->shape, shape, (size_t)ndim * sizeof *shape);
    tcg_packed_strides(ndim, shape, 1, tensor->strides);
    tensor->count = count;
    tensor->low = 0;
    tensor->high = count ? count - 1 : 0;
}

/* ---- overlap ------------------------------------------------------------------------------------------------------
 *
 * Two strided sets of bytes meet when the sum of x[i] * step[i] over integers 0 <= x[i] <= most[i] can be a given
 * number: one term an axis of either operand, and one for the bytes of an element. This is a bounded linear
 * Diophantine equation; depth-first search over the steps in falling order settles what arrays look like in a few
 * nodes, and a budget bounds the rest. */

#define MAX_TERMS (2 * TCG_MAX_NDIM + 2)
#define MAX_NODES 200000

typedef struct term {
    int64_t step, most; /* positive */
} term;

typedef struct equation {
    int count;
    term terms[MAX_TERMS];
    int64_t reach[MAX_TERMS + 1];   /* largest sum of terms[i...] */
    int64_t divisor[MAX_TERMS + 1]; /* greatest common divisor of their steps; 0 for none */
    long nodes;
} equation;

static int64_t gcd(int64_t x, int64_t y) {
    while (y) {
        int64_t rest = x % y;
        x = y;
        y = rest;
    }
    return x;
}

static void add_term(equation *eq, int64_t step, int64_t most) {
    int at = 0;
    if (step == 0 || most == 0)
        return;
    while (at < eq->count && eq->terms[at].step > step)
        at++;
    if (at < eq->count && eq->terms[at].step == step) {
        eq->terms[at].most += most;
        return;
    }
    memmove(&eq->terms[at + 1], &eq->terms[at], (size_t)(eq->count - at) * sizeof(term));
    eq->terms[at] = (term){step, most};
    eq->count++;
}

static void prepare(equation *eq) {
    eq->reach[eq->count] = eq->divisor[eq->count] = 0;
    for (int i = eq->count - 1; i >= 0; i--) {
        eq->reach[i] = eq->reach[i + 1] + eq->terms[i].step * eq->terms[i].most;
        eq->divisor[i] = gcd(eq->terms[i].step, eq->divisor[i + 1]);
    }
    eq->nodes = 0;
}

/* Whether the terms from `at` on can sum to `rest`; true when the budget is spent. */
static bool solvable(equation *eq, int at, int64_t rest) {
    if (rest < 0 || rest > eq->reach[at])
        return false;
    if (rest == 0)
        return true;
    if (rest % eq->divisor[at]) /* rest > 0, so a term is left */
        return false;
    if (++eq->nodes > MAX_NODES)
        return true;
    int64_t step = eq->terms[at].step, below = eq->reach[at + 1];
    int64_t first = rest > below ? (rest - below + step - 1) / step : 0;
    int64_t last = rest / step < eq->terms[at].most ? rest / step : eq->terms[at].most;
    for (int64_t x = last; x >= first; x--) {
        if (solvable(eq, at + 1, rest - x * step))
            return true;
        if (++eq->nodes > MAX_NODES)
            return true;
    }
    return false;
}

static void add_axes(equation *eq, const tcg_tensor *t, int64_t bytes) {
    for (int i = 0; i < t->ndim; i++) {
        int64_t stride = t->strides[i];
        if (t->shape[i] > 1)
            add_term(eq, (stride < 0 ? -stride : stride) * bytes, t->shape[i] - 1);
    }
}

bool tcg_tensors_overlap(const tcg_tensor *x, const tcg_tensor *y) {
    if (!x->count || !y->count)
        return false;
    int64_t bx = tcg_dtype_bytes[x->dtype], by = tcg_dtype_bytes[y->dtype];
    /* First and last byte of each. */
    uintptr_t x0 = (uintptr_t)x->data + (uintptr_t)(x->low * bx),
              x1 = (uintptr_t)x->data + (uintptr_t)((x->high + 1) * bx - 1);
    uintptr_t y0 = (uintptr_t)y->data + (uintptr_t)(y->low * by),
              y1 = (uintptr_t)y->data + (uintptr_t)((y->high + 1) * by - 1);
    if (x1 < y0 || y1 < x0)
        return false;
    /* x0 + (axes of x) + byte = y1 - (axes of y) - byte. */
    equation eq = {.count = 0};
    add_axes(&eq, x, bx);
    add_axes(&eq, y, by);
    add_term(&eq, 1, bx - 1 + by - 1);
    prepare(&eq);
    return solvable(&eq, 0, (int64_t)(y1 - x0));
}

bool tcg_tensor_overlaps_itself(const tcg_tensor *t) {
    term axes[TCG_MAX_NDIM];
    int count = 0;
    int64_t reach = 0;
    bool apart = true;
    if (!t->count)
        return false;
    for (int i = t->ndim - 1; i >= 0; i--) {
        int64_t step = t->strides[i] < 0 ? -t->strides[i] : t->strides[i];
        int at = count;
        if (t->shape[i] == 1)
            continue;
        if (step == 0)
            return true;
        for (; at > 0 && axes[at - 1].step > step; at--)
            axes[at] = axes[at - 1];
        axes[at] = (term){step, t->shape[i] - 1};
        count++;
    }
    for (int i = 0; i < count; i++) { /* each axis steps over all that the smaller ones reach */
        apart &= axes[i].step > reach;
        reach += axes[i].step * axes[i].most;
    }
    if (apart)
        return false;
    /* Two different elements meet when sum of d[i] * step[i] = 0 with |d[i]| <= most[i], not all zero. For each axis
     * in turn, its d = y >= 1 and the axes before it zero: the others' sum, shifted to be non-negative, must reach
     * (sum of most * step) - y * step. That is one equation with an extra term for y - 1. */
    for (int i = 0; i < count; i++) {
        equation eq = {.count = 0};
        int64_t target = -axes[i].step;
        for (int j = i + 1; j < count; j++) {
            add_term(&eq, axes[j].step, 2 * axes[j].most);
            target += axes[j].step * axes[j].most;
        }
        add_term(&eq, axes[i].step, axes[i].most - 1);
        prepare(&eq);
        if (solvable(&eq, 0, target))
            return true;
    }
    return false;
}
