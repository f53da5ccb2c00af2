// Family `wgmma` (sm_90a): a persistent, warp-specialised kernel. One producer thread keeps a ring of shared-memory
// stages full by TMA; one or two consumer warpgroups multiply them with wgmma and store C by TMA.
//
//   producer: wait empty[stage] -> expect bytes on full[stage] -> TMA A and B tiles (each completes on full[stage])
//   consumer: wait full[stage] -> wgmma from shared memory, one group in flight -> arrive on empty[previous stage]
//
// Cooperative: the warpgroups split a tile's rows. Pingpong: each takes whole tiles in turn, so that one's epilogue
// hides under the other's main loop. In a cluster of CM x CN blocks, the CM blocks of a column share B and the CN
// blocks of a row share A: each loads its part and multicasts it. In a cluster of CK blocks, each multiplies its part
// of one tile's K; they exchange fp32 sums through distributed shared memory and each stores its share of the tile.
//
// What it adds to tma_mma: operands go from shared memory to the tensor cores without passing registers, which leaves
// those for tiles of 128 x 256: about 780 TFLOP/s, 91 % of what wgmma does from fixed shared memory (H200, 8192^3,
// bfloat16; benchmarks/results/ladder.json). What holds it back: power, at that size. Elsewhere the L2 cache gives an SM
// 35 to 90 bytes a clock, the more the fewer different lines all SMs ask for at once: too few for tiles of 64 x 64. A line of
// a box that starts within a sector of that cache takes 1.3 to 3 times as long; clusters of two or four blocks share it.
#include <type_traits>

#include "abi.h"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "schedule.cuh"
#include "types.cuh"

/* Not every row uses every constant of its class. */
#pragma nv_diag_suppress 177

namespace {

enum Schedule { coop, pingpong };

constexpr int BOX = TCG_TMA_BOX_ELEMS;

// Named barriers; 0 is __syncthreads'.
constexpr int BAR_STORE = 1;  // + warpgroup: its C buffers
constexpr int BAR_TURN = 3;   // + warpgroup: its main loop may start (pingpong)
constexpr int BAR_READY = 5;  // the mbarriers are initialised

// A place in the ring of stages: the index and the parity of the pass over the ring.
template <int STAGES> struct Ring {
    int stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    __device__ void skip(int steps) {
        const unsigned place = stage + steps;
        stage = place % STAGES;
        phase ^= place / STAGES & 1;
    }
};

template <class In, int ORDER, int BLOCK_M, int BLOCK_N, int BLOCK_K, int STAGES, int WGS, Schedule SCHEDULE, int CM,
          int CN, int CK, int C_BOXES>
struct Wgmma {
    static constexpr bool A_K_MAJOR = ORDER == TCG_nn || ORDER == TCG_nt;
    static constexpr bool B_K_MAJOR = ORDER == TCG_nt || ORDER == TCG_tt;
    static constexpr bool BF16 = std::is_same<In, bf16>::value;
    static constexpr int CLUSTER = CM * CN * CK;
    static constexpr int WG_M = SCHEDULE == coop ? BLOCK_M / WGS : BLOCK_M;  // rows of a tile that a warpgroup computes
    static constexpr int FRAGMENTS = WG_M / 64;
    static constexpr int ACCUMULATORS = BLOCK_N / 2;                           // of a fragment, a thread
    static constexpr int B_ROWS = TCG_WGMMA_B_ROWS(BLOCK_N, B_K_MAJOR);        // as held in shared memory
    static constexpr int B_BOX = TCG_WGMMA_B_BOX(BLOCK_N, B_K_MAJOR);          // elements that its boxes are wide
    static constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2;
    static constexpr int STAGE_BYTES = TCG_WGMMA_STAGE_BYTES(BLOCK_M, BLOCK_N, BLOCK_K, B_K_MAJOR);
    static constexpr int SUMS = FRAGMENTS * ACCUMULATORS;
    // What a block stores of a tile: with CK blocks at its K, each sums up some of the columns.
    static constexpr int STORED_N = TCG_WGMMA_STORED_N(BLOCK_N, CK);
    static constexpr int SHARE = STORED_N / 2;  // accumulators of a thread (CK > 1)
    static constexpr int SUMS_BYTES = (CK - 1) * SHARE * 512;  // of a warpgroup, from the other blocks
    static constexpr int CONSUMER_WARPS = (SCHEDULE == coop ? WGS : 1) * 4;    // that read a stage
    // 128 producer threads and 256 consumers within the 64512 registers that 384 threads of 168 are given.
    static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;

