/* NumPy without its C API, so that neither the build nor the import of this module needs it: arrays through
 * __array_interface__, new ones by numpy.empty, dtypes by identity or name. */
#include "tensor.h"

#include <string.h>

PyObject *tcg_numpy_dtype(tcg_state *state, int dtype)
{
    switch (dtype) {
    case TCG_f16:
        return TCG_CACHED(&state->numpy_float16, "numpy", state->str_float16);
    case TCG_f32:
        return TCG_CACHED(&state->numpy_float32, "numpy", state->str_float32);
    default: {
        PyObject *bfloat16 = TCG_CACHED(&state->numpy_bfloat16, "ml_dtypes", state->str_bfloat16);
        if (!bfloat16 && PyErr_ExceptionMatches(PyExc_ImportError))
            PyErr_SetString(PyExc_TypeError, "bfloat16 results on the host need the package ml_dtypes, for NumPy's dtype");
        return bfloat16;
    }
    }
}

/* The memory of a NumPy array made here. */
static int array_pointer(tcg_state *state, PyObject *array, void **pointer)
{
    PyObject *interface = PyObject_GetAttr(array, state->str___array_interface__);
    PyObject *data = interface ? PyDict_GetItemWithError(interface, state->str_data) : NULL;
    if (data && PyTuple_Check(data) && PyTuple_GET_SIZE(data) == 2)
        *pointer = PyLong_AsVoidPtr(PyTuple_GET_ITEM(data, 0));
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "numpy.empty gave no NumPy array");
    Py_XDECREF(interface);
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *tcg_numpy_empty(tcg_state *state, PyObject *dtype, int ndim, const int64_t *shape, void **data)
{
    PyObject *empty = TCG_CACHED(&state->numpy_empty, "numpy", state->str_empty);
    PyObject *size = empty && dtype ? tcg_shape_tuple(ndim, shape) : NULL, *array = NULL;
    if (size) {
        PyObject *arguments[] = {size, dtype};
        array = PyObject_Vectorcall(empty, arguments, 2, NULL);
    }
    if (array && array_pointer(state, array, data))
        Py_CLEAR(array);
    Py_XDECREF(size);
    return array;
}

/* numpy's own scalar type of the array's dtype is ml_dtypes' bfloat16: never by its letter, which is not unique. */
static int is_ml_bfloat16(tcg_state *state, PyObject *array)
{
    PyObject *dtype = NULL, *type = NULL, *module = tcg_imported("ml_dtypes"), *bfloat16 = NULL;
    int is = 0;
    if (module) {
        is = tcg_optional_attr(array, state->str_dtype, &dtype);
        if (is > 0)
            is = tcg_optional_attr(dtype, state->str_type, &type);
        if (is > 0)
            is = tcg_optional_attr(module, state->str_bfloat16, &bfloat16);
        if (is > 0)
            is = type == bfloat16;
    }
    Py_XDECREF(dtype);
    Py_XDECREF(type);
    Py_XDECREF(module);
    Py_XDECREF(bfloat16);
    return is;
}

int tcg_numpy_locate(tcg_state *state, tcg_tensor *tensor)
{
    if (tcg_interface_locate(state, tensor)) {
        /* Fields of records have strides that are no multiple of the element: through a packed copy. */
        if (tensor->dtype < 0 || !PyErr_ExceptionMatches(PyExc_ValueError))
            return -1;
        PyErr_Clear();
        PyObject *numpy = PyImport_ImportModule("numpy"), *copy = NULL;
        if (numpy)
            copy = PyObject_CallMethodOneArg(numpy, state->str_ascontiguousarray, tensor->object);
        Py_XDECREF(numpy);
        if (!copy)
            return -1;
        bool read_only = tensor->read_only;
        tensor->held = copy;
        if (tcg_interface_locate(state, tensor))
            return -1;
        tensor->read_only = read_only;
        tensor->write_back = true;
    }
    if (tensor->dtype == TCG_bf16) {
        int is = is_ml_bfloat16(state, tensor->object);
        if (is < 0)
            return -1;
        if (!is) {
            tensor->dtype = -1;
            strcpy(tensor->dtype_text, "void16");
        }
    }
    tensor->device = TCG_HOST;
    return 0;
}

/* ---- dtypes as users write them ---------------------------------------------------------------------------------------- */

static int dtype_from_text(PyObject *text)
{
    static const char torch[] = "torch.";
    const char *name = PyUnicode_AsUTF8(text);
    if (!name)
        return -1;
    if (!strncmp(name, torch, sizeof torch - 1))
        name += sizeof torch - 1;
    for (int i = 0; i < TCG_DTYPE_COUNT; i++)
        if (!strcmp(name, tcg_dtype_names[i]))
            return i;
    return -1;
}

int tcg_dtype_from_object(tcg_state *state, PyObject *object)
{
    PyObject *text = NULL;
    int dtype = -1;

    if (object == __atomic_load_n(&state->torch_float32, __ATOMIC_ACQUIRE))
        return TCG_f32;
    if (PyUnicode_Check(object))
        text = Py_NewRef(object);
    else if (PyType_Check(object)) /* numpy.float32, ml_dtypes.bfloat16, jax.numpy.float32 */
        tcg_optional_attr(object, state->str___name__, &text);
    else if (!strcmp(Py_TYPE(object)->tp_name, "torch.dtype"))
        text = PyObject_Str(object);
    else /* numpy.dtype, and scalar types of frameworks */
        tcg_optional_attr(object, state->str_name, &text);
    if (text && PyUnicode_Check(text))
        dtype = dtype_from_text(text);
    if (dtype >= 0 && !PyUnicode_Check(object) && !PyType_Check(object)) {
        /* numpy.dtype('>f4') is named float32 as well. */
        PyObject *native = NULL;
        if (PyObject_HasAttrString(object, "isnative") && (native = PyObject_GetAttrString(object, "isnative")) && native == Py_False)
            dtype = -1;
        Py_XDECREF(native);
    }
    Py_XDECREF(text);
    if (PyErr_Occurred())
        return -1;
    if (dtype < 0)
        PyErr_Format(PyExc_TypeError, "out_dtype: expected float16, bfloat16 or float32 as a name or a dtype of NumPy or a framework, got %R",
                     object);
    return dtype;
}
