"""The fake driver library of tests/fakecuda from Python: building it, its controls, and operands in what it takes for
device memory. A process that uses it has TCGEMM_LIBCUDA set to it before tcgemm's first call."""

from __future__ import annotations

import ctypes as ct
import os
import subprocess
import weakref
from pathlib import Path

import numpy as np
import producers as prod
import reference as ref

SOURCE = Path(__file__).parent / "fakecuda" / "fakecuda.c"


def build(folder):
    """Compiles the library into the folder and gives its path."""
    library = Path(folder) / "libcuda_fake.so"
    compiler = os.environ.get("CC", "cc").split()
    # -Bsymbolic: its own cuInit even where the real driver is loaded.
    flags = ["-std=c11", "-O1", "-g", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", "-Wl,-Bsymbolic"]
    subprocess.run([*compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


class Launch(ct.Structure):
    """fake_launch_record."""

    _fields_ = [
        ("kernel", ct.c_char * 128),
        ("grid", ct.c_uint32 * 3),
        ("block", ct.c_uint32 * 3),
        ("smem_bytes", ct.c_uint32),
        ("attributes", ct.c_uint32),
        ("device", ct.c_int32),
        ("primary", ct.c_int32),
        ("stream", ct.c_uint64),
        ("parameter_bytes", ct.c_uint64),
        ("parameters", ct.c_ubyte * 2048),
    ]

    @property
    def name(self):
        return self.kernel.decode()


class Device(ct.Structure):
    """fake_device."""

    _fields_ = [
        ("name", ct.c_char * 64),
        ("cc", ct.c_int32),
        ("sm_count", ct.c_int32),
        ("smem_block_bytes", ct.c_int32),
        ("smem_sm_bytes", ct.c_int32),
        ("l2_bytes", ct.c_int32),
    ]


_library = None


def library():
    """The library that this process's tcgemm opens."""
    global _library
    if _library is None:
        _library = ct.CDLL(os.environ["TCGEMM_LIBCUDA"])
        signatures = {
            "fake_call_count": (ct.c_int64,),
            "fake_call": (ct.c_char_p, ct.c_int64),
            "fake_launch_count": (ct.c_int64,),
            "fake_launch": (ct.c_int, ct.c_int64, ct.POINTER(Launch)),
            "fake_fail": (None, ct.c_char_p, ct.c_long, ct.c_int),
            "fake_hide": (None, ct.c_char_p),
            "fake_set_device": (None, ct.c_int, ct.POINTER(Device)),
            "fake_set_pointer_device": (None, ct.c_void_p, ct.c_int64, ct.c_int),
            "fake_set_memory": (None, ct.c_int64),
            "fake_set_capturing": (None, ct.c_uint64, ct.c_int),
            "fake_set_busy": (None, ct.c_uint64, ct.c_int),
            "fake_set_dead": (None, ct.c_uint64, ct.c_int),
            "fake_live_blocks": (ct.c_int64,),
            "fake_live_bytes": (ct.c_int64,),
            "fake_live_events": (ct.c_int64,),
            "fake_broken_captures": (ct.c_int64,),
            "fake_context": (ct.c_void_p, ct.c_int),
            "fake_primary": (ct.c_void_p, ct.c_int),
            "fake_current": (ct.c_void_p,),
            "fake_push": (None, ct.c_void_p),
        }
        for name, (result, *arguments) in signatures.items():
            function = getattr(_library, name)
            function.restype, function.argtypes = result, arguments
    return _library


def calls(symbol=""):
    """What was called since the last reset: each a line 'symbol argument=value ... ctx=0'."""
    lines = [library().fake_call(i).decode() for i in range(library().fake_call_count())]
    return [line for line in lines if line.split()[0] == symbol or not symbol]


def symbols():
    return [line.split()[0] for line in calls()]


def launches():
    records = []
    for i in range(library().fake_launch_count()):
        record = Launch()
        assert library().fake_launch(i, ct.byref(record)) == 0
        records.append(record)
    return records


def reset(execute=True):
    library().fake_reset()
    library().fake_set_execute(execute)


def device(ordinal, cc, smem_block_bytes=99 << 10, sm_count=80, name="Fake"):
    properties = Device(name.encode(), cc, sm_count, smem_block_bytes, smem_block_bytes + 1024, 40 << 20)
    library().fake_set_device(ordinal, ct.byref(properties))


def runs(row, cc):
    """Whether the build holds code of a kernels() row for that compute capability: "90a" that chip alone, "80" its major
    version from that minor on, "80+ptx" every later one."""
    for arch in row["arch"].split():
        number = int(arch.rstrip("a").removesuffix("+ptx"))
        if arch.endswith("a"):
            found = cc == number
        elif arch.endswith("+ptx"):
            found = cc >= number
        else:
            found = cc // 10 == number // 10 and cc >= number
        if found:
            return True
    return False


def wgmma_row(order, block_m, block_n, cluster=(1, 1, 1)):
    """The name of the table's first bfloat16 row of that tile."""
    import tcgemm

    return next(
        row["name"]
        for row in tcgemm.kernels()
        if (row["family"], row["in_dtype"], row["order"]) == ("wgmma", "bfloat16", order)
        and (row["tile"][:2], row["cluster"]) == ((block_m, block_n), cluster)
    )


def fail(symbol, result=719, nth=1):
    library().fake_fail(symbol.encode(), nth, result)


class Operand(ref.HostBuffer):
    """A host buffer that the fake driver takes for memory of a device."""

    def __init__(self, dtype, where, values=None, device=0):
        super().__init__(dtype, where, values)
        self.device = device
        self.declare()
        weakref.finalize(self, library().fake_set_pointer_device, self.bits.ctypes.data, self.bits.nbytes, -1)

    def declare(self):
        """Needed again after a reset."""
        library().fake_set_pointer_device(self.bits.ctypes.data, self.bits.nbytes, self.device)

    @property
    def pointer(self):
        return self.bits.ctypes.data + self.where.offset * self.bits.itemsize

    def export(self, **fields):
        return prod.export(self, **{"device": (prod.CUDA, self.device), **fields})

    def capsule(self, **fields):
        return self.export(**fields).capsule()

    def interface(self, **entries):
        return prod.cai(self.pointer, self.dtype, self.where.shape, self.where.strides, keep=self, **entries)

    def object(self, kind="versioned"):
        return prod.DLPackObject(lambda versioned: self.export(versioned=versioned), kind, (prod.CUDA, self.device))

    def exchanged(self, kind):
        return kind(lambda versioned: self.export(versioned=versioned))


def operand(rng, dtype, where, device=0):
    return Operand(dtype, where, ref.integers(rng, where.shape), device)


def pair(rng, dtype="float16", m=33, n=17, k=40, device=0):
    return operand(rng, dtype, ref.packed((m, k)), device), operand(rng, dtype, ref.packed((k, n)), device)


def array_of(result):
    """A tcgemm.Array's elements, as (bits, dtype name)."""
    interface = result.__cuda_array_interface__
    itemsize = int(interface["typestr"][2:])
    count = int(np.prod(interface["shape"], dtype=np.int64))
    raw = (ct.c_char * (count * itemsize)).from_address(interface["data"][0]) if count else b""
    kind = {2: np.uint16, 4: np.uint32}[itemsize]
    return np.frombuffer(raw, kind).reshape(interface["shape"]).copy(), str(result.dtype)


def check(result, a, b, out_dtype=None):
    """The result (an Array, or an Operand given as out=) is the exact product of two Operands."""
    out_dtype = out_dtype or a.dtype
    if isinstance(result, Operand):
        bits, dtype = result.bits[result.where.indices()], result.dtype
        assert not len(result.spoiled()), "written outside of out"
    else:
        bits, dtype = array_of(result)
    assert dtype == out_dtype
    expected = np.matmul(a.values(), b.values())
    assert bits.shape == expected.shape, (bits.shape, expected.shape)
    wrong = ref.from_bits(bits, dtype) != ref.from_bits(ref.to_bits(expected, dtype), dtype)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} elements wrong: {a.where} @ {b.where}"


def in_child(work):
    """Runs work() in a forked child, where the driver has not been touched if the parent has not; raises what it said."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            work()
            code = 0
        except BaseException:
            import traceback

            os.write(writer, traceback.format_exc().encode()[-60000:])
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"exit code {status}\n{said}"
