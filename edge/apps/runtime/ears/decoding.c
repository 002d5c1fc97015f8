/* From a window that was heard to its tokens: a port of edge/run/speech/decoding.py and rules.py. */
#include <math.h>
#include <string.h>

#include "context.h"
#include "decoding.h"
#include "deflate.h"
#include "hearing.h"
#include "kv.h"
#include "pass.h"
#include "random.h"
#include "session.h"
#include "utf8.h"
#include "vocabulary.h"

struct decoder {
    const hearing_config *config;
    uint32_t vocab, most;       /* most: tokens of a text */
    deflater *deflater;
    generator random;
    float *logits, *first;      /* [vocab]: of the next token; of the first one */
    int32_t *tokens, *prompt;   /* [most]; [most + 1] */
    float *logprobs;            /* [most] */
    char *text;                 /* [text_bytes] */
};

decoder *decoder_layout(arena *from, const edge_model *model)
{
    const hearing_config *config = model_hearing(model);
    decoder *d = take(from, sizeof *d), counted, *own = d ? d : &counted;
    own->config = config;
    own->vocab = model->config->vocab;
    own->most = model->config->context / 2;
    own->deflater = deflater_layout(from);
    own->logits = take(from, own->vocab * sizeof *own->logits);
    own->first = take(from, own->vocab * sizeof *own->first);
    own->tokens = take(from, own->most * sizeof *own->tokens);
    own->logprobs = take(from, own->most * sizeof *own->logprobs);
    own->prompt = take(from, (own->most + 1) * sizeof *own->prompt);
    own->text = take(from, config->text_bytes);
    return d;
}

/* ---- rules ---------------------------------------------------------------------------------------------------------- */

static void forbid(float *logits, uint32_t from, uint32_t to)
{
    for (uint32_t token = from; token < to; token++)
        logits[token] = -INFINITY;
}

static float greatest(const float *logits, uint32_t from, uint32_t to)
{
    float found = -INFINITY;
    for (uint32_t token = from; token < to; token++)
        found = logits[token] > found ? logits[token] : found;
    return found;
}

static double sum_of_powers(const float *logits, uint32_t from, uint32_t to, float most)
{
    double sum = 0;
    for (uint32_t token = from; token < to; token++)
        sum += logits[token] == -INFINITY ? 0 : (double)expf(logits[token] - most);
    return sum;
}

/* Timestamps come in pairs, one at the end of a text and one at the beginning of the next, and never fall. */
static void apply_timestamps(const decoder *d, float *logits, uint32_t count)
{
    const uint32_t first = d->config->first_timestamp, vocab = d->vocab;
    const int32_t *tokens = d->tokens, stamp = (int32_t)first;
    if (!count) {
        forbid(logits, 0, first);
        forbid(logits, smaller(first + LATEST_FIRST + 1, vocab), vocab);
    } else {
        const bool ended = tokens[count - 1] >= stamp, paired = count < 2 || tokens[count - 2] >= stamp;
        uint32_t last = count;
        if (ended && paired)
            forbid(logits, first, vocab); /* text comes */
        else if (ended)
            forbid(logits, 0, d->config->eot); /* a second one, or the end */
        while (last && tokens[last - 1] < stamp)
            last--;
        if (last) /* the second of a pair may equal the first; others rise, so that no segment is empty */
            forbid(logits, first, smaller((uint32_t)tokens[last - 1] + !(ended && !paired), vocab));
    }
    const float text = greatest(logits, 0, first), time = greatest(logits, first, vocab);
    if (time > -INFINITY && (double)time + log(sum_of_powers(logits, first, vocab, time)) > (double)text)
        forbid(logits, 0, first); /* all timestamps together are likelier than the likeliest text */
}

static void apply_rules(const decoder *d, float *logits, uint32_t count)
{
    for (uint32_t i = 0; i < d->config->never; i++)
        logits[hearing_never(d->config)[i]] = -INFINITY;
    for (uint32_t i = 0; !count && i < d->config->blank; i++)
        logits[hearing_blank(d->config)[i]] = -INFINITY;
    apply_timestamps(d, logits, count);
}

