"""Streams and graphs: the caller's stream, producers that are late, captures from the very first call on, replays with
other inputs, and memory that its stream still reads."""

import contextlib
import ctypes as ct
import gc

import producers as prod
import pytest
import reference as ref

import tcgemm

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

LATE_CYCLES = 100_000_000  # about 50 ms: what is not waited for loses the race every time
SHAPES = {  # one call of each kind of plan
    "plain": ((256, 256), (256, 256)),
    "ragged": ((130, 77), (77, 51)),
    "split": ((16, 65536), (65536, 64)),
    "batch": ((3, 64, 64), (64, 40)),
}


def late():
    torch.cuda._sleep(LATE_CYCLES)


def pair(name, dtype="float16"):
    return [ref.torch_integers(s, dtype) for s in SHAPES[name]]


class Handles:
    """The ways to name a stream."""

    class Protocol:
        def __init__(self, stream):
            self.stream = stream

        def __cuda_stream__(self):
            return 0, self.stream.cuda_stream

    class Ptr:
        def __init__(self, stream):
            self.ptr = stream.cuda_stream

    class Attribute:
        def __init__(self, stream):
            self.cuda_stream = stream.cuda_stream

    ways = {
        "int": lambda s: s.cuda_stream,
        "torch": lambda s: s,
        "protocol": Protocol,
        "ptr": Ptr,
        "attribute": Attribute,
    }


def test_a_late_producer_loses_without_the_stream():
    """The check itself: a read on another stream, not ordered, sees the old content."""
    side, x = torch.cuda.Stream(), torch.zeros(1000, device=ref.DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late()
        x.fill_(1)
    early = x.clone()
    torch.cuda.synchronize()
    assert int(early.sum()) == 0 and int(x.sum()) == 1000


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_current_stream(name, dtype):
    """A call on a side stream waits for what that stream still does (tilelang#89)."""
    a, b = pair(name, dtype)
    new = ref.torch_integers(a.shape, dtype)
    side = torch.cuda.Stream()
    for odd in (False, True):  # a copied operand is read on the stream as well
        x = a.clone() if not odd else torch.zeros(*a.shape, 2, dtype=a.dtype, device=ref.DEVICE)[..., 0].copy_(a)
        out = torch.empty(ref.result_shape(a.shape, b.shape), dtype=a.dtype, device=ref.DEVICE)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            late()
            x.copy_(new)
            result = tcgemm.matmul(x, b)
            tcgemm.matmul(x, b, out=out)
            expected = ref.torch_exact(new, b, dtype)
            wrong = (result != expected).sum() + (out != expected).sum()
        side.synchronize()
        assert int(wrong) == 0


@pytest.mark.parametrize("way", Handles.ways)
@pytest.mark.parametrize("name", SHAPES)
def test_explicit_stream(name, way):
    """stream= is where the work goes, and where result and workspace are allocated."""
    a, b = pair(name)
    new = ref.torch_integers(a.shape, "float16")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late()
        a.copy_(new)
    result = tcgemm.matmul(a, b, stream=Handles.ways[way](side))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(side):
        wrong = (result != ref.torch_exact(new, b, "float16")).sum()
        # Memory of a result that dies is that stream's to reuse, and nobody's before.
        del result
        torch.full((2**22,), float("nan"), dtype=torch.float16, device=ref.DEVICE)
    side.synchronize()
    assert int(wrong) == 0


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_stream_handles(handle):
    a, b = pair("ragged")
    torch.cuda.synchronize()
    result = tcgemm.matmul(a, b, stream=handle)
    torch.cuda.synchronize()
    ref.torch_check(result, a, b)


@pytest.mark.parametrize("bad", [-1, -5, 2**70, "7", object()])
def test_bad_streams(bad):
    a, b = pair("plain")
    with pytest.raises((TypeError, ValueError, OverflowError), match="stream"):
        tcgemm.matmul(a, b, stream=bad)
    ref.torch_check(tcgemm.matmul(a, b), a, b)


# ---- other producers -----------------------------------------------------------------------------------------------------


class TorchProducer:
    """DLPack by `__dlpack__` alone, of a torch tensor, exported with its own stream rules."""

    def __init__(self, tensor, stream):
        self.tensor, self.stream, self.asked = tensor, stream, []

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **kwargs):
        self.asked.append(stream)
        if stream != -1:  # the protocol: the consumer's stream waits for this one
            consumer = torch.cuda.default_stream() if stream in (None, 1) else torch.cuda.ExternalStream(stream)
            consumer.wait_stream(self.stream)
        return torch.utils.dlpack.to_dlpack(self.tensor)