    static_assert(WG_M % 64 == 0 && BLOCK_K % BOX == 0 && BLOCK_N % 16 == 0, "tile shape");
    static_assert(SUMS <= 176, "accumulators must leave registers for the rest");
    static_assert(SCHEDULE == coop || WGS == 2, "pingpong is between two warpgroups");
    static_assert(A_K_MAJOR ? BLOCK_M % (8 * CN) == 0 : BLOCK_M % (BOX * CN) == 0, "A's slices");
    static_assert(B_K_MAJOR ? BLOCK_N % (8 * CM) == 0 : B_ROWS % (B_BOX * CM) == 0, "B's slices");
    static_assert(CK == 1 || (CM * CN == 1 && SCHEDULE == coop), "split K has its own clusters");
    static_assert(CK == 1 || (FRAGMENTS == 1 && BLOCK_N % (8 * CK) == 0), "its blocks store whole groups of columns");

    // What a block does for one tile. A cluster takes CM x CN neighbouring tiles, or one tile in CK parts of K.
    struct Work {
        int32_t row, column, batch, split;
        int32_t k;
        int k_blocks;  // at least 1: the planner gives no empty part
    };

    static __device__ __forceinline__ Work work(const tcg_tma_walk &walk, int32_t tile, int rank) {
        const tma_place place = place_tile(walk, tile);
        Work w;
        w.row = (place.tile_m * CM + rank % CM) * BLOCK_M;
        w.column = (place.tile_n * CN + rank / CM % CN) * BLOCK_N;
        w.batch = place.batch;
        w.split = place.split;
        w.k = place.k_begin;
        w.k_blocks = (place.k_end - place.k_begin + BLOCK_K - 1) / BLOCK_K;
        if constexpr (CK > 1) {
            const int first = w.k_blocks * rank / CK, last = w.k_blocks * (rank + 1) / CK;
            w.k += first * BLOCK_K;
            w.k_blocks = last - first;
        }
        return w;
    }

    // Elements from C's corner to that of w's batch entry, or of its partial sums.
    static __device__ int64_t c_offset(const tcg_gemm_args &g, const Work &w) {
        return (g.batch_ndim ? w.batch * g.batch[0].c : 0) + w.split * g.c_split;
    }

    // How a tile's part of an operand is loaded: by which map the last box (K-major: all boxes) and the others, how many
    // bytes, in how many rows for each of the blocks that share them (K-major) or boxes for all of those.
    struct Side {
        const tcg_tensor_map *whole, *last;
        int share, bytes;
    };

    // `beyond`: the tile reaches beyond the operand.
    static __device__ Side side(const tcg_tensor_map &whole, const tcg_tensor_map &part, const tcg_tma_side &of, int share,
                                bool beyond) {
        const bool parted = beyond && of.part_bytes != of.bytes;
        return {&whole, parted ? &part : &whole, parted ? of.part_share : share, parted ? of.part_bytes : of.bytes};
    }

