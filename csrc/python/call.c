/* One call: arguments -> operands and stream -> a problem in plain C -> plan -> result -> launch. */
#include "tensor.h"

#include <string.h>

typedef enum call_mode { CALL_MATMUL, CALL_EXPLAIN, CALL_TIME } call_mode;

typedef struct call {
    tcg_state *state;
    call_mode mode;
    tcg_tensor a, b, out; /* out: the caller's, or the new result */
    bool has_out, has_stream, has_kernel;
    bool must_enter; /* the stream is not the framework's current one: it has to be where the framework allocates */
    tcg_options options;
    int out_dtype; /* -1: the operands' */
    uintptr_t stream;
    int device;
    int64_t launches; /* to be timed */
    /* The product as numpy.matmul sees it: C[batch..., M, N], the batch outermost first. */
    int64_t m, n, k;
    tcg_matrix matrix_a, matrix_b, matrix_c;
    int batch_ndim;
    int result_ndim;
    int64_t result_shape[TCG_MAX_NDIM];
    int64_t batch_shape[TCG_MAX_NDIM];
    /* What the launches share and what a loop around them steps through; see merge_batch. */
    tcg_problem problem;
    int loop_ndim;
    tcg_batch_dim loop[TCG_MAX_NDIM];
    tcg_current current;
    tcg_result result;
    PyObject *workspace; /* owned; NULL when the workspace is ours */
    void *workspace_data;
    size_t workspace_bytes;
    bool launched; /* the device may be reading and writing from here on */
} call;

/* ---- arguments ------------------------------------------------------------------------------------------------- */

static int read_handle(PyObject *object, const char *what, uintptr_t *stream) {
    if (PyBool_Check(object)) {
        PyErr_Format(PyExc_TypeError, "stream: %s is %R; expected an integer", what, object);
        return -1;
    }
    if (tcg_read_address("stream", what, object, stream))
        return -1;
    if (*stream == 0)
        *stream = TCG_STREAM_LEGACY;
    return 0;
}

/* __cuda_stream__ is a method or an attribute and means (0, handle). */
static int read_cuda_stream(PyObject *attribute, uintptr_t *stream) {
    PyObject *pair = PyCallable_Check(attribute) ? PyObject_CallNoArgs(attribute) : Py_NewRef(attribute);
    int failed = -1;
    if (!pair)
        return -1;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
        PyErr_Format(PyExc_TypeError, "stream: __cuda_stream__ gives %R; expected (0, handle)", pair);
    else {
        long version = PyLong_AsLong(PyTuple_GET_ITEM(pair, 0));
        if (version != 0 && !PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "stream: __cuda_stream__ version %ld; version 0 is understood", version);
        if (!PyErr_Occurred())
            failed = read_handle(PyTuple_GET_ITEM(pair, 1), "the handle of __cuda_stream__", stream);
    }
    Py_DECREF(pair);
    return failed;
}

static int read_stream(tcg_state *state, PyObject *object, uintptr_t *stream) {
    PyObject *const names[] = {state->str___cuda_stream__, state->str_cuda_stream, state->str_ptr};
    if (PyLong_Check(object))
        return read_handle(object, "the handle", stream);
    for (int i = 0; i < 3; i++) {
        PyObject *attribute = NULL;
        int failed, has = tcg_optional_attr(object, names[i], &attribute);
        if (has < 0)
            return -1;
        if (!has)
            continue;
        failed =
            i == 0 ? read_cuda_stream(attribute, stream) : read_handle(attribute, PyUnicode_AsUTF8(names[i]), stream);
        Py_DECREF(attribute);
        return failed;
    }
    PyErr_Format(PyExc_TypeError,
                 "stream: expected an int handle or an object with __cuda_stream__, cuda_stream or ptr, got %s",
                 Py_TYPE(object)->tp_name);
    return -1;
}

int tcg_options_kernel(PyObject *object, tcg_options *options) {
    const char *name;
    if (object == Py_None)
        return 0;
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "kernel: expected a family's or a kernel's name, got %s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    name = PyUnicode_AsUTF8(object);
    if (!name)
        return -1;
    for (int i = 0; i < TCG_FAMILY_COUNT; i++) {
        if (!strcmp(name, tcg_families[i].name)) {
            options->family = i;
            return 0;
        }
    }
    /* "row:direct" and "row:swapped" say which way round as well. */
    const char *colon = strchr(name, ':');
    char row[160];
    snprintf(row, sizeof row, "%.*s", colon ? (int)(colon - name) : (int)strlen(name), name);
    const tcg_kernel *kernel = tcg_kernel_find(row);
    if (colon)
        options->swap = !strcmp(colon, ":swapped") ? 1 : !strcmp(colon, ":direct") ? 0 : -1;
    if (!kernel || (colon && options->swap < 0)) {
        char families[256] = "";
        for (int i = 0; i < TCG_FAMILY_COUNT; i++)
            snprintf(families + strlen(families), sizeof families - strlen(families), "%s%s", i ? ", " : "",
                     tcg_families[i].name);
        PyErr_Format(PyExc_ValueError,
                     "kernel: expected a family (%s) or a name from tcgemm.kernels(), which ':direct' or "
                     "':swapped' may follow, got %R",
                     families, object);
        return -1;
    }
    options->kernel = kernel->index;
    return 0;
}

