/* A port of edge/run/speech/words.py: the path of greatest cross attention through a window. Behind the tables of section STEM there
 * are a float, the norm's epsilon, and for each head whose attention follows the sound
 *
 *     int32 layer, head
 *     float queries[head size][hidden], bias[head size]   with the norm's weights and the scale */
#include <math.h>
#include <string.h>

#include "align.h"
#include "context.h"
#include "decoding.h"
#include "hearing.h"
#include "kv.h"
#include "matrix.h"
#include "pass.h"
#include "session.h"
#include "stem.h"
#include "utf8.h"
#include "vocabulary.h"

enum { WIDTH = 7, REACH = WIDTH / 2 }; /* positions over which the median is taken */
enum { BOTH, DOWN, RIGHT };            /* steps of a path */
enum { WORD_BYTES = 128 };             /* of a word's figures in JSON */

struct aligner {
    const hearing_config *config;
    uint32_t rows, positions, hidden, size;
    int32_t *tokens;    /* [rows] */
    uint32_t *starts;   /* [rows]: the first position of a token */
    float *states, *queries, *keys; /* [rows][hidden]; [rows][size]; [positions][size] */
    float *paid, *cost; /* [rows][positions] */
    uint8_t *steps;     /* [rows][positions] */
    float *lengths;     /* [rows] */
    timed_word *words;  /* [rows] */
    char *text;         /* [text_bytes]: of all tokens */
    uint32_t *ends;     /* [rows]: bytes of the text up to each token's, the one before the first included */
    bool cut;           /* the text is longer than text_bytes: the file is damaged */
    char *json;         /* [JSON_BYTES]: the words of a segment */
};

#define JSON_BYTES(a) (2ull * (a)->config->text_bytes + (uint64_t)WORD_BYTES * (a)->rows)

aligner *aligner_layout(arena *from, const edge_model *model)
{
    const hearing_config *config = model_hearing(model);
    aligner *a = take(from, sizeof *a), counted, *own = a ? a : &counted;
    own->config = config;
    own->rows = model->config->context / 2 + ALIGNED_TOKENS;
    own->positions = config->frames / 2, own->hidden = model->config->hidden, own->size = model->config->head;
    const uint64_t rows = own->rows, cells = rows * own->positions;
    own->tokens = take(from, rows * sizeof *own->tokens);
    own->starts = take(from, rows * sizeof *own->starts);
    own->states = take(from, rows * own->hidden * sizeof *own->states);
    own->queries = take(from, rows * own->size * sizeof *own->queries);
    own->keys = take(from, (uint64_t)own->positions * own->size * sizeof *own->keys);
    own->paid = take(from, cells * sizeof *own->paid);
    own->cost = take(from, cells * sizeof *own->cost);
    own->steps = take(from, cells);
    own->lengths = take(from, rows * sizeof *own->lengths);
    own->words = take(from, rows * sizeof *own->words);
    own->text = take(from, config->text_bytes);
    own->ends = take(from, rows * sizeof *own->ends);
    own->json = take(from, JSON_BYTES(own));
    return a;
}

/* ---- attention ------------------------------------------------------------------------------------------------------ */

typedef struct { int32_t layer, head; float values[]; } aligned_head;

static size_t head_bytes(uint32_t hidden, uint32_t size)
{
    return sizeof(aligned_head) + ((size_t)size * hidden + size) * sizeof(float);
}

static const aligned_head *head_of(const stem_config *data, uint32_t number, uint32_t size)
{
    return (const aligned_head *)((const uint8_t *)(stem_end(data) + 1) + number * head_bytes(data->hidden, size));
}

bool can_align(const edge_model *ears, const stem_config *data, const edge_model *words)
{
    const edge_config *c = words->config;
    const uint64_t before = (uint64_t)((const uint8_t *)(stem_end(data) + 1) - (const uint8_t *)data), size = ears->sizes[SECTION_STEM];
    if (!data->heads || size < before || data->heads > (size - before) / head_bytes(data->hidden, c->head))
        return false;
    for (uint32_t i = 0; i < data->heads; i++) {
        const aligned_head *own = head_of(data, i, c->head);
        if (own->layer < 0 || (uint32_t)own->layer >= c->crossings || own->head < 0 || (uint32_t)own->head >= c->shapes->heads)
            return false;
    }
    return true;
}

/* Runs tokens, at most a chunk, up to a layer, for the states behind it: see pass_states. */
static edge_finish run_some(edge_session *s, const int32_t *ids, uint32_t count, uint32_t layers, const float **states, uint32_t *stride)
{
    edge_finish reason = context_look(s, count);
    if (reason)
        return reason;
    if (count > kv_free(s->rows))
        return EDGE_MEMORY;
    *states = pass_states(s->pass, ids, count, &(text_places){.stop = layers}, stride);
    if (!*states) {
        s->failed = true;
        return EDGE_INTERRUPTED;
    }
    context_note_share(s, (double)layers / s->model->config->layers);
    return EDGE_GOING;
}

