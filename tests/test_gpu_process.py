"""The process around a call: threads with no context or a foreign one, fork, interpreter exit, memory that runs out, and
operands in the wrong place."""

import ctypes as ct
import gc
import random
import threading

import numpy as np
import producers as prod
import pytest
import reference as ref
from conftest import refused
from test_threads import in_threads

import tcgemm

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


def current_context():
    context = ct.c_void_p()
    assert ct.CDLL("libcuda.so.1").cuCtxGetCurrent(ct.byref(context)) == 0
    return context.value


def pair(dtype="float16", m=130, n=70, k=200):
    return ref.torch_integers((m, k), dtype), ref.torch_integers((k, n), dtype)


# ---- threads and contexts --------------------------------------------------------------------------------------------------


def test_thread_without_a_context():
    """A launch needs one, and a new thread has none (triton#3729)."""
    a, b = pair()
    out = torch.empty(130, 70, dtype=torch.float16, device=ref.DEVICE)
    torch.cuda.synchronize()
    contexts = []

    def work(_):
        contexts.append(current_context())
        tcgemm.matmul(a, b, out=out)
        contexts.append(current_context())

    in_threads(1, work)
    assert contexts == [None, None]
    ref.torch_check(out, a, b)


def test_thread_without_a_context_and_no_torch_call(run_python):
    """The very first call of the process, in a thread."""
    run_python("""
        import torch, tcgemm, reference as ref
        from test_threads import in_threads
        for dtype in ref.DTYPES:
            a, b = ref.torch_integers((130, 4096), dtype), ref.torch_integers((4096, 70), dtype)
            results = []
            in_threads(1, lambda i: results.append(tcgemm.matmul(a, b)))
            ref.torch_check(results[0], a, b)
    """)


@pytest.mark.parametrize("flags", [0, 4])
def test_foreign_context(flags):
    """A second context on the same device, current during the call and after it."""
    cuda = ct.CDLL("libcuda.so.1")
    a, b = pair()
    out = torch.empty(130, 70, dtype=torch.float16, device=ref.DEVICE)
    expected = ref.torch_exact(a, b, "float16")
    torch.cuda.synchronize()
    context = ct.c_void_p()
    assert cuda.cuCtxCreate_v2(ct.byref(context), flags, 0) == 0
    try:
        assert current_context() == context.value
        tcgemm.matmul(a, b, out=out)
        assert current_context() == context.value
        with pytest.raises(ValueError):
            tcgemm.matmul(a, a)
        assert current_context() == context.value
    finally:
        popped = ct.c_void_p()
        assert cuda.cuCtxPopCurrent_v2(ct.byref(popped)) == 0 and popped.value == context.value
        assert cuda.cuCtxDestroy_v2(context) == 0
    assert torch.equal(out, expected)


@pytest.mark.parametrize("repeat", range(2))
def test_first_calls_together(run_python, repeat):
    """16 threads' first calls, of several dtypes and shapes: no half-loaded state (numba#7387)."""
    run_python("""
        import torch, tcgemm, reference as ref
        from test_threads import in_threads
        cases = []
        for i in range(16):
            dtype = ref.DTYPES[i % 3]
            cases.append((ref.torch_integers((10 + 30 * i, 200 + i), dtype), ref.torch_integers((200 + i, 64 + 7 * i), dtype)))
        torch.cuda.synchronize()
        results = [None] * 16
        def work(i):
            results[i] = tcgemm.matmul(*cases[i])
        in_threads(16, work)
        for (a, b), result in zip(cases, results):
            ref.torch_check(result, a, b)
    """)


def test_threads_on_streams_of_their_own():
    cases = [pair("bfloat16", 60 + 10 * i, 50, 64) for i in range(8)]
    torch.cuda.synchronize()
    wrong = [None] * 8

    def work(i):
        a, b = cases[i]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            expected = ref.torch_exact(a, b, "bfloat16")
            wrong[i] = sum((tcgemm.matmul(a, b) != expected).sum() for _ in range(200))
            stream.synchronize()

    in_threads(8, work)
    assert [int(w) for w in wrong] == [0] * 8


