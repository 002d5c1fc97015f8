/* Which tiles a picture becomes, and the texts around their rows: for each family what its class in edge/model/towers/
 * does, with the same roundings. */
#include <math.h>
#include <string.h>

#include "eyes.h"

static const uint32_t MOST_PIXELS = 64000000, MOST_RATIO = 200; /* as edge/media/picture.py has them */
static const uint32_t LONGEST = 4096; /* pixels of a side of a divided picture */
static const uint32_t LFM2_LEAST = 64, LFM2_MOST = 256, LFM2_LARGE = 2;
static const uint32_t GEMMA4_SIZES[] = {70, 140, 280, 560, 1120};

static uint32_t at_least_one(double length)
{
    return length < 1 ? 1 : (uint32_t)length;
}

static uint32_t larger(uint32_t one, uint32_t other)
{
    return one > other ? one : other;
}

/* A picture in one piece, with its size in pixels. */
static void set_whole(const eyes_config *c, uint32_t width, uint32_t height, eyes_layout *found)
{
    const uint32_t down = height / c->patch, across = width / c->patch;
    *found = (eyes_layout){width, height, 1, 1, 1, 0, down * across / (c->join * c->join), down, across};
}

/* ---- square tiles (Idefics 3) --------------------------------------------------------------------------------------- */

/* Width and height with this longer side: the shorter one is cut to a whole number, and made even. */
void within_side(uint32_t *width, uint32_t *height, uint32_t longest)
{
    const double ratio = (double)*width / *height;
    const bool wide = *width >= *height;
    uint32_t less = (uint32_t)(wide ? longest / ratio : longest * ratio);
    less += less % 2;
    less = less ? less : 1;
    *width = wide ? longest : less;
    *height = wide ? less : longest;
}

static uint32_t whole_sides(uint32_t length, uint32_t side)
{
    return (length + side - 1) / side * side;
}

/* Both sides to whole tiles, at least one. */
static void stretch(uint32_t *width, uint32_t *height, uint32_t side)
{
    const double ratio = (double)*width / *height;
    if (*width >= *height) {
        *width = whole_sides(*width, side);
        *height = whole_sides(at_least_one(*width / ratio), side);
    } else {
        *height = whole_sides(*height, side);
        *width = whole_sides(at_least_one(*height * ratio), side);
    }
}

static uint32_t rows_of_tile(const eyes_config *c)
{
    return (c->grid / c->join) * (c->grid / c->join);
}

/* With `number` tiles on the longer side. */
static eyes_layout divided(const eyes_config *c, uint32_t width, uint32_t height, uint32_t number)
{
    within_side(&width, &height, number * c->side);
    stretch(&width, &height, c->side);
    eyes_layout found = {width, height, height / c->side, width / c->side, 1, rows_of_tile(c), rows_of_tile(c), c->grid, c->grid};
    if (found.down * found.across > 1)
        found.tiles += found.down * found.across;
    return found;
}

static void lay_out_tiles(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *found)
{
    *found = divided(c, width, height, 1);
    for (uint32_t number = 2; number <= c->most && number * c->side <= LONGEST; number++) {
        eyes_layout next = divided(c, width, height, number);
        if (eyes_tokens(&next) <= most && eyes_tokens(&next) > eyes_tokens(found))
            *found = next;
    }
}

/* ---- any shape, or tiles (LFM2-VL) ---------------------------------------------------------------------------------- */

/* In one piece: both sides as whole cells, for the fewest to the most rows. */
static void lfm2_whole(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *found)
{
    const uint32_t side = c->join * c->patch, least = smaller(LFM2_LEAST, most);
    const double area = (double)side * side, sides[] = {width, height};
    uint32_t made[2];
    double cells = 1;
    for (int i = 0; i < 2; i++) {
        made[i] = larger(side, (uint32_t)rint(sides[i] / side) * side);
        cells *= made[i];
    }
    for (int i = 0; i < 2; i++)
        if (cells > most * area)
            made[i] = larger(side, (uint32_t)floor(sides[i] / sqrt(sides[0] * sides[1] / (most * area)) / side) * side);
        else if (cells < least * area)
            made[i] = (uint32_t)ceil(sides[i] * sqrt(least * area / (sides[0] * sides[1])) / side) * side;
    set_whole(c, made[0], made[1], found);
}

/* In at most `most` tiles, whose shape is as near to the picture's as can be, with the whole behind them. */
static void lfm2_divided(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *found)
{
    double nearest = INFINITY;
    uint32_t best[2] = {1, 1};
    for (uint32_t tiles = 2; tiles <= most; tiles++)
        for (uint32_t across = 1; across <= tiles; across++) {
            if (tiles % across)
                continue;
            const double off = fabs((double)width / height - (double)across / (tiles / across));
            const double area = 0.5 * c->side * c->side * tiles;
            if (off < nearest || (off == nearest && (double)width * height > area))
                best[0] = tiles / across, best[1] = across, nearest = off;
        }
    lfm2_whole(c, width, height, LFM2_MOST, found);
    found->width = best[1] * c->side, found->height = best[0] * c->side;
    found->down = best[0], found->across = best[1];
    found->tiles = best[0] * best[1] + 1, found->each = rows_of_tile(c);
}

