/* Pixels of pictures, uint8 [height][width][3]: copies, sizes, values. Resizing gives Pillow's pixels. */
#ifndef EDGE_PIXELS_H
#define EDGE_PIXELS_H

#include "base.h"

typedef struct { uint8_t *data; uint32_t width, height; } pixels; /* data: of map_memory; NULL: none */

/* Copies a picture; one with an alpha channel is composed on white. Returns false without memory. */
bool pixels_copy(pixels *to, const edge_picture *picture);
/* Resizes into new memory; `from` stays. Returns false without memory. */
bool pixels_resize(pixels *to, const pixels *from, uint32_t width, uint32_t height, enum pixel_filter filter);
void pixels_free(pixels *p);

#endif
