"""The host path: NumPy arrays and CPU tensors against float64 and torch, over every dtype, rank, layout and special value."""

import itertools

import numpy as np
import pytest
import reference as ref
from conftest import refused

import tcgemm

torch = pytest.importorskip("torch")
PAIRS = [(d, o) for d in ref.DTYPES for o in dict.fromkeys((d, "float32"))]
FRAMEWORKS = ("numpy", "torch")


def view(buffer, framework):
    if framework == "torch":
        return buffer.tensor
    if buffer.dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return buffer.array


def array(values, dtype, framework="numpy"):
    return view(ref.HostBuffer(dtype, ref.packed(np.shape(values)), values), framework)


def layouts(framework, out=False):
    return ref.layout_names(torch=framework == "torch", out=out)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype, out_dtype", PAIRS)
def test_random_products(rng, framework, dtype, out_dtype):
    for _ in range(150):
        shapes = ref.random_shapes(rng, 100)
        a, b = (ref.operand(rng, dtype, ref.layout(rng.choice(layouts(framework)), s, rng)) for s in shapes)
        result = tcgemm.matmul(view(a, framework), view(b, framework), out_dtype=out_dtype)
        assert isinstance(result, (np.ndarray, np.generic) if framework == "numpy" else torch.Tensor)
        ref.check_exact(result, a.values(), b.values(), out_dtype)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype, out_dtype", PAIRS)
def test_random_products_into_out(rng, framework, dtype, out_dtype):
    for _ in range(150):
        shapes = ref.random_shapes(rng, 60)
        a, b = (ref.operand(rng, dtype, ref.layout(rng.choice(layouts(framework)), s, rng)) for s in shapes)
        out = ref.HostBuffer(
            out_dtype, ref.layout(rng.choice(layouts(framework, out=True)), ref.result_shape(*shapes), rng)
        )
        target = view(out, framework)
        assert tcgemm.matmul(view(a, framework), view(b, framework), out=target, out_dtype=out_dtype) is target
        ref.check_exact(target, a.values(), b.values(), out_dtype)
        assert not len(out.spoiled())


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("side", ["a", "b", "out"])
def test_every_layout(rng, framework, side):
    for name in layouts(framework, out=side == "out"):
        for shapes in (((17, 23), (23, 9)), ((3, 17, 23), (3, 23, 9)), ((1, 23), (23, 1)), ((2, 3, 5, 1), (3, 1, 7))):
            names = {"a": "row", "b": "row", "out": "row", side: name}
            a, b = (ref.operand(rng, "float16", ref.layout(names[x], s, rng)) for x, s in zip("ab", shapes))
            out = ref.HostBuffer("float16", ref.layout(names["out"], ref.result_shape(*shapes), rng))
            tcgemm.matmul(view(a, framework), view(b, framework), out=view(out, framework))
            ref.check_exact(view(out, framework), a.values(), b.values(), "float16")
            assert not len(out.spoiled()), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 5), (5, 3)),
        ((4, 5), (5, 0)),
        ((0, 5), (5, 0)),
        ((4, 0), (0, 3)),
        ((0, 0), (0, 0)),
        ((0,), (0,)),
        ((0,), (0, 3)),
        ((4, 0), (0,)),
        ((5,), (5, 0)),
        ((0, 4, 5), (5, 3)),
        ((0, 4, 5), (0, 5, 3)),
        ((2, 4, 0), (2, 0, 3)),
        ((2, 1, 4, 0), (3, 0, 3)),
        ((1, 4, 5), (0, 5, 3)),
        ((1, 0), (0, 1)),
        ((3, 0, 5), (1, 5, 2)),
    ],
)
def test_zero_sizes(framework, shapes):
    a, b = np.ones(shapes[0]), np.ones(shapes[1])
    for dtype, out_dtype in PAIRS:
        operands = array(a, dtype, framework), array(b, dtype, framework)
        ref.check_exact(tcgemm.matmul(*operands, out_dtype=out_dtype), a, b, out_dtype)
        out = ref.HostBuffer(out_dtype, ref.packed(ref.result_shape(*shapes)))
        tcgemm.matmul(*operands, out=view(out, framework), out_dtype=out_dtype)
        ref.check_exact(view(out, framework), a, b, out_dtype)


