/* Texts and marks as rules of answers. */
#include <string.h>

#include "call_rules_parts.h"
#include "calls.h"
#include "mask.h"
#include "rules.h"
#include "schema_parts.h"

uint32_t call_word(call_writer *w, const char *word, uint32_t next)
{
    return rules_word(w->r, word, next);
}

uint32_t call_put(call_writer *w, span text, uint32_t next)
{
    return rules_bytes(w->r, text.bytes, text.length, next);
}

uint32_t call_text(call_writer *w, uint32_t next)
{
    return rules_repeat(w->r, w->any, 0, WITHOUT_END, next);
}

static const call_mark *mark_token_of(const call_writer *w, span mark)
{
    for (uint32_t i = 0; i < w->choice->mark_count; i++) {
        const call_mark *each = w->choice->marks + i;
        if (each->text.length == mark.length && !memcmp(each->text.bytes, mark.bytes, mark.length))
            return each;
    }
    return NULL;
}

bool call_has_mark(const call_writer *w, span mark)
{
    return mark_token_of(w, mark) != NULL;
}

uint32_t call_mark_rule(call_writer *w, span mark, uint32_t next)
{
    const call_mark *found = mark_token_of(w, mark);
    if (!found)
        return call_put(w, mark, next);
    const mark_token token = mark_of(found->token);
    return rules_bytes(w->r, (const char *)token.bytes, sizeof token.bytes, next);
}

/* The bytes of the mark that text ends with, if it ended with `done` of them before this character. */
static uint32_t advance(span mark, uint32_t done, uint8_t c)
{
    for (uint32_t length = done + 1; length; length--)
        if ((uint8_t)mark.bytes[length - 1] == c && !memcmp(mark.bytes, mark.bytes + done + 1 - length, length - 1))
            return length;
    return 0;
}

uint32_t call_until(call_writer *w, span mark, bool ends, uint32_t next)
{
    static const point_range beyond[] = {{0x80, 0x10FFFF}};
    rules *r = w->r;
    uint32_t states[64]; /* rules: by the bytes of the mark that the text ends with */
    if (!mark.length || mark.length > sizeof states / sizeof *states || next == NEVER)
        return NEVER;
    const uint32_t behind = rules_new(r);
    rules_set(r, behind, next);
    for (uint32_t i = 0; i < mark.length; i++)
        states[i] = rules_new(r);
    for (uint32_t i = 0; i < mark.length && !r->status; i++) {
        uint32_t found = ends ? END : NEVER;
        found = rules_either(r, rules_points(r, beyond, 1, rules_call(r, states[0], END)), found);
        for (uint32_t first = 0, last; first < 0x80; first = last) { /* characters that lead to one state */
            const uint32_t to = advance(mark, i, (uint8_t)first);
            for (last = first + 1; last < 0x80 && advance(mark, i, (uint8_t)last) == to;)
                last++;
            const uint32_t rule = rules_call(r, to == mark.length ? behind : states[to], END);
            found = rules_either(r, rules_byte(r, (uint8_t)first, (uint8_t)(last - 1), rule), found);
        }
        rules_set(r, states[i], found);
    }
    return r->status ? NEVER : rules_call(r, states[0], END);
}

uint32_t call_json(call_writer *w, const conjunction *of, uint32_t next)
{
    return schema_write(w->in, of, w->root, next);
}
