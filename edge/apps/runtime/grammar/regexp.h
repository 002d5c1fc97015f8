/* Regular expressions as rules.
 *
 * Of Rust's and JavaScript's common syntax: classes, groups, alternatives, repetitions, and anchors at the ends of an
 * expression's alternatives. \d, \w and \s are ASCII's, as ECMA-262 has them. Refused by name: look-around, references back,
 * word boundaries, properties of Unicode, flags. */
#ifndef EDGE_REGEXP_H
#define EDGE_REGEXP_H

#include "rules.h"

enum { MOST_REGEX_PARTS = 4096, MOST_RANGES = 8192 };

typedef struct { uint8_t kind; uint32_t one, other, least, most; } regex_part;
typedef struct {
    regex_part *parts;    /* [MOST_REGEX_PARTS] */
    point_range *ranges;  /* [MOST_RANGES] */
    uint32_t count, used, top;
} regex;

regex *regex_layout(arena *from);
/* Reads an expression; fails in r. */
void regex_read(regex *in, rules *r, const char *text, size_t length);
/* The expression as rules, which match a whole text. in_json: characters are written as in a JSON string. whole: it matches the
 * whole text, rather than a part of it. */
uint32_t regex_rules(const regex *in, rules *r, bool in_json, bool whole, uint32_t next);
/* The fewest and the most characters of a text that it matches. */
void regex_counts(const regex *in, uint32_t *least, uint32_t *most);
/* Narrows the number of characters, if that is possible: the expression demands it anyway, or repeats one class. */
bool regex_limit(regex *in, uint32_t least, uint32_t most);

#endif