static int read_option(call *c, const char *function, PyObject *name, PyObject *value) {
    tcg_state *state = c->state;
    PyObject *const names[] = {state->str_out, state->str_out_dtype, state->str_stream, state->str_kernel,
                               state->str_batch_invariant};
    int which = 0;
    while (which < 5 && name != names[which])
        which++;
    if (which == 5) { /* not interned */
        for (which = 0; which < 5; which++) {
            int equal = PyObject_RichCompareBool(name, names[which], Py_EQ);
            if (equal < 0)
                return -1;
            if (equal)
                break;
        }
    }
    if (which == 5) {
        PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R", function, name);
        return -1;
    }
    if (value == Py_None)
        return 0;
    switch (which) {
    case 0:
        tcg_tensor_init(&c->out, "out", value);
        c->has_out = true;
        return 0;
    case 1:
        c->out_dtype = tcg_dtype_from_object(state, value);
        return c->out_dtype < 0 ? -1 : 0;
    case 2:
        c->has_stream = true;
        return read_stream(state, value, &c->stream);
    case 3:
        c->has_kernel = true;
        return tcg_options_kernel(value, &c->options);
    default:
        if (!PyBool_Check(value)) {
            PyErr_Format(PyExc_TypeError, "batch_invariant: expected True, False or None, got %s",
                         Py_TYPE(value)->tp_name);
            return -1;
        }
        c->options.batch_invariant = value == Py_True;
        return 0;
    }
}

static void call_init(call *c, PyObject *module, call_mode mode) {
    c->state = PyModule_GetState(module);
    c->mode = mode;
    c->has_out = c->has_stream = c->has_kernel = c->must_enter = c->launched = false;
    c->options = (tcg_options){.family = -1, .kernel = -1, .swap = -1, .batch_invariant = c->state->batch_invariant};
    c->out_dtype = -1;
    c->current.count = 0;
    c->result.object = NULL;
    c->result.versioned = NULL;
    c->workspace = NULL;
    c->workspace_data = NULL;
    c->workspace_bytes = 0;
    tcg_tensor_init(&c->out, "the result", NULL);
}

static int read_arguments(call *c, const char *function, PyObject *const *args, Py_ssize_t count, PyObject *kwnames) {
    Py_ssize_t expected = c->mode == CALL_TIME ? 3 : 2, keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "%s() takes exactly %zd positional arguments (%zd given)", function, expected,
                     count);
        return -1;
    }
    tcg_tensor_init(&c->a, "a", args[0]);
    tcg_tensor_init(&c->b, "b", args[1]);
    if (c->mode == CALL_TIME) {
        c->launches = PyLong_AsLong(args[2]);
        if (c->launches == -1 && PyErr_Occurred())
            return -1;
        if (c->launches < 1 || c->launches > 1000000) {
            PyErr_Format(PyExc_ValueError, "launches: expected 1 to 1000000, got %R", args[2]);
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < keywords; i++)
        if (read_option(c, function, PyTuple_GET_ITEM(kwnames, i), args[count + i]))
            return -1;
    return 0;
}

/* ---- operands -------------------------------------------------------------------------------------------------- */

static int find_device(call *c) {
    tcg_tensor *const tensors[] = {&c->a, &c->b, &c->out};
    const tcg_tensor *chosen = NULL;
    char here[24], there[24];
    for (int i = 0; i < 2 + c->has_out; i++) {
        const tcg_tensor *t = tensors[i];
        bool host = t->device == TCG_HOST;
        if (chosen ? t->device != chosen->device && !(t->any_device && chosen->device != TCG_HOST)
                   : host != (c->a.device == TCG_HOST)) {
            const tcg_tensor *first = chosen ? chosen : &c->a;
            PyErr_Format(PyExc_ValueError, "%s: on %s, but %s is on %s", t->name, tcg_device_text(t->device, here),
                         first->name, tcg_device_text(first->device, there));
            return -1;
        }
        if (!chosen && !t->any_device)
            chosen = t;
    }
    c->device = (chosen ? chosen : &c->a)->device;
    return 0;
}

