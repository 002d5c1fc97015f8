/* Sounds in prompts: a port of edge/model/towers/whisper.py, for encoders that are Whisper's with a projector.
 *
 *     samples --resample--> 16 kHz --mel--> spectrogram --stem, encoder, a window at a time--> states --project--> rows
 *
 * Section EYES has the texts around the rows (see.c), section SOUNDS, which edge/apps/sections/sounds_file.py writes, a sounds_config
 * and the places of its matrices in STEM, behind the convolutions. model.edge has both sections, too. */
#include <math.h>
#include <string.h>

#include "encoder.h"
#include "eye.h"
#include "eyes.h"
#include "hash.h"
#include "matrix.h"
#include "mel.h"
#include "policy.h"
#include "resample.h"
#include "see.h"
#include "stem.h"
#include "system.h"

enum { AROUND = MEL_WINDOW / 2, AHEAD = 2 /* frames behind a window's last that convolutions see */, SOME = 16 /* vectors at a time */ };

typedef struct {
    const eyes_config *texts;
    const sounds_config *config;
    const float *samples;
    size_t count;
    uint32_t rate, rows;
} played;

/* What encoding takes, in one piece. */
typedef struct {
    const sounds_config *config;
    const edge_model *file;
    mel *mel;
    stem *stem;
    resampler *resampler;
    float *sound;       /* [AROUND + samples + AROUND] */
    float *spectrogram; /* [frames][mels] */
    float *block;       /* [2][SOME][widest] */
    uint32_t widest;
} hearer;

/* ---- figures -------------------------------------------------------------------------------------------------------- */

static const sounds_config *sounds_of(const edge_model *model)
{
    const sounds_config *c = (const sounds_config *)(const void *)model->sections[SECTION_SOUNDS];
    const bool possible = model->sizes[SECTION_SOUNDS] == sizeof *c + SOUND_MATRICES * sizeof(stem_matrix) && c->kind < SOUND_KINDS
        && c->mels && c->mels <= MOST_BANDS && c->positions && c->positions <= MOST_MEL_FRAMES / 2 && c->stack && c->stack <= 64
        && c->stack <= c->positions && c->least && c->least <= 2 * c->positions
        && c->hidden && c->hidden <= MOST_EYE_VALUES / 64 && c->inner && c->inner <= MOST_EYE_VALUES && c->projected
        && c->projected <= MOST_EYE_VALUES && c->eps >= 0 && c->eps < 1;
    return possible ? c : NULL;
}

/* Samples at SOUND_RATE, as resampling makes them. */
static uint64_t resampled(uint64_t count, uint32_t rate)
{
    return (count * SOUND_RATE + rate - 1) / rate;
}

/* Frames of which the rows of a sound are made. */
static uint32_t frames_of(const sounds_config *c, uint64_t samples)
{
    uint64_t frames = (samples + MEL_HOP - 1) / MEL_HOP, most = 2 * c->positions;
    frames = frames > c->least ? frames : c->least;
    return (uint32_t)(c->whole ? (frames + most - 1) / most * most : frames);
}

/* Frames of the spectrogram: with the silence behind a sound that convolutions see. */
static uint32_t padded(const sounds_config *c, uint64_t samples)
{
    const uint32_t frames = frames_of(c, samples), most = 2 * c->positions;
    const uint64_t whole = (samples + (uint64_t)most * MEL_HOP - 1) / ((uint64_t)most * MEL_HOP) * most;
    return c->kind == SOUND_ULTRAVOX ? frames : (uint32_t)(whole < frames + AHEAD ? whole : frames + AHEAD);
}

static uint32_t rows_of(const sounds_config *c, uint32_t positions)
{
    return c->kind == SOUND_ULTRAVOX ? (positions + c->stack - 1) / c->stack : positions / c->stack;
}

static uint32_t positions_of(const sounds_config *c, uint32_t frames, uint32_t first)
{
    return (smaller(2 * c->positions, frames - first) + 1) / 2;
}

static int64_t count_rows(const sounds_config *c, uint64_t samples)
{
    const uint32_t frames = frames_of(c, samples);
    int64_t found = 0;
    for (uint32_t first = 0; first < frames; first += 2 * c->positions)
        found += rows_of(c, positions_of(c, frames, first));
    return found;
}

