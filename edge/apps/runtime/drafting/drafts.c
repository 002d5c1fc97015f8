/* Drafts of the next tokens, copied from where the text was the same before, and how many of them to verify: a port of
 * edge/run/drafting/drafts.py and edge/run/drafting/ahead.py. */
#include <math.h>
#include <string.h>

#include "drafts.h"

#if defined __GNUC__ && !defined __clang__
#pragma GCC optimize("O3") /* vectorizes, as clang does at -Os: each token scans the whole text */
#endif

enum { OF_MODEL = DRAFT_KINDS, KINDS }; /* drafts by matches of some lengths, and by a model */

struct drafts {
    uint32_t count, behind;     /* tokens; those not yet in `runs`. DRAFT_DEPTH: `runs` is rebuilt */
    uint32_t kind, untried_kind; /* of the last draft, by the length of its match; of one that was not verified */
    int64_t untried;            /* first token of that one; -1: none */
    struct {
        double times[MOST_DRAFTS + 2];    /* seconds of a pass, by its number of tokens */
        uint32_t passes[MOST_DRAFTS + 2]; /* timed passes, at most FEW_TIMES */
        uint32_t answered;                /* tokens of the answer, drawn or accepted */
    } contexts[DRAFT_CONTEXTS + 1];       /* by the number of rows that a pass reads */
    uint32_t context;                     /* of the last pass */
    double spent;                         /* seconds of the answer's passes, and of the model's drafts */
    double model_seconds;                 /* per token that the model drafts; 0: not known */
    uint32_t drafted;                     /* verified tokens of the answer */
    double right[KINDS], tried[KINDS];
    int32_t tokens[DRAFT_TEXT];
    uint8_t runs[DRAFT_TEXT];   /* newest tokens that equal those `distance` before them; distance 1 is last */
};

drafts *drafts_layout(arena *from)
{
    drafts *d = take(from, sizeof *d);
    for (uint32_t kind = 0; d && kind < KINDS; kind++) {
        d->right[kind] = (kind == OF_MODEL ? FIRST_OF_MODEL : FIRST_CHANCES[kind]) * TRUSTED_DRAFTS;
        d->tried[kind] = TRUSTED_DRAFTS;
    }
    if (d)
        drafts_clear(d);
    return d;
}

void drafts_clear(drafts *d)
{
    d->count = 0;
    d->behind = DRAFT_DEPTH;
    d->untried = -1;
}

void drafts_begin(drafts *d)
{
    d->untried = -1;
    d->spent = d->drafted = 0;
    for (uint32_t context = 0; context <= DRAFT_CONTEXTS; context++)
        d->contexts[context].answered = 0;
    if (d->right[OF_MODEL] < FIRST_OF_MODEL * d->tried[OF_MODEL]) /* the next text may be easier */
        d->right[OF_MODEL] = FIRST_OF_MODEL * TRUSTED_DRAFTS, d->tried[OF_MODEL] = TRUSTED_DRAFTS;
}

static void learn(drafts *d, uint32_t kind, uint32_t tried, uint32_t accepted)
{
    double *right = d->right + kind, *all = d->tried + kind, kept = DRAFTS_REMEMBERED / (*all + tried);
    kept = kept < 1 ? kept : 1;
    *right = kept * (*right + accepted);
    *all = kept * (*all + tried);
}

void drafts_add(drafts *d, const int32_t *tokens, uint32_t count)
{
    const uint32_t half = DRAFT_TEXT / 2;
    if (d->untried >= 0 && count == 1) /* tokens of an answer come one by one */
        learn(d, d->untried_kind, 1, *tokens == d->untried);
    d->untried = -1;
    if (count > half) {
        tokens += count - half;
        count = half;
    }
    if (d->count + count > DRAFT_TEXT) { /* drop the older tokens but for half of the room */
        memmove(d->tokens, d->tokens + d->count - half, half * sizeof *d->tokens);
        d->count = half;
        d->behind = DRAFT_DEPTH;
    }
    memcpy(d->tokens + d->count, tokens, count * sizeof *tokens);
    d->count += count;
    d->behind = count < DRAFT_DEPTH - d->behind ? d->behind + count : DRAFT_DEPTH;
}

/* Extends the runs of all distances by the token at `last`; a run is at most DRAFT_DEPTH long. */
static void extend_runs(drafts *d, uint32_t last)
{
    uint8_t *runs = d->runs + DRAFT_TEXT - last;
    const int32_t *tokens = d->tokens, token = tokens[last];
    for (uint32_t place = 0; place < last; place++) {
        uint8_t longer = (uint8_t)(runs[place] + (runs[place] < DRAFT_DEPTH));
        runs[place] = tokens[place] == token ? longer : 0;
    }
}

/* Returns the place of the longest match, the latest among equals. *match: its length; 0: there is none. */
static uint32_t find_place(drafts *d, uint32_t *match)
{
    uint32_t ahead = d->behind < d->count ? d->behind : d->count, place = d->count ? d->count - 1 : 0;
    if (d->behind == DRAFT_DEPTH)
        memset(d->runs, 0, sizeof d->runs);
    for (uint32_t last = d->count - ahead; last < d->count; last++)
        extend_runs(d, last);
    d->behind = 0;
    const uint8_t *runs = d->runs + DRAFT_TEXT - place;
    uint8_t longest = 0;
    for (uint32_t i = 0; i < place; i++)
        longest = runs[i] > longest ? runs[i] : longest;
    while (longest && runs[--place] != longest) {
    }
    *match = longest;
    return place;
}

