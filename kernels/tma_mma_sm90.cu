/* Family tma_mma: mma.sync fed by TMA, for chips that have TMA but no warpgroup instructions (12.x), and for 9.0
 * beside wgmma. Persistent: one elected thread keeps a ring of shared-memory stages full, across tiles, so that a
 * tile's first loads run under the epilogue before it. No barrier over the block in the main loop: a warp waits for
 * data, never for another warp.
 *
 *   producer: wait empty[stage] -> expect bytes on full[stage] -> TMA A and B boxes (each completes on full[stage])
 *   consumer: wait full[stage] -> ldmatrix, a k16 step ahead -> mma.sync -> arrive on empty[stage], a lane a warp
 *
 * The producer has a warp of its own where registers allow: a scheduler's 16384 give three warps 168 a thread, too
 * few beside 128 accumulators. Warps of 64 x 64 elements therefore run two a scheduler, and the first of them also
 * loads.
 *
 * What it adds to mma: no thread copies, and no barrier. About 510 TFLOP/s, 81 % of what mma.sync does from registers
 * (H200, 8192^3, bfloat16; benchmarks/results/ladder.json). What holds it back: two warps a scheduler hide little of
 * the latency of ldmatrix and of the accumulators' own chain, and every operand still crosses registers. */
#include <stdint.h>

#include "abi.h"
#include "epilogue.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cvta.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/tma.cuh"
#include "schedule.cuh"
#include "swizzle.cuh"
#include "types.cuh"

/* Named barrier; 0 is __syncthreads'. */
static constexpr int BAR_CONSUMERS = 1;

/* A block's part of one operand for one k-block, as TMA leaves it in shared memory: boxes 64 elements wide, whose
 * lines of 128 bytes are swizzled in chunks of 16 (swizzle.cuh's pattern for rows of eight). MN (BLOCK_M or BLOCK_N)
 * by BLOCK_K elements are BLOCK_K / 64 boxes of MN lines where K is the contiguous axis in global memory (K_MAJOR),
 * else MN / 64 boxes of BLOCK_K lines. */
template <int MN, int BLOCK_K, bool K_MAJOR, bool IS_A> struct operand_boxes {
    static constexpr int LINE_BYTES = TCG_TMA_BOX_ELEMS * 2;
    static constexpr int BOX_BYTES = (K_MAJOR ? MN : BLOCK_K) * LINE_BYTES;
    static constexpr int BOXES = (K_MAJOR ? BLOCK_K : MN) / TCG_TMA_BOX_ELEMS;
    static constexpr int BYTES = BOXES * BOX_BYTES;
    static_assert(BLOCK_K % TCG_TMA_BOX_ELEMS == 0 && MN % TCG_TMA_BOX_ELEMS == 0, "whole boxes in either order");

    /* Boxes start at (mn, k) and end at full + expected bytes. They may be shorter than MN lines where the whole
     * operand is (the host's choice): what is then left as it was gives rows or columns of the result that are never
     * stored. */
    static __device__ __forceinline__ void load(uint32_t dst, const tcg_tensor_map *map, int32_t mn, int32_t k,
                                                int32_t batch, uint32_t full) {
#pragma unroll
        for (int box = 0; box < BOXES; box++) {
            const int32_t x = (K_MAJOR ? k : mn) + box * TCG_TMA_BOX_ELEMS;
            cp_async_bulk_tensor_3d_shared_cta(dst + box * BOX_BYTES, map, x, K_MAJOR ? mn : k, batch, full);
        }
    }

    /* elem: a multiple of 8. */
    static __host__ __device__ constexpr int offset(int line, int elem) {
        return elem / TCG_TMA_BOX_ELEMS * BOX_BYTES + line * LINE_BYTES +
               swizzle<LINE_BYTES / 16>(line, elem % TCG_TMA_BOX_ELEMS / 8) * 16;
    }

    /* Where lane's ldmatrix row lies for the 16 x 16 block at (mn, k = 0). The four 8x8 matrices come in the order of
     * the mma fragment: A (0, 0) (8, 0) (0, 8) (8, 8) in (m, k); B, two n8 fragments, (0, 0) (0, 8) (8, 0) (8, 8) in
     * (n, k). */
    static __host__ __device__ constexpr int fragment_base(int lane, int mn) {
        const int mn_first = mn + (IS_A ? lane / 8 : lane / 16) % 2 * 8;
        const int k_first = (IS_A ? lane / 16 : lane / 8) % 2 * 8;
        return K_MAJOR ? offset(mn_first + lane % 8, k_first) : offset(k_first + lane % 8, mn_first);
    }

    /* From there to the block at (mn + 16 * tile, 16 * step): along the line by xor, as the swizzle is linear and the
     * bits of the start are free (mn is a multiple of the warp's extent, which divides a box or is whole boxes); down
     * the lines by whole swizzle periods. */
    static __host__ __device__ constexpr uint32_t fragment(uint32_t base, int tile, int step) {
        const int along = K_MAJOR ? step : tile;
        const int down = K_MAJOR ? tile : step;
        constexpr int IN_BOX = TCG_TMA_BOX_ELEMS / 16;
        return (base ^ (along % IN_BOX * 32)) + along / IN_BOX * BOX_BYTES + down * 16 * LINE_BYTES;
    }

    static __device__ __forceinline__ void load_fragment(uint32_t (&regs)[4], uint32_t address) {
        if (K_MAJOR) {
            ldmatrix_x4(regs, address);
        } else {
            ldmatrix_x4_trans(regs, address);
        }
    }
};

