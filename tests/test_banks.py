"""Shared memory and fragments, on the CPU: the kernels' own address arithmetic runs on the host (host_kernels.h), a
model of the banks counts conflicts, and every mma is checked to multiply what the PTX ISA says its registers hold."""

import ctypes
import enum
import re
import subprocess

import numpy as np
import on_host
import pytest
from on_host import CXX, KERNELS

pytestmark = on_host.needs_cxx

SOURCES = {
    "simt": "simt.cu",
    "mma": "mma_sm80.cu",
    "mma_naive": "mma_naive_sm80.cu",
    "wmma": "wmma_sm80.cu",
    "tma_mma": "tma_mma_sm90.cu",
    "wgmma": "wgmma_sm90.cu",
}
# The rows that run here: aligned operands; wgmma's tiles of whole boxes without a cluster.
ROWS = {
    "simt": r"TCG_SIMT\(f32, ",
    "mma": r"TCG_MMA\(bf16, .*, 16, [01]\)",
    "mma_naive": r"TCG_MMA_NAIVE\(bf16, ",
    "wmma": r"TCG_WMMA\(bf16, ",
    "tma_mma": r"TCG_TMA_MMA\(bf16, ",
    "wgmma": r"TCG_WGMMA\(bf16, \w\w, 128, (128|256), 64, \d, 2, coop, 1, 1, 1, ",
}
# What a function does here in place of its inline PTX.
INSTEAD = {
    "ldmatrix_x4": "record_ldmatrix(LDMATRIX, regs, address);",
    "ldmatrix_x4_trans": "record_ldmatrix(LDMATRIX_TRANS, regs, address);",
    "stmatrix_x4": "record(STMATRIX, address);",
    "stmatrix_x4_trans": "record(STMATRIX, address);",
    "cp_async_cg_16": "record_cp_async(dst, src, src_bytes);",
    "cp_async_ca_16": "record_cp_async(dst, src, src_bytes);",
    "cp_async_cg_16_if": "if (enabled) record_cp_async(dst, src, 16);",
    "cp_async_ca_4": "record(COPY_IN_4, dst);",
    "cp_async_ca_4_if": "if (enabled) record(COPY_IN_4, dst);",
    "mma_m16n8k16": "record_mma(d, a, b0, b1);",
    "wmma_load_##operand##_##layout##_bf16": "record_wmma_load(address, stride);",
    "cp_async_bulk_tensor_3d_shared_cta": "record_tma(dst, map, x, y);",
    "mbarrier_test_wait": "return true;",
    "elect_sync": "return threadIdx.x % 32 == 0;",
    "cluster_ctarank": "return 0;",
}
ACCESS = np.dtype([("kind", "i4"), ("thread", "i4"), ("value", "i8"), ("extra", "i4", 6)])

# As host_kernels.h numbers them.
KINDS = [
    "LDMATRIX",
    "LDMATRIX_TRANS",
    "STMATRIX",
    "COPY_IN",
    "COPY_OUT",
    "WMMA_LOAD",
    "MMA",
    "COPY_IN_4",
    "LOAD_FLOAT4",
]
Kind = enum.IntEnum("Kind", KINDS, start=0)


Row = on_host.row_struct("order", "block_m", "block_n", "block_k", "threads", "stages")


class Host:
    """The rows of one family, compiled for the host."""

    def __init__(self, family, folder, edits=()):
        for header in ("mma.h", "cuda_fp16.h", "cuda_bf16.h"):
            (folder / header).write_text("")
        self.library, self.rows = on_host.build_family(
            folder, "host_kernels.h", "-O0", SOURCES[family], INSTEAD, ROWS[family], Row, edits
        )
        self.library.access_data.restype = self.library.image_data.restype = ctypes.c_void_p

    def run(self, index, *, k_blocks=2, f32=False, c_columns=False):
        """Every access of one block, in order by thread; and what copies left in shared memory, as uint16."""
        count = self.library.run(index, k_blocks, f32, c_columns)
        data = ctypes.string_at(self.library.access_data(), count * ACCESS.itemsize)
        image = ctypes.string_at(self.library.image_data(), 232448)
        return np.frombuffer(data, ACCESS), np.frombuffer(image, np.uint16)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return on_host.each_once(Host, tmp_path_factory)


