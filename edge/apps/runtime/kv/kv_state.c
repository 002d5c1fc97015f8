/* Saves and loads a cache: all that the next token depends on, in the order of memory, so that a text continues exactly as
 * it would have. Rows come first, in blocks, so that further tokens leave earlier bytes unchanged: an app that saves often
 * has to write only the bytes that changed. */
#include "kv.h"
#include "kv_parts.h"
#include "rows.h"

#include <math.h>
#include <string.h>

typedef struct {
    uint32_t rows, lists, ring, lengthened, known, heads, ring_heads, row_bytes, ring_row_bytes, reserved;
    int64_t base, next, first;
    uint64_t state_bytes;
} kv_header;

enum {
    MOST_POSITIONS = 1 << 30,
    MOST_BYTES = 8192, /* of the largest row: keys and values in float32 */
    BLOCK = 16         /* rows of a head that are saved together */
};

fixed_states *kv_states(kv *k) { return &k->states; }

static kv_header header_of(const kv *k)
{
    const kv_part *whole = &k->whole, *ring = &k->ring;
    return (kv_header){whole->length, whole->lists, ring->length, k->lengthened, k->known, whole->heads, ring->heads,
                       (uint32_t)rows_bytes(whole->rows), (uint32_t)rows_bytes(ring->rows), 0, whole->base, whole->next,
                       k->first, k->state_bytes};
}

static uint64_t part_bytes(const kv_part *p)
{
    uint64_t bytes = p->lengths ? sizeof *p->lengths * p->heads : 0;
    for (uint32_t head = 0; head < p->heads; head++)
        bytes += length_of(p, head) * (rows_bytes(p->rows) + sizeof(float) * p->observed + (head < p->lists ? 2 * sizeof(int32_t) : 0));
    return bytes;
}

uint64_t kv_saved_bytes(const kv *k)
{
    uint64_t pinned = k->known * (sizeof(int64_t) + sizeof(float) * k->whole.heads * k->whole.rows->shape.key);
    return sizeof(kv_header) + part_bytes(&k->whole) + part_bytes(&k->ring) + pinned + k->state_bytes;
}

typedef bool (*bytes_out)(void *to, const void *bytes, size_t size);
typedef bool (*bytes_in)(void *from, void *bytes, size_t size);

static bool save_rows(const kv_part *p, bytes_out out, void *to)
{
    uint8_t row[MOST_BYTES];
    for (uint32_t block = 0; block < p->length; block += BLOCK)
        for (uint32_t head = 0; head < p->heads; head++)
            for (uint32_t at = block; at < length_of(p, head) && at < block + BLOCK; at++) {
                rows_save(p->rows, start_of(p, head) + at, row);
                if (!out(to, row, rows_bytes(p->rows)))
                    return false;
            }
    return true;
}

static bool save_lists(const kv *k, const kv_part *p, bytes_out out, void *to)
{
    bool fine = true;
    for (uint32_t list = 0; fine && p->heads && list < p->lists; list++)
        fine = out(to, p->physical + (size_t)list * p->longest, sizeof(int32_t) * length_of(p, list)) &&
               out(to, p->positions + (size_t)list * p->longest, sizeof(int32_t) * length_of(p, list));
    for (uint32_t head = 0; fine && p->observed && head < p->heads; head++)
        fine = out(to, k->paid + start_of(p, head), sizeof(float) * p->length);
    return fine;
}

bool kv_save(const kv *k, bytes_out out, void *to)
{
    kv_header header = header_of(k);
    uint32_t key = k->whole.rows->shape.key;
    bool fine = out(to, &header, sizeof header) &&
                (!k->whole.lengths || out(to, k->whole.lengths, sizeof *k->whole.lengths * k->whole.heads)) &&
                save_rows(&k->ring, out, to) && save_rows(&k->whole, out, to) && save_lists(k, &k->ring, out, to) && save_lists(k, &k->whole, out, to);
    if (k->known)
        fine = fine && out(to, k->pinned_positions, sizeof(int64_t) * k->known);
    for (uint32_t each = 0; fine && k->known && each < k->whole.heads; each++)
        fine = out(to, k->pinned_keys + (size_t)each * k->pinned * key, sizeof(float) * k->known * key);
    kv_fetch_states(k);
    return fine && out(to, k->states.values, k->state_bytes);
}

/* Whether a list names each physical row once, and its positions ascend, or stay in pictures, and are less than `next`. */
static bool list_is_whole(kv *k, const kv_part *p, uint32_t list)
{
    const int32_t *physical = p->physical + (size_t)list * p->longest, *positions = position_of(p, list, 0);
    const uint32_t length = length_of(p, list);
    memset(k->occupied, 0, length);
    for (uint32_t row = 0; row < length; row++) {
        if (physical[row] < 0 || (uint32_t)physical[row] >= length || k->occupied[physical[row]]++)
            return false;
        if (positions[row] <= -MOST_POSITIONS || positions[row] >= p->next || (row && positions[row] < positions[row - 1] + !k->model->config->components))
            return false;
    }
    return true;
}

