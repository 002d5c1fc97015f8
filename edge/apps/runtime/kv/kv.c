/* The KV cache: a port of backends/head_kv.py, row_lists.py and ring.py, and of the bookkeeping in backends/tvm/kv/store.py,
 * for heads that may keep different numbers of rows (kv_regions.c).
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
 * in each head (h2o, kvzap). Of six rows, the second has been evicted:
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

/* No rows, and equally many of the arena for all heads. */
static void clear_part(kv_part *p)
{
    p->lists = 1, p->length = 0, p->base = p->next = 0;
    p->room = p->capacity;
    for (uint32_t head = 0; p->starts && head < p->heads; head++)
        p->starts[head] = p->start + head * p->even, p->lengths[head] = 0;
}

/* Adds to the numbers of rows of all heads. */
static void lengthen_heads(kv_part *p, int64_t by)
{
    p->length = (uint32_t)(p->length + (p->heads ? by : 0));
    for (uint32_t head = 0; p->lengths && head < p->heads; head++)
        p->lengths[head] = (uint32_t)(p->lengths[head] + by);
}

static void lay_out(arena *from, kv *k, kv_part *p, bool ringed, uint32_t capacity, uint32_t start, bool apart, bool uneven)
{
    const edge_config *config = k->model->config;
    uint32_t heads = config->shapes[ringed].heads;
    uint32_t *of = take(from, sizeof *of * config->layers * config->kv_heads);
    *p = (kv_part){.apart = apart, .start = start, .even = whole_tiles(capacity) + TILE * uneven, .capacity = capacity,
                   .longest = ringed ? capacity : longest_head(config)};
    for (uint32_t layer = 0; layer < config->layers; layer++) {
        const layer_config *own = k->model->layers + layer;
        if (own->rowless || (own->ringed != 0) != ringed)
            continue;
        for (uint32_t head = 0; head < heads; head++, p->heads++)
            if (of)
                of[p->heads] = layer * config->kv_heads + head;
    }
    uint64_t count = p->heads ? (uint64_t)(apart ? p->heads : 1) * p->longest : 0;
    p->physical = take(from, sizeof(int32_t) * count);
    p->positions = take(from, sizeof(int32_t) * count);
    p->of = of;
    p->starts = take(from, uneven ? sizeof *p->starts * p->heads : 0);
    p->lengths = take(from, uneven ? sizeof *p->lengths * p->heads : 0);
    if (!uneven)
        p->starts = p->lengths = NULL;
    clear_part(p);
}

kv *kv_layout(arena *from, const edge_model *model, bool elsewhere)
{
    const edge_config *config = model->config;
    bool observed = config->policy == POLICY_H2O, ranked = config->policy == POLICY_KVZAP, ringed;
    bool apart = memcmp(config->shapes, config->shapes + 1, sizeof *config->shapes) != 0;
    kv counted = {0}, *taken = take(from, sizeof *taken), *k = taken ? taken : &counted;
    k->model = model;
    lay_out(from, k, &k->ring, true, config->ring_rows, 0, false, false);
    ringed = k->ring.heads > 0;
    uint32_t in_rings = k->ring.heads * k->ring.even;
    lay_out(from, k, &k->whole, false, config->capacity, apart ? 0 : in_rings, observed || ranked, ranked && config->floor < 1);
    k->ring.windowed = true, k->whole.windowed = config->windowed && !ringed, k->whole.observed = observed;
    k->before = config->ring_window ? config->ring_window - 1 : 0;
    k->spare = k->ring.capacity / RING_SHARE < 1 ? 1
        : k->ring.capacity / RING_SHARE > RING_SLACK ? RING_SLACK : k->ring.capacity / RING_SHARE;
    k->first = ALL;
    k->state_bytes = (size_t)config->states * sizeof *k->states.values;
    uint64_t copies = k->state_bytes && !elsewhere ? config->threads * config->copied : 0;
    k->working = take(from, copies * sizeof *k->working + k->state_bytes);
    k->states.values = k->working ? k->working + copies : NULL;
    k->snapshots = take(from, SNAPSHOTS * k->state_bytes);

    uint32_t heads = config->layers * config->kv_heads, rows = k->whole.start + k->whole.heads * k->whole.even;
    k->whole.rows = k->rows, k->ring.rows = k->rows + apart;
    rows_layout(from, k->rows, model, config->shapes[0], rows, elsewhere && config->shapes[0].key);
    if (apart)
        rows_layout(from, k->rows + 1, model, config->shapes[1], in_rings, elsewhere);
    const uint64_t prefix = model->sizes[SECTION_PREFIX], each = k->whole.heads * (uint64_t)rows_bytes(k->rows);
    if (prefix && each && !ringed && !k->state_bytes && !elsewhere && prefix % each == 0 && prefix / each < config->capacity)
        k->prefix = (uint32_t)(prefix / each);
    k->starts = take(from, sizeof(int32_t) * heads);
    k->lengths = take(from, sizeof(int32_t) * heads);
    k->positions = take(from, config->windowed ? sizeof(int32_t) * ((apart ? in_rings : rows) + 4ull * TILE) : 0);
    k->paid = take(from, observed ? sizeof(float) * (rows + 4ull * TILE) : 0);
    k->pinned = config->policy == POLICY_STREAMING || config->policy == POLICY_WINDOW ? config->pinned : 0;
    k->pinned_keys = take(from, (uint64_t)sizeof(float) * k->whole.heads * k->pinned * config->shapes[0].key);
    k->pinned_positions = take(from, sizeof(int64_t) * k->pinned);
    k->angles = take(from, sizeof(float) * config->rope_kinds * config->head);
    k->key = take(from, sizeof(float) * config->head);
    k->scored = take(from, ranked ? sizeof *k->scored * k->whole.heads : 0);
    k->occupied = take(from, k->whole.longest > config->ring_rows ? k->whole.longest : config->ring_rows);
    return taken;
}

