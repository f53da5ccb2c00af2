"""Every framework's arrays: the result is of the caller's own kind, exact over random shapes, and each protocol's corner
cases on the device. Frameworks that are not installed are skipped, by name."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import producers as prod
import pytest
import reference as ref
from conftest import refused

import tcgemm

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


class Torch:
    dtypes, any_strides = ref.DTYPES, True

    def wrap(self, buffer):
        return buffer.tensor

    def own(self, result):
        return isinstance(result, torch.Tensor)

    def unwrap(self, result):
        return result


def pointer(buffer):
    """The address of the view's first element."""
    return buffer.bits.data_ptr() + buffer.where.offset * buffer.bits.element_size()


def byte_strides(buffer):
    return tuple(s * buffer.bits.element_size() for s in buffer.where.strides)


class Cupy(Torch):
    def __init__(self):
        self.cupy = pytest.importorskip("cupy")
        try:
            self.dtypes = ref.DTYPES if self.cupy.zeros(2, ref.np_dtype("bfloat16")).dtype.itemsize == 2 else ()
        except Exception:
            self.dtypes = ("float16", "float32")  # a release without bfloat16

    def wrap(self, buffer):
        memory = self.cupy.cuda.UnownedMemory(
            buffer.bits.data_ptr(), buffer.bits.numel() * buffer.bits.element_size(), buffer
        )
        start = self.cupy.cuda.MemoryPointer(memory, buffer.where.offset * buffer.bits.element_size())
        return self.cupy.ndarray(buffer.where.shape, ref.np_dtype(buffer.dtype), start, byte_strides(buffer))

    def own(self, result):
        return type(result) is self.cupy.ndarray

    def unwrap(self, result):
        if result.size == 0:
            return torch.empty(result.shape, dtype=ref.torch_dtype(result.dtype.name), device=ref.DEVICE)
        flat = self.cupy.ascontiguousarray(result).reshape(-1).view({2: np.int16, 4: np.int32}[result.itemsize])
        return torch.from_dlpack(flat).view(ref.torch_dtype(result.dtype.name)).reshape(result.shape)


class Numba(Torch):
    dtypes = ("float16", "float32")

    def __init__(self):
        self.cuda = pytest.importorskip("numba.cuda")
        if not self.cuda.is_available():
            pytest.skip("numba sees no device")

    def wrap(self, buffer):
        interface = {
            "shape": buffer.where.shape,
            "strides": byte_strides(buffer),
            "typestr": prod.TYPESTR[buffer.dtype],
            "data": (pointer(buffer) if 0 not in buffer.where.shape else 0, False),
            "version": 3,
            "stream": None,
        }
        return self.cuda.from_cuda_array_interface(interface, owner=buffer)

    def own(self, result):
        return self.cuda.is_cuda_array(result) and type(result).__module__.split(".")[0] in ("numba", "numba_cuda")

    def unwrap(self, result):
        return torch.as_tensor(result, device=ref.DEVICE)


class Jax(Torch):
    any_strides = False  # XLA's arrays are dense

    def __init__(self):
        self.jax = pytest.importorskip("jax")
        if not any(d.platform == "gpu" for d in self.jax.devices()):
            pytest.skip("jax sees no GPU")
        torch.cuda.set_device(0)  # whichever device's context JAX's start has made current

    def wrap(self, buffer):
        if 0 in buffer.where.shape:
            return self.jax.numpy.zeros(buffer.where.shape, buffer.dtype)
        return self.jax.dlpack.from_dlpack(buffer.tensor.contiguous())

    def own(self, result):
        return isinstance(result, self.jax.Array)

    def unwrap(self, result):
        return torch.from_dlpack(result)


class Bare(Torch):
    """No framework: capsules, objects, interfaces. The result is ours."""

    def own(self, result):
        return type(result) is tcgemm.Array

    def unwrap(self, result):
        return torch.from_dlpack(result)

    def export(self, buffer, versioned):
        return prod.Export(
            pointer(buffer) if 0 not in buffer.where.shape else None,
            buffer.dtype,
            buffer.where.shape,
            buffer.where.strides,
            versioned=versioned,
            device=(prod.CUDA, 0),
            keep=buffer,
        )