    // One k-block of an operand of ROWS rows along M or N: this block's slice of it, to every block that shares it.
    // Boxes may be shorter than the tile where the whole operand is (the host's choice): the rows of the tile that are
    // then left as they were give rows or columns of the result that are never stored.
    // K-major tiles are BLOCK_K/64 boxes of ROWS x 64 k, MN-major ones ROWS/WIDTH boxes of BLOCK_K k x WIDTH rows, or the
    // first few of them.
    template <bool K_MAJOR, int ROWS, int WIDTH, int SHARERS>
    static __device__ void load(uint32_t dst, const Side &from, int32_t row, int32_t k, int32_t batch, int slice,
                                uint32_t barrier, uint16_t mask) {
        constexpr int SLICE = ROWS / SHARERS;
        auto copy = [&](const tcg_tensor_map *map, uint32_t to, int32_t x, int32_t y) {
            if constexpr (SHARERS > 1)
                cp_async_bulk_tensor_3d_multicast(to, map, x, y, batch, barrier, mask);
            else
                cp_async_bulk_tensor_3d(to, map, x, y, batch, barrier);
        };
        if constexpr (K_MAJOR) {
#pragma unroll
            for (int box = 0; box < BLOCK_K / BOX; ++box)
                copy(from.last, dst + (box * ROWS + slice * from.share) * BOX * 2, k + box * BOX, row + slice * from.share);
        } else {
#pragma unroll
            for (int box = 0; box < SLICE / WIDTH; ++box) {
                const int place = slice * (SLICE / WIDTH) + box;
                if (place < from.share)
                    copy(place < from.share - 1 ? from.whole : from.last, dst + place * BLOCK_K * WIDTH * 2,
                         row + place * WIDTH, k);
            }
        }
    }

    static __device__ void produce(const tcg_tma_args &args, uint32_t stages, uint32_t full, uint32_t empty, int rank,
                                   int32_t tile, int32_t step, Work w) {
        const tcg_tma_walk &walk = args.walk;
        const int in_m = rank % CM, in_n = rank / CM % CN;
        uint16_t a_mask = 0;
        for (int i = 0; i < CN; ++i) a_mask |= 1 << (in_m + CM * i);
        const uint16_t b_mask = ((1 << CM) - 1) << (CM * in_n);
        Ring<STAGES> ring;
        griddepcontrol_wait();
        if (walk.hands_over == TCG_AT_ONCE) griddepcontrol_launch_dependents();
        while (true) {
            const Side a = side(args.a, args.a_part, walk.a, A_K_MAJOR ? BLOCK_M / CN : BLOCK_M / BOX,
                                w.row + BLOCK_M > walk.m);
            const Side b = side(args.b, args.b_part, walk.b, B_K_MAJOR ? B_ROWS / CM : B_ROWS / B_BOX,
                                w.column + BLOCK_N > walk.n);
            // A tile too many of a cluster's: what it shares is fetched for the others alone.
            const bool a_none = CM > 1 && w.row >= walk.m, b_none = CN > 1 && w.column >= walk.n;
            const int stage_bytes = (a_none ? 0 : a.bytes) + (b_none ? 0 : b.bytes);
            const int32_t a_batch = w.batch * walk.a.batched, b_batch = w.batch * walk.b.batched;
            for (int block = 0; block < w.k_blocks; ++block, ring.advance()) {
                const uint32_t barrier = full + ring.stage * 8, stage = stages + ring.stage * STAGE_BYTES;
                const int32_t k = w.k + block * BLOCK_K;
                mbarrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
                mbarrier_arrive_expect_tx(barrier, stage_bytes);
                if (!a_none)
                    load<A_K_MAJOR, BLOCK_M, BOX, CN>(stage, a, w.row, k, a_batch, in_n, barrier, a_mask);
                if (!b_none)
                    load<B_K_MAJOR, B_ROWS, B_BOX, CM>(stage + A_BYTES, b, w.column, k, b_batch, in_m, barrier, b_mask);
            }
            if (step >= walk.tiles - tile) break;
            tile += step;
            w = work(walk, tile, rank);
        }
        if (walk.hands_over == TCG_AFTER_LOADS) griddepcontrol_launch_dependents();
        // The other blocks still arrive on this one's barriers: it stays until they have, once a stage.
        if constexpr (CM * CN > 1)
            for (int i = 0; i < STAGES; ++i, ring.advance()) mbarrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
    }

    // Descriptor of k16 step `step` of 64 (A) or BLOCK_N (B) rows from `row` on; the tile starts at `tile`, and its boxes
    // are WIDTH elements wide.
    template <bool K_MAJOR, int ROWS, int WIDTH> static __device__ uint64_t descriptor(uint32_t tile, int row, int step) {
        constexpr int LINE_BYTES = WIDTH * 2;
        if constexpr (K_MAJOR)
            return wgmma_descriptor<LINE_BYTES>(tile + (step / 4 * ROWS + row) * LINE_BYTES + step % 4 * 32, 16,
                                                8 * LINE_BYTES);
        else
            return wgmma_descriptor<LINE_BYTES>(tile + (row / WIDTH * BLOCK_K + step * 16) * LINE_BYTES,
                                                BLOCK_K * LINE_BYTES, 8 * LINE_BYTES);
    }

