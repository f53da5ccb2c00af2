/* Family mma: tensor cores by mma.sync, fed by ldmatrix from a ring of shared-memory stages that cp.async fills. One
 * block computes one tile of C; K runs through one fp32 accumulator in order. sm_80 and later.
 *
 *   cp.async (k-block i + STAGES - 1) -> commit -> wait_group -> __syncthreads -> ldmatrix (k-block i + 1) -> mma
 *
 * The barrier sits before the last k16 step of a k-block: it makes the next k-block visible, and it proves that every
 * warp has read the whole of this one, whose stage is refilled right after.
 *
 * What it adds to mma_naive is that overlap: 460 to 490 TFLOP/s, 74 to 77 % of what mma.sync does from registers (H200,
 * 8192^3, bfloat16; benchmarks/results/ladder.json). What holds it back are the copies: the warps that multiply issue
 * them, 16 bytes a thread and address, and the same code without them reaches 96 %; without ldmatrix 84 %. */
#include <stdint.h>

#include "abi.h"
#include "epilogue.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvta.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "ptx/opaque.cuh"
#include "schedule.cuh"
#include "swizzle.cuh"
#include "types.cuh"

/* A block's part of one operand for one k-block, as it lies in shared memory: MN (BLOCK_M or BLOCK_N) by BLOCK_K
 * elements of 16 bits, as rows of K where K is the contiguous axis in global memory (K_MAJOR), else as rows of m
 * or n. */
template <int MN, int BLOCK_K, bool K_MAJOR, bool IS_A> struct operand_tile {
    static constexpr int ROWS = K_MAJOR ? MN : BLOCK_K;
    static constexpr int ROW_BYTES = (K_MAJOR ? BLOCK_K : MN) * 2;
    static constexpr int BYTES = ROWS * ROW_BYTES;

    static __host__ __device__ constexpr int offset(int row, int byte) {
        return row * ROW_BYTES + swizzle<ROW_BYTES / 16>(row, byte / 16) * 16 + byte % 16;
    }

    /* Where lane's ldmatrix row lies for the 16 x 16 block at (mn, k = 0). The four 8x8 matrices come in the order
     * of the mma fragment: A (0, 0) (8, 0) (0, 8) (8, 8) in (m, k); B, two n8 fragments, (0, 0) (0, 8) (8, 0) (8,
     * 8) in (n, k). */
    static __host__ __device__ constexpr int fragment_base(int lane, int mn) {
        const int mn_half = (IS_A ? lane / 8 : lane / 16) % 2;
        const int k_half = (IS_A ? lane / 16 : lane / 8) % 2;
        const int mn_first = mn + mn_half * 8;
        const int k_first = k_half * 8;
        return K_MAJOR ? offset(mn_first + lane % 8, k_first * 2) : offset(k_first + lane % 8, mn_first * 2);
    }

    /* From there to the block at (mn + 16 * tile, 16 * step): along the row by xor, as the swizzle is linear and
     * the bits of the start are free; down the rows by whole swizzle periods. */
    static __host__ __device__ constexpr uint32_t fragment(uint32_t base, int tile, int step) {
        return K_MAJOR ? (base ^ (step * 32)) + tile * 16 * ROW_BYTES : (base ^ (tile * 32)) + step * 16 * ROW_BYTES;
    }

    template <int TILES>
    static __device__ __forceinline__ void load_fragments(uint32_t (&fragments)[TILES][4], uint32_t base, int step) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            if (K_MAJOR) {
                ldmatrix_x4(fragments[tile], fragment(base, tile, step));
            } else {
                ldmatrix_x4_trans(fragments[tile], fragment(base, tile, step));
            }
        }
    }
};

/* How the threads of a block share out a tile: each copies pieces of PIECE bytes, all at the same place of rows
 * that are STEP apart. */