/* Runs the tokens up to a layer's cross attention, and keeps what its norm makes of their states, without its weights. */
static edge_finish run_until(aligner *a, edge_session *s, uint32_t layers, uint32_t count, float epsilon)
{
    const uint32_t chunk = s->model->config->chunk;
    kv_clear(s->rows);
    for (uint32_t at = 0; at < count; at += chunk) {
        uint32_t stride;
        const float *states;
        const uint32_t some = smaller(chunk, count - at);
        const edge_finish reason = run_some(s, a->tokens + at, some, layers, &states, &stride);
        if (reason)
            return reason;
        for (uint32_t row = 0; row < some; row++) {
            const float *from = states + (size_t)row * stride;
            float *to = a->states + (size_t)(at + row) * a->hidden;
            double mean = 0, squares = 0;
            for (uint32_t i = 0; i < a->hidden; i++)
                mean += (double)from[i] / a->hidden;
            for (uint32_t i = 0; i < a->hidden; i++)
                squares += ((double)from[i] - mean) * ((double)from[i] - mean);
            const double scale = 1 / sqrt(squares / a->hidden + (double)epsilon);
            for (uint32_t i = 0; i < a->hidden; i++)
                to[i] = (float)(((double)from[i] - mean) * scale);
        }
    }
    return EDGE_GOING;
}

/* Fills `paid` with a head's attention to the first positions. */
static void attend(aligner *a, const pass *p, const aligned_head *own, uint32_t count, uint32_t positions)
{
    const float *bias = own->values + (size_t)a->size * a->hidden;
    for (uint32_t row = 0; row < count; row++)
        memcpy(a->queries + (size_t)row * a->size, bias, a->size * sizeof *bias);
    const matrix m = {own->values, a->size, a->hidden, false};
    matrix_add(&m, a->states, count, a->queries, a->size);
    pass_cross_keys(p, (uint32_t)own->layer, (uint32_t)own->head, positions, a->keys);
    memset(a->paid, 0, (size_t)count * a->positions * sizeof *a->paid);
    matrix_add(&(matrix){a->keys, positions, a->size, false}, a->queries, count, a->paid, a->positions);
    for (uint32_t row = 0; row < count; row++) {
        float *paid = a->paid + (size_t)row * a->positions, most = paid[0], sum = 0;
        for (uint32_t i = 1; i < positions; i++)
            most = paid[i] > most ? paid[i] : most;
        for (uint32_t i = 0; i < positions; i++)
            sum += paid[i] = expf(paid[i] - most);
        for (uint32_t i = 0; i < positions; i++)
            paid[i] /= sum;
    }
}

/* Divides by the deviation among tokens, at each position. */
static void standardise(aligner *a, uint32_t count, uint32_t positions)
{
    for (uint32_t i = 0; i < positions; i++) {
        float *column = a->paid + i;
        double mean = 0, squares = 0;
        for (uint32_t row = 0; row < count; row++)
            mean += (double)column[(size_t)row * a->positions] / count;
        for (uint32_t row = 0; row < count; row++)
            squares += (column[(size_t)row * a->positions] - mean) * (column[(size_t)row * a->positions] - mean);
        const double spread = sqrt(squares / count);
        for (uint32_t row = 0; row < count; row++)
            column[(size_t)row * a->positions] = (float)((column[(size_t)row * a->positions] - mean) / (spread > 0 ? spread : 1));
    }
}

static void sort(float *values, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++) {
        const float held = values[i];
        uint32_t at = i;
        for (; at && values[at - 1] > held; at--)
            values[at] = values[at - 1];
        values[at] = held;
    }
}

/* Takes the medians of neighbouring positions from the cost; beyond both ends they are reflected. */
static void subtract_medians(aligner *a, uint32_t count, uint32_t positions)
{
    for (uint32_t row = 0; row < count; row++) {
        const float *paid = a->paid + (size_t)row * a->positions;
        float *cost = a->cost + (size_t)row * a->positions;
        for (uint32_t i = 0; i < positions; i++) {
            float near[WIDTH];
            for (int32_t k = 0; k < WIDTH; k++) {
                int32_t at = (int32_t)i + k - REACH;
                at = at < 0 ? -at : at;
                at = at >= (int32_t)positions ? 2 * ((int32_t)positions - 1) - at : at;
                near[k] = positions > REACH ? paid[at] : paid[i];
            }
            sort(near, WIDTH);
            cost[i] -= near[REACH];
        }
    }
}