class Capsule(Bare):
    def wrap(self, buffer):
        return self.export(buffer, False).capsule()


class VersionedCapsule(Bare):
    def wrap(self, buffer):
        return self.export(buffer, True).capsule()


class Object(Bare):
    def wrap(self, buffer):
        return prod.DLPackObject(lambda versioned: self.export(buffer, versioned), device=(prod.CUDA, 0))


class LegacyObject(Bare):
    def wrap(self, buffer):
        return prod.DLPackObject(lambda versioned: self.export(buffer, versioned), "legacy", device=(prod.CUDA, 0))


class Interface(Bare):
    dtypes = ("float16", "float32")

    def wrap(self, buffer):
        return prod.cai(
            pointer(buffer) if 0 not in buffer.where.shape else 0,
            buffer.dtype,
            buffer.where.shape,
            buffer.where.strides,
            keep=buffer,
        )


FRAMEWORKS = {
    f.__name__: f for f in (Torch, Cupy, Numba, Jax, Capsule, VersionedCapsule, Object, LegacyObject, Interface)
}
EACH = pytest.mark.parametrize("name", FRAMEWORKS)


def layout_for(framework, rng, shape):
    return ref.layout(rng.choice(ref.layout_names()) if framework.any_strides else "row", shape, rng)


@EACH
def test_random(rng, name):
    """3,000 products of shapes 1..300."""
    framework = FRAMEWORKS[name]()
    tally = ref.Tally()
    for _ in range(3000):
        shapes = ref.random_shapes(rng)
        dtype = rng.choice(framework.dtypes)
        a, b = (ref.torch_operand(dtype, layout_for(framework, rng, s)) for s in shapes)
        out_dtype = "float32" if rng.random() < 0.3 else dtype
        result = tcgemm.matmul(framework.wrap(a), framework.wrap(b), out_dtype=out_dtype)
        assert framework.own(result), type(result)
        tally.add(
            f"{dtype} {a.where} @ {b.where}", ref.torch_wrong(framework.unwrap(result), a.tensor, b.tensor, out_dtype)
        )
    tally.read()


@EACH
def test_empty_results_and_operands(name):
    framework = FRAMEWORKS[name]()
    for shapes in (((0, 16), (16, 8)), ((16, 0), (0, 8)), ((4, 16), (16, 0)), ((0, 0), (0, 0)), ((0, 4, 5), (5, 3))):
        for dtype in framework.dtypes:
            a, b = (ref.DeviceBuffer(dtype, ref.packed(s), torch.ones(s)) for s in shapes)
            result = tcgemm.matmul(framework.wrap(a), framework.wrap(b))
            assert framework.own(result)
            assert tuple(result.shape) == ref.result_shape(*shapes)
            if np.prod(result.shape):
                ref.torch_check(framework.unwrap(result), a.tensor, b.tensor)


@EACH
def test_refusals_name_the_argument(name):
    framework = FRAMEWORKS[name]()
    a, b = (ref.torch_operand("float16", ref.packed(s)) for s in ((4, 5), (6, 7)))
    refused(
        ValueError,
        "b: expected K=5, got 6",
        (4, 5),
        (6, 7),
        call=lambda: tcgemm.matmul(framework.wrap(a), framework.wrap(b)),
    )
    c = ref.torch_operand("float32", ref.packed((5, 7)))
    refused(TypeError, "float16", "float32", call=lambda: tcgemm.matmul(framework.wrap(a), framework.wrap(c)))
    refused(TypeError, "b", call=lambda: tcgemm.matmul(framework.wrap(a), None))


@pytest.mark.parametrize("left", FRAMEWORKS)
@pytest.mark.parametrize("right", FRAMEWORKS)
def test_frameworks_mix(rng, left, right):
    """a decides what the result is."""
    one, other = FRAMEWORKS[left](), FRAMEWORKS[right]()
    a, b = ref.torch_operand("float16", ref.packed((20, 30))), ref.torch_operand("float16", ref.packed((30, 40)))
    torch.cuda.synchronize()
    result = tcgemm.matmul(one.wrap(a), other.wrap(b))
    assert one.own(result)
    ref.torch_check(one.unwrap(result), a.tensor, b.tensor)