template <class Tile, int THREADS, int PIECE> struct copy_map {
    static constexpr int PER_ROW = Tile::ROW_BYTES / PIECE;
    static constexpr int STEP = THREADS / PER_ROW;
    static constexpr int COUNT = Tile::ROWS / STEP;
    static_assert(THREADS % PER_ROW == 0 && Tile::ROWS % STEP == 0 && STEP > 0, "threads fill whole rows");

    static __host__ __device__ constexpr int row(int thread) { return thread / PER_ROW; }
    static __host__ __device__ constexpr int byte(int thread) { return thread % PER_ROW * PIECE; }
    /* Of the j-th piece in the tile. Whole swizzle periods apart, pieces are a constant apart. */
    static __host__ __device__ constexpr int offset(int thread, int j) {
        return STEP % SWIZZLE_PERIOD == 0 ? Tile::offset(row(thread), byte(thread)) + j * STEP * Tile::ROW_BYTES
                                          : Tile::offset(row(thread) + j * STEP, byte(thread));
    }
};

template <bool FIRST, class T, class U> struct choose {
    typedef T type;
};
template <class T, class U> struct choose<false, T, U> {
    typedef U type;
};

static __device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

/* One thread's share of filling an operand's tiles, k-block after k-block. What lies outside the operand is
 * written as zeros and never read. */
template <class Tile, int MN, int BLOCK_K, bool K_MAJOR, int THREADS> struct aligned_copy {
    typedef copy_map<Tile, THREADS, 16> map;
    static constexpr int COUNT = map::COUNT;

    const char *src;     /* the next piece */
    int64_t step_bytes;  /* to the piece STEP rows on */
    int64_t block_bytes; /* from past the last piece of a k-block to the first of the next */
    int row, byte;       /* of the first piece in the tile */
    int limit;    /* K_MAJOR: rows of the operand from `row` on; else: bytes of the piece that are the operand's */
    uint32_t dst; /* of the first piece in the tile */

    /* origin: the operand's element at (0, k_begin); mn: the tile's first row or column; line: elements from one
     * of the operand's contiguous lines to the next. */
    __device__ __forceinline__ void start(const void *origin, int64_t mn, int64_t mn_end, int64_t line) {
        row = map::row(threadIdx.x);
        byte = map::byte(threadIdx.x);
        dst = map::offset(threadIdx.x, 0);
        const int left = static_cast<int>(smaller(mn_end - mn, MN));
        limit = K_MAJOR ? left - row : clamp(left * 2 - byte, 0, 16);
        src = static_cast<const char *>(origin) + (K_MAJOR ? (mn + row) * line : mn + row * line) * 2 + byte;
        step_bytes = map::STEP * line * 2;
        block_bytes = (K_MAJOR ? BLOCK_K : BLOCK_K * line) * 2 - COUNT * step_bytes;
    }

    /* Pieces first .. last - 1 of a k-block, of whose BLOCK_K elements k_left (<= 0: none) are there. WHOLE says
     * that all are: what the main loop copies, with half of the integer work. */
    template <bool WHOLE> __device__ __forceinline__ void issue(uint32_t tile, int k_left, int first, int last) {
        const int rows = K_MAJOR ? limit : k_left - row;
        const int bytes = K_MAJOR ? clamp(k_left * 2 - byte, 0, 16) : limit;
#pragma unroll
        for (int j = first; j < last; j++) {
            const bool inside = j * map::STEP < rows;
            const int size = !WHOLE ? (inside ? bytes : 0) : K_MAJOR ? (inside ? 16 : 0) : limit;
            cp_async_cg_16(tile + dst + j * map::STEP * Tile::ROW_BYTES, src, size);
            src += step_bytes;
            opaque(src); /* else every multiple of step_bytes gets registers of its own */
        }
        if (last == COUNT) {
            src += block_bytes;
        }
    }
    static_assert(map::STEP % SWIZZLE_PERIOD == 0, "a thread's pieces are a constant apart");
};

/* The same for operands of any alignment, with the widest copies that every line start allows. Where that is a
 * single element there is no cp.async: elements are loaded two by two into registers, and stored to their stage
 * when the next k-block is issued, which hides the latency and is still two barriers before anyone reads them. */
