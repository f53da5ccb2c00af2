"""DLPack as producers really make it, and as hostile ones could: on host memory, with every deleter counted."""

import gc
import sys

import numpy as np
import producers as prod
import pytest
import reference as ref
from conftest import refused

import tcgemm

KINDS = pytest.mark.parametrize("versioned", [False, True], ids=["legacy", "versioned"])
SUPPORTED = ("float16", "bfloat16", "float32")


@pytest.fixture(autouse=True)
def no_deleter_runs_twice():
    yield
    if prod._live:
        gc.collect()
    assert not prod.stray
    assert not prod._live, "an export was never deleted"


def host(array):
    return array if isinstance(array, np.ndarray) or hasattr(array, "detach") else np.from_dlpack(array)


def identity(dtype="float32", n=4):
    return ref.HostBuffer(dtype, ref.packed((n, n)), np.eye(n)).array


def ones(size=(4, 4), **fields):
    """An export of float32 ones; fields say something else of it than is true."""
    return prod.export(ref.HostBuffer("float32", ref.packed(size), np.ones(size)), **fields)


# ---- what must work --------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_capsules(rng, versioned, dtype):
    a, b = ref.operand(rng, dtype, ref.packed((5, 7))), ref.operand(rng, dtype, ref.packed((7, 3)))
    exports = [prod.export(x, versioned=versioned) for x in (a, b)]
    capsules = [x.capsule() for x in exports]
    result = tcgemm.matmul(*capsules)
    ref.check_exact(host(result), a.values(), b.values(), dtype)
    assert [prod.capsule_name(c) for c in capsules] == ["used_" + exports[0].name.decode()] * 2
    del result
    gc.collect()
    assert [x.deleted for x in exports] == [1, 1]
    del capsules
    assert [x.deleted for x in exports] == [1, 1]


@KINDS
def test_every_layout(rng, versioned):
    for name in ref.LAYOUTS:
        for shapes in (((9, 7), (7, 5)), ((2, 9, 7), (2, 7, 5)), ((1, 7), (7, 1)), ((7,), (7, 5)), ((9, 7), (7,))):
            a, b = (ref.operand(rng, "float16", ref.layout(name, s, rng)) for s in shapes)
            exports = [prod.export(x, versioned=versioned) for x in (a, b)]
            result = tcgemm.matmul(*(x.capsule() for x in exports))
            ref.check_exact(host(result), a.values(), b.values(), "float16")


@KINDS
def test_byte_offset(rng, versioned):
    a = ref.operand(rng, "float16", ref.layout("row_padded", (5, 4), rng))
    export = prod.export(a, versioned=versioned, data=a.bits.ctypes.data, byte_offset=2 * a.where.offset)
    ref.check_exact(host(tcgemm.matmul(export.capsule(), identity("float16"))), a.values(), np.eye(4), "float16")
    assert export.deleted == 1


@KINDS
@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 5, 4), (1, 4)])
def test_null_strides_are_row_major(rng, versioned, shape):
    a = ref.operand(rng, "float32", ref.packed(shape))
    export = prod.export(a, versioned=versioned, strides=None)
    ref.check_exact(host(tcgemm.matmul(export.capsule(), identity())), a.values(), np.eye(4), "float32")
    assert export.deleted == 1


@KINDS
@pytest.mark.parametrize("garbage", [0, 1, 7, -1, 2**62, -(2**63)])
def test_strides_of_length_1_axes_mean_nothing(rng, versioned, garbage):
    for m in (1, 3):
        for n in (1, 3):
            for k in (1, 3):
                exports, values = [], []
                for shape in ((m, k), (k, n)):
                    buffer = ref.operand(rng, "float16", ref.packed(shape))
                    strides = [garbage if length == 1 else s for length, s in zip(shape, buffer.where.strides)]
                    exports.append(prod.export(buffer, versioned=versioned, strides=strides))
                    values.append(buffer.values())
                ref.check_exact(host(tcgemm.matmul(*(x.capsule() for x in exports))), *values, "float16")


