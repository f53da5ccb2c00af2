/* No instruction: hides from the compiler how a value came about, so that a chain of additions stays one. */
#ifndef TCG_PTX_OPAQUE_CUH
#define TCG_PTX_OPAQUE_CUH

template <class T> static __device__ __forceinline__ void opaque(T *&pointer) { asm volatile("" : "+l"(pointer)); }

#endif
