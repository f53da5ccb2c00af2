"""Memory over many calls on the host path, success and refusal alike."""

import gc
import os
import sys

import numpy as np
import producers as prod
import pytest
import reference as ref

import tcgemm

GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
# What an allocator moves by itself: with the GIL, under 27 bytes a call are below it. Free-threaded Python frees later, and
# keeps pages for some ten thousand calls before it reaches its level.
NOISE_BYTES = 2**19 if GIL else 2**21
WARM = 500 if GIL else 20_000


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(call, times, warm=WARM):
    """Bytes of resident memory that `times` calls left behind, after a first `warm` ones."""
    for _ in range(warm):
        call()
    gc.collect()
    before = resident_bytes()
    for _ in range(times):
        call()
    gc.collect()
    return resident_bytes() - before


def attempt(error, function, *args, **kwargs):
    def call():
        try:
            function(*args, **kwargs)
        except error:
            return
        raise AssertionError("not refused")

    return call


def test_growth_shows_a_leak():
    kept = []  # more than the heap has to spare from other tests
    assert growth(lambda: kept.append(bytearray(10000)), 10000) > 5e7


def small(shape, dtype=np.float32):
    return np.ones(shape, dtype)


@pytest.mark.parametrize("name", ["product", "vectors", "batch", "out", "out_dtype", "explain", "kernels"])
def test_success(name):
    x, v, batch, out, half = small((8, 8)), small(8), small((3, 8, 8)), small((8, 8)), small((8, 8), np.float16)
    call = {
        "product": lambda: tcgemm.matmul(x, x),
        "vectors": lambda: tcgemm.matmul(v, v),
        "batch": lambda: tcgemm.matmul(batch, x.T),
        "out": lambda: tcgemm.matmul(x, x, out=out),
        "out_dtype": lambda: tcgemm.matmul(half, half, out_dtype="float32"),
        "explain": lambda: str(tcgemm.explain(x, x)),
        "kernels": lambda: tcgemm.kernels(),
    }[name]
    assert growth(call, 2000 if name == "kernels" else 20000) < NOISE_BYTES


@pytest.mark.parametrize(
    "name", ["shape", "dtype", "mixed", "none", "out", "out_dtype", "kernel", "stream", "keyword", "overlap"]
)
def test_refusals(name):
    x, other, half, double = small((8, 8)), small((7, 8)), small((8, 8), np.float16), small((8, 8), np.float64)
    call = {
        "shape": attempt(ValueError, tcgemm.matmul, x, other),
        "dtype": attempt(TypeError, tcgemm.matmul, x, double),
        "mixed": attempt(TypeError, tcgemm.matmul, x, half),
        "none": attempt(TypeError, tcgemm.matmul, x, None),
        "out": attempt(ValueError, tcgemm.matmul, x, x, out=other),
        "out_dtype": attempt((TypeError, ValueError), tcgemm.matmul, x, x, out_dtype="float64"),
        "kernel": attempt(ValueError, tcgemm.matmul, x, x, kernel="no such kernel"),
        "stream": attempt(TypeError, tcgemm.matmul, x, x, stream=object()),
        "keyword": attempt(TypeError, tcgemm.matmul, x, x, none_such=1),
        "overlap": attempt(ValueError, tcgemm.matmul, x, x, out=x),
    }[name]
    assert growth(call, 20000) < NOISE_BYTES


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (0, 8), (8, 0), (0, 0)])
def test_capsules(versioned, shape):
    """Empty ones too: they are owned, and deleted, like any other."""
    buffer = ref.HostBuffer("float32", ref.packed(shape), np.ones(shape))
    b = small((shape[1], 8))

    def call():
        export = prod.export(buffer, versioned=versioned)
        tcgemm.matmul(export.capsule(), b)
        assert export.deleted == 1

    assert growth(call, 10000) < NOISE_BYTES
    assert not prod._live and not prod.stray


def test_large_results_are_freed():
    x = small((1000, 1000), np.float16)
    assert growth(lambda: tcgemm.matmul(x[:, :8], x[:8]), 100, warm=5) < 2**23


def test_torch_tensors(torch):
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    bad = torch.ones(63, 64, dtype=torch.bfloat16)
    assert growth(lambda: tcgemm.matmul(x, x), 10000) < NOISE_BYTES
    assert growth(attempt(ValueError, tcgemm.matmul, x, bad), 10000) < NOISE_BYTES


def test_python_objects_do_not_pile_up(torch):
    x, t = small((8, 8)), torch.ones(8, 8)
    calls = [
        lambda: tcgemm.matmul(x, x),
        lambda: tcgemm.matmul(t, t),
        attempt(TypeError, tcgemm.matmul, x, None),
        lambda: tcgemm.explain(x, x),
        lambda: tcgemm.matmul(t, x),
    ]

    def run():
        for call in calls:
            for _ in range(200):
                call()
        gc.collect()
        return len(gc.get_objects())

    run()
    before = run()
    assert run() - before < 50