@KINDS
@pytest.mark.parametrize("shapes", [((0, 4), (4, 4)), ((4, 0), (0, 4)), ((0, 0), (0, 0)), ((0, 4, 4), (4, 4))])
def test_empty_exports_are_deleted(versioned, shapes):
    """Data of an empty tensor is NULL; it is owned all the same."""
    for _ in range(100):
        exports = [
            prod.Export(
                None if 0 in s else ones(s).managed.dl_tensor.data, "float32", s, versioned=versioned, keep=ones(s)
            )
            for s in shapes
        ]
        exports = [x if 0 in s else ones(s, versioned=versioned) for x, s in zip(exports, shapes)]
        result = tcgemm.matmul(*(x.capsule() for x in exports))
        assert tuple(host(result).shape) == ref.result_shape(*shapes)
        assert (np.asarray(host(result)) == 0).all()
        del result
        assert [x.deleted for x in exports] == [1, 1]


def test_null_deleter():
    kept = ones(deleter=False)
    np.testing.assert_array_equal(host(tcgemm.matmul(kept.capsule(), identity())), np.ones((4, 4)))
    prod._live.clear()


@pytest.mark.parametrize("kind", ["legacy", "versioned", "always"])
def test_objects(rng, kind):
    a, b = (
        ref.operand(rng, "float32", ref.packed((5, 7))),
        ref.operand(rng, "float32", ref.layout("column", (7, 3), rng)),
    )
    sources = [prod.DLPackObject(lambda versioned, x=x: prod.export(x, versioned=versioned), kind) for x in (a, b)]
    ref.check_exact(host(tcgemm.matmul(*sources)), a.values(), b.values(), "float32")
    for source in sources:
        assert source.streams in (["not given"], [None])  # the host has no streams
        (export,) = source.settle()
        assert export.deleted == 1


@KINDS
def test_read_only_flag(rng, versioned):
    a = ref.operand(rng, "float32", ref.packed((4, 4)))
    if versioned:
        for flags in (prod.READ_ONLY, prod.IS_COPIED, prod.READ_ONLY | prod.IS_COPIED, 1 << 60):
            export = prod.export(a, versioned=True, flags=flags)
            ref.check_exact(host(tcgemm.matmul(export.capsule(), identity())), a.values(), np.eye(4), "float32")
        export = prod.export(a, versioned=True, flags=prod.READ_ONLY)
        before = a.bits.copy()
        refused(
            ValueError, "out", "read-only", call=lambda: tcgemm.matmul(identity(), identity(), out=export.capsule())
        )
        np.testing.assert_array_equal(a.bits, before)
        assert export.deleted == 1


def test_newer_minor_version_is_read():
    export = ones(versioned=True, version=(1, 99))
    np.testing.assert_array_equal(host(tcgemm.matmul(export.capsule(), identity())), np.ones((4, 4)))
    assert export.deleted == 1


def test_pinned_host_memory_is_host_memory():
    """kDLCUDAHost: the host path, without a driver."""
    export = ones(device=(prod.CUDA_HOST, 0))
    np.testing.assert_array_equal(host(tcgemm.matmul(export.capsule(), identity())), np.ones((4, 4)))


# ---- what must be refused, with every deleter called once ----------------------------------------------------------------


def refuse(error, *words, a, b=identity(), **keywords):
    """matmul of a (an Export) and b is refused; a's deleter has run once when the capsule is gone."""
    capsule = a.capsule()
    caught = refused(error, *words, call=lambda: tcgemm.matmul(capsule, b, **keywords))
    del capsule
    gc.collect()
    assert a.deleted == 1
    return caught