void kv_attach(kv *k, accelerator *device)
{
    for (uint32_t i = 0; i < 2 && k->rows[i].shape.key; i++) /* rows of models without attention are empty */
        k->rows[i].device = device->kind->rows(device, i, k->rows[i].count);
    k->device = device;
}

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
            uint32_t start = start_of(p, head), source = start + (uint32_t)physical[at];
            rows_move(p->rows, source, start + hole);
            if (p->observed)
                k->paid[start + hole] = k->paid[source];
        }
        physical[at] = (int32_t)hole++;
    }
    rows_settle(p->rows);
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

/* As retain, of the only list; closes gaps in positions. */
static void keep(kv *k, const int32_t *rows, uint32_t first, uint32_t count)
{
    kv_part *p = &k->whole;
    retain(k, p, 0, rows, first, count);
    lengthen_heads(p, (int64_t)count - p->length);
    close_gaps(k);
    kv_place(k, p);
    follow(k);
}

void kv_keep(kv *k, const int32_t *rows, uint32_t count)
{
    uint32_t same = 0;
    while (same < k->known && same < count && rows[same] == (int32_t)same)
        same++;
    k->known = same; /* first rows that have stayed */
    keep(k, rows, 0, count);
}

void kv_keep_newest(kv *k, uint32_t count)
{
    k->known = 0;
    keep(k, NULL, k->whole.length - count, count);
}

void kv_keep_heads(kv *k, kv_choice choose, void *from, int32_t *rows)
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
    uint32_t count = p->length;
    for (uint32_t head = 0; head < p->heads; head++) {
        count = choose(from, head, rows);
        retain(k, p, head, rows, 0, count);
        if (p->lengths)
            p->lengths[head] = count;
    }
    p->length = count;
    if (p->lengths)
        kv_share_out(k, p);
    kv_place(k, p);
    follow(k);
}

void kv_renumber(kv *k)
{
    kv_part *p = &k->whole;
    for (uint32_t list = 0; list < p->lists; list++)
        for (uint32_t row = 0, length = length_of(p, list), first = p->length - length; row < length; row++) {
            int32_t *position = position_of(p, list, row); /* the newest rows of all heads are level */
            int64_t found = *position;
            float younger = (float)((double)(length - row) / (double)(p->next - found));
            for (uint32_t head = list; p->observed && head < heads_of(p, list); head++)
                k->paid[row_of(p, head, row)] *= younger;
            if (p->base + found != first + row)
                kv_rotate_row(k, p, list, row, first + row - p->base - found, kv_factors(k));
            *position = (int32_t)(first + row);
        }
    p->base = 0, p->next = p->length;
    k->known = 0;
    kv_place(k, p);
    follow(k);
}

/* ---- rows that come and go ---------------------------------------------------------------------------------------- */

static void append_prefix(kv *k)
{
    const kv_part *p = &k->whole;
    const uint8_t *saved = k->model->sections[SECTION_PREFIX];
    kv_prepare(k, k->prefix);
    for (uint32_t head = 0; head < p->heads; head++)
        for (uint32_t row = 0; row < k->prefix; row++, saved += rows_bytes(p->rows))
            rows_restore(p->rows, start_of(p, head) + row, saved);
    kv_appended(k, k->prefix);
}

