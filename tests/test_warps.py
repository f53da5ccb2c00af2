"""Families mma and mma_shift on the CPU: a block's threads run together (host_warps.h), ldmatrix and mma do what the PTX
ISA says, and the products are checked against exact ones, as is that nothing outside the operands is read."""

import ctypes

import numpy as np
import on_host
import pytest
import reference as ref
from abi import Gemm

pytestmark = on_host.needs_cxx

SOURCES = {"mma": "mma_sm80.cu", "mma_shift": "mma_shift_sm80.cu"}
ROWS = {"mma": r"TCG_MMA\(bf16, .*, 2, [01]\)", "mma_shift": r"TCG_MMA_SHIFT\(bf16, "}
INSTEAD = {
    "ldmatrix_x4": "host_ldmatrix(regs, address, false);",
    "ldmatrix_x4_trans": "host_ldmatrix(regs, address, true);",
    "cp_async_cg_16": "host_cp_async(dst, src, src_bytes);",
    "cp_async_ca_16": "host_cp_async(dst, src, src_bytes);",
    "mma_m16n8k16": "host_mma(d, a, b0, b1);",
    "cvt_rn_bf16_f32": "return host_bf16(value);",
    "cvt_rn_bf16x2_f32": "return host_bf16x2(low, high);",
}


Row = on_host.row_struct("order", "block_m", "block_n", "block_k", "threads")


class Host:
    def __init__(self, family, folder, edits=()):
        self.library, self.rows = on_host.build_family(
            folder, "host_warps.h", "-O1 -pthread", SOURCES[family], INSTEAD, ROWS[family], Row, edits
        )
        self.library.run.restype = ctypes.c_size_t

    def product(
        self, rng, index, m, n, k, *, pads=(0, 0), shifts=(0, 0), flips=(False, False), splits=1, c_columns=False
    ):
        """Checks one product of integers: operands' lines `pads` elements longer than they are, `shifts` elements behind a
        multiple of 16 bytes, backwards where `flips`; NaN and Inf around them and between their lines."""
        row = self.rows[index]
        k_major = (row.order in (0, 1), row.order in (1, 3))
        keep, strides, addresses, ranges, values = [], [], [], [], []
        for side, size in enumerate((m, n)):
            shape = (size, k) if k_major[side] else (k, size)
            line = max(shape[1], 1) + pads[side]
            first, step = ref.MARGIN + shifts[side], line
            if flips[side]:
                first, step = first + (shape[0] - 1) * line, -line
            memory = np.full(2 * ref.MARGIN + 24 + shape[0] * line, ref.POISON["bfloat16"], np.uint16)
            memory[::3] = 0x7F80  # Inf
            skip = -memory.ctypes.data % 16 // 2
            where = skip + first + np.arange(shape[0])[:, None] * step + np.arange(shape[1])
            value = ref.integers(rng, shape)
            memory[where] = ref.to_bits(value, "bfloat16")
            keep.append(memory)
            strides.append((step, 1))
            addresses.append(memory.ctypes.data + 2 * (skip + first))
            ranges += (
                [memory.ctypes.data + 2 * int(where.min()), memory.ctypes.data + 2 * int(where.max()) + 2]
                if where.size
                else [0, 0]
            )
            values.append(value if k_major[side] else value.T)
        c = np.full((n, m + 3) if c_columns else (m, n + 3), ref.POISON["bfloat16"], np.uint16)
        partials = np.full((splits, m, n), np.nan, np.float32)
        args = Gemm(a=addresses[0], b=addresses[1], m=m, n=n, k=k, splits=splits, raster_group=2, c_vec_bytes=2)
        args.a_row, args.a_col = strides[0] if k_major[0] else strides[0][::-1]
        args.b_col, args.b_row = strides[1] if k_major[1] else strides[1][::-1]
        args.c, args.c_row, args.c_col, args.c_dtype = c.ctypes.data, *((1, m + 3) if c_columns else (n + 3, 1)), 1
        args.tiles_m, args.tiles_n = -(-m // row.block_m), -(-n // row.block_n)
        args.raster_group = min(2, args.tiles_m)
        blocks = max(-(-k // row.block_k), 1)
        args.k_per_split = -(-blocks // splits) * row.block_k
        assert args.k_per_split * (splits - 1) < max(k, 1)
        if splits > 1:
            args.c, args.c_row, args.c_col, args.c_split, args.c_dtype = partials.ctypes.data, n, 1, m * n, 2
        args.tiles = args.tiles_m * args.tiles_n * splits
        may_read = (ctypes.c_void_p * 4)(*ranges)
        grid = min(int(args.tiles), 3)
        outside = self.library.run(index, ctypes.byref(args), grid, may_read)
        what = (row.name, m, n, k, pads, shifts, flips, splits, c_columns)
        assert outside == 0, ("read outside", what)
        exact = values[0] @ values[1].T
        if splits > 1:
            np.testing.assert_array_equal(partials.sum(0), exact, str(what))
        else:
            found = c[:, :m].T if c_columns else c[:, :n]
            np.testing.assert_array_equal(
                ref.from_bits(found, "bfloat16"), ref.from_bits(ref.to_bits(exact, "bfloat16"), "bfloat16"), str(what)
            )
            assert (c[:, m if c_columns else n :] == ref.POISON["bfloat16"]).all(), ("written past a row", what)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return on_host.each_once(Host, tmp_path_factory)


def cases(rng, row, count):
    yield row.block_m + 1, row.block_n - 1, 3 * row.block_k + 5, {}
    for k in (1, 7, 8, 9, row.block_k - 7, row.block_k, 2 * row.block_k - 1):
        yield 9, 3, k, {"shifts": (1, 3)}
    for _ in range(count):
        m, n = (int(rng.integers(1, 2 * block + 2)) for block in (row.block_m, row.block_n))
        k = int(rng.integers(1, 7 * row.block_k))
        splits = int(rng.integers(1, min(4, -(-k // row.block_k)) + 1))
        while -(-(-(-k // row.block_k)) // splits) * (splits - 1) * row.block_k >= k:
            splits -= 1
        pads, shifts = (tuple(int(x) for x in rng.integers(0, 9, 2)) for _ in range(2))
        flips = tuple(bool(x) for x in rng.integers(0, 4, 2) == 0)
        yield m, n, k, dict(pads=pads, shifts=shifts, flips=flips, splits=splits, c_columns=bool(rng.integers(2)))


def test_rows_for_any_alignment(rng, host):
    family = host("mma")
    assert {row.order for row in family.rows} == {0, 1, 2, 3}
    for index, row in enumerate(family.rows):
        for m, n, k, options in cases(rng, row, 2):
            family.product(rng, index, m, n, k, **options)


def test_shifted_rows(rng, host):
    family = host("mma_shift")
    for index, row in enumerate(family.rows):
        for m, n, k, options in cases(rng, row, 6):
            family.product(rng, index, m, n, k, **options)


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r"a\[t\]\[0\] &= fragment.head\[i\];", ""),
        (r"b0 &= fragment.head\[i\];", ""),
        (r"\(WORD - shift\)", "WORD"),
        (r"of == 0 && begins", "false"),
        (r"of < whole", "true"),
    ],
    ids=["A's head", "B's head", "shift", "beginning", "ends"],
)
def test_shifted_rows_need(rng, host, pattern, instead):
    """The test above sees each of these gone."""
    family = host("mma_shift", (pattern, instead))
    with pytest.raises(AssertionError):
        for m, n, k, options in cases(rng, family.rows[0], 12):
            family.product(rng, 0, m, n, k, **options)
