"""tcg_copy and tcg_reduce, on the CPU: kernels/util.cu itself runs on the host (host_util.h). Copies of rows at every
alignment read nothing but the operand; sums are the same whoever adds them."""

import ctypes
import re

import numpy as np
import on_host
import pytest
from abi import I16, I32, I64, PTR, U32, Dim, struct

pytestmark = on_host.needs_cxx

THREADS = 256  # of a block
PARTS = 8  # of a sum
F32 = 2  # abi.h's code
TURNED, PIECES = 1, 2  # of tcg_copy_way


Divisor = struct("Divisor", (U32, "by multiplier shift"))
Job = struct(
    "Job",
    *((PTR, "src dst"), (I64, "rows cols src_row src_col dst_row batches"), (U32, "blocks"), (I32, "batch_ndim")),
    *((I32, "way step_entry step_row step_piece"), (Divisor, "row_pieces entry_rows"), (Dim * 6, "batch")),
)
Copy = struct("Copy", (Job * 2, "job"), (I32, "elem_bytes reserved"))
Reduce = struct(
    "Reduce",
    *((PTR, "partials c"), (I64, "m n partial_row batches c_row c_col c_split"), (I32, "splits c_dtype batch_ndim")),
    *((I16, "c_together shared"), (Dim * 6, "batch")),
)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("util")
    loads = {r"word\[[01]\]": 2, r"from\[2 \* i( \+ 1)?\]": 2}
    source = (on_host.KERNELS / "util.cu").read_text()
    assert {pattern: len(re.findall(pattern, source)) for pattern in loads} == loads
    on_host.copy_kernels(folder, "util.cu", {}, [(pattern, r"load(&\g<0>)") for pattern in loads])
    library = on_host.build(folder, "host_util.h", "-O1 -pthread")
    library.copy.argtypes = [ctypes.POINTER(Copy), ctypes.c_int, PTR, I64, PTR]
    library.reduce.argtypes = [ctypes.POINTER(Reduce), ctypes.c_int]
    return library