/* The stream on which an operand's producer works, where it differs from the one of `a`. */
static int find_operand_stream(call *c, tcg_tensor *t) {
    if (t->type->framework == c->a.type->framework && t->type->framework != TCG_FRAMEWORK_NONE && !c->has_stream)
        t->stream = 0; /* the framework's current stream, as for a */
    else if (t->type->protocol == TCG_PROTOCOL_CUPY)
        return tcg_cupy_stream(c->state, &t->stream);
    else if (t->type->protocol == TCG_PROTOCOL_EXCHANGE && t->type->api != c->a.type->api && !c->has_stream)
        return tcg_exchange_stream(t->type->api, c->device, &t->stream);
    return 0;
}

static int acquire(call *c) {
    tcg_tensor *const tensors[] = {&c->a, &c->b, &c->out};
    const int count = 2 + c->has_out;

    for (int i = 0; i < count; i++)
        if (tcg_tensor_locate(c->state, tensors[i]))
            return -1;
    if (find_device(c))
        return -1;
    if (c->device == TCG_HOST) {
        for (int i = 0; i < count; i++)
            if (tcg_tensor_finish(c->state, tensors[i], 0))
                return -1;
        return 0;
    }
    if (tcg_current_device(c->state, &c->a, c->device, &c->current))
        return -1;
    uintptr_t stream;
    if (tcg_framework_stream(c->state, &c->a, c->device, &c->current, &stream))
        return -1;
    if (!c->has_stream) {
        c->stream = stream;
        c->a.stream = 0;
    } else {
        c->must_enter = c->stream != stream;
        if (c->a.type->protocol == TCG_PROTOCOL_CUPY)
            c->a.stream = stream;
    }
    for (int i = 0; i < count; i++) {
        tcg_tensor *t = tensors[i];
        bool torch = t->type->framework == TCG_FRAMEWORK_TORCH;
        if (i > 0 && find_operand_stream(c, t))
            return -1;
        /* torch on the stream that is current for torch, or one that the caller names: no more is to be ordered. */
        if (tcg_tensor_finish(
                c->state, t, torch && (c->has_stream || c->a.type->framework == TCG_FRAMEWORK_TORCH) ? 0 : c->stream))
            return -1;
        if (t->stream == c->stream)
            t->stream = 0;
    }
    return 0;
}

static const char *dtype_text(const tcg_tensor *t) {
    return t->dtype < 0 ? t->dtype_text : tcg_dtype_names[t->dtype];
}

static int check_dtypes(call *c) {
    if (c->a.dtype < 0 || c->a.dtype != c->b.dtype) {
        PyErr_Format(PyExc_TypeError, "a is %s and b is %s; " TCG_SUPPORTED, dtype_text(&c->a), dtype_text(&c->b));
        return -1;
    }
    if (c->out_dtype < 0)
        c->out_dtype = c->a.dtype;
    if (c->out_dtype != c->a.dtype && c->out_dtype != TCG_f32) {
        PyErr_Format(PyExc_TypeError, "out_dtype: expected %s%s for operands of %s, got %s",
                     tcg_dtype_names[c->a.dtype], c->a.dtype == TCG_f32 ? "" : " or float32",
                     tcg_dtype_names[c->a.dtype], tcg_dtype_names[c->out_dtype]);
        return -1;
    }
    if (c->has_out && c->out.dtype != c->out_dtype) {
        PyErr_Format(PyExc_TypeError, "out: expected %s, got %s%s", tcg_dtype_names[c->out_dtype],
                     dtype_text(&c->out), c->out.dtype == TCG_f32 ? " (pass out_dtype=\"float32\" as well)" : "");
        return -1;
    }
    return 0;
}

/* ---- shapes ---------------------------------------------------------------------------------------------------- */

static int fail_shapes(const call *c, const char *format, long long expected, long long got) {
    PyObject *a = tcg_shape_text(c->a.ndim, c->a.shape), *b = tcg_shape_text(c->b.ndim, c->b.shape);
    PyObject *detail = PyUnicode_FromFormat(format, expected, got);
    if (a && b && detail)
        PyErr_Format(PyExc_ValueError, "%U: a has the shape %U, b has the shape %U", detail, a, b);
    Py_XDECREF(a);
    Py_XDECREF(b);
    Py_XDECREF(detail);
    return -1;
}