def test_producer_orders_the_stream_it_is_given():
    a, b = pair("ragged")
    new = ref.torch_integers(a.shape, "float16")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late()
        a.copy_(new)
    left, right = TorchProducer(a, side), TorchProducer(b, side)
    result = torch.from_dlpack(tcgemm.matmul(left, right))
    torch.cuda.synchronize()
    assert torch.equal(result, ref.torch_exact(new, b, "float16"))
    assert left.asked and left.asked[0] in (1, None)


def test_late_second_operand_of_another_producer():
    """b is ordered by its own protocol, whatever a is."""
    a, b = pair("ragged")
    new = ref.torch_integers(b.shape, "float16")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late()
        b.copy_(new)
    result = tcgemm.matmul(a, TorchProducer(b, side))
    assert isinstance(result, torch.Tensor)
    ref.torch_check(result, a, new)


def cai_of(x, **entries):
    return prod.cai(x.data_ptr(), str(x.dtype).removeprefix("torch."), x.shape, x.stride(), keep=x, **entries)


@pytest.mark.parametrize("which", ["handle", "legacy", "per thread", "none"])
def test_stream_of_a_cuda_array_interface(which):
    """Version 3: the consumer orders itself after the producer's stream (numba#4933)."""
    a, b = pair("ragged")
    new = ref.torch_integers(a.shape, "float16")
    stream = {
        "handle": torch.cuda.Stream(),
        "legacy": torch.cuda.default_stream(),
        "per thread": torch.cuda.ExternalStream(2),
        "none": torch.cuda.default_stream(),
    }[which]
    value = {"handle": stream.cuda_stream, "legacy": 1, "per thread": 2, "none": None}[which]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late()
        a.copy_(new)
    if which == "none":  # no promise, none needed: the producer has finished
        torch.cuda.synchronize()
    result = tcgemm.matmul(cai_of(a, stream=value), cai_of(b, stream=value))
    found = torch.from_dlpack(result)
    torch.cuda.synchronize()
    assert torch.equal(found, ref.torch_exact(new, b, "float16"))


def test_stream_0_of_a_cuda_array_interface_is_illegal():
    a, b = pair("ragged")
    with pytest.raises(ValueError, match="stream"):
        tcgemm.matmul(cai_of(a, stream=0), b)
    with pytest.raises(ValueError, match="stream"):
        tcgemm.matmul(a, cai_of(b, stream=0))


def test_events_order_what_no_protocol_does():
    """torch tensors carry no stream: filled on one and used on another, an event between is the caller's part."""
    a, b = pair("ragged")
    new = ref.torch_integers(a.shape, "float16")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        late()
        a.copy_(new)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        result = tcgemm.matmul(a, b)
    second.synchronize()
    ref.torch_check(result, new, b)


def test_array_results_are_ordered_for_their_consumers():
    """tcgemm.Array.__dlpack__(stream=) makes that stream wait for the product."""
    a, b = pair("plain")
    new = ref.torch_integers(a.shape, "float16")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late()
        a.copy_(new)
    result = tcgemm.matmul(cai_of(a), cai_of(b), stream=side.cuda_stream)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        found = torch.from_dlpack(result).clone()
    other.synchronize()
    assert torch.equal(found, ref.torch_exact(new, b, "float16"))


# ---- lifetimes -----------------------------------------------------------------------------------------------------------