/* ---- tokens --------------------------------------------------------------------------------------------------------- */

/* A random token at this temperature, as numpy.searchsorted finds it among cumulated probabilities. */
static uint32_t draw(decoder *d, double temperature)
{
    const float *logits = d->logits, cold = (float)temperature, most = greatest(logits, 0, d->vocab) / cold;
    double sum = 0, all = 0, normal = 0;
    for (uint32_t token = 0; token < d->vocab; token++)
        normal += exp((double)(logits[token] / cold - most));
    const float log_normal = (float)log(normal);
    for (uint32_t token = 0; token < d->vocab; token++)
        all += exp((double)(logits[token] / cold - most - log_normal));
    const double drawn = next_uniform(&d->random) * all;
    uint32_t last = 0;
    for (uint32_t token = 0; token < d->vocab; token++) {
        sum += exp((double)(logits[token] / cold - most - log_normal));
        if (sum >= drawn)
            return token;
        last = logits[token] > -INFINITY ? token : last;
    }
    return last;
}

static double log_probability(const decoder *d, uint32_t token)
{
    const float most = greatest(d->logits, 0, d->vocab);
    return (double)(d->logits[token] - most) - log(sum_of_powers(d->logits, 0, d->vocab, most));
}

/* Runs tokens behind the rows. */
static edge_finish run_all(edge_session *s, const int32_t *ids, uint32_t count)
{
    for (uint32_t at = 0, part; at < count; at += part) {
        part = smaller(s->model->config->chunk, count - at);
        edge_finish reason = context_look(s, part);
        if (reason)
            return reason;
        if (part > kv_free(s->rows))
            return EDGE_MEMORY; /* rows were returned to the system */
        s->logits = pass_run(s->pass, ids + at, part, 0, NULL);
        if (!s->logits) {
            s->failed = true;
            return EDGE_INTERRUPTED;
        }
        context_note_share(s, 1);
        s->ran += part;
    }
    return EDGE_GOING;
}

static edge_finish run(decoder *d, edge_session *s, const int32_t *tokens, uint32_t count)
{
    const edge_finish reason = run_all(s, tokens, count);
    if (!reason)
        memcpy(d->logits, s->logits, d->vocab * sizeof *d->logits);
    return reason;
}

const char *stripped(const char *text, uint32_t *length)
{
    /* The code points that Python's str.strip removes: up to U+0020, and the rest of Unicode's spaces. */
    static const uint16_t wide[] = {0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000};
    uint32_t begin = 0, end = 0;
    bool any = false;
    for (uint32_t at = 0; at < *length;) {
        uint32_t point;
        bool whole;
        const uint32_t size = (uint32_t)utf8_read((const uint8_t *)text + at, *length - at, &point, &whole);
        bool space = (point >= 9 && point <= 13) || (point >= 28 && point <= 32) || (point >= 0x2000 && point <= 0x200A);
        for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
            space |= point == wide[i];
        if (!space) {
            begin = any ? begin : at;
            end = at + size;
            any = true;
        }
        at += size;
    }
    *length = end - begin;
    return text + begin;
}

uint32_t decoder_text(const decoder *d, const edge_session *s, const int32_t *tokens, uint32_t count, char *out)
{
    utf8_joiner joiner = {.count = 0};
    uint32_t length = 0;
    for (uint32_t i = 0; i < count; i++) {
        size_t size;
        if (tokens[i] >= (int32_t)d->config->eot)
            continue;
        const uint8_t *piece = vocabulary_piece(s->vocabulary, tokens[i], &size);
        if (length + 3 * (joiner.count + size) > d->config->text_bytes) /* each byte may become U+FFFD; of a damaged file */
            break;
        length += (uint32_t)utf8_feed(&joiner, (const char *)piece, size, out + length);
    }
    if (joiner.count) /* an incomplete character */
        length += (uint32_t)utf8_write(UTF8_REPLACEMENT, (uint8_t *)out + length);
    return length;
}