def test_broadcasting_follows_numpy(rng):
    for batch_a, batch_b in itertools.product(
        [(), (1,), (3,), (2, 3), (2, 1), (1, 3), (4, 2, 3), (1, 1, 1)], repeat=2
    ):
        a, b = ref.integers(rng, (*batch_a, 4, 5)), ref.integers(rng, (*batch_b, 5, 6))
        try:
            expected = np.matmul(a, b)
        except ValueError:
            refused(
                ValueError, a.shape, b.shape, call=lambda: tcgemm.matmul(array(a, "float16"), array(b, "float16"))
            )
            continue
        result = tcgemm.matmul(array(a, "float16"), array(b, "float16"))
        np.testing.assert_array_equal(result.astype(np.float64), expected)


def test_many_batch_axes(rng):
    """More axes than a launch takes."""
    shape = (2, 1, 2, 1, 2, 1, 2, 1, 2, 3, 2)
    a, b = ref.integers(rng, (*shape, 3, 4)), ref.integers(rng, (*shape[::-1], 4, 5))
    ref.check_exact(tcgemm.matmul(array(a, "float16"), array(b, "float16")), a, b, "float16")


# ---- values ----------------------------------------------------------------------------------------------------------

INF, NAN = np.inf, np.nan
VALUES = [
    # dtype, out dtype, a (a row), b (a column), the product
    ("bfloat16", None, [1, 1], [1, 1.5 * 2**-8], 1.0078125),
    ("bfloat16", None, [1, 1], [1, 2**-8], 1.0),
    ("bfloat16", None, [1, 1], [1 + 2**-7, 2**-8], 1.015625),
    ("bfloat16", None, [-1, -1], [1, 1.5 * 2**-8], -1.0078125),
    ("bfloat16", None, [-1, -1], [1, 2**-8], -1.0),
    ("bfloat16", None, [NAN], [1], NAN),
    ("bfloat16", "float32", [1, 1], [1, 2**-8], 1 + 2**-8),
    ("float16", None, [1, 1], [1, 2**-11], 1.0),
    ("float16", None, [1, 1], [1 + 2**-10, 2**-11], 1 + 2**-9),
    ("float16", None, [1, 1], [1, 1.5 * 2**-11], 1 + 2**-10),
    ("float16", None, [2**-24], [1], 2**-24),
    ("float16", None, [2**-14], [2**-10], 2**-24),
    ("float16", None, [2**-24], [0.5], 0),
    ("float16", None, [2**-24], [0.75], 2**-24),
    ("float16", "float32", [2**-24], [2**-24], 2**-48),
    ("bfloat16", None, [2.0**-133], [1], 2.0**-133),
    ("bfloat16", None, [2.0**-100], [2.0**-33], 2.0**-133),
    ("bfloat16", "float32", [2.0**-100], [2.0**-49], 2.0**-149),
    ("float32", None, [2.0**-149], [1], 2.0**-149),
    ("float32", None, [2.0**-100], [2.0**-49], 2.0**-149),
    ("float32", None, [1024.5], [1], 1024.5),
    ("float32", None, [1 + 2**-11 + 2**-13], [1], 1 + 2**-11 + 2**-13),
    ("float32", None, [1, 1], [2**23, 1], 2**23 + 1),
    ("float16", None, [300], [300], INF),
    ("float16", None, [-300], [300], -INF),
    ("float16", "float32", [300], [300], 90000),
    ("float16", None, [65504, 1], [1, 15], 65504),
    ("float16", None, [65504, 1], [1, 16], INF),
    ("float16", None, [65504, 65504, -65504], [1, 1, 1], 65504),
    ("bfloat16", None, [2.0**127, 1], [2 - 2.0**-7, 2.0**119], INF),
    ("bfloat16", None, [2.0**127], [2], INF),
    ("float32", None, [2.0**127], [2], INF),
    ("float16", None, [INF], [0], NAN),
    ("float16", None, [0], [INF], NAN),
    ("float16", None, [INF, -INF], [1, 1], NAN),
    ("float16", None, [INF, 1], [1, 1], INF),
    ("float16", None, [INF], [-1], -INF),
    ("bfloat16", None, [INF], [0], NAN),
    ("float32", None, [INF], [0], NAN),
    ("float16", None, [NAN, 1], [0, 1], NAN),
    ("float16", None, [-0.0], [1], 0),
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype, out_dtype, a, b, expected", VALUES)
def test_values(framework, dtype, out_dtype, a, b, expected):
    # As one product, and in every row and column of a larger one.
    for m, n in ((1, 1), (5, 9)):
        rows = array(np.tile(a, (m, 1)), dtype, framework)
        columns = array(np.tile(np.reshape(b, (-1, 1)), (1, n)), dtype, framework)
        result = ref.float64(tcgemm.matmul(rows, columns, out_dtype=out_dtype))
        np.testing.assert_array_equal(result, np.full((m, n), expected, np.float64))


def test_nan_of_every_payload_stays_nan():
    """Rounding on the bits of a float turns 0x7FFFFFFF into a zero where NaN is not looked for."""
    for bits in (0x7FFF, 0x7F81, 0x7FC0, -1, -63):
        a = torch.full((3, 1), bits, dtype=torch.int16).view(torch.bfloat16)
        assert tcgemm.matmul(a, torch.ones(1, 2, dtype=torch.bfloat16)).isnan().all()


def test_special_values_in_random_places(rng):
    for dtype in ref.DTYPES:
        a, b = ref.integers(rng, (40, 30)), ref.integers(rng, (30, 50))
        for side in (a, b):
            for special in (INF, -INF, NAN):
                side[tuple(rng.integers(0, side.shape))] = special
        with np.errstate(invalid="ignore"):
            expected = (a[:, :, None] * b[None]).sum(1)
        result = tcgemm.matmul(array(a, dtype, "torch"), array(b, dtype, "torch"))
        np.testing.assert_array_equal(ref.float64(result), ref.from_bits(ref.to_bits(expected, dtype), dtype))


@pytest.mark.parametrize("content", [NAN, INF])
def test_old_content_of_out_never_matters(content):
    out = np.full((4, 4), content, np.float16)
    tcgemm.matmul(np.ones((4, 3), np.float16), np.ones((3, 4), np.float16), out=out)
    assert (out == 3).all()


@pytest.mark.parametrize("dtype, out_dtype", PAIRS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 129, 1000), (1, 50, 4096)])
def test_error_beside_torch(rng, dtype, out_dtype, shape):
    m, n, k = shape
    a, b = (ref.HostBuffer(dtype, ref.packed(s), rng.standard_normal(s)) for s in ((m, k), (k, n)))
    exact, scale = a.values() @ b.values(), abs(a.values()) @ abs(b.values())
    result = tcgemm.matmul(a.tensor, b.tensor, out_dtype=out_dtype)
    other = torch.matmul(a.tensor, b.tensor)
    if out_dtype != dtype:
        other = torch.matmul(a.tensor.float(), b.tensor.float())
    ref.check_no_worse(ref.float64(result), ref.float64(other), exact, scale)