/* M, N, K, the broadcast batch and the result's shape; a's and b's matrix strides. */
static int find_shapes(call *c) {
    const tcg_tensor *a = &c->a, *b = &c->b;
    if (a->ndim == 0 || b->ndim == 0)
        return fail_shapes(c,
                           a->ndim ? "b: expected one or more dimensions, got a 0-d array"
                                   : "a: expected one or more dimensions, got a 0-d array",
                           0, 0);
    const bool rows = a->ndim > 1, columns = b->ndim > 1;
    const int batch_a = rows ? a->ndim - 2 : 0, batch_b = columns ? b->ndim - 2 : 0;
    const int batch = batch_a > batch_b ? batch_a : batch_b;
    const int64_t k_b = b->shape[columns ? b->ndim - 2 : 0];

    c->k = a->shape[a->ndim - 1];
    c->m = rows ? a->shape[a->ndim - 2] : 1;
    c->n = columns ? b->shape[b->ndim - 1] : 1;
    if (c->k != k_b)
        return fail_shapes(c, "b: expected K=%lld, got %lld", c->k, k_b);
    c->matrix_a = (tcg_matrix){a->data, rows ? a->strides[a->ndim - 2] : 0, a->strides[a->ndim - 1]};
    c->matrix_b = (tcg_matrix){b->data, b->strides[columns ? b->ndim - 2 : 0], columns ? b->strides[b->ndim - 1] : 0};

    for (int i = 0; i < batch; i++) {
        int at_a = i - (batch - batch_a), at_b = i - (batch - batch_b);
        int64_t size_a = at_a < 0 ? 1 : a->shape[at_a], size_b = at_b < 0 ? 1 : b->shape[at_b];
        if (size_a != size_b && size_a != 1 && size_b != 1)
            return fail_shapes(c, "b: expected the batch to have %lld entries (or 1), got %lld", size_a, size_b);
        c->batch_shape[i] = c->result_shape[i] = size_a == 1 ? size_b : size_a;
    }
    c->batch_ndim = batch;
    c->result_ndim = batch + rows + columns;
    if (rows)
        c->result_shape[batch] = c->m;
    if (columns)
        c->result_shape[batch + rows] = c->n;

    int64_t bytes = 16;
    bool empty = false, overflow = false;
    for (int i = 0; i < c->result_ndim; i++)
        empty |= c->result_shape[i] == 0;
    for (int i = 0; i < c->result_ndim && !empty; i++)
        overflow |= __builtin_mul_overflow(bytes, c->result_shape[i], &bytes);
    if (overflow)
        return fail_shapes(c, "the result is larger than the address space", 0, 0);
    return 0;
}

static int check_aligned(const tcg_tensor *t) {
    int bytes = tcg_dtype_bytes[t->dtype];
    if (t->count && (uintptr_t)t->data % (uintptr_t)bytes) {
        PyErr_Format(PyExc_ValueError,
                     "%s: on the device, expected an address that is a multiple of the element's %d bytes, got %p",
                     t->name, bytes, t->data);
        return -1;
    }
    return 0;
}

static int check_out(const call *c) {
    const tcg_tensor *out = &c->out, *const inputs[] = {&c->a, &c->b};
    bool same = out->ndim == c->result_ndim;
    for (int i = 0; same && i < out->ndim; i++)
        same = out->shape[i] == c->result_shape[i];
    if (!same) {
        PyObject *expected = tcg_shape_text(c->result_ndim, c->result_shape),
                 *got = tcg_shape_text(out->ndim, out->shape);
        if (expected && got)
            PyErr_Format(PyExc_ValueError, "out: expected the shape %U, got %U", expected, got);
        Py_XDECREF(expected);
        Py_XDECREF(got);
        return -1;
    }
    if (out->read_only) {
        PyErr_SetString(PyExc_ValueError, "out: the array is read-only");
        return -1;
    }
    if (tcg_tensor_overlaps_itself(out)) {
        PyErr_SetString(PyExc_ValueError, "out: overlaps itself: two of its elements share memory");
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        if (tcg_tensors_overlap(out, inputs[i])) {
            PyErr_Format(PyExc_ValueError, "out: shares memory with %s", inputs[i]->name);
            return -1;
        }
    }
    return 0;
}

/* C's strides, from a tensor of the result's shape. */
static void place_result(call *c) {
    const tcg_tensor *out = &c->out;
    const bool rows = c->a.ndim > 1, columns = c->b.ndim > 1;
    c->matrix_c.data = out->data;
    c->matrix_c.row = rows ? out->strides[c->batch_ndim] : 0;
    c->matrix_c.col = columns ? out->strides[c->batch_ndim + rows] : 0;
}