/* Finds the cheapest path through the cost, whose rows are tokens: the first position of each. */
static void warp(aligner *a, const float *cost, uint32_t count, uint32_t positions)
{
    float *before = a->paid, *last = a->paid + a->positions; /* of the row above and of this one */
    for (uint32_t row = 0; row < count; row++) {
        for (uint32_t i = 0; i < positions; i++) {
            const float both = row && i ? before[i - 1] : row || i ? INFINITY : 0, down = row ? before[i] : INFINITY;
            const float right = i ? last[i - 1] : INFINITY;
            const uint8_t step = both < down && both < right ? BOTH : down < both && down < right ? DOWN : RIGHT;
            a->steps[(size_t)row * a->positions + i] = step;
            last[i] = cost[(size_t)row * a->positions + i] + (step == BOTH ? both : step == DOWN ? down : right);
        }
        float *held = before;
        before = last, last = held;
    }
    for (int64_t row = count - 1, at = positions - 1; row >= 0 && at >= 0;) {
        a->starts[row] = (uint32_t)at;
        const uint8_t step = row == 0 ? RIGHT : at == 0 ? DOWN : a->steps[(size_t)row * a->positions + (size_t)at];
        row -= step != RIGHT;
        at -= step != DOWN;
    }
}

/* ---- words ---------------------------------------------------------------------------------------------------------- */

static bool holds(const char *all, const char *text, uint32_t length)
{
    for (size_t at = 0, size = strlen(all); at + length <= size; at++)
        if (!memcmp(all + at, text, length))
            return true;
    return false;
}

static const char *text_of(const aligner *a, const timed_word *w, uint32_t *length)
{
    *length = a->ends[w->last] - a->ends[w->first];
    return a->text + a->ends[w->first];
}

/* Whether a word, without spaces around it, is among some characters, and is not empty. */
static bool is_among(const aligner *a, const timed_word *w, const char *all)
{
    uint32_t length;
    const char *text = text_of(a, w, &length);
    text = stripped(text, &length);
    return length && holds(all, text, length);
}

/* Parts the text at spaces and punctuation, or at each character. */
static uint32_t split(aligner *a, const edge_session *s, const int32_t *tokens, uint32_t count, bool spaces)
{
    static const char punctuation[] = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
    utf8_joiner joiner = {.count = 0};
    uint32_t found = 0, first = 0, end = 0;
    a->ends[0] = 0;
    a->cut = false;
    for (uint32_t i = 0; i < count; i++) {
        size_t size;
        const uint8_t *piece = vocabulary_piece(s->vocabulary, tokens[i], &size);
        if (end + 3 * (joiner.count + size) + 16 > a->config->text_bytes)
            a->cut = true;
        else
            end += (uint32_t)utf8_feed(&joiner, (const char *)piece, size, a->text + end);
        if (i + 1 == count && joiner.count && end == a->ends[first]) /* tokens of an incomplete character */
            end += (uint32_t)utf8_write(UTF8_REPLACEMENT, (uint8_t *)a->text + end);
        a->ends[i + 1] = end;
        const timed_word own = {.first = first, .last = i + 1};
        uint32_t length;
        const char *text = text_of(a, &own, &length);
        if (!length && i + 1 < count)
            continue;
        const bool space = length && *text == ' ';
        text = stripped(text, &length);
        if (!found || !spaces || space || holds(punctuation, text, length))
            a->words[found++].first = first;
        a->words[found - 1].last = first = i + 1;
    }
    return found;
}

double typical_length(aligner *a, const timed_word *words, uint32_t count)
{
    uint32_t some = 0;
    for (uint32_t i = 0; i < count; i++)
        if (words[i].end > words[i].start)
            a->lengths[some++] = (float)(words[i].end - words[i].start);
    sort(a->lengths, some);
    const double median = some ? ((double)a->lengths[(some - 1) / 2] + (double)a->lengths[some / 2]) / 2 : 0;
    return median < 0.7 ? median : 0.7;
}

static const char ENDS[] = ".。!！?？";

/* A word at the end or the beginning of a sentence takes at most two medians: the rest of its time is a pause. */
static void leave_pauses(aligner *a, uint32_t count)
{
    const double most = 2 * typical_length(a, a->words, count);
    for (uint32_t i = 1; i < count && most > 0; i++) {
        timed_word *w = a->words + i;
        if (w->end - w->start <= most)
            continue;
        if (is_among(a, w, ENDS))
            w->end = w->start + most;
        else if (is_among(a, w - 1, ENDS))
            w->start = w->end - most;
    }
}

