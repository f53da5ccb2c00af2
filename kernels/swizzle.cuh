/* The one swizzle: where a 16-byte chunk of a row lies in shared memory, so that neither eight rows of one chunk
 * column (an ldmatrix phase) nor eight chunks of one row (a store phase) meet in a bank.
 *
 * A bank line is 128 bytes, eight chunks. Rows of eight chunks (64 elements), the number is the chunk stored
 * there:
 *
 *   row 0 | 0 1 2 3 4 5 6 7        rows of four chunks, two to a line:   rows 0, 1 | 0 1 2 3   0 1 2 3
 *   row 1 | 1 0 3 2 5 4 7 6                                               rows 2, 3 | 1 0 3 2   1 0 3 2
 *   row 2 | 2 3 0 1 6 7 4 5                                               rows 4, 5 | 2 3 0 1   2 3 0 1
 *    ...                                                                  rows 6, 7 | 3 2 1 0   3 2 1 0
 *   row 7 | 7 6 5 4 3 2 1 0
 *
 * Longer rows repeat the first pattern in every group of eight chunks. The map is linear over xor: the place of
 * chunk c ^ d is the place of c, xor d. */
#ifndef TCG_SWIZZLE_CUH
#define TCG_SWIZZLE_CUH

/* CHUNKS: 16-byte chunks in a row, a power of two. */
template <int CHUNKS> static __host__ __device__ constexpr int swizzle(int row, int chunk) {
    static_assert(CHUNKS > 0 && (CHUNKS & (CHUNKS - 1)) == 0, "rows hold a power of two of chunks");
    return CHUNKS >= 8 ? chunk ^ (row & 7) : chunk ^ (row / (8 / CHUNKS) & (CHUNKS - 1));
}

/* Rows after which the pattern repeats, whatever their length. */
constexpr int SWIZZLE_PERIOD = 8;

#endif
