/* What the files of the binding share: the module's state, an operand as plain C, and each file's entry points. */
#ifndef TCG_TENSOR_H
#define TCG_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../cuda/gemm.h"
#include "dlpack.h"

/* NumPy's and torch's own limit. */
#define TCG_MAX_NDIM 64

/* Operand types whose protocol is remembered; further ones are looked at again in each call. */
#define TCG_MAX_TYPES 64

#define TCG_SEEN_DEVICES 64

#define TCG_STREAM_LEGACY ((uintptr_t)1)
#define TCG_STREAM_PER_THREAD ((uintptr_t)2)

#define TCG_HOST (-1)

/* What newer releases of Python have under these names. */
#if PY_VERSION_HEX < 0x030D0000
#define Py_IsFinalizing _Py_IsFinalizing
#endif

/* The exception that is set is put aside for code that must run whatever happened. */
#if PY_VERSION_HEX < 0x030C0000
typedef struct tcg_exception {
    PyObject *type, *value, *traceback;
} tcg_exception;
static inline void tcg_exception_save(tcg_exception *saved) {
    PyErr_Fetch(&saved->type, &saved->value, &saved->traceback);
}
static inline bool tcg_exception_is_set(const tcg_exception *saved) { return saved->type != NULL; }
static inline void tcg_exception_restore(tcg_exception *saved) /* steals */
{
    PyErr_Restore(saved->type, saved->value, saved->traceback);
}
#else
typedef struct tcg_exception {
    PyObject *value;
} tcg_exception;
static inline void tcg_exception_save(tcg_exception *saved) { saved->value = PyErr_GetRaisedException(); }
static inline bool tcg_exception_is_set(const tcg_exception *saved) { return saved->value != NULL; }
static inline void tcg_exception_restore(tcg_exception *saved) /* steals */
{
    PyErr_SetRaisedException(saved->value);
}
#endif

/* ---- the module's state ---------------------------------------------------------------------------------------- */

/* Names, interned once: X(name) is also its text. */
#define TCG_NAMES(X)                   \
    X(Device)                          \
    X(Stream)                          \
    X(Tensor)                          \
    X(__c_dlpack_exchange_api__)       \
    X(__cuda_array_interface__)        \
    X(__cuda_stream__)                 \
    X(__dlpack__)                      \
    X(__dlpack_c_exchange_api__)       \
    X(__dlpack_device__)               \
    X(__enter__)                       \
    X(__exit__)                        \
    X(__module__)                      \
    X(__name__)                        \
    X(__pyx_capi__)                    \
    X(_C)                              \
    X(_c_contiguous)                   \
    X(_cuda_getCurrentRawStream)       \
    X(_cuda_getDevice)                 \
    X(_core)                           \
    X(_dynamo)                         \
    X(_empty_strided_cpu)              \
    X(_empty_strided_cuda)             \
    X(_init)                           \
    X(_is_torch_function_mode_enabled) \
    X(_len_torch_dispatch_stack)       \
    X(_ndarray_base)                   \
    X(all)                             \
    X(asarray)                         \
    X(batch_invariant)                 \
    X(bfloat16)                        \
    X(copy)                            \
    X(core)                            \
    X(cuda)                            \
    X(cuda_stream)                     \
    X(current_context)                 \
    X(data)                            \
    X(detach)                          \
    X(device)                          \
    X(device_array)                    \
    X(device_id)                       \
    X(dtype)                           \
    X(empty)                           \
    X(errstate)                        \
    X(float16)                         \
    X(float32)                         \
    X(from_dlpack)                     \
    X(getDevice)                       \
    X(get_current_stream)              \
    X(get_current_stream_ptr)          \
    X(gpus)                            \
    X(guards)                          \
    X(id)                              \
    X(ignore)                          \
    X(is_deleted)                      \
    X(is_grad_enabled)                 \
    X(is_neg)                          \
    X(kernel)                          \
    X(ma)                              \
    X(mask)                            \
    X(matmul)                          \
    X(max_version)                     \
    X(name)                            \
    X(ndarray)                         \
    X(new_empty)                       \
    X(null)                            \
    X(out)                             \
    X(out_dtype)                       \
    X(Parameter)                       \
    X(MaskedArray)                     \
    X(ptds)                            \
    X(ptr)                             \
    X(requires_grad)                   \
    X(runtime)                         \
    X(shape)                           \
    X(stream)                          \
    X(strides)                         \
    X(typestr)                         \
    X(uint8)                           \
    X(version)

