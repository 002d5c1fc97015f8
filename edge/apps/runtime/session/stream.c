/* Reads and writes edge_streams, which are open files or buffers, and hashes their bytes. */
#include <string.h>

#include "hash.h"
#include "stream.h"
#include "system.h"

bool stream_put(void *to, const void *bytes, size_t size)
{
    hashed_stream *own = to;
    const edge_stream *stream = own->stream;
    hash_add(&own->sum, bytes, size);
    if (stream->fd >= 0) {
        if (write_fd(stream->fd, bytes, size) != (int64_t)size)
            return false;
    } else {
        if (size > stream->capacity - own->at)
            return false;
        memcpy((uint8_t *)stream->buffer + own->at, bytes, size);
    }
    own->at += size;
    return true;
}

bool stream_get(void *from, void *bytes, size_t size)
{
    hashed_stream *own = from;
    const edge_stream *stream = own->stream;
    if (stream->fd >= 0) {
        if (read_fd(stream->fd, bytes, size) != (int64_t)size)
            return false;
    } else {
        if (size > stream->capacity - own->at)
            return false;
        memcpy(bytes, (const uint8_t *)stream->buffer + own->at, size);
    }
    hash_add(&own->sum, bytes, size);
    own->at += size;
    return true;
}