template <class In, int ORDER, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N, int STAGES>
struct tma_mma_kernel {
    static constexpr bool A_K_MAJOR = ORDER == TCG_nn || ORDER == TCG_nt;
    static constexpr bool B_K_MAJOR = ORDER == TCG_nt || ORDER == TCG_tt;
    typedef operand_boxes<BLOCK_M, BLOCK_K, A_K_MAJOR, true> a_boxes;
    typedef operand_boxes<BLOCK_N, BLOCK_K, B_K_MAJOR, false> b_boxes;

    static constexpr int WARPS = WARPS_M * WARPS_N; /* that multiply */
    static constexpr int WARP_M = BLOCK_M / WARPS_M;
    static constexpr int WARP_N = BLOCK_N / WARPS_N;
    static constexpr int TILES_M = WARP_M / 16; /* mma tiles a warp, of 16 rows */
    static constexpr int TILES_N = WARP_N / 8;  /* and of 8 columns */
    static constexpr int STEPS = BLOCK_K / 16;
    static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "ldmatrix fetches 16 x 16 blocks");
    static_assert(64 % WARP_M == 0 && 64 % WARP_N == 0, "a warp's fragments of a step lie in one box");
    static_assert(STEPS % 2 == 0 && STEPS > 2, "the fragment buffers alternate within a k-block");

    static constexpr bool PRODUCER_WARP = TCG_TMA_MMA_THREADS(BLOCK_M, BLOCK_N, WARPS_M, WARPS_N) > WARPS * 32;
    static constexpr int AHEAD = STAGES - 1; /* k-blocks that the first warp is ahead where it loads too */
    static constexpr int FEED_STEP = 2;      /* when in a k-block: the others have long read the one before */

    static constexpr int STAGE_BYTES = a_boxes::BYTES + b_boxes::BYTES;
    static constexpr int C_BYTES = TCG_TMA_MMA_C_BYTES(BLOCK_M, BLOCK_N, WARPS_M, WARPS_N);
    static constexpr bool OWN_STAGING = C_BYTES > 0;
    static constexpr int STAGING = (OWN_STAGING ? C_BYTES : STAGE_BYTES) / WARPS / 128 * 128; /* a warp's, for C */
    static constexpr int FULL = STAGES * STAGE_BYTES + C_BYTES; /* where the mbarriers lie */
    static constexpr int EMPTY = FULL + STAGES * 8;
    static_assert(STAGE_BYTES == TCG_TMA_MMA_STAGE_BYTES(BLOCK_M, BLOCK_N, BLOCK_K) &&
                      EMPTY + STAGES * 8 ==
                          TCG_TMA_MMA_SMEM(BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES, ORDER),
                  "what the host asks for");

    /* A place in the ring of stages. */
    struct ring {
        uint32_t stage = 0;
        uint32_t phase = 0; /* parity of the pass over the ring */

        __device__ __forceinline__ void advance() {
            stage++;
            if (stage == STAGES) {
                stage = 0;
                phase ^= 1;
            }
        }
    };

    /* At least 1: the planner gives no empty split. */
    static __device__ __forceinline__ int k_blocks(const tma_place &place) {
        return (place.k_end - place.k_begin + BLOCK_K - 1) / BLOCK_K;
    }

    /* The loads of this block's tiles, k-block after k-block. */
    struct feed {
        ring at;
        uint32_t tile;
        int32_t m, n, k, batch; /* of the next k-block */
        int left;               /* k-blocks of the tile; 0: there is no tile left */

        __device__ __forceinline__ void enter(const tcg_tma_walk &walk) {
            left = 0;
            if (tile < static_cast<uint32_t>(walk.tiles)) {
                const tma_place place = place_tile(walk, tile);
                m = place.tile_m * BLOCK_M;
                n = place.tile_n * BLOCK_N;
                k = place.k_begin;
                batch = place.batch;
                left = k_blocks(place);
            }
        }
        __device__ __forceinline__ void start(const tcg_tma_walk &walk) {
            tile = blockIdx.x;
            enter(walk);
        }
        /* One thread. */
        __device__ __forceinline__ void load(const tcg_tma_args &args, uint32_t smem) const {
            const uint32_t stage = smem + at.stage * STAGE_BYTES;
            const uint32_t full = smem + FULL + at.stage * 8;
            mbarrier_wait(smem + EMPTY + at.stage * 8, at.phase ^ 1);
            mbarrier_arrive_expect_tx(full, args.walk.a.bytes + args.walk.b.bytes);
            a_boxes::load(stage, &args.a, m, k, batch * args.walk.a.batched, full);
            b_boxes::load(stage + a_boxes::BYTES, &args.b, n, k, batch * args.walk.b.batched, full);
        }
        __device__ __forceinline__ void advance(const tcg_tma_walk &walk) {
            at.advance();
            k += BLOCK_K;
            left--;
            if (left == 0) {
                tile += gridDim.x;
                enter(walk);
            }
        }
        /* A whole warp: the next k-block, if there is one. */
        __device__ __forceinline__ void next(const tcg_tma_args &args, uint32_t smem) {
            if (left > 0) {
                if (elect_sync()) {
                    load(args, smem);
                }
                __syncwarp();
                advance(args.walk);
            }
        }
    };

    /* Two steps' fragments: those of a step are loaded while the step before is multiplied. */
    struct fragments {
        uint32_t a[2][TILES_M][4];
        uint32_t b[2][TILES_N / 2][4];
        uint32_t a_base, b_base; /* of this lane, in a stage */

        static constexpr int LOADS = TILES_M + TILES_N / 2;

        /* The which-th of a step's ldmatrix, in the order in which multiply wants them. */
        __device__ __forceinline__ void load(uint32_t stage, int step, int which) {
            if (which == 0 || which > TILES_N / 2) {
                const int tile = which == 0 ? 0 : which - TILES_N / 2;
                a_boxes::load_fragment(a[step % 2][tile], a_boxes::fragment(a_base, tile, step) + stage);
            } else {
                const int tile = which - 1;
                b_boxes::load_fragment(b[step % 2][tile], b_boxes::fragment(b_base, tile, step) + stage);
            }
        }
        __device__ __forceinline__ void load(uint32_t stage, int step) {
#pragma unroll
            for (int which = 0; which < LOADS; which++) {
                load(stage, step, which);
            }
        }
        /* acc += the fragments of `step`; with NEXT, `next_step` of next_stage is loaded on the way, early enough to
         * have arrived by the end and not all at once. Columns are walked to and fro, for the reuse of operand
         * registers. */
        template <bool NEXT> __device__ __forceinline__ void multiply(int step, float (&acc)[TILES_M][TILES_N][4],
                                                                      uint32_t next_stage, int next_step) {
#pragma unroll
            for (int i = 0; i < TILES_M; i++) {
#pragma unroll
                for (int jj = 0; jj < TILES_N; jj++) {
                    const int j = i % 2 == 0 ? jj : TILES_N - 1 - jj;
                    const int place = i * TILES_N + jj;
                    if (NEXT && place % 2 == 0 && place / 2 < LOADS) {
                        load(next_stage, next_step, place / 2);
                    }
                    const uint32_t (&b16)[4] = b[step % 2][j / 2];
                    mma_m16n8k16(In(), acc[i][j], a[step % 2][i], b16[j % 2 * 2], b16[j % 2 * 2 + 1]);
                }
            }
        }
        static_assert(TILES_M * TILES_N >= 2 * LOADS - 1, "every load finds its place among the mma");
    };

    /* Gives a stage back to the producer: this warp has read it. */
    static __device__ __forceinline__ void release(uint32_t smem, const ring &at, int lane) {
        __syncwarp();
        if (lane == 0) {
            mbarrier_arrive(smem + EMPTY + at.stage * 8);
        }
    }

    /* acc += A[m.., k_begin..k_end) @ B[.., n..], one k16 step after the other. Ends in the last stage, which is
     * released unless C is going to pass through it. */
    static __device__ __forceinline__ void multiply(const tcg_tma_args &args, uint32_t smem, feed &feeder, bool feeds,
                                                    fragments &fragment, ring &at, int left, int lane,
                                                    float (&acc)[TILES_M][TILES_N][4]) {
        mbarrier_wait(smem + FULL + at.stage * 8, at.phase);
        fragment.load(smem + at.stage * STAGE_BYTES, 0);
        while (true) {
            const uint32_t stage = smem + at.stage * STAGE_BYTES;
            ring next = at;
            next.advance();
            bool next_full = false;
#pragma unroll
            for (int step = 0; step < STEPS - 1; step++) {
                if (!PRODUCER_WARP && step == FEED_STEP && feeds) {
                    feeder.next(args, smem);
                }
                if (step == STEPS - 2) {
                    next_full = mbarrier_test_wait(smem + FULL + next.stage * 8, next.phase);
                }
                fragment.template multiply<true>(step, acc, stage, step + 1);
            }
            left--;
            if (left == 0) {
                break;
            }
            release(smem, at, lane);
            at = next;
            if (!next_full) {
                mbarrier_wait(smem + FULL + at.stage * 8, at.phase);
            }
            fragment.template multiply<true>(STEPS - 1, acc, smem + at.stage * STAGE_BYTES, 0);
        }
        if (OWN_STAGING) {
            release(smem, at, lane);
        }
        fragment.template multiply<false>(STEPS - 1, acc, 0, 0);
    }

    static __device__ __forceinline__ void store(const tcg_gemm_args &args, const tma_place &place, int warp_m,
                                                 int warp_n, char *staging, int lane,
                                                 const float (&acc)[TILES_M][TILES_N][4]) {
        const int64_t offset = (args.batch_ndim > 0 ? place.batch * args.batch[0].c : 0) + place.split * args.c_split;
        const epilogue_target c =
            warp_target(args, offset, static_cast<int64_t>(place.tile_m) * BLOCK_M + warp_m,
                        static_cast<int64_t>(place.tile_n) * BLOCK_N + warp_n);
        store_result<In, STAGING>(args, acc, staging, lane, c);
    }

    static __device__ __forceinline__ void consume(const tcg_tma_args &args, char *shared, uint32_t smem, int warp) {
        const int lane = threadIdx.x % 32;
        const int warp_m = warp % WARPS_M * WARP_M;
        const int warp_n = warp / WARPS_M * WARP_N;
        fragments fragment;
        fragment.a_base = a_boxes::fragment_base(lane, warp_m);
        fragment.b_base = a_boxes::BYTES + b_boxes::fragment_base(lane, warp_n);
        feed feeder;
        const bool feeds = !PRODUCER_WARP && warp == 0;
        if (feeds) {
            feeder.start(args.walk);
            for (int stage = 0; stage < AHEAD; stage++) {
                feeder.next(args, smem);
            }
        }
        ring at;
        for (uint32_t tile = blockIdx.x; tile < static_cast<uint32_t>(args.walk.tiles); tile += gridDim.x) {
            const tma_place place = place_tile(args.walk, tile);
            float acc[TILES_M][TILES_N][4] = {};
            multiply(args, smem, feeder, feeds, fragment, at, k_blocks(place), lane, acc);
            if (OWN_STAGING) {
                store(args.gemm, place, warp_m, warp_n, shared + STAGES * STAGE_BYTES + warp * STAGING, lane, acc);
            } else {
                bar_sync(BAR_CONSUMERS, WARPS * 32); /* the others have read the stage too */
                store(args.gemm, place, warp_m, warp_n, shared + at.stage * STAGE_BYTES + warp * STAGING, lane, acc);
                fence_proxy_async(); /* TMA writes there next */
                release(smem, at, lane);
            }
            at.advance();
        }
    }

    static __device__ __forceinline__ void run(const tcg_tma_args &args, char *shared) {
        const uint32_t smem = cvta_to_shared(shared);
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == 0) {
            prefetch_tensormap(&args.a);
            prefetch_tensormap(&args.b);
            for (int stage = 0; stage < STAGES; stage++) {
                mbarrier_init(smem + FULL + stage * 8, 1);
                mbarrier_init(smem + EMPTY + stage * 8, WARPS);
            }
            fence_mbarrier_init();
        }
        __syncthreads();
        if (!PRODUCER_WARP || warp < WARPS) {
            consume(args, shared, smem, warp);
        } else if (elect_sync()) {
            feed feeder;
            for (feeder.start(args.walk); feeder.left > 0; feeder.advance(args.walk)) {
                feeder.load(args, smem);
            }
        }
    }
};