static void lay_out_lfm2(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *found)
{
    const double side = c->join * c->patch;
    const double cells = fmax(1, rint(height / side)) * fmax(1, rint(width / side));
    lfm2_whole(c, width, height, smaller(most, LFM2_MOST), found);
    for (uint32_t number = 2; cells > (double)LFM2_MOST * LFM2_LARGE && number <= c->most; number++) {
        eyes_layout next;
        lfm2_divided(c, width, height, number, &next);
        if (eyes_tokens(&next) <= most && eyes_tokens(&next) > eyes_tokens(found))
            *found = next;
    }
}

/* ---- any shape (Qwen, Gemma 4) ---------------------------------------------------------------------------------------- */

/* Rounds both sides to whole cells, within the limits of the pixels' number. */
static void lay_out_qwen(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *found)
{
    const uint32_t side = c->join * c->patch;
    const double most_pixels = (double)most * side * side, least = fmin((double)c->least_pixels, most_pixels);
    const double sides[] = {width, height}, area = sides[0] * sides[1];
    uint32_t made[2];
    for (int i = 0; i < 2; i++)
        made[i] = (uint32_t)rint(sides[i] / side) * side;
    if ((double)made[0] * made[1] < least)
        for (int i = 0; i < 2; i++)
            made[i] = (uint32_t)ceil(sides[i] * sqrt(least / area) / side) * side;
    if ((double)made[0] * made[1] > most_pixels) /* also where that was grown a little too far */
        for (int i = 0; i < 2; i++)
            made[i] = larger(side, (uint32_t)floor(sides[i] / sqrt(area / most_pixels) / side) * side);
    set_whole(c, made[0], made[1], found);
}

/* Scaled, also up, until it fills the largest budget that is allowed. */
static void lay_out_gemma4(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *found)
{
    const uint32_t side = c->join * c->patch;
    uint32_t budget = c->least;
    for (size_t i = 0; i < sizeof GEMMA4_SIZES / sizeof *GEMMA4_SIZES; i++)
        budget = GEMMA4_SIZES[i] <= most ? GEMMA4_SIZES[i] : budget;
    const double scale = sqrt((double)budget * side * side / ((double)height * width));
    uint32_t rows = (uint32_t)floor(scale * height / side), columns = (uint32_t)floor(scale * width / side);
    if (!rows)
        rows = 1, columns = smaller(width / height, budget);
    else if (!columns)
        rows = smaller(height / width, budget), columns = 1;
    set_whole(c, columns * side, rows * side, found);
}

/* ---- all families ------------------------------------------------------------------------------------------------------- */

static edge_status too_few(edge_error *error, uint32_t fewest, uint32_t most)
{
    return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture has at least %d tokens, not %d: allow more", (int64_t)fewest, (int64_t)most);
}

edge_status eyes_lay_out(const eyes_config *c, uint32_t width, uint32_t height, uint32_t most, eyes_layout *layout, edge_error *error)
{
    if (!width || !height || (uint64_t)width * height > MOST_PIXELS)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture of %d x %d pixels: it must have some, and %d million at most",
                         (int64_t)width, (int64_t)height, (int64_t)(MOST_PIXELS / 1000000));
    if (width > (uint64_t)MOST_RATIO * height || height > (uint64_t)MOST_RATIO * width)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture of %d x %d pixels: one side is more than %d times the other",
                         (int64_t)width, (int64_t)height, (int64_t)MOST_RATIO);
    if (most && most < c->least)
        return too_few(error, c->least, most);
    most = most ? smaller(most, c->tokens) : c->tokens;
    switch (c->family) {
    case EYES_TILES: lay_out_tiles(c, width, height, most, layout); break;
    case EYES_LFM2: lay_out_lfm2(c, width, height, most, layout); break;
    case EYES_QWEN: lay_out_qwen(c, width, height, most, layout); break;
    case EYES_GEMMA4: lay_out_gemma4(c, width, height, most, layout); break;
    default: set_whole(c, c->side, c->side, layout);
    }
    return eyes_tokens(layout) > most ? too_few(error, eyes_tokens(layout), most) : EDGE_OK;
}

static char *put(char *at, const char *text)
{
    size_t length = strlen(text);
    memcpy(at, text, length);
    return at + length;
}

static char *put_number(char *at, uint32_t number)
{
    if (number >= 10)
        at = put_number(at, number / 10);
    *at = (char)('0' + number % 10);
    return at + 1;
}

uint32_t eyes_mark(const eyes_config *c, const eyes_layout *layout, uint32_t number, char mark[LONGEST_MARK])
{
    char *at = mark;
    const uint32_t last = layout->tiles - 1;
    if (number > last) {
        at = put(at, eyes_text(c, EYES_TEXT_END));
    } else if (number == last) {
        at = put(at, eyes_text(c, last ? EYES_TEXT_WHOLE : EYES_TEXT_START));
    } else {
        const uint32_t place[] = {number / layout->across + 1, number % layout->across + 1};
        if (!number)
            at = put(at, eyes_text(c, EYES_TEXT_OPEN));
        if (number && place[1] == 1)
            at = put(at, eyes_text(c, EYES_TEXT_ROW));
        uint32_t numbers = 0;
        for (const char *text = eyes_text(c, EYES_TEXT_TILE); *text; text++)
            if (text[0] == '%' && text[1] == 'd' && numbers < 2)
                at = put_number(at, place[numbers++]), text++;
            else
                *at++ = *text;
    }
    return (uint32_t)(at - mark);
}