/* Other objects. The last group is found at first use, when its framework has long been imported: read and written
 * through tcg_cached alone. */
#define TCG_OBJECTS(X)            \
    X(array_type)                 \
    X(explanation_type)           \
    X(cuda_error)                 \
    X(dlpack_version)             \
    X(kwnames_stream_max_version) \
    X(kwnames_stream)             \
    X(kwnames_max_version)        \
    X(kwnames_dtype)              \
    X(kwnames_dtype_device)       \
    X(kwnames_all)                \
    X(torch_is_grad_enabled)      \
    X(torch_tensor)               \
    X(torch_empty)                \
    X(torch_empty_cpu)            \
    X(torch_empty_cuda)           \
    X(torch_dispatch_modes)       \
    X(torch_function_mode)        \
    X(torch_uint8)                \
    X(torch_float16)              \
    X(torch_bfloat16)             \
    X(torch_float32)              \
    X(torch_raw_stream)           \
    X(torch_get_device)           \
    X(cupy_ndarray)               \
    X(cupy_ndarray_base)          \
    X(cupy_ndarray_init)          \
    X(cupy_device_functions)      \
    X(cupy_stream_functions)      \
    X(cupy_get_device)            \
    X(cupy_get_current_stream)    \
    X(jax_from_dlpack)            \
    X(jax_asarray)                \
    X(numba_device_array)         \
    X(numpy_matmul)               \
    X(numpy_errstate)             \
    X(numpy_uint8)                \
    X(numpy_bfloat16)

typedef enum tcg_protocol {
    TCG_PROTOCOL_NONE,
    TCG_PROTOCOL_EXCHANGE,  /* the DLPack C exchange API */
    TCG_PROTOCOL_NUMPY,     /* NumPy's C API */
    TCG_PROTOCOL_INTERFACE, /* __cuda_array_interface__ */
    TCG_PROTOCOL_CUPY,      /* cupy.ndarray by its attributes, which takes a fifth of the time */
    TCG_PROTOCOL_DLPACK,    /* __dlpack__ */
    TCG_PROTOCOL_CAPSULE,   /* a bare DLPack capsule */
    TCG_PROTOCOL_ARRAY,     /* tcgemm.Array */
} tcg_protocol;

typedef enum tcg_framework {
    TCG_FRAMEWORK_NONE,
    TCG_FRAMEWORK_TORCH,
    TCG_FRAMEWORK_CUPY,
    TCG_FRAMEWORK_NUMBA,
    TCG_FRAMEWORK_JAX,
    TCG_FRAMEWORK_NUMPY,
} tcg_framework;

/* How operands of one type are taken. */
typedef struct tcg_type {
    PyTypeObject *type; /* a strong reference in the state's table, borrowed elsewhere */
    const DLPackExchangeAPI *api;
    tcg_protocol protocol;
    tcg_framework framework;
    bool plain; /* torch: its new_empty gives a torch.Tensor, and none of its methods is Python */
    /* torch: the C functions behind requires_grad and is_neg, static in its library; NULL where it has others. */
    const PyGetSetDef *requires_grad;
    PyCFunction is_neg;
} tcg_type;

typedef struct tcg_plan_slot tcg_plan_slot;

typedef struct tcg_state {
#define X(name) PyObject *str_##name;
    TCG_NAMES(X)
#undef X
#define X(name) PyObject *name;
    TCG_OBJECTS(X)
#undef X
    /* Append-only: an entry below type_count never changes, so that readers need no lock. */
    tcg_type types[TCG_MAX_TYPES];
    atomic_int type_count;
    pthread_mutex_t types_lock; /* for writers; nothing of Python runs under it */
    bool has_lock;
    tcg_plan_slot *plans;               /* owned; see plans.c */
    bool batch_invariant;               /* the environment's default */
    atomic_bool seen[TCG_SEEN_DEVICES]; /* the device's properties have been read: asking again cannot block */
} tcg_state;

