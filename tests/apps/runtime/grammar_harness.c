/* Grammars of the C runtime for Python: bytes that match, and masks of a vocabulary that Python gives. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "call_rules.h"
#include "mask.h"
#include "regexp.h"
#include "rules.h"
#include "schema.h"

static struct { rules *rules; schema *schema; regex *regex; automaton *automaton; mask *mask; json_tree *tree; } made;
static tokenizer_config config;
static vocabulary words;
static uint32_t start, now;

static void lay_out(arena *from, uint32_t vocab)
{
    made.rules = rules_layout(from);
    made.schema = schema_layout(from);
    made.regex = regex_layout(from);
    made.automaton = automaton_layout(from);
    made.mask = mask_layout(from, vocab);
    made.tree = json_layout(from);
}

/* pieces: bytes of all tokens, which begin at starts[token]. The tables must stay. */
void harness_open(const uint8_t *pieces, const uint32_t *starts, uint32_t count, const int32_t *ends, uint32_t end_count)
{
    arena size = {NULL, 0}, memory;
    lay_out(&size, count);
    memory = (arena){calloc(1, size.used + 64), 0};
    memory.memory += 64 - (uintptr_t)memory.memory % 64;
    lay_out(&memory, count);
    config.tokens = count;
    config.piece_bytes = starts[count];
    config.ends = end_count;
    words = (vocabulary){.config = &config, .piece_starts = starts, .pieces = pieces, .ends = ends};
    mask_open(made.mask, &words, NULL, 0);
}

static edge_status finish(void)
{
    if (!made.rules->status)
        rules_finish(made.rules, start);
    if (made.rules->status)
        return made.rules->status;
    now = automaton_begin(made.automaton, made.rules, start);
    return now && mask_begin(made.mask, made.rules, start) ? EDGE_OK : EDGE_UNSUPPORTED;
}

edge_status harness_set(uint32_t is_regex, const char *text, size_t length, edge_error *error)
{
    rules_begin(made.rules, error);
    if (is_regex) {
        regex_read(made.regex, made.rules, text, length);
        start = regex_rules(made.regex, made.rules, false, true, END);
    } else {
        start = schema_rules(made.schema, made.rules, text, length);
    }
    return finish();
}

/* The grammar of calls of tools. texts: opening, closing, quote, name of arguments, text between; each ends with \0. */
edge_status harness_calls(const char *text, size_t length, uint32_t body, uint32_t joined, const char *const *texts, const char *only,
                          uint32_t required, uint32_t parallel, edge_error *error)
{
    call_form form = {.body = body, .joined = joined};
    span *spans[] = {&form.opening, &form.closing, &form.quote, &form.arguments, &form.between};
    for (int i = 0; i < 5; i++)
        *spans[i] = (span){texts[i], (uint32_t)strlen(texts[i])};
    edge_status status = json_read(made.tree, text, length, error);
    if (status)
        return status;
    const tool_list tools = {made.tree, made.tree->values[1].child};
    const call_choice choice = {&form, &tools, NULL, 0, only ? tool_named(&tools, only, strlen(only)) : 0, required, parallel};
    rules_begin(made.rules, error);
    start = call_rules_of_fields(made.schema, made.rules, &choice);
    return finish();
}


static uint32_t step(uint8_t byte)
{
    bool full = false;
    uint32_t to = automaton_step(made.automaton, now, byte, &full);
    if (full) {
        full = false;
        now = automaton_forget(made.automaton, now);
        to = automaton_step(made.automaton, now, byte, &full);
    }
    return to;
}

/* Matches from the beginning; returns the bytes that match. */
size_t harness_match(const uint8_t *text, size_t count)
{
    now = automaton_begin(made.automaton, made.rules, start);
    for (size_t i = 0; i < count; i++) {
        uint32_t to = step(text[i]);
        if (to == DEAD)
            return i;
        now = to;
    }
    return count;
}

uint32_t harness_accepts(void)
{
    return automaton_accepts(made.automaton, now);
}

/* The bytes that may follow; returns their number. */
uint32_t harness_next(uint8_t *bytes)
{
    uint32_t count = 0;
    for (int byte = 0; byte < 256; byte++)
        if (step((uint8_t)byte) != DEAD)
            bytes[count++] = (uint8_t)byte;
    return count;
}

/* Goes on with a byte that may follow. */
void harness_follow(uint32_t byte)
{
    now = step((uint8_t)byte);
}

uint32_t harness_logits(float *logits)
{
    return mask_logits(made.mask, logits);
}

uint32_t harness_accept(int32_t token)
{
    return mask_accept(made.mask, token);
}

int32_t harness_within(int32_t token, uint32_t left)
{
    return mask_within(made.mask, token, left);
}

uint32_t harness_ended(void)
{
    return mask_ended(made.mask);
}
