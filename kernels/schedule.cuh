/* Which product, which part of K and which tile of C a place in the walk over the grid stands for. */
#ifndef TCG_SCHEDULE_CUH
#define TCG_SCHEDULE_CUH

#include <stdint.h>

#include "abi.h"

/* 64-bit division costs several times a 32-bit one, and counts nearly always fit. */
static __host__ __device__ __forceinline__ int64_t divide(int64_t value, int64_t by) {
    if (((value | by) >> 32) == 0) {
        return static_cast<uint32_t>(value) / static_cast<uint32_t>(by);
    }
    return value / by;
}

static __host__ __device__ __forceinline__ int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }

struct batch_offsets {
    int64_t a, b, c; /* elements */
};

/* Offsets of one batch entry; the innermost axis runs fastest. */
static __host__ __device__ __forceinline__ batch_offsets batch_offsets_of(const tcg_batch_dim *dims, int ndim,
                                                                          int64_t entry) {
    batch_offsets offset = {0, 0, 0};
    for (int d = 0; d < ndim; d++) {
        const int64_t outer = divide(entry, dims[d].size);
        const int64_t index = entry - outer * dims[d].size;
        offset.a += index * dims[d].a;
        offset.b += index * dims[d].b;
        offset.c += index * dims[d].c;
        entry = outer;
    }
    return offset;
}

struct tile_place {
    uint32_t tile_m, tile_n; /* enough: C holds an element a row and column, 16 or more to a tile */
    int64_t batch;           /* the entry's number */
    int64_t k_begin, k_end;  /* empty (k_end <= k_begin) where K is shorter than the splits before */
    batch_offsets offset;    /* offset.c includes the split's */
};

/* Tiles of one product are neighbours in the walk, its splits come next, then the batch. In a product, groups of
 * raster_group rows of tiles are walked column by column, so that the tiles in flight share rows of A and columns
 * of B in L2:
 *
 *   raster_group 2:   0 2 4 6
 *                     1 3 5 7
 *                     8 ... */
static __host__ __device__ __forceinline__ tile_place place_tile(const tcg_gemm_args &args, int64_t tile) {
    tile_place place;
    const int64_t tiles = args.tiles_m * args.tiles_n;
    int64_t outer = 0;
    if (tile >= tiles) {
        outer = divide(tile, tiles);
        tile -= outer * tiles;
    }
    const int64_t group_tiles = args.raster_group * args.tiles_n;
    const int64_t group = divide(tile, group_tiles);
    const int64_t first = group * args.raster_group;
    const int64_t rows = smaller(args.raster_group, args.tiles_m - first);
    const int64_t in_group = tile - group * group_tiles;
    const int64_t column = divide(in_group, rows);
    place.tile_n = static_cast<uint32_t>(column);
    place.tile_m = static_cast<uint32_t>(first + in_group - column * rows);

    int64_t split = 0;
    if (args.splits > 1) {
        const int64_t entry = divide(outer, args.splits);
        split = outer - entry * args.splits;
        outer = entry;
    }
    place.k_begin = split * args.k_per_split;
    place.k_end = split == args.splits - 1 ? args.k : smaller(args.k, place.k_begin + args.k_per_split);
    place.batch = outer;
    place.offset = batch_offsets_of(args.batch, args.batch_ndim, outer);
    place.offset.c += split * args.c_split;
    return place;
}

/* The same walk in 32 bits. */
struct tma_place {
    int32_t tile_m, tile_n, batch, split, k_begin, k_end;
};

static __host__ __device__ __forceinline__ int32_t divide(int32_t value, const tcg_divisor &by) {
    return static_cast<int32_t>((static_cast<uint64_t>(static_cast<uint32_t>(value)) * by.multiplier) >> by.shift);
}

static __host__ __device__ __forceinline__ tma_place place_tile(const tcg_tma_walk &walk, int32_t tile) {
    tma_place place;
    const int32_t outer = divide(tile, walk.product);
    tile -= outer * static_cast<int32_t>(walk.product.by);
    const int32_t group = divide(tile, walk.group);
    const int32_t in_group = tile - group * static_cast<int32_t>(walk.group.by);
    const int32_t first = group * static_cast<int32_t>(walk.rows.by);
    const tcg_divisor &rows = first + static_cast<int32_t>(walk.rows.by) <= walk.tiles_m ? walk.rows : walk.last_rows;
    place.tile_n = divide(in_group, rows);
    place.tile_m = first + in_group - place.tile_n * static_cast<int32_t>(rows.by);
    place.batch = divide(outer, walk.splits);
    place.split = outer - place.batch * static_cast<int32_t>(walk.splits.by);
    place.k_begin = place.split * walk.k_per_split;
    place.k_end = place.split == static_cast<int32_t>(walk.splits.by) - 1 ? walk.k : place.k_begin + walk.k_per_split;
    return place;
}

#endif
