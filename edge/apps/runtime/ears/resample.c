/* Resampling by a sinc under a Kaiser window: a port of edge/media/resample.py. */
#include <math.h>
#include <string.h>

#include "resample.h"

enum { MOST_REACH = SINC_ZEROS * (FASTEST_SOUND / SOUND_RATE) + 1, BLOCK = 2048 }; /* source samples taken at once */

struct resampler {
    uint64_t up, down;              /* output n is at source sample n * down / up */
    uint32_t reach, phases, held;   /* held: source samples in memory */
    int64_t first;                  /* the place of the first of them in the source */
    uint64_t read, made;
    bool ended;
    double scale;
    float *filters;                 /* [phases + 1][2 * reach] */
    float source[2 * MOST_REACH + BLOCK + 2];
};

resampler *resampler_layout(arena *from)
{
    resampler *r = take(from, sizeof *r), counted, *own = r ? r : &counted;
    own->filters = take(from, (uint64_t)(SINC_PHASES + 1) * 2 * MOST_REACH * sizeof *own->filters);
    return r;
}

/* The modified Bessel function of order 0, by its series. */
static double bessel(double x)
{
    double sum = 1, term = 1;
    for (int32_t i = 1; term > sum * 1e-17; i++) {
        term *= x * x / 4 / ((double)i * i);
        sum += term;
    }
    return sum;
}

static void fill_filter(const resampler *r, float *filter, double shift)
{
    const double half_turn = 3.14159265358979323846;
    const int32_t reach = (int32_t)r->reach;
    double sum = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int32_t i = 0; i < 2 * reach; i++) {
            const double distance = 1 - reach + i - shift, part = distance / reach, angle = half_turn * distance * r->scale * SINC_CUTOFF;
            const double inside = 1 - part * part, sinc = angle == 0 ? 1 : sin(angle) / angle;
            const double weight = sinc * bessel(KAISER_BETA * sqrt(inside > 0 ? inside : 0));
            if (pass)
                filter[i] = (float)(weight / sum);
            else
                sum += weight;
        }
}

void resampler_start(resampler *r, uint32_t rate, uint32_t to)
{
    uint32_t one = rate, other = to;
    while (other) {
        const uint32_t rest = one % other;
        one = other, other = rest;
    }
    r->up = to / one, r->down = rate / one;
    r->scale = to < rate ? (double)to / rate : 1;
    r->reach = to < rate ? (SINC_ZEROS * rate + to - 1) / to : SINC_ZEROS;
    r->phases = r->up < SINC_PHASES ? (uint32_t)r->up : SINC_PHASES;
    for (uint32_t phase = 0; phase <= r->phases; phase++)
        fill_filter(r, r->filters + (size_t)phase * 2 * r->reach, (double)phase / r->phases);
    r->held = r->reach - 1;
    r->first = 1 - (int64_t)r->reach;
    r->read = r->made = 0;
    r->ended = false;
    memset(r->source, 0, r->held * sizeof *r->source);
}

/* Makes outputs up to number `until`, as far as there is room, and drops the samples that no later one needs. */
static uint32_t make(resampler *r, uint64_t until, float *out, uint32_t room)
{
    const uint32_t taps = 2 * r->reach;
    uint32_t count = 0;
    for (; r->made < until && count < room; r->made++) {
        const uint64_t place = r->made * r->down / r->up, part = r->made * r->down % r->up;
        const float *filter = r->filters + (part * r->phases + r->up / 2) / r->up * taps;
        const float *source = r->source + ((int64_t)place - r->first - (int64_t)r->reach + 1);
        float sums[4] = {0};
        for (uint32_t i = 0; i < taps; i += 2)
            sums[0] += source[i] * filter[i], sums[1] += source[i + 1] * filter[i + 1];
        out[count++] = sums[0] + sums[1];
    }
    const int64_t done = (int64_t)(r->made * r->down / r->up) - (r->first + (int64_t)r->reach - 1);
    const uint32_t gone = done > 0 ? smaller((uint32_t)done, r->held) : 0;
    memmove(r->source, r->source + gone, (r->held - gone) * sizeof *r->source);
    r->held -= gone, r->first += gone;
    return count;
}

uint32_t resampler_push(resampler *r, const float *samples, size_t *count, float *out, uint32_t room)
{
    const uint32_t free = (uint32_t)(sizeof r->source / sizeof *r->source) - r->held - r->reach - 1;
    const uint32_t some = *count < free ? (uint32_t)*count : free;
    memcpy(r->source + r->held, samples, some * sizeof *samples);
    r->held += some, r->read += some, *count = some;
    return make(r, r->read > r->reach ? (r->read - r->reach) * r->up / r->down : 0, out, room);
}

uint32_t resampler_end(resampler *r, float *out, uint32_t room)
{
    if (!r->ended) {
        memset(r->source + r->held, 0, (r->reach + 1) * sizeof *r->source);
        r->held += r->reach + 1;
        r->ended = true;
    }
    return make(r, (r->read * r->up + r->down - 1) / r->down, out, room);
}
