"""Products on the device, bit for bit: random shapes and strides, every tail, alignment and layout, guarded on all sides."""

import itertools

import pytest
import reference as ref

import tcgemm

pytestmark = pytest.mark.gpu

PAIRS = [(d, o) for d in ref.DTYPES for o in dict.fromkeys((d, "float32"))]


def check(tally, label, a, b, out=None, out_dtype=None, **keywords):
    """One product of DeviceBuffers, into a DeviceBuffer where there is one, counted into the tally."""
    out_dtype = out_dtype or a.dtype
    if out is None:
        result = tcgemm.matmul(a.tensor, b.tensor, out_dtype=out_dtype, **keywords)
    else:
        result = tcgemm.matmul(a.tensor, b.tensor, out=out.tensor, out_dtype=out_dtype, **keywords)
        assert result is out.tensor
        tally.add(f"{label}, written outside of out {out.where}", out.spoiled())
    tally.add(
        f"{label}: {a.where.shape} {a.where.strides} @ {b.where.shape} {b.where.strides}",
        ref.torch_wrong(result, a.tensor, b.tensor, out_dtype),
    )


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("dtype, out_dtype", PAIRS)
def test_random(rng, dtype, out_dtype, part):
    """5,000 in all: shapes of any rank, 1..300, both operands in any layout, half of the results in a strided `out`."""
    tally = ref.Tally()
    for _ in range(200):
        shapes = ref.random_shapes(rng)
        a, b = ref.torch_pair(rng, dtype, *shapes, rng.choice(ref.layout_names(), 2))
        out = None
        if rng.random() < 0.5:
            out = ref.DeviceBuffer(
                out_dtype, ref.layout(rng.choice(ref.layout_names(out=True)), ref.result_shape(*shapes), rng)
            )
        check(tally, "random", a, b, out, out_dtype)
    tally.read()
    assert tally.cases >= 200


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("order", ref.ORDERS)
def test_tails_of_k(rng, dtype, order):
    """A loop that floor-divides K loses its tail (tile-ai/tilelang#2381); one with several K tiles and a tail, another way."""
    tally = ref.Tally()
    for k in (*range(1, 81), 96, 104, 127, 128, 129, 136, 200, 255, 257, 1000):
        for m, n in ((1, 1), (17, 17), (64, 64), (64, 128)):
            for names in (ref.ORDERS[order], ref.ALIGNED_ORDERS[order]):
                check(tally, "K tail", *ref.torch_pair(rng, dtype, (m, k), (k, n), names))
    tally.read()


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize("order", ref.ORDERS)
def test_tails_of_m_and_n(rng, dtype, order):
    """The last row and column of tiles, with one row past `out` guarded (TileOPs#428: a store past N)."""
    tally = ref.Tally()
    sizes = (1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257)
    for m, n in itertools.product(sizes, sizes):
        if rng.random() < 0.5:
            k = int(rng.choice([8, 64, 72, 33]))
            names = (ref.ORDERS if rng.random() < 0.5 else ref.ALIGNED_ORDERS)[order]
            check(
                tally,
                "M and N tail",
                *ref.torch_pair(rng, dtype, (m, k), (k, n), names),
                ref.DeviceBuffer(dtype, ref.packed((m, n))),
            )
    for n in (1, 3, 65, 127, 129, 1000):
        check(
            tally,
            "row",
            *ref.torch_pair(rng, dtype, (1, 64), (64, n), ref.ORDERS[order]),
            ref.DeviceBuffer(dtype, ref.packed((1, n))),
        )
    tally.read()


@pytest.mark.parametrize("dtype", ref.DTYPES)
def test_small(rng, dtype):
    """A grid by floor division launches no block (JuliaGPU/GemmKernels.jl#97)."""
    tally = ref.Tally()
    for n in range(1, 17):
        check(tally, "cube", *ref.torch_pair(rng, dtype, (n, n), (n, n)))
    for m, n in itertools.product((1, 64, 576), (8, 16, 24, 32)):
        check(tally, "narrow", *ref.torch_pair(rng, dtype, (m, 7168), (7168, n), ref.ORDERS["nt"]))
    tally.read()


