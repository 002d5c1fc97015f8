/* Building the rules of a grammar. */
#include <string.h>

#include "json.h"
#include "rules.h"

rules *rules_layout(arena *from)
{
    rules *r = take(from, sizeof *r);
    rule_node *nodes = take(from, MOST_NODES * sizeof *nodes);
    uint32_t *shortest = take(from, MOST_NODES * sizeof *shortest), *slots = take(from, 2 * MOST_NODES * sizeof *slots),
             *starts = take(from, MOST_RULES * sizeof *starts);
    if (r)
        *r = (rules){nodes, shortest, slots, starts, 0, 0, 0, 0, EDGE_OK, NULL};
    return r;
}

void rules_fail(rules *r, edge_status code, const char *format, const char *what, const char *text, size_t length)
{
    char shown[64];
    if (r->status)
        return;
    if (length > 60)
        for (length = 60; length && ((uint8_t)text[length] & 0xC0) == 0x80;) /* in the middle of a character */
            length--;
    if (length)
        memcpy(shown, text, length);
    shown[length] = 0;
    r->status = edge_fail(r->error, code, format, what, shown);
}

static uint32_t add(rules *r, rule_node node)
{
    uint32_t words[5] = {node.kind | node.low << 8 | node.high << 16, node.next, node.other, node.least, node.most};
    uint32_t hash = 0;
    for (int i = 0; i < 5; i++)
        hash = (hash ^ words[i]) * 2654435761u, hash ^= hash >> 15;
    uint32_t *slot;
    for (;; hash++) {
        slot = r->slots + hash % (2 * MOST_NODES);
        const rule_node *known = r->nodes + *slot;
        if (!*slot)
            break;
        if (known->kind == node.kind && known->low == node.low && known->high == node.high && known->next == node.next
            && known->other == node.other && known->least == node.least && known->most == node.most)
            return *slot;
    }
    if (r->status)
        return NEVER;
    if (r->count == MOST_NODES) {
        rules_fail(r, EDGE_UNSUPPORTED, "the grammar %s%s", "is too large", "", 0);
        return NEVER;
    }
    r->nodes[r->count] = node;
    return *slot = r->count++;
}

uint32_t rules_byte(rules *r, uint8_t low, uint8_t high, uint32_t next)
{
    return next == NEVER ? NEVER : add(r, (rule_node){RULE_BYTES, low, high, next, 0, 0, 0});
}

uint32_t rules_char(rules *r, uint8_t c, uint32_t next)
{
    return rules_byte(r, c, c, next);
}

uint32_t rules_bytes(rules *r, const char *bytes, size_t count, uint32_t next)
{
    while (count--)
        next = rules_char(r, (uint8_t)bytes[count], next);
    return next;
}

uint32_t rules_word(rules *r, const char *word, uint32_t next)
{
    return rules_bytes(r, word, strlen(word), next);
}

uint32_t rules_either(rules *r, uint32_t one, uint32_t other)
{
    if (one == other || other == NEVER)
        return one;
    return one == NEVER ? other : add(r, (rule_node){RULE_EITHER, 0, 0, one, other, 0, 0});
}

uint32_t rules_repeat(rules *r, uint32_t body, uint32_t least, uint32_t most, uint32_t next)
{
    if (next == NEVER || least > most || (body == NEVER && least))
        return NEVER;
    if (!most || body == NEVER || body == END)
        return next;
    return add(r, (rule_node){RULE_REPEAT, 0, 0, next, body, least, most});
}

uint32_t rules_new(rules *r)
{
    if (r->rules == MOST_RULES)
        rules_fail(r, EDGE_UNSUPPORTED, "the grammar %s%s", "has too many parts", "", 0);
    return r->status ? 0 : r->rules++;
}

void rules_set(rules *r, uint32_t rule, uint32_t start)
{
    r->starts[rule] = start;
}

uint32_t rules_call(rules *r, uint32_t rule, uint32_t next)
{
    return next == NEVER ? NEVER : add(r, (rule_node){RULE_CALL, 0, 0, next, rule, 0, 0});
}

/* ---- characters ------------------------------------------------------------------------------------------------- */

/* Continuation bytes of code points from `low` to `high`, whose first bytes are equal. shift: bits that are left. */
static uint32_t continued(rules *r, uint32_t low, uint32_t high, int shift, uint32_t next)
{
    if (shift < 0)
        return next;
    const uint32_t mask = (1u << shift) - 1, first = low >> shift & 63, last = high >> shift & 63;
    if (first == last || (!(low & mask) && (high & mask) == mask)) {
        uint32_t rest = first == last ? continued(r, low & mask, high & mask, shift - 6, next)
                                      : continued(r, 0, mask, shift - 6, next);
        return rules_byte(r, (uint8_t)(0x80 | first), (uint8_t)(0x80 | last), rest);
    }
    if (low & mask) /* the part with the first byte alone */
        return rules_either(r, continued(r, low, low | mask, shift, next), continued(r, (low | mask) + 1, high, shift, next));
    return rules_either(r, continued(r, low, (high & ~mask) - 1, shift, next), continued(r, high & ~mask, high, shift, next));
}