@KINDS
@pytest.mark.parametrize(
    "dtype",
    [
        (2, 64, 1),
        (0, 8, 1),
        (0, 16, 1),
        (1, 16, 1),
        (6, 8, 1),
        (5, 64, 1),
        (5, 32, 1),
        (12, 8, 1),
        (10, 8, 1),
        (17, 4, 1),
        (2, 16, 2),
        (2, 16, 0),
        (2, 8, 1),
        (2, 4, 1),
        (255, 16, 1),
        (3, 16, 1),
        (4, 32, 1),
        (4, 16, 4),
        (2, 128, 1),
        (2, 0, 1),
        (2, 32, 65535),
    ],
)
def test_unsupported_dtypes(versioned, dtype):
    refuse(TypeError, "a", *SUPPORTED, a=ones(versioned=versioned, dtype=dtype))


@pytest.mark.parametrize("version", [(0, 0), (0, 8), (2, 0), (2**32 - 1, 0)])
def test_other_major_versions(version):
    """On a major mismatch only the deleter may be called: the tensor is not looked at."""
    refuse(BufferError, "version", a=ones(versioned=True, version=version, shape=None, strides=None, ndim=2))


@KINDS
@pytest.mark.parametrize(
    "fields",
    [
        {"ndim": -1},
        {"ndim": -(2**31)},
        {"ndim": 2**31 - 1},
        {"ndim": 65},
        {"shape": None, "ndim": 2},
        {"shape": (-1, 4)},
        {"shape": (4, -(2**63))},
        {"shape": (2**62, 4)},
        {"shape": (2**32, 2**32, 4), "strides": None},
        {"shape": (2**40, 4), "strides": (2**40, 1)},
        {"shape": (4, 4), "strides": (2**62, 1)},
        {"shape": (4, 4), "strides": (1, -(2**63))},
        {"shape": (4, 4), "strides": (-(2**61), -(2**61))},
        {"data": None},
        {"byte_offset": 2**64 - 1},
        {"byte_offset": 2**63},
    ],
    ids=str,
)
def test_hostile_tensors(versioned, fields):
    refuse(ValueError, "a", a=ones(versioned=versioned, **fields))


@KINDS
def test_hostile_second_operand(versioned):
    first, second = ones(versioned=versioned), ones(versioned=versioned, data=None)
    refuse(ValueError, "b", a=first, b=second.capsule())
    assert second.deleted == 1


@pytest.mark.parametrize("device", [(0, 0), (4, 0), (7, 0), (8, 0), (10, 0), (12, 0), (14, 0), (99, 0), (-1, 0)])
def test_foreign_devices(device):
    refuse(ValueError, "a", "device", a=ones(device=device))


@KINDS
@pytest.mark.parametrize("shape", [(), (4, 5)])
def test_shapes_that_do_not_fit(versioned, shape):
    refuse(ValueError, a=ones(shape, versioned=versioned))


@KINDS
@pytest.mark.parametrize(
    "b, error",
    [
        (object(), TypeError),
        (None, TypeError),
        (3.0, TypeError),
        ([[1.0]], TypeError),
        (np.ones((4, 4)), TypeError),
        (np.ones((4, 4), np.float16), TypeError),
        (np.ones((4, 4), np.int8), TypeError),
        (np.ones((5, 4), np.float32), ValueError),
        (np.ones((2, 5, 4), np.float32), ValueError),
        (np.float32(1), (TypeError, ValueError)),
    ],
    ids=repr,
)
def test_first_operand_is_deleted_when_the_second_is_refused(versioned, b, error):
    refuse(error, a=ones(versioned=versioned), b=b)


@KINDS
@pytest.mark.parametrize(
    "keywords, error",
    [
        ({"out": 3}, TypeError),
        ({"out": np.ones((4, 4), np.float16)}, TypeError),
        ({"out": np.ones((4, 5), np.float32)}, ValueError),
        ({"out_dtype": "float64"}, (TypeError, ValueError)),
        ({"out_dtype": "float16"}, (TypeError, ValueError)),
        ({"batch_invariant": True}, ValueError),
        ({"stream": object()}, TypeError),
        ({"kernel": "none such"}, ValueError),
        ({"kernel": 3}, TypeError),
    ],
    ids=str,
)
def test_operands_are_deleted_when_an_option_is_refused(versioned, keywords, error):
    refuse(error, a=ones(versioned=versioned), **keywords)