@pytest.mark.parametrize("order", ref.ORDERS)
@pytest.mark.parametrize(
    "shape",
    [(512, 1024, 147456), (1538, 256, 2048), (16, 64, 65536), (1, 8, 300001), (4096, 4096, 64), (1408, 1408, 512)],
)
def test_long_and_wide(rng, shape, order):
    """Long K (DeepGEMM#110), and split K between guards: partial sums belong in no user's memory (cutlass#3538)."""
    m, n, k = shape
    tally = ref.Tally()
    for names in (ref.ORDERS[order], ref.ALIGNED_ORDERS[order]):
        check(
            tally,
            "long",
            *ref.torch_pair(rng, "bfloat16", (m, k), (k, n), names),
            ref.DeviceBuffer("bfloat16", ref.packed((m, n))),
        )
    tally.read()


def test_odd_counts_of_tiles(rng):
    """Clusters and persistent grids pair tiles up: odd counts in M, in N, in both, and one (DeepGEMM PR#415)."""
    tally = ref.Tally()
    for m, n, k in itertools.product((64, 128, 192, 384), (72, 128, 384, 3072), (64, 128, 4096)):
        check(tally, "tiles", *ref.torch_pair(rng, "bfloat16", (m, k), (k, n), ref.ORDERS["nt"]))
    tally.read()


# ---- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["a", "b", "out"])
@pytest.mark.parametrize("dtype", ref.DTYPES)
def test_every_layout(rng, dtype, side):
    """Each layout on each side beside every order of the others, matrices and batches."""
    tally = ref.Tally()
    for name in ref.layout_names(out=side == "out"):
        for order, (m, n, k) in itertools.product(
            ref.ORDERS, ((64, 72, 128), (65, 33, 40), (1, 40, 24), (40, 1, 24), (7, 5, 1), (200, 136, 72))
        ):
            names = dict(zip("ab", ref.ORDERS[order]), out="row")
            names[side] = name
            for batch in ((), (3,), (2, 3)):
                a, b = ref.torch_pair(rng, dtype, (*batch, m, k), (*batch, k, n), (names["a"], names["b"]))
                check(
                    tally,
                    f"{name} {side} {order}",
                    a,
                    b,
                    ref.DeviceBuffer(dtype, ref.layout(names["out"], (*batch, m, n), rng)),
                )
    tally.read()


@pytest.mark.parametrize("sides", ["a", "b", "out", "a b out"])
def test_views_of_wider_buffers(rng, sides):
    """Leading dimensions are the strides', not the shape's (vllm#55534)."""
    tally = ref.Tally()
    for dtype in ref.HALVES:
        for pad in (512, 8, 4, 1):
            for transposed in (False, True):
                wheres = {}
                for side in ("a", "b", "out"):
                    order = [1, 0] if transposed else [0, 1]
                    wheres[side] = ref.packed(
                        (512, 512), order, pads={order[1]: pad} if side in sides.split() else None
                    )
                a, b = (ref.torch_operand(dtype, wheres[s]) for s in "ab")
                check(tally, f"pad {pad}", a, b, ref.DeviceBuffer(dtype, wheres["out"]))
        a = ref.torch_operand(dtype, ref.packed((512, 512), pads={1: 1024 + 512}))  # big[::2, :512]
        b = ref.torch_operand(dtype, ref.packed((512, 512), [1, 0], pads={0: 512}))  # big[:, 256:768].T
        check(tally, "sliced", a, b)
    tally.read()


@pytest.mark.parametrize("dtype", ref.HALVES)
def test_strides_and_bases_off_16_bytes(rng, dtype):
    """TMA takes neither (FlagGems#2489); every such layout must take another way."""
    tally = ref.Tally()
    for pad in range(1, 9):
        a = ref.torch_operand(dtype, ref.packed((64, 64), pads={1: pad}))
        b = ref.torch_operand(dtype, ref.packed((64, 64), [1, 0], pads={0: pad}))
        check(tally, f"stride 64+{pad}", a, b)
    for shift in range(1, 9):
        for a_shift, b_shift, out_shift in ((shift, 0, 0), (0, shift, 0), (0, 0, shift), (shift, shift, shift)):
            a, b = (ref.torch_operand(dtype, ref.packed((256, 256), shift=s)) for s in (a_shift, b_shift))
            check(tally, f"base +{shift}", a, b, ref.DeviceBuffer(dtype, ref.packed((256, 256), shift=out_shift)))
    for m in (1, 7, 36, 100):
        a = ref.torch_operand(dtype, ref.packed((m, 64), [1, 0]))  # the stride that counts is M, not K
        for n in (1, 7, 64, 470):
            check(tally, f"x.t() of (64, {m})", a, ref.torch_operand(dtype, ref.packed((64, n))))
    tally.read()


