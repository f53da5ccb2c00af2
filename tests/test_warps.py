"""Families mma and mma_shift on the CPU: a block's threads run together (host_warps.h), ldmatrix and mma do what the PTX
ISA says, and the products are checked against exact ones, as is that nothing outside the operands is read."""

import ctypes
import re
import shlex
import subprocess

import numpy as np
import pytest
import reference as ref
from test_banks import CXX, KERNELS, TESTS, on_host

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler")

SOURCES = {"mma": "mma_sm80.cu", "mma_shift": "mma_shift_sm80.cu"}
ROWS = {"mma": r"TCG_MMA\(bf16, .*, 2, [01]\)", "mma_shift": r"TCG_MMA_SHIFT\(bf16, "}
INSTEAD = {
    "ldmatrix_x4": "host_ldmatrix(regs, address, false);",
    "ldmatrix_x4_trans": "host_ldmatrix(regs, address, true);",
    "cp_async_cg_16": "host_cp_async(dst, src, src_bytes);",
    "mma_m16n8k16": "host_mma(d, a, b0, b1);",
    "cvt_rn_bf16_f32": "return host_bf16(value);",
    "cvt_rn_bf16x2_f32": "return host_bf16x2(low, high);",
}
NT, MARGIN = 1, 64


class Args(ctypes.Structure):
    """tcg_gemm_args."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("a", "b", "c")]
        + [(name, ctypes.c_int64) for name in ("m", "n", "k", "a_row", "a_col", "b_row", "b_col", "c_row", "c_col")]
        + [(name, ctypes.c_int64) for name in ("c_split", "k_per_split", "tiles_m", "tiles_n", "tiles")]
        + [
            (name, ctypes.c_int32)
            for name in ("splits", "raster_group", "c_dtype", "c_vec_bytes", "batch_ndim", "c_tma")
        ]
        + [("batch", ctypes.c_int64 * 24)]
    )


class Row(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("kernel", ctypes.c_void_p)] + [
        (field, ctypes.c_int) for field in ("order", "block_m", "block_n", "block_k", "threads")
    ]


class Host:
    def __init__(self, family, folder, edits=()):
        for file in [
            *KERNELS.glob("*.cuh"),
            *KERNELS.glob("ptx/*.cuh"),
            KERNELS / "abi.h",
            KERNELS / SOURCES[family],
        ]:
            text = file.read_text()
            for pattern, instead in edits if file.name == SOURCES[family] else ():
                text, count = re.subn(pattern, instead, text)
                assert count, pattern
            copy = folder / file.relative_to(KERNELS)
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(on_host(text, file.parent.name == "ptx", INSTEAD))
        table = (KERNELS / "table.def").read_text().splitlines(keepends=True)
        is_row = re.compile(r"TCG_\w+\((f16|bf16|f32), ")
        (folder / "table.def").write_text(
            "".join(line for line in table if not is_row.match(line) or re.match(ROWS[family], line))
        )
        command = f"{CXX} -std=c++17 -O1 -w -shared -fPIC -pthread -DTCG_IN_bf16 -I. -I{shlex.quote(str(TESTS))}"
        command += f" '-DTCG_SOURCE=\"{SOURCES[family]}\"' -o host.so host.cc"
        (folder / "host.cc").write_text('#include "host_warps.h"\n')
        built = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
        self.library = ctypes.CDLL(str(folder / "host.so"))
        self.library.row_at.restype = ctypes.POINTER(Row)
        self.library.run.restype = ctypes.c_size_t
        self.rows = [self.library.row_at(index).contents for index in range(self.library.row_count())]

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
            first, step = MARGIN + shifts[side], line
            if flips[side]:
                first, step = first + (shape[0] - 1) * line, -line
            memory = np.full(2 * MARGIN + 16 + shape[0] * line, ref.POISON["bfloat16"], np.uint16)
            memory[::3] = 0x7F80  # Inf
            memory = np.frombuffer(memory.tobytes() + bytes(16), np.uint16).copy()
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
        args = Args(a=addresses[0], b=addresses[1], m=m, n=n, k=k, splits=splits, raster_group=2, c_vec_bytes=2)
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
    built = {}

    def get(family, *edits):
        key = family, edits
        if key not in built:
            built[key] = Host(family, tmp_path_factory.mktemp(family), edits)
        return built[key]

    return get


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
