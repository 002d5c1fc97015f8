/* Whisper's spectrogram: a port of edge/media/mel.py. Two frames are the real and the imaginary part of one transform. */
#include <math.h>

#include "mel.h"

enum { BINS = MEL_WINDOW / 2 + 1, FACTORS = 4 };

typedef struct { double real, imaginary; } complex_number;

struct mel {
    uint32_t bands;
    const float *filters;      /* [bands][BINS] */
    uint32_t *first, *end;     /* [bands]: of the values of a filter that are not 0 */
    double *hann;              /* [MEL_WINDOW] */
    complex_number *roots;     /* [MEL_WINDOW]: of 1 */
    complex_number *in, *out;  /* [MEL_WINDOW] */
    float *power;              /* [2][BINS] */
};

mel *mel_layout(arena *from, uint32_t bands)
{
    mel *m = take(from, sizeof *m), counted, *own = m ? m : &counted;
    own->bands = bands;
    own->first = take(from, bands * sizeof *own->first);
    own->end = take(from, bands * sizeof *own->end);
    own->hann = take(from, MEL_WINDOW * sizeof *own->hann);
    own->roots = take(from, MEL_WINDOW * sizeof *own->roots);
    own->in = take(from, MEL_WINDOW * sizeof *own->in);
    own->out = take(from, MEL_WINDOW * sizeof *own->out);
    own->power = take(from, 2 * BINS * sizeof *own->power);
    return m;
}

void mel_start(mel *m, const float *filters)
{
    const double whole = 6.283185307179586476925;
    m->filters = filters;
    for (uint32_t i = 0; i < MEL_WINDOW; i++) {
        const double angle = whole * i / MEL_WINDOW;
        m->hann[i] = 0.5 - 0.5 * cos(angle);
        m->roots[i] = (complex_number){cos(angle), -sin(angle)};
    }
    for (uint32_t band = 0; band < m->bands; band++) {
        const float *filter = filters + (size_t)band * BINS;
        uint32_t first = 0, end = BINS;
        while (first < end && filter[first] == 0)
            first++;
        while (end > first && filter[end - 1] == 0)
            end--;
        m->first[band] = first, m->end[band] = end;
    }
}

/* Transforms `count` numbers, in[0], in[step], …: a discrete Fourier transform by mixed factors, the first one first. */
static void transform(const mel *m, const complex_number *in, complex_number *out, uint32_t count, uint32_t step)
{
    if (count == 1) {
        *out = *in;
        return;
    }
    const uint32_t factor = count % 4 ? 5 : 4, part = count / factor;
    for (uint32_t each = 0; each < factor; each++)
        transform(m, in + each * step, out + each * part, part, step * factor);
    for (uint32_t at = 0; at < part; at++) {
        complex_number terms[5];
        for (uint32_t each = 0; each < factor; each++)
            terms[each] = out[each * part + at];
        for (uint32_t to = at; to < count; to += part) {
            complex_number sum = terms[0];
            for (uint32_t each = 1; each < factor; each++) {
                const complex_number root = m->roots[each * to * step % MEL_WINDOW], term = terms[each];
                sum.real += term.real * root.real - term.imaginary * root.imaginary;
                sum.imaginary += term.real * root.imaginary + term.imaginary * root.real;
            }
            out[to] = sum;
        }
    }
}

/* Writes the power of two frames, which begin at these samples. */
static void find_power(mel *m, const float *one, const float *other)
{
    for (uint32_t i = 0; i < MEL_WINDOW; i++)
        m->in[i] = (complex_number){(double)one[i] * m->hann[i], (double)other[i] * m->hann[i]};
    transform(m, m->in, m->out, MEL_WINDOW, 1);
    for (uint32_t bin = 0; bin < BINS; bin++) {
        const complex_number a = m->out[bin], b = m->out[(MEL_WINDOW - bin) % MEL_WINDOW];
        const double even = a.real + b.real, odd = a.imaginary - b.imaginary;
        const double other_even = a.imaginary + b.imaginary, other_odd = b.real - a.real;
        m->power[bin] = (float)((even * even + odd * odd) / 4);
        m->power[BINS + bin] = (float)((other_even * other_even + other_odd * other_odd) / 4);
    }
}

void mel_write(mel *m, const float *samples, uint32_t frames, float *out)
{
    const double per_ten = 1 / log(10.0);
    float most = -INFINITY;
    for (uint32_t frame = 0; frame < frames; frame += 2) {
        const uint32_t both = frame + 1 < frames ? 2 : 1;
        const float *first = samples + (size_t)frame * MEL_HOP;
        find_power(m, first, first + (both - 1) * MEL_HOP);
        for (uint32_t each = 0; each < both; each++)
            for (uint32_t band = 0; band < m->bands; band++) {
                const float *filter = m->filters + (size_t)band * BINS, *power = m->power + each * BINS;
                float sum = 0;
                for (uint32_t bin = m->first[band]; bin < m->end[band]; bin++)
                    sum += filter[bin] * power[bin];
                const float level = (float)(log(sum > 1e-10f ? (double)sum : (double)1e-10f) * per_ten);
                out[(size_t)(frame + each) * m->bands + band] = level;
                most = level > most ? level : most;
            }
    }
    for (size_t i = 0; i < (size_t)frames * m->bands; i++)
        out[i] = ((out[i] > most - 8.0f ? out[i] : most - 8.0f) + 4.0f) / 4.0f;
}