def test_from_the_autograd_thread():
    """A backward runs in a thread of torch's, which has another idea of what is current."""
    a, b = pair("float32", 40, 50, 60)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return tcgemm.matmul(x, y)

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return tcgemm.matmul(grad, y.t()), tcgemm.matmul(x.t(), grad)

    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    grad = ref.torch_integers((40, 50), "float32")
    Product.apply(x, y).backward(grad)
    assert torch.equal(x.grad.double(), grad.double() @ b.double().t())
    assert torch.equal(y.grad.double(), a.double().t() @ grad.double())


def test_heap_noise(rng):
    """Descriptors want alignment that a heap gives by luck (triton PR#2734)."""
    random_bytes = random.Random(1)
    cases = [ref.torch_pair(rng, "float16", *ref.random_shapes(rng, 64)) for _ in range(50)]
    expected = [ref.torch_exact(a.tensor, b.tensor, "float16") for a, b in cases]
    kept = [b""] * 100
    wrong = torch.zeros((), dtype=torch.int64, device=ref.DEVICE)
    for i in range(20000):
        kept[i % 100] = bytes(random_bytes.randrange(1, 2000))
        a, b = cases[i % 50]
        result = tcgemm.matmul(a.tensor, b.tensor)
        if i % 20 == 0:
            wrong += (result != expected[i % 50]).sum()
    assert int(wrong) == 0


# ---- fork and exit -----------------------------------------------------------------------------------------------------------


def test_fork_after_import(run_python):
    """Importing makes no context, so a child is as good as its parent (xformers#1030)."""
    out = run_python(
        """
        import os, torch, tcgemm
        child = os.fork()
        if child == 0:
            import reference as ref
            a, b = ref.torch_integers((130, 64), "float16"), ref.torch_integers((64, 70), "float16")
            ref.torch_check(tcgemm.matmul(a, b), a, b)
            print("child", flush=True)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """,
        timeout=60,
    )
    assert out == "child\n"


def test_fork_after_a_call(run_python):
    """CUDA does not survive a fork: the child is told, at once, and the parent goes on."""
    run_python(
        """
        import os, time, torch, tcgemm, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
        a = torch.ones(64, 64, dtype=torch.float16, device="cuda")
        out = tcgemm.matmul(a, a)
        torch.cuda.synchronize()
        child = os.fork()
        if child == 0:
            code, start = 3, time.monotonic()
            try:
                tcgemm.matmul(a, a, out=out)
            except RuntimeError as error:
                code = 0 if "fork" in str(error) and time.monotonic() - start < 5 else 4
            except BaseException:
                code = 5
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        out.zero_()
        assert int((tcgemm.matmul(a, a, out=out) != 64).sum()) == 0
    """,
        timeout=60,
    )


EXITS = {
    "globals": "kept = [tcgemm.matmul(a, a), tcgemm.matmul(cai(a), cai(a))]",
    "a capsule of the result": "kept = tcgemm.matmul(cai(a), cai(a)).__dlpack__()",
    "a tensor over the result": "kept = torch.from_dlpack(tcgemm.matmul(cai(a), cai(a)))",
    "a cycle": "kept = [tcgemm.matmul(cai(a), cai(a))]; kept.append(kept); tcgemm.kept = kept",
    "work in flight": "torch.cuda._sleep(10**9); kept = tcgemm.matmul(cai(a), cai(a))",
    # Before Python 3.14 a thread that asks for the lock while the interpreter ends is ended by pthread_exit, which torch's
    # bindings do not survive (C++ that must not be unwound: "terminate called"); so this one's operands are not torch's.
    "a thread in a call": """
import sys, threading
b = cai(a)
def loop():
    while True:
        tcgemm.matmul(b, b)
        if sys.version_info >= (3, 14):
            tcgemm.matmul(a, a)
threading.Thread(target=loop, daemon=True).start()
import time; time.sleep(0.5)
""",
    "an exit function": "import atexit; atexit.register(lambda: tcgemm.matmul(cai(a), cai(a)))",
    "a deleter without the interpreter's lock": """
import ctypes as ct
for _ in range(20):
    capsule = tcgemm.matmul(cai(a), cai(a)).__dlpack__()
    name = b"dltensor"
    ct.pythonapi.PyCapsule_GetPointer.restype = ct.c_void_p
    ct.pythonapi.PyCapsule_GetPointer.argtypes = [ct.py_object, ct.c_char_p]
    ct.pythonapi.PyCapsule_SetName.argtypes = [ct.py_object, ct.c_char_p]
    managed = ct.pythonapi.PyCapsule_GetPointer(capsule, name)
    used = b"used_dltensor"
    ct.pythonapi.PyCapsule_SetName(capsule, used)
    deleter = prod.DLManagedTensor.from_address(managed).deleter
    pthread = ct.c_ulong()
    libc = ct.CDLL(None)
    libc.pthread_create.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_void_p]
    libc.pthread_join.argtypes = [ct.c_ulong, ct.c_void_p]
    assert libc.pthread_create(ct.byref(pthread), None, deleter, managed) == 0
    assert libc.pthread_join(pthread, None) == 0
    del capsule
""",
}


