"""Values on the device: rounding, subnormals, NaN and Inf, stale memory, errors beside torch's, and bits that stay."""

import numpy as np
import pytest
import reference as ref
from test_host import INF, NAN, VALUES

import tcgemm

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


def tensor(values, dtype):
    return torch.tensor(np.asarray(values), dtype=torch.float64, device=ref.DEVICE).to(ref.torch_dtype(dtype))


def randn(shape, dtype, seed=0):
    generator = torch.Generator(ref.DEVICE).manual_seed(seed)
    return torch.randn(shape, device=ref.DEVICE, generator=generator).to(ref.torch_dtype(dtype))


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same(x, y):
    """Equal, NaN to NaN, as a count of differences on the device."""
    return (~((x == y) | (x.isnan() & y.isnan()))).sum()


@pytest.mark.parametrize("dtype, out_dtype, a, b, expected", VALUES)
def test_values(dtype, out_dtype, a, b, expected):
    # One product; rows and columns of a tile; K padded with zeros past one tile; B in either order; split K.
    for m, n, k in ((1, 1, len(a)), (5, 9, len(a)), (70, 130, 200), (16, 64, 8192)):
        row, column = tensor(a, dtype), tensor(b, dtype)
        x = torch.zeros(m, k, dtype=row.dtype, device=ref.DEVICE)
        y = torch.zeros(k, n, dtype=row.dtype, device=ref.DEVICE)
        x[:, : len(a)] = row
        y[: len(b)] = column[:, None]
        for right in (y, y.t().contiguous().t()):
            result = tcgemm.matmul(x, right, out_dtype=out_dtype)
            wanted = torch.full((m, n), float(expected), dtype=result.dtype, device=ref.DEVICE)
            assert int(same(result, wanted)) == 0, (m, n, k, result[0, 0].item())


def test_nan_of_every_payload_stays_nan():
    """Rounding on the bits of a float turns 0x7FFFFFFF into a zero where NaN is not looked for (groonga PR#2961)."""
    for dtype, payloads in (
        ("bfloat16", (0x7FFF, 0x7F81, 0x7FC0, -1, -63)),
        ("float16", (0x7FFF, 0x7C01, 0x7E00, -1, -511)),
        ("float32", (0x7FFFFFFF, 0x7F800001, -1)),
    ):
        for payload in payloads:
            flat = torch.full(
                (3, 1), payload, dtype=torch.int16 if dtype != "float32" else torch.int32, device=ref.DEVICE
            )
            a = flat.view(ref.torch_dtype(dtype))
            assert tcgemm.matmul(a, torch.ones(1, 2, dtype=a.dtype, device=ref.DEVICE)).isnan().all()


@pytest.mark.parametrize("dtype", ref.DTYPES)
def test_special_values_in_random_places(rng, dtype):
    for m, n, k in ((40, 50, 30), (129, 65, 200), (16, 64, 4096)):
        a, b = ref.integers(rng, (m, k)), ref.integers(rng, (k, n))
        for side in (a, b):
            for special in (INF, -INF, NAN):
                side[tuple(rng.integers(0, side.shape))] = special
        x, y = tensor(a, dtype), tensor(b, dtype)
        # Row by row: a sum of products as IEEE says, with no algorithm that could skip a zero.
        expected = torch.stack([(row.double()[:, None] * y.double()).sum(0) for row in x]).to(x.dtype)
        assert int(same(tcgemm.matmul(x, y), expected)) == 0
        assert int(same(tcgemm.matmul(x, y.t().contiguous().t()), expected)) == 0


@pytest.mark.parametrize("content", [NAN, INF])
def test_stale_shared_memory(rng, content):
    """Rows and columns past the operands are zero, not what an earlier kernel left (flash-attention#1395): 0 * NaN."""
    dirt = torch.full((4096, 4096), content, dtype=torch.float16, device=ref.DEVICE)
    tally = ref.Tally()
    for dtype in ref.HALVES:
        for order in ref.ORDERS:
            for m, n, k in [
                (65, 71, 33),
                *((m, n, k) for m in (1, 63, 65, 127, 129) for n in (1, 63, 65, 129) for k in (1, 7, 17, 31, 63, 65)),
            ]:
                pair = ref.torch_pair(
                    rng, dtype, (m, k), (k, n), (ref.ORDERS if rng.random() < 0.5 else ref.ALIGNED_ORDERS)[order]
                )
                if rng.random() < 0.05:
                    tcgemm.matmul(dirt.to(ref.torch_dtype(dtype)), dirt.to(ref.torch_dtype(dtype)))
                else:
                    tcgemm.matmul(
                        dirt[:1024, :512].to(ref.torch_dtype(dtype)), dirt[:512, :2048].to(ref.torch_dtype(dtype))
                    )
                a, b = (x.tensor for x in pair)
                tally.add(f"{dtype} {order} {m, n, k}", ref.torch_wrong(tcgemm.matmul(a, b), a, b, dtype))
    tally.read()