/* The time of a pass over `tokens` divided by that of a single token, in this context or, if unknown, a shorter one. */
static double cost_of(const drafts *d, uint32_t context, uint32_t tokens)
{
    for (uint32_t at = context + 1; at-- > 0 && tokens > 1;) {
        const double *times = d->contexts[at].times;
        const uint32_t *passes = d->contexts[at].passes;
        uint32_t below = tokens, above = tokens;
        while (below > 1 && passes[below] < FEW_TIMES)
            below--;
        while (above < MOST_DRAFTS + 1 && passes[above] < FEW_TIMES)
            above++;
        if (passes[1] >= FEW_TIMES && passes[above] >= FEW_TIMES) { /* interpolate between timed numbers of tokens */
            double low = times[below] / times[1], high = times[above] / times[1], wide = above - below;
            return low + (high - low) * (tokens - below) / (wide > 1 ? wide : 1);
        }
    }
    return tokens > 1 ? FIRST_COST + FIRST_COST_EACH * tokens : 1;
}

static uint32_t context_of(uint32_t behind)
{
    uint32_t context = 0;
    while (context < DRAFT_CONTEXTS && behind >= CONTEXT_ROWS[context])
        context++;
    return context;
}

static uint32_t kind_of(uint32_t match)
{
    uint32_t kind = 0;
    while (kind < DRAFT_KINDS - 1 && match >> (kind + 1))
        kind++;
    return kind;
}

/* Seconds of a pass over one token, in a shorter context if none ran in this one; 0: not known. */
static double alone_in(const drafts *d, uint32_t context)
{
    double found = 0;
    for (uint32_t at = 0; at <= context; at++)
        found = d->contexts[at].passes[1] ? d->contexts[at].times[1] : found;
    return found;
}

/* The best length of a draft. *best: its expected tokens per time of a pass over one token. each: the cost of drafting
 * a token, in such times. */
static uint32_t best_length(const drafts *d, uint32_t kind, uint32_t context, uint32_t most, double each, double *best)
{
    double tried = d->tried[kind], mean = d->right[kind] / tried, power = 1, expected = 1;
    double chance = mean - CAUTION * sqrt(mean * (1 - mean) / tried);
    chance = chance > 0 ? chance : 0;
    uint32_t length = 0;
    *best = LEAST_GAIN;
    for (uint32_t count = 1; count <= most; count++) {
        power *= chance;
        expected += power;
        double gain = expected / (cost_of(d, context, 1 + count) + count * each);
        if (gain > *best) {
            *best = gain;
            length = count;
        }
    }
    return length;
}

static uint32_t ask(drafts *d, const drafter *by, uint32_t count, int32_t *draft)
{
    double seconds = 0;
    count = by->ask(by->of, count, draft, &seconds);
    d->spent += seconds;
    double each = seconds / (count ? count : 1), before = d->model_seconds > 0 ? d->model_seconds : each;
    each = each < OUTLIER_TIME * before ? each : OUTLIER_TIME * before;
    d->model_seconds = before + NEWEST_TIME * (each - before);
    return count;
}

uint32_t drafts_propose(drafts *d, uint32_t most, uint32_t behind, const drafter *by, int32_t *draft)
{
    uint32_t context = context_of(behind), match = 0, length = 0;
    if (!most)
        return 0;
    const uint32_t first = find_place(d, &match) + 1, kind = kind_of(match);
    double gain = LEAST_GAIN, better;
    if (match) {
        length = best_length(d, kind, context, most, 0, &gain);
        d->untried = d->tokens[first];
        d->untried_kind = kind;
    }
    if (by) {
        const double alone = alone_in(d, context), share = d->model_seconds > 0 && alone > 0 ? d->model_seconds / alone : by->share;
        const uint32_t count = best_length(d, OF_MODEL, context, most, share, &better);
        if (count && better > gain) {
            d->kind = OF_MODEL;
            return ask(d, by, count, draft);
        }
    }
    d->kind = kind;
    if (length)
        d->untried = -1;
    for (uint32_t i = 0; i < length; i++) /* beyond the end, repeat the draft */
        draft[i] = d->tokens[first + i % (d->count - first)];
    return length;
}

void drafts_time(drafts *d, uint32_t tokens, uint32_t behind, double seconds)
{
    uint32_t context = context_of(behind), *passes = d->contexts[context].passes + tokens;
    double *time = d->contexts[context].times + tokens, most = OUTLIER_TIME * *time;
    if (!*passes)
        *time = seconds;
    else if (*passes < FEW_TIMES)
        *time = *time < seconds ? *time : seconds;
    else
        *time += NEWEST_TIME * ((seconds < most ? seconds : most) - *time);
    *passes += *passes < FEW_TIMES;
    d->context = context;
    d->contexts[context].answered++;
    d->spent += seconds;
}

void drafts_judge(drafts *d, uint32_t drafted, uint32_t accepted)
{
    d->drafted += drafted;
    d->contexts[d->context].answered += accepted;
    learn(d, d->kind, accepted + (accepted < drafted), accepted); /* tokens behind the first wrong one say nothing */
}

double drafts_gain(const drafts *d)
{
    double alone = 0, each = 0; /* seconds of the answer without drafts; of a token, maybe in a shorter context */
    for (uint32_t context = 0; context <= DRAFT_CONTEXTS; context++) {
        each = d->contexts[context].passes[1] ? d->contexts[context].times[1] : each;
        alone += d->contexts[context].answered * each;
    }
    return d->drafted && d->spent > 0 ? alone / d->spent : 0;
}