template <class Tile, int MN, int BLOCK_K, bool K_MAJOR, int THREADS> struct unaligned_copy {
    typedef copy_map<Tile, THREADS, 4> word_map;

    const char *src; /* the tile's first element in the next k-block */
    int64_t line_bytes;
    int64_t block_bytes;
    int left;  /* of MN, how many are the operand's */
    int width; /* bytes a copy: 16, 8, 4 or 2 */
    uint32_t held[word_map::COUNT];
    char *held_tile; /* where they go; NULL: there are none */

    /* alignment: what divides every line start of the operand, in bytes. */
    __device__ __forceinline__ void start(const void *origin, int64_t mn, int64_t mn_end, int64_t line,
                                          int alignment) {
        left = static_cast<int>(smaller(mn_end - mn, MN));
        line_bytes = line * 2;
        src = static_cast<const char *>(origin) + (K_MAJOR ? mn * line_bytes : mn * 2);
        block_bytes = K_MAJOR ? BLOCK_K * 2 : BLOCK_K * line_bytes;
        width = alignment;
        held_tile = nullptr;
    }

    template <int WIDTH> __device__ __forceinline__ void issue_width(uint32_t tile, int k_left) {
        typedef copy_map<Tile, THREADS, (WIDTH < 4 ? 4 : WIDTH)> map;
        constexpr int PIECE = WIDTH < 4 ? 4 : WIDTH;
        const int row = map::row(threadIdx.x);
        const int byte = map::byte(threadIdx.x);
        const int rows = (K_MAJOR ? left : k_left) - row;
        const int bytes = clamp((K_MAJOR ? k_left : left) * 2 - byte, 0, PIECE);
        const char *piece = src + row * line_bytes + byte;
#pragma unroll
        for (int j = 0; j < map::COUNT; j++) {
            const int size = j * map::STEP < rows ? bytes : 0;
            const uint32_t dst = tile + map::offset(threadIdx.x, j);
            if (WIDTH == 16) {
                cp_async_cg_16(dst, piece, size);
            } else if (WIDTH == 8) {
                cp_async_ca_8(dst, piece, size);
            } else if (WIDTH == 4) {
                cp_async_ca_4(dst, piece, size);
            } else {
                const uint16_t *elems = reinterpret_cast<const uint16_t *>(piece);
                const uint32_t low = size >= 2 ? elems[0] : 0;
                const uint32_t high = size >= 4 ? elems[1] : 0;
                held[j] = low | high << 16;
            }
            piece += map::STEP * line_bytes;
        }
    }

    /* tile: where the k-block goes, address: the same for cp.async. */
    __device__ __forceinline__ void issue(char *tile, uint32_t address, int k_left) {
        if (width == 16) {
            issue_width<16>(address, k_left);
        } else if (width == 8) {
            issue_width<8>(address, k_left);
        } else if (width == 4) {
            issue_width<4>(address, k_left);
        } else {
            if (held_tile != nullptr) {
#pragma unroll
                for (int j = 0; j < word_map::COUNT; j++) {
                    *reinterpret_cast<uint32_t *>(held_tile + word_map::offset(threadIdx.x, j)) = held[j];
                }
            }
            issue_width<2>(address, k_left);
            held_tile = tile;
        }
        src += block_bytes;
    }
};

template <class In, int ORDER, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N, int STAGES, int ALIGN>
struct mma_kernel {
    static constexpr bool A_K_MAJOR = ORDER == TCG_nn || ORDER == TCG_nt;
    static constexpr bool B_K_MAJOR = ORDER == TCG_nt || ORDER == TCG_tt;
    typedef operand_tile<BLOCK_M, BLOCK_K, A_K_MAJOR, true> a_tile;
    typedef operand_tile<BLOCK_N, BLOCK_K, B_K_MAJOR, false> b_tile;

    static constexpr int THREADS = TCG_MMA_THREADS(WARPS_M, WARPS_N);
    static constexpr int STAGE_BYTES = a_tile::BYTES + b_tile::BYTES;
    static constexpr int SMEM_BYTES = STAGES * STAGE_BYTES;
    static_assert(SMEM_BYTES == TCG_MMA_SMEM(BLOCK_M, BLOCK_N, BLOCK_K, STAGES), "what the host asks for");
    static_assert(STAGES >= 3, "a held k-block is stored one k-block late");

