"""What results are checked against: exact products of small integers, layouts inside poisoned buffers, the error
against float64, and samplers of shapes and strides. NumPy for the host; torch functions import torch themselves.

Exactness. Operands are integers in -2..2, so every partial sum is an integer below 2**24 for K < 2**22: fp32
accumulation is exact in any order, the float64 product is too, and one rounding to nearest even ends both.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

DTYPES = ("float16", "bfloat16", "float32")
HALVES = ("float16", "bfloat16")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
# A quiet NaN with a payload no arithmetic produces: poison for what must not be read, sentinel for what must not be
# written, and stale content that must not reach the result.
POISON = {"float16": 0x7E2A, "bfloat16": 0x7FEA, "float32": 0x7FC0AAAA}
MARGIN = 64  # poisoned elements on either side of a view


# ---- layouts ---------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Where the elements of an array lie in a flat buffer, in elements."""

    shape: tuple
    strides: tuple
    offset: int
    size: int

    @property
    def extent(self):
        """(first, last + 1) element touched; (offset, offset) when there is none."""
        if 0 in self.shape:
            return self.offset, self.offset
        low = sum((n - 1) * s for n, s in zip(self.shape, self.strides) if s < 0)
        high = sum((n - 1) * s for n, s in zip(self.shape, self.strides) if s > 0)
        return self.offset + low, self.offset + high + 1

    def indices(self):
        """The flat index of every element, as an int64 array of the layout's shape."""
        index = np.full(self.shape, self.offset, np.int64)
        for axis, (n, s) in enumerate(zip(self.shape, self.strides)):
            index += (np.arange(n, dtype=np.int64) * s).reshape(
                [-1 if i == axis else 1 for i in range(len(self.shape))]
            )
        return index


def strided(shape, strides, shift=0, margin=MARGIN):
    """The layout with exactly these strides, `shift` elements after an aligned start."""
    bare = Layout(tuple(shape), tuple(strides), 0, 0)
    first, last = bare.extent
    return bare._replace(offset=margin + shift - first, size=2 * margin + shift + last - first)


def packed(shape, order=None, step=1, pads=None, zero=(), flip=(), shift=0, margin=MARGIN):
    """A layout by construction: axes in `order` (outermost first), the innermost one with stride `step`, `pads[axis]`
    elements left after each run of that axis, stride 0 along `zero`, backwards along `flip`."""
    order = range(len(shape)) if order is None else order
    strides, stride = [0] * len(shape), step
    for axis in reversed(list(order)):
        if axis in zero:
            continue
        strides[axis] = -stride if axis in flip else stride
        stride = stride * max(shape[axis], 1) + (pads or {}).get(axis, 0)
    return strided(shape, strides, shift, margin)


def _matrix_axes(shape):
    n = len(shape)
    return list(range(n - 2)), n - 2, n - 1


def _row(shape, rng):
    return packed(shape)


def _column(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, [*batch, col, row])


def _row_padded(shape, rng):
    return packed(shape, pads={len(shape) - 1: int(rng.integers(1, 41))})


def _row_padded_16_bytes(shape, rng):
    pad = -shape[-1] % 8 + 8 * int(rng.integers(1, 4))
    return packed(shape, pads={len(shape) - 1: pad})


def _column_padded(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, [*batch, col, row], pads={row: int(rng.integers(1, 41))})


def _column_padded_16_bytes(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, [*batch, col, row], pads={row: -shape[row] % 8 + 8})


def _shifted(shape, rng):
    return packed(shape, shift=int(rng.integers(1, 9)))


def _column_shifted(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, [*batch, col, row], shift=int(rng.integers(1, 9)))


def _every_other_row(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, pads={col: shape[col]})


def _stepped(shape, rng):
    return packed(shape, step=int(rng.integers(2, 5)))


def _column_stepped(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, [*batch, col, row], step=2)


def _batch_inside(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, [row, *batch, col])


