/* From logits to the next token: a port of edge/run/sampler.py, with the generator that it draws from, which is NumPy's:
 * SeedSequence, PCG64 (XSL RR, O'Neill 2014) and Generator.choice. */
#include <math.h>
#include <string.h>

#include "internal.h"

enum { PENALTY_WINDOW = 64 };
static const double COLDEST = 1e-30;

typedef struct { uint64_t high, low; } wide;
typedef struct { float logit; int32_t token; } candidate;

struct sampler {
    sampling params;
    uint32_t vocab, recent_count, recent_at;
    int32_t recent[PENALTY_WINDOW];
    const int32_t *banned[2];
    uint32_t banned_count[2];
    wide state, increment;
    candidate *candidates;     /* [vocab] */
    double *kept, *powers;     /* [vocab] */
};

sampler *sampler_layout(arena *from, uint32_t vocab)
{
    sampler *s = take(from, sizeof *s);
    candidate *candidates = take(from, vocab * sizeof *candidates);
    double *kept = take(from, vocab * sizeof *kept), *powers = take(from, vocab * sizeof *powers);
    if (s) {
        s->vocab = vocab;
        s->candidates = candidates;
        s->kept = kept;
        s->powers = powers;
    }
    return s;
}

/* ---- the generator ----------------------------------------------------------------------------------------------- */

static wide add(wide one, wide other)
{
    uint64_t low = one.low + other.low;
    return (wide){one.high + other.high + (low < one.low), low};
}

/* 64 by 64 bits. */
static wide product(uint64_t one, uint64_t other)
{
    uint64_t a = one >> 32, b = (uint32_t)one, c = other >> 32, d = (uint32_t)other;
    uint64_t middle = a * d + (b * d >> 32), rest = b * c + (uint32_t)middle;
    return (wide){a * c + (middle >> 32) + (rest >> 32), rest << 32 | (uint32_t)(b * d)};
}

static void step(sampler *s)
{
    static const wide multiplier = {2549297995355413924u, 4865540595714422341u};
    wide times = product(s->state.low, multiplier.low);
    times.high += s->state.high * multiplier.low + s->state.low * multiplier.high;
    s->state = add(times, s->increment);
}

static uint64_t next_bits(sampler *s)
{
    step(s);
    uint64_t folded = s->state.high ^ s->state.low;
    uint32_t turned = (uint32_t)(s->state.high >> 58);
    return folded >> turned | folded << (-turned & 63);
}

static double next_uniform(sampler *s)
{
    return (double)(next_bits(s) >> 11) * (1.0 / 9007199254740992.0);
}

static uint32_t hash_mix(uint32_t value, uint32_t *by, uint32_t times)
{
    value ^= *by;
    *by *= times;
    value *= *by;
    return value ^ value >> 16;
}

static void seed_generator(sampler *s, uint64_t seed)
{
    uint32_t pool[4], state[8], by = 0x43b0d7e5u;
    for (int i = 0; i < 4; i++)
        pool[i] = hash_mix(i == 0 ? (uint32_t)seed : i == 1 ? (uint32_t)(seed >> 32) : 0, &by, 0x931e8875u);
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++)
            if (from != to) {
                uint32_t mixed = 0xca01f9ddu * pool[to] - 0x4973f715u * hash_mix(pool[from], &by, 0x931e8875u);
                pool[to] = mixed ^ mixed >> 16;
            }
    by = 0x8b51f9ddu;
    for (int i = 0; i < 8; i++)
        state[i] = hash_mix(pool[i % 4], &by, 0x58f38dedu);
    uint64_t numbers[4];
    memcpy(numbers, state, sizeof numbers);
    wide start = {numbers[0], numbers[1]};
    s->increment = (wide){numbers[2] << 1 | numbers[3] >> 63, numbers[3] << 1 | 1};
    s->state = (wide){0, 0};
    step(s);
    s->state = add(s->state, start);
    step(s);
}

/* ---- probabilities ------------------------------------------------------------------------------------------------ */

/* In NumPy's order: pairwise, in blocks of 128. */
static double sum(const double *values, size_t count)
{
    if (count < 8) {
        double total = 0;
        for (size_t i = 0; i < count; i++)
            total += values[i];
        return total;
    }
    if (count > 128) {
        size_t half = count / 2 / 8 * 8;
        return sum(values, half) + sum(values + half, count - half);
    }
    double parts[8];
    size_t at = 8;
    memcpy(parts, values, sizeof parts);
    for (; at + 8 <= count; at += 8)
        for (int i = 0; i < 8; i++)
            parts[i] += values[at + i];
    double total = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
    for (; at < count; at++)
        total += values[at];
    return total;
}

/* Of values of which the largest comes first. */
static void softmax(const double *values, double *out, size_t count)
{
    for (size_t i = 0; i < count; i++)
        out[i] = exp(values[i] - values[0]);
    double total = sum(out, count);
    for (size_t i = 0; i < count; i++)
        out[i] /= total;
}