/* An operand's stride along a batch axis: 0 where it is broadcast. */
static int64_t batch_stride(const tcg_tensor *t, int ndim, int at) {
    return at < 0 || at >= ndim || t->shape[at] == 1 ? 0 : t->strides[at];
}

/* Batch axes into as few as the strides allow: neighbours that step as one axis become one; an axis along which b (or
 * a) stays the same becomes part of M (or N), so that (B, M, K) @ (K, N) is one product. Those beyond what a launch
 * takes, the shortest, go to the loop. */
static void merge_batch(call *c) {
    tcg_problem *p = &c->problem;
    tcg_batch_dim axes[TCG_MAX_NDIM];
    int count = 0;
    const int batch_a = c->a.ndim > 2 ? c->a.ndim - 2 : 0, batch_b = c->b.ndim > 2 ? c->b.ndim - 2 : 0;

    p->m = c->m;
    p->n = c->n;
    p->k = c->k;
    p->in_dtype = c->a.dtype;
    p->out_dtype = c->out_dtype;
    p->a = c->matrix_a;
    p->b = c->matrix_b;
    p->c = c->matrix_c;
    for (int i = c->batch_ndim - 1; i >= 0; i--) { /* innermost first */
        tcg_batch_dim axis = {
            .size = c->batch_shape[i],
            .a = batch_stride(&c->a, batch_a, i - (c->batch_ndim - batch_a)),
            .b = batch_stride(&c->b, batch_b, i - (c->batch_ndim - batch_b)),
            .c = c->out.strides[i],
        };
        tcg_batch_dim *inner = count ? &axes[count - 1] : NULL;
        if (axis.size == 1)
            continue;
        if (inner && axis.a == inner->a * inner->size && axis.b == inner->b * inner->size &&
            axis.c == inner->c * inner->size)
            inner->size *= axis.size;
        else
            axes[count++] = axis;
    }
    for (int i = 0; i < count;) {
        const tcg_batch_dim axis = axes[i];
        if (axis.b == 0 && (p->m == 1 || (axis.a == p->a.row * p->m && axis.c == p->c.row * p->m))) {
            if (p->m == 1) {
                p->a.row = axis.a;
                p->c.row = axis.c;
            }
            p->m *= axis.size;
        } else if (axis.a == 0 && (p->n == 1 || (axis.b == p->b.col * p->n && axis.c == p->c.col * p->n))) {
            if (p->n == 1) {
                p->b.col = axis.b;
                p->c.col = axis.c;
            }
            p->n *= axis.size;
        } else {
            i++;
            continue;
        }
        memmove(&axes[i], &axes[i + 1], (size_t)(--count - i) * sizeof *axes);
        i = 0; /* a longer M or N may take an axis that it did not before */
    }
    c->loop_ndim = 0;
    while (count > TCG_MAX_BATCH_DIMS) {
        int shortest = count - 1;
        for (int i = count - 2; i >= 0; i--)
            if (axes[i].size < axes[shortest].size)
                shortest = i;
        c->loop[c->loop_ndim++] = axes[shortest];
        memmove(&axes[shortest], &axes[shortest + 1], (size_t)(--count - shortest) * sizeof *axes);
    }
    p->batch_ndim = count;
    memcpy(p->batch, axes, (size_t)count * sizeof *axes);
}

/* ---- on the device --------------------------------------------------------------------------------------------- */

int tcg_device_props_of(tcg_state *state, int device, const tcg_device_props **props) {
    tcg_error err;
    int failed;
    bool known = device >= 0 && device < TCG_SEEN_DEVICES;
    if (known && atomic_load_explicit(&state->seen[device], memory_order_relaxed))
        return tcg_device(device, props, &err) ? tcg_raise(state, &err) : 0;
    Py_BEGIN_ALLOW_THREADS /* the first call starts the driver */
        failed = tcg_device(device, props, &err);
    Py_END_ALLOW_THREADS if (failed) return tcg_raise(state, &err);
    if (known)
        atomic_store_explicit(&state->seen[device], true, memory_order_relaxed);
    return 0;
}

static int stream_wait(call *c, uintptr_t waiter, uintptr_t stream) {
    tcg_error err;
    int failed;
    Py_BEGIN_ALLOW_THREADS failed = tcg_stream_wait(c->device, waiter, stream, &err);
    Py_END_ALLOW_THREADS return failed ? tcg_raise(c->state, &err) : 0;
}

/* The launch waits for what operands' producers have under way on other streams; afterwards those streams wait for
 * the launch, so that memory which goes back to a pool of theirs is not used again too early. */
