/* The form of answers: a grammar, in memory of its own, with the tables of a vocabulary. */
#include "constraint.h"
#include "mask.h"
#include "regexp.h"
#include "rules.h"
#include "schema.h"
#include "system.h"
#include "vocabulary.h"

struct constraint {
    uint64_t size;
    rules *rules;
    schema *schema;
    regex *regex;
    mask *mask;
    const vocabulary *in;
    uint32_t start;
    bool holds, closed, cut; /* cut: closed where the answer could not have ended */
};

static constraint *lay_out(arena *from, uint32_t vocab)
{
    constraint *c = take(from, sizeof *c);
    constraint own = {0, rules_layout(from), schema_layout(from), regex_layout(from), mask_layout(from, vocab), NULL, END, false, false, false};
    if (c)
        *c = own;
    return c;
}

constraint *constraint_make(const vocabulary *in, const int32_t *marks, uint32_t mark_count)
{
    arena count = {NULL, 0};
    lay_out(&count, in->config->tokens);
    arena memory = {map_memory(count.used), 0};
    if (!memory.memory)
        return NULL;
    constraint *c = lay_out(&memory, in->config->tokens);
    c->size = count.used;
    c->in = in;
    mask_open(c->mask, in, marks, mark_count);
    return c;
}

void constraint_free(constraint *c)
{
    if (c)
        unmap_memory(c, c->size);
}

uint64_t constraint_bytes(const constraint *c)
{
    return c->size;
}

bool constraint_holds(const constraint *c)
{
    return c->holds;
}

static edge_status finish(constraint *c, edge_error *error)
{
    rules *r = c->rules;
    if (!r->status)
        rules_finish(r, c->start);
    if (r->status)
        return r->status;
    if (!mask_begin(c->mask, r, c->start))
        return edge_fail(error, EDGE_UNSUPPORTED, "the grammar is too ambiguous: too many of its parts may begin at once");
    c->holds = true;
    return EDGE_OK;
}

edge_status constraint_set(constraint *c, edge_form form, const char *text, size_t length, edge_error *error)
{
    rules *r = c->rules;
    c->holds = false;
    rules_begin(r, error);
    if (form == EDGE_REGEX) {
        regex_read(c->regex, r, text, length);
        c->start = regex_rules(c->regex, r, false, true, END);
    } else {
        c->start = schema_rules(c->schema, r, text, length);
    }
    return finish(c, error);
}

edge_status constraint_calls(constraint *c, call_grammar *write, const call_choice *choice, edge_error *error)
{
    c->holds = false;
    rules_begin(c->rules, error);
    c->start = write(c->schema, c->rules, choice);
    return finish(c, error);
}

void constraint_start(constraint *c)
{
    c->closed = c->cut = false;
    mask_begin(c->mask, c->rules, c->start);
}

bool constraint_mask(constraint *c, float *logits, bool *stuck)
{
    *stuck = !mask_logits(c->mask, logits);
    return mask_complete(c->mask);
}

int32_t constraint_take(constraint *c, int32_t token, uint32_t left, bool *ended)
{
    int32_t taken = mask_within(c->mask, token, left);
    c->closed |= taken != token;
    c->cut |= taken != token && !mask_complete(c->mask);
    *ended = false;
    if (vocabulary_ends(c->in, taken))
        return taken;
    if (!mask_accept(c->mask, taken))
        return -1;
    *ended = mask_ended(c->mask);
    return taken;
}

bool constraint_closed(const constraint *c)
{
    return c->closed;
}

bool constraint_whole(const constraint *c)
{
    return !c->cut && mask_complete(c->mask);
}
