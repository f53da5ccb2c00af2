"""A plain Triton product to measure beside: tiles in groups that share operands in L2, K in blocks, masks at the edges, ten
tiles to autotune over. Not Triton at its best: no TMA descriptors, not persistent. Imports triton."""

import triton
import triton.language as tl

# BLOCK_M, BLOCK_N, BLOCK_K, stages, warps
TILES = (
    (128, 256, 64, 3, 8),
    (256, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 128, 64, 4, 4),
    (128, 128, 32, 5, 4),
    (64, 256, 64, 4, 4),
    (64, 128, 64, 5, 4),
    (64, 64, 128, 4, 4),
    (32, 64, 128, 5, 4),
    (16, 64, 128, 5, 4),
)
GROUP_ROWS = 8


@triton.autotune(
    [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_stages=stages, num_warps=warps)
        for m, n, k, stages, warps in TILES
    ],
    key=["m", "n", "k", "a_col", "b_row"],
)
@triton.jit
def _product(
    a_data,
    b_data,
    c_data,
    m,
    n,
    k,
    a_row,
    a_col,
    b_row,
    b_col,
    c_row,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Blocks walk down GROUP tile rows before they step to the next tile column.
    block = tl.program_id(0)
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    first = block // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    inside = block % (GROUP * tiles_n)
    tile_m = first + inside % height
    tile_n = inside // height
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows and columns past the edge are read from its inside and never stored. Offsets can pass 2^31 elements.
    a_tile = a_data + (rows % m).to(tl.int64)[:, None] * a_row + depth.to(tl.int64)[None, :] * a_col
    b_tile = b_data + depth.to(tl.int64)[:, None] * b_row + (cols % n).to(tl.int64)[None, :] * b_col
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        a = tl.load(a_tile, mask=depth[None, :] < k - start, other=0.0)
        b = tl.load(b_tile, mask=depth[:, None] < k - start, other=0.0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        a_tile += BLOCK_K * a_col
        b_tile += BLOCK_K * b_row
    c_tile = c_data + rows.to(tl.int64)[:, None] * c_row + cols[None, :]
    tl.store(c_tile, sums.to(c_data.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


def matmul(a, b, c):
    (m, k), n = a.shape, b.shape[1]

    def grid(tile):
        return (triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)

    _product[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), c.stride(0), GROUP=GROUP_ROWS)