@KINDS
def test_consumed_capsules(versioned):
    export = ones(versioned=versioned)
    capsule = export.capsule()
    tcgemm.matmul(capsule, identity())
    refused(ValueError, "a", "consumed", call=lambda: tcgemm.matmul(capsule, identity()))
    refused(ValueError, "b", "consumed", call=lambda: tcgemm.matmul(identity(), capsule))
    again = ones(versioned=versioned)
    twice = again.capsule()
    refused(ValueError, "consumed", call=lambda: tcgemm.matmul(twice, twice))
    del capsule, twice
    assert (export.deleted, again.deleted) == (1, 1)


def test_other_capsules():
    import datetime

    refused(TypeError, "a", "datetime", call=lambda: tcgemm.matmul(datetime.datetime_CAPI, identity()))


class Odd:
    """An object whose __dlpack__ and __dlpack_device__ do what they are told."""

    def __init__(self, dlpack, device=lambda: (prod.CPU, 0)):
        self.dlpack, self.device = dlpack, device

    def __dlpack__(self, **kwargs):
        return self.dlpack()

    def __dlpack_device__(self):
        return self.device()


class Mine(Exception):
    pass


def fail():
    raise Mine("from the producer")


@pytest.mark.parametrize(
    "odd, error",
    [
        (Odd(fail), Mine),
        (Odd(lambda: ones().capsule(), fail), Mine),
        (Odd(lambda: 3), TypeError),
        (Odd(lambda: None), TypeError),
        (Odd(lambda: ones().capsule(), lambda: 3), (TypeError, ValueError)),
        (Odd(lambda: ones().capsule(), lambda: ("cpu", 0)), (TypeError, ValueError)),
        (Odd(lambda: ones().capsule(), lambda: (1, 0, 0)), (TypeError, ValueError)),
        (Odd(lambda: ones().capsule(), lambda: (2**70, 0)), (TypeError, ValueError, OverflowError)),
    ],
    ids=range(8),
)
def test_producers_that_fail(odd, error):
    first = ones()
    capsule = first.capsule()
    for call in (lambda: tcgemm.matmul(odd, identity()), lambda: tcgemm.matmul(capsule, odd)):
        with pytest.raises(error):
            call()
    del capsule
    assert first.deleted == 1


def test_producer_that_gives_the_same_capsule_twice():
    export = ones()
    odd = Odd(lambda capsule=export.capsule(): capsule)
    tcgemm.matmul(odd, identity())
    refused(ValueError, "consumed", call=lambda: tcgemm.matmul(odd, identity()))
    assert export.deleted == 1


def test_type_error_of_a_producer_is_not_taken_for_an_old_one():
    """A producer is asked again without max_version after a TypeError; a second one is the caller's to see."""
    calls = []

    class Broken:
        def __dlpack_device__(self):
            return prod.CPU, 0

        def __dlpack__(self, **kwargs):
            calls.append(kwargs)
            raise TypeError("deep inside")

    refused(TypeError, "deep inside", call=lambda: tcgemm.matmul(Broken(), identity()))
    assert len(calls) <= 2


# ---- the C exchange API ------------------------------------------------------------------------------------------------


