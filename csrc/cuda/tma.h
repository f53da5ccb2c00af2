/* Tensor maps of a product's operands and result, for the families that TMA feeds. */
#ifndef TCG_TMA_H
#define TCG_TMA_H

#include "driver.h"

/* Fills out from the kernel's tile and the arguments, which it copies. The planner has seen to it that every stride is
 * a multiple of 16 bytes, that lengths fit 32 bits and that there is at most one batch axis. */
int tcg_tma_encode(const tcg_driver *driver, const tcg_kernel *kernel, const tcg_gemm_args *args, int hands_over,
                   tcg_tma_args *out, tcg_error *err);

/* For quotients of 0 <= x < 2^31 by 1 <= by < 2^31. */
tcg_divisor tcg_divisor_of(int64_t by);

#endif