static int join_streams(call *c, bool after) {
    const tcg_tensor *const tensors[] = {&c->a, &c->b, &c->out};
    for (int i = 0; i < 2 + c->has_out; i++) {
        uintptr_t other = tensors[i]->stream;
        if (other && (after ? stream_wait(c, other, c->stream) : stream_wait(c, c->stream, other)))
            return -1;
    }
    return 0;
}

static void free_workspace(call *c) {
    if (c->workspace) {
        Py_CLEAR(c->workspace);
    } else if (c->workspace_data) {
        tcg_memory_free(c->device, c->stream, c->workspace_data);
    }
    c->workspace_data = NULL;
    c->workspace_bytes = 0;
}

/* Before anything is allocated by the framework. */
static int enter_stream(call *c) {
    if (!c->must_enter)
        return 0;
    c->must_enter = false;
    return tcg_current_stream(c->state, &c->a, c->device, c->stream, &c->current);
}

static int grow_workspace(call *c, size_t bytes) {
    if (bytes <= c->workspace_bytes)
        return 0;
    free_workspace(c); /* in the order of the stream: earlier launches are not disturbed */
    if (enter_stream(c) ||
        tcg_workspace_new(c->state, &c->a, bytes, c->device, c->stream, &c->workspace, &c->workspace_data))
        return -1;
    c->workspace_bytes = bytes;
    return 0;
}

static int launch_one(call *c, const tcg_problem *problem, const tcg_device_props *props, float *milliseconds) {
    tcg_plan plan;
    tcg_error err;
    int failed;
    if (tcg_plan_cached(c->state, problem, c->device, props, &c->options, &plan, &err))
        return tcg_raise(c->state, &err);
    if (grow_workspace(c, plan.workspace_bytes))
        return -1;
    c->launched = true;
    PyThreadState *thread = PyEval_SaveThread();
    if (c->mode == CALL_TIME)
        failed = tcg_gemm_time(&plan, problem, c->workspace_data, c->device, c->stream, (int)c->launches,
                               milliseconds, &err);
    else
        failed = tcg_gemm_launch(&plan, problem, c->workspace_data, c->device, c->stream, &err);
    PyEval_RestoreThread(thread);
    return failed ? tcg_raise(c->state, &err) : 0;
}

static void *step(void *data, int64_t elems, int dtype) {
    return data ? (char *)data + elems * tcg_dtype_bytes[dtype] : NULL;
}

static int launch_all(call *c, double *milliseconds) {
    const tcg_device_props *props;
    int64_t index[TCG_MAX_NDIM];
    float one = 0;
    tcg_problem *p = &c->problem;
    if (tcg_device_props_of(c->state, c->device, &props))
        return -1;
    merge_batch(c);
    memset(index, 0, (size_t)c->loop_ndim * sizeof *index);
    for (;;) {
        if (launch_one(c, p, props, &one))
            return -1;
        *milliseconds += one;
        int axis = 0;
        for (; axis < c->loop_ndim; axis++) {
            const tcg_batch_dim *d = &c->loop[axis];
            bool wraps = ++index[axis] == d->size;
            int64_t by = wraps ? 1 - d->size : 1;
            p->a.data = step(p->a.data, by * d->a, p->in_dtype);
            p->b.data = step(p->b.data, by * d->b, p->in_dtype);
            p->c.data = step(p->c.data, by * d->c, p->out_dtype);
            if (!wraps)
                break;
            index[axis] = 0;
        }
        if (axis == c->loop_ndim)
            return 0;
    }
}

/* Producers that would give the memory to somebody else while the launch still reads it. */
static bool must_be_held(const call *c, const tcg_tensor *t) {
    if (t->count == 0)
        return false;
    switch (t->type->protocol) {
    case TCG_PROTOCOL_CAPSULE:
        return true;
    case TCG_PROTOCOL_DLPACK:
        return t->type->framework != TCG_FRAMEWORK_TORCH;
    case TCG_PROTOCOL_INTERFACE:
        return t->type->framework == TCG_FRAMEWORK_NONE;
    case TCG_PROTOCOL_ARRAY:
        return t->stream != 0 && t->stream != c->stream;
    default:
        return false;
    }
}

