"""What a user sees: signatures, docstrings, the message of every bad input, kernels(), explain(), devices(), and an import
that touches nothing."""

import inspect
import json
import re
import types
from pathlib import Path

import numpy as np
import pytest
import reference as ref
from conftest import refused

import tcgemm

ROOT = Path(__file__).parent.parent
KEYWORDS = "*, out=None, out_dtype=None, stream=None, kernel=None, batch_invariant=None"
NO_DRIVER = {"TCGEMM_LIBCUDA": "/nonexistent/libcuda.so.1"}


def f16(*shape):
    return np.ones(shape, np.float16)


def f32(*shape):
    return np.ones(shape, np.float32)


# ---- surface -----------------------------------------------------------------------------------------------------------


def test_names():
    assert {"matmul", "explain", "kernels", "devices", "Array", "CudaError", "__version__"} <= set(dir(tcgemm))
    assert set(tcgemm.__all__) <= set(dir(tcgemm))
    assert issubclass(tcgemm.CudaError, RuntimeError) and tcgemm.CudaError.__module__ == "tcgemm"
    assert tcgemm.Array.__module__ == "tcgemm"
    assert isinstance(tcgemm.matmul, types.BuiltinFunctionType)


def test_version():
    from importlib.metadata import version

    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", tcgemm.__version__)
    assert tcgemm.__version__ == version("tcgemm")


@pytest.mark.parametrize("function", ["matmul", "explain"])
def test_signatures(function):
    assert str(inspect.signature(getattr(tcgemm, function))) == f"(a, b, /, {KEYWORDS})"


def test_docstrings():
    for name in tcgemm.__all__:
        assert inspect.getdoc(getattr(tcgemm, name)), name
    text = inspect.getdoc(tcgemm.matmul)
    for word in (
        "out",
        "out_dtype",
        "stream",
        "kernel",
        "batch_invariant",
        "float16",
        "bfloat16",
        "float32",
        "TypeError",
        "ValueError",
        "CudaError",
    ):
        assert word in text, word


def test_stub_matches_the_module():
    stub = (Path(tcgemm.__file__).parent / "_core.pyi").read_text()
    assert (Path(tcgemm.__file__).parent / "py.typed").exists()
    for name in ("matmul", "explain", "kernels", "devices", "Array", "CudaError"):
        assert re.search(rf"\b(def|class) {name}\b", stub), name
    for keyword in re.findall(r"(\w+)=None", KEYWORDS):
        assert re.search(rf"\b{keyword}\b", stub), keyword


def test_arguments():
    x = f32(2, 2)
    for call in (
        lambda: tcgemm.matmul(),
        lambda: tcgemm.matmul(x),
        lambda: tcgemm.matmul(x, x, x),
        lambda: tcgemm.matmul(x, b=x),
        lambda: tcgemm.matmul(a=x, b=x),
        lambda: tcgemm.matmul(x, x, outt=x),
        lambda: tcgemm.matmul(x, x, out=None, output=None),
    ):
        refused(TypeError, "matmul", call=call)
    assert (tcgemm.matmul(x, x, out=None, out_dtype=None, stream=None, kernel=None, batch_invariant=None) == 2).all()


# ---- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b",
    [
        ((10, 15), (14, 32)),
        ((10, 15), (16, 32)),
        ((5, 3, 1), (3, 1, 4)),
        ((15,), (14, 3)),
        ((10, 15), (14,)),
        ((3,), (4,)),
        ((2, 3, 4), (3, 4, 5)),
        ((2, 3, 4), (2, 5, 6)),
        ((0, 3), (4, 0)),
    ],
)
def test_shapes_that_do_not_match(a, b):
    error = refused(ValueError, a, b, call=lambda: tcgemm.matmul(f16(*a), f16(*b)))
    if len(a) == len(b) == 2:
        assert f"b: expected K={a[1]}, got {b[0]}" in str(error)


def test_transposed_operand_that_does_not_match():
    refused(ValueError, (15, 10), (14, 32), call=lambda: tcgemm.matmul(f16(10, 15).T, f16(14, 32)))


@pytest.mark.parametrize("a, b", [((), (3,)), ((3,), ()), ((), ())])
def test_ranks(a, b):
    refused(ValueError, "0-d", call=lambda: tcgemm.matmul(np.array(f16(*a)), np.array(f16(*b))))


