"""The planner through _core._plan, on devices that need not exist: every problem gets a plan that covers it, tiles
fit the shared memory, splits and copies come where they pay, and a forced kernel runs or says why it cannot."""

import math
import re
from pathlib import Path

import pytest

import tcgemm
from tcgemm import _core

A, B, C = 0x7F0000000000, 0x7F1000000000, 0x7F2000000000
KB = 1024
ROWS = {row["name"]: row for row in tcgemm.kernels()}
CCS = [80, 86, 89, 90, 100, 120]


def device(cc=90, sm_count=132, smem_kb=227, l2_bytes=50 << 20):
    return {
        "cc": cc,
        "sm_count": sm_count,
        "smem_block_bytes": smem_kb * KB,
        "smem_sm_bytes": (smem_kb + 1) * KB,
        "l2_bytes": l2_bytes,
    }


def plan(
    m,
    n,
    k,
    order="nt",
    dtype="bfloat16",
    out_dtype=None,
    lda=None,
    ldb=None,
    where=None,
    batch=(),
    a=None,
    b=None,
    c=None,
    **options,
):
    """A plan for packed operands of that order; a, b and c replace an operand's (address, row, column)."""
    a = a or ((A, lda or k, 1) if order[0] == "n" else (A, 1, lda or m))
    b = b or ((B, ldb or n, 1) if order[1] == "n" else (B, 1, ldb or k))
    c = c or (C, n, 1)
    return _core._plan((m, n, k), dtype, dtype, a, b, c, list(batch), where or device(), **options)


def tile_of(found):
    return tuple(found["tile"])