static edge_status find_configs(const edge_model *model, played *p, edge_error *error)
{
    p->texts = eyes_of(model), p->config = sounds_of(model);
    if (p->texts && p->config && p->texts->projected == model->config->hidden && p->config->projected == model->config->hidden)
        return EDGE_OK;
    return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its ears): copy or export it again");
}

static int64_t count(const edge_model *model, uint64_t samples, uint32_t rate, edge_error *error)
{
    played p;
    edge_status status = find_configs(model, &p, error);
    return status ? status : count_rows(p.config, resampled(samples, rate));
}

/* ---- from samples to a spectrogram ---------------------------------------------------------------------------------- */

static void resample(const hearer *h, const played *p)
{
    float *to = h->sound + AROUND;
    const uint64_t total = resampled(p->count, p->rate);
    uint64_t made = 0;
    if (p->rate == SOUND_RATE) {
        memcpy(to, p->samples, p->count * sizeof *to);
    } else {
        resampler_start(h->resampler, p->rate, SOUND_RATE);
        for (size_t at = 0; at < p->count;) {
            size_t some = p->count - at;
            made += resampler_push(h->resampler, p->samples + at, &some, to + made, (uint32_t)(total - made));
            at += some;
        }
        for (uint32_t some; (some = resampler_end(h->resampler, to + made, (uint32_t)(total - made))); made += some) {}
    }
    for (uint64_t i = 0; i < total; i++)
        to[i] = to[i] > 1 ? 1 : to[i] < -1 ? -1 : to[i];
}

/* Reflects the sound at both ends. samples: with the silence behind it. */
static void reflect(float *sound, uint64_t samples)
{
    float *end = sound + AROUND + samples;
    for (uint32_t i = 0; i < AROUND; i++) {
        sound[i] = sound[2 * AROUND - i];
        end[i] = end[-2 - (int32_t)i];
    }
}

/* ---- the projector -------------------------------------------------------------------------------------------------- */

static uint32_t joined(const sounds_config *c)
{
    return c->hidden * (c->kind == SOUND_QWEN2 ? 1 : c->stack);
}

/* Returns false if STEM does not have the matrix; one without rows has no data. */
static bool find_matrix(const edge_model *file, const sounds_config *c, enum sound_matrix number, uint32_t rows, uint32_t columns, matrix *m)
{
    const stem_matrix *found = (const stem_matrix *)(const void *)(c + 1) + number;
    const uint64_t size = file->sizes[SECTION_STEM], bytes = (uint64_t)rows * columns * (found->half ? 2 : 4);
    *m = (matrix){found->rows ? file->sections[SECTION_STEM] + found->at : NULL, rows, columns, found->half};
    return !found->rows || (found->rows == rows && found->columns == columns && found->at % 64 == 0 && found->at <= size
                            && bytes <= size - found->at);
}

typedef struct { matrix norm, norm_bias, one, one_bias, middle, two; } projector;

static bool find_projector(const edge_model *file, const sounds_config *c, projector *p)
{
    const uint32_t wide = joined(c), between = c->kind == SOUND_ULTRAVOX ? c->inner / 2 : c->inner;
    return find_matrix(file, c, SOUND_MATRIX_NORM, 1, wide, &p->norm) && find_matrix(file, c, SOUND_MATRIX_NORM_BIAS, 1, wide, &p->norm_bias)
        && find_matrix(file, c, SOUND_MATRIX_ONE, c->inner, wide, &p->one) && p->one.data
        && find_matrix(file, c, SOUND_MATRIX_ONE_BIAS, 1, c->inner, &p->one_bias)
        && find_matrix(file, c, SOUND_MATRIX_MIDDLE, 1, between, &p->middle)
        && find_matrix(file, c, SOUND_MATRIX_TWO, c->projected, between, &p->two) && (p->two.data || c->inner == c->projected)
        && !p->two.data == (c->kind == SOUND_QWEN2);
}

