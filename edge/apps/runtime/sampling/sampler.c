/* Draws the next token: a port of edge/run/sampling/sampler.py, and of the parts of NumPy that it uses
 * (Generator.choice, the pairwise sum), so that equal seeds draw equal tokens. */
#include <math.h>
#include <string.h>

#include "dry.h"
#include "random.h"
#include "sampler.h"

enum { BLOCK = 64 };                 /* logits compared at once */
static const double MARGIN = 1e-6;   /* of a bound on logits, since log, exp and a float are rounded */

struct sampler {
    sampling params;
    generator random;
    const int32_t *banned[2];
    uint32_t banned_count[2], vocab, drawn; /* drawn: number of tokens so far, if a penalty needs them */
    int32_t recent[PENALTY_WINDOW];
    int32_t biased[MOST_BIASES];
    float biases[MOST_BIASES];
    uint32_t bias_count;
    dry_text answer; /* of DRY */
    dry_breaks breaks;
    const void *vocabulary;
    /* Each [vocab]; with top-k, later pages are never touched. */
    int32_t *tokens; /* of the largest logits */
    double *powers;
    uint64_t *keys;  /* shares the memory of `powers`, and is used before them */
};

/* ---- the largest logits ------------------------------------------------------------------------------------------- */

typedef float lanes __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t masks __attribute__((vector_size(16)));

/* Returns the first index from `at` on whose logit is greater than `bound` or NaN; `count` if there is none. */
static uint32_t next_above(const float *logits, uint32_t at, uint32_t count, float bound)
{
    const lanes bounds = {bound, bound, bound, bound};
    for (; at + BLOCK <= count; at += BLOCK) {
        masks below = {-1, -1, -1, -1};
        for (uint32_t i = 0; i < BLOCK; i += 4)
            below &= *(const lanes *)(logits + at + i) <= bounds;
        if ((below[0] & below[1] & below[2] & below[3]) == 0)
            break;
    }
    while (at < count && logits[at] <= bound)
        at++;
    return at;
}

/* The likeliest token; -1 for NaN. */
static int32_t greedy(const float *logits, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t at = 0; at < count; at = next_above(logits, at + 1, count, logits[best])) {
        best = at;
        if (isnan(logits[best]))
            return -1;
    }
    return (int32_t)best;
}

/* A key that sorts tokens: it is greater for larger logits, and among equals for smaller ids. */
static uint64_t key_of(const float *logits, uint32_t token)
{
    float logit = logits[token] + 0.0f; /* turns -0 into 0 */
    uint32_t bits;
    memcpy(&bits, &logit, sizeof bits);
    bits ^= bits >> 31 ? UINT32_MAX : 1u << 31;
    return (uint64_t)bits << 32 | ~token;
}

static uint32_t token_of(uint64_t key)
{
    return ~(uint32_t)key;
}

/* Moves a key down to its place in a min-heap. */
static void sink(uint64_t *heap, uint32_t count, uint32_t at)
{
    uint64_t key = heap[at];
    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1] < heap[child];
        if (key <= heap[child])
            break;
        heap[at] = heap[child];
    }
    heap[at] = key;
}

/* Writes the keys of the k largest logits to `heap`, largest first. No logit is NaN. */
static void top_k(const float *logits, uint32_t count, uint64_t *heap, uint32_t k)
{
    for (uint32_t at = 0; at < k; at++)
        heap[at] = key_of(logits, at);
    for (uint32_t at = k / 2; at-- > 0;)
        sink(heap, k, at);
    for (uint32_t at = k; (at = next_above(logits, at, count, logits[token_of(heap[0])])) < count; at++) {
        heap[0] = key_of(logits, at);
        sink(heap, k, 0);
    }
    for (uint32_t left = k; left-- > 1;) {
        uint64_t last = heap[0];
        heap[0] = heap[left];
        heap[left] = last;
        sink(heap, left, 0);
    }
}

/* ---- a draw --------------------------------------------------------------------------------------------------------- */

/* NumPy's pairwise sum: the order determines rounding. */
static double pairwise_sum(const double *values, uint32_t count)
{
    double sum = 0, parts[8];
    uint32_t at = 0;
    if (count > 128) {
        uint32_t half = count / 2 / 8 * 8;
        return pairwise_sum(values, half) + pairwise_sum(values + half, count - half);
    }
    if (count >= 8) {
        memcpy(parts, values, sizeof parts);
        for (at = 8; at + 8 <= count; at += 8)
            for (uint32_t i = 0; i < 8; i++)
                parts[i] += values[at + i];
        sum = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    }
    for (; at < count; at++)
        sum += values[at];
    return sum;
}

/* Probabilities of these tokens, of logits divided by the temperature; a temperature of 1 is exact. largest: logit. */
static void softmax(const float *logits, const int32_t *tokens, uint32_t count, double largest, double temperature,
                    double *out)
{
    for (uint32_t i = 0; i < count; i++)
        out[i] = exp(((double)logits[tokens[i]] - largest) / temperature);
    double sum = pairwise_sum(out, count);
    for (uint32_t i = 0; i < count; i++)
        out[i] /= sum;
}

