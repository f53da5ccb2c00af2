"""Every compiled kernel that runs on this device, forced by kernel=, over ragged shapes, guards and special values."""

import pytest
import reference as ref
from conftest import refused
from test_gpu_values import same

import tcgemm

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

ROWS = tcgemm.kernels()
EACH = pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])


def runs_here(row):
    return row["family"] in tcgemm.devices()[torch.cuda.current_device()]["families"]


def operands(rng, row, m, n, k, values=None):
    """Operands that the row takes: of its order, on its alignment. A row of any strides gets any."""
    order = row["order"] if row["order"] in ref.ORDERS else str(rng.choice([*ref.ORDERS]))
    names = (ref.ALIGNED_ORDERS if row["align_bytes"] >= 16 else ref.ORDERS)[order]
    return ref.torch_pair(rng, row["in_dtype"], (m, k), (k, n), names)


def run(row, a, b, batch_axes=0, **options):
    """The product by that kernel, or None after a refusal that says why."""

    def call():
        return tcgemm.matmul(a, b, kernel=row["name"], **options)

    why = ref.refusal(row, a.shape[-1], batch_axes)
    if why is None:
        return call()
    refused(RuntimeError, row["name"], why, call=call)
    return None


def sizes(row, rng):
    """Shapes around the row's tile, and below it."""
    block_m, block_n, block_k = row["tile"]
    yield from (
        (1, 1, 1),
        (2, 3, 5),
        (block_m, block_n, block_k),
        (block_m + 1, block_n + 1, block_k + 1),
        (block_m - 1, block_n - 1, block_k - 1),
    )
    yield from (
        (2 * block_m, 3 * block_n, 5 * block_k),
        (3 * block_m + 5, 2 * block_n + 3, 4 * block_k + 7),
        (1, 5 * block_n, 3 * block_k),
        (5 * block_m, 1, 3 * block_k),
    )
    yield from (
        (block_m, block_n, k)
        for k in (
            1,
            8,
            15,
            16,
            17,
            block_k * 2,
            block_k * 3 + 8,
            block_k * row["stages"],
            block_k * (row["stages"] + 1),
            2000,
        )
    )
    for _ in range(20):
        yield int(rng.integers(1, 3 * block_m)), int(rng.integers(1, 3 * block_n)), int(rng.integers(1, 6 * block_k))


@EACH
def test_exact(rng, row):
    if not runs_here(row):
        pytest.skip(f"family {row['family']} does not run on this device")
    tally = ref.Tally()
    for m, n, k in sizes(row, rng):
        a, b = operands(rng, row, m, n, k)
        for out_dtype in dict.fromkeys((row["in_dtype"], "float32")):
            out = ref.DeviceBuffer(
                out_dtype,
                ref.layout(
                    rng.choice(["row", "row_padded", "shifted", "column", "stepped", "row_padded_16_bytes"]),
                    (m, n),
                    rng,
                ),
            )
            if run(row, a.tensor, b.tensor, out=out.tensor, out_dtype=out_dtype) is None:
                continue
            tally.add(f"{m, n, k} {out_dtype}", ref.torch_wrong(out.tensor, a.tensor, b.tensor, out_dtype))
            tally.add(f"{m, n, k} {out_dtype} outside {out.where}", out.spoiled())
    tally.read()


@pytest.mark.parametrize("row", [row for row in ROWS if row["family"] == "wgmma"], ids=lambda row: row["name"])
def test_last_boxes(rng, row):
    """Of the last tile TMA loads no more than there is. What shared memory holds beside that are NaNs of the product before."""
    if not runs_here(row):
        pytest.skip(f"family {row['family']} does not run on this device")
    block_m, block_n, block_k = row["tile"]
    tally = ref.Tally()
    for edge in (1, 8, 9, 24, 56, 63):
        for m, n in ((edge, block_n + edge), (block_m + edge, edge), (2 * block_m + edge, 2 * block_n + edge)):
            a, b = operands(rng, row, m, n, 2 * block_k + 8)
            nans = torch.full((2 * block_m, 2 * block_k + 8), float("nan"), dtype=a.tensor.dtype, device="cuda")
            run(row, nans, torch.full_like(b.tensor, float("nan")))
            c = run(row, a.tensor, b.tensor)
            tally.add(f"{m, n}", ref.torch_wrong(c, a.tensor, b.tensor, row["in_dtype"]))
    tally.read()


@EACH
def test_forced_kernel_is_the_one_that_runs(rng, row):
    if not runs_here(row):
        pytest.skip(f"family {row['family']} does not run on this device")
    a, b = operands(rng, row, 200, 136, 328)
    plan = tcgemm.explain(a.tensor, b.tensor, kernel=row["name"])
    assert plan["kernel"] == row["name"] and row["name"] in str(plan)


