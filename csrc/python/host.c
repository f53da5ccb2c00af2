/* The host path: operands upcast to float32, numpy.matmul, one rounding to the result's dtype. */
#include "tensor.h"

#include <string.h>

/* Conversions of more elements than this run without the GIL. */
#define LONG_LOOP 32768

/* ---- one element ----------------------------------------------------------------------------------------------- */

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float f32_of_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

static float f32_of_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF;
    if (exponent == 31) /* infinity and NaN */
        return float_of(sign | 0x7F800000 | fraction << 13);
    if (exponent == 0) { /* fraction * 2^-24, which float32 holds exactly */
        float magnitude = (float)fraction * 0x1p-24f;
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

/* To nearest, ties to even; a NaN stays one. */
static uint16_t bf16_of_f32(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static uint16_t f16_of_f32(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000)
        return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    if (magnitude >= 0x477FF000) /* 65520, half way from the largest float16 to the next step */
        return (uint16_t)(sign | 0x7C00);
    if (magnitude < 0x38800000) { /* below 2^-14: the unit is 2^-24, as that of float32 in [0.5, 1) */
        float shifted = float_of(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of(shifted) - 0x3F000000));
    }
    magnitude += 0xFFF + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (magnitude - 0x38000000) >> 13);
}

/* ---- one line: memory that is not ours may be unaligned -------------------------------------------------------- */

static void read_line(float *to, const char *from, int dtype, int64_t count, int64_t stride_bytes) {
    uint16_t half;
    switch (dtype) {
    case TCG_f16:
        for (int64_t i = 0; i < count; i++, from += stride_bytes) {
            memcpy(&half, from, sizeof half);
            to[i] = f32_of_f16(half);
        }
        break;
    case TCG_bf16:
        for (int64_t i = 0; i < count; i++, from += stride_bytes) {
            memcpy(&half, from, sizeof half);
            to[i] = f32_of_bf16(half);
        }
        break;
    default:
        for (int64_t i = 0; i < count; i++, from += stride_bytes)
            memcpy(&to[i], from, sizeof *to);
    }
}

static void write_line(char *to, int dtype, int64_t stride_bytes, const float *from, int64_t count,
                       int64_t from_stride) {
    uint16_t half;
    switch (dtype) {
    case TCG_f16:
        for (int64_t i = 0; i < count; i++, to += stride_bytes, from += from_stride) {
            half = f16_of_f32(*from);
            memcpy(to, &half, sizeof half);
        }
        break;
    case TCG_bf16:
        for (int64_t i = 0; i < count; i++, to += stride_bytes, from += from_stride) {
            half = bf16_of_f32(*from);
            memcpy(to, &half, sizeof half);
        }
        break;
    default:
        for (int64_t i = 0; i < count; i++, to += stride_bytes, from += from_stride)
            memcpy(to, from, sizeof *from);
    }
}

/* ---- whole operands -------------------------------------------------------------------------------------------- */

/* Steps to the next line (all axes but the last); false after the last one. offset[k] follows strides[k]. */
static bool next_line(int ndim, const int64_t *shape, int64_t *index, const int64_t *const strides[2],
                      int64_t offset[2]) {
    for (int i = ndim - 2; i >= 0; i--) {
        for (int k = 0; k < 2; k++)
            offset[k] += strides[k][i];
        if (++index[i] < shape[i])
            return true;
        for (int k = 0; k < 2; k++)
            offset[k] -= strides[k][i] * shape[i];
        index[i] = 0;
    }
    return false;
}

/* The operand as a new packed float32 NumPy array of two or more axes. Batch axes that are broadcast by a stride of 0
 * keep one entry: numpy.matmul broadcasts them again. */
static PyObject *widen(tcg_state *state, const tcg_tensor *t, bool is_b) {
    int ndim = t->ndim < 2 ? 2 : t->ndim;
    int64_t shape[TCG_MAX_NDIM + 1], strides[TCG_MAX_NDIM + 1], index[TCG_MAX_NDIM + 1] = {0}, offset[2] = {0, 0};
    int64_t packed[TCG_MAX_NDIM + 1];
    const int64_t bytes = tcg_dtype_bytes[t->dtype];
    void *data = NULL;

    if (t->ndim == 1) { /* a row for a, a column for b */
        shape[is_b] = 1;
        strides[is_b] = 0;
        shape[!is_b] = t->shape[0];
        strides[!is_b] = t->strides[0];
    } else {
        for (int i = 0; i < ndim; i++) {
            bool broadcast = i < ndim - 2 && t->count && t->strides[i] == 0;
            shape[i] = broadcast ? 1 : t->shape[i];
            strides[i] = t->strides[i];
        }
    }
    PyObject *array = tcg_numpy_empty(tcg_numpy_dtype(state, TCG_f32), ndim, shape, &data);
    if (!array || !t->count)
        return array;
    for (int i = 0; i < ndim; i++)
        if (shape[i] == 1)
            strides[i] = 0;
    tcg_packed_strides(ndim, shape, 1, packed);
    const int64_t *const both[2] = {packed, strides};
    PyThreadState *thread = tcg_shape_count(ndim, shape) > LONG_LOOP ? PyEval_SaveThread() : NULL;
    do
        read_line((float *)data + offset[0], t->data + offset[1] * bytes, t->dtype, shape[ndim - 1],
                  strides[ndim - 1] * bytes);
    while (next_line(ndim, shape, index, both, offset));
    if (thread)
        PyEval_RestoreThread(thread);
    return array;
}

