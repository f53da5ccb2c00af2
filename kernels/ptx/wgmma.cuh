// wgmma: a warpgroup's asynchronous m64 x N x k16 product of two shared-memory tiles, fp32 accumulators in registers
// (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). Accumulator d[4*j + 2*h + e] of a thread is row
// 16*warp + lane/4 + 8*h, column 8*j + 2*(lane%4) + e.
#pragma once
#include <cstdint>

static __device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

static __device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int N>
static __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Shared-memory matrix descriptor for lines of 128, 64 or 32 bytes, swizzled over that span (layout type 1, 2 or 3 in bits
// 62..63); offsets in bytes. K-major: `stride_bytes` leads from 8 rows to the next 8, `leading_bytes` is not used.
// MN-major: `stride_bytes` leads from 8 k to the next 8, `leading_bytes` from a line's end along M or N on.
template <int LINE_BYTES>
static __device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
    static_assert(LINE_BYTES == 128 || LINE_BYTES == 64 || LINE_BYTES == 32, "spans of the swizzle");
    constexpr uint64_t LAYOUT = LINE_BYTES == 128 ? 1 : LINE_BYTES == 64 ? 2 : 3;
    return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
           static_cast<uint64_t>(stride_bytes >> 4) << 32 | LAYOUT << 62;
}

// D = A @ B + (accumulate ? D : 0). TRANS_A, TRANS_B: 1 where that operand is MN-major. BF16: else both are fp16.
template <int N, bool BF16, int TRANS_A, int TRANS_B>
struct wgmma;

// The instruction's text and operands, for N = 16, 32 .. 256: each list is the one before and eight registers more.
#define TCG_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TCG_REGISTERS_32 TCG_REGISTERS_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TCG_REGISTERS_48 TCG_REGISTERS_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TCG_REGISTERS_64 TCG_REGISTERS_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TCG_REGISTERS_80 TCG_REGISTERS_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TCG_REGISTERS_96 TCG_REGISTERS_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TCG_REGISTERS_112 TCG_REGISTERS_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TCG_REGISTERS_128 TCG_REGISTERS_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TCG_REGISTERS_144 TCG_REGISTERS_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TCG_REGISTERS_160 TCG_REGISTERS_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TCG_REGISTERS_176 TCG_REGISTERS_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TCG_REGISTERS_192 TCG_REGISTERS_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TCG_REGISTERS_208 TCG_REGISTERS_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TCG_REGISTERS_224 TCG_REGISTERS_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TCG_REGISTERS_240 TCG_REGISTERS_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TCG_REGISTERS_256 TCG_REGISTERS_240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TCG_EIGHT(i)                                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define TCG_SUMS_16 TCG_EIGHT(0)
#define TCG_SUMS_32 TCG_SUMS_16, TCG_EIGHT(8)
#define TCG_SUMS_48 TCG_SUMS_32, TCG_EIGHT(16)
#define TCG_SUMS_64 TCG_SUMS_48, TCG_EIGHT(24)
#define TCG_SUMS_80 TCG_SUMS_64, TCG_EIGHT(32)
#define TCG_SUMS_96 TCG_SUMS_80, TCG_EIGHT(40)
#define TCG_SUMS_112 TCG_SUMS_96, TCG_EIGHT(48)
#define TCG_SUMS_128 TCG_SUMS_112, TCG_EIGHT(56)
#define TCG_SUMS_144 TCG_SUMS_128, TCG_EIGHT(64)
#define TCG_SUMS_160 TCG_SUMS_144, TCG_EIGHT(72)
#define TCG_SUMS_176 TCG_SUMS_160, TCG_EIGHT(80)
#define TCG_SUMS_192 TCG_SUMS_176, TCG_EIGHT(88)
#define TCG_SUMS_208 TCG_SUMS_192, TCG_EIGHT(96)
#define TCG_SUMS_224 TCG_SUMS_208, TCG_EIGHT(104)
#define TCG_SUMS_240 TCG_SUMS_224, TCG_EIGHT(112)
#define TCG_SUMS_256 TCG_SUMS_240, TCG_EIGHT(120)

#define TCG_WGMMA_ASM(N, TYPE, A, B, P, TA, TB)                                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TCG_REGISTERS_##N "}, %" #A \
                 ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}"                                                 \
                 : TCG_SUMS_##N                                                                               \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(TRANS_A), "n"(TRANS_B))
// A, B, P, TA, TB: N / 2 and the four numbers after it.
#define TCG_WGMMA_STRUCT(N, A, B, P, TA, TB)                                                                         \
    template <bool BF16, int TRANS_A, int TRANS_B>                                                                   \
    struct wgmma<N, BF16, TRANS_A, TRANS_B> {                                                                        \
        static __device__ __forceinline__ void mma_async(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) { \
            if constexpr (BF16)                                                                                      \
                TCG_WGMMA_ASM(N, "bf16", A, B, P, TA, TB);                                                           \
            else                                                                                                     \
                TCG_WGMMA_ASM(N, "f16", A, B, P, TA, TB);                                                            \
        }                                                                                                            \
    };
TCG_WGMMA_STRUCT(16, 8, 9, 10, 11, 12)
TCG_WGMMA_STRUCT(32, 16, 17, 18, 19, 20)
TCG_WGMMA_STRUCT(48, 24, 25, 26, 27, 28)
TCG_WGMMA_STRUCT(64, 32, 33, 34, 35, 36)
TCG_WGMMA_STRUCT(80, 40, 41, 42, 43, 44)
TCG_WGMMA_STRUCT(96, 48, 49, 50, 51, 52)
TCG_WGMMA_STRUCT(112, 56, 57, 58, 59, 60)
TCG_WGMMA_STRUCT(128, 64, 65, 66, 67, 68)
TCG_WGMMA_STRUCT(144, 72, 73, 74, 75, 76)
TCG_WGMMA_STRUCT(160, 80, 81, 82, 83, 84)
TCG_WGMMA_STRUCT(176, 88, 89, 90, 91, 92)
TCG_WGMMA_STRUCT(192, 96, 97, 98, 99, 100)
TCG_WGMMA_STRUCT(208, 104, 105, 106, 107, 108)
TCG_WGMMA_STRUCT(224, 112, 113, 114, 115, 116)
TCG_WGMMA_STRUCT(240, 120, 121, 122, 123, 124)
TCG_WGMMA_STRUCT(256, 128, 129, 130, 131, 132)