/* The object in `slot`, or else root.names[0].names[1]... (NULL-terminated) of the imported module `root`, which is
 * then kept there. A borrowed reference; NULL with an exception. */
PyObject *tcg_cached(PyObject **slot, const char *root, PyObject *const *names);
#define TCG_CACHED(slot, root, ...) tcg_cached(slot, root, (PyObject *const[]){__VA_ARGS__, NULL})
/* The same for what not every release of a framework has: None then. */
PyObject *tcg_cached_or_none(PyObject **slot, const char *root, PyObject *const *names);
#define TCG_CACHED_OR_NONE(slot, root, ...) tcg_cached_or_none(slot, root, (PyObject *const[]){__VA_ARGS__, NULL})

/* The module if it has been imported: a new reference, or NULL without an exception. */
PyObject *tcg_imported(const char *name);

/* 1: *result is a new reference; 0: there is no such attribute; -1: an exception. */
int tcg_optional_attr(PyObject *object, PyObject *name, PyObject **result);

/* The int that a function without arguments gives. function: NULL where an exception is set. */
int tcg_call_for_long(PyObject *function, long *value);

/* Enters a context manager and gives it back. */
PyObject *tcg_enter(tcg_state *state, PyObject *manager /* steals; NULL where an exception is set */);

/* torch's current CUDA device. */
int tcg_torch_device(tcg_state *state, long *ordinal);

/* ---- an operand ------------------------------------------------------------------------------------------------ */

/* An operand in plain C, with what keeps it alive. Filled once by tcg_tensor_locate and tcg_tensor_finish; given
 * back by tcg_tensor_release in every case. */
typedef struct tcg_tensor {
    const char *name;     /* "a", "b" or "out": for messages */
    PyObject *object;     /* borrowed from the caller */
    const tcg_type *type; /* in the state's table, or own_type */
    tcg_type own_type;
    char *data;
    int64_t count;     /* elements */
    int64_t low, high; /* offsets of the lowest and the highest element from data, in elements; 0 where count is */
    int dtype;         /* TCG_f16 ..., -1: not supported, then dtype_text names it */
    int device;        /* TCG_HOST or a CUDA ordinal */
    int ndim;
    bool any_device; /* managed or empty: `device` is a guess that gives way to the other operands' */
    bool read_only;
    bool pending;            /* tcg_tensor_finish has still to fill in all but the device */
    bool write_back;         /* `held` is a packed copy of `object`, to be copied back when it has been written */
    uintptr_t stream;        /* where its producer works on it; 0: nothing to wait for */
    PyObject *held;          /* owned */
    DLManagedTensor *legacy; /* owned */
    DLManagedTensorVersioned *versioned; /* owned */
    char dtype_text[32];
    int64_t shape[TCG_MAX_NDIM];
    int64_t strides[TCG_MAX_NDIM]; /* in elements; meaningless where the shape is 1 or count is 0 */
} tcg_tensor;

void tcg_tensor_init(tcg_tensor *tensor, const char *name, PyObject *object);

/* 1 for a dtype that is not supported. */
static inline int64_t tcg_elem_bytes(const tcg_tensor *tensor) {
    return tensor->dtype < 0 ? 1 : tcg_dtype_bytes[tensor->dtype];
}

/* Finds the operand's protocol and where its memory is, and as much of the rest as needs no stream. */
int tcg_tensor_locate(tcg_state *state, tcg_tensor *tensor);
/* The rest: a producer known by __dlpack__ makes its work visible to `stream` (0: it need not). */
int tcg_tensor_finish(tcg_state *state, tcg_tensor *tensor, uintptr_t stream);

/* Gives back whatever is owned. Keeps an exception that is set. */
void tcg_tensor_release(tcg_tensor *tensor);
/* The same for `count` tensors, when the work now in the stream is done. -1 when that could not be arranged: they
 * have been given back after waiting for it, and an exception is set. */
int tcg_tensors_release_after(const tcg_state *state, tcg_tensor *const *tensors, int count, int device,
                              uintptr_t stream);

