"""Hand-made producers of arrays: DLPack capsules of both kinds with counted deleters, objects with `__dlpack__`, a type
with the DLPack C exchange API, and bare `__cuda_array_interface__` objects. Every field can be set to nonsense.
"""

from __future__ import annotations

import ctypes as ct

import numpy as np
import reference as ref

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
READ_ONLY, IS_COPIED = 1, 2
DTYPE = {
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "bfloat16": (4, 16, 1),
}  # code, bits, lanes


class DLDevice(ct.Structure):
    _fields_ = [("device_type", ct.c_int32), ("device_id", ct.c_int32)]


class DLDataType(ct.Structure):
    _fields_ = [("code", ct.c_uint8), ("bits", ct.c_uint8), ("lanes", ct.c_uint16)]


class DLTensor(ct.Structure):
    _fields_ = [
        ("data", ct.c_void_p),
        ("device", DLDevice),
        ("ndim", ct.c_int32),
        ("dtype", DLDataType),
        ("shape", ct.POINTER(ct.c_int64)),
        ("strides", ct.POINTER(ct.c_int64)),
        ("byte_offset", ct.c_uint64),
    ]


class DLPackVersion(ct.Structure):
    _fields_ = [("major", ct.c_uint32), ("minor", ct.c_uint32)]


class DLManagedTensor(ct.Structure):
    _fields_ = [("dl_tensor", DLTensor), ("manager_ctx", ct.c_void_p), ("deleter", ct.c_void_p)]


class DLManagedTensorVersioned(ct.Structure):
    _fields_ = [
        ("version", DLPackVersion),
        ("manager_ctx", ct.c_void_p),
        ("deleter", ct.c_void_p),
        ("flags", ct.c_uint64),
        ("dl_tensor", DLTensor),
    ]


assert (ct.sizeof(DLTensor), ct.sizeof(DLManagedTensor), ct.sizeof(DLManagedTensorVersioned)) == (48, 64, 80)

_api = ct.pythonapi
_api.PyCapsule_New.restype = ct.py_object
_api.PyCapsule_New.argtypes = [ct.c_void_p, ct.c_char_p, ct.c_void_p]
_api.PyCapsule_GetName.restype = ct.c_char_p
_api.PyCapsule_GetName.argtypes = [ct.py_object]
_api.PyCapsule_GetPointer.restype = ct.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ct.py_object, ct.c_char_p]
_api.PyCapsule_GetDestructor.restype = ct.c_void_p
_api.PyCapsule_GetDestructor.argtypes = [ct.py_object]

# A capsule may die while an exception is on its way, when no Python code can run: its destructor is NumPy's, in C, which
# leaves a consumed capsule alone and calls the deleter of another.
_destructors = [
    _api.PyCapsule_GetDestructor(np.empty(1).__dlpack__()),
    _api.PyCapsule_GetDestructor(np.empty(1).__dlpack__(max_version=(1, 0))),
]

_DELETER = ct.CFUNCTYPE(None, ct.c_void_p)
_NAMES = (b"dltensor", b"dltensor_versioned")  # kept alive: a capsule borrows its name

_live = {}  # address of a managed tensor -> the export that owns it, until its deleter has run


@_DELETER
def _delete(address):
    export = _live.pop(address, None)
    if export is not None:
        export.deleted += 1
    else:
        stray.append(address)


stray = []  # addresses whose deleter ran twice


def address(function):
    return ct.cast(function, ct.c_void_p).value


def capsule_name(capsule):
    return _api.PyCapsule_GetName(capsule).decode()


class Export:
    """One managed tensor. `deleted` counts its deleter's calls; its memory outlives them, so a second call is counted
    (in `stray`) and not a crash. Keywords set the fields of the struct; `shape` and `strides` None are NULL."""

    def __init__(
        self,
        data,
        dtype,
        shape,
        strides=None,
        *,
        versioned=False,
        device=(CPU, 0),
        byte_offset=0,
        flags=0,
        version=(1, 0),
        ndim=None,
        deleter=True,
        keep=None,
    ):
        self.deleted = 0
        self.keep = keep
        self.managed = DLManagedTensorVersioned() if versioned else DLManagedTensor()
        self.name = _NAMES[versioned]
        if versioned:
            self.managed.version = DLPackVersion(*version)
            self.managed.flags = flags
        self.managed.deleter = address(_delete) if deleter else None
        tensor = self.managed.dl_tensor
        tensor.data = data
        tensor.device = DLDevice(*device)
        tensor.dtype = DLDataType(*(DTYPE[dtype] if isinstance(dtype, str) else dtype))
        tensor.ndim = len(shape) if ndim is None else ndim
        tensor.byte_offset = byte_offset
        self._shape = None if shape is None else (ct.c_int64 * max(len(shape), 1))(*shape)
        self._strides = None if strides is None else (ct.c_int64 * max(len(strides), 1))(*strides)
        tensor.shape = ct.cast(self._shape, ct.POINTER(ct.c_int64)) if shape is not None else None
        tensor.strides = ct.cast(self._strides, ct.POINTER(ct.c_int64)) if strides is not None else None

    @property
    def address(self):
        return ct.addressof(self.managed)

    def hold(self):
        """Registers the export as alive and gives its address, to be deleted by whoever takes it."""
        _live[self.address] = self
        return self.address

    def capsule(self):
        return _api.PyCapsule_New(self.hold(), self.name, _destructors[self.name == _NAMES[True]])


