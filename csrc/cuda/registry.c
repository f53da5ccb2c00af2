/* kernels/table.def as an array, and which of its rows this build can run on which device. */
#include "registry.h"

#include <stdlib.h>
#include <string.h>

const tcg_family_traits tcg_families[TCG_FAMILY_COUNT] = {
#define X(name, tma, waits) [TCG_FAMILY_##name] = {#name, tma, waits},
    TCG_FAMILIES(X)
#undef X
};

const char *const tcg_dtype_names[TCG_DTYPE_COUNT] = {
#define X(code, bytes, text) [TCG_##code] = text,
    TCG_DTYPES(X)
#undef X
};

const int tcg_dtype_bytes[TCG_DTYPE_COUNT] = {
#define X(code, bytes, text) [TCG_##code] = bytes,
    TCG_DTYPES(X)
#undef X
};

const char *const tcg_order_names[TCG_ORDER_COUNT] = {
#define X(order) [TCG_##order] = #order,
    TCG_ORDERS(X)
#undef X
};

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
#define PLACE_(name) PLACE_##name
#define PLACE(name) PLACE_(name)

/* Places in the registry are lines of this enum, so that a row can name its own. */
enum {
#define TCG_SIMT(...) PLACE(TCG_SIMT_NAME(__VA_ARGS__)),
#define TCG_MMA(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN, PTX) \
    PLACE(TCG_MMA_NAME(in, order, BM, BN, BK, WM, WN, STAGES, ALIGN)),
#define TCG_MMA_SHIFT(...) PLACE(TCG_MMA_SHIFT_NAME(__VA_ARGS__)),
#define TCG_WMMA_NAIVE(...) PLACE(TCG_WARPS_NAME(wmma_naive_sm80, __VA_ARGS__)),
#define TCG_WMMA(...) PLACE(TCG_WARPS_NAME(wmma_sm80, __VA_ARGS__)),
#define TCG_MMA_NAIVE(...) PLACE(TCG_WARPS_NAME(mma_naive_sm80, __VA_ARGS__)),
#define TCG_TMA_MMA(...) PLACE(TCG_WARPS_NAME(tma_mma_sm90, __VA_ARGS__)),
#define TCG_WGMMA(in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK, C_BOXES) \
    PLACE(TCG_WGMMA_NAME(in, order, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK)),
#include "../../kernels/table.def"
};

#define PINGPONG_coop false
#define PINGPONG_pingpong true
#define PTX_IMAGE_0(in) -1
#define PTX_IMAGE_1(in) TCG_IMAGE_mma_ptx_##in

/* What every family's rows say. */
#define ROW(name_, image_, family_, in, order_, BM, BN, BK, STAGES)                                                 \
    .name = TEXT(name_), .index = PLACE(name_), .image = TCG_IMAGE_##image_##_##in, .family = TCG_FAMILY_##family_, \
    .in_dtype = TCG_##in, .order = order_, .block_m = BM, .block_n = BN, .block_k = BK, .stages = STAGES

#define NO_CLUSTER .cluster_m = 1, .cluster_n = 1, .cluster_k = 1