/* own: room for a vector. */
static void normalise(const sounds_config *c, const matrix *weight, const matrix *bias, float *values, float *own)
{
    const uint32_t size = weight->columns;
    double mean = 0, squares = 0;
    if (!weight->data)
        return;
    for (uint32_t i = 0; bias->data && i < size; i++)
        mean += (double)values[i] / size;
    for (uint32_t i = 0; i < size; i++)
        squares += ((double)values[i] - mean) * ((double)values[i] - mean);
    const double by = 1 / sqrt(squares / size + c->eps);
    memset(own, 0, size * sizeof *own);
    matrix_add_row(weight, 0, own);
    for (uint32_t i = 0; i < size; i++)
        values[i] = (float)(((double)values[i] - mean) * by) * own[i];
    if (bias->data)
        matrix_add_row(bias, 0, values);
}

/* Writes the vector of `stack` states, those beyond `left` of which are zeros: side by side, or their mean. */
static void join(const sounds_config *c, const float *states, uint32_t stride, uint32_t left, float *out)
{
    memset(out, 0, joined(c) * sizeof *out);
    for (uint32_t i = 0; i < smaller(left, c->stack); i++)
        for (uint32_t value = 0; value < c->hidden; value++) {
            if (c->kind == SOUND_QWEN2)
                out[value] += states[(size_t)i * stride + value] / (float)c->stack;
            else
                out[(size_t)i * c->hidden + value] = states[(size_t)i * stride + value];
        }
}

/* The first half of each vector, times SiLU of the other. */
static void gate(float *vectors, uint32_t count, uint32_t half)
{
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t value = 0; value < half; value++) {
            const float *in = vectors + 2ull * i * half, by = in[half + value];
            vectors[(size_t)i * half + value] = in[value] * by / (1 + expf(-by));
        }
}

static void project(const hearer *h, const projector *p, const float *states, uint32_t stride, uint32_t positions, float *rows)
{
    const sounds_config *c = h->config;
    const uint32_t wide = joined(c), half = c->inner / 2, total = rows_of(c, positions);
    float *in = h->block, *out = in + (size_t)SOME * h->widest;
    const matrix no_bias = {NULL, 1, 1, false};
    for (uint32_t first = 0, some; first < total; first += some) {
        some = smaller(SOME, total - first);
        for (uint32_t i = 0; i < some; i++) {
            const uint32_t at = (first + i) * c->stack;
            join(c, states + (size_t)at * stride, stride, positions - at, in + (size_t)i * wide);
            normalise(c, &p->norm, &p->norm_bias, in + (size_t)i * wide, out);
        }
        float *to = p->two.data ? out : rows + (size_t)first * c->projected;
        memset(to, 0, (size_t)some * c->inner * sizeof *to);
        for (uint32_t i = 0; p->one_bias.data && i < some; i++)
            matrix_add_row(&p->one_bias, 0, to + (size_t)i * c->inner);
        matrix_add(&p->one, in, some, to, c->inner);
        if (!p->two.data)
            continue;
        if (c->kind == SOUND_ULTRAVOX)
            gate(out, some, half);
        else
            gelu_erf(out, some * c->inner);
        for (uint32_t i = 0; p->middle.data && i < some; i++)
            normalise(c, &p->middle, &no_bias, out + (size_t)i * half, in);
        to = rows + (size_t)first * c->projected;
        memset(to, 0, (size_t)some * c->projected * sizeof *to);
        matrix_add(&p->two, out, some, to, c->projected);
    }
}

/* ---- edge_sound ----------------------------------------------------------------------------------------------------- */

static void lay_out(arena *from, hearer *h, uint32_t frames)
{
    const sounds_config *c = h->config;
    h->mel = mel_layout(from, c->mels);
    h->stem = stem_layout(from, c->mels, c->hidden);
    h->resampler = resampler_layout(from);
    h->sound = take(from, (2ull * AROUND + (uint64_t)frames * MEL_HOP) * sizeof *h->sound);
    h->spectrogram = take(from, (uint64_t)frames * c->mels * sizeof *h->spectrogram);
    h->block = take(from, 2ull * SOME * h->widest * sizeof *h->block);
}