def exchanged(kind, rng, size, **fields):
    buffer = ref.operand(rng, "float32", ref.packed(size))
    return kind(lambda versioned: prod.export(buffer, versioned=versioned, **fields)), buffer.values()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"omit": ["dltensor_from_py_object_no_sync"]},
        {"omit": ["managed_tensor_from_py_object_no_sync"]},
        {"omit": ["managed_tensor_allocator"]},
        {"version": (1, 0)},
        {"version": (1, 77)},
        {"attribute": "__c_dlpack_exchange_api__", "as_int": True},
        {"attribute": "__c_dlpack_exchange_api__"},
        {"omit": ["current_work_stream"]},
    ],
    ids=str,
)
def test_exchange_api(rng, options):
    kind = prod.exchange_type(**options)
    a, a_values = exchanged(kind, rng, (5, 7))
    b, b_values = exchanged(kind, rng, (7, 3))
    result = tcgemm.matmul(a, b)
    assert kind.calls["borrow"] + kind.calls["from_object"] == 2
    found = np.array(result.owner.keep.array) if isinstance(result, kind) else host(result)
    ref.check_exact(found, a_values, b_values, "float32")
    for x in (a, b):
        for export in x.exports:
            assert export.deleted == (kind.calls["from_object"] > 0)


def test_exchange_api_of_another_major_version(rng):
    """Walks back to an API it knows; falls to other protocols, or to a TypeError, where there is none."""
    older = prod.exchange_type(version=(1, 0))
    kind = prod.exchange_type(version=(2, 0), previous=older.api)
    a, values = exchanged(kind, rng, (4, 4))
    older_calls = dict(older.calls)
    tcgemm.matmul(a, identity())
    assert older.calls != older_calls and not any(kind.calls.values())

    unknown = prod.exchange_type(version=(2, 0))
    a, values = exchanged(unknown, rng, (4, 4))
    refused(TypeError, "a", call=lambda: tcgemm.matmul(a, identity()))
    unknown.__dlpack_device__ = lambda self: (prod.CPU, 0)
    unknown.__dlpack__ = lambda self, **kwargs: self.make(versioned=True).capsule()
    assert not any(unknown.calls.values())


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"ndim": -1}, ValueError),
        ({"ndim": 65}, ValueError),
        ({"shape": (-1, 4)}, ValueError),
        ({"dtype": (2, 64, 1)}, TypeError),
        ({"data": None}, ValueError),
        ({"strides": (2**62, 1)}, ValueError),
    ],
    ids=str,
)
@pytest.mark.parametrize("omit", [[], ["dltensor_from_py_object_no_sync"]], ids=["borrowed", "owned"])
def test_hostile_exchange(rng, omit, fields, error):
    kind = prod.exchange_type(omit=omit)
    a, _ = exchanged(kind, rng, (4, 4), **fields)
    refused(error, "a", call=lambda: tcgemm.matmul(a, identity()))
    if omit:
        assert [x.deleted for x in a.exports] == [1] * len(a.exports)


def test_types_are_not_kept_alive_for_ever_or_forgotten_early(rng):
    """The table of types holds its types: a new type at an old one's address is not taken for it."""
    for i in range(300):
        if i % 2:
            kind = prod.exchange_type()
            a, _ = exchanged(kind, rng, (4, 4))
            tcgemm.matmul(a, identity())
        else:
            kind = type(
                "Plain",
                (),
                {"__dlpack_device__": lambda self: (prod.CPU, 0), "__dlpack__": lambda self, **kw: ones().capsule()},
            )
            np.testing.assert_array_equal(host(tcgemm.matmul(kind(), identity())), np.ones((4, 4)))
        del kind
        if i % 20 == 0:
            gc.collect()


# ---- torch's tensors that are no plain arrays ------------------------------------------------------------------------------


def test_torch_grad(torch):
    x = torch.ones(4, 4, requires_grad=True)
    y = torch.ones(4, 4)
    for call in (
        lambda: tcgemm.matmul(x, y),
        lambda: tcgemm.matmul(y, x),
        lambda: tcgemm.matmul(torch.nn.Parameter(y), y),
        lambda: tcgemm.matmul(y, y, out=x),
    ):
        refused((RuntimeError, ValueError), "requires_grad", "detach", call=call)
    with torch.no_grad():
        assert (tcgemm.matmul(x, y) == 4).all()
        assert (tcgemm.matmul(torch.nn.Parameter(y), y) == 4).all()
    with torch.inference_mode():
        assert (tcgemm.matmul(x, y) == 4).all()
    assert (tcgemm.matmul(x.detach(), y) == 4).all()


