"""What tcgemm is measured beside, each as build(problem, in_dtype, sets) -> function(a, b, c): torch, cuBLASLt's best algorithm,
CuPy, Triton, and tcgemm itself with its options. A peer that is not installed is named and left out."""

import ctypes
import functools
from pathlib import Path

import timing

# ---- tcgemm --------------------------------------------------------------------------------------------------------


def tcgemm_function(**options):
    matmul = timing.product().matmul
    return lambda a, b, c: matmul(a, b, out=c, **options)


def plan(operands, **options):
    """What tcgemm.explain says of one set, cut to what a result's row holds."""
    a, b, c = operands
    about = timing.product().explain(a, b, out=c, **options)
    return {
        "kernel": about["kernel"],
        "family": about["family"],
        "swap": about.get("swap", False),
        "splits": about.get("splits", 1),
        "copies": len(about.get("copies", ())),
    }


# ---- torch ---------------------------------------------------------------------------------------------------------


def torch_function(problem):
    torch = timing.cuda_torch()
    multiply = torch.bmm if problem.batch > 1 else torch.mm
    return lambda a, b, c: multiply(a, b, out=c)


# ---- cuBLASLt ------------------------------------------------------------------------------------------------------

# cublasLt.h's numbers for what is used here.
_COMPUTE_32F = 68
_CUDA_TYPE = {"float32": 0, "float16": 2, "bfloat16": 14}
_DESC_TRANSA, _DESC_TRANSB = 3, 4
_LAYOUT_BATCH_COUNT, _LAYOUT_BATCH_STRIDE = 5, 6
_PREFERENCE_WORKSPACE = 1
_WORKSPACE_BYTES = 64 << 20
_OFFERS = 64  # asked of the heuristic
_TRIED = 12  # of its offers, which come best first


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Cublaslt:
    """The library that torch itself has loaded, one handle and one workspace."""

    def __init__(self):
        torch = timing.cuda_torch()
        loaded = {
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt" in line
        }
        try:
            self.library = ctypes.CDLL(min(loaded) if loaded else "libcublasLt.so.13")
        except OSError as error:
            raise timing.Unusable(f"libcublasLt cannot be loaded: {error}") from error
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def call(self, name, *arguments):
        if status := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name}: status {status}")

    def created(self, kind, *arguments):
        handle = ctypes.c_void_p()
        self.call(f"cublasLt{kind}Create", ctypes.byref(handle), *arguments)
        return handle

    def set(self, kind, handle, attribute, value):
        self.call(f"cublasLt{kind}SetAttribute", handle, attribute, ctypes.byref(value), ctypes.sizeof(value))


@functools.cache
def _cublaslt():
    return _Cublaslt()


class _CublasltProduct:
    """One problem with the algorithms that the heuristic offers for it. cuBLASLt is column-major: it computes C^T = B^T A^T,
    so that its first operand is B and its second A."""

    def __init__(self, problem, in_dtype, out_dtype):
        lt = self.lt = _cublaslt()
        self.handles = []
        m, n, k = problem.m, problem.n, problem.k
        a_row_major, b_row_major = (order == "n" for order in problem.order)
        self.description = self.own("MatmulDesc", _COMPUTE_32F, _CUDA_TYPE["float32"])
        lt.set("MatmulDesc", self.description, _DESC_TRANSA, ctypes.c_int32(not b_row_major))
        lt.set("MatmulDesc", self.description, _DESC_TRANSB, ctypes.c_int32(not a_row_major))
        self.b = self.layout(problem, in_dtype, *((n, k) if b_row_major else (k, n)))
        self.a = self.layout(problem, in_dtype, *((k, m) if a_row_major else (m, k)))
        self.c = self.layout(problem, out_dtype, n, m)
        preference = self.own("MatmulPreference")
        lt.set("MatmulPreference", preference, _PREFERENCE_WORKSPACE, ctypes.c_size_t(_WORKSPACE_BYTES))
        offers, count = (_Heuristic * _OFFERS)(), ctypes.c_int()
        lt.call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(lt.handle, self.description, self.b, self.a, self.c, self.c, preference),
            *(_OFFERS, offers, ctypes.byref(count)),
        )
        self.offers = [offer for offer in offers[: count.value] if offer.status == 0]
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)

    def own(self, kind, *arguments):
        handle = self.lt.created(kind, *arguments)
        self.handles.append((kind, handle))
        return handle

    def layout(self, problem, dtype, rows, cols):
        """A dense column-major matrix, or a batch of them in a row."""
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(rows)
        handle = self.own("MatrixLayout", _CUDA_TYPE[dtype], *sizes)
        if problem.batch > 1:
            self.lt.set("MatrixLayout", handle, _LAYOUT_BATCH_COUNT, ctypes.c_int32(problem.batch))
            self.lt.set("MatrixLayout", handle, _LAYOUT_BATCH_STRIDE, ctypes.c_int64(rows * cols))
        return handle

    def __del__(self):
        for kind, handle in self.handles:
            getattr(self.lt.library, f"cublasLt{kind}Destroy")(handle)

    def function(self, index):
        torch = timing.cuda_torch()
        lt, algorithm = self.lt, self.offers[index].algorithm

        def multiply(a, b, c):
            out = ctypes.c_void_p(c.data_ptr())
            lt.call(
                "cublasLtMatmul",
                *(lt.handle, self.description, ctypes.byref(self.one)),
                *(ctypes.c_void_p(b.data_ptr()), self.b, ctypes.c_void_p(a.data_ptr()), self.a),
                *(ctypes.byref(self.zero), out, self.c, out, self.c, ctypes.byref(algorithm)),
                *(ctypes.c_void_p(lt.workspace.data_ptr()), ctypes.c_size_t(_WORKSPACE_BYTES)),
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            )

        return multiply


