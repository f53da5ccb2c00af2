"""Soaks on the device: references, device memory and resident memory over many calls, success and refusal alike."""

import gc
import sys

import numpy as np
import producers as prod
import pytest
import reference as ref
from test_leaks import attempt, resident_bytes

import tcgemm

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


def soak(call, times, arguments=(), warm=2000, every=1000):
    """Memory and references are what they were after `times` calls."""

    def run(count):
        for i in range(count):
            call()
            if i % every == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    run(warm)
    free = torch.cuda.mem_get_info()[0]
    allocated, resident = torch.cuda.memory_allocated(), resident_bytes()
    counts = [sys.getrefcount(x) for x in arguments]
    run(times)
    assert [sys.getrefcount(x) for x in arguments] == counts
    assert torch.cuda.memory_allocated() == allocated
    assert resident_bytes() - resident < 2**22
    assert free - torch.cuda.mem_get_info()[0] < 2**26


def small(*shape, dtype=torch.float16):
    return torch.ones(shape, dtype=dtype, device=ref.DEVICE)


def test_the_soak_sees_a_leak():
    kept = []
    with pytest.raises(AssertionError):
        soak(lambda: kept.append(small(1)), 3000)
    thing = object()
    with pytest.raises(AssertionError):
        soak(lambda: kept.append(thing), 3000, [thing])


def test_calls():
    a, b, out = small(32, 32), small(32, 32), small(32, 32)
    soak(lambda: tcgemm.matmul(a, b), 100_000, [a, b])
    soak(lambda: tcgemm.matmul(a, b, out=out), 100_000, [a, b, out])


def test_workspaces():
    a, b = small(16, 8192), small(8192, 64)
    odd = small(64, 64, 2)[..., 0]
    assert tcgemm.explain(a, b)["splits"] > 1
    soak(lambda: tcgemm.matmul(a, b), 20_000, [a, b])
    soak(lambda: tcgemm.matmul(odd, odd), 20_000, [odd])


@pytest.mark.parametrize(
    "name", ["shape", "dtype", "fp8", "none", "out", "overlap", "stream", "kernel", "grad", "meta"]
)
def test_refusals(name):
    a = small(32, 32)
    others = {
        "shape": small(31, 32),
        "dtype": small(32, 32, dtype=torch.float64),
        "fp8": small(32, 32).to(torch.float8_e4m3fn),
        "none": None,
        "grad": small(32, 32).requires_grad_(),
        "meta": a.to("meta"),
    }
    b, keywords = (
        others.get(name, a),
        {
            "out": {"out": small(31, 32)},
            "overlap": {"out": a},
            "stream": {"stream": object()},
            "kernel": {"kernel": "none such"},
        }.get(name, {}),
    )
    # torch itself takes a millisecond to say what a meta tensor is not.
    times = 2000 if name == "meta" else 100_000
    soak(
        attempt((TypeError, ValueError, RuntimeError), tcgemm.matmul, a, b, **keywords),
        times,
        [a, b],
        warm=times // 50,
    )


@pytest.mark.parametrize("kind", ["torch", "capsule", "versioned", "object", "cai"])
def test_large_operands_are_let_go(kind):
    """Fresh 1000 x 1000 operands, without a garbage collection (pytorch#9261)."""

    def export(x, versioned):
        return prod.Export(
            x.data_ptr(), "float16", x.shape, x.stride(), versioned=versioned, device=(prod.CUDA, 0), keep=x
        )

    make = {
        "torch": lambda x: x,
        "capsule": lambda x: export(x, False).capsule(),
        "versioned": lambda x: export(x, True).capsule(),
        "object": lambda x: prod.DLPackObject(lambda versioned: export(x, versioned), device=(prod.CUDA, 0)),
        "cai": lambda x: prod.cai(x.data_ptr(), "float16", x.shape, x.stride(), keep=x),
    }[kind]
    gc.disable()
    try:
        base = torch.cuda.memory_allocated()
        for i in range(10_000):
            x = small(1000, 1000)
            tcgemm.matmul(make(x), make(x))
            del x
            if i % 100 == 0:
                torch.cuda.synchronize()
                assert torch.cuda.memory_allocated() - base < 500 * 2**20, i
        torch.cuda.synchronize()
        tcgemm.matmul(make(small(2, 2)), make(small(2, 2)))
        torch.cuda.synchronize()
        tcgemm.matmul(make(small(2, 2)), make(small(2, 2)))
        assert torch.cuda.memory_allocated() - base < 2**20
    finally:
        gc.enable()
    assert not prod.stray


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 0)])
def test_empty_capsules_are_let_go(shape):
    b = small(shape[1], 4)

    def call():
        export = prod.Export(None, "float16", shape, device=(prod.CUDA, 0))
        tcgemm.matmul(export.capsule(), b)
        assert export.deleted == 1

    soak(call, 10_000, [b])


@pytest.mark.parametrize("framework", ["cupy", "jax", "numba"])
def test_other_frameworks(framework):
    from test_gpu_frameworks import Cupy, Jax, Numba

    wrapper = {"cupy": Cupy, "jax": Jax, "numba": Numba}[framework]()
    buffer = ref.torch_operand("float16", ref.packed((32, 32)))
    x = wrapper.wrap(buffer)
    soak(lambda: tcgemm.matmul(x, x), 10_000, [x])


def test_threads_that_come_and_go():
    import threading

    a = small(64, 64)

    def call():
        thread = threading.Thread(target=lambda: tcgemm.matmul(a, a))
        thread.start()
        thread.join()

    soak(call, 2_000, [a], warm=200)


def test_captures_that_come_and_go():
    a, b = small(16, 8192), small(8192, 64)

    def call():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = tcgemm.matmul(a, b)
        graph.replay()
        assert np.prod(result.shape) == 1024

    soak(call, 100, [a, b], warm=20, every=1)