def _batch_innermost(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, [row, col, *batch])


def _any_order(shape, rng):
    return packed(
        shape, list(rng.permutation(len(shape))), pads={a: int(rng.integers(0, 4)) for a in range(len(shape))}
    )


def _expanded_row(shape, rng):
    return packed(shape, zero=[len(shape) - 2])


def _expanded_column(shape, rng):
    return packed(shape, zero=[len(shape) - 1])


def _expanded_both(shape, rng):
    return packed(shape, zero=[len(shape) - 2, len(shape) - 1])


def _expanded_batch(shape, rng):
    batch, _, _ = _matrix_axes(shape)
    return packed(shape, zero=batch[: 1 + len(batch) // 2])


def _windows(shape, rng):
    batch, row, col = _matrix_axes(shape)
    strides = [7] * len(batch) + [int(s) for s in rng.choice([[1, 1], [2, 1], [1, 2]])]
    return strided(shape, strides)


def _length_1_strides(shape, rng):
    """Strides along axes of length 1 mean nothing, whatever they hold."""
    garbage = [0, 1, 7, 99, 4096]
    plain = packed(shape)
    strides = [int(rng.choice(garbage)) if n == 1 else s for n, s in zip(shape, plain.strides)]
    return plain._replace(strides=tuple(strides))


def _flipped_rows(shape, rng):
    return packed(shape, flip=[len(shape) - 2])


def _flipped_columns(shape, rng):
    return packed(shape, flip=[len(shape) - 1])


def _flipped_all(shape, rng):
    return packed(shape, flip=range(len(shape)))


def _column_flipped(shape, rng):
    batch, row, col = _matrix_axes(shape)
    return packed(shape, [*batch, col, row], flip=[row, col])


# Layouts any array may have, those of which elements overlap (never for `out`), and those torch cannot make.
PLAIN_LAYOUTS = {
    f.__name__[1:]: f
    for f in (
        _row,
        _column,
        _row_padded,
        _row_padded_16_bytes,
        _column_padded,
        _column_padded_16_bytes,
        _shifted,
        _column_shifted,
        _every_other_row,
        _stepped,
        _column_stepped,
        _batch_inside,
        _batch_innermost,
        _any_order,
        _length_1_strides,
    )
}
OVERLAPPING_LAYOUTS = {
    f.__name__[1:]: f for f in (_expanded_row, _expanded_column, _expanded_both, _expanded_batch, _windows)
}
NEGATIVE_LAYOUTS = {f.__name__[1:]: f for f in (_flipped_rows, _flipped_columns, _flipped_all, _column_flipped)}
LAYOUTS = {**PLAIN_LAYOUTS, **OVERLAPPING_LAYOUTS, **NEGATIVE_LAYOUTS}


def layout(name, shape, rng):
    """The named layout for a shape of any rank: a vector is laid out as the row (or column) it is."""
    if len(shape) == 0:
        return packed(shape)
    if len(shape) == 1:
        whole = LAYOUTS[name]((1, *shape), rng)
        return whole._replace(shape=whole.shape[1:], strides=whole.strides[1:])
    return LAYOUTS[name](tuple(shape), rng)


def layout_names(torch=True, out=False):
    names = [*PLAIN_LAYOUTS]
    if not out:
        names += OVERLAPPING_LAYOUTS
    if not torch:
        names += NEGATIVE_LAYOUTS
    return names


# ---- shapes ----------------------------------------------------------------------------------------------------------


def random_size(rng, most=300):
    """A length in 1..most, half of the time beside a power of two, where tiles and vectors end."""
    if rng.random() < 0.5:
        return int(rng.integers(1, most + 1))
    edge = 1 << int(rng.integers(0, most.bit_length()))
    return int(np.clip(edge + rng.integers(-1, 2), 1, most))


def random_shapes(rng, most=300):
    """Shapes of a and b of one product, of any ranks, with batch axes that broadcast."""
    m, n, k = (random_size(rng, most) for _ in range(3))
    kind = rng.random()
    if kind < 0.55:
        return (m, k), (k, n)
    if kind < 0.65:
        return [((k,), (k, n)), ((m, k), (k,)), ((k,), (k,))][int(rng.integers(3))]
    batch = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 4)))]
    m, n, k = (min(x, 96) for x in (m, n, k))
    sides = []
    for _ in range(2):
        side = [1 if rng.random() < 0.3 else size for size in batch]
        sides.append(tuple(side[int(rng.integers(0, len(batch) + 1)) if rng.random() < 0.4 else 0 :]))
    return (*sides[0], m, k), (*sides[1], k, n)


