/* Streams of bytes whose SHA-256 is computed meanwhile. */
#ifndef EDGE_STREAM_H
#define EDGE_STREAM_H

#include "base.h"
#include "hash.h"

enum { DIGEST = 32 }; /* bytes of a SHA-256 */
typedef struct { const edge_stream *stream; uint64_t at; hasher sum; } hashed_stream; /* at: bytes so far; sum: of them */
/* Write and read `size` bytes; false if the file fails or the buffer ends. The first argument is a hashed_stream. */
bool stream_put(void *to, const void *bytes, size_t size);
bool stream_get(void *from, void *bytes, size_t size);

#endif
