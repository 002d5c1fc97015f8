/* The rows of the arena that each head has: a port of backends/tvm/kv/regions.py. At first all heads of a part have equally
 * many. Once a policy lets them keep different numbers (kvzap), every eviction divides the part anew, so that all have the
 * same number of free rows. */
#include "kv_parts.h"
#include "rows.h"
#include "system.h"

#include <string.h>

/* Sets `length` and `room` by the rows of all heads. Returns the number of free rows. */
static uint32_t measure(kv_part *p)
{
    uint64_t sum = 0;
    p->length = 0;
    for (uint32_t head = 0; head < p->heads; head++) {
        sum += p->lengths[head];
        p->length = p->lengths[head] > p->length ? p->lengths[head] : p->length;
    }
    const uint32_t mean = p->heads ? (uint32_t)((sum + p->heads - 1) / p->heads) : 0;
    const uint32_t free = smaller(p->capacity - mean, p->longest - p->length);
    p->room = p->length + free;
    return free;
}

/* Writes the positions of the rows in use where passes read them, for sliding windows. */
void kv_place(kv *k, const kv_part *p)
{
    for (uint32_t head = 0; p->windowed && head < p->heads; head++)
        for (uint32_t row = 0; row < length_of(p, head); row++)
            k->positions[row_of(p, head, row)] = *position_of(p, head, row);
}

static void move_head(kv *k, const kv_part *p, uint32_t head, uint32_t source, uint32_t target)
{
    if (!k || source == target)
        return;
    rows_shift(p->rows, source, target, whole_tiles(length_of(p, head)));
    if (p->observed)
        memmove(k->paid + target, k->paid + source, sizeof(float) * p->length);
}

/* Moves down come first, then moves up, from the last head on: none overwrites rows that have yet to move. */
void kv_share_out(kv *k, kv_part *p)
{
    const uint32_t free = measure(p);
    uint32_t next = p->start;
    for (uint32_t head = 0; head < p->heads; head++) {
        if (next < p->starts[head]) {
            move_head(k, p, head, p->starts[head], next);
            p->starts[head] = next;
        }
        next += whole_tiles(p->lengths[head] + free);
    }
    for (uint32_t head = p->heads; head-- > 0;) {
        next -= whole_tiles(p->lengths[head] + free);
        move_head(k, p, head, p->starts[head], next);
        p->starts[head] = next;
    }
}

/* Returns the pages of rows `first` … `end` - 1 of the arena to the system. first: begins a tile. */
static void release(kv *k, const kv_part *p, uint32_t first, uint32_t end)
{
    rows_release(p->rows, first, end - first);
    if (p->observed)
        release_memory(k->paid + first, sizeof(float) * (end - first));
    if (p->windowed)
        release_memory(k->positions + first, sizeof(int32_t) * (end - first));
}

void kv_release(kv *k)
{
    for (kv_part *p = &k->whole; p; p = p == &k->whole ? &k->ring : NULL)
        for (uint32_t head = 0; head < p->heads; head++) {
            const uint32_t end = head + 1 < p->heads ? start_of(p, head + 1) : p->start + p->heads * p->even;
            release(k, p, start_of(p, head) + whole_tiles(length_of(p, head)), end);
        }
    if (k->state_bytes)
        release_memory((uint8_t *)k->snapshots + k->held * k->state_bytes, (SNAPSHOTS - k->held) * k->state_bytes);
}

void kv_shrink(kv *k, uint32_t capacity)
{
    kv_part *p = &k->whole;
    uint32_t before = p->even, used = kv_part_used(p), least = used ? used : 1;
    capacity = capacity > least ? capacity : least;
    if (capacity >= p->capacity)
        return;
    p->capacity = capacity, p->even = whole_tiles(capacity) + TILE * (p->starts != NULL);
    if (p->starts)
        kv_share_out(k, p);
    else
        for (uint32_t head = 0; head < p->heads; head++)
            move_head(k, p, head, p->start + head * before, p->start + head * p->even);
    p->room = p->starts ? p->room : capacity;
    release(k, p, p->start + p->heads * p->even, p->rows->count);
    kv_place(k, p);
}
