"""Two devices: tensors on one while the other is current, attributes and kernels set for each, nothing mixed."""

import pytest
import reference as ref
from conftest import refused
from test_gpu_process import current_context

import tcgemm

pytestmark = pytest.mark.gpus2
torch = pytest.importorskip("torch")


def pair(device, dtype="float16", m=130, n=70, k=200):
    return ref.torch_integers((m, k), dtype, device), ref.torch_integers((k, n), dtype, device)


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("current, device", [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_tensors_on_one_while_the_other_is_current(current, device, dtype):
    """flashinfer#349. Plain, split and copied operands; with out= and a stream of that device."""
    with torch.cuda.device(current):
        torch.zeros(1, device=f"cuda:{current}")
        for m, n, k in ((130, 70, 200), (16, 64, 65536), (512, 512, 512)):
            a, b = pair(f"cuda:{device}", dtype, m, n, k)
            odd = torch.zeros(m, k, 2, dtype=a.dtype, device=a.device)[..., 0].copy_(a)
            out = torch.full((m, n), float("nan"), dtype=a.dtype, device=a.device)
            wrong = a.new_empty(k + 1, n)
            for left in (a, odd):
                before = current_context()
                result = tcgemm.matmul(left, b)
                tcgemm.matmul(left, b, out=out)
                with pytest.raises(ValueError):
                    tcgemm.matmul(left, wrong)
                assert torch.cuda.current_device() == current and current_context() == before
                assert result.device.index == device
                ref.torch_check(result, a, b)
                ref.torch_check(out, a, b)
                side = torch.cuda.Stream(device)
                side.wait_stream(torch.cuda.current_stream(device))
                result = tcgemm.matmul(left, b, stream=side)
                side.synchronize()
                ref.torch_check(result, a, b)


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
def test_large_shared_memory_on_each(run_python, order):
    """The attribute belongs to a device, not to the process (bitsandbytes PR#1952)."""
    run_python(f"""
        import torch, tcgemm, reference as ref
        for device in {order}:
            for dtype in ref.DTYPES:
                a, b = (ref.torch_integers((2048, 2048), dtype, f"cuda:{{device}}") for _ in range(2))
                ref.torch_check(tcgemm.matmul(a, b), a, b)
    """)


def test_mixed_devices():
    a, b = pair("cuda:0")
    c, d = pair("cuda:1")
    out = torch.zeros(130, 70, dtype=torch.float16, device="cuda:1")
    for call in (lambda: tcgemm.matmul(a, d), lambda: tcgemm.matmul(c, b), lambda: tcgemm.matmul(a, b, out=out)):
        refused(ValueError, "cuda:0", "cuda:1", call=call)
    assert torch.cuda.current_device() == 0
    ref.torch_check(tcgemm.matmul(a, b), a, b)
    ref.torch_check(tcgemm.matmul(c, d), c, d)


def test_streams_of_the_second_device():
    a, b = pair("cuda:1")
    new = ref.torch_integers(a.shape, "float16", "cuda:1")
    with torch.cuda.device(1):
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            a.copy_(new)
        with torch.cuda.stream(side), torch.cuda.device(0):
            result = tcgemm.matmul(a, b)
        side.synchronize()
    ref.torch_check(result, new, b)


def test_capture_on_the_second_device(run_python):
    run_python("""
        import torch, tcgemm, reference as ref
        with torch.cuda.device(1):
            a, b = (ref.torch_integers(s, "float16", "cuda:1") for s in ((130, 8192), (8192, 70)))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = tcgemm.matmul(a, b)
            a.copy_(ref.torch_integers(a.shape, "float16", "cuda:1"))
            graph.replay()
            ref.torch_check(result, a, b)
    """)


def test_threads_on_both():
    from test_threads import in_threads

    cases = [pair(f"cuda:{i % 2}", "bfloat16", 60 + i, 50, 64) for i in range(8)]
    for i in range(2):
        torch.cuda.synchronize(i)
    wrong = [None] * 8

    def work(i):
        a, b = cases[i]
        expected = ref.torch_exact(a, b, "bfloat16")
        wrong[i] = sum((tcgemm.matmul(a, b) != expected).sum() for _ in range(200))

    in_threads(8, work)
    assert [int(w) for w in wrong] == [0] * 8


def test_capsules_on_the_second_device():
    import producers as prod

    a, b = pair("cuda:1")
    torch.cuda.synchronize(1)
    exports = [
        prod.Export(x.data_ptr(), "float16", x.shape, x.stride(), device=(prod.CUDA, 1), keep=x) for x in (a, b)
    ]
    result = tcgemm.matmul(*(x.capsule() for x in exports))
    assert tuple(result.__dlpack_device__()) == (prod.CUDA, 1)
    with torch.cuda.device(1):
        ref.torch_check(torch.from_dlpack(result), a, b)
    interfaces = [prod.cai(x.data_ptr(), "float16", x.shape, x.stride(), keep=x) for x in (a, b)]
    result = tcgemm.matmul(*interfaces)
    assert tuple(result.__dlpack_device__()) == (prod.CUDA, 1)