void kv_clear(kv *k)
{
    clear_part(&k->whole);
    clear_part(&k->ring);
    k->known = 0, k->lengthened = false, k->first = ALL;
    k->held = 0;
    memset(k->states.values, 0, k->state_bytes);
    kv_send_states(k);
    if (k->prefix)
        append_prefix(k);
}

uint32_t kv_prefix(const kv *k) { return k->prefix; }
uint32_t kv_length(const kv *k) { return k->whole.length; }
uint32_t kv_free(const kv *k) { return k->whole.room - k->whole.length; }
uint32_t kv_capacity(const kv *k) { return k->whole.capacity; }
uint32_t kv_used(const kv *k) { return kv_part_used(&k->whole); }

static uint64_t bytes_of(const kv_part *p)
{
    return (uint64_t)p->heads * p->even * (rows_bytes(p->rows) + sizeof(int32_t) * (p->windowed + p->observed));
}

uint64_t kv_bytes(const kv *k) { return bytes_of(&k->whole); }
uint64_t kv_fixed(const kv *k) { return bytes_of(&k->ring) + k->state_bytes; }
uint32_t kv_most(const kv *k) { return k->whole.lengths ? k->whole.longest : k->whole.capacity; }
int64_t kv_next_position(const kv *k) { return k->whole.next; }
int64_t kv_next_rope_position(const kv *k) { return k->whole.base + k->whole.next; }
bool kv_lengthened(const kv *k) { return k->lengthened; }

uint32_t kv_foresight(const kv *k)
{
    uint32_t from = k->model->config->long_from;
    return from && !k->lengthened && k->whole.next <= from ? (uint32_t)(from + 1 - k->whole.next) : 0;
}

void kv_announce(kv *k, uint32_t count)
{
    uint32_t from = k->model->config->long_from;
    if (!from || k->lengthened || k->whole.next + count <= from)
        return;
    kv_lengthen(k, &k->whole);
    kv_lengthen(k, &k->ring);
    k->lengthened = true;
    k->known = 0, k->held = 0;
}

static void prepare(kv *k, const kv_part *p, uint32_t count)
{
    for (uint32_t head = 0; head < p->heads; head++) {
        uint32_t start = start_of(p, head), length = length_of(p, head), end = start + length;
        k->starts[p->of[head]] = (int32_t)start, k->lengths[p->of[head]] = (int32_t)length;
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
            for (uint32_t at = 0, first = length_of(p, list); at < count; at++) {
                p->physical[(size_t)list * p->longest + first + at] = (int32_t)(first + at);
                *position_of(p, list, first + at) = positions ? positions[at] : (int32_t)(p->next + at);
            }
        p->next = next;
        lengthen_heads(p, count);
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
    for (uint32_t head = 0; p->lengths && head < p->heads; head++)
        if (p->lengths[head] < p->length - length)
            return false;
    if (k->state_bytes && snapshot_of(k, length) == k->held)
        return false;
    return !k->ring.heads || next_without(p, length) >= k->first + k->before;
}

void kv_forget(kv *k, uint32_t count)
{
    kv_part *p = &k->whole, *ring = &k->ring;
    const uint32_t length = p->length - count;
    int64_t next = next_without(p, length), gone = ring->next - next;
    uint32_t kept = ring->length > gone ? (uint32_t)(ring->length - gone) : 0;
    if (ring->heads)
        retain(k, ring, 0, NULL, 0, kept);
    ring->length = kept, ring->next = next;
    kv_place(k, ring);
    for (uint32_t list = 0; list < p->lists; list++)
        retain(k, p, list, NULL, 0, length_of(p, list) - (p->length - length));
    lengthen_heads(p, (int64_t)length - p->length);
    p->next = next;
    k->known = k->known < length ? k->known : length;
    kv_place(k, p);
}

void kv_truncate(kv *k, uint32_t length)
{
    if (!length)
        kv_clear(k); /* which leaves the prefix */
    if (!length || length >= k->whole.length)
        return;
    if (k->state_bytes) {
        k->held = snapshot_of(k, length) + 1;
        memcpy(k->states.values, (uint8_t *)k->snapshots + (k->held - 1) * k->state_bytes, k->state_bytes);
        kv_send_states(k);
    }
    kv_forget(k, k->whole.length - length);
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
        lengthen_heads(p, -(int64_t)count);
    }
    k->known = k->known < k->whole.length ? k->known : k->whole.length;
}

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
    kv_fetch_states(k);
    memcpy(snapshots + k->held * k->state_bytes, k->states.values, k->state_bytes);
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
    k->states.changed = 1;
    for (kv_part *p = &k->whole; p; p = p == &k->whole ? &k->ring : NULL)
        for (uint32_t head = 0; head < p->heads; head++)
            rows_written(p->rows, start_of(p, head) + length_of(p, head), count);
}
