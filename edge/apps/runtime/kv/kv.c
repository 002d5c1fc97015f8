/* The KV cache: a port of backends/head_kv.py, row_lists.py and ring.py, and of the bookkeeping in backends/tvm/kv/store.py,
 * for heads that all keep the same number of rows.
 *
 * A cache has two parts: `whole`, of layers that see all rows, and `ring`, of layers with a sliding window. An arena holds
 * the rows of one head after the other, `even` rows each, which are whole tiles:
 *
 *     arena      | ring head 0 | ring head 1 | … | whole head 0         | whole head 1         | …
 *                                                 \_ start + 0 * even   \_ start + 1 * even
 *     whole head | physical rows 0 … length - 1, in use | free, up to capacity | padding of the last tile |
 *
 * If the rows of rings have another shape, they lie in an arena of their own. A list maps logical rows, oldest
 * first, to physical rows, and gives each a position. One list serves all heads of a part until a policy keeps different rows
 * in each head (h2o). Of six rows, the second has been evicted:
 *
 *     logical row  0  1  2  3  4
 *     physical     0  2  3  4  1         the last row has moved into the hole
 *     positions    0  2  3  4  5         lists of single heads leave this gap open
 *                  0  1  2  3  4         a list of all heads closes it: row 0 is rotated by 1, and `base` grows by 1
 *
 * Invariants:
 *  - the physical rows of a list are 0 … length - 1 in some order: evictions move rows from the end into holes;
 *  - positions ascend, or stay where a picture's have several components, and are less than `next`, the position of the next token;
 *  - the key of a row is rotated to the RoPE position `base` + position. Closing a gap rotates the few keys before it forward
 *    and raises `base`, so that the RoPE positions of all other keys stay, and new ones only grow;
 *  - a ring has the rows of positions `first` … next - 1; its base and next follow those of `whole`;
 *  - the first `known` rows of the one list have their unrotated keys in `pinned_keys`.
 *
 * The fixed state of recurrent layers sums up all tokens; no eviction touches it (backends/fixed_state.py). Only a snapshot
 * brings it back to an earlier length (edge/run/sequences/snapshots.py). */
#include "kv_parts.h"
#include "rows.h"
#include "system.h"

#include <string.h>

/* ---- layout ----------------------------------------------------------------------------------------------------- */

static void lay_out(arena *from, kv *k, kv_part *p, bool ringed, uint32_t capacity, uint32_t start, uint32_t lists)
{
    const edge_config *config = k->model->config;
    uint32_t heads = config->shapes[ringed].heads;
    uint32_t *of = take(from, sizeof *of * config->layers * config->kv_heads);
    *p = (kv_part){.start = start, .even = whole_tiles(capacity), .capacity = capacity, .longest = capacity, .lists = 1};
    for (uint32_t layer = 0; layer < config->layers; layer++) {
        const layer_config *own = k->model->layers + layer;
        if (own->rowless || (own->ringed != 0) != ringed)
            continue;
        for (uint32_t head = 0; head < heads; head++, p->heads++)
            if (of)
                of[p->heads] = layer * config->kv_heads + head;
    }
    uint64_t count = p->heads ? (uint64_t)(lists ? lists : p->heads) * capacity : 0;
    p->physical = take(from, sizeof(int32_t) * count);
    p->positions = take(from, sizeof(int32_t) * count);
    p->of = of;
}