def divisor(by):
    shift = 31 + (by - 1).bit_length()
    return Divisor(by, -(-(1 << shift) // by), shift)


def at_multiple(dtype, elems):
    """An array of that many elements that starts at a multiple of 64 bytes."""
    memory = np.zeros(elems * dtype.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + elems * dtype.itemsize].view(dtype)


def job_of(source, dtype, blocks):
    """A copy of source[batch, row, col]; what it writes, and what that has to become."""
    batches, rows, cols = source.shape
    row_elems = -(-cols * dtype.itemsize // 128) * 128 // dtype.itemsize
    guard = 64
    written = at_multiple(dtype, batches * rows * row_elems + 2 * guard)
    written[:] = 7
    expected = written.copy()
    expected[guard:-guard] = 0
    expected[guard:-guard].reshape(batches, rows, row_elems)[:, :, :cols] = source
    strides = [s // dtype.itemsize for s in source.strides]
    job = Job(source.ctypes.data, written[guard:].ctypes.data, rows, cols, *strides[1:], row_elems, batches, blocks)
    if batches > 1:
        job.batch_ndim = 1
        job.batch[0] = Dim(batches, strides[0])
    if strides[2] == 1:
        pieces = row_elems * dtype.itemsize // 16
        lines, job.step_piece = divmod(blocks * THREADS, pieces)
        job.step_entry, job.step_row = divmod(lines, rows)
        job.way, job.row_pieces, job.entry_rows = PIECES, divisor(pieces), divisor(rows)
    elif strides[1] == 1:
        job.way = TURNED
    return job, written, expected


def check_copy(host, memory, sources, synchronises=False, blocks=1):
    """Sources: views of the memory."""
    readable = np.zeros(memory.nbytes, np.bool_)
    for source in sources:
        start = source.ctypes.data - memory.ctypes.data
        offsets = sum(
            np.arange(n).reshape([-1 if a == axis else 1 for a in range(3)]) * source.strides[axis]
            for axis, n in enumerate(source.shape)
        )
        for byte in range(memory.itemsize):
            readable[start + offsets + byte] = True
    args = Copy(elem_bytes=memory.itemsize)
    made = [job_of(source, memory.dtype, blocks) for source in sources]
    for i, (job, _, _) in enumerate(made):
        args.job[i] = job
    assert host.copy(args, synchronises, memory.ctypes.data, memory.nbytes, readable.ctypes.data) == 0
    for source, (_, written, expected) in zip(sources, made, strict=True):
        assert (written == expected).all(), (memory.itemsize, source.shape, source.strides)


@pytest.mark.parametrize("elem_bytes", [2, 4])
def test_rows_of_every_alignment_and_length(host, elem_bytes):
    dtype = np.dtype(f"u{elem_bytes}")
    memory = at_multiple(dtype, 2000)
    memory[:] = np.arange(1, 2001)
    for cols in (*range(1, 45), *range(61, 68), 127, 128, 129, 255, 256, 257, 300):
        for offset in range(16 // elem_bytes):
            pitch = cols + offset % 3
            view = memory[8 + offset : 8 + offset + 2 * pitch].reshape(1, 2, pitch)[:, :, :cols]
            check_copy(host, memory, [view])


@pytest.mark.parametrize("elem_bytes", [2, 4])
def test_two_operands_of_any_strides(host, elem_bytes):
    rng = np.random.default_rng(1)
    dtype = np.dtype(f"u{elem_bytes}")
    memory = at_multiple(dtype, 200000)
    memory[:] = rng.integers(1, 60000, 200000)
    for _ in range(16):
        sources = []
        for _ in range(rng.integers(1, 3)):
            batches, rows, cols = rng.integers(1, [4, 70, 300])
            start, step = rng.integers(0, 9), rng.integers(1, 3)
            view = memory[start:][: batches * rows * cols * step].reshape(batches, rows, cols * step)[:, :, ::step]
            kind = rng.integers(0, 4)
            if kind == 1:  # contiguous columns
                view = memory[start:][: batches * rows * cols].reshape(batches, cols, rows).transpose(0, 2, 1)
            elif kind == 2:
                view = view[:, ::-1]
            sources.append(view)
        check_copy(host, memory, sources, synchronises=True, blocks=int(rng.integers(1, 4)))


def test_sums_are_the_same_whoever_adds_them(host):
    rng = np.random.default_rng(2)
    for splits in (1, 2, 7, 8, 9, 16, 31, 64):
        for batches, m, n in ((1, 9, 8), (2, 5, 7), (1, 3, 1), (1, 2, 6)):
            pitch = -(-n // 4) * 4
            partials = at_multiple(np.dtype(np.float32), splits * batches * m * pitch)
            partials[:] = np.nan  # the padding's part of them
            by_split = partials.reshape(splits, batches, m, pitch)[..., :n]
            by_split[:] = rng.standard_normal(by_split.shape)
            parts = [by_split[p::PARTS] for p in range(min(splits, PARTS))]
            sums = []
            for part in parts:
                total = part[0]
                for more in part[1:]:
                    total = total + more
                sums.append(total)
            expected = sums[0]
            for more in sums[1:]:
                expected = expected + more
            for shared in (0, 1):
                for order in ("row", "column"):
                    guarded = at_multiple(np.dtype(np.float32), batches * m * n + 32)
                    guarded[:], c = 7, guarded[16:-16]
                    rows, cols = (n, 1) if order == "row" else (1, m)
                    args = Reduce(partials.ctypes.data, c.ctypes.data, m, n, pitch, batches)
                    args.c_row, args.c_col, args.c_split = rows, cols, batches * m * pitch
                    args.splits, args.c_dtype, args.shared = splits, F32, shared
                    args.c_together = order == "row" and n % 4 == 0
                    if batches > 1:
                        args.batch_ndim = 1
                        args.batch[0] = Dim(batches, m * n)
                    assert host.reduce(args, 2) == 0
                    found = (
                        c.reshape(batches, m, n) if order == "row" else c.reshape(batches, n, m).transpose(0, 2, 1)
                    )
                    assert (found == expected).all(), (splits, batches, shared, order)
                    assert (guarded[:16] == 7).all() and (guarded[-16:] == 7).all(), (splits, batches, shared, order)
