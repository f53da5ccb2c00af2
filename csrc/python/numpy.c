/* NumPy, through its C API, which this file alone includes: arrays as operands, new ones, dtypes. */
#include "tensor.h"

#include <string.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION /* the oldest that pyproject.toml lets run */
#include <numpy/arrayobject.h>

_Static_assert(sizeof(npy_intp) == sizeof(int64_t), "sizes go over without a check");

int tcg_numpy_import(void) { return PyArray_ImportNumPyAPI(); }

bool tcg_numpy_is_array(PyTypeObject *type) { return PyType_IsSubtype(type, &PyArray_Type); }

/* ---- new arrays ------------------------------------------------------------------------------------------------ */

PyObject *tcg_numpy_dtype(tcg_state *state, int dtype) {
    switch (dtype) {
    case TCG_f16:
        return (PyObject *)&PyHalfArrType_Type;
    case TCG_f32:
        return (PyObject *)&PyFloatArrType_Type;
    default: {
        PyObject *bfloat16 = TCG_CACHED(&state->numpy_bfloat16, "ml_dtypes", state->str_bfloat16);
        if (!bfloat16 && PyErr_ExceptionMatches(PyExc_ImportError))
            PyErr_SetString(PyExc_TypeError,
                            "bfloat16 results on the host need the package ml_dtypes, for NumPy's dtype");
        return bfloat16;
    }
    }
}

PyObject *tcg_numpy_empty(PyObject *dtype, int ndim, const int64_t *shape, void **data) {
    npy_intp sizes[TCG_MAX_NDIM];
    PyArray_Descr *descr = NULL;
    PyObject *array;
    if (!dtype || !PyArray_DescrConverter(dtype, &descr))
        return NULL;
    for (int i = 0; i < ndim; i++)
        sizes[i] = shape[i];
    array = PyArray_Empty(ndim, sizes, descr /* steals */, 0);
    if (array)
        *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}

PyObject *tcg_numpy_packed(PyObject *object) {
    return PyArray_FromAny(object, NULL, 1, 0, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ENSUREARRAY, NULL);
}

int tcg_numpy_copy(PyObject *to, PyObject *from) {
    return PyArray_CopyInto((PyArrayObject *)to, (PyArrayObject *)from);
}

PyObject *tcg_numpy_return(PyObject *array) { return PyArray_Return((PyArrayObject *)array); }

/* ---- operands -------------------------------------------------------------------------------------------------- */

/* *dtype is -1 where it is none of ours. bfloat16 is known by the scalar type, never by its letter, which is not
 * unique; where ml_dtypes has not been imported no array has it. */
static int read_dtype(tcg_state *state, const PyArray_Descr *descr, int *dtype) {
    PyTypeObject *type = descr->typeobj;
    PyObject *module, *bfloat16 = NULL;
    *dtype = -1;
    if (!PyDataType_ISNOTSWAPPED(descr))
        return 0;
    if (descr->type_num == NPY_HALF)
        *dtype = TCG_f16;
    else if (descr->type_num == NPY_FLOAT)
        *dtype = TCG_f32;
    if (!PyTypeNum_ISUSERDEF(descr->type_num) || !(module = tcg_imported("ml_dtypes")))
        return 0;
    int has = tcg_optional_attr(module, state->str_bfloat16, &bfloat16);
    if (has > 0 && type == (PyTypeObject *)bfloat16)
        *dtype = TCG_bf16;
    Py_XDECREF(bfloat16);
    Py_DECREF(module);
    return has < 0 ? -1 : 0;
}

/* The name of a dtype that is none of ours. */
static int name_dtype(tcg_tensor *tensor, PyArray_Descr *descr) {
    Py_INCREF(descr); /* the array can be given another one by what runs here */
    PyObject *object = PyObject_GetAttrString((PyObject *)descr, "str");
    const char *text = object ? PyUnicode_AsUTF8(object) : NULL;
    if (text && strlen(text) >= 2 && strchr("<>|=", text[0]))
        tcg_typestr_text(tensor, text);
    else if (text) /* dtypes that are classes of their own, such as StringDType() */
        snprintf(tensor->dtype_text, sizeof tensor->dtype_text, "%s", text);
    Py_XDECREF(object);
    Py_DECREF(descr);
    return text ? 0 : -1;
}