    // Issues one k-block's wgmmas; `accumulate` is 0 for the first step of a tile.
    static __device__ void issue(float (&d)[FRAGMENTS][ACCUMULATORS], uint32_t a_tile, int wg_row, int accumulate) {
        const uint32_t b_tile = a_tile + A_BYTES;
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
#pragma unroll
            for (int f = 0; f < FRAGMENTS; ++f)
                wgmma<BLOCK_N, BF16, !A_K_MAJOR, !B_K_MAJOR>::mma_async(
                    d[f], descriptor<A_K_MAJOR, BLOCK_M, BOX>(a_tile, wg_row + f * 64, step),
                    descriptor<B_K_MAJOR, B_ROWS, B_BOX>(b_tile, 0, step), step > 0 ? 1 : accumulate);
        wgmma_commit_group();
    }

    // Hands a stage back to the producers of every block that writes into it.
    static __device__ void release(uint32_t empty, int stage, int lane) {
        if constexpr (CM * CN > 1) {
            if (lane < CLUSTER) mbarrier_arrive_remote(empty + stage * 8, lane);
        } else {
            if (lane == 0) mbarrier_arrive(empty + stage * 8);
        }
    }

    // A tile's main loop. One group stays in flight: a stage is released when the next one's is issued.
    static __device__ void multiply(float (&d)[FRAGMENTS][ACCUMULATORS], uint32_t stages, uint32_t full, uint32_t empty,
                                    Ring<STAGES> &ring, int k_blocks, int wg_row, int lane) {
        mbarrier_wait(full + ring.stage * 8, ring.phase);
        issue(d, stages + ring.stage * STAGE_BYTES, wg_row, 0);
        int previous = ring.stage;
        ring.advance();
        for (int block = 1; block < k_blocks; ++block) {
            mbarrier_wait(full + ring.stage * 8, ring.phase);
            issue(d, stages + ring.stage * STAGE_BYTES, wg_row, 1);
            wgmma_wait_group<1>();
            release(empty, previous, lane);
            previous = ring.stage;
            ring.advance();
        }
        wgmma_wait_group<0>();
        release(empty, previous, lane);
    }

    // Each block sends the others their columns of its sums and adds what it is sent to its own, in order of rank.
    //   wait sums_empty -> st.async into the owner's shared memory, counted on its sums_full -> wait sums_full -> add
    // `sums`: of this warpgroup.
    static __device__ void exchange(const float (&d)[SUMS], float (&mine)[SHARE], uint32_t sums, uint32_t sums_full,
                                    uint32_t sums_empty, uint32_t phase, int rank, int wg, int thread) {
        // Slot [other block][i / 4][thread] of 16 bytes: a warp's accesses are consecutive.
        auto slot = [&](int other, int i) { return sums + ((other * SHARE + i) / 4 * 128 + thread) * 16; };
        if (wg == 0 && thread == 0) mbarrier_arrive_expect_tx(sums_full, WGS * SUMS_BYTES);
        mbarrier_wait_cluster(sums_empty, phase ^ 1);
#pragma unroll
        for (int i = 0; i < SHARE; i += 4) {
#pragma unroll
            for (int owner = 0; owner < CK; ++owner) {
                const float *const share = &d[owner * SHARE + i];
                if (owner != rank) st_async_v4(slot(rank - (rank > owner), i), owner, sums_full, share);
#pragma unroll
                for (int e = 0; e < 4; ++e) mine[i + e] = owner == 0 || owner == rank ? share[e] : mine[i + e];
            }
        }
        mbarrier_wait_cluster(sums_full, phase);
#pragma unroll
        for (int i = 0; i < SHARE; i += 4) {
            float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int sender = 0; sender < CK; ++sender) {
                const float4 part = sender == rank ? float4{mine[i], mine[i + 1], mine[i + 2], mine[i + 3]}
                                                   : ld_shared_v4(slot(sender - (sender > rank), i));
                sum = sender == 0 ? part : float4{sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
            }
            mine[i] = sum.x;
            mine[i + 1] = sum.y;
            mine[i + 2] = sum.z;
            mine[i + 3] = sum.w;
        }
    }