    static constexpr int WARP_M = BLOCK_M / WARPS_M;
    static constexpr int WARP_N = BLOCK_N / WARPS_N;
    static constexpr int TILES_M = WARP_M / 16; /* mma tiles a warp, of 16 rows */
    static constexpr int TILES_N = WARP_N / 8;  /* and of 8 columns */
    static constexpr int STEPS = BLOCK_K / 16;
    static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "ldmatrix fetches 16 x 16 blocks");
    static_assert(STEPS % 2 == 0, "the fragment buffers alternate within a k-block");

    static constexpr int WARPS = WARPS_M * WARPS_N;
    static constexpr int STAGING =
        SMEM_BYTES / WARPS / 128 * 128; /* a warp's share of the stages, for the epilogue */

    /* What divides every line start of an operand, in bytes. */
    template <bool IS_A>
    static __device__ __forceinline__ int line_alignment(const tcg_gemm_args &args, int64_t line) {
        uint64_t bits = reinterpret_cast<uint64_t>(IS_A ? args.a : args.b) | static_cast<uint64_t>(line) * 2;
        for (int d = 0; d < args.batch_ndim; d++) {
            bits |= static_cast<uint64_t>(IS_A ? args.batch[d].a : args.batch[d].b) * 2;
        }
        return widest_access(bits);
    }

    /* Elements of K in the first of `blocks` k-blocks, the last of which has `tail`. */
    static __device__ __forceinline__ int block_length(int blocks, int tail) {
        return blocks > 1 ? BLOCK_K : blocks == 1 ? tail : 0;
    }

    static __device__ __forceinline__ uint32_t next_stage(uint32_t stage) {
        return stage == SMEM_BYTES - STAGE_BYTES ? 0 : stage + STAGE_BYTES;
    }

    /* Both operands' copies of one k-block into one stage. */
    struct aligned_copies {
        typedef aligned_copy<a_tile, BLOCK_M, BLOCK_K, A_K_MAJOR, THREADS> a_copy;
        typedef aligned_copy<b_tile, BLOCK_N, BLOCK_K, B_K_MAJOR, THREADS> b_copy;
        a_copy a;
        b_copy b;
        /* The main loop issues a part a step: few parts, so that the barrier can follow early, but none so large that
         * its addresses do not fit the registers. */
        static constexpr int PARTS = a_copy::COUNT + b_copy::COUNT > 12 ? STEPS - 1 : STEPS / 2;

        __device__ __forceinline__ void start(const tcg_gemm_args &args, const void *a_origin, const void *b_origin,
                                              int64_t m, int64_t n, int64_t a_line, int64_t b_line) {
            a.start(a_origin, m, args.m, a_line);
            b.start(b_origin, n, args.n, b_line);
        }
        __device__ __forceinline__ void issue(char *, uint32_t stage_address, uint32_t, int k_left) {
            a.template issue<false>(stage_address, k_left, 0, a_copy::COUNT);
            b.template issue<false>(stage_address + a_tile::BYTES, k_left, 0, b_copy::COUNT);
        }
        __device__ __forceinline__ void issue_part(uint32_t stage_address, int part) {
            a.template issue<true>(stage_address, BLOCK_K, a_copy::COUNT * part / PARTS,
                                   a_copy::COUNT * (part + 1) / PARTS);
            b.template issue<true>(stage_address + a_tile::BYTES, BLOCK_K, b_copy::COUNT * part / PARTS,
                                   b_copy::COUNT * (part + 1) / PARTS);
        }
    };

    struct unaligned_copies {
        static constexpr int PARTS = 0; /* whole k-blocks only */
        unaligned_copy<a_tile, BLOCK_M, BLOCK_K, A_K_MAJOR, THREADS> a;
        unaligned_copy<b_tile, BLOCK_N, BLOCK_K, B_K_MAJOR, THREADS> b;

        __device__ __forceinline__ void start(const tcg_gemm_args &args, const void *a_origin, const void *b_origin,
                                              int64_t m, int64_t n, int64_t a_line, int64_t b_line) {
            a.start(a_origin, m, args.m, a_line, line_alignment<true>(args, a_line));
            b.start(b_origin, n, args.n, b_line, line_alignment<false>(args, b_line));
        }
        __device__ __forceinline__ void issue(char *smem, uint32_t stage_address, uint32_t stage, int k_left) {
            a.issue(smem + stage, stage_address, k_left);
            b.issue(smem + stage + a_tile::BYTES, stage_address + a_tile::BYTES, k_left);
        }
        __device__ __forceinline__ void issue_part(uint32_t, int) {}
    };
    typedef typename choose<ALIGN == 16, aligned_copies, unaligned_copies>::type copies;

    /* The fragments of a step are loaded while the step before is multiplied. */
    struct fragments {
        uint32_t a[2][TILES_M][4];
        uint32_t b[2][TILES_N / 2][4];
        uint32_t a_base, b_base; /* of this lane, in stage 0 */

        __device__ __forceinline__ void load(uint32_t stage, int step) {
            a_tile::load_fragments(a[step % 2], a_base + stage, step);
            b_tile::load_fragments(b[step % 2], b_base + stage, step);
        }
        __device__ __forceinline__ void multiply(int step, float (&acc)[TILES_M][TILES_N][4]) const {
#pragma unroll
            for (int i = 0; i < TILES_M; i++) {
#pragma unroll
                for (int j = 0; j < TILES_N; j++) {
                    const uint32_t (&b16)[4] = b[step % 2][j / 2];
                    mma_m16n8k16(In(), acc[i][j], a[step % 2][i], b16[j % 2 * 2], b16[j % 2 * 2 + 1]);
                }
            }
        }
    };

    /* Multiplies the k-block in read_stage. FEED: and copies the one STAGES - 1 further on, which is whole, into
     * write_stage, part by part. */
    template <bool FEED>
    static __device__ __forceinline__ void multiply_block(copies &copy, fragments &fragment, uint32_t smem_address,
                                                          uint32_t &read_stage, uint32_t &write_stage,
                                                          float (&acc)[TILES_M][TILES_N][4]) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (step == STEPS - 1) {
                read_stage = next_stage(read_stage);
            }
            fragment.load(read_stage, (step + 1) % STEPS);
            if (FEED && step < copies::PARTS) {
                copy.issue_part(smem_address + write_stage, step);
            }
            fragment.multiply(step, acc);
            if (step == STEPS - 2) {
                cp_async_commit_group();
                cp_async_wait_group<STAGES - 2>();
                __syncthreads();
                write_stage = next_stage(write_stage);
            }
        }
    }

    /* acc += A[m.., k_begin..k_end) @ B[.., n..], one k16 step after the other. Ends with the stages free. */
    static __device__ __forceinline__ void multiply(const tcg_gemm_args &args, const tile_place &place, char *smem,
                                                    int warp_m, int warp_n, float (&acc)[TILES_M][TILES_N][4]) {
        const int lane = threadIdx.x % 32;
        const int64_t m = static_cast<int64_t>(place.tile_m) * BLOCK_M;
        const int64_t n = static_cast<int64_t>(place.tile_n) * BLOCK_N;
        const uint32_t smem_address = cvta_to_shared(smem);
        const int64_t a_line = A_K_MAJOR ? args.a_row : args.a_col;
        const int64_t b_line = B_K_MAJOR ? args.b_col : args.b_row;
        const int64_t k_count = place.k_end > place.k_begin ? place.k_end - place.k_begin : 0;

        copies copy;
        copy.start(args,
                   static_cast<const char *>(args.a) + element(place.offset.a, place.k_begin, A_K_MAJOR, a_line),
                   static_cast<const char *>(args.b) + element(place.offset.b, place.k_begin, B_K_MAJOR, b_line), m,
                   n, a_line, b_line);
        /* 32 bits of k-blocks are more than a kernel could finish. */
        int blocks = static_cast<int>((k_count + BLOCK_K - 1) / BLOCK_K);
        const int tail = static_cast<int>(k_count - (static_cast<int64_t>(blocks) - 1) * BLOCK_K);
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; stage++) {
            copy.issue(smem, smem_address + stage * STAGE_BYTES, stage * STAGE_BYTES,
                       block_length(blocks - stage, tail));
            cp_async_commit_group();
        }
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();

        fragments fragment;
        fragment.a_base = smem_address + a_tile::fragment_base(lane, warp_m);
        fragment.b_base = smem_address + a_tile::BYTES + b_tile::fragment_base(lane, warp_n);
        uint32_t read_stage = 0;
        uint32_t write_stage = (STAGES - 1) * STAGE_BYTES;
        fragment.load(read_stage, 0);

        if (copies::PARTS > 0) {
            for (; blocks > STAGES; blocks--) {
                multiply_block<true>(copy, fragment, smem_address, read_stage, write_stage, acc);
            }
            if (blocks == STAGES) {
                copy.issue(smem, smem_address + write_stage, write_stage, tail);
            }
            for (; blocks > 0; blocks--) {
                multiply_block<false>(copy, fragment, smem_address, read_stage, write_stage, acc);
            }
        } else {
            for (; blocks > 0; blocks--) {
                copy.issue(smem, smem_address + write_stage, write_stage, block_length(blocks - (STAGES - 1), tail));
                multiply_block<false>(copy, fragment, smem_address, read_stage, write_stage, acc);
            }
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* Bytes from an operand's base to its element at k, in the batch entry at `offset`. */
    static __device__ __forceinline__ int64_t element(int64_t offset, int64_t k, bool k_major, int64_t line) {
        return (offset + (k_major ? k : k * line)) * 2;
    }

    static __device__ __forceinline__ void run(const tcg_gemm_args &args, char *smem) {
        const int warp = threadIdx.x / 32;
        const int warp_m = warp % WARPS_M * WARP_M;
        const int warp_n = warp / WARPS_M * WARP_N;
        griddepcontrol_wait();
        for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
            const tile_place place = place_tile(args, tile);
            float acc[TILES_M][TILES_N][4] = {};
            multiply(args, place, smem, warp_m, warp_n, acc);
            if (tile + gridDim.x >= args.tiles) {
                griddepcontrol_launch_dependents();
            }

            const epilogue_target c =
                warp_target(args, place.offset.c, static_cast<int64_t>(place.tile_m) * BLOCK_M + warp_m,
                            static_cast<int64_t>(place.tile_n) * BLOCK_N + warp_n);
            store_result<In, STAGING>(args, acc, smem + warp * STAGING, threadIdx.x % 32, c);
            __syncthreads();
        }
    }
};