@pytest.mark.parametrize("side", ["a", "b", "out"])
def test_large_operands_off_alignment(rng, side):
    """2048 x 2048 starting 1..8 elements into its buffer (pytorch#141749)."""
    tally = ref.Tally()
    for shift in range(1, 9):
        shifts = {"a": 0, "b": 0, "out": 0, side: shift}
        a, b = (ref.torch_operand("float16", ref.packed((2048, 2048), shift=shifts[s])) for s in "ab")
        check(
            tally,
            f"{side} +{shift}",
            a,
            b,
            ref.DeviceBuffer("float16", ref.packed((2048, 2048), shift=shifts["out"])),
        )
    tally.read()


def test_strides_of_length_1_axes_mean_nothing(rng):
    """torch rewrites them on export, or does not, by release (pytorch#99803)."""
    tally = ref.Tally()
    for dtype in ref.DTYPES:
        for a_strides, b_strides in itertools.product(
            [(4096, 1), (1, 1), (7, 1), (0, 1)], [(1, 1), (1, 4096), (1, 99), (1, 0)]
        ):
            a = ref.torch_operand(dtype, ref.strided((1, 4096), a_strides))
            b = ref.torch_operand(dtype, ref.strided((4096, 1), b_strides))
            check(tally, "vectors", a, b, ref.DeviceBuffer(dtype, ref.packed((1, 1))))
        for m, n, k in itertools.product((1, 40), repeat=3):
            for names in itertools.product(("row", "column", "length_1_strides"), repeat=2):
                check(
                    tally,
                    "length 1",
                    *ref.torch_pair(rng, dtype, (m, k), (k, n), names),
                    ref.DeviceBuffer(dtype, ref.layout("length_1_strides", (m, n), rng)),
                )
    tally.read()


def test_row_ends_of_out(rng):
    """A store of 16 bytes overruns a row that is no multiple of them (triton#11583)."""
    tally = ref.Tally()
    for dtype, out_dtype in PAIRS:
        for n in range(464, 473):
            for m, k in ((64, 64), (1, 64), (130, 24)):
                a, b = ref.torch_pair(rng, dtype, (m, k), (k, n), ref.ORDERS["nt"])
                check(
                    tally,
                    f"N={n}",
                    a,
                    b,
                    ref.DeviceBuffer(out_dtype, ref.packed((m, n), pads={1: 512 - n})),
                    out_dtype,
                )
                check(tally, f"N={n} packed", a, b, ref.DeviceBuffer(out_dtype, ref.packed((m, n))), out_dtype)
    tally.read()


def test_transposed_matrix_by_vector(rng):
    """MatX#142."""
    tally = ref.Tally()
    for dtype in ref.DTYPES:
        for m, k in ((1000, 300), (300, 1000), (1001, 301), (5, 4096)):
            for name in ("column", "row", "column_padded", "column_shifted"):
                check(tally, "matrix @ column", *ref.torch_pair(rng, dtype, (m, k), (k, 1), (name, "row")))
                check(tally, "row @ matrix", *ref.torch_pair(rng, dtype, (1, k), (k, m), ("row", name)))
                check(tally, "matrix @ vector", *ref.torch_pair(rng, dtype, (m, k), (k,), (name, "stepped")))
                check(tally, "vector @ matrix", *ref.torch_pair(rng, dtype, (k,), (k, m), ("stepped", name)))
                check(tally, "vector @ vector", *ref.torch_pair(rng, dtype, (k,), (k,), ("stepped", "shifted")))
    tally.read()