    // C by way of shared memory, in batches of BOXES boxes of 64 rows x 128 bytes, as they are or (16-bit
    // elements) transposed. The columns beyond whole boxes make a narrow one, in lines as long as they are.
    //   wait until the stores before have read the boxes -> barrier -> write -> proxy fence -> barrier -> store
    // (Half of the boxes at a time, while the others are read, costs more in barriers than it hides; a line of 256 bytes or
    // more by a bulk copy of its own takes up to twice as long.)
    template <class Out, bool TRANSPOSED, int BOXES, int HALF>
    static __device__ void store_boxes(const tcg_tma_args &args, const float (&d)[FRAGMENTS][HALF], uint32_t boxes,
                                       const Work &w, int wg_row, int wg, int thread, bool by_tma) {
        constexpr int COLUMNS = 128 / static_cast<int>(sizeof(Out));
        constexpr int TAIL = HALF * 2 % COLUMNS, IN_A_ROW = (HALF * 2 + COLUMNS - 1) / COLUMNS;
        constexpr int COUNT = FRAGMENTS * IN_A_ROW;
        const int lane = thread % 32, warp = thread / 32;
#pragma unroll
        for (int batch = 0; batch < COUNT; batch += BOXES) {
            if (thread == 0) cp_async_bulk_wait_group_read<0>();
            bar_sync(BAR_STORE + wg, 128);
#pragma unroll
            for (int i = 0; i < BOXES && batch + i < COUNT; ++i) {
                const int f = (batch + i) / IN_A_ROW, in_row = (batch + i) % IN_A_ROW;
                const bool tail = TAIL > 0 && in_row == IN_A_ROW - 1;
                write_box<Out, TRANSPOSED, HALF>(boxes + i * TCG_WGMMA_C_BOX_BYTES, d[f], in_row * COLUMNS,
                                                 tail ? TAIL : COLUMNS, tail && !TRANSPOSED, lane, warp);
            }
            fence_proxy_async();
            bar_sync(BAR_STORE + wg, 128);
#pragma unroll
            for (int i = 0; i < BOXES && batch + i < COUNT; ++i) {
                const uint32_t box = boxes + i * TCG_WGMMA_C_BOX_BYTES;
                const int in_row = (batch + i) % IN_A_ROW;
                const bool tail = TAIL > 0 && in_row == IN_A_ROW - 1;
                const int32_t x = w.column + in_row * COLUMNS;
                const int32_t y = w.row + wg_row + (batch + i) / IN_A_ROW * 64;
                if (!by_tma)
                    store_lines<Out, TRANSPOSED>(args.gemm, box, x, y, tail ? TAIL : COLUMNS, tail && !TRANSPOSED,
                                                 c_offset(args.gemm, w), lane, warp);
                else if (thread == 0 && y < args.walk.m && x < args.walk.n)
                    cp_async_bulk_tensor_3d_store(tail ? &args.c_tail : &args.c, box, TRANSPOSED ? y : x,
                                                  TRANSPOSED ? x : y, w.batch + w.split * args.walk.batches);
            }
            if (by_tma && thread == 0) cp_async_bulk_commit_group();
        }
    }

    // Where 16 bytes of a box lie: lines of 128 bytes are swizzled, shorter ones (`packed`: their bytes) are not.
    static __device__ uint32_t in_box(int line, int chunk, int packed) {
        return packed ? line * packed + chunk * 16 : line * 128 + ((chunk ^ (line & 7)) << 4);
    }