static edge_status run(encoder *e, const hearer *h, const played *p, const stem_config *data, const volatile int32_t *cancelled,
                       float *rows, edge_error *error)
{
    const sounds_config *c = h->config;
    const uint64_t samples = resampled(p->count, p->rate);
    const uint32_t total = padded(c, samples), frames = frames_of(c, samples), most = 2 * c->positions;
    projector own;
    find_projector(h->file, c, &own); /* encode has checked it */
    resample(h, p);
    reflect(h->sound, (uint64_t)total * MEL_HOP);
    mel_start(h->mel, stem_filters(data));
    mel_write(h->mel, h->sound, total, h->spectrogram);
    for (uint32_t first = 0; first < frames; first += most) {
        const uint32_t positions = positions_of(c, frames, first), there = smaller(smaller(most, 2 * positions + 1), total - first);
        uint32_t stride;
        float *inputs = encoder_inputs(e, &stride);
        stem_run(h->stem, data, h->spectrogram + (size_t)first * c->mels, there, positions, inputs, stride);
        const float *states = encoder_run(e, &(text_places){.ends = &positions}, positions, &stride);
        if (!states)
            return edge_fail(error, EDGE_BAD_FILE, "sounds.edge was cut short while it was read, or a thread was lost: try again");
        project(h, &own, states, stride, positions, rows);
        rows += (size_t)rows_of(c, positions) * c->projected;
        if (__atomic_load_n(cancelled, __ATOMIC_RELAXED))
            return edge_fail(error, EDGE_BUSY, "edge_cancel has ended the sound: play it again");
    }
    return EDGE_OK;
}

static edge_status encode(encoder *e, const void *of, const volatile int32_t *cancelled, float *rows, edge_error *error)
{
    const played *p = of;
    const edge_model *file = encoder_model(e);
    const sounds_config *c = sounds_of(file);
    const stem_config *data = c ? find_stem(file, c->mels, c->hidden, c->positions) : NULL;
    projector found;
    if (!data || memcmp(c, p->config, sizeof *c) || c->hidden != file->config->hidden || file->config->capacity < c->positions
        || !find_projector(file, c, &found))
        return edge_fail(error, EDGE_BAD_FILE, "sounds.edge is damaged (its projector): copy or export it again");
    hearer h = {.config = c, .file = file, .widest = joined(c) > c->inner ? joined(c) : c->inner};
    arena counted = {NULL, 0};
    lay_out(&counted, &h, padded(c, resampled(p->count, p->rate)));
    arena memory = {map_memory(counted.used), 0};
    if (!memory.memory)
        return edge_fail(error, EDGE_NO_MEMORY, "no memory is left to listen to a sound of %d samples: make it shorter", (int64_t)p->count);
    lay_out(&memory, &h, padded(c, resampled(p->count, p->rate)));
    edge_status status = run(e, &h, p, data, cancelled, rows, error);
    unmap_memory(memory.memory, counted.used);
    for (size_t i = 0; !status && i < (size_t)p->rows * c->projected; i++)
        if (!isfinite(rows[i]))
            status = edge_fail(error, EDGE_FAILED, "the encoder computed no number (NaN): sounds.edge may be damaged");
    return status;
}

static void hash_sound(const edge_session *s, const played *p, uint8_t digest[32])
{
    hasher h;
    hash_start(&h);
    hash_add(&h, EDGE_SEES->trusted, sizeof EDGE_SEES->trusted);
    hash_add(&h, s->model->sections[SECTION_SOUNDS], s->model->sizes[SECTION_SOUNDS]);
    hash_add(&h, &p->rate, sizeof p->rate);
    hash_add(&h, p->samples, p->count * sizeof *p->samples);
    hash_end(&h, digest);
}

static edge_status play(edge_session *s, const edge_source *file, const float *samples, size_t count, uint32_t rate, edge_error *error)
{
    played p = {.samples = samples, .count = count, .rate = rate};
    edge_status status = find_configs(s->model, &p, error);
    for (size_t i = 0; !status && i < count; i++)
        if (!isfinite(samples[i]))
            status = edge_fail(error, EDGE_BAD_ARGUMENT, "sample %d is no finite number: samples are from -1 to 1", (int64_t)i);
    if (status)
        return status;
    const int64_t rows = count_rows(p.config, resampled(count, rate));
    p.rows = rows < INT32_MAX ? (uint32_t)rows : INT32_MAX;
    picture_rows shown = {.count = p.rows, .down = 1, .across = 1};
    hash_sound(s, &p, shown.hash);
    const seen_medium medium = {"sound", "shorten it", (uint64_t)frames_of(p.config, resampled(count, rate)) / 2, p.config->projected, encode, &p};
    return see_medium(s, file, &medium, shown, error);
}

const sounds_kind edge_sounds = {count, play};