static bool load_rows(const kv_part *p, bytes_in in, void *from)
{
    uint8_t row[MOST_BYTES];
    for (uint32_t block = 0; block < p->length; block += BLOCK)
        for (uint32_t head = 0; head < p->heads; head++)
            for (uint32_t at = block; at < length_of(p, head) && at < block + BLOCK; at++) {
                if (!in(from, row, rows_bytes(p->rows)))
                    return false;
                rows_restore(p->rows, start_of(p, head) + at, row);
            }
    return true;
}

static bool load_lists(kv *k, kv_part *p, bytes_in in, void *from)
{
    bool fine = true;
    for (uint32_t list = 0; fine && p->heads && list < p->lists; list++)
        fine = in(from, p->physical + (size_t)list * p->longest, sizeof(int32_t) * length_of(p, list)) &&
               in(from, p->positions + (size_t)list * p->longest, sizeof(int32_t) * length_of(p, list)) &&
               list_is_whole(k, p, list);
    for (uint32_t head = 0; fine && p->observed && head < p->heads; head++)
        fine = in(from, k->paid + start_of(p, head), sizeof(float) * p->length);
    if (fine)
        kv_place(k, p);
    return fine;
}

/* Loads the numbers of rows of all heads, which agree with those of the header, and divides the arena among them. */
static bool load_lengths(kv_part *p, const kv_header *h, bytes_in in, void *from)
{
    uint64_t sum = 0, longest = 0;
    if (!in(from, p->lengths, sizeof *p->lengths * p->heads))
        return false;
    for (uint32_t head = 0; head < p->heads; head++) {
        if (p->lengths[head] > p->longest || (h->lists == 1 && p->lengths[head] != h->rows))
            return false;
        sum += p->lengths[head];
        longest = p->lengths[head] > longest ? p->lengths[head] : longest;
    }
    if (longest != h->rows || sum > (uint64_t)p->heads * p->capacity)
        return false;
    if (h->lists > 1)
        kv_share_out(NULL, p);
    return true;
}

static bool load_states(kv *k, bytes_in in, void *from)
{
    if (!in(from, k->states.values, k->state_bytes))
        return false;
    for (size_t at = 0; at < k->state_bytes / sizeof *k->states.values; at++)
        if (!isfinite(k->states.values[at]))
            return false;
    kv_send_states(k);
    return true;
}

static bool header_is_possible(const kv *k, const kv_header *h)
{
    const kv_part *whole = &k->whole, *ring = &k->ring;
    bool same = h->row_bytes == rows_bytes(whole->rows) && h->ring_row_bytes == rows_bytes(ring->rows) &&
                h->heads == whole->heads && h->ring_heads == ring->heads && !h->reserved &&
                h->state_bytes == k->state_bytes;
    bool lists = h->lists == 1 || (h->lists == whole->heads && whole->apart);
    int64_t most = (int64_t)1 << 50; /* far beyond any text */
    return same && lists && h->ring <= ring->capacity && h->known <= k->pinned && h->known <= h->rows &&
           h->lengthened <= (k->model->config->long_from > 0) && h->next >= 0 && h->next <= MOST_POSITIONS &&
           h->base >= 0 && h->base <= most && (h->first == ALL || (h->first >= -most && h->first <= h->next));
}

edge_status kv_load(kv *k, bytes_in in, void *from, edge_error *error)
{
    kv_header h;
    kv_part *whole = &k->whole, *ring = &k->ring;
    uint32_t key = whole->rows->shape.key;
    kv_clear(k);
    bool fine = in(from, &h, sizeof h) && header_is_possible(k, &h);
    if (fine && h.rows > kv_most(k))
        return edge_fail(error, EDGE_FULL, "the saved state has %d KV rows, and this session room for %d",
                         (int64_t)h.rows, (int64_t)kv_most(k));
    if (fine) {
        whole->length = h.rows, whole->lists = h.lists, ring->length = h.ring;
        whole->base = ring->base = h.base, whole->next = ring->next = h.next;
        k->first = h.first, k->lengthened = h.lengthened;
        fine = (!whole->lengths || load_lengths(whole, &h, in, from)) && load_rows(ring, in, from) && load_rows(whole, in, from) && load_lists(k, ring, in, from) &&
               load_lists(k, whole, in, from) &&
               (!h.known || in(from, k->pinned_positions, sizeof(int64_t) * h.known));
    }
    for (uint32_t row = 0; fine && row < h.known; row++)
        fine = k->pinned_positions[row] >= 0 && k->pinned_positions[row] <= h.base + h.next;
    for (uint32_t each = 0; fine && h.known && each < whole->heads; each++)
        fine = in(from, k->pinned_keys + (size_t)each * k->pinned * key, sizeof(float) * h.known * key);
    fine = fine && load_states(k, in, from);
    k->known = fine ? h.known : 0;
    if (fine)
        return EDGE_OK;
    kv_clear(k);
    return edge_fail(error, EDGE_BAD_FILE, "the saved state is damaged, or of another model: run the conversation again");
}