def test_torch_results(torch):
    """Whatever way they are allocated, as torch.matmul's are."""
    shapes = ((3, 4), (4, 5)), ((2, 3, 4), (4, 1)), ((0, 4), (4, 5)), ((3, 0), (0, 5)), ((4,), (4,))
    for shape_a, shape_b in (*shapes, ((0, 5, 4), (4, 3)), ((5, 0, 4), (4, 3)), ((2, 5, 4), (4, 0))):
        a, b = torch.ones(shape_a, dtype=torch.bfloat16), torch.ones(shape_b, dtype=torch.bfloat16)
        for out_dtype in (torch.bfloat16, torch.float32):
            result, expected = tcgemm.matmul(a, b, out_dtype=out_dtype), torch.matmul(a, b).to(out_dtype)
            assert type(result) is torch.Tensor and result.dtype == out_dtype and not result.requires_grad
            assert result.stride() == expected.stride() == a.new_empty(expected.shape).stride()
            assert torch.equal(result, expected)
            assert result.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
            assert result.untyped_storage().resizable() and not result.is_inference()
    with torch.inference_mode():
        assert tcgemm.matmul(torch.ones(2, 2), torch.ones(2, 2)).is_inference()


@pytest.mark.parametrize(
    "shape_a, shape_b",
    [
        ((0, 2**40, 1), (1, 2**40)),  # strides beyond 64 bits
        ((2**40, 0), (2**40, 0, 0)),  # a count that is, before the axis of size 0
        ((0, 2**31, 1), (1, 2**31)),  # what still fits
    ],
    ids=["strides", "count", "fits"],
)
def test_torch_huge_empty_results(torch, shape_a, shape_b):
    """As new_empty has it, which refuses sizes whose products overflow even where one of them is 0."""
    a, b = (torch.empty([min(size, 1) for size in shape]).expand(shape) for shape in (shape_a, shape_b))
    shape = ref.result_shape(shape_a, shape_b)
    assert 0 in shape
    try:
        expected = a.new_empty(shape)
    except RuntimeError as error:
        refused(RuntimeError, str(error).splitlines()[0], call=lambda: tcgemm.matmul(a, b))
    else:
        result = tcgemm.matmul(a, b)
        assert result.shape == expected.shape and result.stride() == expected.stride()


