/* Stop strings in streamed text: nothing of one is shown, whichever way it is split over tokens. A port of
 * edge/run/sampling/stop_strings.py. It compares bytes, which in UTF-8 finds the same as comparing characters. */
#include <string.h>

#include "stops.h"
#include "utf8.h"

typedef struct { uint32_t length; char text[LONGEST_STOP]; } stop;

struct stops {
    stop list[MOST_STOPS];
    uint32_t count, held_length; /* of `held`: less than the longest stop */
    char held[LONGEST_STOP];     /* the end of the text, which may yet become a stop string */
};

stops *stops_layout(arena *from)
{
    return take(from, sizeof(stops));
}

/* Copies a text; bytes that are not UTF-8 become U+FFFD, as in the texts that are searched. False: it is too long. */
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
    for (uint32_t i = 0; i < count; i++) { /* all of them first: refused ones leave those of before */
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

/* Where a stop string begins first; `length` if it does not occur. */
static size_t find(const char *text, size_t length, const stop *wanted)
{
    for (size_t at = 0; at + wanted->length <= length; at++)
        if (!memcmp(text + at, wanted->text, wanted->length))
            return at;
    return length;
}

/* Length of the longest end of `text` that begins the stop string. */
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
    for (uint32_t i = 0; i < s->count; i++) { /* the one that was complete first counts, whatever the pieces' sizes */
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
