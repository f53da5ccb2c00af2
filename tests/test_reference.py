"""The checks themselves: each oracle, guard and producer catches a planted fault."""

import ctypes as ct
import gc

import numpy as np
import producers as prod
import pytest
import reference as ref


@pytest.mark.parametrize("dtype", ref.DTYPES)
def test_exact_check_catches_one_wrong_element(rng, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("torch")
    a, b = ref.integers(rng, (37, 41)), ref.integers(rng, (41, 29))
    buffer = ref.HostBuffer(dtype, ref.packed((37, 29)), a @ b)
    view = buffer.tensor if dtype == "bfloat16" else buffer.array
    if dtype == "bfloat16":
        pytest.importorskip("torch")
    ref.check_exact(view, a, b, dtype)
    for wrong in (1, 0x8000 if buffer.bits.itemsize == 2 else 0x80000000):
        at = next(i for i in range(ref.MARGIN, buffer.bits.size) if buffer.values().ravel()[i - ref.MARGIN] != 0)
        buffer.bits[at] ^= wrong
        with pytest.raises(AssertionError, match="elements wrong"):
            ref.check_exact(view, a, b, dtype)
        buffer.bits[at] ^= wrong
    buffer.bits[ref.MARGIN] = ref.POISON[dtype]
    with pytest.raises(AssertionError, match="elements wrong"):
        ref.check_exact(view, a, b, dtype)


def test_exact_check_catches_a_lost_tail_of_k(rng):
    a, b = ref.integers(rng, (64, 40)), ref.integers(rng, (40, 64))
    with pytest.raises(AssertionError, match="elements wrong"):
        ref.check_exact((a[:, :32] @ b[:32]).astype(np.float16), a, b, "float16")


def test_exact_check_catches_shape_and_dtype():
    a, b = np.ones((2, 3)), np.ones((3, 4))
    with pytest.raises(AssertionError, match="dtype"):
        ref.check_exact((a @ b).astype(np.float32), a, b, "float16")
    with pytest.raises(AssertionError, match="shape"):
        ref.check_exact((a @ b).astype(np.float16)[:1], a, b, "float16")


def test_guard_catches_a_write_outside(rng):
    for name in ref.PLAIN_LAYOUTS:
        buffer = ref.HostBuffer("float16", ref.layout(name, (5, 8), rng))
        buffer.bits[buffer.where.indices()] = 0
        assert not len(buffer.spoiled()), name
        first, last = buffer.where.extent
        for at in (0, first - 1, last, buffer.where.size - 1):
            buffer.bits[at] ^= 1
            assert list(buffer.spoiled()) == [at], name
            buffer.bits[at] ^= 1


def test_guard_catches_a_read_outside(rng):
    where = ref.layout("row_padded", (5, 8), rng)
    buffer = ref.operand(rng, "float32", where)
    assert np.isfinite(buffer.values()).all()
    wider = where._replace(shape=(5, 9))
    assert np.isnan(ref.from_bits(buffer.bits[wider.indices()], "float32")[:, 8]).all()


@pytest.mark.parametrize("name", ref.LAYOUTS)
def test_layouts_read_back(rng, name):
    for shape in ((5, 8), (2, 3, 4), (2, 1, 3, 4), (1, 1), (0, 4), (4, 0), (7,)):
        where = ref.layout(name, shape, rng)
        assert where.shape == shape
        first, last = where.extent
        assert ref.MARGIN <= first <= last <= where.size - ref.MARGIN
        buffer = ref.operand(rng, "float16", where)
        assert buffer.array.shape == shape
        np.testing.assert_array_equal(buffer.array.astype(np.float64), buffer.values())
        assert not len(buffer.spoiled())
        if name not in ref.OVERLAPPING_LAYOUTS:
            assert not ref.overlapping(where) and len(np.unique(where.indices())) == np.prod(shape)
        elif shape == (2, 3, 4):
            assert ref.overlapping(where)


def test_samplers_reach_the_edges(rng):
    shapes = [ref.random_shapes(rng) for _ in range(2000)]
    products = [ref.result_shape(*pair) for pair in shapes]
    assert {len(p) for p in products} >= {0, 1, 2, 3, 4, 5}
    lengths = {n for pair in shapes for side in pair for n in side}
    assert {1, 15, 16, 17, 63, 64, 65, 255, 256, 257} <= lengths and max(lengths) == 300
    for a, b in shapes[:300]:
        if np.prod(a, dtype=int) * np.prod(b, dtype=int) < 1e6:
            assert np.matmul(np.zeros(a), np.zeros(b)).shape == ref.result_shape(a, b)


def test_rounding_to_bfloat16_is_to_nearest_even(torch, rng):
    values = np.concatenate(
        [
            rng.standard_normal(2000) * 10.0 ** rng.integers(-44, 39, 2000),
            [
                0.0,
                -0.0,
                np.inf,
                -np.inf,
                np.nan,
                2.0**-133,
                2.0**-134,
                1.5 * 2.0**-134,
                3.3895314e38,
                3.4e38,
                1 + 2.0**-8,
                1 + 3 * 2.0**-8,
            ],
        ]
    ).astype(np.float32)
    ours = ref.to_bits(values.astype(np.float64), "bfloat16")
    theirs = ref.bits_of(torch.from_numpy(values).to(torch.bfloat16))
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(ref.from_bits(ours[nan], "bfloat16")).all()
    one = ref.to_bits(np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8]), "bfloat16")
    assert list(one) == [0x3F80, 0x3F82]  # ties go to the even neighbour