@pytest.mark.parametrize("name", ["Torch", "Cupy", "Numba"])
def test_out_of_every_framework(rng, name):
    framework = FRAMEWORKS[name]()
    tally = ref.Tally()
    for _ in range(200):
        shapes = ref.random_shapes(rng, 80)
        a, b = (ref.torch_operand("float16", layout_for(framework, rng, s)) for s in shapes)
        out = ref.DeviceBuffer(
            "float16", ref.layout(rng.choice(ref.layout_names(out=True)), ref.result_shape(*shapes), rng)
        )
        target = framework.wrap(out)
        assert tcgemm.matmul(framework.wrap(a), framework.wrap(b), out=target) is target
        tally.add(f"{a.where} @ {b.where}", ref.torch_wrong(out.tensor, a.tensor, b.tensor, "float16"))
        tally.add(f"outside of {out.where}", out.spoiled())
    tally.read()


# ---- CuPy ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def test_negative_strides(rng, cupy):
    """Flipped arrays (cupy#10303, tensorflow#51598): exact, from any side and with any batch."""
    framework = Cupy()
    wrong = []
    for name in ref.NEGATIVE_LAYOUTS:
        for shapes in (((33, 40), (40, 24)), ((3, 33, 40), (3, 40, 24)), ((2, 3, 16, 8), (8, 16)), ((40,), (40, 24))):
            wheres = [ref.layout(name, s, rng) for s in shapes]
            values = [ref.integers(rng, s) for s in shapes]
            arrays = []
            for where, value in zip(wheres, values):
                flat = cupy.full(where.size, cupy.nan, np.float16)
                flat[cupy.asarray(where.indices().ravel())] = cupy.asarray(value.ravel()).astype(np.float16)
                arrays.append(
                    cupy.ndarray(
                        where.shape, np.float16, flat.data + 2 * where.offset, tuple(2 * s for s in where.strides)
                    )
                )
            result = tcgemm.matmul(*arrays)
            assert framework.own(result)
            ref.check_exact(cupy.asnumpy(result), *values, "float16")
            out_where = ref.layout(name, ref.result_shape(*shapes), rng)
            flat = cupy.full(out_where.size, 7, np.float16)
            out = cupy.ndarray(
                out_where.shape, np.float16, flat.data + 2 * out_where.offset, tuple(2 * s for s in out_where.strides)
            )
            assert tcgemm.matmul(*arrays, out=out) is out
            ref.check_exact(cupy.asnumpy(out), *values, "float16")
            outside = np.ones(out_where.size, bool)
            outside[out_where.indices().ravel()] = False
            wrong.append(int((cupy.asnumpy(flat)[outside] != 7).sum()))
    assert not any(wrong)


def test_negative_strides_by_capsule(rng):
    for name in ref.NEGATIVE_LAYOUTS:
        for versioned in (False, True):
            wheres = [ref.layout(name, s, rng) for s in ((33, 40), (40, 24))]
            values = [ref.integers(rng, w.shape) for w in wheres]
            exports = []
            for where, value in zip(wheres, values):
                buffer = ref.HostBuffer("float16", where, value)
                flat = torch.from_numpy(buffer.bits.view(np.int16)).to(ref.DEVICE)
                exports.append(
                    prod.Export(
                        flat.data_ptr() + 2 * where.offset,
                        "float16",
                        where.shape,
                        where.strides,
                        versioned=versioned,
                        device=(prod.CUDA, 0),
                        keep=flat,
                    )
                )
            result = torch.from_dlpack(tcgemm.matmul(*(x.capsule() for x in exports)))
            ref.check_exact(result.cpu(), *values, "float16")


