/* Reading regular expressions, and writing them as rules. */
#include <string.h>

#include "json.h"
#include "regexp.h"
#include "rules.h"
#include "utf8.h"

enum { NOTHING, CLASS, SEQUENCE, CHOICE, REPEATED, BEGINNING, ENDING };
enum { DEEPEST = 48, MOST_TIMES = 100000 };

typedef struct { regex *to; rules *r; const char *text; size_t length, at; } reading;

regex *regex_layout(arena *from)
{
    regex *in = take(from, sizeof *in);
    regex_part *parts = take(from, MOST_REGEX_PARTS * sizeof *parts);
    point_range *ranges = take(from, MOST_RANGES * sizeof *ranges);
    if (in)
        *in = (regex){parts, ranges, 0, 0, 0};
    return in;
}

static void refuse(reading *in, const char *what)
{
    rules_fail(in->r, EDGE_UNSUPPORTED, "the regular expression %s: %s", what, in->text, in->length);
}

static void wrong(reading *in)
{
    rules_fail(in->r, EDGE_BAD_ARGUMENT, "the regular expression %s: %s", "is malformed", in->text, in->length);
}

static uint32_t part(reading *in, uint8_t kind, uint32_t one, uint32_t other)
{
    if (in->to->count == MOST_REGEX_PARTS)
        refuse(in, "is too large");
    if (in->r->status)
        return 0;
    in->to->parts[in->to->count] = (regex_part){kind, one, other, 1, 1};
    return in->to->count++;
}

static int peek(const reading *in)
{
    return in->at < in->length ? (uint8_t)in->text[in->at] : -1;
}

static bool accept(reading *in, char wanted)
{
    bool found = peek(in) == wanted;
    in->at += found;
    return found;
}

/* ---- classes: ranges of code points ----------------------------------------------------------------------------- */

static void add(reading *in, uint32_t low, uint32_t high)
{
    if (in->to->used == MOST_RANGES)
        refuse(in, "is too large");
    else if (low <= high)
        in->to->ranges[in->to->used++] = (point_range){low, high};
}

/* Sorts the ranges from `from` on, joins them, and turns them into their complement. */
static void settle(reading *in, uint32_t from, bool negated)
{
    point_range *ranges = in->to->ranges + from;
    uint32_t count = in->to->used - from, kept = 0;
    for (uint32_t i = 1; i < count; i++)
        for (uint32_t j = i; j && ranges[j - 1].low > ranges[j].low; j--) {
            point_range swapped = ranges[j];
            ranges[j] = ranges[j - 1];
            ranges[j - 1] = swapped;
        }
    for (uint32_t i = 0; i < count; i++)
        if (kept && ranges[i].low <= ranges[kept - 1].high + 1)
            ranges[kept - 1].high = ranges[i].high > ranges[kept - 1].high ? ranges[i].high : ranges[kept - 1].high;
        else
            ranges[kept++] = ranges[i];
    in->to->used = from + kept;
    if (!negated)
        return;
    uint32_t low = 0; /* each gap takes the place of the range behind it */
    for (uint32_t i = 0; i < kept; i++) {
        point_range range = ranges[i];
        if (low == range.low) {
            low = range.high + 1;
            memmove(ranges + i, ranges + i + 1, (--kept - i) * sizeof *ranges);
            i--;
        } else {
            ranges[i] = (point_range){low, range.low - 1};
            low = range.high + 1;
        }
    }
    in->to->used = from + kept;
    add(in, low, 0x10FFFF);
}

static void add_named(reading *in, int name)
{
    uint32_t from = in->to->used;
    switch (name | 32) {
    case 'd':
        add(in, '0', '9');
        break;
    case 'w':
        add(in, '0', '9'), add(in, 'A', 'Z'), add(in, '_', '_'), add(in, 'a', 'z');
        break;
    default:
        add(in, '\t', '\r'), add(in, ' ', ' ');
    }
    settle(in, from, name < 'a');
}

static uint32_t hex_digits(reading *in, size_t count)
{
    uint32_t value = 0;
    bool braces = accept(in, '{');
    for (size_t i = 0; braces ? peek(in) != '}' : i < count; i++) {
        int digit = hex_digit(peek(in));
        if (digit < 0 || value > 0x10FFFF) {
            wrong(in);
            return 0;
        }
        value = value * 16 + (uint32_t)digit;
        in->at++;
    }
    if (braces)
        in->at++;
    return value;
}