def test_torch_modes_see_the_result_made(torch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen, x = [], torch.ones(4, 4)
    with Watch():
        result = tcgemm.matmul(x, x)
    assert seen == ["aten.new_empty.default"] and (result == 4).all()


def test_torch_function_modes_see_the_result_made(torch):
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.new_empty:
                seen.append((args, kwargs))
            return function(*args, **(kwargs or {}))

    seen, x = [], torch.ones(4, 4)
    with Watch():
        x.new_empty((4, 4), dtype=torch.float32)
        result = tcgemm.matmul(x, x)
        with torch._C.DisableTorchFunction():
            tcgemm.matmul(x, x)
    tcgemm.matmul(x, x)
    assert len(seen) == 2 and (result == 4).all()
    assert seen[0][0][0] is seen[1][0][0] is x and seen[0][0][1:] == seen[1][0][1:] and seen[0][1] == seen[1][1]


def test_torch_default_device(torch):
    """A mode that puts the device into functions that name none: new_empty, which takes its tensor's, is not one."""

    class Mine(torch.Tensor):
        pass

    x = torch.ones(4, 4)
    with torch.device("meta"):
        assert torch.empty(1).device.type == "meta"
        expected, results = x.new_empty(4, 4), [tcgemm.matmul(a, x) for a in (x, x.as_subclass(Mine))]
    assert all(y.device == expected.device == x.device and (y == 4).all() for y in results)


@pytest.mark.parametrize(
    "missing", ["_dynamo.guards._empty_strided_cpu", "_len_torch_dispatch_stack", "_is_torch_function_mode_enabled"]
)
def test_torch_without_what_the_shorter_way_needs(torch, run_python, missing):
    run_python(f"""
        import torch, tcgemm
        del torch._C.{missing}
        x = torch.ones(3, 4)
        for _ in range(3):
            assert torch.equal(tcgemm.matmul(x, x.T), x @ x.T)
    """)


def test_torch_tensors_without_plain_memory(torch):
    y = torch.ones(4, 4)
    negative = torch.imag(torch.ones(4, 4, dtype=torch.complex64).conj())
    assert negative.is_neg()
    refused(
        (TypeError, ValueError, RuntimeError, BufferError), "a", "negative", call=lambda: tcgemm.matmul(negative, y)
    )
    refused((TypeError, ValueError, BufferError), "a", "meta", call=lambda: tcgemm.matmul(y.to("meta"), y))
    refused((TypeError, ValueError, BufferError), "a", call=lambda: tcgemm.matmul(y.to_sparse(), y))
    refused((TypeError, ValueError, BufferError), "b", call=lambda: tcgemm.matmul(y, y.to_sparse()))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(4, 4)
    refused((TypeError, ValueError, RuntimeError, BufferError), "a", call=lambda: tcgemm.matmul(fake, y))
    for transform in (torch.func.vmap, torch.func.grad):
        with pytest.raises((TypeError, ValueError, RuntimeError, BufferError)):
            transform(lambda x: tcgemm.matmul(x, y).sum())(torch.ones(3, 4, 4) if transform is torch.func.vmap else y)


@pytest.mark.parametrize("dtype", ["float64", "int8", "int32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"])
def test_torch_dtypes(torch, dtype):
    x = torch.ones(4, 4).to(getattr(torch, dtype))
    refused(TypeError, "a", dtype, *SUPPORTED, call=lambda: tcgemm.matmul(x, x))


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint16", "bool", "complex64", "S2", "V2", "O", "M8[s]", ">f2"])
def test_numpy_dtypes(dtype):
    x = np.zeros((4, 4), dtype)
    refused(TypeError, "a", *SUPPORTED, call=lambda: tcgemm.matmul(x, x))


def test_ml_dtypes_are_known_by_type_and_not_by_letter():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("float8_e4m3fn", "float8_e5m2", "int4", "float8_e8m0fnu"):
        x = np.ones((4, 4), getattr(ml_dtypes, name))
        refused(TypeError, "a", call=lambda: tcgemm.matmul(x, x))


def test_torch_subclass(torch):
    class Mine(torch.Tensor):
        pass

    x = torch.ones(4, 4).as_subclass(Mine)
    assert (tcgemm.matmul(x, x) == 4).all()


# ---- references --------------------------------------------------------------------------------------------------------


def test_reference_counts(torch):
    """Neither success nor any refusal leaves or takes a reference to an argument."""
    a, b, t = np.ones((4, 4), np.float32), np.ones((5, 4), np.float32), torch.ones(4, 4)
    name, odd = "no such kernel", Odd(fail)
    arguments = (a, b, t, name, odd)
    calls = [
        lambda: tcgemm.matmul(a, a),
        lambda: tcgemm.matmul(t, t),
        lambda: tcgemm.matmul(a, a, out=a),
        lambda: tcgemm.matmul(a, b),
        lambda: tcgemm.matmul(a, odd),
        lambda: tcgemm.matmul(t, odd),
        lambda: tcgemm.matmul(a, a, kernel=name),
        lambda: tcgemm.matmul(a, a, out=odd),
        lambda: tcgemm.matmul(a, None),
        lambda: tcgemm.matmul(a, a, out_dtype=np.float32),
        lambda: tcgemm.matmul(t, t, stream=odd),
    ]

    def run():
        for call in calls:
            for _ in range(20):
                try:
                    call()
                except Exception:
                    pass

    run()
    before = [sys.getrefcount(x) for x in arguments]
    run()
    assert [sys.getrefcount(x) for x in arguments] == before