@pytest.mark.parametrize("name", EXITS)
def test_exit(run_python, name):
    """Exit code 0 and nothing on stderr, whatever is still alive (numpy#22507)."""
    setup = """
import torch, tcgemm, producers as prod
a = torch.ones(64, 64, dtype=torch.float16, device="cuda")
def cai(x):
    return prod.cai(x.data_ptr(), "float16", x.shape, x.stride(), keep=x)
"""
    assert run_python(setup + EXITS[name] + "\nprint('end')\n", timeout=60) == "end\n"


def test_first_call_is_quick(run_python):
    """Machine code for this chip is in the image: nothing is compiled (onnxruntime#10746)."""
    out = run_python(
        """
        import time, torch
        a = torch.ones(256, 256, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        start = time.monotonic()
        import tcgemm
        tcgemm.matmul(a, a)
        torch.cuda.synchronize()
        print(time.monotonic() - start)
    """,
        env={"CUDA_CACHE_DISABLE": "1"},
    )
    assert float(out) < 1


# ---- memory ------------------------------------------------------------------------------------------------------------------


def test_out_of_memory():
    """The allocator's own error, and the context alive after it."""
    a, b = ref.torch_integers((70000, 16), "float32"), ref.torch_integers((16, 70000), "float32")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(8 * 2**30 / total)
    try:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                tcgemm.matmul(a, b)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    x, y = pair()
    ref.torch_check(tcgemm.matmul(x, y), x, y)


def test_out_of_memory_for_our_own(run_python):
    """Results for callers without an allocator: MemoryError, nothing lost, and the next call works."""
    run_python("""
        import torch, tcgemm, producers as prod, reference as ref
        def cai(x):
            return prod.cai(x.data_ptr(), "float16", x.shape, x.stride(), keep=x)
        small = ref.torch_integers((64, 64), "float16")
        tall, wide = ref.torch_integers((400000, 8), "float16"), ref.torch_integers((8, 400000), "float16")
        torch.cuda.synchronize()
        for _ in range(3):
            try:
                tcgemm.matmul(cai(tall), cai(wide))  # 320 GB
            except MemoryError:
                pass
            else:
                raise SystemExit("no error")
            result = torch.from_dlpack(tcgemm.matmul(cai(small), cai(small)))
            ref.torch_check(result, small, small)
    """)


# ---- operands in the wrong place ---------------------------------------------------------------------------------------------


def test_host_and_device_do_not_mix():
    """A host pointer in a kernel is a segfault, or a later error of some other call (pytorch#12406)."""
    device, host = torch.ones(16, 16, dtype=torch.float16, device=ref.DEVICE), torch.ones(16, 16, dtype=torch.float16)
    for other in (host, host.numpy(), host.pin_memory()):
        for call in (
            lambda: tcgemm.matmul(device, other),
            lambda: tcgemm.matmul(other, device),
            lambda: tcgemm.matmul(device, device, out=other),
            lambda: tcgemm.matmul(other, other, out=device),
        ):
            refused((ValueError, TypeError), "cuda:0", call=call)
    ref.torch_check(tcgemm.matmul(device, device), device, device)
    assert (tcgemm.matmul(host.pin_memory(), host.pin_memory()) == 16).all()


