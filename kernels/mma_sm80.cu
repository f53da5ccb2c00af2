/* Family mma: tensor cores by mma.sync, fed by ldmatrix from a ring of shared-memory stages that cp.async fills. One
 * block computes one tile of C; K runs through one fp32 accumulator in order. sm_80 and later.
 *
 *   cp.async (k-block i + STAGES - 1) -> commit -> wait_group -> __syncthreads -> ldmatrix (k-block i + 1) -> mma
 *
 * Operands whose lines start at any multiple of two bytes, which neither cp.async nor TMA copies as they are, come in two
 * steps (multiply_unaligned).
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
#include "words.cuh"

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

/* How the threads of a block share out a tile: each copies pieces of 16 bytes, all at the same place of rows that are
 * STEP apart. */
template <class Tile, int THREADS> struct copy_map {
    static constexpr int PER_ROW = Tile::ROW_BYTES / 16;
    static constexpr int STEP = THREADS / PER_ROW;
    static constexpr int COUNT = Tile::ROWS / STEP;
    static_assert(THREADS % PER_ROW == 0 && Tile::ROWS % STEP == 0 && STEP > 0, "threads fill whole rows");

    static __host__ __device__ constexpr int row(int thread) { return thread / PER_ROW; }
    static __host__ __device__ constexpr int byte(int thread) { return thread % PER_ROW * 16; }
    /* Of the j-th piece in the tile. Whole swizzle periods apart, pieces are a constant apart. */
    static __host__ __device__ constexpr int offset(int thread, int j) {
        return STEP % SWIZZLE_PERIOD == 0 ? Tile::offset(row(thread), byte(thread)) + j * STEP * Tile::ROW_BYTES
                                          : Tile::offset(row(thread) + j * STEP, byte(thread));
    }
};

static __device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

/* By way of L1, which asks for a sector of the L2 cache, of 32 bytes, once where two pieces lie in it; or past it. */
template <bool L1> static __device__ __forceinline__ void copy_piece(uint32_t dst, const void *src, int src_bytes) {
    if constexpr (L1) {
        cp_async_ca_16(dst, src, src_bytes);
    } else {
        cp_async_cg_16(dst, src, src_bytes);
    }
}

/* One thread's share of filling an operand's tiles, k-block after k-block. What lies outside the operand is
 * written as zeros and never read. */
template <class Tile, int MN, int BLOCK_K, bool K_MAJOR, int THREADS> struct aligned_copy {
    typedef copy_map<Tile, THREADS> map;
    static constexpr int COUNT = map::COUNT;
    static constexpr bool SHORT_LINES = !K_MAJOR && MN <= 16; /* of a sector, or half of one */

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
            copy_piece<SHORT_LINES>(tile + dst + j * map::STEP * Tile::ROW_BYTES, src, size);
            src += step_bytes;
            opaque(src); /* else every multiple of step_bytes gets registers of its own */
        }
        if (last == COUNT) {
            src += block_bytes;
        }
    }
    static_assert(map::STEP % SWIZZLE_PERIOD == 0, "a thread's pieces are a constant apart");
};

/* The same for operands of any alignment, in two steps: the aligned 16-byte words that an operand's lines lie in are copied
 * as they are, lines that begin in the middle of a word with what stands before them; when they have landed, each piece
 * is cut out of two of them. The words may hold neighbours of a line, but nothing before the operand's first element or
 * after its last is read. */