/* Rounds the product, of two or more axes, into out, which has one less for each 1-D operand. */
static int narrow(tcg_state *state, PyObject *product, const tcg_tensor *out, bool has_rows, bool has_columns) {
    int64_t shape[TCG_MAX_NDIM + 2], to[TCG_MAX_NDIM + 2], index[TCG_MAX_NDIM + 2] = {0}, offset[2] = {0, 0};
    const int64_t bytes = tcg_dtype_bytes[out->dtype];
    int batch = out->ndim - has_rows - has_columns, ndim = batch + 2, at = batch, failed = -1;
    tcg_tensor *p = PyMem_Malloc(sizeof *p);

    if (!p) {
        PyErr_NoMemory();
        return -1;
    }
    tcg_tensor_init(p, "product", product);
    bool fits = tcg_numpy_is_array(Py_TYPE(product));
    if (fits && tcg_numpy_locate(state, p))
        goto done;
    for (int i = 0; i < batch; i++) {
        shape[i] = out->shape[i];
        to[i] = out->strides[i];
    }
    shape[ndim - 2] = has_rows ? out->shape[at] : 1;
    to[ndim - 2] = has_rows ? out->strides[at++] : 0;
    shape[ndim - 1] = has_columns ? out->shape[at] : 1;
    to[ndim - 1] = has_columns ? out->strides[at] : 0;
    /* Where both operands were broadcast, the product has one entry for many. */
    fits = fits && p->dtype == TCG_f32 && p->ndim <= ndim;
    int missing = ndim - p->ndim;
    int64_t from[TCG_MAX_NDIM + 2] = {0};
    for (int i = 0; fits && i < ndim; i++) {
        int64_t size = i < missing ? 1 : p->shape[i - missing];
        fits = size == shape[i] || size == 1;
        from[i] = size == 1 ? 0 : p->strides[i - missing];
    }
    if (!fits) {
        PyErr_SetString(PyExc_RuntimeError, "numpy.matmul gave a result of another shape or dtype");
        goto done;
    }
    for (int i = 0; i < ndim; i++)
        if (shape[i] == 1)
            to[i] = 0;
    const int64_t *const both[2] = {to, from};
    const float *source = (const float *)(const void *)p->data;
    PyThreadState *thread = out->count > LONG_LOOP ? PyEval_SaveThread() : NULL;
    do
        write_line(out->data + offset[0] * bytes, out->dtype, to[ndim - 1] * bytes, source + offset[1],
                   shape[ndim - 1], from[ndim - 1]);
    while (next_line(ndim, shape, index, both, offset));
    if (thread)
        PyEval_RestoreThread(thread);
    failed = 0;
done:
    tcg_tensor_release(p);
    PyMem_Free(p);
    return failed;
}

/* Inf * 0 and the like are results here, not events to warn of. */
static PyObject *enter_errstate(tcg_state *state) {
    PyObject *errstate = TCG_CACHED(&state->numpy_errstate, "numpy", state->str_errstate);
    PyObject *manager = errstate ? PyObject_Vectorcall(errstate, &state->str_ignore, 0, state->kwnames_all) : NULL;
    return tcg_enter(state, manager);
}

int tcg_host_matmul(tcg_state *state, const tcg_tensor *a, const tcg_tensor *b, const tcg_tensor *out) {
    PyObject *wide[2] = {NULL, NULL}, *product = NULL, *manager = NULL, *matmul, *left;
    int failed = -1;

    if (!out->count)
        return 0;
    matmul = TCG_CACHED(&state->numpy_matmul, "numpy", state->str_matmul);
    if (!matmul || !(wide[0] = widen(state, a, false)) || !(wide[1] = widen(state, b, true)) ||
        !(manager = enter_errstate(state)))
        goto done;
    product = PyObject_Vectorcall(matmul, wide, 2, NULL);
    tcg_exception saved;
    tcg_exception_save(&saved);
    left = PyObject_CallMethodObjArgs(manager, state->str___exit__, Py_None, Py_None, Py_None, NULL);
    if (!left)
        PyErr_Clear();
    Py_XDECREF(left);
    tcg_exception_restore(&saved);
    if (product)
        failed = narrow(state, product, out, a->ndim > 1, b->ndim > 1);
done:
    Py_XDECREF(wide[0]);
    Py_XDECREF(wide[1]);
    Py_XDECREF(product);
    Py_XDECREF(manager);
    return failed;
}
