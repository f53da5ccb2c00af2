/* Family mma, for few rows against many whose lines start at any multiple of two bytes (x @ w.T with an odd K). A is
 * the many rows, and nothing but copied: cp.async takes 16-byte words, so what comes of a line is the words it lies
 * in, from the start of the one it begins in, its first element `shift` bytes into that. A tensor core does not mind,
 * as long as B's lines are shifted alike, and B is small. sm_80 and later.
 *
 *   A's line r begins at (base + r * line_bytes) % 16 bytes into a word: lines that are eight apart, alike. The rows
 *   of an mma are such lines (a class), and B's fragment for them is read from shared memory `shift` bytes earlier: a
 *   word, or two and a funnel shift where the first element is in the middle of one.
 *
 *   cp.async (A of k-block i + STAGES - 1, B of the next) | cut B's tile of k-block i + 1 out of its words |
 *   ldmatrix A, shifted loads of B, mma (k-block i) -> wait_group -> __syncthreads
 *
 * What it adds to mma's rows for any alignment, which cut every piece of 16 bytes out of two words in shared memory:
 * A takes no instruction more than aligned operands do. What it costs: K is counted from the start of a word, so that
 * sums are made of other sixteens than elsewhere, and their bits differ. What holds it back: 16 bytes a copy, and
 * sectors of the L2 cache that two k-blocks share are read for both. */
#include <stdint.h>

#include "abi.h"
#include "ptx/cp_async.cuh"
#include "ptx/cvta.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"
#include "schedule.cuh"
#include "swizzle.cuh"
#include "types.cuh"
#include "words.cuh"

constexpr int WORD = 16;   /* bytes */
constexpr int CLASSES = 8; /* of lines, by where they begin in a word */

/* What a k-block's words hold beside the operand's elements. */
enum edge {
    NO_EDGE,
    LINE_ENDS,      /* behind a line's end, which has to be zeros; what is before its beginning does not matter */
    OPERAND_BEGINS, /* the same, and what is before the operand's first element must not be read */
};

template <edge EDGE> struct edge_constant {};

/* Starts the copy of a word of a line that ends at `end`, 0 where there is no such line. low: the operand's first
 * byte. */
template <edge EDGE>
static __device__ __forceinline__ void copy_word(char *to, uintptr_t word, uintptr_t low, uintptr_t end) {
    if (EDGE == OPERAND_BEGINS && word < low && word + WORD > low && end != 0) {
#pragma unroll 1
        for (int byte = 0; byte < WORD; byte += 2) {
            const uintptr_t from = word + byte;
            *reinterpret_cast<uint16_t *>(to + byte) =
                from >= low && from < end ? *reinterpret_cast<const uint16_t *>(from) : 0;
        }
        return;
    }
    int bytes = end != 0 ? WORD : 0;
    if (EDGE != NO_EDGE) {
        const int64_t left = static_cast<int64_t>(end - word);
        bytes = left > 0 ? static_cast<int>(smaller(left, WORD)) : 0;
    }
    if (EDGE == OPERAND_BEGINS && word < low) {
        bytes = 0;
    }
    cp_async_cg_16(cvta_to_shared(to), reinterpret_cast<const void *>(word), bytes);
}

