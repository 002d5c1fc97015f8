/* A port of GivenRows.places: a picture's rows stand at one time, at the rows and columns of its grid, and text goes on behind
 * the larger of both. */
#include "given.h"
#include "places.h"

static uint32_t larger(uint32_t one, uint32_t other)
{
    return one > other ? one : other;
}

/* The position behind the first `count` cells of a grid that begins at 0. */
static uint32_t reached(const picture_rows *p, uint32_t count)
{
    if (!count)
        return 0;
    const uint32_t row = (count - 1) / p->grid_across;
    return larger(row, row ? p->grid_across - 1 : count - 1) + 1;
}

void places_find(const given *g, const int32_t *tokens, uint32_t count, int64_t position, places *found)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t number = given_find(g, tokens[i]);
        const picture_rows *p = number < given_count(g) ? given_picture(g, number) : NULL;
        const uint32_t at = p ? (uint32_t)(tokens[i] - p->first) : 0;
        found->sees[i] = (int32_t)(p && p->whole ? smaller(i + p->count - at, count) - 1 : i);
        if (!found->cells)
            continue;
        uint32_t cell[2] = {0, 0}, next = 1;
        if (p && p->grid_across) {
            position -= reached(p, at); /* where the picture begins */
            cell[0] = at / p->grid_across, cell[1] = at % p->grid_across;
            next = reached(p, at + 1);
        }
        found->cells[i][0] = (int32_t)position;
        for (uint32_t side = 0; side < 2; side++)
            found->cells[i][1 + side] = (int32_t)position + (int32_t)cell[side];
        position += next;
        found->numbers[i] = (int32_t)position - 1;
    }
    found->next = found->cells ? position : position + count;
}