/* The strides of a packed row-major array whose last is `step`; axes of size 0 count as 1. False where these or their
 * whole are beyond 64 bits, as an empty array's may be: they have wrapped around then. */
bool tcg_packed_strides(int ndim, const int64_t *shape, int64_t step, int64_t *strides);

/* Elements of a shape that is empty or known to fit. */
int64_t tcg_shape_count(int ndim, const int64_t *shape);

/* Checks sizes and strides that are already in place and sets count, low and high. `has_strides` false: fills in
 * those of a packed row-major array. */
int tcg_tensor_layout(tcg_tensor *tensor, bool has_strides);

/* The operand whose memory is packed, row-major and known. */
void tcg_tensor_packed(tcg_tensor *tensor, void *data, int dtype, int device, int ndim, const int64_t *shape);

/* 1 when two elements of the tensors share a byte, or when that cannot be told in bounded time. */
bool tcg_tensors_overlap(const tcg_tensor *x, const tcg_tensor *y);
/* The same for two elements of one tensor. */
bool tcg_tensor_overlaps_itself(const tcg_tensor *tensor);

/* "(2, 3)" in a new string. */
PyObject *tcg_shape_text(int ndim, const int64_t *shape);
PyObject *tcg_shape_tuple(int ndim, const int64_t *shape);
/* "cuda:0" or "the host", into text. */
const char *tcg_device_text(int device, char text[24]);
#define TCG_SUPPORTED "supported: float16, bfloat16 and float32, the same for a and b"

/* An int, or what has __index__. -1 with a TypeError, or a ValueError where it does not fit, that names argument and
 * what of it. */
int tcg_read_int(const char *argument, const char *what, PyObject *object, int64_t *value);
int tcg_read_address(const char *argument, const char *what, PyObject *object, uintptr_t *value);

/* Sets the exception for err and returns -1. */
int tcg_raise(const tcg_state *state, const tcg_error *err);

/* Sets a TypeError that gives the current exception as its cause and returns -1. */
int tcg_refuse(const tcg_tensor *tensor, const char *what);

/* ---- one protocol a file --------------------------------------------------------------------------------------- */

/* dlpack.c. The capsule of an exchange API, or the address itself as an int: sets *api, or leaves it NULL when no
 * version is known here. */
int tcg_exchange_api(PyObject *attribute, const DLPackExchangeAPI **api);
int tcg_exchange_locate(tcg_state *state, tcg_tensor *tensor);
int tcg_exchange_stream(const DLPackExchangeAPI *api, int device, uintptr_t *stream);
int tcg_dlpack_locate(tcg_state *state, tcg_tensor *tensor);
int tcg_dlpack_finish(tcg_state *state, tcg_tensor *tensor, uintptr_t stream);
int tcg_capsule_take(tcg_tensor *tensor, PyObject *capsule);
int tcg_tensor_from_dl(tcg_tensor *tensor, const DLTensor *dl, uint64_t flags);
/* The DLDataType of TCG_f16 ... */
DLDataType tcg_dl_dtype(int dtype);

/* cai.c: __cuda_array_interface__. */
int tcg_interface_locate(tcg_state *state, tcg_tensor *tensor);
/* The same for a cupy.ndarray itself; the stream is left to tcg_cupy_stream. */
int tcg_cupy_locate(tcg_state *state, tcg_tensor *tensor);
/* CuPy's current device, and its current stream there. */
int tcg_cupy_device(tcg_state *state, long *ordinal);
int tcg_cupy_stream(tcg_state *state, uintptr_t *stream);
/* Names a dtype that is not supported, in the tensor's dtype_text. typestr: a byte order, a letter, the bytes. */
void tcg_typestr_text(tcg_tensor *tensor, const char *typestr);