template <class In, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS, int STAGES> struct mma_shift_kernel {
    static constexpr int THREADS = TCG_MMA_SHIFT_THREADS(WARPS);
    static constexpr int STEPS = BLOCK_K / 16;
    static constexpr int ROW_BYTES = BLOCK_K * 2;
    static constexpr int WORDS = ROW_BYTES / WORD; /* a line and k-block */

    /* A's tile: lines by class, and in a class as they come. */
    static constexpr int CLASS_LINES = BLOCK_M / CLASSES;
    static constexpr int LINES_AT_ONCE = THREADS / WORDS; /* of a class, that the threads copy */
    static constexpr int A_BYTES = BLOCK_M * ROW_BYTES;
    static constexpr int WARP_CLASSES = CLASSES / WARPS;
    static constexpr int CLASS_TILES = CLASS_LINES / 16; /* of an mma's rows */
    static_assert(CLASS_TILES * 16 * CLASSES == BLOCK_M, "classes fill the rows of mmas");
    static_assert(WARP_CLASSES * WARPS == CLASSES, "warps share out the classes");
    static_assert(LINES_AT_ONCE % SWIZZLE_PERIOD == 0 && CLASS_LINES % LINES_AT_ONCE == 0,
                  "a thread's words are a constant apart");

    static __host__ __device__ constexpr int a_offset(int line, int word) {
        return line * ROW_BYTES + swizzle<WORDS>(line, word) * WORD;
    }

    /* B's lines as they come: the words of the k-block, one before them for the shift of A, and one after for B's
     * own. */
    static constexpr int RAW_WORDS = WORDS + 2;
    static constexpr int RAW_BYTES = BLOCK_N * RAW_WORDS * WORD;
    static constexpr int RAW_COUNT = (BLOCK_N * RAW_WORDS + THREADS - 1) / THREADS; /* words that a thread copies */

    /* And as they are multiplied: from 8 elements before the k-block on. Lines are an odd number of words apart, so
     * that eight of them at one place lie in different banks. */
    static constexpr int B_WORDS = WORDS + 1;
    static constexpr int B_PITCH = B_WORDS * WORD;
    static constexpr int B_BYTES = BLOCK_N * B_PITCH;
    static constexpr int B_COUNT = (BLOCK_N * B_WORDS + THREADS - 1) / THREADS; /* words that a thread cuts out */
    static constexpr int TILES_N = BLOCK_N / 8;
    static_assert(B_WORDS % 2 == 1, "see above");
    static_assert(B_COUNT <= 8 && RAW_COUNT <= 32, "a thread's words fit the bits of copies");

    /* Shared memory: STAGES tiles of A, as many of B's lines, two of B. */
    static constexpr int RAW = STAGES * A_BYTES;
    static constexpr int B = RAW + STAGES * RAW_BYTES;
    static_assert(B + 2 * B_BYTES == TCG_MMA_SHIFT_SMEM(BLOCK_M, BLOCK_N, BLOCK_K, STAGES), "what the host asks for");

    /* C's tile on its way out, as fp32 columns. */
    static constexpr int C_PITCH = BLOCK_M + 1;
    static_assert(BLOCK_N * C_PITCH * 4 <= RAW, "it takes the stages' place");

    typedef float accumulators[WARP_CLASSES][CLASS_TILES][TILES_N][4];

    /* One thread's share of the copies. Addresses are those of k-block 0, whatever the split. */
    struct copies {
        const tcg_gemm_args &args;
        uintptr_t a, b;   /* the operands' first elements */
        int64_t n;        /* the tile's first line of B */
        uintptr_t a_line; /* this thread's first one of class 0; that of the next class is a line on */
        int a_lines;      /* from there on */
        int a_to;         /* its word in the tile */
        uintptr_t raw_word[RAW_COUNT];
        uint32_t raw_exists; /* bit j: word j is of a line of B */
        uint32_t own;        /* four bits each: bytes from the start of its word to the first element of the line */

        static __device__ __forceinline__ int index(int j) { return threadIdx.x + j * THREADS; }
        static __device__ __forceinline__ bool exists(int j, int count) {
            return (j + 1) * THREADS <= count || index(j) < count;
        }

        __device__ __forceinline__ copies(const tcg_gemm_args &args, const tile_place &place)
            : args(args), a(reinterpret_cast<uintptr_t>(args.a) + place.offset.a * 2),
              b(reinterpret_cast<uintptr_t>(args.b) + place.offset.b * 2),
              n(static_cast<int64_t>(place.tile_n) * BLOCK_N), raw_exists(0), own(0) {
            const int64_t m = static_cast<int64_t>(place.tile_m) * BLOCK_M;
            const int line = threadIdx.x / WORDS;
            a_line = a + (m + line * CLASSES) * args.a_row * 2;
            a_lines = static_cast<int>(smaller(args.m - m, BLOCK_M)) - line * CLASSES;
            a_to = a_offset(line, threadIdx.x % WORDS);
#pragma unroll
            for (int j = 0; j < RAW_COUNT; j++) {
                raw_word[j] = b_line(index(j) / RAW_WORDS) / WORD * WORD + (index(j) % RAW_WORDS - 1) * WORD;
                raw_exists |= (n + index(j) / RAW_WORDS < args.n ? 1u : 0u) << j;
            }
#pragma unroll
            for (int j = 0; j < B_COUNT; j++) {
                own |= static_cast<uint32_t>(b_line(index(j) / B_WORDS) % WORD) << j * 4;
            }
        }

        __device__ __forceinline__ uintptr_t b_line(int row) const { return b + (n + row) * args.b_col * 2; }
        __device__ __forceinline__ uintptr_t a_low() const { return a + smaller(args.a_row * (args.m - 1) * 2, 0); }
        __device__ __forceinline__ uintptr_t b_low() const { return b + smaller(args.b_col * (args.n - 1) * 2, 0); }

        /* Copies A's k-block `block`. */
        template <edge EDGE>
        __device__ __forceinline__ void issue_a(edge_constant<EDGE>, char *tile, int64_t block) const {
            const int64_t at = block * ROW_BYTES + threadIdx.x % WORDS * WORD;
#pragma unroll
            for (int part = 0; part < CLASS_LINES; part += LINES_AT_ONCE) {
                uintptr_t line = a_line + part * CLASSES * args.a_row * 2;
#pragma unroll
                for (int c = 0; c < CLASSES; c++) {
                    copy_word<EDGE>(tile + a_to + (c * CLASS_LINES + part) * ROW_BYTES,
                                    (line & ~static_cast<uintptr_t>(WORD - 1)) + at, a_low(),
                                    part * CLASSES + c < a_lines ? line + args.k * 2 : 0);
                    line += args.a_row * 2;
                }
            }
        }

        /* And B's lines. The words before a line's first one are not needed. */
        template <edge EDGE>
        __device__ __forceinline__ void issue_raw(edge_constant<EDGE>, char *raw, int64_t block) const {
            const int64_t at = block * ROW_BYTES;
#pragma unroll
            for (int j = 0; j < RAW_COUNT; j++) {
                if (exists(j, BLOCK_N * RAW_WORDS)) {
                    const bool wanted = (raw_exists >> j & 1) && (block > 0 || index(j) % RAW_WORDS > 0);
                    copy_word<EDGE>(raw + index(j) * WORD, raw_word[j] + at, b_low(),
                                    wanted ? b_line(index(j) / RAW_WORDS) + args.k * 2 : 0);
                }
            }
        }

        /* B's tile from its lines. */
        __device__ __forceinline__ void cut(const char *raw, char *tile) const {
#pragma unroll
            for (int j = 0; j < B_COUNT; j++) {
                if (exists(j, BLOCK_N * B_WORDS)) {
                    const uint4 *words =
                        reinterpret_cast<const uint4 *>(raw) + index(j) / B_WORDS * RAW_WORDS + index(j) % B_WORDS;
                    *reinterpret_cast<uint4 *>(tile + index(j) * WORD) = cut_out(words[0], words[1], own >> j * 4 & 15);
                }
            }
        }
    };

    /* Where this lane's fragments lie in the tiles. */
    struct fragments {
        int a;                       /* of the warp's first class, step 0 */
        int b[WARP_CLASSES];         /* the word that b0 of step 0 begins in */
        bool middle[WARP_CLASSES];   /* and whether in its middle */
        uint32_t head[WARP_CLASSES]; /* of elements 0..7 of a line's first word, those that are the line's */

        /* first: A's first element. */
        __device__ __forceinline__ void start(uintptr_t first, int64_t a_row, int warp, int lane) {
            const int pair = lane % 4 * 2;
            a = a_offset(warp * WARP_CLASSES * CLASS_LINES + lane % 16, lane / 16);
#pragma unroll
            for (int i = 0; i < WARP_CLASSES; i++) {
                const int shift = static_cast<int>((first + (warp * WARP_CLASSES + i) * a_row * 2) % WORD);
                b[i] = lane / 4 * B_PITCH + (WORD - shift) / 4 * 4 + pair * 2;
                middle[i] = shift % 4 != 0;
                head[i] = (pair * 2 >= shift ? 0xffffu : 0) | (pair * 2 + 2 >= shift ? 0xffff0000u : 0);
            }
        }
    };

    /* A register of B: two elements from the start or the middle of a word on. */
    static __device__ __forceinline__ uint32_t load_pair(const uint32_t *words, bool middle) {
        return __funnelshift_r(words[0], middle ? words[1] : 0, middle ? 16 : 0);
    }

    /* acc += a k-block. FIRST: in which lines begin. */
    template <bool FIRST>
    static __device__ __forceinline__ void multiply_block(const char *a_tile, const char *b_tile,
                                                          const fragments &fragment, accumulators &acc) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
#pragma unroll
            for (int i = 0; i < WARP_CLASSES; i++) {
                uint32_t a[CLASS_TILES][4];
#pragma unroll
                for (int t = 0; t < CLASS_TILES; t++) {
                    /* The swizzle is linear: along the line by xor. */
                    const int first = fragment.a + (i * CLASS_LINES + t * 16) * ROW_BYTES;
                    ldmatrix_x4(a[t], cvta_to_shared(a_tile) + (first ^ (step * 32)));
                    if (FIRST && step == 0) {
                        a[t][0] &= fragment.head[i];
                        a[t][1] &= fragment.head[i];
                    }
                }
#pragma unroll
                for (int j = 0; j < TILES_N; j++) {
                    const uint32_t *words =
                        reinterpret_cast<const uint32_t *>(b_tile + fragment.b[i] + j * 8 * B_PITCH + step * 32);
                    uint32_t b0 = load_pair(words, fragment.middle[i]);
                    const uint32_t b1 = load_pair(words + 4, fragment.middle[i]);
                    if (FIRST && step == 0) {
                        b0 &= fragment.head[i];
                    }
#pragma unroll
                    for (int t = 0; t < CLASS_TILES; t++) {
                        mma_m16n8k16(In(), acc[i][t][j], a[t], b0, b1);
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ int next(int stage) { return stage == STAGES - 1 ? 0 : stage + 1; }

    /* Ends with shared memory free. K is counted from the start of lines' first words: a split has a part of that. */
    static __device__ __forceinline__ void multiply(const tcg_gemm_args &args, const tile_place &place, char *smem,
                                                    int warp, int lane, accumulators &acc) {
        const copies copy(args, place);
        fragments fragment;
        fragment.start(copy.a, args.a_row, warp, lane);
        const bool last = place.k_end == args.k;
        const int64_t end = (last ? place.k_end + WORD / 2 - 1 + BLOCK_K - 1 : place.k_end) / BLOCK_K;
        const int64_t whole = (args.k - WORD / 2) / BLOCK_K; /* so many k-blocks end before the last word of a line */
        const bool begins = copy.a_low() % WORD != 0 || copy.b_low() % WORD != 0;
        int64_t block = place.k_begin < place.k_end ? place.k_begin / BLOCK_K : end;
        /* Calls copy_block with what k-block `of` holds, if there is one. */
        auto with_edge = [&](int64_t of, auto copy_block) {
            if (of >= end) {
                return;
            } else if (of == 0 && begins) {
                copy_block(edge_constant<OPERAND_BEGINS>());
            } else if (of < whole) {
                copy_block(edge_constant<NO_EDGE>());
            } else {
                copy_block(edge_constant<LINE_ENDS>());
            }
        };
        auto issue_raw = [&](int stage, int64_t of) {
            with_edge(of, [&](auto edge) { copy.issue_raw(edge, smem + RAW + stage * RAW_BYTES, of); });
        };
        int64_t a_block = block;
        int write = 0;
        /* A group of copies: A's k-block, and B's lines of the next one, which have to be cut out first. */
        auto issue = [&]() {
            with_edge(a_block, [&](auto edge) { copy.issue_a(edge, smem + write * A_BYTES, a_block); });
            a_block++;
            write = next(write);
            issue_raw(write, a_block);
            cp_async_commit_group();
        };
        issue_raw(0, block);
        cp_async_commit_group();
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; stage++) {
            issue();
        }
        cp_async_wait_group<STAGES - 1>();
        __syncthreads();
        copy.cut(smem + RAW, smem + B);
        int read = 0, tile = 0;
#pragma unroll 1
        for (; block < end; block++) {
            cp_async_wait_group<STAGES - 2>();
            __syncthreads();
            issue();
            copy.cut(smem + RAW + next(read) * RAW_BYTES, smem + B + (tile ^ 1) * B_BYTES);
            const char *const a_tile = smem + read * A_BYTES, *const b_tile = smem + B + tile * B_BYTES;
            if (block == 0) {
                multiply_block<true>(a_tile, b_tile, fragment, acc);
            } else {
                multiply_block<false>(a_tile, b_tile, fragment, acc);
            }
            read = next(read);
            tile ^= 1;
        }
        cp_async_wait_group<0>();
        __syncthreads();
    }

    /* Element by element, along C's contiguous axis. */
    template <class T>
    static __device__ __forceinline__ void store(const float *staging, T *c, const tcg_gemm_args &args, int rows,
                                                 int cols) {
        const bool along_m = args.c_row == 1;
#pragma unroll 1
        for (int i = threadIdx.x; i < BLOCK_M * BLOCK_N; i += THREADS) {
            const int row = along_m ? i % BLOCK_M : i / BLOCK_N, col = along_m ? i / BLOCK_M : i % BLOCK_N;
            if (row < rows && col < cols) {
                c[row * args.c_row + col * args.c_col] = from_float<T>(staging[col * C_PITCH + row]);
            }
        }
    }

    static __device__ __forceinline__ void run(const tcg_gemm_args &args, char *smem) {
        const int warp = threadIdx.x / 32;
        const int lane = threadIdx.x % 32;
        griddepcontrol_wait();
        for (int64_t tile = blockIdx.x; tile < args.tiles; tile += gridDim.x) {
            const tile_place place = place_tile(args, tile);
            accumulators acc = {};
            multiply(args, place, smem, warp, lane, acc);
            if (tile + gridDim.x >= args.tiles) {
                griddepcontrol_launch_dependents();
            }

            float *const staging = reinterpret_cast<float *>(smem);
#pragma unroll
            for (int i = 0; i < WARP_CLASSES; i++) {
#pragma unroll
                for (int t = 0; t < CLASS_TILES; t++) {
#pragma unroll
                    for (int j = 0; j < TILES_N; j++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const int line = t * 16 + lane / 4 + e / 2 * 8, col = j * 8 + lane % 4 * 2 + e % 2;
                            staging[col * C_PITCH + line * CLASSES + warp * WARP_CLASSES + i] = acc[i][t][j][e];
                        }
                    }
                }
            }
            __syncthreads();
            const int64_t m = static_cast<int64_t>(place.tile_m) * BLOCK_M;
            const int64_t n = static_cast<int64_t>(place.tile_n) * BLOCK_N;
            const int64_t corner = place.offset.c + m * args.c_row + n * args.c_col;
            const int rows = static_cast<int>(smaller(args.m - m, BLOCK_M));
            const int cols = static_cast<int>(smaller(args.n - n, BLOCK_N));
            if (args.c_dtype == TCG_f32) {
                store(staging, static_cast<f32 *>(args.c) + corner, args, rows, cols);
            } else {
                store(staging, static_cast<In *>(args.c) + corner, args, rows, cols);
            }
            __syncthreads();
        }
    }
};

/* Blocks an SM that have to find registers: no more than find shared memory. */
static constexpr int blocks_of(int warps, int smem_bytes) {
    return smem_bytes > 113 * 1024 ? 1 : warps > 4 ? 2 : 3;
}

#define TCG_MMA_SHIFT_KERNEL(in, order, BM, BN, BK, WARPS, STAGES)                                                       \
    extern "C" __global__ void __launch_bounds__(TCG_MMA_SHIFT_THREADS(WARPS),                                           \
                                                 blocks_of(WARPS, TCG_MMA_SHIFT_SMEM(BM, BN, BK, STAGES)))               \
        TCG_MMA_SHIFT_NAME(in, order, BM, BN, BK, WARPS, STAGES)(const __grid_constant__ tcg_gemm_args args) {           \
        extern __shared__ __align__(1024) char smem[];                                                                   \
        mma_shift_kernel<in, BM, BN, BK, WARPS, STAGES>::run(args, smem);                                                \
    }

#define TCG_MMA_SHIFT(...) TCG_ROW(TCG_MMA_SHIFT_KERNEL, __VA_ARGS__)
#include "table.def"