kv *kv_layout(arena *from, const edge_model *model, bool elsewhere)
{
    const edge_config *config = model->config;
    bool observed = config->policy == POLICY_H2O, ringed;
    bool apart = memcmp(config->shapes, config->shapes + 1, sizeof *config->shapes) != 0;
    kv counted = {0}, *taken = take(from, sizeof *taken), *k = taken ? taken : &counted;
    k->model = model;
    lay_out(from, k, &k->ring, true, config->ring_rows, 0, 1);
    ringed = k->ring.heads > 0;
    uint32_t in_rings = k->ring.heads * k->ring.even;
    lay_out(from, k, &k->whole, false, config->capacity, apart ? 0 : in_rings, observed ? 0 : 1);
    k->ring.windowed = true, k->whole.windowed = config->windowed && !ringed, k->whole.observed = observed;
    k->before = config->ring_window ? config->ring_window - 1 : 0;
    k->spare = k->ring.capacity / RING_SHARE < 1 ? 1
        : k->ring.capacity / RING_SHARE > RING_SLACK ? RING_SLACK : k->ring.capacity / RING_SHARE;
    k->first = ALL;
    k->state_bytes = (size_t)config->states * sizeof *k->states;
    uint64_t copies = k->state_bytes ? config->threads * config->copied : 0;
    k->working = take(from, copies * sizeof *k->states + k->state_bytes);
    k->states = k->working ? k->working + copies : NULL;
    k->snapshots = take(from, SNAPSHOTS * k->state_bytes);

    uint32_t heads = config->layers * config->kv_heads, rows = k->whole.start + k->whole.heads * k->whole.even;
    k->whole.rows = k->rows, k->ring.rows = k->rows + apart;
    rows_layout(from, k->rows, model, config->shapes[0], rows, elsewhere);
    if (apart)
        rows_layout(from, k->rows + 1, model, config->shapes[1], in_rings, elsewhere);
    k->starts = take(from, sizeof(int32_t) * heads);
    k->lengths = take(from, sizeof(int32_t) * heads);
    k->positions = take(from, config->windowed ? sizeof(int32_t) * ((apart ? in_rings : rows) + 4ull * TILE) : 0);
    k->paid = take(from, observed ? sizeof(float) * (rows + 4ull * TILE) : 0);
    k->pinned = config->policy == POLICY_STREAMING || config->policy == POLICY_WINDOW ? config->pinned : 0;
    k->pinned_keys = take(from, (uint64_t)sizeof(float) * k->whole.heads * k->pinned * config->shapes[0].key);
    k->pinned_positions = take(from, sizeof(int64_t) * k->pinned);
    k->angles = take(from, sizeof(float) * config->rope_kinds * config->head);
    k->key = take(from, sizeof(float) * config->head);
    k->occupied = take(from, config->capacity > config->ring_rows ? config->capacity : config->ring_rows);
    return taken;
}

uint32_t kv_arena(const kv *k, uint32_t number) { return k->rows[number].count; }
void kv_attach(kv *k, uint32_t number, rows_device *device) { k->rows[number].device = device; }

/* ---- lists of rows ------------------------------------------------------------------------------------------------ */

/* Keeps these `count` logical rows of a list, ascending (NULL: rows first, first + 1, …). Physical rows beyond the new
 * length move into holes. */
static void retain(kv *k, kv_part *p, uint32_t list, const int32_t *rows, uint32_t first, uint32_t count)
{
    int32_t *physical = p->physical + (size_t)list * p->longest, *positions = p->positions + (size_t)list * p->longest;
    uint32_t hole = 0;
    memset(k->occupied, 0, count);
    for (uint32_t at = 0; at < count; at++) {
        uint32_t kept = rows ? (uint32_t)rows[at] : first + at;
        physical[at] = physical[kept], positions[at] = positions[kept];
        if ((uint32_t)physical[at] < count)
            k->occupied[physical[at]] = 1;
    }
    for (uint32_t at = 0; at < count; at++) {
        if ((uint32_t)physical[at] < count)
            continue;
        while (k->occupied[hole])
            hole++;
        for (uint32_t head = list; head < heads_of(p, list); head++) {
            uint32_t start = p->start + head * p->even, source = start + (uint32_t)physical[at];
            rows_move(p->rows, source, start + hole);
            if (p->observed)
                k->paid[start + hole] = k->paid[source];
        }
        physical[at] = (int32_t)hole++;
    }
    rows_settle(p->rows);
}

/* Writes the positions of the rows in use where passes read them, for sliding windows. */
void kv_place(kv *k, const kv_part *p)
{
    for (uint32_t head = 0; p->windowed && head < p->heads; head++)
        for (uint32_t row = 0; row < p->length; row++)
            k->positions[row_of(p, head, row)] = *position_of(p, head, row);
}

/* After an eviction or new positions: rotates the ring's rows so that they keep their distances to the next token. */
static void follow(kv *k)
{
    kv_part *ring = &k->ring;
    k->held = 0;
    int64_t by = k->whole.base + k->whole.next - ring->base - ring->next, shift = k->whole.next - ring->next;
    for (uint32_t row = 0; row < ring->length; row++) {
        if (by)
            kv_rotate_row(k, ring, 0, row, by, kv_factors(k));
        ring->positions[row] += (int32_t)shift;
    }
    k->first += k->first == ALL ? 0 : shift;
    ring->base = k->whole.base, ring->next = k->whole.next;
    kv_place(k, ring);
}