/* Number of sorted probabilities that make up at least `top`, and are each at least `least` times the largest. */
static uint32_t cut(const double *probabilities, uint32_t count, double top, double least)
{
    double sum = 0;
    uint32_t keep = 0;
    while (keep < count && probabilities[keep] >= least * probabilities[0] && (top >= 1 || sum < top))
        sum += probabilities[keep++];
    return keep ? keep : 1;
}

/* As `cut`, over the whole vocabulary, of which only the kept tokens are sorted. Writes them to s->tokens, likeliest
 * first. */
static uint32_t cut_all(sampler *s, const float *logits, int32_t likeliest)
{
    const double largest = logits[likeliest], top = s->params.top_p, least = s->params.min_p;
    double total = 1, sum = 0;
    if (top < 1) {
        for (uint32_t i = 0; i < s->vocab; i++)
            s->powers[i] = exp((double)logits[i] - largest);
        total = pairwise_sum(s->powers, s->vocab);
    }
    const double least_logit = least > 0 ? largest + log(least) : -INFINITY;
    const float bound = (float)(least_logit - MARGIN * (1 + fabs(least_logit)));
    uint32_t held = 0, kept = 0;
    for (uint32_t at = 0; (at = next_above(logits, at, s->vocab, bound)) < s->vocab; at++)
        s->keys[held++] = ~key_of(logits, at); /* inverted, so that the likeliest is on top of the heap */
    for (uint32_t at = held / 2; at-- > 0;)
        sink(s->keys, held, at);
    while (held && (top >= 1 || sum < top)) {
        uint32_t token = token_of(~s->keys[0]);
        double probability = exp((double)logits[token] - largest) / total;
        if (probability < least / total)
            break;
        sum += probability;
        s->tokens[kept++] = (int32_t)token;
        s->keys[0] = s->keys[--held];
        sink(s->keys, held, 0);
    }
    s->tokens[0] = likeliest;
    return kept ? kept : 1;
}

/* Generator.choice(count, p=probabilities) */
static uint32_t choose(generator *random, const double *probabilities, uint32_t count)
{
    double sum = 0, all = 0, drawn = next_uniform(random);
    for (uint32_t i = 0; i < count; i++)
        all += probabilities[i];
    for (uint32_t i = 0; i < count; i++) {
        sum += probabilities[i];
        if (sum / all > drawn)
            return i;
    }
    return count - 1;
}

/* Writes the tokens that top-k, top-p and min-p leave to s->tokens, sorted unless nothing is cut. Returns their number. */
static uint32_t cut_tokens(sampler *s, const float *logits, int32_t likeliest)
{
    const sampling *params = &s->params;
    if (!params->top_k && (params->top_p < 1 || params->min_p > 0))
        return cut_all(s, logits, likeliest);
    if (!params->top_k) {
        for (uint32_t i = 0; i < s->vocab; i++)
            s->tokens[i] = (int32_t)i;
        return s->vocab;
    }
    uint32_t count = params->top_k < s->vocab ? params->top_k : s->vocab;
    top_k(logits, s->vocab, s->keys, count);
    for (uint32_t i = 0; i < count; i++)
        s->tokens[i] = (int32_t)token_of(s->keys[i]);
    softmax(logits, s->tokens, count, logits[likeliest], 1, s->powers);
    return cut(s->powers, count, params->top_p, params->min_p);
}

/* XTC ("Exclude Top Choices", text-generation-webui #6335): drops the tokens whose probability reaches the threshold but for
 * the least likely of them, as often as its probability says. Forbidden tokens, of probability 0, are none of them. Returns
 * the number of s->tokens that stay. */
static uint32_t exclude_top(sampler *s, const float *logits, uint32_t count, int32_t likeliest)
{
    const double threshold = s->params.xtc_threshold;
    if (s->params.xtc_probability <= 0 || threshold > 0.5 || next_uniform(&s->random) >= s->params.xtc_probability)
        return count;
    softmax(logits, s->tokens, count, logits[likeliest], 1, s->powers);
    uint32_t least = count, kept = 0;
    for (uint32_t i = 0; i < count; i++)
        if (s->powers[i] > 0 && s->powers[i] >= threshold && (least == count || s->powers[i] < s->powers[least]))
            least = i;
    for (uint32_t i = 0; i < count; i++)
        if (s->powers[i] <= 0 || s->powers[i] < threshold || i == least)
            s->tokens[kept++] = s->tokens[i];
    return kept;
}

static double largest_of(const float *logits, const int32_t *tokens, uint32_t count)
{
    double largest = -INFINITY;
    for (uint32_t i = 0; i < count; i++)
        largest = logits[tokens[i]] > largest ? logits[tokens[i]] : largest;
    return largest;
}

