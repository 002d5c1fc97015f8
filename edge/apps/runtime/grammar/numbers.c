/* Rules of JSON numbers between bounds: digit by digit, while a number begins as a bound does. */
#include <string.h>

#include "numbers.h"
#include "rules.h"

bool bound_read(bound *to, const char *text, size_t length, bool excluded)
{
    uint8_t digits[3 * MOST_DIGITS];
    int64_t count = 0, point = -1, exponent = 0;
    size_t at = 0;
    memset(to, 0, sizeof *to);
    to->set = true;
    to->excluded = excluded;
    to->negative = length && text[0] == '-';
    for (at = to->negative; at < length && (text[at] | 32) != 'e'; at++) {
        if (text[at] == '.')
            point = count;
        else if (count || text[at] != '0' || point >= 0) {
            if (count == 2 * MOST_DIGITS)
                return false;
            digits[count++] = (uint8_t)(text[at] - '0');
        }
    }
    if (point < 0)
        point = count;
    if (at < length) {
        bool less = text[at + 1] == '-';
        for (at += text[at + 1] == '-' || text[at + 1] == '+' ? 2 : 1; at < length && exponent < 1000; at++)
            exponent = exponent * 10 + (text[at] - '0');
        point += less ? -exponent : exponent;
    }
    int64_t first = 0;
    while (first < count && !digits[first]) /* zeros behind the point, before any other digit */
        first++;
    while (count > first && !digits[count - 1])
        count--;
    if (first == count) { /* it is zero */
        to->negative = false;
        return true;
    }
    for (int64_t i = first; i < point; i++) {
        if (to->whole_count == MOST_DIGITS)
            return false;
        to->whole[to->whole_count++] = i < count ? digits[i] : 0;
    }
    for (int64_t i = point; i < count; i++) {
        if (to->fraction_count == MOST_DIGITS)
            return false;
        to->fraction[to->fraction_count++] = i < first ? 0 : digits[i];
    }
    return true;
}

static int compare_sizes(const bound *one, const bound *other)
{
    if (one->whole_count != other->whole_count)
        return one->whole_count < other->whole_count ? -1 : 1;
    int found = memcmp(one->whole, other->whole, one->whole_count);
    return found ? found : memcmp(one->fraction, other->fraction, MOST_DIGITS); /* zeros follow */
}

int bound_compare(const bound *one, const bound *other)
{
    if (one->negative != other->negative)
        return one->negative ? -1 : 1;
    return one->negative ? compare_sizes(other, one) : compare_sizes(one, other);
}

/* ---- sizes: numbers without a sign ------------------------------------------------------------------------------ */

typedef struct { rules *r; const bound *low, *high; bool integer; uint32_t next; } between; /* NULL: no bound */

static uint32_t some_digits(const between *in, uint32_t least, uint32_t most, uint32_t next)
{
    return rules_repeat(in->r, rules_byte(in->r, '0', '9', END), least, most, next);
}

static uint32_t at_point(const between *in, uint32_t fraction)
{
    return rules_char(in->r, '.', fraction);
}

static uint32_t digit_of(const bound *b, uint32_t at)
{
    return b && at < b->fraction_count ? b->fraction[at] : 0;
}

/* Digits behind the point, from `at` on. on_low, on_high: all before equal the bound's. */
static uint32_t fraction(const between *in, uint32_t at, bool on_low, bool on_high)
{
    rules *r = in->r;
    if (at == FRACTION_DIGITS + MOST_DIGITS)
        return NEVER;
    if (!on_low && !on_high)
        return at < FRACTION_DIGITS ? some_digits(in, 0, FRACTION_DIGITS - at, in->next) : in->next;
    const bool low_done = !on_low || at >= in->low->fraction_count, high_done = !on_high || at >= in->high->fraction_count;
    uint32_t found = NEVER;
    /* The number may end here: the digits that it lacks are zeros. */
    if (at && low_done && !(on_low && in->low->excluded) && !(on_high && high_done && in->high->excluded))
        found = in->next;
    if (at >= FRACTION_DIGITS && low_done && high_done)
        return found;
    const uint32_t low = on_low ? digit_of(in->low, at) : 0, high = on_high ? digit_of(in->high, at) : 9;
    if (on_low && low_done && !on_high && !in->low->excluded) /* any further digits keep it above the minimum */
        return some_digits(in, at ? 0 : 1, FRACTION_DIGITS > at ? FRACTION_DIGITS - at : 1, in->next);
    for (uint32_t digit = low; digit <= high; digit++) {
        bool still_low = on_low && digit == low, still_high = on_high && digit == high;
        if (still_low || still_high) {
            found = rules_either(r, found, rules_char(r, (uint8_t)('0' + digit), fraction(in, at + 1, still_low, still_high)));
            continue;
        }
        uint32_t last = on_high && high ? high - 1 : high;
        found = rules_either(r, found, rules_byte(r, (uint8_t)('0' + digit), (uint8_t)('0' + last), fraction(in, at + 1, false, false)));
        digit = last;
    }
    return found;
}