/* Shared memory of a block and of an SM. 12.x has less of it: the larger rows are not for them. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
static constexpr int SMEM_BLOCK = 101376, SMEM_SM = 102400;
#else
static constexpr int SMEM_BLOCK = 232448, SMEM_SM = 233472;
#endif

/* How many blocks an SM must have registers for: as many as its shared memory holds (a block takes 1 KB beside what
 * it asks for), but no more than eight warps of many accumulators or twelve of few. */
static constexpr int min_blocks(int warps, int accumulators, int smem_bytes) {
    const int by_registers = warps >= 8 ? 1 : accumulators > 32 ? 2 : 3;
    const int by_smem = SMEM_SM / (smem_bytes + 1024);
    return by_smem < 1 ? 1 : by_smem < by_registers ? by_smem : by_registers;
}

#define TCG_TMA_MMA_KERNEL(in, order, BM, BN, BK, WM, WN, STAGES)                                                 \
    extern "C" __global__ void __launch_bounds__(TCG_TMA_MMA_THREADS(BM, BN, WM, WN),                             \
                                                 min_blocks((WM) * (WN), (BM) * (BN) / ((WM) * (WN) * 32),        \
                                                            TCG_TMA_MMA_SMEM(BM, BN, BK, WM, WN, STAGES, order))) \
        TCG_WARPS_NAME(tma_mma_sm90, in, order, BM, BN, BK, WM, WN,                                               \
                       STAGES)(const __grid_constant__ tcg_tma_args args) {                                       \
        extern __shared__ __align__(1024) char shared[];                                                          \
        if constexpr (TCG_TMA_MMA_SMEM(BM, BN, BK, WM, WN, STAGES, order) <= SMEM_BLOCK) {                        \
            tma_mma_kernel<in, TCG_##order, BM, BN, BK, WM, WN, STAGES>::run(args, shared);                       \
        }                                                                                                         \
    }

#define TCG_TMA_MMA(...) TCG_ROW(TCG_TMA_MMA_KERNEL, __VA_ARGS__)
#include "table.def"