def by_warp(accesses, kinds):
    """Arrays [instruction, lane] of a kind's accesses, warp by warp: the lanes of a warp run the same ones."""
    chosen = accesses[np.isin(accesses["kind"], kinds)]
    for warp in np.unique(chosen["thread"] // 32):
        lanes = chosen[chosen["thread"] // 32 == warp]
        counts = np.bincount(lanes["thread"] % 32, minlength=32)
        assert (counts == counts[0]).all(), f"warp {warp}: lanes run different numbers of instructions: {counts}"
        yield lanes.reshape(32, -1).T


def phases(accesses, kind):
    """Arrays [phase, participant] of addresses: a phase is what the banks serve at once, 128 bytes at best: a
    matrix of eight rows, or eight neighbouring lanes of 16 bytes."""
    for warp in by_warp(accesses, [Kind.LDMATRIX, Kind.LDMATRIX_TRANS] if kind == Kind.LDMATRIX else [kind]):
        address = warp["value"]
        if kind == Kind.WMMA_LOAD:
            # A 16 x 16 block as four 8 x 8 matrices: what nvcc makes of it.
            assert (address == address[:, :1]).all()
            line = address[:, :1] + np.arange(8) * warp["extra"][:, :1, 0] * 2
            below = 8 * warp["extra"][:, :1, 0] * 2
            address = np.concatenate([line, line + 16, line + below, line + below + 16])
        yield address.reshape(-1, 8)


def ways(addresses, size):
    """Of phases of accesses of `size` bytes: how many words the fullest of the 32 banks of 4 bytes has to serve, one
    after the other. 1 is free of conflicts. The same word is served once."""
    words = addresses[:, :, None] // 4 + np.arange(size // 4)
    words = np.sort(words.reshape(len(words), -1), axis=1)
    fresh = np.concatenate([np.ones((len(words), 1), bool), words[:, 1:] != words[:, :-1]], axis=1)
    counts = np.zeros((len(words), 32), int)
    np.add.at(counts, (np.nonzero(fresh)[0], words[fresh] % 32), 1)
    return counts.max(axis=1)


def conflicts(host, kind, **options):
    """By row of a family's: the most ways of a kind's phases."""
    result = {}
    for index, row in enumerate(host.rows):
        accesses, _ = host.run(index, **options)
        found = [ways(phase, 16).max() for phase in phases(accesses, kind)]
        assert found, f"{row.name.decode()}: no access of kind {kind}"
        result[row.name.decode()] = int(max(found))
    return result


def test_model():
    row = np.arange(8)
    assert ways(row[None] * 16, 16) == [1]
    assert ways(row[None] * 128, 16) == [8]
    assert ways(row[None] * 64, 16) == [4]
    assert ways(row[None] * 80, 16) == [1]
    assert ways(row[None] * 0, 16) == [1], "a broadcast"
    assert ways(np.arange(16)[None] * 8, 8) == [1]
    assert ways(np.arange(32)[None] * 8, 4) == [2]


CASES = [
    *[(family, kind) for family in ("mma", "mma_naive") for kind in (Kind.COPY_IN, Kind.LDMATRIX, Kind.COPY_OUT)],
    ("wmma", Kind.COPY_IN),
    ("wmma", Kind.WMMA_LOAD),
    ("tma_mma", Kind.LDMATRIX),
    ("tma_mma", Kind.COPY_OUT),
]


@pytest.mark.parametrize(("family", "kind"), CASES, ids=lambda value: getattr(value, "name", value))
def test_no_conflicts(host, family, kind):
    assert {name: n for name, n in conflicts(host(family), kind).items() if n != 1} == {}


@pytest.mark.parametrize("family", ["mma", "mma_naive", "tma_mma"])
@pytest.mark.parametrize("f32", [False, True])
@pytest.mark.parametrize("c_columns", [False, True])
def test_no_conflicts_on_the_way_out(host, family, f32, c_columns):
    found = conflicts(host(family), Kind.COPY_OUT, f32=f32, c_columns=c_columns)
    assert {name: n for name, n in found.items() if n != 1} == {}


@pytest.mark.parametrize("c_columns", [False, True])
def test_no_conflicts_in_boxes_of_c(host, c_columns):
    found = conflicts(host("wgmma"), Kind.STMATRIX, c_columns=c_columns)
    assert {name: n for name, n in found.items() if n != 1} == {}


def simt_ways(host, c_columns, *edits):
    """By row and kind: the most ways of what simt does to shared memory. Of its reads, half a warp is served at once:
    lanes that read the same 16 bytes."""
    family = host("simt", *edits)
    result = {}
    for index, row in enumerate(family.rows):
        accesses, _ = family.run(index, k_blocks=row.stages + 2, c_columns=c_columns)
        for kind, lanes, size in (
            (Kind.COPY_IN, 8, 16),
            (Kind.COPY_IN_4, 32, 4),
            (Kind.LOAD_FLOAT4, 16, 16),
        ):
            found = [ways(warp["value"].reshape(-1, lanes), size).max() for warp in by_warp(accesses, [kind])]
            if found:
                result[row.name.decode(), kind.name] = int(max(found))
        assert (row.name.decode(), "LOAD_FLOAT4") in result
    return result


@pytest.mark.parametrize("c_columns", [False, True])
def test_simt_has_no_conflicts(host, c_columns):
    found = simt_ways(host, c_columns)
    assert {kind for _, kind in found} == {"COPY_IN", "COPY_IN_4", "LOAD_FLOAT4"}
    assert {name: n for name, n in found.items() if n != 1} == {}


def test_conflicts_of_simt_without_padding(host):
    found = simt_ways(
        host,
        False,
        (r"\(BLOCK_MN \+ 4\) \* 4", "BLOCK_MN * 4"),
        (r"static_assert\(A_BYTES \+ [^;]*;", ""),
    )
    assert max(found.values()) == 8
    assert {name for name, n in found.items() if n == 8} == {name for name in found if name[1] == "COPY_IN_4"}


NO_SWIZZLE = (r"return CHUNKS >= 8 \? [^;]*;", "return chunk;")


@pytest.mark.parametrize(
    ("family", "kind", "edit", "worst"),
    [
        ("mma", Kind.LDMATRIX, NO_SWIZZLE, 8),
        ("mma_naive", Kind.LDMATRIX, NO_SWIZZLE, 8),
        ("tma_mma", Kind.LDMATRIX, NO_SWIZZLE, 8),
        ("wgmma", Kind.STMATRIX, (r"\(chunk \^ \(line & 7\)\)", "chunk"), 8),
        # Lines of 128 or 256 elements meet eight times, those of BLOCK_K = 32 four times.
        ("wmma", Kind.WMMA_LOAD, (r"PITCH = LINE \+ 8;", "PITCH = LINE;"), 8),
    ],
    ids=["mma", "mma_naive", "tma_mma", "wgmma", "wmma"],
)
def test_conflicts_without_swizzle(host, family, kind, edit, worst):
    edits = [edit]
    if family == "wmma":
        edits.append((r"static_assert\(BYTES == TCG_WMMA_TILE_BYTES[^;]*;", ""))
        edits.append((r"static_assert\(SMEM_BYTES == TCG_WMMA_SMEM[^;]*;", ""))
    found = conflicts(host(family, *edits), kind)
    assert max(found.values()) == worst
    assert min(found.values()) >= 4


def test_swizzle_is_a_permutation_and_linear(tmp_path):
    """swizzle.cuh itself; for rows of eight chunks it is the pattern that TMA writes."""
    counts = (1, 2, 4, 8, 16, 32)
    cases = "".join(f"if (chunks == {n}) return swizzle<{n}>(row, chunk);" for n in counts)
    source = f"""#define __host__
#define __device__
#include "{KERNELS / "swizzle.cuh"}"
extern "C" int at(int chunks, int row, int chunk) {{ {cases} return -1; }}
extern "C" int period(void) {{ return SWIZZLE_PERIOD; }}"""
    (tmp_path / "swizzle.cc").write_text(source)
    subprocess.run(
        [CXX, "-std=c++17", "-shared", "-fPIC", "-o", "swizzle.so", "swizzle.cc"], cwd=tmp_path, check=True
    )
    library = ctypes.CDLL(str(tmp_path / "swizzle.so"))
    for chunks in counts:
        place = np.array([[library.at(chunks, row, chunk) for chunk in range(chunks)] for row in range(64)])
        assert (np.sort(place, axis=1) == np.arange(chunks)).all()
        chunk = np.arange(chunks)
        for d in range(chunks):
            assert (place[:, chunk ^ d] == place ^ d).all()
        assert (place[library.period() :] == place[: -library.period()]).all()
        address = (np.arange(64)[:, None] * chunks + place) * 16
        for column in address.T:
            assert (ways(column.reshape(-1, 8), 16) == 1).all()
        assert (ways(address.reshape(-1, 8), 16) == 1).all()
        if chunks == 8:
            plain = (np.arange(64)[:, None] * 8 + chunk) * 16
            assert (address == plain ^ (plain >> 3 & 0x70)).all()


# PTX ISA, "Matrix Fragments for mma.m16n8k16", 16-bit elements: [lane, i] for a lane's a_i, b_i, c_i.
LANE = np.arange(32)[:, None]
GROUP, IN_GROUP = LANE // 4, LANE % 4
I4, I8 = np.arange(4), np.arange(8)
A_ROW = GROUP + 8 * (I8 // 2 % 2)
A_K = IN_GROUP * 2 + I8 % 2 + 8 * (I8 // 4)
B_K = IN_GROUP * 2 + I4 % 2 + 8 * (I4 // 2)
B_COLUMN = GROUP + 0 * I4
D_ROW = GROUP + 8 * (I4 // 2)
D_COLUMN = IN_GROUP * 2 + I4 % 2


def test_documented_fragments():
    """What ptx/mma_sync.cuh says of the layouts is what the PTX ISA says."""
    comment = (KERNELS / "ptx" / "mma_sync.cuh").read_text().split("*/")[0]
    entries = re.findall(r"\b([abd])\[?(\d)\]?\s+([ABD])\[([^\]]+)\]\[([^\]]+)\]", comment)
    assert sorted(name + number for name, number, *_ in entries) == ["a0", "a1", "a2", "a3"] + ["b0", "b1"] + [
        f"d{i}" for i in range(4)
    ]
    expected = {"a": (A_ROW, A_K), "b": (B_K, B_COLUMN), "d": (D_ROW, D_COLUMN)}
    for name, number, matrix, *axes in entries:
        assert matrix.lower() == name
        elements = 1 if name == "d" else 2
        for half in range(elements):
            for axis, where in zip(axes, expected[name], strict=True):
                ends = axis.split("..")
                said = [
                    eval(ends[half if len(ends) == 2 else 0], {"g": g, "p": p}) for g, p in zip(*lanes(), strict=True)
                ]
                assert said == where[:, int(number) * elements + half].tolist(), (name, number, axis)


def lanes():
    return (LANE[:, 0] // 4).tolist(), (LANE[:, 0] % 4 * 2).tolist()


def registers(warp, image):
    """[ldmatrix, register, lane, half]: what a warp's lanes receive (PTX ISA, "ldmatrix")."""
    matrices = image[warp["value"][:, :, None] // 2 + np.arange(8)].reshape(len(warp), 4, 8, 8)  # row, column
    lane, half = np.arange(32)[:, None], np.arange(2)
    plain = matrices[:, :, lane // 4, lane % 4 * 2 + half]
    transposed = matrices[:, :, lane % 4 * 2 + half, lane // 4]
    return np.where((warp["kind"][:, 0] == Kind.LDMATRIX)[:, None, None, None], plain, transposed)


@pytest.mark.parametrize("family", ["mma", "mma_naive", "tma_mma"])
def test_products(host, family):
    """Each mma gets the A and B that its registers stand for, adds to the accumulators of that place of C, and
    every 16 x 8 x 16 of the block's product comes once, in order of k."""
    family_host = host(family)
    for index, row in enumerate(family_host.rows):
        blocks = 1 if row.stages == 1 else 2
        k = blocks * row.block_k
        accesses, image = family_host.run(index, k_blocks=blocks)
        warps_m, warps_n = map(int, row.name.decode().split()[-1].split("x"))
        tiles_n = row.block_n // warps_n // 8
        done = set()
        for loads, products in zip(
            by_warp(accesses, [Kind.LDMATRIX, Kind.LDMATRIX_TRANS]), by_warp(accesses, [Kind.MMA]), strict=True
        ):
            held = registers(loads, image)
            first = products["value"].min(axis=0)
            corner = None
            for product in products:
                assert (product["extra"] == product["extra"][0]).all(), "lanes use different registers"
                came_from = product["extra"][0]
                values = held[came_from // 4, came_from % 4].astype(int)  # [register, lane, half]
                a = values[:4].transpose(1, 0, 2).reshape(32, 8)
                b = values[4:].transpose(1, 0, 2).reshape(32, 4)
                m0, k0 = divmod(int(a[0, 0]), k)
                n0 = int(b[0, 0]) // k
                assert (a == (m0 + A_ROW) * k + k0 + A_K).all()
                assert (b == (n0 + B_COLUMN) * k + k0 + B_K).all()
                which = (product["value"] - first) // 16
                assert (which == which[0]).all()
                corner = corner or (m0, n0)
                assert (m0 - corner[0], n0 - corner[1]) == (which[0] // tiles_n * 16, which[0] % tiles_n * 8)
                assert k0 == 0 or (m0, n0, k0 - 16) in done
                assert (m0, n0, k0) not in done
                done.add((m0, n0, k0))
        assert len(done) == row.block_m // 16 * (row.block_n // 8) * (k // 16), row.name