/* Code points of one length in UTF-8. */
static uint32_t one_length(rules *r, uint32_t low, uint32_t high, int length, uint32_t next)
{
    static const uint8_t leads[] = {0, 0, 0xC0, 0xE0, 0xF0};
    if (length == 1)
        return rules_byte(r, (uint8_t)low, (uint8_t)high, next);
    const int shift = 6 * (length - 1);
    uint32_t found = NEVER;
    while (low <= high) { /* code points with the same first byte, or whole blocks of such */
        const uint32_t mask = (1u << shift) - 1, last = high >> shift, first = low >> shift;
        uint32_t end = first == last ? high : low | mask, until = first;
        if (!(low & mask) && (end & mask) == mask) {
            while (until < last && (until + 1 < last || (high & mask) == mask))
                until++;
            end = until << shift | mask;
        }
        uint32_t rest = until > first ? continued(r, 0, mask, shift - 6, next) : continued(r, low & mask, end & mask, shift - 6, next);
        found = rules_either(r, rules_byte(r, (uint8_t)(leads[length] | first), (uint8_t)(leads[length] | until), rest), found);
        low = end + 1;
    }
    return found;
}

uint32_t rules_points(rules *r, const point_range *ranges, uint32_t count, uint32_t next)
{
    static const point_range blocks[] = {{0, 0x7F}, {0x80, 0x7FF}, {0x800, 0xD7FF}, {0xE000, 0xFFFF}, {0x10000, 0x10FFFF}};
    static const int lengths[] = {1, 2, 3, 3, 4};
    uint32_t found = NEVER;
    for (uint32_t i = 0; i < count; i++)
        for (int block = 0; block < 5; block++) {
            uint32_t low = ranges[i].low > blocks[block].low ? ranges[i].low : blocks[block].low;
            uint32_t high = smaller(ranges[i].high, blocks[block].high);
            if (low <= high)
                found = rules_either(r, one_length(r, low, high, lengths[block], next), found);
        }
    return found;
}

uint32_t rules_json(rules *r, uint8_t c, uint32_t next)
{
    static const char digits[] = "0123456789abcdef";
    const char letter = json_letter(c), written[] = {'\\', letter ? letter : 'u', '0', '0', digits[c >> 4], digits[c & 15]};
    return json_escapes(c) ? rules_bytes(r, written, letter ? 2 : 6, next) : rules_char(r, c, next);
}

static uint32_t hexadecimal(rules *r, uint32_t next)
{
    return rules_either(r, rules_byte(r, '0', '9', next),
                        rules_either(r, rules_byte(r, 'a', 'f', next), rules_byte(r, 'A', 'F', next)));
}

void rules_begin(rules *r, edge_error *error)
{
    static const point_range beyond[] = {{0x80, 0x10FFFF}};
    memset(r->slots, 0, 2 * MOST_NODES * sizeof *r->slots);
    r->nodes[NEVER] = (rule_node){.kind = RULE_NEVER};
    r->nodes[END] = (rule_node){.kind = RULE_END};
    r->count = 2;
    r->rules = 0;
    r->status = EDGE_OK;
    r->error = error;
    uint32_t escapes = NEVER, digits = END;
    for (const char *each = "\"\\/bfnrt"; *each; each++)
        escapes = rules_either(r, rules_char(r, (uint8_t)*each, END), escapes);
    for (int i = 0; i < 4; i++)
        digits = hexadecimal(r, digits);
    uint32_t one = rules_char(r, '\\', rules_either(r, rules_char(r, 'u', digits), escapes));
    one = rules_either(r, rules_points(r, beyond, 1, END), one);
    one = rules_either(r, rules_byte(r, 0x5D, 0x7E, END), one);
    one = rules_either(r, rules_byte(r, 0x23, 0x5B, END), one);
    r->text = rules_either(r, rules_byte(r, 0x20, 0x21, END), one);
    r->text_end = r->count;
}

/* ---- the shortest ways ------------------------------------------------------------------------------------------ */

static uint32_t sum(uint64_t one, uint64_t other)
{
    return one + other < UNREACHABLE ? (uint32_t)(one + other) : UNREACHABLE;
}

static uint32_t shortest(const rules *r, const rule_node *node)
{
    const uint32_t next = r->shortest[node->next], other = r->shortest[node->other];
    switch (node->kind) {
    case RULE_END: return 0;
    case RULE_BYTES: return sum(next, 1);
    case RULE_EITHER: return smaller(next, other);
    case RULE_CALL: return sum(next, r->shortest[r->starts[node->other]]);
    case RULE_REPEAT: return sum(next, (uint64_t)other * node->least);
    default: return UNREACHABLE;
    }
}

void rules_finish(rules *r, uint32_t start)
{
    for (uint32_t i = 0; i < r->count; i++)
        r->shortest[i] = UNREACHABLE;
    for (bool changed = true; changed;) { /* ends come first, so that only calls need further rounds */
        changed = false;
        for (uint32_t i = 0; i < r->count; i++) {
            uint32_t found = shortest(r, r->nodes + i);
            changed |= found < r->shortest[i];
            r->shortest[i] = found;
        }
    }
    if (r->shortest[start] == UNREACHABLE)
        rules_fail(r, EDGE_UNSUPPORTED, "the grammar %s%s", "matches no text", "", 0);
}