/* Gives the rows of the only list positions from 0 on, one behind the other, but rows of a picture that share one keep one. */
static void close_gaps(kv *k)
{
    kv_part *p = &k->whole;
    uint32_t moved = 0, rows[ROTATED_AT_ONCE];
    int64_t before[ROTATED_AT_ONCE], after[ROTATED_AT_ONCE], base = p->base;
    int32_t wanted = 0, earlier = p->length ? p->positions[0] : 0;
    for (uint32_t row = 1; row < p->length; row++)
        wanted += p->positions[row] > p->positions[row - 1];
    p->base = p->length ? base + p->positions[p->length - 1] - wanted : 0;
    p->next = p->length ? wanted + 1 : 0;
    wanted = 0;
    for (uint32_t row = 0; row < p->length; row++) {
        const int32_t found = p->positions[row];
        wanted += found > earlier, earlier = found;
        if (base + found != p->base + wanted) {
            rows[moved] = row, before[moved] = base + found, after[moved] = p->base + wanted;
            moved++;
        }
        p->positions[row] = wanted;
        if (moved == ROTATED_AT_ONCE || (moved && row == p->length - 1)) {
            kv_move_keys(k, rows, before, after, moved);
            moved = 0;
        }
    }
}

void kv_keep(kv *k, const int32_t *rows, uint32_t count)
{
    kv_part *p = &k->whole;
    uint32_t same = 0;
    while (same < k->known && same < count && rows[same] == (int32_t)same)
        same++;
    k->known = same; /* first rows that have stayed */
    retain(k, p, 0, rows, 0, count);
    p->length = count;
    close_gaps(k);
    kv_place(k, p);
    follow(k);
}

void kv_keep_heads(kv *k, uint32_t count, kv_choice choose, void *from, int32_t *rows)
{
    kv_part *p = &k->whole;
    if (p->lists == 1) {
        for (uint32_t head = 1; head < p->heads; head++) {
            memcpy(p->physical + (size_t)head * p->longest, p->physical, sizeof(int32_t) * p->length);
            memcpy(p->positions + (size_t)head * p->longest, p->positions, sizeof(int32_t) * p->length);
        }
        p->lists = p->heads;
    }
    k->known = 0;
    for (uint32_t head = 0; head < p->heads; head++) {
        choose(from, head, rows);
        retain(k, p, head, rows, 0, count);
    }
    p->length = count;
    kv_place(k, p);
    follow(k);
}

void kv_renumber(kv *k)
{
    kv_part *p = &k->whole;
    for (uint32_t list = 0; list < p->lists; list++)
        for (uint32_t row = 0; row < p->length; row++) {
            int32_t *position = position_of(p, list, row);
            int64_t found = *position;
            float younger = (float)((double)(p->length - row) / (double)(p->next - found));
            for (uint32_t head = list; p->observed && head < heads_of(p, list); head++)
                k->paid[row_of(p, head, row)] *= younger;
            if (p->base + found != row)
                kv_rotate_row(k, p, list, row, row - p->base - found, kv_factors(k));
            *position = (int32_t)row;
        }
    p->base = 0, p->next = p->length;
    k->known = 0;
    kv_place(k, p);
    follow(k);
}

/* ---- rows that come and go ---------------------------------------------------------------------------------------- */

void kv_clear(kv *k)
{
    for (kv_part *p = &k->whole; p; p = p == &k->whole ? &k->ring : NULL)
        p->lists = 1, p->length = 0, p->base = p->next = 0;
    k->known = 0, k->lengthened = false, k->first = ALL;
    k->held = 0;
    if (k->state_bytes)
        memset(k->states, 0, k->state_bytes);
}

uint32_t kv_length(const kv *k) { return k->whole.length; }
uint32_t kv_free(const kv *k) { return k->whole.capacity - k->whole.length; }
uint32_t kv_capacity(const kv *k) { return k->whole.capacity; }
int64_t kv_next_position(const kv *k) { return k->whole.next; }
int64_t kv_next_rope_position(const kv *k) { return k->whole.base + k->whole.next; }
bool kv_lengthened(const kv *k) { return k->lengthened; }

