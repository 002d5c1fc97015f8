/* Stop strings in streamed text, of which nothing is shown, whichever way they are split over tokens: a port of
 * edge/run/stop_strings.py. Texts come as whole characters, so bytes may be compared. */
#include <string.h>

#include "internal.h"

struct stops {
    uint32_t count, held_length;
    uint32_t lengths[MOST_STOPS];
    char texts[MOST_STOPS][LONGEST_STOP], held[LONGEST_STOP];
};

stops *stops_layout(arena *from)
{
    return take(from, sizeof(stops));
}

edge_status stops_set(stops *s, const char *const *texts, uint32_t count, edge_error *error)
{
    if (count > MOST_STOPS)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "at most %d stop strings are possible", (int64_t)MOST_STOPS);
    for (uint32_t i = 0; i < count; i++)
        if (!texts[i] || strlen(texts[i]) > LONGEST_STOP)
            return edge_fail(error, EDGE_BAD_ARGUMENT, "a stop string has more than %d bytes, or is NULL",
                             (int64_t)LONGEST_STOP);
    s->count = s->held_length = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t length = (uint32_t)strlen(texts[i]);
        if (!length)
            continue;
        memcpy(s->texts[s->count], texts[i], length);
        s->lengths[s->count++] = length;
    }
    return EDGE_OK;
}

void stops_start(stops *s)
{
    s->held_length = 0;
}

/* Where a stop string begins in a text; SIZE_MAX: nowhere. */
static size_t find(const char *text, size_t length, const char *stop, size_t size)
{
    for (size_t at = 0; at + size <= length; at++)
        if (!memcmp(text + at, stop, size))
            return at;
    return SIZE_MAX;
}

/* The longest end of a text that begins a stop string. */
static size_t overlap(const char *text, size_t length, const char *stop, size_t size)
{
    for (size_t count = size - 1 < length ? size - 1 : length; count; count--)
        if (!memcmp(text + length - count, stop, count))
            return count;
    return 0;
}

size_t stops_feed(stops *s, const char *text, size_t length, char *out, bool *met)
{
    size_t shown = s->held_length, end = SIZE_MAX, kept = 0;
    memcpy(out, s->held, shown);
    memcpy(out + shown, text, length);
    length += shown;
    shown = length;
    s->held_length = 0;
    for (uint32_t i = 0; i < s->count; i++) { /* the one that was complete first counts */
        size_t at = find(out, length, s->texts[i], s->lengths[i]);
        if (at == SIZE_MAX || at + s->lengths[i] > end)
            continue;
        shown = at + s->lengths[i] < end || at < shown ? at : shown;
        end = at + s->lengths[i];
    }
    *met = end != SIZE_MAX;
    if (*met)
        return shown;
    for (uint32_t i = 0; i < s->count; i++) {
        size_t own = overlap(out, length, s->texts[i], s->lengths[i]);
        kept = own > kept ? own : kept;
    }
    memcpy(s->held, out + length - kept, kept);
    s->held_length = (uint32_t)kept;
    return length - kept;
}

size_t stops_rest(stops *s, char *out)
{
    size_t length = s->held_length;
    memcpy(out, s->held, length);
    s->held_length = 0;
    return length;
}