    // `width` columns from `column` on of a fragment into a box.
    template <class Out, bool TRANSPOSED, int COUNT>
    static __device__ __forceinline__ void write_box(uint32_t box, const float (&d)[COUNT], int column, int width,
                                                     bool narrow, int lane, int warp) {
        const int packed = narrow ? width * static_cast<int>(sizeof(Out)) : 0;
#pragma unroll
        for (int j = 0; j < 128 / static_cast<int>(sizeof(Out)) / 8; j += 2) {  // two groups of 8 columns
            if (j * 8 >= width) break;
            const float *v = &d[(column / 8 + j) * 4];
            if constexpr (sizeof(Out) == 4) {
                const int line = warp * 16 + lane / 4;
#pragma unroll
                for (int e = 0; e < 4; ++e) {  // of group j + e / 2 the rows `line` and `line` + 8
                    const uint32_t at = in_box(line + e % 2 * 8, (j + e / 2) * 2 + lane % 4 / 2, packed) + lane % 2 * 8;
                    st_shared_v2(box + at, v[e * 2], v[e * 2 + 1]);
                }
            } else {
                const uint32_t r0 = pair_from_floats<Out>(v[0], v[1]), r1 = pair_from_floats<Out>(v[2], v[3]);
                const uint32_t r2 = pair_from_floats<Out>(v[4], v[5]), r3 = pair_from_floats<Out>(v[6], v[7]);
                const int half = lane / 8 % 2, group = j + lane / 16;
                if constexpr (TRANSPOSED)
                    stmatrix_x4_trans(box + in_box(group * 8 + lane % 8, warp * 2 + half, 0), r0, r1, r2, r3);
                else
                    stmatrix_x4(box + in_box(warp * 16 + half * 8 + lane % 8, group, packed), r0, r1, r2, r3);
            }
        }
    }

    // The lines of a box to C, element by element: neighbouring lanes store neighbours, whatever C's alignment.
    template <class Out, bool TRANSPOSED>
    static __device__ void store_lines(const tcg_gemm_args &g, uint32_t box, int32_t column, int32_t row, int width,
                                       bool narrow, int64_t c_offset, int lane, int warp) {
        constexpr int SIZE = static_cast<int>(sizeof(Out)), IN_CHUNK = 16 / SIZE;
        typedef typename std::conditional<SIZE == 4, float, uint16_t>::type Bits;  // moved, never looked at
        const int in_lines = TRANSPOSED ? width : 64, in_length = TRANSPOSED ? 64 : width;
        const int64_t lines = smaller(in_lines, TRANSPOSED ? g.n - column : g.m - row);
        const int64_t length = smaller(in_length, TRANSPOSED ? g.m - row : g.n - column);
        const int64_t step = TRANSPOSED ? g.c_col : g.c_row;
        Bits *const c = static_cast<Bits *>(g.c) + c_offset + row * g.c_row + column * g.c_col;
#pragma unroll 4
        for (int line = warp; line < lines; line += 4) {
#pragma unroll
            for (int first = 0; first < 128 / SIZE; first += 32) {
                const int element = first + lane;
                const uint32_t at =
                    box + in_box(line, element / IN_CHUNK, narrow ? width * SIZE : 0) + element % IN_CHUNK * SIZE;
                if (element >= length) continue;
                if constexpr (SIZE == 4)
                    c[line * step + element] = ld_shared_f32(at);
                else
                    c[line * step + element] = ld_shared_u16(at);
            }
        }
    }

    // C by guarded stores from registers: any strides and alignment.
    template <class Out, int HALF>
    static __device__ void store_direct(const tcg_gemm_args &g, const float (&d)[FRAGMENTS][HALF], const Work &w, int wg_row,
                                        int thread) {
        const int lane = thread % 32, warp = thread / 32;
        const bool pairs = g.c_col == 1 && g.c_vec_bytes >= 2 * static_cast<int>(sizeof(Out));
        Out *const c = static_cast<Out *>(g.c) + c_offset(g, w);
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int64_t row = w.row + wg_row + f * 64 + warp * 16 + half * 8 + lane / 4;
                if (row >= g.m) continue;
                Out *const line = c + row * g.c_row;
#pragma unroll
                for (int j = 0; j < HALF / 4; ++j) {
                    const int64_t column = w.column + j * 8 + lane % 4 * 2;
                    const float v0 = d[f][j * 4 + half * 2], v1 = d[f][j * 4 + half * 2 + 1];
                    if (pairs && column + 1 < g.n) {
                        *reinterpret_cast<typename pair_of<Out>::bits *>(line + column) = pair_from_floats<Out>(v0, v1);
                    } else {
                        if (column < g.n) line[column * g.c_col] = from_float<Out>(v0);
                        if (column + 1 < g.n) line[(column + 1) * g.c_col] = from_float<Out>(v1);
                    }
                }
            }
    }