static void prepare(kv *k, const kv_part *p, uint32_t count)
{
    for (uint32_t head = 0; head < p->heads; head++) {
        uint32_t start = p->start + head * p->even, end = start + p->length;
        k->starts[p->of[head]] = (int32_t)start, k->lengths[p->of[head]] = (int32_t)p->length;
        for (uint32_t row = 0; p->windowed && row < count; row++)
            k->positions[end + row] = (int32_t)(p->next + row);
        for (uint32_t row = 0; p->observed && row < count; row++)
            k->paid[end + row] = 0;
    }
}

void kv_prepare(kv *k, uint32_t count)
{
    kv_part *ring = &k->ring;
    if (ring->heads && count > ring->capacity - ring->length) { /* drop the oldest rows, a few dozen at once */
        uint32_t more = count > k->spare ? count : k->spare, kept = ring->capacity - more;
        k->first = ring->next - kept;
        retain(k, ring, 0, NULL, ring->length - kept, kept);
        ring->length = kept;
        kv_place(k, ring);
    }
    prepare(k, ring, count);
    prepare(k, &k->whole, count);
}

void kv_appended(kv *k, uint32_t count) { kv_appended_at(k, count, NULL, k->whole.next + count); }

void kv_appended_at(kv *k, uint32_t count, const int32_t *positions, int64_t next)
{
    for (kv_part *p = &k->whole; p; p = p == &k->whole ? &k->ring : NULL) {
        for (uint32_t list = 0; p->heads && list < p->lists; list++)
            for (uint32_t row = p->length; row < p->length + count; row++) {
                p->physical[(size_t)list * p->longest + row] = (int32_t)row;
                *position_of(p, list, row) = positions ? positions[row - p->length] : (int32_t)(p->next + row - p->length);
            }
        p->next = next;
        p->length += p->heads ? count : 0;
    }
}

/* The next position if only `length` rows stay. Lists of different heads agree on the newest rows. */
static int64_t next_without(const kv_part *p, uint32_t length)
{
    return p->lists > 1 ? p->next - (p->length - length) : (int64_t)p->positions[length - 1] + 1;
}

/* The number of the snapshot at this length; `held` if there is none. */
static uint32_t snapshot_of(const kv *k, uint32_t length)
{
    uint32_t number = 0;
    while (number < k->held && k->ends[number] != length)
        number++;
    return number;
}

uint32_t kv_latest(const kv *k, uint32_t length)
{
    for (uint32_t number = k->held; number; number--)
        if (k->ends[number - 1] <= length && kv_can_truncate(k, k->ends[number - 1]))
            return k->ends[number - 1];
    return 0;
}

bool kv_can_truncate(const kv *k, uint32_t length)
{
    const kv_part *p = &k->whole;
    if (!length || length >= p->length)
        return length <= p->length;
    if (k->state_bytes && snapshot_of(k, length) == k->held)
        return false;
    return !k->ring.heads || next_without(p, length) >= k->first + k->before;
}

void kv_truncate(kv *k, uint32_t length)
{
    kv_part *p = &k->whole, *ring = &k->ring;
    if (!length)
        kv_clear(k);
    if (length >= p->length)
        return;
    if (k->state_bytes) {
        uint32_t number = snapshot_of(k, length);
        memcpy(k->states, (uint8_t *)k->snapshots + number * k->state_bytes, k->state_bytes);
        k->held = number + 1;
    }
    int64_t next = next_without(p, length), gone = ring->next - next;
    uint32_t kept = ring->length > gone ? (uint32_t)(ring->length - gone) : 0;
    if (ring->heads)
        retain(k, ring, 0, NULL, 0, kept);
    ring->length = kept, ring->next = next;
    kv_place(k, ring);
    for (uint32_t list = 0; list < p->lists; list++)
        retain(k, p, list, NULL, 0, length);
    p->length = length, p->next = next;
    k->known = k->known < length ? k->known : length;
    kv_place(k, p);
}

uint32_t kv_at_once(const kv *k, uint32_t count)
{
    const kv_part *ring = &k->ring;
    uint32_t from = k->model->config->long_from, fits = ring->capacity - ring->length;
    if (from && !k->lengthened && k->whole.next + count > from)
        return 1;
    if (ring->heads && (k->first + k->before > ring->next + 1 || !fits))
        return 1;
    return ring->heads && fits < count ? fits : count;
}