def test_cupy_streams(cupy):
    """CuPy's current stream, of which its interface tells."""
    a, b = cupy.zeros((256, 256), np.float16), cupy.eye(256, dtype=np.float16)
    new = cupy.random.randint(-2, 3, (256, 256)).astype(np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(100_000_000)
        a[...] = new
        result = tcgemm.matmul(a, b)
        equal = (result == new).all()
    stream.synchronize()
    assert bool(equal)


def test_cupy_capture(cupy):
    a, b = cupy.ones((256, 256), np.float16), cupy.eye(256, dtype=np.float16)
    out = cupy.empty_like(a)
    tcgemm.matmul(a, b)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        tcgemm.matmul(a, b, out=out)
        graph = stream.end_capture()
        a[...] = 3
        graph.launch(stream)
    stream.synchronize()
    assert bool((out == 3).all())


def test_cupy_allocates_the_result(cupy):
    a = cupy.ones((512, 512), np.float16)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    result = tcgemm.matmul(a, a)
    assert pool.used_bytes() - before >= result.nbytes


def test_cupy_results_and_orders(cupy):
    """Results are cupy.ndarrays like others, from operands of any order that CuPy calls contiguous or not."""
    base = cupy.asarray(np.random.default_rng(5).integers(-2, 3, (2, 40, 40)).astype(np.float16))
    operands = [
        base[0],
        cupy.asfortranarray(base[0]),
        base[0].T,
        base[0, ::2, :][:, ::2],
        base[:1, :1][0, :, :1],
        base,
    ]
    operands += [cupy.broadcast_to(base[0, 0], (40, 40)), base[:, :0], base.transpose(0, 2, 1)]
    for a in operands:
        b = cupy.asfortranarray(base[1, : a.shape[-1]])
        result, expected = tcgemm.matmul(a, b), cupy.matmul(a, b)
        assert type(result) is cupy.ndarray and result.dtype == expected.dtype and result.shape == expected.shape
        assert result.flags.c_contiguous and result.flags.owndata and result.base is None
        assert result.strides == cupy.empty(result.shape, result.dtype).strides and result.nbytes == result.size * 2
        assert (cupy.asnumpy(result) == cupy.asnumpy(expected)).all()
        assert (cupy.asnumpy((result + 1).T) == cupy.asnumpy(result).T + 1).all()


def test_managed_memory(cupy):
    """DLPack device 13 (pytorch#96318)."""
    previous = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool(cupy.cuda.malloc_managed).malloc)
    try:
        a = cupy.random.randint(-2, 3, (65, 40)).astype(np.float16)
        b = cupy.random.randint(-2, 3, (40, 33)).astype(np.float16)
    finally:
        cupy.cuda.set_allocator(previous)
    values = [cupy.asnumpy(x).astype(np.float64) for x in (a, b)]
    ref.check_exact(cupy.asnumpy(tcgemm.matmul(a, b)), *values, "float16")
    exports = [prod.Export(x.data.ptr, "float16", x.shape, device=(prod.CUDA_MANAGED, 0), keep=x) for x in (a, b)]
    result = torch.from_dlpack(tcgemm.matmul(*(x.capsule() for x in exports)))
    ref.check_exact(result.cpu(), *values, "float16")


# ---- JAX -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jax():
    return Jax().jax


def test_jax_arrays(jax):
    """Outputs of jitted functions, used at once; results fed back; deleted arrays refused."""
    jnp = jax.numpy
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        step = jax.jit(lambda x: (x * 2) % 5 - 2)
        x = step(jnp.arange(300 * 200, dtype=jnp.int32).reshape(300, 200)).astype(dtype)
        w = step(jnp.arange(200 * 100, dtype=jnp.int32).reshape(200, 100)).astype(dtype)
        result = tcgemm.matmul(x, w)
        assert isinstance(result, jax.Array) and result.dtype == x.dtype and result.devices() == x.devices()
        name = str(result.dtype)
        expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        again = step(result)
        np.testing.assert_array_equal(ref.to_bits(np.asarray(result, np.float64), name), ref.to_bits(expected, name))
        assert again.shape == (300, 100)
        turned = tcgemm.matmul(w.T, x.T)
        np.testing.assert_array_equal(np.asarray(turned, np.float64), np.asarray(result, np.float64).T)


def test_jax_arrays_that_are_gone(jax):
    x = jax.numpy.ones((16, 16), jax.numpy.float16)
    y = jax.numpy.ones((16, 16), jax.numpy.float16)
    x.delete()
    with pytest.raises(Exception, match="deleted|donated"):
        tcgemm.matmul(x, y)
    with pytest.raises(Exception, match="deleted|donated"):
        tcgemm.matmul(y, x)
    assert (np.asarray(tcgemm.matmul(y, y)) == 16).all()