int tcg_numpy_read_dtype(tcg_state *state, PyObject *dtype, tcg_tensor *tensor) {
    if (!PyArray_DescrCheck(dtype)) {
        PyErr_Format(PyExc_TypeError, "%s: the dtype is %R; expected a NumPy dtype", tensor->name, dtype);
        return -1;
    }
    PyArray_Descr *descr = (PyArray_Descr *)dtype;
    return read_dtype(state, descr, &tensor->dtype) || (tensor->dtype < 0 && name_dtype(tensor, descr)) ? -1 : 0;
}

/* False for fields of records, say, whose strides need be no multiple of the element. Strides that lead to no element
 * do not count. */
static bool strides_are_elements(const PyArrayObject *array, int64_t bytes) {
    for (int i = 0; i < PyArray_NDIM(array); i++)
        if (PyArray_DIM(array, i) > 1 && PyArray_STRIDE(array, i) % bytes)
            return false;
    return true;
}

int tcg_numpy_locate(tcg_state *state, tcg_tensor *tensor) {
    PyArrayObject *array = (PyArrayObject *)tensor->object;
    if (tcg_numpy_read_dtype(state, (PyObject *)PyArray_DESCR(array), tensor))
        return -1;
    int64_t bytes = tcg_elem_bytes(tensor);
    tensor->device = TCG_HOST;
    tensor->read_only = !PyArray_ISWRITEABLE(array);
    if (!strides_are_elements(array, bytes)) {
        tensor->held = tcg_numpy_packed(tensor->object);
        if (!tensor->held)
            return -1;
        tensor->write_back = true;
        array = (PyArrayObject *)tensor->held;
    }
    if (PyArray_NDIM(array) > TCG_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s: expected at most %d axes, got %d", tensor->name, TCG_MAX_NDIM,
                     PyArray_NDIM(array));
        return -1;
    }
    tensor->data = PyArray_BYTES(array);
    tensor->ndim = PyArray_NDIM(array);
    for (int i = 0; i < tensor->ndim; i++) {
        tensor->shape[i] = PyArray_DIM(array, i);
        /* 0 where no element is ever reached by it. */
        tensor->strides[i] = tensor->dtype < 0 || tensor->shape[i] < 2 ? 0 : PyArray_STRIDE(array, i) / bytes;
    }
    return tcg_tensor_layout(tensor, !PyArray_IS_C_CONTIGUOUS(array));
}

/* ---- dtypes as users write them -------------------------------------------------------------------------------- */

int tcg_dtype_from_name(const char *name) {
    for (int i = 0; i < TCG_DTYPE_COUNT; i++)
        if (!strcmp(name, tcg_dtype_names[i]))
            return i;
    return -1;
}

static int dtype_from_text(PyObject *text) {
    static const char torch[] = "torch.";
    const char *name = PyUnicode_AsUTF8(text);
    if (!name)
        return -1;
    if (!strncmp(name, torch, sizeof torch - 1))
        name += sizeof torch - 1;
    return tcg_dtype_from_name(name);
}

int tcg_dtype_from_object(tcg_state *state, PyObject *object) {
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
    else if (PyArray_DescrCheck(object))
        read_dtype(state, (PyArray_Descr *)object, &dtype);
    else /* scalar types of frameworks */
        tcg_optional_attr(object, state->str_name, &text);
    if (text && PyUnicode_Check(text))
        dtype = dtype_from_text(text);
    Py_XDECREF(text);
    if (PyErr_Occurred())
        return -1;
    if (dtype < 0)
        PyErr_Format(
            PyExc_TypeError,
            "out_dtype: expected float16, bfloat16 or float32 as a name or a dtype of NumPy or a framework, got %R",
            object);
    return dtype;
}