/* numpy.c: NumPy's C API; the others need tcg_numpy_import once before. */
int tcg_numpy_import(void);
bool tcg_numpy_is_array(PyTypeObject *type);
int tcg_numpy_locate(tcg_state *state, tcg_tensor *tensor);
/* A NumPy dtype into the tensor's dtype, or dtype_text. */
int tcg_numpy_read_dtype(tcg_state *state, PyObject *dtype, tcg_tensor *tensor);
PyObject *tcg_numpy_dtype(tcg_state *state, int dtype); /* a scalar type: borrowed */
/* Uninitialised. dtype: a NumPy dtype or scalar type; NULL where an exception is set. */
PyObject *tcg_numpy_empty(PyObject *dtype, int ndim, const int64_t *shape, void **data);
/* numpy.ascontiguousarray and numpy.copyto. */
PyObject *tcg_numpy_packed(PyObject *object);
int tcg_numpy_copy(PyObject *to, PyObject *from);
/* The array, or where it has no axes, its element as a scalar. */
PyObject *tcg_numpy_return(PyObject *array /* steals */);
int tcg_dtype_from_name(const char *name); /* -1: none of ours */
/* The dtype that a name, a NumPy dtype or scalar type, or a framework's own dtype means; -1 with an exception. */
int tcg_dtype_from_object(tcg_state *state, PyObject *object);

/* array.c */
typedef struct tcg_array tcg_array;
extern PyType_Spec tcg_array_spec;
/* Uninitialised memory, packed and row-major, ordered by the stream. */
PyObject *tcg_array_new(tcg_state *state, int dtype, int ndim, const int64_t *shape, int device, uintptr_t stream);
int tcg_array_locate(tcg_tensor *tensor);

/* host.c: C = A @ B on host memory. The shapes are those of numpy.matmul, already checked. */
int tcg_host_matmul(tcg_state *state, const tcg_tensor *a, const tcg_tensor *b, const tcg_tensor *out);

/* plans.c: tcg_plan_make, or what it said before. */
tcg_plan_slot *tcg_plans_new(void);
int tcg_plan_cached(tcg_state *state, const tcg_problem *problem, int device, const tcg_device_props *props,
                    const tcg_options *options, tcg_plan *plan, tcg_error *err);

/* call.c: one product from its arguments on. */
PyObject *py_matmul(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *kwnames);
PyObject *py_explain(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *kwnames);
PyObject *py_time(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *kwnames);
/* A family's or a kernel's name into the options; None leaves them alone. */
int tcg_options_kernel(PyObject *object, tcg_options *options);
/* A dict of what the plan says, for people and tests. */
PyObject *tcg_plan_dict(const tcg_plan *plan);
int tcg_device_props_of(tcg_state *state, int device, const tcg_device_props **props);

/* result.c: a result in the framework of `a`, allocated by it. */
typedef struct tcg_result {
    PyObject *object;                    /* owned: the array, or what tcg_result_finish makes it from */
    DLManagedTensorVersioned *versioned; /* owned: the same, by an exchange API's allocator */
} tcg_result;

/* Context managers of a framework that have been entered, innermost last. */
typedef struct tcg_current {
    int count;
    PyObject *managers[2]; /* owned */
} tcg_current;

/* Makes the device current for frameworks that allocate, or tell their stream, by it. */
int tcg_current_device(tcg_state *state, const tcg_tensor *a, int device, tcg_current *current);
/* Makes the stream current for frameworks that allocate by it. */
int tcg_current_stream(tcg_state *state, const tcg_tensor *a, int device, uintptr_t stream, tcg_current *current);
/* Leaves them all. -1 when that failed; an exception that was set before stays. */
int tcg_current_leave(tcg_state *state, tcg_current *current);

/* The stream that the framework of `a` works on by default on that device, inside tcg_current_device. */
int tcg_framework_stream(tcg_state *state, const tcg_tensor *a, int device, const tcg_current *current,
                         uintptr_t *stream);

/* Makes the result; c describes its memory and is released by the caller like an operand. */
int tcg_result_new(tcg_state *state, const tcg_tensor *a, int dtype, int ndim, const int64_t *shape, int device,
                   uintptr_t stream, tcg_result *result, tcg_tensor *c);
/* The array for the caller: a new reference. */
PyObject *tcg_result_finish(tcg_state *state, const tcg_tensor *a, tcg_result *result);
void tcg_result_release(tcg_result *result);
/* Device memory of the framework of `a`; *owner is NULL when it is ours, to be freed by tcg_memory_free. */
int tcg_workspace_new(tcg_state *state, const tcg_tensor *a, size_t bytes, int device, uintptr_t stream,
                      PyObject **owner, void **data);

#endif