static size_t count_top_p(const double *probabilities, size_t count, double p)
{
    double total = 0;
    size_t below = 0;
    if (p >= 1)
        return count;
    while (below < count && (total += probabilities[below]) < p)
        below++;
    return below + 1;
}

static size_t count_min_p(const double *probabilities, size_t count, double p)
{
    size_t found = 0;
    for (size_t i = 0; i < count; i++)
        found += probabilities[i] >= p * probabilities[0];
    return found;
}

/* ---- the largest logits -------------------------------------------------------------------------------------------- */

static bool comes_first(candidate one, candidate other)
{
    return one.logit > other.logit || (one.logit == other.logit && one.token < other.token);
}

/* A heap whose top comes last of all. */
static void sink(candidate *heap, size_t count, size_t at)
{
    candidate own = heap[at];
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && comes_first(heap[child], heap[child + 1]);
        if (!comes_first(own, heap[child]))
            break;
        heap[at] = heap[child];
    }
    heap[at] = own;
}

/* The `count` largest, which come first then. */
static void find_largest(sampler *s, const float *logits, size_t count)
{
    candidate *heap = s->candidates;
    for (size_t i = 0; i < count; i++)
        heap[i] = (candidate){logits[i], (int32_t)i};
    for (size_t i = count / 2; i-- > 0;)
        sink(heap, count, i);
    for (size_t i = count; i < s->vocab; i++)
        if (logits[i] > heap[0].logit) {
            heap[0] = (candidate){logits[i], (int32_t)i};
            sink(heap, count, 0);
        }
    for (size_t left = count; left-- > 1;) {
        candidate last = heap[0];
        heap[0] = heap[left];
        heap[left] = last;
        sink(heap, left, 0);
    }
}

/* ---- tokens --------------------------------------------------------------------------------------------------------- */

void sampler_start(sampler *s, const sampling *params, const int32_t *banned, uint32_t banned_count,
                   const int32_t *more, uint32_t more_count)
{
    s->params = *params;
    s->recent_count = s->recent_at = 0;
    s->banned[0] = banned;
    s->banned[1] = more;
    s->banned_count[0] = banned_count;
    s->banned_count[1] = more_count;
    if (params->temperature > 0)
        seed_generator(s, params->seed);
}

static void penalize(sampler *s, float *logits)
{
    float penalty = (float)s->params.repeat_penalty;
    for (uint32_t i = 0; i < s->recent_count; i++) {
        int32_t token = s->recent[i];
        bool again = false;
        for (uint32_t before = 0; before < i && !again; before++)
            again = s->recent[before] == token;
        if (!again)
            logits[token] = logits[token] > 0 ? logits[token] / penalty : logits[token] * penalty;
    }
}

/* The first of the largest; -1 if there is NaN. */
static int32_t greedy(const float *logits, uint32_t vocab)
{
    uint32_t best = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (isnan(logits[i]))
            return -1;
        if (logits[i] > logits[best])
            best = i;
    }
    return (int32_t)best;
}

static int32_t draw(sampler *s, const float *logits)
{
    int32_t best = greedy(logits, s->vocab);
    if (best < 0 || !isfinite(logits[best]))
        return -1;
    const sampling *params = &s->params;
    size_t count = params->top_k && params->top_k < s->vocab ? params->top_k : s->vocab;
    find_largest(s, logits, count);
    for (size_t i = 0; i < count; i++)
        s->kept[i] = (double)s->candidates[i].logit;
    softmax(s->kept, s->powers, count);
    size_t keep = count_top_p(s->powers, count, params->top_p), other = count_min_p(s->powers, count, params->min_p);
    keep = keep < other ? keep : other;
    keep = keep ? keep : 1;
    double first = s->kept[0], temperature = params->temperature > COLDEST ? params->temperature : COLDEST;
    for (size_t i = 0; i < keep; i++)
        s->kept[i] = (s->kept[i] - first) / temperature;
    softmax(s->kept, s->powers, keep);
    for (size_t i = 1; i < keep; i++)
        s->powers[i] += s->powers[i - 1];
    double uniform = next_uniform(s), total = s->powers[keep - 1];
    size_t chosen = 0;
    while (chosen + 1 < keep && s->powers[chosen] / total <= uniform)
        chosen++;
    return s->candidates[chosen].token;
}

int32_t sampler_next(sampler *s, float *logits)
{
    for (int list = 0; list < 2; list++)
        for (uint32_t i = 0; i < s->banned_count[list]; i++)
            logits[s->banned[list][i]] = -INFINITY;
    penalize(s, logits);
    int32_t token = s->params.temperature > 0 ? draw(s, logits) : greedy(logits, s->vocab);
    if (token >= 0 && s->params.repeat_penalty != 1.0) {
        s->recent[s->recent_at] = token;
        s->recent_at = (s->recent_at + 1) % PENALTY_WINDOW;
        s->recent_count += s->recent_count < PENALTY_WINDOW;
    }
    return token;
}