def test_results_are_the_allocators_own():
    """record_stream does nothing for a tensor wrapped around foreign memory; here it keeps a result from being reused."""
    a, b = pair("plain")
    expected = ref.torch_exact(a, b, "float16")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    tcgemm.matmul(a, b)  # lets go of what earlier calls still held
    gc.collect()
    before = torch.cuda.memory_allocated()
    result = tcgemm.matmul(a, b)
    assert torch.cuda.memory_allocated() - before >= result.numel() * 2
    ready = torch.cuda.Event()
    ready.record()
    copies = []
    with torch.cuda.stream(side):
        side.wait_event(ready)
        late()
        copies.append(result.clone())
    result.record_stream(side)
    address = result.data_ptr()
    del result
    spoilers = [torch.full((256, 256), float("nan"), dtype=torch.float16, device=ref.DEVICE) for _ in range(8)]
    assert all(s.data_ptr() != address for s in spoilers)
    torch.cuda.synchronize()
    assert torch.equal(copies[0], expected)


def test_inputs_of_other_owners_live_until_the_kernel_has_run():
    """A capsule's memory may be reused when its deleter runs: not before the kernel has read it."""
    a, b = pair("plain")
    expected = ref.torch_exact(a, b, "float16")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()

    class Watched(prod.DLPackObject):
        pass

    state = {}

    def make(x):
        def fresh(versioned):
            state["export"] = prod.Export(
                x.data_ptr(), "float16", x.shape, x.stride(), versioned=versioned, device=(prod.CUDA, 0), keep=x
            )
            return state["export"]

        return Watched(fresh, device=(prod.CUDA, 0))

    with torch.cuda.stream(side):
        late()
    result = tcgemm.matmul(make(a), make(b), stream=side.cuda_stream)
    early = state["export"].deleted
    assert not side.query(), "the stream was idle: nothing was shown"
    assert early == 0
    torch.cuda.synchronize()
    for _ in range(3):  # released at a later call
        tcgemm.matmul(make(a), make(b))
        torch.cuda.synchronize()
    assert torch.equal(torch.from_dlpack(result), expected)
    last = state["export"]
    tcgemm.matmul(cai_of(a), cai_of(b))
    assert last.deleted == 1
    gc.collect()


# ---- capture -------------------------------------------------------------------------------------------------------------