def _dtype_name(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def cublaslt_function(problem, sets):
    """The fastest of the first offers, by a short measurement."""
    lt_product = _CublasltProduct(problem, _dtype_name(sets[0][0]), _dtype_name(sets[0][2]))
    functions = {index: lt_product.function(index) for index in range(min(_TRIED, len(lt_product.offers)))}
    if not functions:
        raise RuntimeError("cuBLASLt's heuristic offers no algorithm")
    if len(functions) == 1:
        return functions[0]
    times, failed = timing.time_together(functions, sets, rounds=3, target_ms=2.0)
    if not times:
        raise RuntimeError(f"none of cuBLASLt's algorithms runs: {failed[0]}")
    return functions[min(times, key=lambda index: times[index]["us"])]


# ---- CuPy ----------------------------------------------------------------------------------------------------------


@functools.cache
def _cupy():
    try:
        import cupy
    except ImportError as error:
        raise timing.Unusable(f"CuPy is not installed: {error}") from error
    return cupy


def cupy_function(sets):
    """On torch's memory and stream."""
    cupy, torch = _cupy(), timing.cuda_torch()
    if _dtype_name(sets[0][0]) == "bfloat16":
        raise RuntimeError("cupy.matmul has no bfloat16")
    views = {id(tensor): cupy.from_dlpack(tensor) for operands in sets for tensor in operands}

    def multiply(a, b, c):
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            cupy.matmul(views[id(a)], views[id(b)], out=views[id(c)])

    return multiply


# ---- Triton --------------------------------------------------------------------------------------------------------


def _triton_gemm():
    try:
        import triton_gemm
    except ImportError as error:
        raise timing.Unusable(f"Triton is not installed: {error}") from error
    return triton_gemm


def triton_function(problem):
    if problem.batch > 1:
        raise RuntimeError("the Triton peer takes no batch")
    return _triton_gemm().matmul


# ---- the list ------------------------------------------------------------------------------------------------------

# Name -> (what raises Unusable where the peer is not there, builder of its function).
PEERS = {
    "torch": (timing.cuda_torch, lambda problem, sets: torch_function(problem)),
    "cublaslt": (_cublaslt, cublaslt_function),
    "cupy": (_cupy, lambda problem, sets: cupy_function(sets)),
    "triton": (_triton_gemm, lambda problem, sets: triton_function(problem)),
    "invariant": (timing.product, lambda problem, sets: tcgemm_function(batch_invariant=True)),
}


def parse_peers(text):
    """Names from `torch,cublaslt`, in the list's order; `` and `none` name none; ValueError for others."""
    names = [name for name in text.split(",") if name not in ("", "none")]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peer: expected one of {', '.join(PEERS)}, none, got {name!r}")
    return [name for name in PEERS if name in names]


def available(names):
    """(the builders of those that are there, name -> why the others are not)."""
    found, missing = {}, {}
    for name in names:
        probe, build = PEERS[name]
        try:
            probe()
        except timing.Unusable as error:
            missing[name] = str(error)
        else:
            found[name] = build
    return found, missing