def test_jax_tracers(jax):
    x = jax.numpy.ones((16, 16), jax.numpy.float16)
    for transform in (jax.jit, jax.vmap):
        refused(
            TypeError,
            "a",
            "JAX",
            call=lambda: transform(lambda y: tcgemm.matmul(y, y))(x if transform is jax.jit else x[None]),
        )


def test_jax_memory_is_held(jax):
    """XLA must not reuse an operand's memory before the kernel has read it."""
    jnp = jax.numpy
    fill = jax.jit(lambda i: jnp.full((1024, 1024), i, jnp.float16))
    eye = jnp.eye(1024, dtype=jnp.float16)
    results = []
    for i in range(200):
        x = fill(i)
        results.append(tcgemm.matmul(x, eye))
        del x
        fill(-1.0)
    for i, result in enumerate(results):
        assert float(jnp.abs(result - i).max()) == 0, i


# ---- __cuda_array_interface__ ----------------------------------------------------------------------------------------------


def interface(x, **entries):
    return prod.cai(x.data_ptr(), ref.dtype_name(x), x.shape, x.stride(), keep=x, **entries)


def test_interface_entries(rng):
    """numba#4175, cupy#2610."""
    a, b = ref.torch_integers((20, 30), "float16"), ref.torch_integers((30, 40), "float16")
    turned = a.t().contiguous().t()
    for left in (
        interface(a),
        interface(a, strides=...),
        interface(a, strides=None),
        interface(turned),
        interface(a, version=2, stream=...),
        interface(a, data=(a.data_ptr(), True)),
        interface(a, descr=[("", "<f2")]),
        interface(a, mask=None),
        interface(a, version=3, stream=1),
    ):
        ref.torch_check(torch.from_dlpack(tcgemm.matmul(left, interface(b))), a, b)
        assert left.reads >= 1


@pytest.mark.parametrize("data", [(0, False), (None, False)])
def test_interface_of_an_empty_array(data):
    b = ref.torch_integers((16, 40), "float16")
    left = prod.CaiObject({"shape": (0, 16), "typestr": "<f2", "data": data, "version": 3})
    assert tuple(tcgemm.matmul(left, interface(b)).shape) == (0, 40)
    left.interface["data"] = (b.data_ptr(), False)
    assert tuple(tcgemm.matmul(left, interface(b)).shape) == (0, 40)


@pytest.mark.parametrize("entries, error", prod.BAD_INTERFACES, ids=str)
def test_interface_nonsense(entries, error):
    a = ref.torch_integers((20, 20), "float16")
    for call in (
        lambda: tcgemm.matmul(interface(a, **entries), a),
        lambda: tcgemm.matmul(a, interface(a, **entries)),
    ):
        with pytest.raises(error):
            call()
    for whole in (None, 3, [], {}):
        odd = prod.CaiObject({})
        odd.interface = whole
        with pytest.raises((TypeError, ValueError)):
            tcgemm.matmul(odd, a)
    ref.torch_check(tcgemm.matmul(a, a), a, a)


def test_bfloat16_is_not_read_as_float16():
    """'<V2', or '<f2' from some: the array itself goes by DLPack, and a bare interface is refused, never 56.25."""
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=ref.DEVICE)
    assert int((tcgemm.matmul(ones, ones) != 16).sum()) == 0

    class Bare:
        __cuda_array_interface__ = ones.__cuda_array_interface__

    refused(TypeError, "V2", call=lambda: tcgemm.matmul(Bare(), Bare()))


def test_read_only_inputs():
    a, b = ref.torch_integers((20, 30), "float16"), ref.torch_integers((30, 40), "float16")
    out = torch.zeros(20, 40, dtype=torch.float16, device=ref.DEVICE)
    ref.torch_check(torch.from_dlpack(tcgemm.matmul(interface(a, data=(a.data_ptr(), True)), b)), a, b)
    refused(
        ValueError,
        "out",
        "read-only",
        call=lambda: tcgemm.matmul(a, b, out=interface(out, data=(out.data_ptr(), True))),
    )
    export = prod.Export(
        out.data_ptr(), "float16", out.shape, versioned=True, flags=prod.READ_ONLY, device=(prod.CUDA, 0), keep=out
    )
    refused(ValueError, "out", "read-only", call=lambda: tcgemm.matmul(a, b, out=export.capsule()))
    assert export.deleted == 1 and int(out.count_nonzero()) == 0