    // The warpgroup's rows of a tile, HALF * 2 columns from w's on, the way that the plan chose.
    template <int BOXES, int HALF>
    static __device__ void store(const tcg_tma_args &args, const float (&d)[FRAGMENTS][HALF], uint32_t boxes, const Work &w,
                                 int wg_row, int wg, int thread) {
        const int c_tma = args.walk.c_tma;
        const bool is_f32 = args.walk.c_dtype == TCG_f32;
        if constexpr (HALF % 8 == 0) {  // boxes are written 16 columns at a time
            if (c_tma == TCG_C_TMA_ROWS || c_tma == TCG_C_STAGED_ROWS) {
                if (is_f32)
                    store_boxes<float, false, BOXES>(args, d, boxes, w, wg_row, wg, thread, c_tma == TCG_C_TMA_ROWS);
                else
                    store_boxes<In, false, BOXES>(args, d, boxes, w, wg_row, wg, thread, c_tma == TCG_C_TMA_ROWS);
                return;
            }
            if (c_tma == TCG_C_TMA_COLUMNS || c_tma == TCG_C_STAGED_COLUMNS) {
                store_boxes<In, true, BOXES>(args, d, boxes, w, wg_row, wg, thread, c_tma == TCG_C_TMA_COLUMNS);
                return;
            }
        }
        if (is_f32)
            store_direct<float>(args.gemm, d, w, wg_row, thread);
        else
            store_direct<In>(args.gemm, d, w, wg_row, thread);
    }

    static __device__ void consume(const tcg_tma_args &args, uint32_t stages, uint32_t full, uint32_t empty, uint32_t c_area,
                                   int rank, int32_t tile, int32_t step) {
        const tcg_tma_walk &walk = args.walk;
        const int wg = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
        const int wg_row = SCHEDULE == coop ? wg * WG_M : 0;
        const uint32_t boxes = c_area + wg * C_BOXES * TCG_WGMMA_C_BOX_BYTES;
        const uint32_t sums_full = empty + STAGES * 8, sums_empty = sums_full + 8;
        Ring<STAGES> ring;
        uint32_t sums_phase = 0;
        float d[FRAGMENTS][ACCUMULATORS];
        griddepcontrol_wait();

        // Pingpong: a warpgroup's main loop is opened by the other one as that ends its own; the first one is open.
        if constexpr (SCHEDULE == pingpong)
            if (wg == 1) bar_arrive(BAR_TURN, 256);
        for (int turn = 0;; turn ^= 1) {
            Work w = work(walk, tile, rank);
            if (SCHEDULE == coop || turn == wg) {
                if constexpr (SCHEDULE == pingpong) bar_sync(BAR_TURN + wg, 256);
                multiply(d, stages, full, empty, ring, w.k_blocks, wg_row, lane);
                if (walk.hands_over == TCG_AFTER_PRODUCTS && thread == 0 && step >= walk.tiles - tile)
                    griddepcontrol_launch_dependents();
                if constexpr (SCHEDULE == pingpong) bar_arrive(BAR_TURN + (wg ^ 1), 256);

                if constexpr (CK > 1) {
                    // The sums' area, once it is read, is where C goes through; then the other blocks may send again.
                    const uint32_t sums = c_area + wg * SUMS_BYTES;
                    float mine[1][SHARE];
                    if (tile < step) barrier_cluster_wait();  // their barriers exist
                    exchange(d[0], mine[0], sums, sums_full, sums_empty, sums_phase, rank, wg, thread);
                    sums_phase ^= 1;
                    w.column += rank * STORED_N;
                    bar_sync(BAR_STORE + wg, 128);
                    store<(STORED_N + 31) / 32>(args, mine, sums, w, wg_row, wg, thread);
                    bar_sync(BAR_STORE + wg, 128);
                    if (thread < CK) {
                        if (thread == 0) cp_async_bulk_wait_group_read<0>();
                        __syncwarp((1 << CK) - 1);
                        mbarrier_arrive_release_cluster(sums_empty, thread);
                    }
                } else {
                    store<C_BOXES>(args, d, boxes, w, wg_row, wg, thread);
                }
            } else {
                ring.skip(w.k_blocks);
            }
            if (step >= walk.tiles - tile) break;
            tile += step;
        }
        if (thread == 0) cp_async_bulk_wait_group_read<0>();  // shared memory outlives the stores' reads
        if constexpr (CK > 1) mbarrier_wait_cluster(sums_empty, sums_phase ^ 1);  // and the other blocks' arrivals
    }

