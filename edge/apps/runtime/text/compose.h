/* Unicode's canonical composition (NFC), which some byte-level tokenizers apply first. */
#ifndef EDGE_COMPOSE_H
#define EDGE_COMPOSE_H

#include "letters.h"

/* Writes the composed text, and returns its bytes, at most 3 * count. points: room for 8 * count, of which the first half has
 * decomposed characters. */
typedef size_t text_composer(const letter_tables *in, const uint8_t *text, size_t count, uint32_t *points, uint8_t *out);
text_composer compose_text;

#endif