def result_shape(a, b):
    """numpy.matmul's shape rule, written out as its documentation states it."""
    a2, b2 = ((1, *a) if len(a) == 1 else tuple(a)), ((*b, 1) if len(b) == 1 else tuple(b))
    if a2[-1] != b2[-2]:
        raise ValueError(f"inner lengths differ: {a} @ {b}")
    batch = []
    for x, y in itertools.zip_longest(reversed(a2[:-2]), reversed(b2[:-2]), fillvalue=1):
        if x != y and 1 not in (x, y):
            raise ValueError(f"batch axes do not broadcast: {a} @ {b}")
        batch.append(y if x == 1 else x)
    rows = () if len(a) == 1 else (a2[-2],)
    cols = () if len(b) == 1 else (b2[-1],)
    return (*reversed(batch), *rows, *cols)


# ---- NumPy -----------------------------------------------------------------------------------------------------------


def np_dtype(name):
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class HostBuffer:
    """A poisoned flat buffer of NumPy's and the view of it that a layout describes."""

    def __init__(self, dtype, where, values=None):
        self.dtype, self.where = dtype, where
        self.bits = np.full(where.size, POISON[dtype], np.uint16 if ITEMSIZE[dtype] == 2 else np.uint32)
        flat = self.bits.view(np_dtype(dtype)) if dtype != "bfloat16" else None
        self._index = where.indices()
        if values is not None:
            self.bits[self._index] = to_bits(values, dtype)
        self._flat = flat

    @property
    def array(self):
        flat = self._flat if self._flat is not None else self.bits.view(np_dtype(self.dtype))
        step = flat.itemsize
        return np.lib.stride_tricks.as_strided(
            flat[self.where.offset :] if 0 not in self.where.shape else flat[:0],
            self.where.shape,
            [s * step for s in self.where.strides],
        )

    @property
    def tensor(self):
        import torch

        flat = torch.from_numpy(self.bits.view(np.int16 if self.bits.itemsize == 2 else np.int32)).view(
            torch_dtype(self.dtype)
        )
        return flat.as_strided(self.where.shape, self.where.strides, self.where.offset)

    def values(self):
        """The view's elements as float64, read through the index and not through any stride."""
        return from_bits(self.bits[self._index], self.dtype)

    def spoiled(self):
        """Flat indices outside the view that no longer hold the poison."""
        outside = np.ones(self.where.size, bool)
        outside[self._index] = False
        return np.flatnonzero(outside & (self.bits != POISON[self.dtype]))


def to_bits(values, dtype):
    """float64 to the bits of dtype, rounded once, to nearest even: written without any library's bfloat16."""
    values = np.asarray(values, np.float64)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "float32":
        return values.astype(np.float32).view(np.uint32)
    magnitude = np.abs(values)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(magnitude)[1] - 1, -126)  # of the leading bit; subnormals share -126
        quantum = np.ldexp(1.0, exponent - 7)
        rounded = np.rint(magnitude / quantum) * quantum
        rounded = np.where(rounded >= 2.0**128, np.inf, rounded)
    rounded = np.where(np.isfinite(magnitude), rounded, magnitude)
    bits = np.copysign(rounded, values).astype(np.float32).view(np.uint32) >> 16
    return np.where(np.isnan(values), 0x7FC0, bits).astype(np.uint16)