    // Everything before the first load is on the path of every launch: warp 0 finds its first tile while warp 1 makes the
    // barriers and warps 2 and 3 fetch the tensor maps.
    static __device__ void run(const tcg_tma_args &args) {
        extern __shared__ uint8_t shared[];
        const uint32_t stages = (static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u;
        const uint32_t c_area = stages + STAGES * STAGE_BYTES;
        const uint32_t full = c_area + TCG_WGMMA_C_BYTES(BLOCK_M, BLOCK_N, WGS, CK, C_BOXES), empty = full + STAGES * 8;
        const int rank = CLUSTER > 1 ? cluster_ctarank() : 0;
        const int32_t first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
        constexpr int THREADS = TCG_WGMMA_THREADS(WGS);

        if (threadIdx.x < 128) {
            if constexpr (WGS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();  // the warpgroup's four warps at once
        }
        if (threadIdx.x < 32) {
            if constexpr (CLUSTER > 1) barrier_cluster_arrive();
            const Work w = work(args.walk, first, rank);
            bar_sync(BAR_READY, THREADS);
            // Multicast writes into the others and signals their barriers.
            if constexpr (CM * CN > 1) barrier_cluster_wait();
            // One thread, in a way that tells the compiler so: the operands of its TMAs then stay in uniform registers.
            if (elect_sync()) produce(args, stages, full, empty, rank, first, step, w);
            __syncwarp();
        } else if (threadIdx.x < 128) {
            if (threadIdx.x == 32) {
                // A stage is empty once the consumer warps of every block that it is shared with are done with it.
                for (int i = 0; i < STAGES; ++i) {
                    mbarrier_init(full + i * 8, 1);
                    mbarrier_init(empty + i * 8, CONSUMER_WARPS * CM * CN);
                }
                mbarrier_init(empty + STAGES * 8, 1);  // sums_full, sums_empty
                mbarrier_init(empty + (STAGES + 1) * 8, WGS * CK);
                fence_mbarrier_init();
            }
            if (threadIdx.x == 64) {
                prefetch_tensormap(&args.a);
                prefetch_tensormap(&args.b);
            }
            if (threadIdx.x == 96) prefetch_tensormap(&args.c);
            __syncwarp();
            if constexpr (CLUSTER > 1) barrier_cluster_arrive();
            bar_sync(BAR_READY, THREADS);
        } else {
            if constexpr (CLUSTER > 1) barrier_cluster_arrive();
            if constexpr (WGS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
            bar_sync(BAR_READY, THREADS);
            consume(args, stages, full, empty, c_area, rank, first, step);
        }
    }
};

}  // namespace

#define TCG_WGMMA_KERNEL(in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK, C_BOXES)                          \
    extern "C" __global__ void __launch_bounds__(TCG_WGMMA_THREADS(WGS), 1) TCG_WGMMA_NAME(                              \
        in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK)(const __grid_constant__ tcg_tma_args args) {   \
        Wgmma<in, TCG_##order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK, C_BOXES>::run(args);               \
    }
#define TCG_WGMMA(...) TCG_ROW(TCG_WGMMA_KERNEL, __VA_ARGS__)
#include "table.def"