/* Gives back all that the call owns but its result. Keeps an exception that is set; -1 with one of its own. */
static int release(call *c) {
    tcg_tensor *const tensors[] = {&c->a, &c->b, &c->out};
    tcg_tensor *later[3];
    int count = 0, failed = 0;
    for (int i = 0; c->launched && i < 2 + c->has_out; i++)
        if (must_be_held(c, tensors[i]))
            later[count++] = tensors[i];
    if (count || c->workspace_data) {
        tcg_exception saved;
        tcg_exception_save(&saved);
        if (c->workspace_data)
            free_workspace(c);
        failed = count && tcg_tensors_release_after(c->state, later, count, c->device, c->stream);
        if (tcg_exception_is_set(&saved))
            tcg_exception_restore(&saved);
    }
    if (c->launched && !count)
        tcg_release_poll();
    for (int i = 0; i < 3; i++)
        tcg_tensor_release(tensors[i]);
    tcg_result_release(&c->result);
    if (tcg_current_leave(c->state, &c->current))
        failed = -1;
    return failed ? -1 : 0;
}

/* ---- matmul ---------------------------------------------------------------------------------------------------- */

/* Everything up to the result's memory. */
static int prepare(call *c) {
    if (acquire(c) || check_dtypes(c) || find_shapes(c) || (c->has_out && check_out(c)))
        return -1;
    if (c->device == TCG_HOST) {
        const char *argument = c->has_kernel                ? "kernel"
                               : c->options.batch_invariant ? "batch_invariant"
                               : c->has_stream              ? "stream"
                                                            : NULL;
        if (argument) {
            PyErr_Format(PyExc_ValueError, "%s: has no meaning for host arrays, which go through numpy.matmul",
                         argument);
            return -1;
        }
        return 0;
    }
    return check_aligned(&c->a) || check_aligned(&c->b) || (c->has_out && check_aligned(&c->out)) ? -1 : 0;
}

/* out was a packed copy of an array whose strides are no multiple of the element. */
static int write_back(const call *c) { return c->out.write_back ? tcg_numpy_copy(c->out.object, c->out.held) : 0; }

static int run(call *c, double *milliseconds) {
    if (!c->has_out) {
        tcg_tensor_init(&c->out, "the result", NULL);
        if (enter_stream(c) || tcg_result_new(c->state, &c->a, c->out_dtype, c->result_ndim, c->result_shape,
                                              c->device, c->stream, &c->result, &c->out))
            return -1;
    }
    if (c->device == TCG_HOST)
        return tcg_host_matmul(c->state, &c->a, &c->b, &c->out) || write_back(c) ? -1 : 0;
    if (!c->out.count)
        return 0;
    place_result(c);
    return join_streams(c, false) || launch_all(c, milliseconds) || join_streams(c, true) ? -1 : 0;
}

PyObject *py_matmul(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *kwnames) {
    call c;
    PyObject *result = NULL;
    double unused = 0;
    call_init(&c, module, CALL_MATMUL);
    if (read_arguments(&c, "matmul", args, count, kwnames))
        return NULL;
    if (!prepare(&c) && !run(&c, &unused))
        result = c.has_out ? Py_NewRef(c.out.object) : tcg_result_finish(c.state, &c.a, &c.result);
    if (release(&c))
        Py_CLEAR(result);
    return result;
}

PyObject *py_time(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *kwnames) {
    call c;
    PyObject *result = NULL;
    double milliseconds = 0;
    call_init(&c, module, CALL_TIME);
    if (read_arguments(&c, "_time", args, count, kwnames))
        return NULL;
    if (!prepare(&c)) {
        if (c.device == TCG_HOST)
            PyErr_SetString(PyExc_ValueError, "a: expected device arrays, got host arrays");
        else if (!run(&c, &milliseconds))
            result = PyFloat_FromDouble(milliseconds);
    }
    if (release(&c))
        Py_CLEAR(result);
    return result;
}

/* ---- explain --------------------------------------------------------------------------------------------------- */

static PyObject *optional_text(const char *text) { return text ? PyUnicode_FromString(text) : Py_NewRef(Py_None); }

