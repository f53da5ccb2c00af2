/* Embeds the fatbins in section .nv_fatbin, where cuobjdump looks. setup.py passes their folder, TCG_IMAGE_DIR, and
 * writes tcg_built.h there; the fatbin of an image that was not built is an empty file. */
#include "images.h"

#include <stddef.h>

#include "tcg_built.h"

/* %progbits, not @progbits: the assemblers of all targets read it. */
#define TCG_IMAGE(image, source, in, archs)                     \
    __asm__(".pushsection .nv_fatbin, \"a\", %progbits\n"       \
            ".balign 16\n"                                      \
            ".globl tcg_image_" #image "\n"                     \
            ".hidden tcg_image_" #image "\n"                    \
            ".type tcg_image_" #image ", %object\n"             \
            "tcg_image_" #image ":\n"                           \
            ".incbin \"" TCG_IMAGE_DIR "/" #image ".fatbin\"\n" \
            ".popsection\n");                                   \
    extern const unsigned char tcg_image_##image[] __attribute__((visibility("hidden")));
#include "../../kernels/table.def"

const char *const tcg_image_names[TCG_IMAGE_COUNT] = {
#define TCG_IMAGE(image, source, in, archs) [TCG_IMAGE_##image] = #image,
#include "../../kernels/table.def"
};

static const struct {
    const void *data;
    const char *archs;
} images[TCG_IMAGE_COUNT] = {
#define TCG_IMAGE(image, source, in, archs) [TCG_IMAGE_##image] = {tcg_image_##image, TCG_BUILT_##image},
#include "../../kernels/table.def"
};

const void *tcg_image_data(int image) { return images[image].archs[0] ? images[image].data : NULL; }

const char *tcg_image_archs(int image) { return images[image].archs; }