void kv_drop(kv *k, uint32_t count)
{
    for (kv_part *p = &k->whole; p; p = p == &k->whole ? &k->ring : NULL) {
        p->next -= count;
        p->length -= p->heads ? count : 0;
    }
    k->known = k->known < k->whole.length ? k->known : k->whole.length;
}

/* Returns the pages of `count` rows of the arena, from `first` on, to the system. first: begins a tile. */
static void release(kv *k, const kv_part *p, uint32_t first, uint32_t count)
{
    rows_release(p->rows, first, count);
    if (p->observed)
        release_memory(k->paid + first, sizeof(float) * count);
    if (p->windowed)
        release_memory(k->positions + first, sizeof(int32_t) * count);
}

void kv_release(kv *k)
{
    for (kv_part *p = &k->whole; p; p = p == &k->whole ? &k->ring : NULL)
        for (uint32_t head = 0, used = whole_tiles(p->length); head < p->heads; head++)
            release(k, p, p->start + head * p->even + used, p->even - used);
    if (k->state_bytes)
        release_memory((uint8_t *)k->snapshots + k->held * k->state_bytes, (SNAPSHOTS - k->held) * k->state_bytes);
}

void kv_shrink(kv *k, uint32_t capacity)
{
    kv_part *p = &k->whole;
    uint32_t before = p->even, least = p->length ? p->length : 1;
    capacity = capacity > least ? capacity : least;
    if (capacity >= p->capacity)
        return;
    p->capacity = capacity, p->even = whole_tiles(capacity);
    for (uint32_t head = 0; head < p->heads; head++) {
        uint32_t source = p->start + head * before, target = p->start + head * p->even;
        rows_shift(p->rows, source, target, whole_tiles(p->length));
        if (p->observed)
            memmove(k->paid + target, k->paid + source, sizeof(float) * p->length);
    }
    uint32_t end = p->start + p->heads * p->even;
    release(k, p, end, p->rows->count - end);
    kv_place(k, p);
}

static uint64_t bytes_of(const kv_part *p)
{
    return (uint64_t)p->heads * p->even * (rows_bytes(p->rows) + sizeof(int32_t) * (p->windowed + p->observed));
}

uint64_t kv_bytes(const kv *k) { return bytes_of(&k->whole); }
uint64_t kv_fixed(const kv *k) { return bytes_of(&k->ring) + k->state_bytes; }
uint64_t kv_remembered(const kv *k) { return SNAPSHOTS * k->state_bytes; }

void kv_remember(kv *k, uint32_t kept)
{
    if (!k->state_bytes || !k->whole.length || snapshot_of(k, k->whole.length) < k->held)
        return;
    uint8_t *snapshots = (uint8_t *)k->snapshots;
    if (k->held == SNAPSHOTS) { /* drop the earliest but the kept one */
        uint32_t first = kept && k->ends[0] == kept, later = --k->held - first;
        uint8_t *gone = snapshots + first * k->state_bytes;
        memmove(gone, gone + k->state_bytes, later * k->state_bytes);
        memmove(k->ends + first, k->ends + first + 1, later * sizeof *k->ends);
    }
    memcpy(snapshots + k->held * k->state_bytes, k->states, k->state_bytes);
    k->ends[k->held++] = k->whole.length;
}

kv_pointers kv_arguments(kv *k)
{
    uint8_t **arrays = k->whole.rows->arrays, **rings = k->ring.rows->arrays;
    return (kv_pointers){arrays[0], arrays[1], arrays[2], arrays[3], k->lengths, k->positions, k->paid, k->starts,
                         rings[0], rings[1], rings[2], rings[3], k->positions, k->working};
}

kv_rows *kv_arenas(kv *k) { return k->rows; }

void kv_written(kv *k, uint32_t count)
{
    for (kv_part *p = &k->whole; p; p = p == &k->whole ? &k->ring : NULL)
        for (uint32_t head = 0; head < p->heads; head++)
            rows_written(p->rows, p->start + head * p->even + p->length, count);
}

/* ---- reads of policies -------------------------------------------------------------------------------------------- */

uint32_t kv_heads(const kv *k) { return k->whole.heads; }

void kv_attention(const kv *k, uint32_t head, float *paid, int32_t *ages)
{
    const kv_part *p = &k->whole;
    for (uint32_t row = 0; row < p->length; row++) {
        paid[row] = k->paid[row_of(p, head, row)];
        ages[row] = (int32_t)(p->next - *position_of(p, head, row));
    }
}