def test_windows_and_expanded_operands(rng):
    """Strides under the row length, and of zero (pytorch#42418)."""
    tally = ref.Tally()
    for dtype in ref.DTYPES:
        for strides in ((1, 1), (2, 1), (1, 2), (0, 1), (1, 0), (0, 0), (8, 1), (1, 8)):
            for m, n, k in ((64, 16, 128), (65, 17, 33), (256, 256, 256)):
                a = ref.torch_operand(dtype, ref.strided((m, k), strides))
                b = ref.torch_operand(dtype, ref.strided((k, n), strides))
                check(tally, f"{strides} as a", a, ref.torch_operand(dtype, ref.packed((k, n))))
                check(tally, f"{strides} as b", ref.torch_operand(dtype, ref.packed((m, k))), b)
    tally.read()


# ---- sizes of zero, batches --------------------------------------------------------------------------------------------


def test_measured_shapes_with_operands_that_no_tensor_map_describes(torch):
    """A shape for which csrc/cuda/tuned.def names a wgmma row, with rows that overlap or are one and the same."""
    w = torch.randint(-2, 3, (4096, 4096), device="cuda").to(torch.float16)
    values = torch.randint(-2, 3, (16 * 4096,), device="cuda").to(torch.float16)
    for x in (
        values[:4096].expand(16, 4096),
        values.as_strided((16, 4096), (8, 1)),
        values.as_strided((16, 4096), (4088, 1)),
    ):
        for a, b in ((x, w.T), (x, w)):
            assert torch.equal(tcgemm.matmul(a, b), (a.double() @ b.double()).half())


def test_zero_sizes(torch):
    from test_host import test_zero_sizes as host_test

    (shapes,) = [mark.args[1] for mark in host_test.pytestmark if mark.args[0] == "shapes"]
    for (a_shape, b_shape), (dtype, out_dtype) in itertools.product(shapes, PAIRS):
        a, b = (torch.ones(s, dtype=ref.torch_dtype(dtype), device=ref.DEVICE) for s in (a_shape, b_shape))
        ref.torch_check(tcgemm.matmul(a, b, out_dtype=out_dtype), a, b, out_dtype)
        out = ref.DeviceBuffer(out_dtype, ref.packed(ref.result_shape(a_shape, b_shape)))
        tcgemm.matmul(a, b, out=out.tensor, out_dtype=out_dtype)
        ref.torch_check(out.tensor, a, b, out_dtype)
        assert int(out.spoiled()) == 0


@pytest.mark.parametrize("batch", [65535, 65536, 65537, 131073])
def test_batches_past_a_grid_axis(rng, batch):
    """gridDim.y and .z end at 65535 (pytorch#25241, mlx#3858)."""
    tally = ref.Tally()
    for dtype in ref.DTYPES:
        check(tally, "matrices", *ref.torch_pair(rng, dtype, (batch, 16, 16), (batch, 16, 16)))
        check(tally, "vectors", *ref.torch_pair(rng, dtype, (batch, 16, 4), (batch, 4, 1)))
        check(tally, "broadcast", *ref.torch_pair(rng, dtype, (batch, 3, 8), (8, 5)))
    tally.read()


def test_broadcast_batches(rng):
    tally = ref.Tally()
    for a_batch, b_batch in itertools.product(
        [(), (1,), (3,), (2, 3), (2, 1), (1, 3), (4, 2, 3), (1, 1, 1), (4, 1, 1)], repeat=2
    ):
        if any(x != y and 1 not in (x, y) for x, y in zip(reversed(a_batch), reversed(b_batch))):
            continue
        for dtype, names in itertools.product(
            ref.DTYPES, (("row", "row"), ("batch_inside", "batch_innermost"), ("expanded_batch", "column"))
        ):
            a, b = ref.torch_pair(rng, dtype, (*a_batch, 33, 40), (*b_batch, 40, 24), names)
            check(
                tally,
                f"{a_batch} {b_batch}",
                a,
                b,
                ref.DeviceBuffer(dtype, ref.layout("any_order", ref.result_shape(a.where.shape, b.where.shape), rng)),
            )
    tally.read()


def test_more_batch_axes_than_a_launch_takes(rng):
    tally = ref.Tally()
    shape = (2, 1, 2, 1, 2, 1, 2, 1, 2, 3, 2)
    for names in (("row", "row"), ("any_order", "any_order"), ("batch_innermost", "expanded_batch")):
        check(tally, "11 axes", *ref.torch_pair(rng, "float16", (*shape, 5, 8), (*shape[::-1], 8, 3), names))
    tally.read()