def export(buffer, **fields):
    """The export of a reference.HostBuffer's view. Fields override what describes it truly."""
    where = buffer.where
    itemsize = buffer.bits.itemsize
    fields = {
        "data": buffer.bits.ctypes.data + itemsize * where.offset,
        "dtype": buffer.dtype,
        "shape": where.shape,
        "strides": where.strides,
        "keep": buffer,
        **fields,
    }
    return Export(**fields)


class DLPackObject:
    """An array known by `__dlpack__` and `__dlpack_device__` alone. `streams` records what it was asked for, `capsules`
    what it gave: they live until settle(), since a deleter in Python cannot run while an exception is on its way.

    Takes a function that makes a fresh Export. kind "legacy": knows no max_version, as releases before DLPack 1.0;
    "versioned": gives versioned capsules when asked for them; "always": versioned whatever was asked for.
    """

    def __init__(self, make, kind="versioned", device=(CPU, 0), error=None):
        self.make, self.kind, self.device, self.error = make, kind, device, error
        self.streams, self.exports, self.capsules = [], [], []

    def settle(self):
        """Drops the capsules and gives the exports there were."""
        self.capsules.clear()
        exports, self.exports = self.exports, []
        return exports

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        if self.kind == "legacy" and set(kwargs) - {"stream"}:
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        if self.error is not None:
            raise self.error
        self.streams.append(kwargs.get("stream", "not given"))
        asked = (kwargs.get("max_version") or (0, 0))[0] >= 1
        self.exports.append(self.make(versioned=self.kind == "always" or (self.kind == "versioned" and asked)))
        self.capsules.append(self.exports[-1].capsule())
        return self.capsules[-1]


class CaiObject:
    """A bare `__cuda_array_interface__`. Keywords replace entries of the dict; `...` removes one."""

    def __init__(self, interface, keep=None, **entries):
        interface = {**interface, **entries}
        self.interface = {k: v for k, v in interface.items() if v is not ...}
        self.keep, self.reads = keep, 0

    @property
    def __cuda_array_interface__(self):
        self.reads += 1
        return self.interface


TYPESTR = {"float16": "<f2", "float32": "<f4", "bfloat16": "<V2"}


def cai(pointer, dtype, shape, strides=None, /, *, keep=None, **entries):
    """A CaiObject by fields; strides in elements. Keywords replace entries."""
    typestr = TYPESTR.get(dtype, dtype)
    itemsize = int(typestr[2:])
    strides = None if strides is None else tuple(s * itemsize for s in strides)
    interface = {
        "shape": tuple(shape),
        "typestr": typestr,
        "data": (pointer, False),
        "version": 3,
        "strides": strides,
    }
    return CaiObject({**interface, "stream": None}, keep, **entries)


# Entries of an interface of shape (20, 20) that must be refused, and how.
BAD_INTERFACES = [
    ({"mask": (1, 2)}, TypeError),
    ({"typestr": ">f2"}, TypeError),
    ({"typestr": "<f8"}, TypeError),
    ({"typestr": "<i2"}, TypeError),
    ({"typestr": "<c8"}, TypeError),
    ({"typestr": 3}, TypeError),
    ({"typestr": ...}, (TypeError, ValueError)),
    ({"typestr": ""}, TypeError),
    ({"typestr": "<f"}, TypeError),
    ({"shape": ...}, (TypeError, ValueError)),
    ({"shape": 3}, TypeError),
    ({"shape": (-1, 4)}, ValueError),
    ({"shape": (2**62, 2**62)}, ValueError),
    ({"shape": ("x", 4)}, TypeError),
    ({"data": ...}, (TypeError, ValueError)),
    ({"data": 3}, TypeError),
    ({"data": (0, False)}, ValueError),
    ({"data": (None, False)}, (TypeError, ValueError)),
    ({"data": ("x", False)}, TypeError),
    ({"data": (2**70, False)}, (ValueError, OverflowError)),
    ({"strides": (1,)}, ValueError),
    ({"strides": (3, 1)}, ValueError),
    ({"strides": (2**63 - 2, 2)}, ValueError),
    ({"strides": "ab"}, TypeError),
    ({"stream": 0}, ValueError),
    ({"stream": "x"}, TypeError),
    ({"stream": -3}, ValueError),
]