def test_error_check_catches_a_worse_result(rng):
    a, b = rng.standard_normal((32, 64)), rng.standard_normal((64, 32))
    exact, scale = a @ b, abs(a) @ abs(b)
    good = exact.astype(np.float16).astype(np.float64)
    ref.check_no_worse(good, good, exact, scale)
    with pytest.raises(AssertionError, match="largest error"):
        ref.check_no_worse(exact + 2.5 * (good - exact), good, exact, scale)
    with pytest.raises(AssertionError, match="rms error"):
        ref.check_no_worse(exact + ref.errors(good, exact, scale)[0] * scale, good, exact, scale)
    with pytest.raises(AssertionError, match="largest error"):
        spoiled = good.copy()
        spoiled[3, 4] += 1
        ref.check_no_worse(spoiled, good, exact, scale)
    with pytest.raises(AssertionError):
        ref.check_no_worse(good * np.nan, good, exact, scale)


def test_device_buffers_agree_with_host_buffers(torch, rng):
    for name in ref.layout_names():
        for shape in ((5, 8), (2, 3, 4), (7,), (0, 4)):
            where = ref.layout(name, shape, rng)
            values = ref.integers(rng, shape)
            host = ref.HostBuffer("bfloat16", where, values)
            device = ref.DeviceBuffer("bfloat16", where, torch.from_numpy(values), device="cpu")
            if not ref.overlapping(where):
                np.testing.assert_array_equal(host.bits, ref.bits_of(device.bits.view(torch.bfloat16)), name)
            np.testing.assert_array_equal(host.tensor.double().numpy(), host.values())
            assert int(device.spoiled()) == 0
            for at in (0, where.extent[0] - 1, where.extent[1], where.size - 1):
                device.bits[at] ^= 1
                assert int(device.spoiled()) == 1
                device.bits[at] ^= 1


def test_device_check_catches_planted_faults(torch):
    a, b = (ref.torch_operand("float16", ref.packed(s), device="cpu").tensor for s in ((17, 23), (23, 9)))
    result = ref.torch_exact(a, b, "float16")
    ref.torch_check(result, a, b)
    result[3, 4] += 1
    with pytest.raises(AssertionError, match="1 of 153 elements wrong"):
        ref.torch_check(result, a, b)
    result[3, 4] = float("nan")
    assert int(ref.torch_wrong(result, a, b, "float16")) == 1
    tally = ref.Tally(limit=3)
    tally.add("good", torch.zeros((), dtype=torch.int64))
    tally.add("bad", ref.torch_wrong(result, a, b, "float16"))
    with pytest.raises(AssertionError, match="1 of 2 cases wrong\nbad: 1"):
        tally.read()
    tally.read()


# ---- producers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [False, True])
def test_deleter_counts(rng, versioned):
    export = prod.export(ref.operand(rng, "float32", ref.packed((3, 4))), versioned=versioned)
    capsule = export.capsule()
    assert prod.capsule_name(capsule) == ("dltensor_versioned" if versioned else "dltensor")
    assert export.deleted == 0
    del capsule
    assert export.deleted == 1 and not prod.stray
    ct.CFUNCTYPE(None, ct.c_void_p)(export.managed.deleter)(export.address)
    assert export.deleted == 1 and prod.stray == [export.address]
    prod.stray.clear()


@pytest.mark.parametrize("kind", ["legacy", "versioned", "always"])
def test_numpy_reads_our_producers(rng, kind):
    """NumPy's consumer, which is not ours, agrees on what the capsules say and deletes them once."""
    buffer = ref.operand(rng, "float32", ref.layout("column_padded", (3, 4), rng))
    source = prod.DLPackObject(lambda versioned: prod.export(buffer, versioned=versioned), kind)
    array = np.from_dlpack(source)
    np.testing.assert_array_equal(array, buffer.values())
    (export,) = source.settle()
    assert export.deleted == 0
    del array
    gc.collect()
    assert export.deleted == 1 and not prod.stray


def test_torch_reads_our_producers(torch, rng):
    buffer = ref.operand(rng, "bfloat16", ref.layout("row_padded", (3, 4), rng))
    export = prod.export(buffer, data=buffer.bits.ctypes.data, byte_offset=2 * buffer.where.offset)
    tensor = torch.from_dlpack(export.capsule())
    np.testing.assert_array_equal(tensor.double().numpy(), buffer.values())
    del tensor
    assert export.deleted == 1 and not prod.stray


def test_exchange_type_is_what_torch_offers(torch):
    """The same attribute, capsule name and field order as torch's own API."""
    capsule = type(torch.empty(0)).__dlpack_c_exchange_api__
    pointer = ct.pythonapi.PyCapsule_GetPointer(capsule, b"dlpack_exchange_api")
    theirs = ct.cast(pointer, ct.POINTER(prod.DLPackExchangeAPI)).contents
    assert theirs.version.major == 1
    view = prod.DLTensor()
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).t()
    borrow = ct.PYFUNCTYPE(ct.c_int, ct.py_object, ct.POINTER(prod.DLTensor))(theirs.dltensor_from_py_object_no_sync)
    assert borrow(tensor, ct.byref(view)) == 0
    assert (view.data, view.ndim, view.shape[0], view.strides[0], view.strides[1]) == (tensor.data_ptr(), 2, 3, 1, 3)