def test_one_rounding(rng):
    """bfloat16 by way of float32 and no third format: the bits of the float32 product, rounded once."""
    a, b = (ref.HostBuffer("bfloat16", ref.packed(s), rng.standard_normal(s)) for s in ((64, 200), (200, 64)))
    wide = tcgemm.matmul(a.tensor, b.tensor, out_dtype=torch.float32)
    np.testing.assert_array_equal(
        ref.bits_of(tcgemm.matmul(a.tensor, b.tensor)), ref.to_bits(ref.float64(wide), "bfloat16")
    )


# ---- out and out_dtype -----------------------------------------------------------------------------------------------


def test_spellings_of_out_dtype():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    half, brain = np.ones((2, 3), np.float16), np.ones((2, 3), ml_dtypes.bfloat16)
    for spelling in ("float32", np.float32, np.dtype("float32"), torch.float32):
        assert tcgemm.matmul(half, half.T, out_dtype=spelling).dtype == np.float32
    for spelling in ("float16", np.float16, np.dtype("float16"), torch.float16, None):
        assert tcgemm.matmul(half, half.T, out_dtype=spelling).dtype == np.float16
    for spelling in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16):
        assert tcgemm.matmul(brain, brain.T, out_dtype=spelling).dtype == ml_dtypes.bfloat16


