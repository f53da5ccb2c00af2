/* The fatbins that the extension carries: one an image of kernels/table.def. */
#ifndef TCG_IMAGES_H
#define TCG_IMAGES_H

enum {
#define TCG_IMAGE(image, source, in, archs) TCG_IMAGE_##image,
#include "../../kernels/table.def"
    TCG_IMAGE_COUNT
};

extern const char *const tcg_image_names[TCG_IMAGE_COUNT];

/* The fatbin, as cuLibraryLoadData takes it; NULL when nothing was built for the image. */
const void *tcg_image_data(int image);

/* Its targets in the table's words, e.g. "80 90 120"; "" when nothing was built. */
const char *tcg_image_archs(int image);

#endif