# ---- tcgemm.Array --------------------------------------------------------------------------------------------------------


def test_array():
    a, b = ref.torch_integers((20, 30), "float16"), ref.torch_integers((30, 40), "float16")
    result = tcgemm.matmul(interface(a), interface(b))
    assert result.shape == (20, 40) and str(result.dtype) == "float16"
    assert "20" in repr(result) and "float16" in repr(result)
    assert tuple(result.__dlpack_device__()) == (prod.CUDA, 0)
    entries = result.__cuda_array_interface__
    assert (
        entries["shape"] == (20, 40)
        and entries["typestr"] == "<f2"
        and entries["version"] == 3
        and entries.get("stream") != 0
    )
    for keywords in (
        {},
        {"stream": None},
        {"stream": 1},
        {"stream": 2},
        {"stream": -1},
        {"stream": torch.cuda.Stream().cuda_stream},
    ):
        assert prod.capsule_name(result.__dlpack__(**keywords)) == "dltensor"
        assert prod.capsule_name(result.__dlpack__(**keywords, max_version=(1, 0))) == "dltensor_versioned"
    for keywords in ({"stream": 0}, {"dl_device": (2, 99)}, {"dl_device": (4, 0)}, {"copy": True}):
        with pytest.raises((ValueError, BufferError)):
            result.__dlpack__(**keywords)
    ref.torch_check(torch.from_dlpack(result), a, b)
    ref.torch_check(torch.as_tensor(result, device=ref.DEVICE), a, b)
    ref.torch_check(torch.from_dlpack(result.__dlpack__(dl_device=(prod.CPU, 0))).to(ref.DEVICE), a, b)
    # It is an operand, too, and may be exported after its name is gone.
    again = tcgemm.matmul(result, b.t())
    assert type(again) is tcgemm.Array
    view = torch.from_dlpack(again)
    expected = ref.torch_exact(torch.from_dlpack(result), b.t(), "float16")
    del again, result
    torch.full((2**22,), float("nan"), device=ref.DEVICE)
    assert torch.equal(view, expected)


# ---- torch -----------------------------------------------------------------------------------------------------------------


def test_torch_grad_and_fakes():
    x = torch.ones(16, 16, dtype=torch.float16, device=ref.DEVICE, requires_grad=True)
    y = torch.ones(16, 16, dtype=torch.float16, device=ref.DEVICE)
    refused((RuntimeError, ValueError), "a", "detach", call=lambda: tcgemm.matmul(x, y))
    refused((RuntimeError, ValueError), "b", "detach", call=lambda: tcgemm.matmul(y, torch.nn.Parameter(y)))
    with torch.no_grad():
        ref.torch_check(tcgemm.matmul(x, torch.nn.Parameter(y)), y, y)
    with torch.inference_mode():
        ref.torch_check(tcgemm.matmul(x, y), y, y)
        made = torch.ones(16, 16, dtype=torch.float16, device=ref.DEVICE)
        ref.torch_check(tcgemm.matmul(made, made), y, y)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(16, 16, dtype=torch.float16, device=ref.DEVICE)
    refused((TypeError, ValueError, RuntimeError, BufferError), "a", call=lambda: tcgemm.matmul(fake, y))
    torch.cuda.synchronize()


def test_torch_subclass():
    class Mine(torch.Tensor):
        pass

    x = torch.ones(16, 16, dtype=torch.float16, device=ref.DEVICE).as_subclass(Mine)
    assert int((tcgemm.matmul(x, x).as_subclass(torch.Tensor) != 16).sum()) == 0


def test_torch_results_look_like_torchs():
    a, b = ref.torch_integers((20, 30), "float16"), ref.torch_integers((30, 40), "float16")
    result = tcgemm.matmul(a, b)
    other = torch.matmul(a, b)
    assert (result.stride(), result.device, result.layout, result.requires_grad, type(result)) == (
        other.stride(),
        other.device,
        other.layout,
        False,
        torch.Tensor,
    )
    assert result.data_ptr() % 16 == 0
    vector = tcgemm.matmul(a[0], b[:, 0])
    assert vector.shape == () and float(vector) == float(a[0].double() @ b[:, 0].double())
