/* The bytes that zlib would take for a text. */
#ifndef EDGE_DEFLATE_H
#define EDGE_DEFLATE_H

#include "base.h"

enum { MOST_DEFLATED = 32506 }; /* bytes of a text: zlib's window */

typedef struct deflater deflater;
deflater *deflater_layout(arena *from);
/* Returns len(zlib.compress(text)). text: at most MOST_DEFLATED bytes. */
uint32_t deflated_size(deflater *d, const uint8_t *text, uint32_t count);

#endif