static int32_t draw(sampler *s, const float *logits)
{
    const double temperature = s->params.temperature > COLDEST ? s->params.temperature : COLDEST;
    int32_t likeliest = greedy(logits, s->vocab);
    if (likeliest < 0 || !isfinite(logits[likeliest]))
        return -1;
    uint32_t count = exclude_top(s, logits, cut_tokens(s, logits, likeliest), likeliest);
    softmax(logits, s->tokens, count, largest_of(logits, s->tokens, count), temperature, s->powers);
    return s->tokens[choose(&s->random, s->powers, count)];
}

/* ---- the sampler ------------------------------------------------------------------------------------------------- */

sampler *sampler_layout(arena *from, uint32_t vocab)
{
    sampler *s = take(from, sizeof *s);
    int32_t *tokens = take(from, vocab * sizeof *tokens);
    double *powers = take(from, vocab * sizeof *powers);
    if (s) {
        s->vocab = vocab;
        s->tokens = tokens;
        s->powers = powers;
        s->keys = (uint64_t *)(void *)powers;
        sampler_unbias(s);
    }
    return s;
}

void sampler_start(sampler *s, const sampling *params, const int32_t *banned, uint32_t banned_count,
                   const int32_t *more, uint32_t more_count)
{
    s->params = *params;
    s->banned[0] = banned;
    s->banned[1] = more;
    s->banned_count[0] = banned_count;
    s->banned_count[1] = more_count;
    s->drawn = s->answer.count = 0;
    seed_generator(&s->random, params->seed);
}

void sampler_bias(sampler *s, uint32_t at, int32_t token, float bias)
{
    s->biased[at] = token;
    s->biases[at] = bias;
    s->bias_count = at + 1;
}

void sampler_unbias(sampler *s)
{
    s->bias_count = 0;
}

void sampler_ban(const sampler *s, float *logits)
{
    for (int list = 0; list < 2; list++)
        for (uint32_t i = 0; i < s->banned_count[list]; i++)
            if ((uint32_t)s->banned[list][i] < s->vocab)
                logits[s->banned[list][i]] = -INFINITY;
}

void sampler_read(sampler *s, dry_breaks breaks, const void *vocabulary)
{
    s->breaks = breaks;
    s->vocabulary = vocabulary;
}

static bool penalizes(const sampling *params)
{
    return params->repeat_penalty != 1 || params->presence_penalty != 0 || params->frequency_penalty != 0;
}

/* Penalizes each recent token: `penalize` and `subtract` of sampler.py. */
static void penalize(const sampler *s, float *logits)
{
    const float penalty = (float)s->params.repeat_penalty, presence = (float)s->params.presence_penalty,
                frequency = (float)s->params.frequency_penalty;
    uint32_t count = s->drawn < PENALTY_WINDOW ? s->drawn : PENALTY_WINDOW;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t earlier = 0, times = 0;
        while (s->recent[earlier] != s->recent[i])
            earlier++;
        if (earlier < i)
            continue;
        for (uint32_t other = i; other < count; other++)
            times += s->recent[other] == s->recent[i];
        float *logit = logits + s->recent[i];
        *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
        *logit -= (float)times * frequency + presence;
    }
}

/* Whether the choice needs more than the largest logits. */
static bool reads_all(const sampler *s)
{
    return s->bias_count || s->params.dry_multiplier > 0 || penalizes(&s->params);
}

uint32_t sampler_candidates(const sampler *s)
{
    uint64_t drawn = s->params.temperature > 0 ? s->params.top_k : 1;
    uint64_t count = drawn + s->banned_count[0] + s->banned_count[1];
    return drawn && count <= MOST_TOP && !reads_all(s) ? (uint32_t)count : 0;
}

bool sampler_picks(const sampler *s, int32_t *banned, uint32_t *count)
{
    if (s->params.temperature > 0 || reads_all(s) || s->banned_count[0] + s->banned_count[1] > MOST_BANS)
        return false;
    *count = 0;
    for (int list = 0; list < 2; list++)
        for (uint32_t i = 0; i < s->banned_count[list]; i++)
            banned[(*count)++] = s->banned[list][i];
    return true;
}

int32_t sampler_next(sampler *s, float *logits)
{
    for (uint32_t i = 0; i < s->bias_count; i++)
        logits[s->biased[i]] += s->biases[i];
    sampler_ban(s, logits);
    penalize(s, logits);
    const sampling *params = &s->params;
    const bool repeats = params->dry_multiplier > 0 && s->breaks;
    if (repeats && s->answer.count) {
        dry_options how = {params->dry_multiplier, params->dry_base, params->dry_allowed_length, params->dry_last_n};
        dry_penalize(&s->answer, how, s->breaks, s->vocabulary, s->tokens, logits);
    }
    int32_t token = s->params.temperature > 0 ? draw(s, logits) : greedy(logits, s->vocab);
    if (penalizes(&s->params) && token >= 0)
        s->recent[s->drawn++ % PENALTY_WINDOW] = token;
    if (repeats && token >= 0)
        dry_add(&s->answer, token);
    return token;
}