static double compression(decoder *d, const edge_session *s, uint32_t count)
{
    uint32_t length = decoder_text(d, s, d->tokens, count, d->text);
    const char *text = stripped(d->text, &length);
    length = smaller(length, MOST_DEFLATED);
    return (double)length / deflated_size(d->deflater, (const uint8_t *)text, length);
}

static edge_finish sample_text(decoder *d, edge_session *s, double temperature, decoded *found)
{
    const uint32_t context = s->model->config->context, most = smaller(d->most, context - kv_length(s->rows));
    double sum = 0;
    uint32_t count = 0;
    while (count < most) {
        apply_rules(d, d->logits, count);
        const uint32_t token = temperature > 0 ? draw(d, temperature) : likeliest(d->logits, d->vocab);
        const double logprob = log_probability(d, token);
        if (!isfinite(logprob)) {
            s->failed = true;
            return EDGE_INTERRUPTED;
        }
        sum += logprob;
        if (token == d->config->eot)
            break;
        d->logprobs[count] = (float)logprob;
        d->tokens[count++] = (int32_t)token;
        if (kv_length(s->rows) == context)
            break;
        const edge_finish reason = run(d, s, d->tokens + count - 1, 1);
        if (reason)
            return reason;
    }
    found->tokens = d->tokens;
    found->logprobs = d->logprobs;
    found->count = count;
    found->logprob = sum / (count + 1);
    found->temperature = temperature;
    found->ratio = compression(d, s, count);
    found->silent = found->no_speech > NO_SPEECH && found->logprob <= LEAST_LOGPROB;
    return EDGE_GOING;
}

edge_finish decoder_language(decoder *d, edge_session *s, uint32_t *language)
{
    const int32_t sot = (int32_t)d->config->sot, *tokens = hearing_languages(d->config);
    kv_clear(s->rows);
    const edge_finish reason = run(d, s, &sot, 1);
    for (uint32_t i = *language = 0; !reason && i < d->config->languages; i++)
        if (d->logits[tokens[i]] > d->logits[tokens[*language]])
            *language = i;
    return reason;
}

edge_finish decoder_run(decoder *d, edge_session *s, const int32_t *before, uint32_t before_count, const int32_t *opening,
                        uint32_t opening_count, uint64_t seed, double temperature, decoded *found)
{
    uint32_t count = 0;
    const uint32_t kept = smaller(before_count, d->most - 1);
    seed_generator(&d->random, seed);
    kv_clear(s->rows);
    if (kept)
        d->prompt[count++] = (int32_t)d->config->prev;
    memcpy(d->prompt + count, before + before_count - kept, kept * sizeof *before);
    d->prompt[count + kept] = opening[0];
    edge_finish reason = run(d, s, d->prompt, count + kept + 1);
    if (reason)
        return reason;
    const float most = greatest(d->logits, 0, d->vocab);
    found->no_speech = (double)expf(d->logits[d->config->no_speech] - most) / sum_of_powers(d->logits, 0, d->vocab, most);
    if (opening_count > 1 && (reason = run(d, s, opening + 1, opening_count - 1)))
        return reason;
    memcpy(d->first, d->logits, d->vocab * sizeof *d->first);
    const uint32_t begun = kv_length(s->rows), tries = temperature < 0 ? sizeof TEMPERATURES / sizeof *TEMPERATURES : 1;
    for (uint32_t i = 0; i < tries; i++) {
        if (i)
            kv_truncate(s->rows, begun);
        memcpy(d->logits, d->first, d->vocab * sizeof *d->first);
        reason = sample_text(d, s, temperature < 0 ? TEMPERATURES[i] : temperature, found);
        if (reason || found->silent || !(found->ratio > MOST_COMPRESSION || found->logprob < LEAST_LOGPROB))
            break;
    }
    return reason;
}
