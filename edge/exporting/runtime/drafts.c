/* Drafts of the next tokens, copied from where the text was the same before, and how many of them to verify: a port of
 * edge/run/drafting/drafts.py and edge/run/drafting/speculation.py, without a model that drafts. */
#include <string.h>

#include "internal.h"

struct drafts {
    uint32_t count, match;      /* tokens; of them equal before `place` and at the end, at most DRAFT_DEPTH */
    int64_t place;              /* of the token that the last one is equal to; -1: there is none */
    uint32_t kind;              /* by its match, of the draft that is verified */
    double times[MOST_DRAFTS + 2]; /* seconds of a pass, by its tokens; 0: none has run */
    double right[DRAFT_KINDS], tried[DRAFT_KINDS];
    int32_t tokens[DRAFT_TEXT];
};

drafts *drafts_layout(arena *from)
{
    drafts *d = take(from, sizeof *d);
    for (uint32_t kind = 0; d && kind < DRAFT_KINDS; kind++) {
        d->right[kind] = FIRST_CHANCES[kind] * TRUSTED_DRAFTS;
        d->tried[kind] = TRUSTED_DRAFTS;
    }
    if (d)
        d->place = -1;
    return d;
}

void drafts_clear(drafts *d)
{
    d->count = d->match = 0;
    d->place = -1;
}

static void lose_place(drafts *d)
{
    d->place = -1;
    d->match = 0;
}

void drafts_add(drafts *d, const int32_t *tokens, uint32_t count)
{
    const uint32_t half = DRAFT_TEXT / 2;
    if (count > half) {
        tokens += count - half;
        count = half;
    }
    if (d->count + count > DRAFT_TEXT) { /* half of the older ones are forgotten */
        memmove(d->tokens, d->tokens + d->count - half, half * sizeof *d->tokens);
        d->count = half;
        lose_place(d);
    }
    memcpy(d->tokens + d->count, tokens, count * sizeof *tokens);
    d->count += count;
    if (count == 1 && d->place >= 0 && d->tokens[d->place + 1] == *tokens) { /* the same place goes on */
        d->place++;
        d->match += d->match < DRAFT_DEPTH;
    } else {
        lose_place(d);
    }
}

/* The tokens up to `place` that are equal to those up to `last`. */
static uint32_t equal_at(const drafts *d, uint32_t place, uint32_t last)
{
    uint32_t count = 0;
    while (count < DRAFT_DEPTH && count <= place && d->tokens[place - count] == d->tokens[last - count])
        count++;
    return count;
}

/* The longest match; of equally long ones, the latest. */
static void find_place(drafts *d)
{
    lose_place(d);
    for (uint32_t last = d->count - 1, place = last; d->count && place-- && d->match < DRAFT_DEPTH;) {
        uint32_t match = d->tokens[place] == d->tokens[last] ? equal_at(d, place, last) : 0;
        if (match > d->match) {
            d->place = place;
            d->match = match;
        }
    }
}

/* The time of a pass over `tokens`, in passes over one. */
static double cost_of(const drafts *d, uint32_t tokens)
{
    if (d->times[1] > 0 && d->times[tokens] > 0)
        return d->times[tokens] / d->times[1];
    return tokens > 1 ? FIRST_COST + FIRST_COST_EACH * tokens : 1;
}

static uint32_t kind_of(uint32_t match)
{
    uint32_t kind = 0;
    while (kind < DRAFT_KINDS - 1 && match >> (kind + 1))
        kind++;
    return kind;
}

uint32_t drafts_propose(drafts *d, uint32_t most, int32_t *draft)
{
    if (d->match < DRAFT_SURE)
        find_place(d);
    if (d->place < 0)
        return 0;
    d->kind = kind_of(d->match);
    double chance = d->right[d->kind] / d->tried[d->kind], power = 1, expected = 1, best = LEAST_GAIN;
    uint32_t length = 0, first = (uint32_t)d->place + 1;
    for (uint32_t count = 1; count <= most; count++) {
        power *= chance;
        expected += power;
        double gain = expected / cost_of(d, 1 + count);
        if (gain > best) {
            best = gain;
            length = count;
        }
    }
    for (uint32_t i = 0; i < length; i++) /* beyond the end, the same tokens again: the text may repeat */
        draft[i] = d->tokens[first + i % (d->count - first)];
    return length;
}

void drafts_time(drafts *d, uint32_t tokens, double seconds)
{
    double before = d->times[tokens], most;
    if (before > 0) {
        most = OUTLIER_TIME * before;
        d->times[tokens] = before + NEWEST_TIME * ((seconds < most ? seconds : most) - before);
    } else {
        d->times[tokens] = seconds;
    }
}

void drafts_judge(drafts *d, uint32_t drafted, uint32_t accepted)
{
    double tried = accepted + (accepted < drafted); /* behind the first wrong one nothing was learned */
    double *all = d->tried + d->kind, kept = DRAFTS_REMEMBERED / (*all + tried);
    kept = kept < 1 ? kept : 1;
    d->right[d->kind] = kept * (d->right[d->kind] + accepted);
    *all = kept * (*all + tried);
}