static PyObject *copies_list(const tcg_plan *plan) {
    const tcg_plan_copy *const copies[] = {&plan->copy_a, &plan->copy_b};
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < 2; i++) {
        const tcg_plan_copy *copy = copies[i];
        if (!copy->needed)
            continue;
        PyObject *one = Py_BuildValue("{s:s,s:L,s:L,s:O,s:L,s:L,s:K}", "operand", (i == 1) != plan->swap ? "b" : "a",
                                      "rows", (long long)copy->rows, "cols", (long long)copy->cols, "transposed",
                                      copy->transposed ? Py_True : Py_False, "row_elems", (long long)copy->row_elems,
                                      "batches", (long long)copy->batches, "bytes", (unsigned long long)copy->bytes);
        if (!one || PyList_Append(list, one))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

PyObject *tcg_plan_dict(const tcg_plan *plan) {
    const tcg_kernel *kernel = plan->kernel;
    return Py_BuildValue(
        "{s:N,s:N,s:N,s:N,s:N,s:N,s:O,s:O,s:i,s:L,s:i,s:L,s:L,s:L,s:I,s:N,s:K,s:L,s:N}", "kernel",
        optional_text(kernel ? kernel->name : NULL), "family",
        optional_text(kernel ? tcg_families[kernel->family].name : NULL), "order",
        optional_text(kernel && kernel->order >= 0 ? tcg_order_names[kernel->order] : NULL), "tile",
        kernel ? Py_BuildValue("(iii)", kernel->block_m, kernel->block_n, kernel->block_k) : Py_NewRef(Py_None),
        "stages", kernel ? PyLong_FromLong(kernel->stages) : Py_NewRef(Py_None), "cluster",
        kernel ? Py_BuildValue("(iii)", kernel->cluster_m, kernel->cluster_n, kernel->cluster_k) : Py_NewRef(Py_None),
        "swap", plan->swap ? Py_True : Py_False, "ptx", plan->ptx ? Py_True : Py_False, "splits", plan->splits,
        "k_per_split", (long long)plan->k_per_split, "raster_group", plan->raster_group, "tiles_m",
        (long long)plan->tiles_m, "tiles_n", (long long)plan->tiles_n, "tiles", (long long)plan->tiles, "grid",
        (unsigned)plan->grid, "copies", copies_list(plan), "workspace_bytes",
        (unsigned long long)plan->workspace_bytes, "cycles",
        plan->cycles < 0x1p62 ? (long long)plan->cycles : LLONG_MAX, "why", optional_text(plan->why));
}

/* As explain() gives it: what was asked first. */
static PyObject *explanation(const call *c, PyObject *plan /* steals */, int64_t launches) {
    char device[24];
    PyObject *dict = NULL, *about = NULL;
    if (!plan)
        return NULL;
    about = Py_BuildValue(
        "{s:N,s:(LLL),s:N,s:s,s:s,s:s,s:L}", "shape", tcg_shape_tuple(c->result_ndim, c->result_shape), "mnk",
        (long long)c->problem.m, (long long)c->problem.n, (long long)c->problem.k, "batch",
        tcg_shape_tuple(c->batch_ndim, c->batch_shape), "in_dtype", tcg_dtype_names[c->a.dtype], "out_dtype",
        tcg_dtype_names[c->out_dtype], "device", tcg_device_text(c->device, device), "launches", (long long)launches);
    if (about && (dict = PyObject_CallNoArgs(c->state->explanation_type)) &&
        (PyDict_Update(dict, about) || PyDict_Update(dict, plan)))
        Py_CLEAR(dict);
    Py_XDECREF(about);
    Py_DECREF(plan);
    return dict;
}

static PyObject *explain_host(call *c) {
    c->problem.m = c->m;
    c->problem.n = c->n;
    c->problem.k = c->k;
    return explanation(c,
                       Py_BuildValue("{s:s,s:s,s:s}", "kernel", "host", "family", "host", "why",
                                     "host arrays: float32 numpy.matmul on upcast operands, rounded once"),
                       0);
}

static PyObject *explain_device(call *c) {
    /* Where the result would be, for its alignment: allocators give multiples of 256 bytes. */
    enum { SOME_ADDRESS = 1 << 20 };
    const tcg_device_props *props;
    tcg_plan plan;
    tcg_error err;
    int64_t launches = 1;
    if (!c->has_out)
        tcg_tensor_packed(&c->out, (void *)(uintptr_t)SOME_ADDRESS, c->out_dtype, c->device, c->result_ndim,
                          c->result_shape);
    place_result(c);
    if (tcg_device_props_of(c->state, c->device, &props))
        return NULL;
    merge_batch(c);
    for (int i = 0; i < c->loop_ndim; i++)
        launches *= c->loop[i].size;
    if (tcg_plan_make(&c->problem, props, &c->options, &plan, &err)) {
        tcg_raise(c->state, &err);
        return NULL;
    }
    return explanation(c, tcg_plan_dict(&plan), plan.kernel ? launches : 0);
}

PyObject *py_explain(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *kwnames) {
    call c;
    PyObject *result = NULL;
    call_init(&c, module, CALL_EXPLAIN);
    if (read_arguments(&c, "explain", args, count, kwnames))
        return NULL;
    if (!prepare(&c))
        result = c.device == TCG_HOST ? explain_host(&c) : explain_device(&c);
    if (release(&c))
        Py_CLEAR(result);
    return result;
}
