/* What csrc/cuda shares about kernels/table.def beyond gemm.h: how many rows there are and where images run. */
#ifndef TCG_REGISTRY_H
#define TCG_REGISTRY_H

#include "gemm.h"
#include "images.h"

enum {
#define TCG_SIMT(...) +1
#define TCG_MMA(...) +1
#define TCG_MMA_SHIFT(...) +1
#define TCG_WMMA_NAIVE(...) +1
#define TCG_WMMA(...) +1
#define TCG_MMA_NAIVE(...) +1
#define TCG_TMA_MMA(...) +1
#define TCG_WGMMA(...) +1
    TCG_KERNEL_COUNT = 0
#include "../../kernels/table.def"
};

/* Whether the image runs there, or, where no machine code of it does, the PTX of ptx_image (-1: none). */
tcg_runs tcg_image_runs(int image, int ptx_image, int cc);

#endif