/* How many blocks an SM must have registers for: enough for eight warps, and for twelve where a thread's accumulators
 * are few. */
static constexpr int min_blocks(int threads, int block_m, int block_n) {
    return threads >= 256 ? 1 : block_m * block_n / threads > 32 ? 2 : 3;
}

#define TCG_MMA_KERNEL(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)                            \
    extern "C" __global__ void __launch_bounds__(TCG_MMA_THREADS(WM, WN),                       \
                                                 min_blocks(TCG_MMA_THREADS(WM, WN), BM, BN))   \
        tcg_mma_sm80_##in##_##order##_##BM##x##BN##x##BK##_w##WM##x##WN##_s##STAGES##_a##ALIGN( \
            const __grid_constant__ tcg_gemm_args args) {                                       \
        extern __shared__ __align__(1024) char smem[];                                          \
        mma_kernel<in, TCG_##order, BM, BN, BK, WM, WN, STAGES, ALIGN>::run(args, smem);        \
    }

/* An image holds the rows of one input type, and a PTX image only those marked for it. */
#ifdef TCG_IN_f16
#define TCG_ROW_f16(...) TCG_MMA_KERNEL(__VA_ARGS__)
#else
#define TCG_ROW_f16(...)
#endif
#ifdef TCG_IN_bf16
#define TCG_ROW_bf16(...) TCG_MMA_KERNEL(__VA_ARGS__)
#else
#define TCG_ROW_bf16(...)
#endif
#define TCG_PTX_ROW_1(in, ...) TCG_ROW_##in(in, __VA_ARGS__)
#ifdef TCG_PTX_ROWS
#define TCG_PTX_ROW_0(in, ...)
#else
#define TCG_PTX_ROW_0(in, ...) TCG_ROW_##in(in, __VA_ARGS__)
#endif
#define TCG_MMA(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN, PTX) \
    TCG_PTX_ROW_##PTX(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)
#include "table.def"