/* Families made of WM x WN warps that each own a part of the tile. */
#define WARPS_ROW(FAMILY, sm, family_, in, order_, BM, BN, BK, WM, WN, STAGES)                                       \
    {ROW(TCG_WARPS_NAME(family_##_##sm, in, order_, BM, BN, BK, WM, WN, STAGES), family_, family_, in, TCG_##order_, \
         BM, BN, BK, STAGES),                                                                                        \
     NO_CLUSTER,                                                                                                     \
     .ptx_image = -1,                                                                                                \
     .warps_m = WM,                                                                                                  \
     .warps_n = WN,                                                                                                  \
     .align_bytes = 16,                                                                                              \
     .threads = FAMILY##_THREADS(BM, BN, WM, WN),                                                                    \
     .smem_bytes = FAMILY##_SMEM(BM, BN, BK, WM, WN, STAGES, TCG_##order_)},

static const tcg_kernel kernels[TCG_KERNEL_COUNT] = {
/* simt's own image holds its PTX. */
#define TCG_SIMT(in, order_, BM, BN, BK, WM, WN, STAGES, ALIGN)                                                  \
    {ROW(TCG_SIMT_NAME(in, order_, BM, BN, BK, WM, WN, STAGES, ALIGN), simt, simt, in, TCG_##order_, BM, BN, BK, \
         STAGES),                                                                                                \
     NO_CLUSTER,                                                                                                 \
     .ptx_image = TCG_IMAGE_simt_##in,                                                                           \
     .warps_m = WM,                                                                                              \
     .warps_n = WN,                                                                                              \
     .align_bytes = ALIGN,                                                                                       \
     .threads = TCG_SIMT_THREADS(WM, WN),                                                                        \
     .smem_bytes = TCG_SIMT_SMEM(BM, BN, BK, STAGES)},
#define TCG_MMA(in, order_, BM, BN, BK, WM, WN, STAGES, ALIGN, PTX)                                           \
    {ROW(TCG_MMA_NAME(in, order_, BM, BN, BK, WM, WN, STAGES, ALIGN), mma, mma, in, TCG_##order_, BM, BN, BK, \
         STAGES),                                                                                             \
     NO_CLUSTER,                                                                                              \
     .ptx_image = PTX_IMAGE_##PTX(in),                                                                        \
     .warps_m = WM,                                                                                           \
     .warps_n = WN,                                                                                           \
     .align_bytes = ALIGN,                                                                                    \
     .threads = TCG_MMA_THREADS(WM, WN),                                                                      \
     .smem_bytes = TCG_MMA_SMEM(BM, BN, BK, STAGES, ALIGN, TCG_##order_)},
#define TCG_MMA_SHIFT(in, order_, BM, BN, BK, WARPS, STAGES)                                                      \
    {ROW(TCG_MMA_SHIFT_NAME(in, order_, BM, BN, BK, WARPS, STAGES), mma_shift, mma, in, TCG_##order_, BM, BN, BK, \
         STAGES),                                                                                                 \
     NO_CLUSTER,                                                                                                  \
     .ptx_image = -1,                                                                                             \
     .warps_m = WARPS,                                                                                            \
     .warps_n = 1,                                                                                                \
     .align_bytes = 2,                                                                                            \
     .shifted = true,                                                                                             \
     .threads = TCG_MMA_SHIFT_THREADS(WARPS),                                                                     \
     .smem_bytes = TCG_MMA_SHIFT_SMEM(BM, BN, BK, STAGES)},
#define TCG_WMMA_NAIVE(...) WARPS_ROW(TCG_WMMA_NAIVE, sm80, wmma_naive, __VA_ARGS__)
#define TCG_WMMA(...) WARPS_ROW(TCG_WMMA, sm80, wmma, __VA_ARGS__)
#define TCG_MMA_NAIVE(...) WARPS_ROW(TCG_MMA_NAIVE, sm80, mma_naive, __VA_ARGS__)
#define TCG_TMA_MMA(...) WARPS_ROW(TCG_TMA_MMA, sm90, tma_mma, __VA_ARGS__)
#define TCG_WGMMA(in, order_, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK, C_BOXES)                               \
    {ROW(TCG_WGMMA_NAME(in, order_, BM, BN, BK, STAGES, WGS, SCHEDULE, CM, CN, CK), wgmma, wgmma, in, TCG_##order_, \
         BM, BN, BK, STAGES),                                                                                       \
     .ptx_image = -1,                                                                                               \
     .cluster_m = CM,                                                                                               \
     .cluster_n = CN,                                                                                               \
     .cluster_k = CK,                                                                                               \
     .pingpong = PINGPONG_##SCHEDULE,                                                                               \
     .align_bytes = 16,                                                                                             \
     .threads = TCG_WGMMA_THREADS(WGS),                                                                             \
     .smem_bytes = TCG_WGMMA_SMEM(BM, BN, BK, STAGES, WGS, CK, C_BOXES, TCG_##order_ & 1)},
#include "../../kernels/table.def"
};

int tcg_kernel_count(void) { return TCG_KERNEL_COUNT; }

const tcg_kernel *tcg_kernel_at(int index) { return index >= 0 && index < TCG_KERNEL_COUNT ? &kernels[index] : NULL; }

const tcg_kernel *tcg_kernel_find(const char *name) {
    for (int i = 0; i < TCG_KERNEL_COUNT; i++)
        if (!strcmp(kernels[i].name, name))
            return &kernels[i];
    return NULL;
}

/* Reads "90a", "80" or "80+ptx" off a list of targets. PTX of plain 8.0 serves every later chip; machine code
 * serves its major version from its minor on, and with an `a` exactly its chip. */
static bool list_runs(const char *list, int cc, bool want_ptx) {
    while (*list) {
        char *end;
        long arch = strtol(list, &end, 10);
        bool exact = *end == 'a';
        bool ptx = !strncmp(end, "+ptx", 4);
        if (end != list && ptx == want_ptx) {
            if (ptx ? cc >= arch : exact ? cc == arch : cc / 10 == arch / 10 && cc >= arch)
                return true;
        }
        list = end + strcspn(end, " ");
        list += strspn(list, " ");
    }
    return false;
}

tcg_runs tcg_image_runs(int image, int ptx_image, int cc) {
    if (list_runs(tcg_image_archs(image), cc, false))
        return TCG_RUNS_SASS;
    if (ptx_image >= 0 && list_runs(tcg_image_archs(ptx_image), cc, true))
        return TCG_RUNS_PTX;
    return TCG_RUNS_NOT;
}

tcg_runs tcg_kernel_runs(const tcg_kernel *kernel, int cc) {
    return tcg_image_runs(kernel->image, kernel->ptx_image, cc);
}