/* Joins words with the punctuation before and behind them. */
static uint32_t join(aligner *a, uint32_t count)
{
    timed_word *words = a->words;
    uint32_t kept = count, length, found = 0;
    for (uint32_t i = count; i--;) {
        const char *text = text_of(a, words + i, &length);
        const bool space = length && *text == ' ';
        if (kept < count && space && is_among(a, words + i, "\"'“¿([{-"))
            words[kept].first = words[i].first;
        else
            words[--kept] = words[i];
    }
    for (uint32_t i = kept; i < count; i++) {
        const bool spaced = found && a->ends[words[found - 1].last] && a->text[a->ends[words[found - 1].last] - 1] == ' ';
        const char *text = text_of(a, words + i, &length);
        if (found && length && !spaced && holds("\"'.。,，!！?？:：”)]}、", text, length))
            words[found - 1].last = words[i].last;
        else
            words[found++] = words[i];
    }
    return found;
}

edge_finish align_words(aligner *a, edge_session *s, const stem_config *data, const int32_t *opening, uint32_t opening_count,
                        const int32_t *tokens, const float *logprobs, uint32_t count, uint32_t frames, bool spaces, timed_words *found)
{
    const uint32_t all = opening_count + count + 2, positions = frames > 1 ? frames / 2 : 1;
    *found = (timed_words){a->words, 0};
    if (!count)
        return EDGE_GOING;
    memcpy(a->tokens, opening, opening_count * sizeof *opening);
    a->tokens[opening_count] = (int32_t)a->config->no_timestamps;
    memcpy(a->tokens + opening_count + 1, tokens, count * sizeof *tokens);
    a->tokens[all - 1] = (int32_t)a->config->eot;
    memset(a->cost, 0, (size_t)all * a->positions * sizeof *a->cost);
    int32_t layer = -1;
    for (uint32_t i = 0; i < data->heads; i++) {
        const aligned_head *own = head_of(data, i, a->size);
        if (own->layer != layer) {
            const edge_finish reason = run_until(a, s, 2 * (uint32_t)own->layer + 1, all, *stem_end(data));
            if (reason)
                return reason;
        }
        layer = own->layer;
        attend(a, s->pass, own, all, positions);
        standardise(a, all, positions);
        subtract_medians(a, all, positions);
    }
    warp(a, a->cost + (size_t)opening_count * a->positions, count + 1, positions);
    const uint32_t parts = split(a, s, tokens, count, spaces);
    for (uint32_t i = 0; i < parts; i++) {
        timed_word *w = a->words + i;
        w->start = a->starts[w->first] / 50.0, w->end = a->starts[w->last] / 50.0;
        w->probability = 0;
        for (uint32_t token = w->first; token < w->last; token++)
            w->probability += exp((double)logprobs[token]) / (w->last - w->first);
    }
    leave_pauses(a, parts);
    found->count = join(a, parts);
    return EDGE_GOING;
}

/* ---- JSON ----------------------------------------------------------------------------------------------------------- */

/* Writes a text; returns where it ends. */
static char *write_text(char *to, const char *text)
{
    const size_t length = strlen(text);
    memcpy(to, text, length);
    return to + length;
}

/* Writes a number that is not negative with three decimals. */
static char *write_decimal(char *to, double value)
{
    char digits[24];
    uint32_t count = 0;
    uint64_t left = (uint64_t)(value * 1000 + 0.5);
    while (left || count < 5) {
        digits[count++] = (char)('0' + left % 10);
        left /= 10;
        if (count == 3)
            digits[count++] = '.';
    }
    while (count)
        *to++ = digits[--count];
    return to;
}

const char *words_in_json(aligner *a, const timed_word *words, uint32_t count)
{
    char *at = write_text(a->json, "[");
    const char *last = a->json + JSON_BYTES(a) - WORD_BYTES;
    if (a->cut)
        return NULL;
    for (uint32_t i = 0; i < count; i++) {
        const timed_word *w = words + i;
        uint32_t length;
        const char *text = text_of(a, w, &length);
        if (at > last)
            return NULL;
        at = write_text(at, i ? ", {\"word\": \"" : "{\"word\": \"");
        for (uint32_t k = 0; k < length; k++) {
            if (at > last)
                return NULL;
            const uint8_t byte = (uint8_t)text[k];
            if (byte < ' ') {
                at = write_text(at, byte < 16 ? "\\u000" : "\\u001");
                *at++ = "0123456789abcdef"[byte % 16];
                continue;
            }
            if (byte == '"' || byte == '\\')
                *at++ = '\\';
            *at++ = (char)byte;
        }
        at = write_decimal(write_text(at, "\", \"start\": "), w->start);
        at = write_decimal(write_text(at, ", \"end\": "), w->end);
        at = write_text(write_decimal(write_text(at, ", \"probability\": "), w->probability), "}");
    }
    *write_text(at, "]") = 0;
    return a->json;
}