def from_bits(bits, dtype):
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    if dtype == "float32":
        return bits.view(np.float32).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bits_of(array):
    """The bits of a NumPy array or a CPU tensor, contiguous."""
    if isinstance(array, np.generic):  # what NumPy gives for two vectors
        array = np.asarray(array)
    if not isinstance(array, np.ndarray):
        import torch

        array = array.contiguous()
        return (
            array.view({2: torch.int16, 4: torch.int32}[array.element_size()])
            .numpy()
            .view({2: np.uint16, 4: np.uint32}[array.element_size()])
        )
    array = np.ascontiguousarray(array).reshape(array.shape)
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def dtype_name(array):
    return str(array.dtype).removeprefix("torch.")


def float64(array):
    return from_bits(bits_of(array), dtype_name(array))


def integers(rng, shape, low=-2, high=2):
    return rng.integers(low, high + 1, shape).astype(np.float64)


def operand(rng, dtype, where):
    """A host operand of small integers in the given layout."""
    return HostBuffer(dtype, where, integers(rng, where.shape))


def check_exact(result, a, b, out_dtype):
    """The result (NumPy array or CPU tensor) is the rounded float64 product of a and b (float64 arrays), bit for bit
    but for the sign of a zero."""
    expected = to_bits(np.matmul(a, b), out_dtype)
    assert dtype_name(result) == out_dtype, f"dtype {result.dtype}, expected {out_dtype}"
    assert tuple(result.shape) == expected.shape == result_shape(a.shape, b.shape), (
        f"shape {tuple(result.shape)}, expected {expected.shape}"
    )
    found, wanted = float64(result), from_bits(expected, out_dtype)
    wrong = np.argwhere(~(found == wanted))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {found.size} elements wrong, first {at}: {found[at]}, expected {wanted[at]}"
        )


# ---- errors against float64 ------------------------------------------------------------------------------------------


def errors(result, exact, scale):
    """(largest, root mean square) of |result - exact| / scale, scale being |a| @ |b|: 0 where scale is."""
    difference = abs(result - exact) / (scale + (scale == 0))
    return float(difference.max()), float((difference * difference).mean() ** 0.5)


def check_no_worse(result, other, exact, scale, factor=2.0, floor=0.0):
    """The result's error is at most `factor` times that of `other` (torch's), by either measure, or at most `floor`."""
    for name, ours, theirs in zip(("largest", "rms"), errors(result, exact, scale), errors(other, exact, scale)):
        assert ours <= max(factor * theirs, floor), (
            f"{name} error {ours:.3e}, torch's {theirs:.3e}: more than {factor} times"
        )


# ---- kernels ---------------------------------------------------------------------------------------------------------


