/* JSON numbers between bounds, as rules. */
#ifndef EDGE_NUMBERS_H
#define EDGE_NUMBERS_H

#include "rules.h"

enum { WHOLE_DIGITS = 16, FRACTION_DIGITS = 17, EXPONENT_DIGITS = 2, MOST_DIGITS = 40 }; /* as edge/grammar/numbers.py */

/* The digits of a number before and behind its point, without zeros at either end. */
typedef struct { bool set, excluded, negative; uint32_t whole_count, fraction_count; uint8_t whole[MOST_DIGITS], fraction[MOST_DIGITS]; } bound;

/* Reads a JSON number. Returns false if it has too many digits. */
bool bound_read(bound *to, const char *text, size_t length, bool excluded);
int bound_compare(const bound *one, const bound *other); /* by value: less than 0, 0, more than 0 */
/* A number from `low` to `high`, where these are set. */
uint32_t numbers_between(rules *r, const bound *low, const bound *high, bool integer, uint32_t next);

#endif
