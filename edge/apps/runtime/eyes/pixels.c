/* Resizing is the method of Pillow's Resample.c: rows, then columns, or the other way round, by weights in fixed point
 * of 22 bits, each result rounded to 8 bits. */
#include <math.h>
#include <string.h>

#include "pixels.h"
#include "system.h"

enum { BITS = 22, COLOURS = 3 };
static const double SUPPORT[FILTERS] = {1, 2, 3}, PI = 3.14159265358979323846;

static bool allocate(pixels *p, uint32_t width, uint32_t height)
{
    *p = (pixels){map_memory((uint64_t)COLOURS * width * height), width, height};
    return p->data;
}

void pixels_free(pixels *p)
{
    if (p->data)
        unmap_memory(p->data, (uint64_t)COLOURS * p->width * p->height);
    p->data = NULL;
}

bool pixels_copy(pixels *to, const edge_picture *picture)
{
    const uint8_t *from = picture->pixels;
    const uint32_t channels = picture->channels;
    if (!allocate(to, picture->width, picture->height))
        return false;
    for (uint32_t y = 0; y < to->height; y++) {
        const uint8_t *in = from + (size_t)y * picture->stride;
        uint8_t *out = to->data + (size_t)y * COLOURS * to->width;
        for (uint32_t x = 0; x < to->width; x++, in += channels)
            for (uint32_t colour = 0; colour < COLOURS; colour++) {
                uint32_t alpha = channels == 4 ? in[3] : 255;
                *out++ = (uint8_t)((in[colour] * alpha + 255 * (255 - alpha) + 127) / 255);
            }
    }
    return true;
}

static double sinc(double x)
{
    return x == 0 ? 1 : sin(PI * x) / (PI * x);
}

static double weight_at(enum pixel_filter filter, double x)
{
    x = x < 0 ? -x : x;
    switch (filter) {
    case FILTER_BILINEAR:
        return x < 1 ? 1 - x : 0;
    case FILTER_BICUBIC:
        return x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
    default:
        return x < 3 ? sinc(x) * sinc(x / 3) : 0;
    }
}

/* Of one side: for each new pixel, the first old one that it is made of, their number, and `most` weights. */
typedef struct { int32_t *memory; uint64_t bytes; uint32_t most; int32_t *firsts, *counts, *weights; } weighing;

static bool weigh(weighing *w, uint32_t from, uint32_t to, enum pixel_filter filter)
{
    const double scale = (double)from / to, wide = scale < 1 ? 1 : scale, support = SUPPORT[filter] * wide;
    w->most = 2 * (uint32_t)(support == floor(support) ? support : floor(support) + 1) + 1;
    w->bytes = ((uint64_t)to * (2 + w->most) + 2ull * w->most) * sizeof *w->memory;
    w->memory = map_memory(w->bytes);
    if (!w->memory)
        return false;
    double *exact = (double *)w->memory; /* of one pixel */
    w->firsts = w->memory + 2 * w->most, w->counts = w->firsts + to, w->weights = w->counts + to;
    for (uint32_t i = 0; i < to; i++) {
        const double center = (i + 0.5) * scale;
        int32_t first = (int32_t)(center - support + 0.5), end = (int32_t)(center + support + 0.5);
        first = first < 0 ? 0 : first, end = end > (int32_t)from ? (int32_t)from : end;
        double sum = 0;
        for (int32_t at = 0; at < end - first; at++)
            sum += exact[at] = weight_at(filter, (at + first - center + 0.5) * (1 / wide));
        int32_t *weights = w->weights + (size_t)i * w->most;
        for (int32_t at = 0; at < end - first; at++) {
            double share = (sum != 0 ? exact[at] / sum : exact[at]) * (1 << BITS);
            weights[at] = (int32_t)(share < 0 ? share - 0.5 : share + 0.5);
        }
        w->firsts[i] = first, w->counts[i] = end - first;
    }
    return true;
}

static uint8_t rounded(int32_t sum)
{
    sum >>= BITS;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

static void resize_rows(const weighing *w, const pixels *from, pixels *to)
{
    uint8_t *out = to->data;
    for (uint32_t y = 0; y < from->height; y++)
        for (uint32_t x = 0; x < to->width; x++) {
            const int32_t *weights = w->weights + (size_t)x * w->most;
            const uint8_t *in = from->data + COLOURS * ((size_t)y * from->width + (size_t)w->firsts[x]);
            int32_t sums[COLOURS] = {1 << (BITS - 1), 1 << (BITS - 1), 1 << (BITS - 1)};
            for (int32_t at = 0; at < w->counts[x]; at++, in += COLOURS)
                for (int colour = 0; colour < COLOURS; colour++)
                    sums[colour] += in[colour] * weights[at];
            for (int colour = 0; colour < COLOURS; colour++)
                *out++ = rounded(sums[colour]);
        }
}

static void resize_columns(const weighing *w, const pixels *from, pixels *to)
{
    const size_t row = (size_t)COLOURS * from->width;
    for (uint32_t y = 0; y < to->height; y++) {
        const int32_t *weights = w->weights + (size_t)y * w->most;
        const uint8_t *in = from->data + (size_t)w->firsts[y] * row;
        for (size_t x = 0; x < row; x++) {
            int32_t sum = 1 << (BITS - 1);
            for (int32_t at = 0; at < w->counts[y]; at++)
                sum += in[(size_t)at * row + x] * weights[at];
            to->data[(size_t)y * row + x] = rounded(sum);
        }
    }
}

/* across: along rows; else along columns. */
static bool resize_side(pixels *to, const pixels *from, uint32_t size, bool across, enum pixel_filter filter)
{
    weighing w;
    if (!allocate(to, across ? size : from->width, across ? from->height : size))
        return false;
    if (!weigh(&w, across ? from->width : from->height, size, filter)) {
        pixels_free(to);
        return false;
    }
    if (across)
        resize_rows(&w, from, to);
    else
        resize_columns(&w, from, to);
    unmap_memory(w.memory, w.bytes);
    return true;
}

bool pixels_resize(pixels *to, const pixels *from, uint32_t width, uint32_t height, enum pixel_filter filter)
{
    /* Pillow 13 begins with columns if that leaves more pixels out. */
    const bool columns = height < from->height && (int64_t)from->height - height > 2 * ((int64_t)from->width - width);
    pixels half;
    if (width == from->width)
        return resize_side(to, from, height, false, filter); /* a copy if the height stays, too */
    if (height == from->height)
        return resize_side(to, from, width, true, filter);
    if (!resize_side(&half, from, columns ? height : width, !columns, filter))
        return false;
    bool made = resize_side(to, &half, columns ? width : height, columns, filter);
    pixels_free(&half);
    return made;
}