def smem_bytes(name):
    """The dynamic shared memory of an mma row, from its name: stages of both tiles, or for any alignment two of them and
    stages of the words that their lines touch, one more than a line has."""
    order, *shape, stages, align = re.search(r"_(\w\w)_(\d+)x(\d+)x(\d+)_w\d+x\d+_s(\d+)_a(\d+)$", name).groups()
    (bm, bn, bk), stages = map(int, shape), int(stages)
    if align == "16":
        return (bm + bn) * bk * 2 * stages

    def words(mn, k_major):
        lines, length = (mn, bk) if k_major else (bk, mn)
        return lines * (length * 2 // 16 + 1) * 16

    return (bm + bn) * bk * 2 * 2 + stages * (words(bm, order[0] == "n") + words(bn, order[1] == "t"))


def test_shared_memory_is_what_the_table_says():
    for name, row in ROWS.items():
        if row["family"] == "mma" and "mma_shift" not in name:
            assert smem_bytes(name) == row["smem_bytes"], name


def has_code(cc, dtype="bfloat16"):
    """Whether this build, whose targets may be fewer than the table's, holds something for the device."""
    try:
        plan(64, 64, 64, dtype=dtype, where=device(cc))
    except RuntimeError:
        return False
    return True


W128 = "tcg_wgmma_sm90_bf16_nt_128x128x64_s6_w2_coop_c1x1x1"
needs_90 = pytest.mark.skipif(not has_code(90), reason="built without sm_90")


@pytest.mark.parametrize("seed", range(4))
def test_a_million_random_problems_on_random_devices(seed):
    assert not _core._plan_fuzz(250_000, seed)


@pytest.mark.parametrize(
    ("count", "seed"), [(20_000, 1295), (20_000, 1729), (20_000, 1754), (100_000, 1014), (250_000, 500_266)]
)
def test_random_problems_that_once_failed(count, seed):
    """Copies of thin lines, each padded: more than 2^63 bytes."""
    assert not _core._plan_fuzz(count, seed)


@pytest.mark.parametrize("smem_kb", [48, 64, 99, 100, 163, 227])
@pytest.mark.parametrize("cc", CCS)
def test_every_device_gets_a_kernel_that_fits_its_shared_memory(cc, smem_kb):
    if not has_code(cc):
        pytest.skip(f"built without code for {cc}")
    for sm_count in (1, 2, 16, 82, 132, 200):
        for m, n, k in [
            (1, 1, 1),
            (1, 4096, 4096),
            (17, 31, 63),
            (128, 128, 1 << 17),
            (4096, 4096, 4096),
            (8191, 8193, 8195),
        ]:
            for order in ("nn", "nt", "tn", "tt"):
                where = device(cc, sm_count, smem_kb)
                found = plan(m, n, k, order, where=where)
                assert found["kernel"] in ROWS
                assert ROWS[found["kernel"]]["smem_bytes"] <= smem_kb * KB
                bm, bn, bk = tile_of(found)
                rows, columns = (n, m) if found["swap"] else (m, n)
                cm, cn, ck = ROWS[found["kernel"]]["cluster"]
                assert found["tiles_m"] == -(-rows // (bm * cm)) and found["tiles_n"] == -(-columns // (bn * cn))
                assert found["tiles"] == found["tiles_m"] * found["tiles_n"] * found["splits"]
                assert 1 <= found["grid"] <= found["tiles"] * cm * cn * ck and found["grid"] % (cm * cn * ck) == 0
                assert found["k_per_split"] % bk == 0
                assert found["k_per_split"] * (found["splits"] - 1) < k <= found["k_per_split"] * found["splits"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtype_decides_the_family(dtype):
    if not has_code(90, dtype):
        pytest.skip("built without sm_90")
    found = plan(256, 256, 256, dtype=dtype)
    assert (found["family"] == "simt") == (dtype == "float32")
    assert ROWS[found["kernel"]]["in_dtype"] == dtype


@needs_90
def test_aligned_operands_are_read_in_place_whatever_their_order():
    for order in ("nn", "nt", "tn", "tt"):
        found = plan(4096, 4096, 4096, order)
        assert found["order"] == order and not found["copies"] and not found["swap"]
        assert found["workspace_bytes"] == 0 and tile_of(found)[0] == 128
    # Rows padded to a multiple of 16 bytes, and a ragged edge, need nothing either.
    assert not plan(4096, 4096, 4090, lda=4096, ldb=4096)["copies"]
    assert not plan(1000, 999, 4096)["copies"]


@pytest.mark.skipif(not has_code(90, "float32"), reason="built without sm_90")
def test_float32_rows():
    for order in ("nn", "nt", "tn", "tt"):
        found = plan(4096, 4096, 4096, order, dtype="float32")
        assert found["order"] == order and tile_of(found)[:2] == (128, 256) and not found["copies"]
    # Along K elements are copied one by one, so alignment is nothing to it.
    found = plan(4096, 4096, 4095, dtype="float32", a=(A + 4, 4097, 1))
    assert found["order"] == "nt" and not found["copies"]
    # Strides of no order are taken in place where a copy would cost more.
    found = plan(512, 512, 512, dtype="float32", a=(A, 3 * 512, 3))
    assert found["order"] is None and not found["copies"]
    # Tiles that leave most of the device idle are not chosen, nor large ones for few rows.
    for size in (256, 512, 1024):
        found = plan(size, size, size, dtype="float32", batch_invariant=True)
        assert tile_of(found)[0] * tile_of(found)[1] <= max(32 * 64, size * size / 128), (size, found)
        assert plan(size, size, size, dtype="float32")["tiles"] >= 64
    assert tile_of(plan(8, 4096, 4096, dtype="float32"))[0] <= 64


@needs_90
def test_the_order_follows_the_unit_stride():
    # Length-1 axes have no stride: junk there changes nothing.
    for junk in (0, 1, 7, -3, 1 << 40):
        assert plan(1, 512, 512, a=(A, junk, 1))["order"][0] == "n"
        assert not plan(1, 512, 512, a=(A, junk, 1))["copies"]
        assert not plan(512, 512, 1, a=(A, 1, junk))["copies"]
    # Both unit (windows of one line): either will do, neither is copied for its order.
    assert plan(64, 16, 128, a=(A, 1, 1), b=(B, 16, 1))["kernel"]
    # A row stride of 0 or backwards is still rows, though no tensor map takes it; a backwards element is not.
    assert not plan(512, 512, 512, a=(A, 0, 1), kernel="mma")["copies"]
    assert not plan(512, 512, 512, a=(A + 512 * 511 * 2, -512, 1), kernel="mma")["copies"]
    assert [copy["operand"] for copy in plan(512, 512, 512, a=(A, 512, -1))["copies"]] == ["a"]
    assert [copy["operand"] for copy in plan(512, 512, 512, b=(B, 1024, 2))["copies"]] == ["b"]


@needs_90
def test_unaligned_rows_are_copied_where_that_is_little_against_the_product():
    large = plan(4096, 4096, 4097)
    assert len(large["copies"]) == 2 and ROWS[large["kernel"]]["align_bytes"] == 16
    assert large["workspace_bytes"] >= 2 * 4096 * 4104 * 2
    for m in (1, 8, 16):  # what is small is copied in no time
        small = plan(m, 100, 65)
        assert small["copies"] and ROWS[small["kernel"]]["align_bytes"] == 16
    for m in (1, 8, 16):  # all of a large B would be copied for a few rows of A
        few = plan(m, 4096, 4097)
        assert not few["copies"] and ROWS[few["kernel"]]["align_bytes"] == 2
    # A shifted base is as unaligned as an odd stride.
    assert ROWS[plan(1, 4096, 4096, b=(B + 2, 1, 4096))["kernel"]]["align_bytes"] == 2
    # One operand unaligned: only that one is copied.
    only = plan(4096, 4096, 4096, lda=4097)
    assert [copy["operand"] for copy in only["copies"]] == ["a"]


@pytest.mark.parametrize("cc", CCS)
@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
def test_a_copy_of_thin_lines_is_not_padded_to_many_times_its_size(cc, order):
    if not has_code(cc):
        pytest.skip(f"built without code for {cc}")
    for m, n, k, operands in (
        (1, 1, 10**8, {"a": (A, 0, 2)}),
        (1, 1, 10**8, {"a": (A, 0, 2), "b": (B, 3, 0)}),
        (3, 3, 10**7, {"a": (A, 1, 3), "b": (B, 3, 1)}),  # x.T @ x
        (10**7, 3, 3, {"a": (A, 3, 1)}),
        (10**7, 1, 3, {"a": (A, 6, 2)}),
        (7, 1, 10**8, {"b": (B, -8, 0)}),  # aligned, and no tensor map takes it
        (7, 1, 10**8, {"b": (B, 0, 0)}),
        (2, 1, 10**7, {"a": (A, 3, 7), "b": (B, -8, 0)}),
    ):
        for invariant in (False, True):
            found = plan(m, n, k, order, where=device(cc), batch_invariant=invariant, **operands)
            packed = 2 * k * (m + n) + 64 * 4 * m * n
            assert found["workspace_bytes"] <= 1.1 * packed + 4096, (m, n, k, found["kernel"])


def test_an_operand_of_many_gigabytes_is_taken_as_it_lies():
    """71 GB of copies, where rows for any alignment need none."""
    where = device(80, 108, 163)
    if not has_code(80):
        pytest.skip("built without code for 80")
    assert plan(32, 13321, 2_600_000, "nn", where=where)["workspace_bytes"] < 1 << 30


@pytest.mark.parametrize("cc", CCS)
def test_few_rows_of_any_alignment_shift_the_few_and_keep_the_order_of_k_where_that_is_asked(cc):
    where = device(cc, *((80, 99) if cc in (86, 89, 120) else (132, 163)))
    shift = next(row for name, row in ROWS.items() if "mma_shift_sm80_bf16" in name)
    if str(cc // 10 * 10) not in shift["arch"].split():  # there is no PTX of it
        pytest.skip(f"built without code for {cc}")
    shapes = [(8, 28671, 4097), (1, 50257, 769), (16, 4098, 4098), (20, 30001, 1001), (2, 8193, 8193)]
    if cc not in (80, 90):  # the rows for more than 8 lines, and the deep ones for fewer, need more shared memory
        shapes = shapes[:2]
    for m, n, k in shapes:
        found, swapped = plan(m, n, k, where=where), plan(n, m, k, where=where)
        for one in (found, swapped):
            assert "mma_shift" in one["kernel"] and not one["copies"], (m, n, k)
            assert ROWS[one["kernel"]]["in_order"] is False
        assert found["swap"] and not swapped["swap"]
        invariant = plan(m, n, k, where=where, batch_invariant=True)
        assert ROWS[invariant["kernel"]]["in_order"] is True and invariant["splits"] == 1


@needs_90
def test_few_lines_that_lie_across_are_copied_and_not_the_many():
    """x @ w with 8 columns, or 16 a line of which one is taken: aligned, but x is not."""
    for m, n, k, b in ((4096, 8, 4097, (B, 8, 1)), (8192, 32, 8193, (B, 32, 1)), (9326, 1, 18043, (B, 16, 1))):
        for where in (device(), device(80, 108, 163)):
            found = plan(m, n, k, b=b, where=where)
            assert "mma_shift" in found["kernel"] and [c["operand"] for c in found["copies"]] == ["b"], (m, n, k)


@needs_90
def test_a_small_operand_that_lies_across_is_turned_beside_a_large_one():
    """Few rows stored as columns: boxes along M, of which the last is a narrow one, cost more all along than a small copy."""
    found = plan(136, 7264, 5632, a=(A, 1, 136), b=(B, 7264, 1))
    assert [c["operand"] for c in found["copies"]] == ["a"] and found["workspace_bytes"] <= 2 << 20
    assert not plan(2048, 2048, 2048, a=(A, 1, 2048), b=(B, 2048, 1))["copies"]


@needs_90
def test_blocks_share_lines_that_straddle_sectors():
    """A pitch of 16 but not 32 bytes makes two requests a line: the fewer blocks ask, the better."""

    def blocks(m, n, k):
        return math.prod(ROWS[plan(m, n, k)["kernel"]]["cluster"])

    for m, n, k in ((1462, 1248, 3832), (136, 7256, 5640), (452, 10072, 3432)):
        assert blocks(m, n, k) >= 4, (m, n, k)
    assert blocks(2048, 2048, 2048) == 1


@needs_90
def test_rows_out_of_order_are_not_batch_invariant():
    shift = next(name for name in ROWS if "mma_shift_sm80_bf16" in name)
    with pytest.raises(RuntimeError, match="counts K from the start of a word, which batch_invariant=True excludes"):
        plan(8, 28671, 4097, kernel=shift, batch_invariant=True)
    split = next(name for name, row in ROWS.items() if row["cluster"][2] == 2 and row["in_dtype"] == "bfloat16")
    assert ROWS[split]["in_order"] is False
    with pytest.raises(RuntimeError, match="splits K over a cluster, which batch_invariant=True excludes"):
        plan(64, 4096, 4096, kernel=split, batch_invariant=True)


@needs_90
def test_a_part_of_a_round_is_filled_by_splitting_k():
    """72, 200 and 288 tiles of 128 x 256 on 132 SMs would leave half of the last round idle."""
    for size in (1500, 2500, 3000):
        whole, free = (plan(size, size, size, dtype="float32", batch_invariant=b) for b in (True, False))
        assert free["cycles"] < whole["cycles"] or free["splits"] == 1
        assert free["workspace_bytes"] <= 128 << 20
    assert plan(2500, 2500, 2500, dtype="float32")["splits"] > 1
    assert plan(4096, 4096, 4096, dtype="float32")["splits"] == 1


@needs_90
def test_the_splits_go_where_tiles_are_few_and_k_is_long():
    found = plan(64, 64, 65536)
    assert found["splits"] > 8
    assert found["workspace_bytes"] >= found["splits"] * 64 * 64 * 4
    assert plan(4096, 4096, 4096)["splits"] == 1
    assert plan(64, 64, 64)["splits"] == 1
    assert plan(64, 64, 65536, batch_invariant=True)["splits"] == 1
    # Partial sums stay within their bound.
    for m, n, k in [(512, 512, 1 << 20), (1024, 1024, 1 << 18), (16, 1 << 16, 1 << 14)]:
        assert plan(m, n, k)["workspace_bytes"] <= 64 << 20


@needs_90
def test_batch_invariant_plans_accumulate_in_one_piece_for_every_number_of_rows():
    for m in (1, 2, 16, 17, 64, 100, 1000, 8192):
        assert plan(m, 512, 1 << 17, batch_invariant=True)["splits"] == 1


@needs_90
def test_few_columns_are_computed_transposed():
    found = plan(16384, 8, 4096, kernel="mma")
    assert found["swap"] and tile_of(found)[0] == 16
    # Its order is that of C^T = B^T A^T.
    assert plan(16384, 8, 4096, "nn", kernel="mma")["order"] == "tt"
    assert plan(16384, 8, 4096, "tn", kernel="mma")["order"] == "tn"
    assert not plan(8, 16384, 4096, kernel="mma")["swap"]
    # A result laid out by columns is stored along them.
    assert plan(4096, 4096, 4096, c=(C, 1, 4096))["swap"]
    assert plan(4096, 4096, 4096, "nn", c=(C, 1, 4096))["order"] == "tt"


@needs_90
def test_a_batch_of_shared_weights_is_one_product():
    # x[64, 128, K] @ w[K, N]: the batch steps through x and c as further rows do.
    found = plan(128, 512, 256, batch=[(64, 128 * 256, 0, 128 * 512)])
    assert found["tiles_m"] * tile_of(found)[0] >= 64 * 128
    assert found["tiles"] == found["tiles_m"] * found["tiles_n"]
    # One row an entry, whatever the stride between.
    assert plan(1, 512, 256, batch=[(64, 4096, 0, 1024)])["tiles_m"] > 0
    # Neither operand shared: a batch.
    found = plan(128, 512, 256, batch=[(64, 128 * 256, 512 * 256, 128 * 512)])
    assert found["tiles"] == found["tiles_m"] * found["tiles_n"] * 64


@needs_90
def test_broadcast_operands_are_copied_once():
    found = plan(96, 96, 96, a=(A, 192, 2), batch=[(5, 0, 96 * 96, 96 * 96), (3, 96 * 192, 5 * 96 * 96, 5 * 96 * 96)])
    (copy,) = found["copies"]
    assert copy["batches"] == 3


def test_empty_problems_launch_nothing():
    for shape in [(0, 4, 4), (4, 0, 4), (0, 0, 0)]:
        assert plan(*shape)["kernel"] is None
    assert plan(4, 4, 4, batch=[(0, 16, 16, 16)])["kernel"] is None


@needs_90
def test_an_empty_sum_is_a_launch_that_writes_zeros():
    found = plan(64, 64, 0, a=(0, 0, 1), b=(0, 1, 0))
    assert found["kernel"] and found["splits"] == 1 and not found["copies"]
    assert found["k_per_split"] == tile_of(found)[2]


@needs_90
def test_sizes_beyond_32_bits():
    assert plan(1 << 33, 16, 16)["tiles"] >= (1 << 33) // 256
    found = plan(1 << 40, 1 << 20, 16)
    assert found["grid"] == 2**31 - 1 and found["tiles"] > 1 << 32
    assert plan(1, 1, 1 << 40)["k_per_split"] > 0


def test_absurd_sizes_are_refused_with_a_reason():
    with pytest.raises(ValueError, match="expected at most 2\\^48"):
        plan(1 << 50, 4, 4, a=(A, 4, 1))
    with pytest.raises(ValueError):
        plan(1 << 47, 1 << 47, 4, a=(A, 4, 1), c=(C, 4, 1))


@pytest.mark.parametrize("name", list(ROWS))
def test_a_forced_row_runs_on_any_operands_it_can_be_given(name):
    row = ROWS[name]
    dtype = row["in_dtype"]
    if not has_code(90, dtype):
        pytest.skip("built without sm_90")
    for cc in (90, 80):
        if not has_code(cc, dtype) or (cc == 80 and row["family"] in ("tma_mma", "wgmma")):
            continue
        for operands in [{}, {"a": (A + 4, 333, 1)}, {"a": (A, 700, 3), "b": (B, 2, 901)}, {"c": (C, 1, 100)}]:
            for order in ("nn", "nt", "tn", "tt"):
                found = plan(100, 77, 130, order, dtype, where=device(cc), kernel=name, **operands)
                assert found["kernel"] == name and "asked for" in found["why"]


@needs_90
def test_a_forced_kernel_that_cannot_run_says_why():
    big = next(name for name in ROWS if name.startswith("tcg_mma_sm80_bf16_nt_128x256x64"))
    with pytest.raises(RuntimeError, match=r"147456 bytes of shared memory.*has 101376"):
        plan(64, 64, 64, where=device(90, smem_kb=99), kernel=big)
    with pytest.raises(RuntimeError, match="takes bfloat16 operands, found float16"):
        plan(64, 64, 64, dtype="float16", kernel=big)
    with pytest.raises(RuntimeError, match="simt takes float32 operands, found bfloat16"):
        plan(64, 64, 64, kernel="simt")
    with pytest.raises(RuntimeError, match="compute capability 7.5"):
        plan(64, 64, 64, where=device(75), kernel=big)


@needs_90
def test_a_forced_family():
    assert plan(64, 64, 64, kernel="mma")["family"] == "mma"
    assert plan(64, 64, 64, kernel="mma")["why"].startswith("the cheapest row of the family")


def test_a_device_without_code_is_named_with_what_the_build_holds():
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5.*mma_bf16 \["):
        plan(64, 64, 64, where=device(75))


def test_chips_to_come_run_from_ptx():
    if not has_code(103):
        pytest.skip("built without PTX")
    for cc in (100, 103, 110):
        found = plan(4096, 4096, 4096, where=device(cc))
        assert found["ptx"]
    if has_code(90):
        assert not plan(4096, 4096, 4096)["ptx"]


@needs_90
def test_raster_groups_stay_within_the_tiles_and_the_l2_cache():
    found = plan(8192, 8192, 8192)
    assert 1 < found["raster_group"] <= 16
    assert plan(16, 8192, 8192, kernel="mma")["raster_group"] == 1
    assert plan(8192, 8192, 8192, where=device(l2_bytes=1 << 20))["raster_group"] == 1
    # Each group of rows of tiles reads all of B: three rows are one group, not two and one.
    assert plan(384, 28672, 4096, kernel=W128)["raster_group"] == 3
    assert plan(17 * 128, 4096, 4096, kernel=W128)["raster_group"] == 9
    # Where C's bytes outweigh its operands', tiles are walked in the order in which C lies in memory.
    assert plan(8192, 8192, 128, kernel=W128 + ":direct")["raster_group"] == 1
    assert plan(8192, 8192, 128, kernel=W128 + ":swapped")["raster_group"] == 8192 // 128


@needs_90
def test_a_row_can_be_forced_either_way_round():
    direct, swapped = (plan(300, 2112, 7168, kernel=f"{W128}:{way}") for way in ("direct", "swapped"))
    assert (direct["kernel"], direct["swap"], direct["tiles_m"]) == (W128, False, 3)
    assert (swapped["kernel"], swapped["swap"], swapped["tiles_m"]) == (W128, True, 17)
    free = plan(300, 2112, 7168, kernel=W128)
    assert free["cycles"] == min(direct["cycles"], swapped["cycles"])
    for wrong in (f"{W128}:sideways", f"{W128}:", "wgmma:swapped", ":direct"):
        with pytest.raises(ValueError, match="':direct' or ':swapped' may follow, got"):
            plan(300, 2112, 7168, kernel=wrong)


@needs_90
def test_constants_of_a_row_can_be_tried():
    as_it_is = plan(4096, 4096, 4096, kernel=W128)["cycles"]
    assert plan(4096, 4096, 4096, kernel=W128, tuned=(2.0, 1.0, 2000.0))["cycles"] > 1.3 * as_it_is
    assert (
        plan(16, 28672, 4096, kernel=W128, tuned=(1.0, 2.0, 2000.0))["cycles"]
        > 1.3 * plan(16, 28672, 4096, kernel=W128)["cycles"]
    )
    for wrong in (3, (1.0, 2.0), (1.0, 2.0, "x")):
        with pytest.raises(TypeError):
            plan(64, 64, 64, kernel=W128, tuned=wrong)


@needs_90
def test_the_longer_side_of_a_problem_may_lie_either_way():
    """C can be written by columns as well, and so 2112 = 33 x 64 columns lie along the short side of the tiles: 33 x 4
    of 64 x 256 are one round of 132 SMs."""
    assert plan(1024, 2112, 7168)["swap"]
    assert tile_of(plan(1024, 2112, 7168))[:2] == (64, 256)


@needs_90
def test_measured_choices_hold_for_their_shape_and_batch_alone():
    batch = [(128, 1024 * 64, 1024 * 64, 1024 * 1024)]
    found = plan(1024, 1024, 64, batch=batch)
    assert found["why"].startswith("measured") and tile_of(found) == (128, 128, 64) and found["swap"]
    other = plan(1024, 1024, 64, batch=[(127, *batch[0][1:])])
    assert not other["why"].startswith("measured")
    assert not plan(1024, 1024, 64, batch=batch, where=device(sm_count=114))["why"].startswith("measured")
    # One that splits K is none for those who ask for one order of K.
    found = plan(128, 128, 131072)
    assert found["why"].startswith("measured") and found["splits"] == 64
    found = plan(128, 128, 131072, batch_invariant=True)
    assert not found["why"].startswith("measured") and found["splits"] == 1


@needs_90
def test_measured_choices_take_what_a_tensor_map_describes():
    assert plan(16, 4096, 4096)["why"].startswith("measured")
    for rows in ((A, -4096, 1), (A, 4088, 1), (A, 0, 1)):  # backwards, overlapping, one row for all
        found = plan(16, 4096, 4096, a=rows)
        assert not found["why"].startswith("measured") and (found["family"] != "wgmma" or found["copies"]), rows
    entry = 1024 * 64
    axes = [(64, entry, entry, 1024 * 1024), (2, 65 * entry, 64 * entry, 64 * 1024 * 1024)]  # A's do not merge
    found = plan(1024, 1024, 64, batch=axes)
    assert not found["why"].startswith("measured") and found["family"] != "wgmma"


@needs_90
def test_measured_choices_with_any_strides(rng):
    """At every shape of tuned.def: operands that the row cannot take as they are get another one, or a copy."""
    lines = (Path(__file__).parent.parent / "csrc/cuda/tuned.def").read_text()
    shapes = [
        tuple(map(int, found)) for found in re.findall(r"TCG_EXCEPTION\((\d+), (\d+), (\d+), (\d+), (\d+)", lines)
    ]
    assert len(shapes) > 30
    measured = 0
    for low, high, n, k, count in shapes * 60:
        m = int(rng.integers(low, high + 1))
        steps = []
        for rows in (m, n):
            odd = [
                (k + 8, 1),
                (k + 1, 1),
                (-k, 1),
                (0, 1),
                (8, 1),
                (k - 8, 1),
                (1, rows),
                (1, rows + 8),
                (2 * k, 2),
                (k, -1),
            ]
            steps.append((k, 1) if rng.random() < 0.5 else odd[rng.integers(len(odd))])
        (a_row, a_col), (b_col, b_row) = steps
        axes = [(count, m * k, n * k, m * n)] if count > 1 else []
        if axes and rng.random() < 0.5:  # two axes, which merge or do not
            inner = m * k + int(rng.choice([0, 8]))
            axes = [
                (count // 2, inner, n * k, m * n),
                (2, (count // 2) * m * k, (count // 2) * n * k, (count // 2) * m * n),
            ]
        invariant = bool(rng.random() < 0.3)
        found = plan(m, n, k, a=(A, a_row, a_col), b=(B, b_row, b_col), batch=axes, batch_invariant=invariant)
        if invariant:
            assert found["splits"] == 1 and ROWS[found["kernel"]]["cluster"][2] == 1, (m, n, k)
        if found["why"].startswith("measured"):
            measured += 1
            for rows, (row, col) in zip((m, n), steps):
                assert col == 1 and (rows == 1 or (row >= k and row % 8 == 0)), (m, n, k, steps)
            assert len(axes) < 2 or axes[1][1] == axes[0][1] * axes[0][0], axes
    assert measured > len(shapes) * 6


@needs_90
def test_two_blocks_an_sm_are_counted_as_such():
    row = "tcg_wgmma_sm90_bf16_nt_64x16x64_s10_w1_coop_c1x1x1:swapped"
    found = plan(16, 57344, 8192, kernel=row)
    assert found["tiles"] == 57344 // 64 and found["grid"] == 2 * 132
    # As many rounds of half the blocks: within a tenth of a row with an SM to each block and twice the stages.
    alone = plan(16, 57344, 8192, kernel="tcg_wgmma_sm90_bf16_nt_64x16x128_s10_w1_coop_c1x1x1:swapped")
    assert alone["grid"] == 132 and abs(found["cycles"] / alone["cycles"] - 1) < 0.1