# ---- the C exchange API ------------------------------------------------------------------------------------------------


class DLPackExchangeAPI(ct.Structure):
    pass


DLPackExchangeAPI._fields_ = [
    ("version", DLPackVersion),
    ("prev_api", ct.POINTER(DLPackExchangeAPI)),
    ("managed_tensor_allocator", ct.c_void_p),
    ("managed_tensor_from_py_object_no_sync", ct.c_void_p),
    ("managed_tensor_to_py_object_no_sync", ct.c_void_p),
    ("dltensor_from_py_object_no_sync", ct.c_void_p),
    ("current_work_stream", ct.c_void_p),
]

_EXCHANGE_NAME = b"dlpack_exchange_api"
_SET_ERROR = ct.CFUNCTYPE(None, ct.c_void_p, ct.c_char_p, ct.c_char_p)
_ALLOCATOR = ct.PYFUNCTYPE(ct.c_int, ct.POINTER(DLTensor), ct.POINTER(ct.c_void_p), ct.c_void_p, _SET_ERROR)
_FROM_OBJECT = ct.PYFUNCTYPE(ct.c_int, ct.c_void_p, ct.POINTER(ct.c_void_p))
_TO_OBJECT = ct.PYFUNCTYPE(ct.c_int, ct.c_void_p, ct.POINTER(ct.c_void_p))
_BORROW = ct.PYFUNCTYPE(ct.c_int, ct.c_void_p, ct.POINTER(DLTensor))
_STREAM = ct.PYFUNCTYPE(ct.c_int, ct.c_int32, ct.c_int32, ct.POINTER(ct.c_void_p))


def exchange_type(
    *, version=(1, 3), omit=(), attribute="__dlpack_c_exchange_api__", as_int=False, stream=0, previous=None
):
    """A new type with the C exchange API, over Exports. Its instances take a function that makes a fresh Export and are
    written to through nothing else. `calls` counts each member's use; `omit` leaves members NULL."""

    calls = dict.fromkeys(("allocator", "from_object", "to_object", "borrow", "stream"), 0)

    class Exchanged:
        def __init__(self, make):
            self.make, self.exports = make, []

        def _fresh(self):
            self.exports.append(self.make(versioned=True))
            return self.exports[-1]

    def of(pointer):
        return ct.cast(pointer, ct.py_object).value

    def allocator(prototype, out, context, set_error):
        calls["allocator"] += 1
        proto = prototype.contents
        shape = [proto.shape[i] for i in range(proto.ndim)]
        code = (proto.dtype.code, proto.dtype.bits, proto.dtype.lanes)
        dtype = next(name for name, value in DTYPE.items() if value == code)
        buffer = ref.HostBuffer(dtype, ref.packed(shape))
        out[0] = export(buffer, versioned=True, device=(proto.device.device_type, proto.device.device_id)).hold()
        return 0

    def from_object(pointer, out):
        calls["from_object"] += 1
        out[0] = of(pointer)._fresh().hold()
        return 0

    def to_object(managed, out):
        calls["to_object"] += 1
        owner = _live.pop(managed)  # stolen: the new object owns it
        result = Exchanged(lambda versioned: owner)
        result.owner = owner
        _incref(result)
        out[0] = id(result)
        return 0

    def borrow(pointer, out):
        calls["borrow"] += 1
        fresh = of(pointer)._fresh()
        ct.memmove(out, ct.addressof(fresh.managed.dl_tensor), ct.sizeof(DLTensor))
        return 0

    def current_work_stream(device_type, device_id, out):
        calls["stream"] += 1
        out[0] = (stream() if callable(stream) else stream) or None
        return 0

    functions = {
        "managed_tensor_allocator": _ALLOCATOR(allocator),
        "managed_tensor_from_py_object_no_sync": _FROM_OBJECT(from_object),
        "managed_tensor_to_py_object_no_sync": _TO_OBJECT(to_object),
        "dltensor_from_py_object_no_sync": _BORROW(borrow),
        "current_work_stream": _STREAM(current_work_stream),
    }
    api = DLPackExchangeAPI()
    api.version = DLPackVersion(*version)
    api.prev_api = ct.pointer(previous) if previous is not None else None
    for name, function in functions.items():
        setattr(api, name, None if name in omit else address(function))
    _immortal.append((api, functions, previous))  # the protocol: static for the life of the process
    Exchanged.calls, Exchanged.api = calls, api
    handle = ct.addressof(api)
    setattr(Exchanged, attribute, handle if as_int else _api.PyCapsule_New(handle, _EXCHANGE_NAME, None))
    return Exchanged


_immortal = []
_incref = ct.PYFUNCTYPE(None, ct.py_object)(("Py_IncRef", _api))