@pytest.mark.parametrize("content", [NAN, INF])
def test_old_content_of_the_result_never_matters(content):
    """beta is 0, and 0 * NaN is NaN (flashinfer#4724)."""
    for dtype in ref.DTYPES:
        a, b = (ref.torch_integers(s, dtype) for s in ((128, 64), (64, 128)))
        torch.full((128, 128), content, dtype=a.dtype, device=ref.DEVICE)  # freed at once: the allocator's next block
        ref.torch_check(tcgemm.matmul(a, b), a, b)
        out = torch.full((128, 128), content, dtype=a.dtype, device=ref.DEVICE)
        ref.torch_check(tcgemm.matmul(a, b, out=out), a, b)
        # The workspace of a split K, too.
        a, b = (ref.torch_integers(s, dtype) for s in ((16, 65536), (65536, 64)))
        torch.full((2**24,), content, device=ref.DEVICE)
        ref.torch_check(tcgemm.matmul(a, b), a, b)


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize(
    "shape", [(512, 512, 512), (333, 1000, 4099), (16, 64, 65536), (1, 4096, 4096), (4096, 4096, 1024)]
)
def test_error_beside_torch(dtype, shape):
    m, n, k = shape
    tf32 = torch.backends.cuda.matmul.allow_tf32
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        a, b = randn((m, k), dtype, 1), randn((k, n), dtype, 2)
        exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        # Where torch's vector kernels sum many short runs, a float32 sum in order of K is less exact: a quarter of
        # what K roundings of random sign come to.
        floor = k**0.5 * 2**-26
        for right in (b, b.t().contiguous().t()):
            ref.check_no_worse(
                tcgemm.matmul(a, right).double(),
                torch.matmul(a, right).double(),
                exact,
                scale,
                floor=floor if dtype == "float32" else 0,
            )
        if dtype != "float32" and torch.__version__ >= torch.torch_version.TorchVersion("2.8"):
            other = torch.mm(a, b, out_dtype=torch.float32).double()
            result = tcgemm.matmul(a, b, out_dtype=torch.float32).double()
            ref.check_no_worse(result, other, exact, scale, floor=floor)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced


@pytest.mark.parametrize("dtype", ref.HALVES)
def test_one_rounding(dtype):
    """The bits of the fp32 result, rounded once to nearest even: by every tile and by the sum of split K."""
    compared = 0
    for m, n, k in ((64, 64, 200), (300, 301, 500), (16, 64, 65536), (1, 129, 4096)):
        a, b = randn((m, k), dtype, 3), randn((k, n), dtype, 4)
        plans = [tcgemm.explain(a, b, out_dtype=out_dtype) for out_dtype in (dtype, "float32")]
        if all(plans[0][key] == plans[1][key] for key in ("kernel", "splits")):
            narrow, wide = tcgemm.matmul(a, b), tcgemm.matmul(a, b, out_dtype="float32")
            assert torch.equal(bits(narrow), bits(wide.to(narrow.dtype)))
            compared += 1
    assert compared >= 2


def test_float32_is_never_tf32(rng):
    """1024.5 * 1 gives 1025 in TF32 (pytorch#53635)."""
    eye = torch.eye(46, device=ref.DEVICE)
    numbers = torch.arange(46 * 46, dtype=torch.float32, device=ref.DEVICE).reshape(46, 46) + 0.25
    assert torch.equal(tcgemm.matmul(eye, numbers), numbers) and torch.equal(tcgemm.matmul(numbers, eye), numbers)
    wide = torch.full((64, 64), 1 + 2.0**-23, device=ref.DEVICE)
    assert torch.equal(tcgemm.matmul(wide, torch.eye(64, device=ref.DEVICE)), wide)


# ---- bits that stay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 16, 65536), (64, 4096, 14336), (908, 3840, 1536), (1, 4096, 4096)])
def test_runs_agree(shape):
    """1,000 calls back to back, a second stream busy for half of them (exllama#153)."""
    m, n, k = shape
    a, b = randn((m, k), "bfloat16", 5), randn((k, n), "bfloat16", 6)
    busy, hog = torch.cuda.Stream(), torch.empty(2**26, device=ref.DEVICE)
    first = tcgemm.matmul(a, b)
    differences = torch.zeros((), dtype=torch.int64, device=ref.DEVICE)
    for part in range(20):
        if part % 2:
            with torch.cuda.stream(busy):
                for _ in range(4):
                    hog.add_(1)
        results = [tcgemm.matmul(a, b) for _ in range(50)]
        for result in results:
            differences += (bits(result) != bits(first)).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("dtype", ref.DTYPES)
