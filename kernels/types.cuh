/* The element types of operands and results, the one rounding from the fp32 accumulator, and how wide an access to
 * memory may be. */
#ifndef TCG_TYPES_CUH
#define TCG_TYPES_CUH

#include <stdint.h>

#include "abi.h"
#include "ptx/cvt.cuh"

/* Named as abi.h's TCG_DTYPES codes, so that a table row's `in` names the type. Kernels move bits; only the
 * conversions below know what the bits mean. */
struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};
typedef float f32;

/* from_float<T>(x): round to nearest even, NaN stays NaN, overflow gives infinity, subnormals are kept. */
template <class T> static __device__ __forceinline__ T from_float(float value);

template <> __device__ __forceinline__ f16 from_float<f16>(float value) { return f16{cvt_rn_f16_f32(value)}; }

template <> __device__ __forceinline__ bf16 from_float<bf16>(float value) { return bf16{cvt_rn_bf16_f32(value)}; }

template <> __device__ __forceinline__ f32 from_float<f32>(float value) { return value; }

/* A pair of neighbours in memory order, converted together. */
template <class T> struct pair_of {
    typedef uint32_t bits;
};
template <> struct pair_of<f32> {
    typedef float2 bits;
};

template <class T>
static __device__ __forceinline__ typename pair_of<T>::bits pair_from_floats(float low, float high);

template <> __device__ __forceinline__ uint32_t pair_from_floats<f16>(float low, float high) {
    return cvt_rn_f16x2_f32(low, high);
}

template <> __device__ __forceinline__ uint32_t pair_from_floats<bf16>(float low, float high) {
    return cvt_rn_bf16x2_f32(low, high);
}

template <> __device__ __forceinline__ float2 pair_from_floats<f32>(float low, float high) {
    return make_float2(low, high);
}

/* The widest access, 16 bytes at most, to addresses that are all made of the addresses and strides (in bytes)
 * whose bits are or-ed together in `bits`. */
static __host__ __device__ __forceinline__ int widest_access(uint64_t bits) {
    bits |= 16;
    return static_cast<int>(bits & (0 - bits));
}

/* A kernel file's row of table.def by its macro KERNEL, where the image is that of its input type. */
#ifdef TCG_IN_f16
#define TCG_ROW_f16(KERNEL, ...) KERNEL(__VA_ARGS__)
#else
#define TCG_ROW_f16(...)
#endif
#ifdef TCG_IN_bf16
#define TCG_ROW_bf16(KERNEL, ...) KERNEL(__VA_ARGS__)
#else
#define TCG_ROW_bf16(...)
#endif
#define TCG_ROW(KERNEL, in, ...) TCG_ROW_##in(KERNEL, in, __VA_ARGS__)

#endif