static uint32_t next_point(reading *in)
{
    uint32_t point;
    bool whole;
    in->at += utf8_read((const uint8_t *)in->text + in->at, in->length - in->at, &point, &whole);
    return point;
}

/* The character that an escape stands for, behind its backslash; UINT32_MAX: a class, whose letter is *name. */
static uint32_t escaped(reading *in, int *name)
{
    static const char names[] = "nrtfv0", meant[] = {'\n', '\r', '\t', '\f', '\v', 0};
    int c = peek(in);
    in->at++;
    const char *found = c > 0 ? strchr(names, c) : NULL;
    if (found)
        return (uint8_t)meant[found - names];
    if (c > 0 && strchr("dwsDWS", c)) {
        *name = c;
        return UINT32_MAX;
    }
    if (c == 'x' || c == 'u')
        return hex_digits(in, c == 'x' ? 2 : 4);
    if (c < 0)
        wrong(in);
    else if ((c >= '1' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z'))
        refuse(in, "has an escape that is not among those of apps");
    else if (c >= 0x80) {
        in->at--;
        return next_point(in);
    }
    return (uint32_t)c;
}

static uint32_t class_of(reading *in, uint32_t from, bool negated)
{
    settle(in, from, negated);
    return part(in, CLASS, from, in->to->used - from);
}

/* Reads a class behind its opening bracket. */
static uint32_t brackets(reading *in)
{
    const uint32_t from = in->to->used;
    const bool negated = accept(in, '^');
    for (bool first = true; !in->r->status; first = false) {
        int name = 0;
        if (peek(in) < 0) {
            wrong(in);
            break;
        }
        if (!first && accept(in, ']'))
            break;
        if (first && negated && accept(in, ']')) { /* JavaScript's [^]: any character */
            break;
        }
        if (peek(in) == '[' || (peek(in) == '&' && in->at + 1 < in->length && in->text[in->at + 1] == '&')) {
            refuse(in, "has a class within a class, or a [ without \\");
            break;
        }
        uint32_t low = accept(in, '\\') ? peek(in) == 'b' ? in->at++, 8u : escaped(in, &name) : next_point(in), high = low;
        if (name) {
            add_named(in, name);
            continue;
        }
        if (peek(in) == '-' && in->at + 1 < in->length && in->text[in->at + 1] != ']') {
            in->at++;
            high = accept(in, '\\') ? escaped(in, &name) : next_point(in);
            if (name || high < low) {
                wrong(in);
                break;
            }
        }
        add(in, low, high);
    }
    return class_of(in, from, negated);
}

/* ---- the grammar of expressions --------------------------------------------------------------------------------- */

static uint32_t choice(reading *in, int depth);

static uint32_t group(reading *in, int depth)
{
    if (accept(in, '?')) {
        if (accept(in, 'P') || peek(in) == '<') { /* a name */
            bool named = accept(in, '<') && peek(in) != '=' && peek(in) != '!';
            while (named && peek(in) >= 0 && !accept(in, '>'))
                in->at++;
            if (!named)
                refuse(in, "looks behind");
        } else if (!accept(in, ':')) {
            refuse(in, "looks ahead, or has flags");
        }
    }
    uint32_t found = choice(in, depth + 1);
    if (!accept(in, ')'))
        wrong(in);
    return found;
}

static uint32_t atom(reading *in, int depth)
{
    const uint32_t from = in->to->used;
    int c = peek(in), name = 0;
    uint32_t point;
    switch (c) {
    case '(': in->at++; return group(in, depth);
    case '[': in->at++; return brackets(in);
    case '^': in->at++; return part(in, BEGINNING, 0, 0);
    case '$': in->at++; return part(in, ENDING, 0, 0);
    case '.':
        in->at++;
        add(in, '\n', '\n');
        return class_of(in, from, true);
    case '*': case '+': case '?':
        wrong(in);
        return 0;
    case '\\':
        in->at++;
        point = escaped(in, &name);
        if (name)
            add_named(in, name);
        else
            add(in, point, point);
        return class_of(in, from, false);
    default:
        point = next_point(in);
        add(in, point, point);
        return class_of(in, from, false);
    }
}

static bool times(reading *in, uint32_t *value)
{
    size_t from = in->at;
    *value = 0;
    for (int c; (c = peek(in)) >= '0' && c <= '9' && *value <= MOST_TIMES; in->at++)
        *value = *value * 10 + (uint32_t)(c - '0');
    return in->at > from;
}

/* Reads a repetition behind a part. Returns false if there is none; braces that are no repetition are characters. */
static bool repetition(reading *in, uint32_t *least, uint32_t *most)
{
    size_t from = in->at;
    if (accept(in, '*')) {
        *least = 0, *most = WITHOUT_END;
    } else if (accept(in, '+')) {
        *least = 1, *most = WITHOUT_END;
    } else if (accept(in, '?')) {
        *least = 0, *most = 1;
    } else {
        if (!accept(in, '{'))
            return false;
        bool first = times(in, least), comma = accept(in, ',');
        *most = *least;
        if (comma && !times(in, most))
            *most = WITHOUT_END;
        if (!first || !accept(in, '}')) {
            in->at = from;
            return false;
        }
        if (*least > MOST_TIMES || (*most > MOST_TIMES && *most != WITHOUT_END))
            refuse(in, "repeats too often");
        else if (*least > *most)
            wrong(in);
    }
    accept(in, '?'); /* lazy: the same texts match */
    return true;
}

static uint32_t sequence(reading *in, int depth)
{
    uint32_t all = part(in, NOTHING, 0, 0), least, most;
    for (int c; !in->r->status && (c = peek(in)) >= 0 && c != '|' && c != ')';) {
        uint32_t one = atom(in, depth);
        if (!in->r->status && repetition(in, &least, &most)) {
            one = part(in, REPEATED, one, 0);
            in->to->parts[one].least = least;
            in->to->parts[one].most = most;
            if (repetition(in, &least, &most)) /* of a repetition */
                wrong(in);
        }
        all = in->to->parts[all].kind == NOTHING ? one : part(in, SEQUENCE, all, one);
    }
    return all;
}

static uint32_t choice(reading *in, int depth)
{
    if (depth > DEEPEST) {
        refuse(in, "is too deep");
        return 0;
    }
    uint32_t all = sequence(in, depth);
    while (!in->r->status && accept(in, '|'))
        all = part(in, CHOICE, all, sequence(in, depth));
    return all;
}

void regex_read(regex *to, rules *r, const char *text, size_t length)
{
    reading in = {to, r, text, length, 0};
    to->count = to->used = 0;
    to->top = choice(&in, 0);
    if (!r->status && in.at < length)
        wrong(&in);
}

/* ---- rules ------------------------------------------------------------------------------------------------------ */

/* A character in a JSON string: itself, or its escape. */
static uint32_t json_points(rules *r, const point_range *ranges, uint32_t count, uint32_t next)
{
    static const point_range plain[] = {{0x20, 0x21}, {0x23, 0x5B}, {0x5D, 0x7E}, {0x80, 0x10FFFF}};
    uint32_t found = NEVER;
    for (uint32_t i = 0; i < count; i++) {
        for (int j = 0; j < 4; j++) {
            point_range both = {ranges[i].low > plain[j].low ? ranges[i].low : plain[j].low, smaller(ranges[i].high, plain[j].high)};
            if (both.low <= both.high)
                found = rules_either(r, rules_points(r, &both, 1, next), found);
        }
        for (uint32_t c = ranges[i].low; c < 0x80 && c <= ranges[i].high; c++)
            if (json_escapes(c))
                found = rules_either(r, rules_json(r, (uint8_t)c, next), found);
    }
    return found;
}

static uint32_t write_part(const regex *in, rules *r, bool in_json, uint32_t index, uint32_t next)
{
    const regex_part *p = in->parts + index;
    switch (p->kind) {
    case NOTHING:
        return next;
    case CLASS:
        return (in_json ? json_points : rules_points)(r, in->ranges + p->one, p->other, next);
    case SEQUENCE:
        for (; in->parts[index].kind == SEQUENCE; index = in->parts[index].one)
            next = write_part(in, r, in_json, in->parts[index].other, next);
        return write_part(in, r, in_json, index, next);
    case CHOICE: {
        uint32_t found = NEVER;
        for (; in->parts[index].kind == CHOICE; index = in->parts[index].one)
            found = rules_either(r, write_part(in, r, in_json, in->parts[index].other, next), found);
        return rules_either(r, write_part(in, r, in_json, index, next), found);
    }
    case REPEATED:
        return rules_repeat(r, write_part(in, r, in_json, p->one, END), p->least, p->most, next);
    default:
        rules_fail(r, EDGE_UNSUPPORTED, "a regular expression %s%s", "has ^ or $ inside", "", 0);
        return NEVER;
    }
}

static uint32_t anything(rules *r, bool in_json, uint32_t next)
{
    static const point_range all[] = {{0, 0x10FFFF}};
    return rules_repeat(r, in_json ? r->text : rules_points(r, all, 1, END), 0, WITHOUT_END, next);
}

/* One of the alternatives. Its anchors are its first and its last part. */
static uint32_t write_alternative(const regex *in, rules *r, bool in_json, bool whole, uint32_t index, uint32_t next)
{
    const regex_part *parts = in->parts;
    bool begins = false, ends = false;
    if (parts[index].kind == SEQUENCE ? parts[parts[index].other].kind == ENDING : parts[index].kind == ENDING) {
        ends = true;
        index = parts[index].kind == SEQUENCE ? parts[index].one : UINT32_MAX;
    }
    uint32_t found = ends || whole ? next : anything(r, in_json, next);
    for (; index != UINT32_MAX && parts[index].kind == SEQUENCE; index = parts[index].one)
        found = write_part(in, r, in_json, parts[index].other, found);
    if (index != UINT32_MAX && parts[index].kind == BEGINNING)
        begins = true;
    else if (index != UINT32_MAX)
        found = write_part(in, r, in_json, index, found);
    return begins || whole ? found : anything(r, in_json, found);
}

uint32_t regex_rules(const regex *in, rules *r, bool in_json, bool whole, uint32_t next)
{
    uint32_t found = NEVER, index = in->top;
    if (r->status)
        return NEVER;
    for (; in->parts[index].kind == CHOICE; index = in->parts[index].one)
        found = rules_either(r, write_alternative(in, r, in_json, whole, in->parts[index].other, next), found);
    return rules_either(r, write_alternative(in, r, in_json, whole, index, next), found);
}

/* ---- the number of characters ----------------------------------------------------------------------------------- */

static uint32_t bounded(uint64_t value)
{
    return value < WITHOUT_END ? (uint32_t)value : WITHOUT_END;
}

static void count(const regex *in, uint32_t index, uint32_t *least, uint32_t *most)
{
    const regex_part *p = in->parts + index;
    const uint8_t kind = p->kind;
    uint32_t one_least, one_most;
    *least = *most = kind == CLASS;
    if (kind == REPEATED) {
        count(in, p->one, &one_least, &one_most);
        *least = bounded((uint64_t)one_least * p->least);
        *most = !one_most || !p->most ? 0 : one_most == WITHOUT_END ? one_most : bounded((uint64_t)one_most * p->most);
        return;
    }
    if (kind != SEQUENCE && kind != CHOICE)
        return;
    *least = kind == CHOICE ? WITHOUT_END : 0;
    for (bool last = false; !last; index = in->parts[index].one) { /* a chain, whose parts are `other` but for the last */
        last = in->parts[index].kind != kind;
        count(in, last ? index : in->parts[index].other, &one_least, &one_most);
        *least = kind == CHOICE ? smaller(*least, one_least) : bounded((uint64_t)*least + one_least);
        *most = kind == SEQUENCE ? bounded((uint64_t)*most + one_most) : one_most > *most ? one_most : *most;
    }
}

void regex_counts(const regex *in, uint32_t *least, uint32_t *most)
{
    count(in, in->top, least, most);
}

bool regex_limit(regex *in, uint32_t least, uint32_t most)
{
    const regex_part *parts = in->parts;
    uint32_t top = in->top, own_least, own_most, last;
    if (parts[top].kind != SEQUENCE || parts[parts[top].other].kind != ENDING)
        return least == 0 && most == WITHOUT_END;
    for (last = parts[top].one; parts[last].kind == SEQUENCE;)
        last = parts[last].one;
    if (parts[last].kind != BEGINNING)
        return least == 0 && most == WITHOUT_END;
    count(in, top, &own_least, &own_most);
    if (own_least >= least && own_most <= most)
        return true;
    uint32_t inner = parts[parts[top].one].kind == SEQUENCE ? parts[top].one : 0;
    regex_part *repeated = inner && parts[inner].one == last ? in->parts + parts[inner].other : NULL;
    if (!repeated || repeated->kind != REPEATED || parts[repeated->one].kind != CLASS)
        return false;
    repeated->least = repeated->least > least ? repeated->least : least;
    repeated->most = smaller(repeated->most, most);
    return true;
}
