/* Canonical composition as Unicode Standard Annex #15 defines it: decompose, order marks by their classes, compose. */
#include <string.h>

#include "compose.h"
#include "hangul.h"
#include "letters.h"
#include "utf8.h"

enum { CLASSES = 256 };

/* Writes the decomposed characters; returns their number. A character of n bytes becomes at most 4. */
static size_t decompose(const letter_tables *in, const uint8_t *text, size_t count, uint32_t *points)
{
    size_t found = 0;
    for (size_t at = 0; at < count;) {
        uint32_t point, parts[3];
        bool whole;
        at += utf8_read(text + at, count - at, &point, &whole);
        const uint32_t *some = parts;
        uint32_t number = hangul_parts(point, parts);
        if (!number && letters_class(in, point) == LETTER_DECOMPOSED)
            number = letters_mapped(in, point, &some);
        if (number && number <= 4) {
            memcpy(points + found, some, number * sizeof *some);
            found += number;
        } else {
            points[found++] = point;
        }
    }
    return found;
}

/* Orders a run of marks by their classes, in which equal ones keep their order. */
static void order_marks(const letter_tables *in, uint32_t *marks, size_t count, uint32_t *room)
{
    size_t starts[CLASSES + 1] = {0};
    for (size_t i = 0; i < count; i++)
        starts[letters_class(in, marks[i]) + 1]++;
    for (size_t class = 0; class < CLASSES; class++)
        starts[class + 1] += starts[class];
    for (size_t i = 0; i < count; i++)
        room[starts[letters_class(in, marks[i])]++] = marks[i];
    memcpy(marks, room, count * sizeof *marks);
}

/* Composes in place; returns the number of characters. */
static size_t compose(const letter_tables *in, uint32_t *points, size_t count)
{
    size_t used = 0, starter = SIZE_MAX;
    uint8_t last = 0; /* class of the mark before; 0: none follows the starter */
    for (size_t i = 0; i < count; i++) {
        uint32_t point = points[i], one = 0;
        uint8_t class = letters_class(in, point);
        if (starter != SIZE_MAX && (!last || last < class)) {
            one = hangul_composed(points[starter], point);
            one = one ? one : letters_composed(in, points[starter], point);
        }
        if (one) {
            points[starter] = one;
            continue;
        }
        if (!class)
            starter = used;
        last = class;
        points[used++] = point;
    }
    return used;
}

size_t compose_text(const letter_tables *in, const uint8_t *text, size_t count, uint32_t *points, uint8_t *out)
{
    size_t found = decompose(in, text, count, points), used = 0;
    for (size_t at = 0, end; at < found; at = end) {
        for (end = at; end < found && letters_class(in, points[end]); end++)
            ;
        if (end - at > 1)
            order_marks(in, points + at, end - at, points + found);
        end += end == at;
    }
    found = compose(in, points, found);
    for (size_t i = 0; i < found && used + 4 <= 3 * count + 4; i++)
        used += utf8_write(points[i], out + used);
    return used;
}