def capture(call, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_capture_and_replay(name, dtype):
    a, b = pair(name, dtype)
    out = torch.empty(ref.result_shape(a.shape, b.shape), dtype=a.dtype, device=ref.DEVICE)
    odd = torch.zeros(*a.shape, 2, dtype=a.dtype, device=ref.DEVICE)[..., 0].copy_(a)  # no unit stride

    def call():
        return tcgemm.matmul(a, b), tcgemm.matmul(a, b, out=out), tcgemm.matmul(odd, b)

    graph, results = capture(call)
    assert results[1] is out
    for _ in range(3):
        for x in (a, b):
            x.copy_(ref.torch_integers(x.shape, dtype))
        odd.copy_(a)
        out.fill_(float("nan"))
        graph.replay()
        # Memory the graph does not own is dirtied: its workspace and results are in its own pool.
        torch.full((2**22,), float("nan"), device=ref.DEVICE)
        graph.replay()
        for result in results:
            ref.torch_check(result, a, b)


def test_capture_on_a_given_stream():
    a, b = pair("ragged")
    side = torch.cuda.Stream()
    graph, result = capture(lambda: tcgemm.matmul(a, b), stream=side)
    a.copy_(ref.torch_integers(a.shape, "float16"))
    graph.replay()
    ref.torch_check(result, a, b)
    graph, result = capture(lambda: tcgemm.matmul(a, b, stream=torch.cuda.current_stream()), stream=side)
    b.copy_(ref.torch_integers(b.shape, "float16"))
    graph.replay()
    ref.torch_check(result, a, b)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_capture_modes(mode):
    a, b = pair("split")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        result = tcgemm.matmul(a, b)
    graph.replay()
    ref.torch_check(result, a, b)


@pytest.mark.parametrize("dtype", ref.DTYPES)
def test_first_call_of_the_process_in_a_capture(run_python, dtype):
    """Kernels are loaded in the middle of it."""
    run_python(f"""
        import torch, tcgemm, reference as ref
        a, b = (ref.torch_integers(s, {dtype!r}) for s in ((130, 8192), (8192, 70)))
        odd = torch.zeros(130, 8192, 2, dtype=a.dtype, device="cuda")[..., 0].copy_(a)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = tcgemm.matmul(a, b), tcgemm.matmul(odd, b), tcgemm.matmul(a[:, :64], b[:64])
        for x in (a, b):
            x.copy_(ref.torch_integers(x.shape, {dtype!r}))
        odd.copy_(a)
        graph.replay()
        ref.torch_check(results[0], a, b)
        ref.torch_check(results[1], a, b)
        ref.torch_check(results[2], a[:, :64], b[:64])
    """)


@contextlib.contextmanager
def driver_capture(stream):
    """Capture by the driver itself, in its strictest mode, as a framework that is not torch does."""
    cuda = ct.CDLL("libcuda.so.1")
    graph, handle = ct.c_void_p(), ct.c_void_p(stream.cuda_stream)
    assert cuda.cuStreamBeginCapture_v2(handle, 0) == 0
    try:
        yield graph
    finally:
        ended = cuda.cuStreamEndCapture(handle, ct.byref(graph))
    assert ended == 0, f"the capture was broken: error {ended}"


def nodes(graph):
    cuda = ct.CDLL("libcuda.so.1")
    count = ct.c_size_t()
    assert cuda.cuGraphGetNodes(graph, None, ct.byref(count)) == 0
    return count.value


def test_a_call_is_one_kernel():
    """With `out=` and plain operands the graph holds one node."""
    a, b = pair("plain")
    out = torch.empty_like(a)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with driver_capture(side) as graph:
        tcgemm.matmul(a, b, out=out, stream=side)
    assert nodes(graph) == 1
    assert ct.CDLL("libcuda.so.1").cuGraphDestroy(graph) == 0


@pytest.mark.parametrize("kind", ["capsule", "object", "cai"])
def test_capture_of_bare_producers(kind):
    """No wait on another stream, no query and no free may break it; a producer must not be told to wait on the default
    stream (nanobind#1241)."""
    a, b = pair("plain")
    side = torch.cuda.Stream()
    make = {
        "capsule": lambda x: prod.Export(
            x.data_ptr(), "float16", x.shape, x.stride(), device=(prod.CUDA, 0), keep=x
        ).capsule(),
        "object": lambda x: prod.DLPackObject(
            lambda versioned: prod.Export(
                x.data_ptr(), "float16", x.shape, x.stride(), versioned=versioned, device=(prod.CUDA, 0), keep=x
            ),
            device=(prod.CUDA, 0),
        ),
        "cai": cai_of,
    }[kind]
    out = torch.empty_like(a)
    kept = [tcgemm.matmul(make(a), make(b)) for _ in range(3)]
    torch.cuda.synchronize()
    x, y = make(a), make(b)
    gc.collect()  # what other tests left, graphs of torch's among it, may not be freed in a capture
    with driver_capture(side) as graph:
        tcgemm.matmul(x, y, out=out, stream=side)
        kept.clear()
        gc.collect()
    if kind == "object":
        assert x.streams == [side.cuda_stream]
    cuda = ct.CDLL("libcuda.so.1")
    executable = ct.c_void_p()
    assert cuda.cuGraphInstantiateWithFlags(ct.byref(executable), graph, ct.c_ulonglong(0)) == 0
    a.copy_(ref.torch_integers(a.shape, "float16"))
    torch.cuda.synchronize()
    assert cuda.cuGraphLaunch(executable, ct.c_void_p(side.cuda_stream)) == 0
    side.synchronize()
    ref.torch_check(out, a, b)
    assert cuda.cuGraphExecDestroy(executable) == 0 and cuda.cuGraphDestroy(graph) == 0


def test_garbage_collected_during_a_capture():
    """What a collection frees must not break the capture it happens in (warp#401)."""
    a, b = pair("plain")
    for _ in range(50):
        node = [tcgemm.matmul(cai_of(a), cai_of(b)), tcgemm.matmul(a, b)]
        node.append(node)
    del node
    torch.cuda.synchronize()

    def call():
        gc.collect()
        result = tcgemm.matmul(a, b)
        gc.collect()
        return result

    graph, result = capture(call)
    graph.replay()
    ref.torch_check(result, a, b)