def test_bad_input_leaves_the_context_alive():
    x, y = pair()
    double, small = x.double(), torch.ones(3, 3, dtype=torch.float16, device=ref.DEVICE)
    grad = torch.ones(200, 4, dtype=torch.float16, device=ref.DEVICE, requires_grad=True)
    out = torch.empty(130, 70, dtype=torch.float16, device=ref.DEVICE)
    for call, error in (
        (lambda: tcgemm.matmul(x, small), ValueError),
        (lambda: tcgemm.matmul(x, double.t()), TypeError),
        (lambda: tcgemm.matmul(x, y.to(torch.bfloat16)), TypeError),
        (lambda: tcgemm.matmul(x, y.to(torch.int8)), TypeError),
        (lambda: tcgemm.matmul(x, y.to(torch.float8_e4m3fn)), TypeError),
        (lambda: tcgemm.matmul(x, None), TypeError),
        (lambda: tcgemm.matmul(x, grad), (RuntimeError, ValueError)),
        (lambda: tcgemm.matmul(x, y, out=out.float()), TypeError),
        (lambda: tcgemm.matmul(x, y, out=out[:1]), ValueError),
        (lambda: tcgemm.matmul(x, y, out=out[:1].expand(130, 70)), ValueError),
        (lambda: tcgemm.matmul(small, small, out=small), ValueError),
        (lambda: tcgemm.matmul(x, y, out=out.t()), ValueError),
        (lambda: tcgemm.matmul(x, y, out=3), TypeError),
        (
            lambda: tcgemm.matmul(
                x.reshape(()) if x.numel() == 1 else torch.ones((), dtype=x.dtype, device=x.device), y
            ),
            ValueError,
        ),
        (lambda: tcgemm.matmul(x, y, kernel="simt"), (ValueError, RuntimeError)),
        (lambda: tcgemm.matmul(x, y, kernel="none such"), ValueError),
        (lambda: tcgemm.matmul(x, y, stream=object()), TypeError),
        (lambda: tcgemm.matmul(x, y, out_dtype=torch.float64), (TypeError, ValueError)),
        (lambda: tcgemm.matmul(x.to("meta"), y), (TypeError, ValueError)),
    ):
        with pytest.raises(error):
            call()
    torch.cuda.synchronize()
    ref.torch_check(tcgemm.matmul(x, y, out=out), x, y)


def test_out_may_share_memory_but_no_element():
    x = ref.torch_integers((64, 64), "float16")
    both = torch.zeros(64, 128, dtype=torch.float16, device=ref.DEVICE)
    even, odd = both[:, ::2], both[:, 1::2]
    even.copy_(x)
    tcgemm.matmul(even, x, out=odd)
    ref.torch_check(odd, x, x)
    assert torch.equal(even, x)
    refused(ValueError, "out", call=lambda: tcgemm.matmul(both[:, :64], x, out=both[:, 63:127]))


def test_capsules_that_lie_about_their_device():
    """A host pointer said to be on the device: whatever comes, no crash of the process before the kernel."""
    a, _ = pair()
    export = prod.Export(a.data_ptr(), "float16", (130, 200), device=(prod.CUDA, 63), keep=a)
    refused((ValueError, RuntimeError, BufferError), call=lambda: tcgemm.matmul(export.capsule(), a.t()))
    assert export.deleted == 1
    for ordinal in (-1, 2**31 - 1):
        exports = [
            prod.Export(a.data_ptr(), "float16", (130, 200), device=(prod.CUDA, ordinal), keep=a) for _ in "ab"
        ]
        capsules = [x.capsule() for x in exports]
        refused(ValueError, call=lambda: tcgemm.matmul(*capsules))
        capsules.clear()
        assert [x.deleted for x in exports] == [1, 1]
    host = np.ones((4, 4), np.float16)
    refused(
        (ValueError, RuntimeError),
        call=lambda: tcgemm.matmul(
            prod.cai(host.ctypes.data, "float16", (4, 4)), prod.cai(host.ctypes.data, "float16", (4, 4))
        ),
    )
    x, y = pair()
    ref.torch_check(tcgemm.matmul(x, y), x, y)


def test_drop_from_another_thread():
    a, _ = pair()
    results = [
        torch.from_dlpack(
            tcgemm.matmul(
                prod.cai(a.data_ptr(), "float16", (130, 200), keep=a),
                prod.cai(a.data_ptr(), "float16", (200, 130), keep=a),
            )
        )
        for _ in range(20)
    ]
    thread = threading.Thread(target=results.clear)
    thread.start()
    thread.join()
    gc.collect()
    x, y = pair()
    ref.torch_check(tcgemm.matmul(x, y), x, y)