# ---- large -------------------------------------------------------------------------------------------------------------

LARGE = {
    "outputs past 2^31": ("float16", (46341, 16), (16, 46341), None),
    "outputs past 2^32": ("bfloat16", (65536, 16), (16, 65552), None),
    "outputs past 2^31, fp32": ("float32", (46341, 5), (5, 46341), None),
    "operand past 2^31": ("float16", (131073, 16384), (16384, 8), None),
    "right operand past 2^31": ("float16", (8, 16384), (16384, 131073), None),
    "stride 2^30": ("float16", (4, 64), (64, 8), (2**30, 1)),
    "column stride 2^27": ("float16", (4, 24), (24, 8), (1, 2**27)),
    "batch past 2^31": ("float16", (33000, 256, 16), (33000, 16, 256), None),
}


@pytest.mark.parametrize("name", LARGE)
def test_past_32_bits(run_python, torch, name):
    """Addresses of more than 32 bits, each in its own process: a wrong one spoils the context (comfy-kitchen#136)."""
    dtype, a_shape, b_shape, a_strides = LARGE[name]
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * 2**30:
        pytest.skip(f"needs 24 GiB of free memory, there are {free >> 30}")
    run_python(
        f"""
        import torch, tcgemm, reference as ref
        torch.manual_seed(1)
        a_where = ref.strided({a_shape}, {a_strides}) if {a_strides} else ref.packed({a_shape})
        if {a_strides}:
            buffer = torch.full((a_where.size,), float("nan"), dtype=torch.{dtype}, device="cuda")
            a = buffer.as_strided(a_where.shape, a_where.strides, a_where.offset)
            a.copy_(ref.torch_integers({a_shape}, {dtype!r}))
        else:
            a = ref.torch_integers({a_shape}, {dtype!r})
        b = ref.torch_integers({b_shape}, {dtype!r})
        result = tcgemm.matmul(a, b)
        assert result.dtype == torch.{dtype}
        rows, flat = result.shape[-2], result.reshape(-1, result.shape[-1])
        at = {{0, 1, len(flat) // 2, len(flat) - 2, len(flat) - 1}}
        for power in (31, 32):  # the rows around these elements and bytes, of the result and of a
            for elements in (2**power, 2**power // a.element_size()):
                for width in (flat.shape[1], a.shape[-1]):
                    at |= {{elements // width + d for d in (-1, 0, 1)}}
        at = torch.tensor(sorted(r for r in at if 0 <= r < len(flat)), device="cuda")
        left = a.reshape(-1, a.shape[-1])[at] if not {a_strides} else a[at]
        if result.ndim == 3:
            expected = torch.stack([left[i].double() @ b[r // rows].double() for i, r in enumerate(at.tolist())])
        else:
            expected = torch.cat([left.double() @ part.double() for part in b.split(8192, dim=1)], dim=1)
        wrong = (flat[at] != expected.to(result.dtype)).sum().item()
        assert wrong == 0, f"{{wrong}} wrong"
        # Every row, by its sum of columns: exact in float64.
        if result.ndim == 2 and not {a_strides}:
            column = b.sum(1, dtype=torch.float64)
            for first in range(0, len(flat), 4096):
                part = slice(first, first + 4096)
                found = flat[part].double().sum(1)
                assert torch.equal(found, a[part].double() @ column), first
    """,
        timeout=200,
    )


def test_no_hidden_copies(torch):
    """Strides that are multiples of 16 bytes are used as they are (cupy#6021); nothing is allocated but the result."""
    big = torch.ones(2048, 2056, dtype=torch.float16, device=ref.DEVICE)
    a = big[:, :2048]
    for x, y in ((a, a), (a, a.t()), (a.t(), a), (a.t(), a.t()), (a[::2], a.t()), (a.expand(3, 2048, 2048), a)):
        out = torch.empty(ref.result_shape(x.shape, y.shape), dtype=torch.float16, device=ref.DEVICE)
        tcgemm.matmul(x, y, out=out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tcgemm.matmul(x, y, out=out)
        assert torch.cuda.max_memory_allocated() == before, (x.stride(), y.stride())
        assert int((out != 2048).sum()) == 0