template <class Tile, int MN, int BLOCK_K, bool K_MAJOR, int THREADS> struct unaligned_copy {
    static constexpr int WORDS = Tile::ROW_BYTES / 16 + 1; /* that a line of any alignment touches */
    static constexpr bool SHORT_LINES = !K_MAJOR && MN <= 16;
    static constexpr int PITCH = WORDS * 16;
    static constexpr int RAW_BYTES = Tile::ROWS * PITCH;
    static_assert(RAW_BYTES == TCG_MMA_RAW_BYTES(MN, BLOCK_K, K_MAJOR), "what the host asks for");
    static_assert(BLOCK_K % 8 == 0, "pieces lie in their words as those of the next k-block");
    static constexpr int COUNT =
        (Tile::ROWS * WORDS + THREADS - 1) / THREADS;      /* words of a tile that a thread copies */
    static constexpr int RUN = Tile::BYTES / 16 / THREADS; /* neighbouring pieces of a row that a thread cuts out */
    static_assert(RUN > 0 && Tile::ROW_BYTES % (RUN * 16) == 0, "threads cut out whole runs");

    const char *from[COUNT]; /* these words in the next k-block */
    uintptr_t src;           /* the tile's first element there */
    uintptr_t low, high;     /* what may be read: the operand's matrix of this batch entry */
    int64_t line_bytes, block_bytes;
    int left;            /* of MN, how many are the operand's */
    int line_bits, bits; /* low bits of line_bytes, and of the address of the tile's first element */
    bool inside;         /* all these words, in every whole k-block */

    static __device__ __forceinline__ int index(int j) { return threadIdx.x + j * THREADS; }
    static __device__ __forceinline__ bool exists(int j) {
        return (j + 1) * THREADS <= Tile::ROWS * WORDS || index(j) < Tile::ROWS * WORDS;
    }
    /* Bytes from the start of its word to the first element of a line. */
    __device__ __forceinline__ int shift(int line) const { return (bits + line * line_bits) % 16; }

    /* origin: the operand's element at (0, k_begin), from where k_count elements on are to be read; line: elements from one
     * of its contiguous lines to the next. */
    __device__ __forceinline__ void start(const void *origin, int64_t mn, int64_t mn_end, int64_t line,
                                          int64_t k_count) {
        const uintptr_t first = reinterpret_cast<uintptr_t>(origin);
        const int64_t last = ((K_MAJOR ? mn_end : k_count) - 1) * line * 2; /* line, from the first */
        src = first + (K_MAJOR ? mn * line : mn) * 2;
        low = first + smaller(last, 0);
        high = first + (last > 0 ? last : 0) + (K_MAJOR ? k_count : mn_end) * 2;
        left = static_cast<int>(smaller(mn_end - mn, MN));
        line_bytes = line * 2;
        block_bytes = K_MAJOR ? BLOCK_K * 2 : BLOCK_K * line_bytes;
        bits = src % 16;
        line_bits = static_cast<int>(line_bytes) & 15;
        inside = true;
        const int64_t to_last = (k_count / BLOCK_K - 1) * block_bytes; /* whole k-block, from the first one */
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const int row = index(j) / WORDS;
            const uintptr_t address = src + row * line_bytes - shift(row) + index(j) % WORDS * 16;
            from[j] = reinterpret_cast<const char *>(address);
            if (exists(j) && (!K_MAJOR || row < left)) {
                inside &= address + smaller(to_last, 0) >= low && address + (to_last > 0 ? to_last : 0) + 16 <= high;
            }
        }
    }

    /* Starts the copies of the next k-block's words, of whose BLOCK_K elements k_left are there. */
    __device__ __forceinline__ void load(char *raw, uint32_t raw_address, int k_left) {
        if (inside && k_left == BLOCK_K) {
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                if (exists(j)) {
                    copy_piece<SHORT_LINES>(raw_address + index(j) * 16, from[j],
                                   !K_MAJOR || index(j) / WORDS < left ? 16 : 0);
                }
            }
        } else {
            load_edge(raw, raw_address, k_left);
        }
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            from[j] += block_bytes;
        }
        src += block_bytes;
    }

    /* The same where some of a line, or of the lines, is missing. */
    __device__ __forceinline__ void load_edge(char *raw, uint32_t raw_address, int k_left) const {
        const int lines = K_MAJOR ? left : k_left, bytes = (K_MAJOR ? k_left : left) * 2;
#pragma unroll 1
        for (int i = threadIdx.x; i < Tile::ROWS * WORDS; i += THREADS) {
            const int line = i / WORDS, word = i % WORDS;
            const uintptr_t address = src + line * line_bytes - shift(line) + word * 16;
            const bool wanted = line < lines && word * 16 < shift(line) + bytes;
            if (wanted && address < low) {
                load_first(raw + i * 16, address);
            } else {
                copy_piece<SHORT_LINES>(raw_address + i * 16, reinterpret_cast<const void *>(address),
                               wanted ? static_cast<int>(smaller(static_cast<int64_t>(high - address), 16)) : 0);
            }
        }
    }

    /* The word that the operand begins in, of which cp.async would read all. */
    __device__ __forceinline__ void load_first(char *to, uintptr_t from) const {
#pragma unroll 1
        for (int byte = 0; byte < 16; byte += 2) {
            if (from + byte >= low && from + byte < high) {
                *reinterpret_cast<uint16_t *>(to + byte) = *reinterpret_cast<const uint16_t *>(from + byte);
            }
        }
    }

    /* Makes the tile of a k-block from its words. Neighbouring lanes cut from neighbouring rows, which lie in other banks. */
    __device__ __forceinline__ void cut(const char *raw, char *tile, int k_left) const {
        const int row = threadIdx.x % Tile::ROWS, byte = threadIdx.x / Tile::ROWS * RUN * 16, by = shift(row);
        const int bytes = (K_MAJOR ? k_left : left) * 2 - byte; /* of the run, how many are the operand's */
        const uint4 *words = reinterpret_cast<const uint4 *>(raw + row * PITCH + byte);
        const int to = Tile::offset(row, byte);
        uint4 word = words[0], piece[RUN];
#pragma unroll
        for (int j = 0; j < RUN; j++) {
            const uint4 next = words[j + 1];
            piece[j] = cut_out(word, next, by);
            word = next;
        }
        if (bytes < RUN * 16) {
#pragma unroll
            for (int j = 0; j < RUN; j++) {
                piece[j] = keep(piece[j], bytes - j * 16);
            }
        }
#pragma unroll
        for (int j = 0; j < RUN; j++) {
            *reinterpret_cast<uint4 *>(tile + (to ^ j * 16)) = piece[j]; /* the swizzle is linear */
        }
    }

    /* Its first `bytes` bytes, and zeros. */
    static __device__ __forceinline__ uint4 keep(uint4 piece, int bytes) {
        uint32_t w[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = bytes >= i * 4 + 4 ? w[i] : bytes > i * 4 ? w[i] & 0xffff : 0;
        }
        return make_uint4(w[0], w[1], w[2], w[3]);
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
    static constexpr int SMEM_BYTES = TCG_MMA_SMEM(BLOCK_M, BLOCK_N, BLOCK_K, STAGES, ALIGN, ORDER);

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
        __device__ __forceinline__ void issue(uint32_t stage_address, int k_left) {
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
    static __device__ __forceinline__ void multiply_block(aligned_copies &copy, fragments &fragment,
                                                          uint32_t smem_address, uint32_t &read_stage,
                                                          uint32_t &write_stage, float (&acc)[TILES_M][TILES_N][4]) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (step == STEPS - 1) {
                read_stage = next_stage(read_stage);
            }
            fragment.load(read_stage, (step + 1) % STEPS);
            if (FEED && step < aligned_copies::PARTS) {
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

    /* Where a tile's operands are, and how much of K. */
    struct work {
        int64_t m, n, a_line, b_line, k_count;
        const char *a, *b; /* the elements at (0, k_begin) */
        int blocks,
            tail; /* k-blocks, and elements of the last; 32 bits of them are more than a kernel could finish */

        __device__ __forceinline__ work(const tcg_gemm_args &args, const tile_place &place)
            : m(static_cast<int64_t>(place.tile_m) * BLOCK_M), n(static_cast<int64_t>(place.tile_n) * BLOCK_N),
              a_line(A_K_MAJOR ? args.a_row : args.a_col), b_line(B_K_MAJOR ? args.b_col : args.b_row),
              k_count(place.k_end > place.k_begin ? place.k_end - place.k_begin : 0),
              a(static_cast<const char *>(args.a) + element(place.offset.a, place.k_begin, A_K_MAJOR, a_line)),
              b(static_cast<const char *>(args.b) + element(place.offset.b, place.k_begin, B_K_MAJOR, b_line)),
              blocks(static_cast<int>((k_count + BLOCK_K - 1) / BLOCK_K)),
              tail(static_cast<int>(k_count - (static_cast<int64_t>(blocks) - 1) * BLOCK_K)) {}
    };

    static __device__ __forceinline__ fragments fragments_at(uint32_t smem_address, int warp_m, int warp_n) {
        const int lane = threadIdx.x % 32;
        fragments fragment;
        fragment.a_base = smem_address + a_tile::fragment_base(lane, warp_m);
        fragment.b_base = smem_address + a_tile::BYTES + b_tile::fragment_base(lane, warp_n);
        return fragment;
    }

    /* acc += A[m.., k_begin..k_end) @ B[.., n..], one k16 step after the other. Ends with the stages free. */
    static __device__ __forceinline__ void multiply(const tcg_gemm_args &args, const tile_place &place, char *smem,
                                                    int warp_m, int warp_n, float (&acc)[TILES_M][TILES_N][4]) {
        const uint32_t smem_address = cvta_to_shared(smem);
        work w(args, place);
        aligned_copies copy;
        copy.start(args, w.a, w.b, w.m, w.n, w.a_line, w.b_line);
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; stage++) {
            copy.issue(smem_address + stage * STAGE_BYTES, block_length(w.blocks - stage, w.tail));
            cp_async_commit_group();
        }
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();

        fragments fragment = fragments_at(smem_address, warp_m, warp_n);
        uint32_t read_stage = 0;
        uint32_t write_stage = (STAGES - 1) * STAGE_BYTES;
        fragment.load(read_stage, 0);
        for (; w.blocks > STAGES; w.blocks--) {
            multiply_block<true>(copy, fragment, smem_address, read_stage, write_stage, acc);
        }
        if (w.blocks == STAGES) {
            copy.issue(smem_address + write_stage, w.tail);
        }
        for (; w.blocks > 0; w.blocks--) {
            multiply_block<false>(copy, fragment, smem_address, read_stage, write_stage, acc);
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* The same for operands of any alignment: STAGES stages of words, and two of tiles behind them.
     *
     *   words of k-block i + STAGES -> commit | cut i + 1 | multiply i | wait_group -> __syncthreads */
    static __device__ __forceinline__ void multiply_unaligned(const tcg_gemm_args &args, const tile_place &place,
                                                              char *smem, int warp_m, int warp_n,
                                                              float (&acc)[TILES_M][TILES_N][4]) {
        typedef unaligned_copy<a_tile, BLOCK_M, BLOCK_K, A_K_MAJOR, THREADS> a_copy;
        typedef unaligned_copy<b_tile, BLOCK_N, BLOCK_K, B_K_MAJOR, THREADS> b_copy;
        constexpr int RAW_BYTES = a_copy::RAW_BYTES + b_copy::RAW_BYTES;
        char *const tiles = smem + STAGES * RAW_BYTES;
        const uint32_t smem_address = cvta_to_shared(smem);
        const work w(args, place);
        a_copy a;
        b_copy b;
        a.start(w.a, w.m, args.m, w.a_line, w.k_count);
        b.start(w.b, w.n, args.n, w.b_line, w.k_count);

        int filled = 0; /* k-blocks whose words are on the way */
        auto load = [&]() {
            const int stage = filled % STAGES * RAW_BYTES;
            if (filled < w.blocks) {
                const int k_left = block_length(w.blocks - filled, w.tail);
                a.load(smem + stage, smem_address + stage, k_left);
                b.load(smem + stage + a_copy::RAW_BYTES, smem_address + stage + a_copy::RAW_BYTES, k_left);
            }
            filled++;
            cp_async_commit_group();
        };
        auto cut = [&](int block) {
            if (block < w.blocks) {
                const char *const raw = smem + block % STAGES * RAW_BYTES;
                char *const tile = tiles + block % 2 * STAGE_BYTES;
                const int k_left = block_length(w.blocks - block, w.tail);
                a.cut(raw, tile, k_left);
                b.cut(raw + a_copy::RAW_BYTES, tile + a_tile::BYTES, k_left);
            }
        };
        for (int i = 0; i < STAGES - 1; i++) {
            load();
        }
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
        cut(0);
        load();
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();

        fragments fragment = fragments_at(smem_address + STAGES * RAW_BYTES, warp_m, warp_n);
#pragma unroll 1
        for (int block = 0; block < w.blocks; block++) {
            const uint32_t stage = block % 2 * STAGE_BYTES;
            load();
            fragment.load(stage, 0);
            cut(block + 1);
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                if (step + 1 < STEPS) {
                    fragment.load(stage, step + 1);
                }
                fragment.multiply(step, acc);
            }
            cp_async_wait_group<STAGES - 2>();
            __syncthreads();
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
            if constexpr (ALIGN == 16) {
                multiply(args, place, smem, warp_m, warp_n, acc);
            } else {
                multiply_unaligned(args, place, smem, warp_m, warp_n, acc);
            }
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

/* How many blocks an SM must have registers for: enough for eight warps, and for twelve where a thread's accumulators are
 * few, for any alignment fewer still. */
static constexpr int min_blocks(int threads, int block_m, int block_n, int align) {
    return threads >= 256 ? 1 : block_m * block_n / threads > (align == 16 ? 32 : 16) ? 2 : 3;
}

#define TCG_MMA_KERNEL(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)                                 \
    extern "C" __global__ void __launch_bounds__(TCG_MMA_THREADS(WM, WN),                            \
                                                 min_blocks(TCG_MMA_THREADS(WM, WN), BM, BN, ALIGN)) \
        tcg_mma_sm80_##in##_##order##_##BM##x##BN##x##BK##_w##WM##x##WN##_s##STAGES##_a##ALIGN(      \
            const __grid_constant__ tcg_gemm_args args) {                                            \
        extern __shared__ __align__(1024) char smem[];                                               \
        mma_kernel<in, TCG_##order, BM, BN, BK, WM, WN, STAGES, ALIGN>::run(args, smem);             \
    }

/* A PTX image holds only the rows marked for it. */
#define TCG_PTX_ROW_1(in, ...) TCG_ROW(TCG_MMA_KERNEL, in, __VA_ARGS__)
#ifdef TCG_PTX_ROWS
#define TCG_PTX_ROW_0(in, ...)
#else
#define TCG_PTX_ROW_0(in, ...) TCG_ROW(TCG_MMA_KERNEL, in, __VA_ARGS__)
#endif
#define TCG_MMA(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN, PTX) \
    TCG_PTX_ROW_##PTX(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)
#include "table.def"
