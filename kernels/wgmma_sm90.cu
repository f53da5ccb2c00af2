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
#include <type_traits>

#include "abi.h"
#include "ptx/cluster.cuh"
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
constexpr int BOX_ROW_BYTES = BOX * 2;

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
    static constexpr int A_BYTES = BLOCK_M * BLOCK_K * 2;
    static constexpr int STAGE_BYTES = TCG_WGMMA_STAGE_BYTES(BLOCK_M, BLOCK_N, BLOCK_K, B_K_MAJOR);
    static constexpr int C_COLUMNS = BLOCK_N < 64 ? BLOCK_N : 64;              // of a C box
    // Split K: accumulators a block stores, at least two rows' pairs; blocks from OWNERS on store nothing.
    static constexpr int SHARE = FRAGMENTS * ACCUMULATORS / CK < 4 ? 4 : FRAGMENTS * ACCUMULATORS / CK;
    static constexpr int OWNERS = FRAGMENTS * ACCUMULATORS / SHARE;
    static constexpr int CONSUMER_WARPS = (SCHEDULE == coop ? WGS : 1) * 4;    // that read a stage
    // 128 producer threads and 256 consumers within the 64512 registers that 384 threads of 168 are given.
    static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;

    static_assert(WG_M % 64 == 0 && BLOCK_K % BOX == 0 && BLOCK_N % C_COLUMNS == 0 && C_COLUMNS % 16 == 0, "tile shape");
    static_assert(WGS == 1 || FRAGMENTS * ACCUMULATORS <= 128, "accumulators must leave registers for the rest");
    static_assert(SCHEDULE == coop || WGS == 2, "pingpong is between two warpgroups");
    static_assert(A_K_MAJOR ? BLOCK_M % (8 * CN) == 0 : BLOCK_M % (BOX * CN) == 0, "A's slices");
    static_assert(FRAGMENTS * BLOCK_N / C_COLUMNS % C_BOXES == 0, "C's boxes go in batches");
    static_assert(B_K_MAJOR ? BLOCK_N % (8 * CM) == 0 : B_ROWS % (BOX * CM) == 0, "B's slices");
    static_assert(CK == 1 || (CM * CN == 1 && SCHEDULE == coop && SHARE % 4 == 0), "split K has its own clusters");

    // What a block does for one tile. A cluster takes CM x CN neighbouring tiles, or one tile in CK parts of K.
    struct Work {
        int32_t row, column, batch;
        int32_t k;
        int k_blocks;  // at least 1: the planner gives no empty part
        int64_t c_offset;
    };

    static __device__ Work work(const tcg_gemm_args &g, int64_t tile, int rank) {
        const tile_place place = place_tile(g, tile);
        Work w;
        w.row = static_cast<int32_t>(place.tile_m * CM + rank % CM) * BLOCK_M;
        w.column = static_cast<int32_t>(place.tile_n * CN + rank / CM % CN) * BLOCK_N;
        w.batch = static_cast<int32_t>(place.batch);
        w.k = static_cast<int32_t>(place.k_begin);
        w.k_blocks = (static_cast<int32_t>(place.k_end - place.k_begin) + BLOCK_K - 1) / BLOCK_K;
        if constexpr (CK > 1) {
            const int first = w.k_blocks * rank / CK, last = w.k_blocks * (rank + 1) / CK;
            w.k += first * BLOCK_K;
            w.k_blocks = last - first;
        }
        w.c_offset = place.offset.c;
        return w;
    }

    // One k-block of an operand of ROWS rows along M or N: this block's slice of it, to every block that shares it.
    // Boxes may be shorter than the tile where the whole operand is (the host's choice): the rows of the tile that are
    // then left as they were give rows or columns of the result that are never stored.
    // K-major tiles are BLOCK_K/64 boxes of ROWS x 64 k, MN-major ones ROWS/64 boxes of BLOCK_K k x 64 rows.
    template <bool K_MAJOR, int ROWS, int SHARERS>
    static __device__ void load(uint32_t dst, const tcg_tensor_map *map, int32_t row, int32_t k, int32_t batch, int slice,
                                uint32_t barrier, uint16_t mask) {
        constexpr int SLICE = ROWS / SHARERS;
        auto copy = [&](uint32_t to, int32_t x, int32_t y) {
            if constexpr (SHARERS > 1)
                cp_async_bulk_tensor_3d_multicast(to, map, x, y, batch, barrier, mask);
            else
                cp_async_bulk_tensor_3d(to, map, x, y, batch, barrier);
        };
        if constexpr (K_MAJOR) {
#pragma unroll
            for (int box = 0; box < BLOCK_K / BOX; ++box)
                copy(dst + (box * ROWS + slice * SLICE) * BOX_ROW_BYTES, k + box * BOX, row + slice * SLICE);
        } else {
#pragma unroll
            for (int box = 0; box < SLICE / BOX; ++box) {
                const int place = slice * (SLICE / BOX) + box;
                copy(dst + place * BLOCK_K * BOX_ROW_BYTES, row + place * BOX, k);
            }
        }
    }

    static __device__ void produce(const tcg_tma_args &args, uint32_t stages, uint32_t full, uint32_t empty, int rank,
                                   int64_t first, int64_t step) {
        const tcg_gemm_args &g = args.gemm;
        const int32_t a_batched = g.batch_ndim && g.batch[0].a != 0, b_batched = g.batch_ndim && g.batch[0].b != 0;
        const int in_m = rank % CM, in_n = rank / CM % CN;
        uint16_t a_mask = 0;
        for (int i = 0; i < CN; ++i) a_mask |= 1 << (in_m + CM * i);
        const uint16_t b_mask = ((1 << CM) - 1) << (CM * in_n);
        Ring<STAGES> ring;
        for (int64_t tile = first; tile < g.tiles; tile += step) {
            const Work w = work(g, tile, rank);
            for (int block = 0; block < w.k_blocks; ++block, ring.advance()) {
                const uint32_t barrier = full + ring.stage * 8, stage = stages + ring.stage * STAGE_BYTES;
                const int32_t k = w.k + block * BLOCK_K;
                mbarrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
                mbarrier_arrive_expect_tx(barrier, args.stage_bytes);
                load<A_K_MAJOR, BLOCK_M, CN>(stage, &args.a, w.row, k, w.batch * a_batched, in_n, barrier, a_mask);
                load<B_K_MAJOR, B_ROWS, CM>(stage + A_BYTES, &args.b, w.column, k, w.batch * b_batched, in_m, barrier,
                                            b_mask);
            }
        }
    }

    // Descriptor of k16 step `step` of 64 (A) or BLOCK_N (B) rows from `row` on; the tile starts at `tile`.
    template <bool K_MAJOR, int ROWS> static __device__ uint64_t descriptor(uint32_t tile, int row, int step) {
        if constexpr (K_MAJOR)
            return wgmma_descriptor(tile + (step / 4 * ROWS + row) * BOX_ROW_BYTES + step % 4 * 32, 16, 8 * BOX_ROW_BYTES);
        else
            return wgmma_descriptor(tile + (row / BOX * BLOCK_K + step * 16) * BOX_ROW_BYTES, BLOCK_K * BOX_ROW_BYTES,
                                    8 * BOX_ROW_BYTES);
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
                    d[f], descriptor<A_K_MAJOR, BLOCK_M>(a_tile, wg_row + f * 64, step),
                    descriptor<B_K_MAJOR, B_ROWS>(b_tile, 0, step), step > 0 ? 1 : accumulate);
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

    // Each block sends the others their shares of its sums and adds what it is sent to its own, in order of rank.
    //   wait sums_empty -> store into the owner's shared memory -> arrive on its sums_full -> wait sums_full -> add
    //   -> arrive on everyone's sums_empty
    static __device__ void exchange(float (&d)[FRAGMENTS][ACCUMULATORS], uint32_t sums, uint32_t sums_full,
                                    uint32_t sums_empty, uint32_t phase, int rank, int consumer) {
        const int lane = consumer % 32;
        // Slot [sender][i][thread]: a warp's accesses are consecutive.
        auto slot = [&](int sender, int i) { return sums + ((sender * SHARE + i) * (WGS * 128) + consumer) * 4; };
        mbarrier_wait_cluster(sums_empty, phase ^ 1);
#pragma unroll
        for (int owner = 0; owner < OWNERS; ++owner)
            if (owner != rank) {
#pragma unroll
                for (int i = 0; i < SHARE; ++i) {
                    const int flat = owner * SHARE + i;
                    st_shared_cluster(slot(rank, i), owner, d[flat / ACCUMULATORS][flat % ACCUMULATORS]);
                }
            }
        __syncwarp();
        if (lane < CK) mbarrier_arrive_release_cluster(sums_full, lane);
        mbarrier_wait_cluster(sums_full, phase);
#pragma unroll
        for (int owner = 0; owner < OWNERS; ++owner)
            if (owner == rank) {
#pragma unroll
                for (int i = 0; i < SHARE; ++i) {
                    float &mine = d[(owner * SHARE + i) / ACCUMULATORS][(owner * SHARE + i) % ACCUMULATORS];
                    float sum = 0.0f;
#pragma unroll
                    for (int sender = 0; sender < CK; ++sender) {
                        const float part = sender == owner ? mine : ld_shared(slot(sender, i));
                        sum = sender == 0 ? part : sum + part;
                    }
                    mine = sum;
                }
            }
        __syncwarp();
        if (lane < CK) mbarrier_arrive_release_cluster(sums_empty, lane);
    }

    // C by way of shared memory, in batches of C_BOXES boxes of 64 rows x C_COLUMNS columns, as they are or transposed.
    //   wait until the stores before have read the boxes -> barrier -> stmatrix -> proxy fence -> barrier -> store
    template <bool TRANSPOSED>
    static __device__ void store_boxes(const tcg_tma_args &args, const float (&d)[FRAGMENTS][ACCUMULATORS], uint32_t boxes,
                                       const Work &w, int wg_row, int wg, int thread, bool by_tma) {
        constexpr int IN_A_ROW = BLOCK_N / C_COLUMNS;
        const int lane = thread % 32, warp = thread / 32;
#pragma unroll
        for (int batch = 0; batch < FRAGMENTS * IN_A_ROW; batch += C_BOXES) {
            if (thread == 0) cp_async_bulk_wait_group_read<0>();
            bar_sync(BAR_STORE + wg, 128);
#pragma unroll
            for (int i = 0; i < C_BOXES; ++i) {
                const uint32_t box = boxes + i * TCG_WGMMA_C_BOX_BYTES;
                const int f = (batch + i) / IN_A_ROW, column = (batch + i) % IN_A_ROW * C_COLUMNS;
#pragma unroll
                for (int j = 0; j < C_COLUMNS / 8; j += 2) {  // two groups of 8 columns a stmatrix
                    const float *v = &d[f][(column / 8 + j) * 4];
                    const uint32_t r0 = pair_from_floats<In>(v[0], v[1]), r1 = pair_from_floats<In>(v[2], v[3]);
                    const uint32_t r2 = pair_from_floats<In>(v[4], v[5]), r3 = pair_from_floats<In>(v[6], v[7]);
                    const int half = lane / 8 % 2, group = j + lane / 16;
                    if constexpr (TRANSPOSED) {
                        const int line = group * 8 + lane % 8, chunk = warp * 2 + half;
                        stmatrix_x4_trans(box + line * 128 + ((chunk ^ (line & 7)) << 4), r0, r1, r2, r3);
                    } else {
                        const int line = warp * 16 + half * 8 + lane % 8;
                        stmatrix_x4(box + line * 128 + ((group ^ (line & 7)) << 4), r0, r1, r2, r3);
                    }
                }
            }
            fence_proxy_async();
            bar_sync(BAR_STORE + wg, 128);
            for (int i = 0; i < C_BOXES; ++i) {
                const uint32_t box = boxes + i * TCG_WGMMA_C_BOX_BYTES;
                const int32_t x = w.column + (batch + i) % IN_A_ROW * C_COLUMNS;
                const int32_t y = w.row + wg_row + (batch + i) / IN_A_ROW * 64;
                if (!by_tma)
                    store_lines<TRANSPOSED>(args.gemm, box, x, y, w.c_offset, lane, warp);
                else if (thread == 0 && y < args.gemm.m && x < args.gemm.n)
                    cp_async_bulk_tensor_3d_store(&args.c, box, TRANSPOSED ? y : x, TRANSPOSED ? x : y, w.batch);
            }
            if (by_tma && thread == 0) cp_async_bulk_commit_group();
        }
    }

    // The lines of a box to C, element by element: neighbouring lanes store neighbours, whatever C's alignment.
    template <bool TRANSPOSED>
    static __device__ void store_lines(const tcg_gemm_args &g, uint32_t box, int32_t column, int32_t row, int64_t c_offset,
                                       int lane, int warp) {
        constexpr int LINES = TRANSPOSED ? C_COLUMNS : 64, LENGTH = TRANSPOSED ? 64 : C_COLUMNS;
        const int64_t lines = (TRANSPOSED ? g.n - column : g.m - row), length = (TRANSPOSED ? g.m - row : g.n - column);
        const int64_t step = TRANSPOSED ? g.c_col : g.c_row;
        uint16_t *const c = static_cast<uint16_t *>(g.c) + c_offset + row * g.c_row + column * g.c_col;
#pragma unroll 4
        for (int line = warp; line < LINES; line += 4) {
#pragma unroll
            for (int element = lane; element < LENGTH; element += 32) {
                const uint32_t at = box + line * 128 + ((element / 8 ^ (line & 7)) << 4) + element % 8 * 2;
                if (line < lines && element < length) c[line * step + element] = ld_shared_u16(at);
            }
        }
    }

    // C by guarded stores from registers: any strides and alignment, fp32, the partials of split K. Accumulators
    // first .. last-1 of a thread only.
    template <class Out>
    static __device__ void store_direct(const tcg_gemm_args &g, const float (&d)[FRAGMENTS][ACCUMULATORS], const Work &w,
                                        int wg_row, int thread, int first, int last) {
        const int lane = thread % 32, warp = thread / 32;
        const bool pairs = g.c_col == 1 && g.c_vec_bytes >= 2 * static_cast<int>(sizeof(Out));
        Out *const c = static_cast<Out *>(g.c) + w.c_offset;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int64_t row = w.row + wg_row + f * 64 + warp * 16 + half * 8 + lane / 4;
                if (row >= g.m) continue;
                Out *const line = c + row * g.c_row;
#pragma unroll
                for (int j = 0; j < BLOCK_N / 8; ++j) {
                    if (f * ACCUMULATORS + j * 4 < first || f * ACCUMULATORS + j * 4 >= last) continue;
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

    static __device__ void store_direct(const tcg_gemm_args &g, const float (&d)[FRAGMENTS][ACCUMULATORS], const Work &w,
                                        int wg_row, int thread, int first, int last) {
        if (g.c_dtype == TCG_f32)
            store_direct<float>(g, d, w, wg_row, thread, first, last);
        else
            store_direct<In>(g, d, w, wg_row, thread, first, last);
    }

    static __device__ void consume(const tcg_tma_args &args, uint32_t stages, uint32_t full, uint32_t empty, uint32_t c_area,
                                   int rank, int64_t first, int64_t step) {
        const tcg_gemm_args &g = args.gemm;
        const int wg = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = thread % 32;
        const int wg_row = SCHEDULE == coop ? wg * WG_M : 0;
        const uint32_t boxes = c_area + wg * C_BOXES * TCG_WGMMA_C_BOX_BYTES;
        Ring<STAGES> ring;
        uint32_t sums_phase = 0;
        float d[FRAGMENTS][ACCUMULATORS];

        // Pingpong: a warpgroup's main loop is opened by the other one as that ends its own; the first one is open.
        if constexpr (SCHEDULE == pingpong)
            if (wg == 1) bar_arrive(BAR_TURN, 256);
        int turn = 0;
        for (int64_t tile = first; tile < g.tiles; tile += step, turn ^= 1) {
            const Work w = work(g, tile, rank);
            if constexpr (SCHEDULE == pingpong) {
                if (turn != wg) {
                    ring.skip(w.k_blocks);
                    continue;
                }
                bar_sync(BAR_TURN + wg, 256);
            }
            multiply(d, stages, full, empty, ring, w.k_blocks, wg_row, lane);
            if constexpr (SCHEDULE == pingpong) bar_arrive(BAR_TURN + (wg ^ 1), 256);

            if constexpr (CK > 1) {
                const uint32_t sums_full = empty + STAGES * 8;
                exchange(d, c_area, sums_full, sums_full + 8, sums_phase, rank, wg * 128 + thread);
                sums_phase ^= 1;
#pragma unroll
                for (int owner = 0; owner < OWNERS; ++owner)
                    if (owner == rank) store_direct(g, d, w, wg_row, thread, owner * SHARE, (owner + 1) * SHARE);
            } else if (C_COLUMNS == 64 && (g.c_tma == TCG_C_TMA_ROWS || g.c_tma == TCG_C_STAGED_ROWS)) {
                store_boxes<false>(args, d, boxes, w, wg_row, wg, thread, g.c_tma == TCG_C_TMA_ROWS);
            } else if (g.c_tma == TCG_C_TMA_COLUMNS || g.c_tma == TCG_C_STAGED_COLUMNS) {
                store_boxes<true>(args, d, boxes, w, wg_row, wg, thread, g.c_tma == TCG_C_TMA_COLUMNS);
            } else {
                store_direct(g, d, w, wg_row, thread, 0, FRAGMENTS * ACCUMULATORS);
            }
        }
        if (thread == 0) cp_async_bulk_wait_group_read<0>();  // shared memory outlives the stores' reads
    }

    static __device__ void run(const tcg_tma_args &args) {
        extern __shared__ uint8_t shared[];
        const uint32_t stages = (static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u;
        const uint32_t c_area = stages + STAGES * STAGE_BYTES;
        const uint32_t full = c_area + TCG_WGMMA_C_BYTES(BLOCK_M, BLOCK_N, WGS, CK, C_BOXES), empty = full + STAGES * 8;
        const int rank = CLUSTER > 1 ? cluster_ctarank() : 0;
        const int64_t first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;

        if (threadIdx.x == 0) {
            prefetch_tensormap(&args.a);
            prefetch_tensormap(&args.b);
            // A stage is empty once the consumer warps of every block that it is shared with are done with it.
            for (int i = 0; i < STAGES; ++i) {
                mbarrier_init(full + i * 8, 1);
                mbarrier_init(empty + i * 8, CONSUMER_WARPS * CM * CN);
            }
            for (int i = 0; i < 2; ++i) mbarrier_init(empty + (STAGES + i) * 8, WGS * 4 * CK);
            fence_mbarrier_init();
        }
        if constexpr (CLUSTER > 1) {
            __syncthreads();
            barrier_cluster_arrive();
            barrier_cluster_wait();
        }
        if (threadIdx.x < 128) {
            if constexpr (WGS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
            if (threadIdx.x < 32) {
                __syncwarp();
                if constexpr (CLUSTER == 1) bar_arrive(BAR_READY, 32 + WGS * 128);
                if (threadIdx.x == 0) produce(args, stages, full, empty, rank, first, step);
                __syncwarp();
            }
        } else {
            if constexpr (WGS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
            if constexpr (CLUSTER == 1) bar_sync(BAR_READY, 32 + WGS * 128);
            consume(args, stages, full, empty, c_area, rank, first, step);
        }
        // No block leaves while another of its cluster may still write into it or arrive on its barriers.
        if constexpr (CLUSTER > 1) {
            barrier_cluster_arrive();
            barrier_cluster_wait();
        }
    }
};

}  // namespace

#define TCG_WGMMA_ROW(in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK, C_BOXES)                          \
    extern "C" __global__ void __launch_bounds__(TCG_WGMMA_THREADS(WGS), 1) TCG_WGMMA_NAME(                              \
        in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK)(const __grid_constant__ tcg_tma_args args) {   \
        Wgmma<in, TCG_##order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK, C_BOXES>::run(args);               \
    }
#ifdef TCG_IN_bf16
#define TCG_WGMMA_bf16 TCG_WGMMA_ROW
#define TCG_WGMMA_f16(...)
#else
#define TCG_WGMMA_bf16(...)
#define TCG_WGMMA_f16 TCG_WGMMA_ROW
#endif
#define TCG_WGMMA(in, ...) TCG_WGMMA_##in(in, __VA_ARGS__)
#include "table.def"