/* The fraction and the exponent. */
static uint32_t behind_whole(const between *in, bool on_low, bool on_high)
{
    const bool more_than_low = on_low && (in->low->fraction_count || in->low->excluded);
    const bool no_more = on_high && !in->high->fraction_count && in->high->excluded;
    uint32_t found = more_than_low || no_more ? NEVER : in->next;
    if (in->integer)
        return found;
    uint32_t behind = !on_low && !on_high ? some_digits(in, 1, FRACTION_DIGITS, in->next) : fraction(in, 0, on_low, on_high);
    return rules_either(in->r, found, at_point(in, behind));
}

/* The digits before the point from `at` on, `count` in all. */
static uint32_t whole(const between *in, uint32_t at, uint32_t count, bool on_low, bool on_high)
{
    rules *r = in->r;
    if (at == count)
        return behind_whole(in, on_low, on_high);
    if (!on_low && !on_high)
        return some_digits(in, count - at, count - at, behind_whole(in, false, false));
    const uint32_t least = !at, low = on_low ? in->low->whole[at] : least, high = on_high ? in->high->whole[at] : 9;
    uint32_t found = NEVER;
    for (uint32_t digit = low; digit <= high; digit++) {
        bool still_low = on_low && digit == low, still_high = on_high && digit == high;
        uint32_t last = still_low || still_high ? digit : on_high ? high - 1 : high;
        found = rules_either(r, found, rules_byte(r, (uint8_t)('0' + digit), (uint8_t)('0' + last), whole(in, at + 1, count, still_low, still_high)));
        digit = last;
    }
    return found;
}

/* Numbers without a sign. A zero before the point is one digit, though bounds have none there. */
static uint32_t sizes(const between *in)
{
    const uint32_t low = in->low ? in->low->whole_count : 0;
    uint32_t high = in->high ? in->high->whole_count : low > WHOLE_DIGITS ? low : WHOLE_DIGITS, found = NEVER;
    for (uint32_t count = low ? low : 1; count <= high; count++) {
        bool on_low = in->low && count == low, on_high = in->high && count == high;
        if (on_low || on_high)
            found = rules_either(in->r, found, whole(in, 0, count, on_low, on_high));
        else if (count == 1)
            found = rules_either(in->r, found, rules_byte(in->r, '1', '9', behind_whole(in, false, false)));
        else if (!in->high) { /* all longer ones at once */
            uint32_t more = some_digits(in, count - 1, high - 1, behind_whole(in, false, false));
            found = rules_either(in->r, found, rules_byte(in->r, '1', '9', more));
            break;
        } else
            found = rules_either(in->r, found, rules_byte(in->r, '1', '9', some_digits(in, count - 1, count - 1, behind_whole(in, false, false))));
    }
    if (!low) /* numbers below 1 */
        found = rules_either(in->r, found, rules_char(in->r, '0', behind_whole(in, in->low != NULL, in->high && !in->high->whole_count)));
    return found;
}

static bool is_zero(const bound *b)
{
    return !b->whole_count && !b->fraction_count;
}

uint32_t numbers_between(rules *r, const bound *low, const bound *high, bool integer, uint32_t next)
{
    uint32_t found = NEVER;
    if (!low->set && !high->set) { /* any, and with an exponent */
        uint32_t end = next;
        if (!integer) {
            uint32_t digits = rules_repeat(r, rules_byte(r, '0', '9', END), 1, EXPONENT_DIGITS, next);
            uint32_t sign = rules_either(r, digits, rules_either(r, rules_char(r, '+', digits), rules_char(r, '-', digits)));
            uint32_t exponent = rules_either(r, rules_char(r, 'e', sign), rules_char(r, 'E', sign));
            end = rules_either(r, next, exponent);
            end = rules_either(r, end, rules_char(r, '.', rules_repeat(r, rules_byte(r, '0', '9', END), 1, FRACTION_DIGITS, end)));
        }
        between all = {r, NULL, NULL, true, end};
        found = sizes(&all);
        return rules_either(r, found, rules_char(r, '-', found));
    }
    if (!high->set || (!high->negative && !(is_zero(high) && high->excluded))) { /* numbers from 0 on */
        between positive = {r, low->set && !low->negative ? low : NULL, high->set ? high : NULL, integer, next};
        if (positive.low && is_zero(positive.low) && !positive.low->excluded)
            positive.low = NULL;
        found = sizes(&positive);
    }
    if (!low->set || low->negative) { /* numbers below 0 */
        static const bound zero = {.set = true, .excluded = true};
        between negative = {r, high->set && high->negative ? high : &zero, low->set ? low : NULL, integer, next};
        found = rules_either(r, found, rules_char(r, '-', sizes(&negative)));
    }
    return found;
}