def test_frameworks_mix_on_the_host():
    a, b = np.full((2, 3), 2, np.float16), torch.ones(3, 4, dtype=torch.float16)
    assert isinstance(tcgemm.matmul(a, b), np.ndarray) and (tcgemm.matmul(a, b) == 6).all()
    assert isinstance(tcgemm.matmul(b.T, a.T), torch.Tensor) and (tcgemm.matmul(b.T, a.T) == 6).all()
    out = torch.empty(2, 4, dtype=torch.float16)
    assert tcgemm.matmul(a, b, out=out) is out and (out == 6).all()


def test_read_only_inputs_are_read(rng):
    a = ref.operand(rng, "float32", ref.packed((3, 4)))
    view = a.array
    view.flags.writeable = False
    ref.check_exact(tcgemm.matmul(view, view.T), a.values(), a.values().T, "float32")
    refused(
        ValueError,
        "out",
        "read-only",
        call=lambda: tcgemm.matmul(np.ones((3, 2), "f4"), np.ones((2, 4), "f4"), out=view),
    )
    np.testing.assert_array_equal(view, a.values())


def shares(*layouts):
    sets = [set(where.indices().ravel().tolist()) for where in layouts]
    return bool(sets[0] & sets[1])


def random_view(rng, shape, size, out=False):
    """A view of a buffer of `size` elements, of any strides, that fits in it; of an `out` also one that meets itself."""
    while True:
        strides = tuple(int(rng.integers(-9 if not out else 0, 10)) for _ in shape)
        where = ref.strided(shape, strides, margin=0)
        length = where.extent[1] - where.extent[0]
        if length <= size:
            return where._replace(offset=where.offset + int(rng.integers(0, size - length + 1)), size=size)


def test_out_may_share_memory_but_no_element(rng):
    """Overlap is decided exactly: against the elements themselves, over random views of one buffer."""
    met = {True: 0, False: 0}
    for _ in range(3000):
        m, n, k = (int(x) for x in rng.integers(1, 5, 3))
        buffer = ref.HostBuffer("float32", ref.packed((60,), margin=0), ref.integers(rng, (60,)))
        wheres = [random_view(rng, s, 60, out) for s, out in (((m, k), False), ((k, n), False), ((m, n), True))]
        a, b, out = (
            np.lib.stride_tricks.as_strided(buffer.array[w.offset :], w.shape, [4 * s for s in w.strides])
            for w in wheres
        )
        values = a.astype(np.float64) @ b.astype(np.float64)
        index = wheres[2].indices().ravel()
        meets = shares(wheres[0], wheres[2]) or shares(wheres[1], wheres[2]) or len(np.unique(index)) < len(index)
        before = buffer.bits.copy()
        met[meets] += 1
        if meets:
            with pytest.raises(ValueError, match="out"):
                tcgemm.matmul(a, b, out=out)
            np.testing.assert_array_equal(buffer.bits, before)
        else:
            tcgemm.matmul(a, b, out=out)
            np.testing.assert_array_equal(out, values)
    assert min(met.values()) > 200, met


def test_inputs_may_be_the_same_array(rng):
    x = ref.operand(rng, "float16", ref.packed((20, 20)))
    ref.check_exact(tcgemm.matmul(x.array, x.array), x.values(), x.values(), "float16")
    ref.check_exact(tcgemm.matmul(x.tensor, x.tensor.t()), x.values(), x.values().T, "float16")


def test_subclasses_and_memory_maps(tmp_path):
    class Mine(np.ndarray):
        pass

    a = np.full((3, 3), 2, np.float32).view(Mine)
    assert (tcgemm.matmul(a, a) == 12).all()
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(3, 3))
    mapped[:] = 2
    assert (tcgemm.matmul(mapped, a) == 12).all()


def test_big_endian_and_unaligned_arrays():
    big = np.ones((3, 3), ">f4")
    refused(TypeError, "a", call=lambda: tcgemm.matmul(big, big))
    raw = np.zeros(4 * 9 + 1, np.uint8)
    unaligned = raw[1:].view(np.float32).reshape(3, 3)
    unaligned[:] = 2
    assert (tcgemm.matmul(unaligned, unaligned) == 12).all()
    tcgemm.matmul(np.ones((3, 3), "f4"), np.ones((3, 3), "f4"), out=unaligned)
    assert (unaligned == 3).all()