def refusal(row, k, batch_axes=0):
    """A word of why a row of tcgemm.kernels() cannot take such a product; None when it can."""
    if -(-k // row["tile"][2]) < row["cluster"][2]:
        return "a K shorter than"
    return "more than one batch axis" if row["family"] in ("tma_mma", "wgmma") and batch_axes > 1 else None


# ---- torch, on a device ----------------------------------------------------------------------------------------------

DEVICE = "cuda"
# Operand orders: the layouts of a and b whose unit stride each letter names, and those with 16-byte aligned lines.
ORDERS = {"nn": ("row", "row"), "nt": ("row", "column"), "tn": ("column", "row"), "tt": ("column", "column")}
ALIGNED_ORDERS = {order: tuple(f"{name}_padded_16_bytes" for name in names) for order, names in ORDERS.items()}


def torch_dtype(name):
    import torch

    return getattr(torch, name)


class DeviceBuffer:
    """HostBuffer's twin for torch tensors on a device. Nothing here synchronises: checks are counts on the device."""

    def __init__(self, dtype, where, values=None, device=None):
        import torch

        device = device or DEVICE

        self.dtype, self.where = dtype, where
        self.bits = torch.full(
            (where.size,), POISON[dtype], device=device, dtype=torch.int16 if ITEMSIZE[dtype] == 2 else torch.int32
        )
        self.tensor = self.view(self.bits.view(torch_dtype(dtype)))
        if values is not None:
            values = values.to(torch_dtype(dtype))
            if overlapping(where):
                index = torch.from_numpy(where.indices()).to(device)
                self.bits.view(torch_dtype(dtype))[index.reshape(-1)] = values.reshape(-1)
            else:
                self.tensor.copy_(values)

    def view(self, flat):
        return flat.as_strided(self.where.shape, self.where.strides, self.where.offset)

    def spoiled(self):
        """How many elements outside the view no longer hold the poison, as a tensor."""
        import torch

        outside = torch.ones(self.where.size, dtype=torch.bool, device=self.bits.device)
        if overlapping(self.where):
            outside[torch.from_numpy(self.where.indices()).to(outside.device).reshape(-1)] = False
        else:
            self.view(outside).fill_(False)
        return (outside & (self.bits != POISON[self.dtype])).sum()


def overlapping(where):
    """Whether two elements may share a place (strides of length-1 axes aside): sorted by stride, an axis must step over
    all that the axes inside it span."""
    span = 0
    for stride, n in sorted((abs(s), n) for s, n in zip(where.strides, where.shape) if n > 1):
        if stride <= span:
            return True
        span += stride * (n - 1)
    return False


def torch_integers(shape, dtype="int8", device=None):
    import torch

    return torch.randint(-2, 3, tuple(shape), device=device or DEVICE, dtype=torch.int8).to(torch_dtype(dtype))


def torch_operand(dtype, where, device=None):
    return DeviceBuffer(dtype, where, torch_integers(where.shape, device=device), device)


def torch_pair(rng, dtype, a_shape, b_shape, names=("row", "row"), device=None):
    """Operands of a product, each in the layout named for it."""
    return [torch_operand(dtype, layout(name, shape, rng), device) for name, shape in zip(names, (a_shape, b_shape))]


def torch_exact(a, b, out_dtype):
    """The rounded float64 product, on the operands' device."""
    import torch

    return torch.matmul(a.double(), b.double()).to(torch_dtype(out_dtype))


def torch_wrong(result, a, b, out_dtype):
    """How many elements of the result are wrong, as a tensor on the device. Shape and dtype are asserted at once."""
    expected = torch_exact(a, b, out_dtype)
    assert result.dtype == expected.dtype, f"dtype {result.dtype}, expected {expected.dtype}"
    assert result.shape == expected.shape, f"shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
    assert result.device == expected.device, f"device {result.device}, expected {expected.device}"
    return (~(result == expected)).sum()


def torch_check(result, a, b, out_dtype=None):
    """torch_wrong, waited for."""
    wrong = int(torch_wrong(result, a, b, out_dtype or dtype_name(a)))
    assert wrong == 0, (
        f"{wrong} of {result.numel()} elements wrong: {tuple(a.shape)} {a.stride()} @ {tuple(b.shape)} {b.stride()}"
    )


class Tally:
    """Counts that must be zero, kept on the device and read together: one synchronisation for many cases."""

    def __init__(self, limit=250):
        self.limit, self.labels, self.counts, self.cases = limit, [], [], 0

    def add(self, label, count):
        self.labels.append(label)
        self.counts.append(count)
        self.cases += 1
        if len(self.counts) >= self.limit:
            self.read()

    def read(self):
        if not self.counts:
            return
        import torch

        counts = torch.stack([c.reshape(()) for c in self.counts]).tolist()
        bad = [f"{label}: {count}" for label, count in zip(self.labels, counts) if count]
        total = len(counts)
        self.labels, self.counts = [], []
        assert not bad, f"{len(bad)} of {total} cases wrong\n" + "\n".join(bad[:20])
