/* The module tcgemm._core: its functions, types and state. */
#include "tensor.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- kernels and devices --------------------------------------------------------------------------------------- */

PyDoc_STRVAR(kernels_doc,
             "kernels($module, /)\n--\n\n"
             "The compiled kernels: a list of dicts.\n\n"
             "name         the symbol, as in profilers; matmul(kernel=name) forces it\n"
             "family       what it is made of: \"simt\", \"mma\", ...\n"
             "in_dtype     the operands' dtype\n"
             "out_dtype    those that it can write\n"
             "order        operand orders: n, the last axis has unit stride; t, the first; None, any strides\n"
             "tile         (M, N, K) of a block\n"
             "stages       of its pipeline through shared memory\n"
             "cluster      blocks of a cluster along (M, N, K)\n"
             "warps        (M, N) of a block, or None\n"
             "align_bytes  what every line start of a and b must be a multiple of\n"
             "in_order     K runs through one accumulator in order, as batch_invariant asks\n"
             "threads      of a block\n"
             "smem_bytes   dynamic shared memory of a block\n"
             "arch         the targets it was built for, e.g. \"80 90 120\"; \"\" when the build left it out");

static PyObject *py_kernels(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);
    (void)module;
    (void)unused;
    for (int i = 0; list && i < tcg_kernel_count(); i++) {
        const tcg_kernel *k = tcg_kernel_at(i);
        PyObject *outs = k->in_dtype == TCG_f32 ? Py_BuildValue("(s)", "float32")
                                                : Py_BuildValue("(ss)", tcg_dtype_names[k->in_dtype], "float32");
        PyObject *warps = k->warps_m ? Py_BuildValue("(ii)", k->warps_m, k->warps_n) : Py_NewRef(Py_None);
        PyObject *one = Py_BuildValue(
            "{s:s,s:s,s:s,s:N,s:z,s:(iii),s:i,s:(iii),s:N,s:i,s:O,s:i,s:i,s:s}", "name", k->name, "family",
            tcg_families[k->family].name, "in_dtype", tcg_dtype_names[k->in_dtype], "out_dtype", outs, "order",
            k->order < 0 ? NULL : tcg_order_names[k->order], "tile", k->block_m, k->block_n, k->block_k, "stages",
            k->stages, "cluster", k->cluster_m, k->cluster_n, k->cluster_k, "warps", warps, "align_bytes",
            k->align_bytes, "in_order", tcg_k_in_order(k) ? Py_True : Py_False, "threads", k->threads, "smem_bytes",
            k->smem_bytes, "arch", tcg_image_archs(k->image));
        if (!one || PyList_Append(list, one))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

/* The families of which some kernel runs at that compute capability. */
static PyObject *families_at(int cc) {
    bool runs[TCG_FAMILY_COUNT] = {false};
    PyObject *list = PyList_New(0);
    for (int i = 0; i < tcg_kernel_count(); i++)
        if (tcg_kernel_runs(tcg_kernel_at(i), cc) != TCG_RUNS_NOT)
            runs[tcg_kernel_at(i)->family] = true;
    for (int i = 0; list && i < TCG_FAMILY_COUNT; i++) {
        PyObject *name = runs[i] ? PyUnicode_FromString(tcg_families[i].name) : NULL;
        if (runs[i] && (!name || PyList_Append(list, name)))
            Py_CLEAR(list);
        Py_XDECREF(name);
    }
    return list;
}

PyDoc_STRVAR(devices_doc, "devices($module, /)\n--\n\n"
                          "The CUDA devices: a list of dicts, in the driver's order.\n\n"
                          "name                 the driver's\n"
                          "compute_capability   (major, minor)\n"
                          "sm_count             streaming multiprocessors\n"
                          "smem_block_bytes     shared memory that one block can have\n"
                          "smem_sm_bytes        shared memory of a multiprocessor\n"
                          "l2_bytes             L2 cache\n"
                          "families             the kernel families of this build that run there\n\n"
                          "RuntimeError where there is no NVIDIA driver or no device.");

static PyObject *py_devices(PyObject *module, PyObject *unused) {
    tcg_state *state = PyModule_GetState(module);
    PyObject *list = NULL;
    tcg_error err;
    int count = 0, failed;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS failed = tcg_device_count(&count, &err);
    Py_END_ALLOW_THREADS if (failed) {
        tcg_raise(state, &err);
        return NULL;
    }
    list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        const tcg_device_props *p;
        PyObject *one = NULL;
        if (!tcg_device_props_of(state, i, &p))
            one = Py_BuildValue("{s:s,s:(ii),s:i,s:i,s:i,s:i,s:N}", "name", p->name, "compute_capability", p->cc / 10,
                                p->cc % 10, "sm_count", p->sm_count, "smem_block_bytes", p->smem_block_bytes,
                                "smem_sm_bytes", p->smem_sm_bytes, "l2_bytes", p->l2_bytes, "families",
                                families_at(p->cc));
        if (!one || PyList_Append(list, one))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    return list;
}

/* ---- what `python -m tcgemm` and the tests need ---------------------------------------------------------------- */

PyDoc_STRVAR(
    upload_doc,
    "_upload($module, array, device=0, /)\n--\n\nA copy of a NumPy array in device memory, as a tcgemm.Array.");

static PyObject *py_upload(PyObject *module, PyObject *args) {
    tcg_state *state = PyModule_GetState(module);
    PyObject *object, *packed = NULL, *array = NULL;
    tcg_tensor host, there;
    tcg_error err;
    int device = 0, failed = 0;
    if (!PyArg_ParseTuple(args, "O|i:_upload", &object, &device))
        return NULL;
    tcg_tensor_init(&host, "array", NULL);
    packed = tcg_numpy_packed(object);
    if (!packed)
        goto done;
    host.object = packed;
    if (tcg_tensor_locate(state, &host))
        goto done;
    if (host.dtype < 0) {
        PyErr_Format(PyExc_TypeError, "array: expected float16, bfloat16 or float32, got %s", host.dtype_text);
        goto done;
    }
    array = tcg_array_new(state, host.dtype, host.ndim, host.shape, device, TCG_STREAM_LEGACY);
    if (!array)
        goto done;
    tcg_tensor_init(&there, "array", array);
    tcg_array_locate(&there);
    Py_BEGIN_ALLOW_THREADS if (host.count) failed =
        tcg_upload(device, there.data, host.data, (size_t)host.count * (size_t)tcg_dtype_bytes[host.dtype], &err);
    Py_END_ALLOW_THREADS if (failed) {
        tcg_raise(state, &err);
        Py_CLEAR(array);
    }
done:
    tcg_tensor_release(&host);
    Py_XDECREF(packed);
    return array;
}

PyDoc_STRVAR(download_doc,
             "_download($module, array, /)\n--\n\nA copy of a tcgemm.Array as a NumPy array, when its work is done.");

static PyObject *py_download(PyObject *module, PyObject *object) {
    tcg_state *state = PyModule_GetState(module);
    PyObject *result = NULL;
    tcg_tensor t;
    tcg_error err;
    void *data = NULL;
    int failed = 0;
    if (Py_TYPE(object) != (PyTypeObject *)state->array_type) {
        PyErr_Format(PyExc_TypeError, "array: expected a tcgemm.Array, got %s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    tcg_tensor_init(&t, "array", object);
    tcg_array_locate(&t);
    result = tcg_numpy_empty(tcg_numpy_dtype(state, t.dtype), t.ndim, t.shape, &data);
    if (!result || !t.count)
        return result;
    Py_BEGIN_ALLOW_THREADS failed =
        tcg_synchronize(t.device, t.stream, &err) ||
        tcg_download(t.device, data, t.data, (size_t)t.count * (size_t)tcg_dtype_bytes[t.dtype], &err);
    Py_END_ALLOW_THREADS if (failed) {
        tcg_raise(state, &err);
        Py_CLEAR(result);
    }
    return result;
}

PyDoc_STRVAR(synchronize_doc, "_synchronize($module, device=0, stream=1, /)\n--\n\nWaits for the stream, and "
                              "releases the operands that were held for its work.");

static PyObject *py_synchronize(PyObject *module, PyObject *args) {
    tcg_state *state = PyModule_GetState(module);
    unsigned long long stream = TCG_STREAM_LEGACY;
    tcg_error err;
    int device = 0, failed;
    if (!PyArg_ParseTuple(args, "|iK:_synchronize", &device, &stream))
        return NULL;
    Py_BEGIN_ALLOW_THREADS failed = tcg_synchronize(device, stream ? (uintptr_t)stream : TCG_STREAM_LEGACY, &err);
    Py_END_ALLOW_THREADS if (failed) {
        tcg_raise(state, &err);
        return NULL;
    }
    tcg_release_poll();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(time_doc, "_time($module, a, b, launches, /, *, out=None, out_dtype=None, stream=None, kernel=None, "
                       "batch_invariant=None)\n--\n\n"
                       "Milliseconds that one of `launches` back-to-back launches takes, by the device's events.");

static int dtype_from_name(const char *argument, const char *name) {
    int dtype = tcg_dtype_from_name(name);
    if (dtype < 0)
        PyErr_Format(PyExc_ValueError, "%s: expected float16, bfloat16 or float32, got %s", argument, name);
    return dtype;
}

static int int_from_dict(PyObject *dict, const char *key, int *value) {
    PyObject *object = PyDict_GetItemString(dict, key); /* borrowed */
    if (!object) {
        PyErr_Format(PyExc_ValueError, "device: expected an entry %s", key);
        return -1;
    }
    long number = PyLong_AsLong(object);
    if (PyErr_Occurred())
        return -1;
    *value = (int)number;
    return 0;
}

PyDoc_STRVAR(plan_doc,
             "_plan($module, shape_mnk, in_dtype, out_dtype, a, b, c, batch, device, kernel=None, "
             "batch_invariant=False, tuned=None)\n--\n\n"
             "The plan for a product on a device that need not exist: explain() without arrays.\n\n"
             "a, b, c are (address, row stride, column stride); batch is a list of (size, a, b, c), "
             "innermost first, strides in\n"
             "elements; device has cc, sm_count, smem_block_bytes, smem_sm_bytes and l2_bytes. tuned, with a row as\n"
             "kernel: (arithmetic, memory, tile cycles) instead of csrc/cuda/tuned.def's.");

static PyObject *py_plan(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"shape_mnk", "in_dtype", "out_dtype",       "a",     "b", "c", "batch",
                            "device",    "kernel",   "batch_invariant", "tuned", NULL};
    tcg_state *state = PyModule_GetState(module);
    const char *in_dtype, *out_dtype;
    PyObject *batch, *device, *kernel = Py_None, *axes = NULL, *result = NULL;
    tcg_problem p = {0};
    tcg_device_props props = {.name = "a device"};
    tcg_options options = {.family = -1, .kernel = -1, .swap = -1};
    tcg_plan plan;
    tcg_error err;
    unsigned long long address[3];
    long long m, n, k, row[3], col[3];
    int batch_invariant = 0;
    double constants[3];
    PyObject *tuned = Py_None;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "(LLL)ss(KLL)(KLL)(KLL)OO!|OpO:_plan", names, &m, &n, &k,
                                     &in_dtype, &out_dtype, &address[0], &row[0], &col[0], &address[1], &row[1],
                                     &col[1], &address[2], &row[2], &col[2], &batch, &PyDict_Type, &device, &kernel,
                                     &batch_invariant, &tuned))
        return NULL;
    if (tuned != Py_None) {
        if (!PyTuple_Check(tuned) || !PyArg_ParseTuple(tuned, "ddd", &constants[0], &constants[1], &constants[2]))
            return PyErr_Occurred() ? NULL
                                    : PyErr_Format(PyExc_TypeError, "tuned: expected three floats, got %R", tuned);
        options.tuned = constants;
    }
    p.m = m;
    p.n = n;
    p.k = k;
    if ((p.in_dtype = dtype_from_name("in_dtype", in_dtype)) < 0 ||
        (p.out_dtype = dtype_from_name("out_dtype", out_dtype)) < 0)
        return NULL;
    tcg_matrix *const matrices[] = {&p.a, &p.b, &p.c};
    for (int i = 0; i < 3; i++)
        *matrices[i] = (tcg_matrix){(void *)(uintptr_t)address[i], row[i], col[i]};
    if (int_from_dict(device, "cc", &props.cc) || int_from_dict(device, "sm_count", &props.sm_count) ||
        int_from_dict(device, "smem_block_bytes", &props.smem_block_bytes) ||
        int_from_dict(device, "smem_sm_bytes", &props.smem_sm_bytes) ||
        int_from_dict(device, "l2_bytes", &props.l2_bytes) || tcg_options_kernel(kernel, &options))
        return NULL;
    options.batch_invariant = batch_invariant;
    axes = PySequence_Tuple(batch);
    if (!axes)
        return NULL;
    if (PyTuple_GET_SIZE(axes) > TCG_MAX_BATCH_DIMS) {
        PyErr_Format(PyExc_ValueError, "batch: expected at most %d axes, got %zd", TCG_MAX_BATCH_DIMS,
                     PyTuple_GET_SIZE(axes));
        goto done;
    }
    for (p.batch_ndim = 0; p.batch_ndim < PyTuple_GET_SIZE(axes); p.batch_ndim++) {
        long long size, a, b, c;
        PyObject *axis = PyTuple_GET_ITEM(axes, p.batch_ndim);
        if (!PyTuple_Check(axis)) {
            PyErr_Format(PyExc_TypeError, "batch: expected tuples (size, a, b, c), got %R", axis);
            goto done;
        }
        if (!PyArg_ParseTuple(axis, "LLLL", &size, &a, &b, &c))
            goto done;
        p.batch[p.batch_ndim] = (tcg_batch_dim){size, a, b, c};
    }
    if (tcg_plan_make(&p, &props, &options, &plan, &err))
        tcg_raise(state, &err);
    else
        result = tcg_plan_dict(&plan);
done:
    Py_DECREF(axes);
    return result;
}

PyDoc_STRVAR(plan_fuzz_doc, "_plan_fuzz($module, count, seed, /)\n--\n\n"
                            "Plans random problems for random devices; AssertionError with the first plan that "
                            "breaks what every plan must hold.");

static PyObject *py_plan_fuzz(PyObject *module, PyObject *args) {
    unsigned long long seed;
    char failure[2048] = "";
    long count;
    int failed;
    (void)module;
    if (!PyArg_ParseTuple(args, "lK:_plan_fuzz", &count, &seed))
        return NULL;
    Py_BEGIN_ALLOW_THREADS failed = tcg_plan_fuzz(count, seed, failure, sizeof failure);
    Py_END_ALLOW_THREADS if (failed) {
        PyErr_SetString(PyExc_AssertionError, failure);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---- Explanation: a dict that prints well ---------------------------------------------------------------------- */

static PyObject *explanation_str(PyObject *self) {
    PyObject *key, *value, *lines = PyList_New(0), *newline = NULL, *text = NULL;
    Py_ssize_t at = 0;
    while (lines && PyDict_Next(self, &at, &key, &value)) {
        static const char spaces[] = "                ";
        Py_ssize_t length = PyUnicode_Check(key) ? PyUnicode_GET_LENGTH(key) : 0, most = sizeof spaces - 2;
        PyObject *line = PyUnicode_FromFormat("%S%s%S", key, spaces + (length < most ? length : most), value);
        if (!line || PyList_Append(lines, line))
            Py_CLEAR(lines);
        Py_XDECREF(line);
    }
    if (lines && (newline = PyUnicode_FromString("\n")))
        text = PyUnicode_Join(newline, lines);
    Py_XDECREF(newline);
    Py_XDECREF(lines);
    return text;
}

static PyType_Slot explanation_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("What explain() found: a dict; str() puts an entry on each line.")},
    {Py_tp_base, &PyDict_Type},
    {Py_tp_str, explanation_str},
    {0, NULL},
};

static PyType_Spec explanation_spec = {
    .name = "tcgemm._core.Explanation",
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = explanation_slots,
};

/* ---- the module ------------------------------------------------------------------------------------------------ */

#define SIGNATURE \
    "($module, a, b, /, *, out=None, out_dtype=None, stream=None, kernel=None, batch_invariant=None)\n--\n\n"

PyDoc_STRVAR(
    matmul_doc,
    "matmul" SIGNATURE "The matrix product of two arrays, as numpy.matmul and torch.matmul define it.\n\n"
    "a, b      Arrays of PyTorch, CuPy, JAX, Numba or NumPy, other objects with __dlpack__ or\n"
    "          __cuda_array_interface__, or DLPack capsules; both on one CUDA device or both on the host. Shapes\n"
    "          (..., M, K) and (..., K, N): leading axes broadcast, and a 1-D operand is a row (a) or a column (b) "
    "whose\n"
    "          axis the result does not have. Any strides and any alignment; sizes may be 0.\n"
    "          dtype float16, bfloat16 or float32, the same for both. 16-bit products are summed in float32 and "
    "rounded\n"
    "          once, to nearest even; float32 is exact float32, never TF32.\n"
    "out       An array for the result: of its shape, dtype and device, with any strides, writable, no two elements "
    "of\n"
    "          which share memory, nor one with an input. It is returned.\n"
    "out_dtype The result's dtype: the operands' (the default) or float32; a name, a NumPy dtype or a framework's "
    "own.\n"
    "stream    The CUDA stream to run on: an int handle (0 and 1: the legacy default stream, 2: the per-thread one), "
    "or an\n"
    "          object with __cuda_stream__, cuda_stream or ptr. None: the current stream of a's framework on that "
    "device.\n"
    "kernel    Forces a kernel family, or a kernel by its name in tcgemm.kernels(); after a name, ':direct' or "
    "':swapped'\n"
    "          (the result computed as the transpose of B^T @ A^T) forces the way round too.\n"
    "batch_invariant\n"
    "          True: a row's bits do not depend on how many rows there are. None: what the environment variable\n"
    "          TCGEMM_BATCH_INVARIANT said at import, else False.\n\n"
    "Returns an array of a's framework, made by its own allocator; tcgemm.Array for device operands without a "
    "framework.\n"
    "The call returns when the work is queued. The stream waits for what other producers have queued on streams "
    "that\n"
    "their protocol tells (__dlpack__, __cuda_array_interface__, another framework's current stream). torch and "
    "other\n"
    "arrays with the DLPack C exchange API tell none when stream= is given: as with torch's own functions, order "
    "and\n"
    "lifetime across streams are then the caller's. Host arrays go through float32 numpy.matmul.\n\n"
    "Raises ValueError for shapes that do not match, different devices, and an out that does not fit; TypeError for\n"
    "dtypes and operands that are not supported; RuntimeError for torch tensors that require grad, without a driver, "
    "and\n"
    "where no kernel runs; MemoryError; tcgemm.CudaError when the driver refuses.");

PyDoc_STRVAR(
    explain_doc,
    "explain" SIGNATURE
    "What matmul would do with the same arguments, without doing it: a dict that prints one entry a line.\n\n"
    "shape, batch        of the result\n"
    "mnk                 M, N and K of one launch, after batch axes were merged\n"
    "launches            how many there are\n"
    "kernel, family, order, tile, stages, cluster\n"
    "                    as in kernels()\n"
    "swap                the kernel computes b.T @ a.T, transposed\n"
    "ptx                 the driver compiles the kernel at its first use\n"
    "splits, k_per_split parts of K that are summed separately and then added, in order\n"
    "tiles_m, tiles_n, tiles, grid, raster_group\n"
    "                    tiles of the result, and how blocks walk them\n"
    "copies              operands that are copied to a layout the kernel reads\n"
    "workspace_bytes     for copies and partial sums\n"
    "cycles              the estimate by which the choice was made, from the launch to its end; 0: nothing to "
    "launch\n"
    "why                 the reason for the choice\n\n"
    "Raises what matmul raises.");

#define FAST(function) (PyCFunction)(void (*)(void)) function

static PyMethodDef methods[] = {
    {"matmul", FAST(py_matmul), METH_FASTCALL | METH_KEYWORDS, matmul_doc},
    {"explain", FAST(py_explain), METH_FASTCALL | METH_KEYWORDS, explain_doc},
    {"kernels", py_kernels, METH_NOARGS, kernels_doc},
    {"devices", py_devices, METH_NOARGS, devices_doc},
    {"_time", FAST(py_time), METH_FASTCALL | METH_KEYWORDS, time_doc},
    {"_upload", py_upload, METH_VARARGS, upload_doc},
    {"_download", py_download, METH_O, download_doc},
    {"_synchronize", py_synchronize, METH_VARARGS, synchronize_doc},
    {"_plan", FAST(py_plan), METH_VARARGS | METH_KEYWORDS, plan_doc},
    {"_plan_fuzz", py_plan_fuzz, METH_VARARGS, plan_fuzz_doc},
    {0},
};

/* TCGEMM_BATCH_INVARIANT: set, and none of the words for no. */
static bool batch_invariant_by_default(void) {
    static const char *const no[] = {"", "0", "false", "no", "off"};
    const char *text = getenv("TCGEMM_BATCH_INVARIANT");
    for (size_t i = 0; text && i < sizeof no / sizeof no[0]; i++)
        if (!strcasecmp(text, no[i]))
            return false;
    return text != NULL;
}

static int add_names(PyObject *module, tcg_state *state) {
    if (!(state->array_type = PyType_FromModuleAndSpec(module, &tcg_array_spec, NULL)) ||
        !(state->explanation_type = PyType_FromModuleAndSpec(module, &explanation_spec, NULL)))
        return -1;
    state->cuda_error = PyErr_NewExceptionWithDoc(
        "tcgemm.CudaError", "An error of the CUDA driver, with its name and text; `code` is the CUresult.",
        PyExc_RuntimeError, NULL);
    if (!state->cuda_error)
        return -1;
    /* Where users find them, also for pickle. */
    static const char *const public[] = {"matmul", "explain", "kernels", "devices"};
    for (size_t i = 0; i < sizeof public / sizeof public[0]; i++) {
        PyObject *function = PyObject_GetAttrString(module, public[i]);
        PyObject *home = function ? PyUnicode_FromString("tcgemm") : NULL;
        int failed = !home || PyObject_SetAttr(function, state->str___module__, home);
        Py_XDECREF(function);
        Py_XDECREF(home);
        if (failed)
            return -1;
    }
    return PyModule_AddObjectRef(module, "Array", state->array_type) ||
           PyModule_AddObjectRef(module, "CudaError", state->cuda_error);
}

static int module_exec(PyObject *module) {
    tcg_state *state = PyModule_GetState(module);
    if (pthread_mutex_init(&state->types_lock, NULL)) {
        PyErr_NoMemory();
        return -1;
    }
    state->has_lock = true;
    state->plans = tcg_plans_new();
    if (!state->plans) {
        PyErr_NoMemory();
        return -1;
    }
    if (tcg_numpy_import())
        return -1;
    atomic_init(&state->type_count, 0);
    state->batch_invariant = batch_invariant_by_default();
#define X(name)                                                   \
    if (!(state->str_##name = PyUnicode_InternFromString(#name))) \
        return -1;
    TCG_NAMES(X)
#undef X
    if (!(state->dlpack_version = Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION)) ||
        !(state->kwnames_stream_max_version = PyTuple_Pack(2, state->str_stream, state->str_max_version)) ||
        !(state->kwnames_stream = PyTuple_Pack(1, state->str_stream)) ||
        !(state->kwnames_max_version = PyTuple_Pack(1, state->str_max_version)) ||
        !(state->kwnames_dtype = PyTuple_Pack(1, state->str_dtype)) ||
        !(state->kwnames_dtype_device = PyTuple_Pack(2, state->str_dtype, state->str_device)) ||
        !(state->kwnames_all = PyTuple_Pack(1, state->str_all)))
        return -1;
    return add_names(module, state);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    tcg_state *state = PyModule_GetState(module);
    if (!state)
        return 0;
#define X(name) Py_VISIT(state->str_##name);
    TCG_NAMES(X)
#undef X
#define X(name) Py_VISIT(state->name);
    TCG_OBJECTS(X)
#undef X
    for (int i = 0; i < atomic_load(&state->type_count); i++)
        Py_VISIT(state->types[i].type);
    return 0;
}

static int module_clear(PyObject *module) {
    tcg_state *state = PyModule_GetState(module);
    if (!state)
        return 0;
    int types = atomic_exchange(&state->type_count, 0);
#define X(name) Py_CLEAR(state->str_##name);
    TCG_NAMES(X)
#undef X
#define X(name) Py_CLEAR(state->name);
    TCG_OBJECTS(X)
#undef X
    for (int i = 0; i < types; i++)
        Py_CLEAR(state->types[i].type);
    return 0;
}

static void module_free(void *module) {
    tcg_state *state = PyModule_GetState(module);
    module_clear(module);
    if (!state)
        return;
    if (state->has_lock)
        pthread_mutex_destroy(&state->types_lock);
    PyMem_RawFree(state->plans);
    state->plans = NULL;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    /* Operands that are held for the device are released through PyGILState_Ensure, by whichever thread makes the
     * next call; it knows the main interpreter alone. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,         .m_name = "tcgemm._core", .m_doc = "The C side of tcgemm.",
    .m_size = sizeof(tcg_state),   .m_methods = methods,     .m_slots = slots,
    .m_traverse = module_traverse, .m_clear = module_clear,  .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