@EACH
def test_values(rng, row):
    """NaN, Inf, subnormals, and rounding that is right, in every kernel."""
    if not runs_here(row):
        pytest.skip(f"family {row['family']} does not run on this device")
    dtype = row["in_dtype"]
    m, n, k = 70, 136, 328
    x, y = operands(rng, row, m, n, k)
    a, b = x.tensor, y.tensor
    smallest = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}[dtype]
    ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}[dtype]
    a[1, 2], a[3, 4], a[5, 6] = float("nan"), float("inf"), float("-inf")
    a[8:11] = 0
    b[0], b[1] = 1, 1
    a[8, 0] = smallest  # kept
    a[9, 0], a[9, 1] = 1, ulp / 2  # a tie, to even: 1
    a[10, 0], a[10, 1] = 1 + ulp, ulp / 2  # a tie, to even: up
    result = tcgemm.matmul(a, b, kernel=row["name"])
    expected = torch.stack([(line.double()[:, None] * b.double()).sum(0) for line in a]).to(a.dtype)
    assert int(same(result, expected)) == 0
    assert (result[8] == smallest).all() and (result[9] == 1).all() and (result[10] == 1 + 2 * ulp).all()
    assert result[1].isnan().all()


@EACH
def test_runs_agree(rng, row):
    if not runs_here(row):
        pytest.skip(f"family {row['family']} does not run on this device")
    x, y = operands(rng, row, 300, 520, 1000)
    for side in (x, y):
        side.tensor.normal_()
    first = tcgemm.matmul(x.tensor, y.tensor, kernel=row["name"])
    different = sum((tcgemm.matmul(x.tensor, y.tensor, kernel=row["name"]) != first).sum() for _ in range(100))
    assert int(different) == 0


@EACH
def test_batches(rng, row):
    if not runs_here(row):
        pytest.skip(f"family {row['family']} does not run on this device")
    order = row["order"] if row["order"] in ref.ORDERS else "nn"
    names = (ref.ALIGNED_ORDERS if row["align_bytes"] >= 16 else ref.ORDERS)[order]
    tally = ref.Tally()
    k = 24 * row["cluster"][2] ** 4
    for a_shape, b_shape, batch_axes in (
        ((5, 40, k), (5, k, 72), 1),
        ((3, 1, 40, k), (4, k, 72), 2),
        ((40, k), (7, k, 72), 1),
        ((7, 40, k), (k, 72), 1),
    ):
        a, b = ref.torch_pair(rng, row["in_dtype"], a_shape, b_shape, names)
        result = run(row, a.tensor, b.tensor, batch_axes)
        if result is None:
            continue
        tally.add(f"{a_shape} {b_shape}", ref.torch_wrong(result, a.tensor, b.tensor, row["in_dtype"]))
    tally.read()


@pytest.mark.parametrize("family", sorted({row["family"] for row in ROWS}))
def test_forced_family(rng, family):
    dtypes = sorted({row["in_dtype"] for row in ROWS if row["family"] == family})
    for dtype in ref.DTYPES:
        a, b = ref.torch_pair(rng, dtype, (130, 70), (70, 90))
        if dtype in dtypes and family in tcgemm.devices()[0]["families"]:
            ref.torch_check(tcgemm.matmul(a.tensor, b.tensor, kernel=family), a.tensor, b.tensor)
            assert tcgemm.explain(a.tensor, b.tensor, kernel=family)["family"] == family
        else:
            refused((ValueError, RuntimeError), family, call=lambda: tcgemm.matmul(a.tensor, b.tensor, kernel=family))


def test_a_kernel_that_cannot_says_why(rng):
    row = next(r for r in ROWS if r["in_dtype"] == "float16" and r["order"] == "nn" and r["align_bytes"] == 16)
    a, b = ref.torch_pair(rng, "bfloat16", (64, 64), (64, 64))
    refused(
        (ValueError, RuntimeError),
        row["name"],
        "bfloat16",
        call=lambda: tcgemm.matmul(a.tensor, b.tensor, kernel=row["name"]),
    )


def test_kernels_and_devices_agree():
    for device in tcgemm.devices():
        assert {"name", "compute_capability", "sm_count", "families"} <= set(device)
        assert set(device["families"]) <= {row["family"] for row in ROWS}
    properties = torch.cuda.get_device_properties(0)
    first = tcgemm.devices()[0]
    assert first["name"] == properties.name and first["sm_count"] == properties.multi_processor_count
    assert str(properties.major) in str(first["compute_capability"])


def test_explain_is_what_matmul_does(rng):
    """The planner's choice, forced, gives the same bits."""
    for _ in range(60):
        a, b = ref.torch_pair(
            rng, str(rng.choice(ref.DTYPES)), *ref.random_shapes(rng), rng.choice(ref.layout_names(), 2)
        )
        plan = tcgemm.explain(a.tensor, b.tensor)
        if plan["kernel"] is None:
            continue
        for side in (a, b):
            if not ref.overlapping(side.where):
                side.tensor.normal_()
        chosen = tcgemm.matmul(a.tensor, b.tensor)
        assert int(same(chosen, tcgemm.matmul(a.tensor, b.tensor, kernel=plan["kernel"]))) == 0
