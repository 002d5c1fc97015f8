#include <string.h>

#include "given.h"
#include "system.h"

struct given {
    uint32_t vocab, count;
    picture_rows pictures[MOST_PICTURES];
};

given *given_layout(arena *from, uint32_t vocab)
{
    given *taken = take(from, sizeof *taken);
    if (taken)
        taken->vocab = vocab;
    return taken;
}

static void give_back(picture_rows *p)
{
    if (p->rows)
        unmap_memory(p->rows, (uint64_t)p->count * p->width * sizeof *p->rows);
    p->rows = NULL;
}

void given_drop(given *g, uint32_t count)
{
    for (uint32_t i = count; i < g->count; i++)
        give_back(g->pictures + i);
    g->count = smaller(g->count, count);
}

void given_clear(given *g)
{
    given_drop(g, 0);
}

/* Whether no other picture has one of these ids. */
static bool is_free(const given *g, const picture_rows *p)
{
    for (uint32_t i = 0; i < g->count; i++) {
        const picture_rows *other = g->pictures + i;
        bool same = !memcmp(other->hash, p->hash, sizeof p->hash);
        if (!same && (int64_t)p->first < (int64_t)other->first + other->count && other->first < (int64_t)p->first + p->count)
            return false;
    }
    return true;
}

bool given_add(given *g, picture_rows picture)
{
    if (g->count == MOST_PICTURES)
        return false;
    uint32_t drawn, room = (uint32_t)INT32_MAX - g->vocab - picture.count;
    memcpy(&drawn, picture.hash, sizeof drawn);
    do
        picture.first = (int32_t)(g->vocab + drawn % room);
    while (drawn += picture.count, !is_free(g, &picture));
    given_put(g, picture);
    return true;
}

void given_put(given *g, picture_rows picture)
{
    g->pictures[g->count++] = picture;
}

uint32_t given_count(const given *g)
{
    return g->count;
}

const picture_rows *given_picture(const given *g, uint32_t number)
{
    return g->pictures + number;
}

uint64_t given_bytes(const given *g)
{
    uint64_t found = 0;
    for (uint32_t i = 0; i < g->count; i++)
        found += g->pictures[i].rows ? (uint64_t)g->pictures[i].count * g->pictures[i].width * sizeof(float) : 0;
    return found;
}

/* Of a picture that was shown twice, the first that has rows. */
uint32_t given_find(const given *g, int32_t id)
{
    uint32_t found = g->count;
    for (uint32_t i = 0; i < g->count; i++) {
        const picture_rows *p = g->pictures + i;
        if (id < p->first || (int64_t)id >= (int64_t)p->first + p->count)
            continue;
        found = i;
        if (p->rows)
            break;
    }
    return found;
}

const float *given_row(const given *g, int32_t id)
{
    const picture_rows *p = g->pictures + given_find(g, id);
    return p < g->pictures + g->count && p->rows ? p->rows + (size_t)(id - p->first) * p->width : NULL;
}

void given_ran(given *g, const int32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = given_find(g, ids[i]);
        if (number < g->count && ids[i] == g->pictures[number].first + (int32_t)g->pictures[number].count - 1)
            give_back(g->pictures + number);
    }
}
