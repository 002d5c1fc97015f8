/* Characters of UTF-8. */
#ifndef EDGE_UTF8_H
#define EDGE_UTF8_H

#include "base.h"

enum { UTF8_REPLACEMENT = 0xFFFD };
/* Reads one character from `count` bytes, at least 1, and returns its length in bytes. *point: U+FFFD for invalid bytes.
 * *whole: false if further bytes could complete the character. */
size_t utf8_read(const uint8_t *bytes, size_t count, uint32_t *point, bool *whole);
size_t utf8_write(uint32_t point, uint8_t *out); /* returns bytes, at most 4 */
/* Joins the bytes of tokens into whole characters; `held` is an incomplete one. Invalid bytes become U+FFFD. */
typedef struct { uint8_t held[4]; uint32_t count; } utf8_joiner;
/* Returns the bytes written. out: room for 3 * length + 12 bytes. */
size_t utf8_feed(utf8_joiner *joiner, const char *bytes, size_t length, char *out);

#endif
