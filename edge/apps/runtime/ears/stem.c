/* A port of edge/model/whisper/stem.py. Section STEM, which edge/apps/sections/hearing.py writes, is a stem_config, followed by floats
 * without gaps:
 *
 *     filters[mels][MEL_WINDOW / 2 + 1]
 *     of both convolutions: taps, panels of [3 * inputs]; bias[hidden]
 *     positions[positions][hidden]
 *
 * A matrix [columns, inner] lies in panels of PANEL columns: [columns / PANEL][inner][PANEL]. */
#include <math.h>
#include <string.h>

#include "stem.h"

enum { PANEL = STEM_PANEL, HALF = PANEL / 2, BAND = 32, BINS = MEL_WINDOW / 2 + 1 }; /* BAND: rows that run together */

typedef float lanes __attribute__((vector_size(16), aligned(4), may_alias));

struct stem {
    uint32_t mels, hidden;
    float *around; /* [2 * BAND + 3][mels]: a band of frames, with those beside it */
    float *first;  /* [2 * BAND + 1][hidden]: of the first convolution */
    float *band;   /* [BAND][hidden] */
};

stem *stem_layout(arena *from, uint32_t mels, uint32_t hidden)
{
    stem *s = take(from, sizeof *s), counted, *own = s ? s : &counted;
    own->mels = mels, own->hidden = hidden;
    own->around = take(from, (2ull * BAND + 3) * mels * sizeof *own->around);
    own->first = take(from, (2ull * BAND + 1) * hidden * sizeof *own->first);
    own->band = take(from, (uint64_t)BAND * hidden * sizeof *own->band);
    return s;
}

/* ---- section STEM --------------------------------------------------------------------------------------------------- */

static uint64_t square(const stem_config *c)
{
    return (uint64_t)c->hidden * c->hidden;
}

const stem_config *find_stem(const edge_model *ears, uint32_t mels, uint32_t hidden, uint32_t positions)
{
    const stem_config *c = (const stem_config *)ears->sections[SECTION_STEM];
    if (ears->sizes[SECTION_STEM] < sizeof *c || c->mels != mels || c->hidden != hidden || c->positions != positions
        || hidden % PANEL)
        return NULL;
    const uint64_t floats = (uint64_t)mels * BINS + 3ull * mels * hidden + 3 * square(c) + 2ull * hidden
        + (uint64_t)positions * hidden;
    return ears->sizes[SECTION_STEM] >= sizeof *c + floats * sizeof(float) ? c : NULL; /* a projector may stand behind it */
}

const float *stem_filters(const stem_config *config)
{
    return (const float *)(config + 1);
}

static const float *first_taps(const stem_config *c)
{
    return stem_filters(c) + (size_t)c->mels * BINS;
}

static const float *second_taps(const stem_config *c)
{
    return first_taps(c) + 3ull * c->mels * c->hidden + c->hidden;
}

static const float *positions_of(const stem_config *c)
{
    return second_taps(c) + 3 * square(c) + c->hidden;
}

const float *stem_end(const stem_config *config)
{
    return positions_of(config) + (size_t)config->positions * config->hidden;
}

/* ---- products ------------------------------------------------------------------------------------------------------- */

/* Adds up a panel's columns for four rows. */
static void four_rows(const float *const rows[4], const float *panel, uint32_t inner, lanes sums[4][2])
{
    lanes a0 = {0}, a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, d0 = a0, d1 = a0;
    const float *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
    for (uint32_t i = 0; i < inner; i++, panel += PANEL) {
        const lanes left = *(const lanes *)panel, right = *(const lanes *)(panel + HALF);
        a0 += a[i] * left, a1 += a[i] * right;
        b0 += b[i] * left, b1 += b[i] * right;
        c0 += c[i] * left, c1 += c[i] * right;
        d0 += d[i] * left, d1 += d[i] * right;
    }
    sums[0][0] = a0, sums[0][1] = a1, sums[1][0] = b0, sums[1][1] = b1;
    sums[2][0] = c0, sums[2][1] = c1, sums[3][0] = d0, sums[3][1] = d1;
}

/* out [count][columns] = rows [count][inner] times a matrix in panels, plus a bias. */
static void multiply(const float *rows, uint32_t stride, uint32_t count, const float *panels, uint32_t inner, const float *bias,
                     uint32_t columns, float *out)
{
    for (uint32_t column = 0; column < columns; column += PANEL, panels += (size_t)inner * PANEL)
        for (uint32_t row = 0; row < count; row += 4) {
            const float *each[4];
            lanes sums[4][2];
            for (uint32_t i = 0; i < 4; i++)
                each[i] = rows + (size_t)smaller(row + i, count - 1) * stride;
            four_rows(each, panels, inner, sums);
            for (uint32_t i = 0; i < 4 && row + i < count; i++)
                for (uint32_t half = 0; half < 2; half++) {
                    const uint32_t at = column + half * HALF;
                    lanes *to = (lanes *)(out + (size_t)(row + i) * columns + at);
                    *to = sums[i][half] + *(const lanes *)(bias + at);
                }
        }
}

/* x times the normal distribution's Φ(x); erf by Abramowitz and Stegun, 7.1.26. */
static void gelu(float *x, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const float size = (x[i] < 0 ? -x[i] : x[i]) * 0.70710678f, t = 1 / (1 + 0.3275911f * size);
        const float series = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f) * t;
        const float tail = series * expf(-size * size); /* 1 - erf */
        x[i] *= (x[i] < 0 ? tail : 2 - tail) * 0.5f;
    }
}

/* ---- the convolutions ----------------------------------------------------------------------------------------------- */

/* Computes rows `from` … of the first convolution, of which those outside of 0 … frames - 1 are zeros. */
static void run_first(stem *s, const stem_config *c, const float *mel, uint32_t frames, int64_t from, uint32_t count)
{
    for (uint32_t i = 0; i < count + 2; i++) {
        const int64_t frame = from - 1 + i;
        float *to = s->around + (size_t)i * s->mels;
        if (frame < 0 || frame >= frames)
            memset(to, 0, s->mels * sizeof *to);
        else
            memcpy(to, mel + (size_t)frame * s->mels, s->mels * sizeof *to);
    }
    const float *taps = first_taps(c);
    multiply(s->around, s->mels, count, taps, 3 * s->mels, taps + 3ull * s->mels * s->hidden, s->hidden, s->first);
    gelu(s->first, (size_t)count * s->hidden);
    for (uint32_t i = 0; i < count; i++)
        if (from + i < 0 || from + i >= frames)
            memset(s->first + (size_t)i * s->hidden, 0, s->hidden * sizeof *s->first);
}

void stem_run(stem *s, const stem_config *config, const float *mel, uint32_t frames, uint32_t count, float *rows, uint32_t stride)
{
    const uint32_t hidden = s->hidden;
    const float *taps = second_taps(config), *bias = taps + 3 * square(config), *positions = positions_of(config);
    for (uint32_t at = 0; at < count; at += BAND) {
        const uint32_t some = smaller(BAND, count - at);
        run_first(s, config, mel, frames, 2 * (int64_t)at - 1, 2 * some + 1);
        multiply(s->first, 2 * hidden, some, taps, 3 * hidden, bias, hidden, s->band);
        gelu(s->band, (size_t)some * hidden);
        for (uint32_t i = 0; i < some; i++)
            for (uint32_t value = 0; value < hidden; value++)
                rows[(size_t)(at + i) * stride + value] =
                    s->band[(size_t)i * hidden + value] + positions[(size_t)(at + i) * hidden + value];
    }
}