@pytest.mark.parametrize(
    "n, k, order", [(64, 65536, "nt"), (4096, 4096, "nt"), (1000, 777, "nn"), (128, 2048, "tt"), (33, 8192, "tn")]
)
def test_batch_invariance(dtype, n, k, order):
    """A row's bits do not depend on how many rows there are; K is never split."""
    full = randn((600, k), dtype, 7)
    b = randn((k, n), dtype, 8) if order[1] == "n" else randn((n, k), dtype, 8).t()
    if order[0] == "t":
        full = full.t().contiguous().t()
    whole = tcgemm.matmul(full, b, batch_invariant=True)
    differences = torch.zeros((), dtype=torch.int64, device=ref.DEVICE)
    for m in (1, 2, 3, 8, 15, 16, 17, 32, 63, 64, 65, 100, 128, 129, 200, 255, 256, 257, 300, 511, 512, 513, 600):
        part = full[:m]
        assert tcgemm.explain(part, b, batch_invariant=True)["splits"] == 1
        differences += (bits(tcgemm.matmul(part, b, batch_invariant=True)) != bits(whole[:m])).sum()
        differences += (bits(tcgemm.matmul(full[600 - m :], b, batch_invariant=True)) != bits(whole[600 - m :])).sum()
        differences += (bits(tcgemm.matmul(part[None], b, batch_invariant=True)[0]) != bits(whole[:m])).sum()
    vector = tcgemm.matmul(full[0], b, batch_invariant=True)
    differences += (bits(vector) != bits(whole[0])).sum()
    assert int(differences) == 0


def test_batch_invariance_by_the_environment(run_python):
    for value, splits in (("1", "== 1"), ("0", "> 1")):
        run_python(
            f"""
            import torch, tcgemm
            a, b = torch.ones(16, 65536, device="cuda", dtype=torch.float16), torch.ones(65536, 64, device="cuda", dtype=torch.float16)
            assert tcgemm.explain(a, b)["splits"] {splits}
            assert tcgemm.explain(a, b, batch_invariant=True)["splits"] == 1
            assert tcgemm.explain(a, b, batch_invariant=False)["splits"] > 1
        """,
            env={"TCGEMM_BATCH_INVARIANT": value},
        )


# ---- races ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 129, 908])
@pytest.mark.parametrize("hog", [False, True])
def test_pipeline_races(m, hog, request):
    """A stage handed back before all have read it goes wrong in 10 of 1,000 calls, and a wait after each hides it
    (DeepGEMM PR#90): batches of 50 without one, fresh outputs, against the first."""
    times = 10000 if request.config.getoption("--slow") else 2000
    a, b = randn((m, 15360), "bfloat16", 9), randn((3840, 15360), "bfloat16", 10).t()
    first = tcgemm.matmul(a, b)
    busy, memory = torch.cuda.Stream(), torch.empty(2**27, device=ref.DEVICE)
    differences = torch.zeros((), dtype=torch.int64, device=ref.DEVICE)
    for _ in range(times // 50):
        if hog:
            with torch.cuda.stream(busy):
                memory.add_(1)
        for result in [tcgemm.matmul(a, b) for _ in range(50)]:
            differences += (bits(result) != bits(first)).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("k", [16, 64])
@pytest.mark.parametrize("order", ref.ORDERS)
def test_epilogue_races(k, order, request):
    """Epilogue-heavy products of two sets of inputs by turns, so that a stale tile shows (TileOPs#1570)."""
    times = 5000 if request.config.getoption("--slow") else 1000
    sets = []
    for seed in (11, 12):
        a = randn((4096, k), "bfloat16", seed) if order[0] == "n" else randn((k, 4096), "bfloat16", seed).t()
        b = (
            randn((k, 4096), "bfloat16", -seed & 0xFF)
            if order[1] == "n"
            else randn((4096, k), "bfloat16", -seed & 0xFF).t()
        )
        sets.append((a, b, tcgemm.matmul(a, b)))
    assert int((bits(sets[0][2]) != bits(sets[1][2])).sum()) > 4096 * 4000
    differences = torch.zeros((), dtype=torch.int64, device=ref.DEVICE)
    for _ in range(times // 10):
        for (a, b, first), result in zip(sets * 5, [tcgemm.matmul(a, b) for a, b, _ in sets * 5]):
            differences += (bits(result) != bits(first)).sum()
    assert int(differences) == 0


def test_the_race_checks_see_a_difference():
    x = randn((64, 64), "bfloat16")
    y = x.clone()
    bits(y)[3, 4] ^= 1
    assert int((bits(x) != bits(y)).sum()) == 1


def test_writes_before_the_call_are_seen():
    """What the stream wrote last is what is read (cutlass#2760: a dependent launch that does not wait)."""
    a = torch.empty(256, 256, dtype=torch.float16, device=ref.DEVICE)
    b = torch.eye(256, dtype=torch.float16, device=ref.DEVICE)
    wrong = torch.zeros((), dtype=torch.int64, device=ref.DEVICE)
    for i in range(5000):
        a.fill_(i % 7)
        wrong += (tcgemm.matmul(a, b) != i % 7).sum()
    assert int(wrong) == 0
