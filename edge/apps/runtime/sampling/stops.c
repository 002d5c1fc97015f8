/* Finds stop strings in streamed text and holds back text that may become one, however it is split over tokens. A port of
 * edge/run/sampling/stop_strings.py. Comparing bytes of UTF-8 is the same as comparing characters. */
#include <string.h>

#include "stops.h"
#include "utf8.h"

typedef struct { uint32_t length; char text[LONGEST_STOP]; } stop;

struct stops {
    stop list[MOST_STOPS];
    uint32_t count, held_length; /* bytes of `held`, fewer than those of the longest stop string */
    char held[LONGEST_STOP];     /* the end of the text, which may become a stop string */
};

stops *stops_layout(arena *from)
{
    return take(from, sizeof(stops));
}

/* Copies a stop string; invalid UTF-8 becomes U+FFFD, as in the text. Returns false if it is too long. */
static bool copy_stop(stop *to, const char *text)
{
    size_t length = 0;
    while (length <= LONGEST_STOP && text[length])
        length++;
    to->length = 0;
    for (size_t at = 0; at < length;) {
        uint32_t point;
        bool whole;
        uint8_t bytes[4];
        at += utf8_read((const uint8_t *)text + at, length - at, &point, &whole);
        size_t count = utf8_write(point, bytes);
        if (to->length + count > LONGEST_STOP)
            return false;
        memcpy(to->text + to->length, bytes, count);
        to->length += (uint32_t)count;
    }
    return true;
}

edge_status stops_set(stops *s, const char *const *texts, uint32_t count, edge_error *error)
{
    stop read;
    if (count > MOST_STOPS)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "at most %d stop strings", (int64_t)MOST_STOPS);
    for (uint32_t i = 0; i < count; i++) { /* check all before the old ones are replaced */
        if (!texts[i])
            return edge_fail(error, EDGE_BAD_ARGUMENT, "stop string %d is NULL", (int64_t)i);
        if (!copy_stop(&read, texts[i]))
            return edge_fail(error, EDGE_BAD_ARGUMENT, "stop string %d is longer than %d bytes", (int64_t)i,
                             (int64_t)LONGEST_STOP);
    }
    s->count = s->held_length = 0;
    for (uint32_t i = 0; i < count; i++) {
        copy_stop(&s->list[s->count], texts[i]);
        s->count += s->list[s->count].length > 0;
    }
    return EDGE_OK;
}

void stops_start(stops *s)
{
    s->held_length = 0;
}

/* Offset of the first occurrence; `length` if there is none. */
static size_t find(const char *text, size_t length, const stop *wanted)
{
    for (size_t at = 0; at + wanted->length <= length; at++)
        if (!memcmp(text + at, wanted->text, wanted->length))
            return at;
    return length;
}

/* Length of the longest suffix of the text that is a prefix of the stop string. */
static size_t overlap(const char *text, size_t length, const stop *wanted)
{
    size_t most = wanted->length - 1;
    for (size_t count = length < most ? length : most; count; count--)
        if (!memcmp(text + length - count, wanted->text, count))
            return count;
    return 0;
}

size_t stops_feed(stops *s, const char *text, size_t length, char *out, bool *met)
{
    size_t shown = 0, end = SIZE_MAX, keep = 0, all = s->held_length + length;
    memcpy(out, s->held, s->held_length);
    memcpy(out + s->held_length, text, length);
    for (uint32_t i = 0; i < s->count; i++) { /* the stop string that ends first counts, however text is split */
        size_t at = find(out, all, &s->list[i]), to = at + s->list[i].length;
        if (at < all && (to < end || (to == end && at < shown))) {
            shown = at;
            end = to;
        }
    }
    *met = end != SIZE_MAX;
    s->held_length = 0;
    if (*met)
        return shown;
    for (uint32_t i = 0; i < s->count; i++) {
        size_t count = overlap(out, all, &s->list[i]);
        keep = count > keep ? count : keep;
    }
    memcpy(s->held, out + all - keep, keep);
    s->held_length = (uint32_t)keep;
    return all - keep;
}

size_t stops_rest(stops *s, char *out)
{
    size_t length = s->held_length;
    memcpy(out, s->held, length);
    s->held_length = 0;
    return length;
}