@pytest.mark.parametrize(
    "a, b", [("float16", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32"), ("float32", "bfloat16")]
)
def test_dtypes_that_differ(torch, a, b):
    x, y = (torch.ones(16, 16, dtype=getattr(torch, d)) for d in (a, b))
    refused(TypeError, a, b, call=lambda: tcgemm.matmul(x, y))


@pytest.mark.parametrize(
    "bad",
    [
        None,
        3,
        2.5,
        1j,
        "x",
        b"x",
        [[1.0]],
        (1, 2),
        {},
        object(),
        int,
        lambda: 0,
        type("Array", (), {"dtype": np.float16, "shape": (1, 1)})(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_operands_that_are_no_arrays(bad):
    name = type(bad).__name__
    refused(TypeError, "a", name, call=lambda: tcgemm.matmul(bad, f16(2, 2)))
    refused(TypeError, "b", name, call=lambda: tcgemm.matmul(f16(2, 2), bad))
    if bad is not None:
        refused(TypeError, "out", name, call=lambda: tcgemm.matmul(f16(2, 2), f16(2, 2), out=bad))


def test_out_that_does_not_fit():
    x, y = f16(2, 3), f16(3, 4)
    for shape in ((2, 5), (4, 2), (8,), (1, 2, 4), (), (0, 4)):
        refused(ValueError, "out", (2, 4), shape, call=lambda: tcgemm.matmul(x, y, out=np.empty(shape, np.float16)))
    for dtype in (np.float64, np.int16, np.float32):
        refused(
            TypeError,
            "out",
            np.dtype(dtype).name,
            "float16",
            call=lambda: tcgemm.matmul(x, y, out=np.empty((2, 4), dtype)),
        )
    refused(
        TypeError,
        "out",
        "float16",
        "float32",
        call=lambda: tcgemm.matmul(x, y, out=np.empty((2, 4), np.float16), out_dtype="float32"),
    )
    refused(
        ValueError,
        "out",
        "share",
        call=lambda: tcgemm.matmul(
            x, y, out=np.lib.stride_tricks.as_strided(np.empty(4, np.float16), (2, 4), (0, 2))
        ),
    )
    square = f16(4, 4)
    refused(ValueError, "out", "a", call=lambda: tcgemm.matmul(square, f16(4, 4), out=square))
    refused(ValueError, "out", "b", call=lambda: tcgemm.matmul(f16(4, 4), square, out=square.T))
    read_only = np.empty((2, 4), np.float16)
    read_only.flags.writeable = False
    refused(ValueError, "out", "read-only", call=lambda: tcgemm.matmul(x, y, out=read_only))


def test_out_dtypes():
    x = f16(2, 2)
    for bad in ("float64", np.float64, "bfloat16", "int8", np.int8, "fp16", ""):
        refused((TypeError, ValueError), "out_dtype", call=lambda: tcgemm.matmul(x, x, out_dtype=bad))
    for bad in (3, object(), [np.float16]):
        refused(TypeError, "out_dtype", call=lambda: tcgemm.matmul(x, x, out_dtype=bad))
    refused(
        (TypeError, ValueError), "out_dtype", call=lambda: tcgemm.matmul(f32(2, 2), f32(2, 2), out_dtype="float16")
    )


def test_kernel_names():
    x = f16(2, 2)
    refused(ValueError, "kernel", "no_such", call=lambda: tcgemm.matmul(x, x, kernel="no_such"))
    refused(TypeError, "kernel", call=lambda: tcgemm.matmul(x, x, kernel=3))
    # A kernel cannot run on host arrays, whatever its family.
    refused((ValueError, RuntimeError), "kernel", "host", call=lambda: tcgemm.matmul(x, x, kernel="mma"))


def test_streams():
    x = f16(2, 2)
    for bad in (object(), "x", 1.5, [1]):
        refused(TypeError, "stream", call=lambda: tcgemm.matmul(x, x, stream=bad))


def test_batch_invariance_on_the_host(run_python):
    x = f16(2, 2)
    refused(ValueError, "batch_invariant", "host", call=lambda: tcgemm.matmul(x, x, batch_invariant=True))
    assert (tcgemm.matmul(x, x, batch_invariant=False) == 2).all()
    refused(TypeError, "batch_invariant", call=lambda: tcgemm.matmul(x, x, batch_invariant="yes"))


def test_batch_invariance_by_the_environment(run_python):
    """The environment asks for what the device path can promise; host arrays are not refused for it."""
    for value in ("1", "0", ""):
        run_python(
            """
            import numpy as np, tcgemm
            x = np.ones((2, 2), np.float32)
            try:
                assert (tcgemm.matmul(x, x) == 2).all()
            except ValueError as error:
                assert "batch_invariant" in str(error)
            assert (tcgemm.matmul(x, x, batch_invariant=False) == 2).all()
        """,
            env={**NO_DRIVER, "TCGEMM_BATCH_INVARIANT": value},
        )


def test_explain_refuses_what_matmul_refuses():
    refused(ValueError, (2, 3), (4, 5), call=lambda: tcgemm.explain(f16(2, 3), f16(4, 5)))
    refused(TypeError, "a", call=lambda: tcgemm.explain(None, f16(4, 5)))


def test_explain_of_host_arrays():
    plan = tcgemm.explain(f16(2, 3), f16(3, 5))
    assert "host" in str(plan)
    assert plan["family"] == "host"


# ---- what there is -------------------------------------------------------------------------------------------------------


def test_kernels():
    rows = tcgemm.kernels()
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names) > 0
    for row in rows:
        assert {"name", "family", "arch", "in_dtype", "out_dtype", "order", "tile", "stages"} <= set(row)
        assert row["name"].startswith(f"tcg_{row['family']}_"), row
        assert row["in_dtype"] in ref.DTYPES
        m, n, k = row["tile"]
        assert f"_{m}x{n}x{k}" in row["name"]
    json.dumps([dict(row) for row in rows])
    assert {row["family"] for row in rows} >= {"simt", "mma"}


def test_kernels_are_the_rows_of_the_table():
    table = (ROOT / "kernels" / "table.def").read_text()
    rows = re.findall(r"^TCG_(?!IMAGE)\w+\(", table, re.M)
    assert len(rows) == len(tcgemm.kernels())


def test_kernels_gives_fresh_lists():
    first = tcgemm.kernels()
    first.clear()
    assert tcgemm.kernels()


# ---- without a driver -----------------------------------------------------------------------------------------------------


def test_import_touches_nothing(run_python):
    """No framework, no NumPy's child, no driver library, no device file."""
    run_python("""
        import sys, os
        before = set(sys.modules)
        import tcgemm
        for name in ("torch", "cupy", "jax", "numba"):
            assert name not in sys.modules, name
        maps = open("/proc/self/maps").read()
        assert "libcuda.so" not in maps and "nvidia" not in maps
        assert not [fd for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd) and "nvidia" in os.readlink("/proc/self/fd/" + fd)]
        assert tcgemm.__version__ and tcgemm.kernels()
    """)


def test_without_a_driver(run_python):
    out = run_python(
        """
        import numpy as np, producers as prod, reference as ref, tcgemm
        x = np.ones((4, 4), np.float32)
        assert (tcgemm.matmul(x, x) == 4).all()
        buffer = ref.HostBuffer("float32", ref.packed((4, 4)), np.ones((4, 4)))
        for make in (lambda: prod.export(buffer, device=(prod.CUDA, 0)).capsule(), lambda: prod.export(buffer, device=(prod.CUDA_MANAGED, 0)).capsule(),
                     lambda: prod.cai(buffer.bits.ctypes.data, "float32", (4, 4))):
            for _ in range(2):
                first, second = make(), make()
                try:
                    tcgemm.matmul(first, second)
                except RuntimeError as error:
                    assert "NVIDIA driver" in str(error), error
                else:
                    raise SystemExit("no error")
                first = second = None
                assert not prod._live and not prod.stray
        assert (tcgemm.matmul(x, x) == 4).all()
        try:
            print(len(tcgemm.devices()))
        except RuntimeError as error:
            assert "NVIDIA driver" in str(error), error
            print(0)
    """,
        env=NO_DRIVER,
    )
    assert out == "0\n"


def test_the_module_runs_without_a_device(run_python):
    out = run_python(
        """
        import runpy, sys
        sys.argv = ["tcgemm"]
        try:
            runpy.run_module("tcgemm", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code, end.code
    """,
        env=NO_DRIVER,
    )
    assert "host" in out


def test_mixed_host_and_device(run_python):
    run_python(
        """
        import numpy as np, producers as prod, reference as ref, tcgemm
        x = np.ones((4, 4), np.float32)
        buffer = ref.HostBuffer("float32", ref.packed((4, 4)), np.ones((4, 4)))
        for order in (1, -1):
            export = prod.export(buffer, device=(prod.CUDA, 0))
            pair = [x, export.capsule()][::order]
            try:
                tcgemm.matmul(*pair)
            except ValueError as error:
                assert "cuda:0" in str(error) and ("cpu" in str(error) or "host" in str(error)), error
            pair.clear()
            assert export.deleted == 1
    """,
        env=NO_DRIVER,
    )


def test_array_cannot_be_made_by_hand():
    with pytest.raises(TypeError):
        tcgemm.Array()
    with pytest.raises(TypeError):
        type("Mine", (tcgemm.Array,), {})


def test_subinterpreters_are_refused_or_work(run_python):
    run_python(
        """
        import sys
        try:
            import _xxsubinterpreters as interpreters
        except ImportError:
            import _interpreters as interpreters
        import tcgemm
        other = interpreters.create()
        try:
            interpreters.run_string(other, "import tcgemm; tcgemm.kernels()")
        except Exception as error:
            assert "ImportError" in repr(error) or "ImportError" in str(error), error
        interpreters.destroy(other)
        assert tcgemm.kernels()
    """,
        quiet=False,
    )


def test_the_module_can_be_reloaded(run_python):
    """Two module objects in one process, one of them gone: per-module state."""
    run_python("""
        import gc, sys, numpy as np
        import tcgemm, tcgemm._core
        x = np.ones((2, 2), np.float32)
        old = tcgemm.matmul
        for name in [m for m in sys.modules if m.split(".")[0] == "tcgemm"]:
            del sys.modules[name]
        import tcgemm as again
        assert (again.matmul(x, x) == 2).all() and (old(x, x) == 2).all()
        del old, tcgemm
        gc.collect()
        assert (again.matmul(x, x) == 2).all()
    """)
