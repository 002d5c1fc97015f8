/* Look-ups in section NORMALIZER. */
#include <string.h>

#include "letters.h"
#include "utf8.h"

bool letters_find(const edge_model *model, letter_tables *found)
{
    const letters_config *c = (const letters_config *)model->sections[SECTION_NORMALIZER];
    uint64_t size = model->sizes[SECTION_NORMALIZER], tables = sizeof *c + 2 * (CODE_POINTS / WORDS_BLOCK);
    memset(found, 0, sizeof *found);
    if (size < tables || c->block_count > CODE_POINTS / WORDS_BLOCK
        || size != tables + (uint64_t)c->block_count * WORDS_BLOCK + (c->mapped + 1ull) * sizeof(letter_mapping)
               + 4ull * c->points + 4ull * c->units + (uint64_t)c->pairs * sizeof(letter_pair) + c->text_bytes)
        return false;
    const uint16_t *blocks = (const uint16_t *)(c + 1);
    const uint8_t *classes = (const uint8_t *)(blocks + CODE_POINTS / WORDS_BLOCK);
    const letter_mapping *mapped = (const letter_mapping *)(classes + c->block_count * WORDS_BLOCK);
    const uint32_t *points = (const uint32_t *)(mapped + c->mapped + 1), *trie = points + c->points;
    const letter_pair *pairs = (const letter_pair *)(trie + c->units);
    for (size_t i = 0; i < CODE_POINTS / WORDS_BLOCK; i++)
        if (blocks[i] >= c->block_count)
            return false;
    for (uint32_t i = 0; i < c->mapped; i++)
        if (mapped[i].start > mapped[i + 1].start)
            return false;
    for (uint32_t i = 0; i < c->points; i++)
        if (points[i] >= CODE_POINTS)
            return false;
    for (uint32_t i = 0; i < c->pairs; i++)
        if (pairs[i].composed >= CODE_POINTS)
            return false;
    *found = (letter_tables){c, blocks, classes, mapped, points, trie, pairs, (const uint8_t *)(pairs + c->pairs)};
    return mapped[c->mapped].start <= c->points && (!c->text_bytes || !found->text[c->text_bytes - 1]);
}

uint8_t letters_class(const letter_tables *in, uint32_t point)
{
    return in->classes[(size_t)in->blocks[point / WORDS_BLOCK] * WORDS_BLOCK + point % WORDS_BLOCK];
}

uint32_t letters_mapped(const letter_tables *in, uint32_t point, const uint32_t **points)
{
    uint32_t low = 0, high = in->config->mapped;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (in->mapped[middle].point < point)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == in->config->mapped || in->mapped[low].point != point)
        return 0;
    *points = in->points + in->mapped[low].start;
    return in->mapped[low + 1].start - in->mapped[low].start;
}

uint32_t letters_composed(const letter_tables *in, uint32_t first, uint32_t second)
{
    uint64_t wanted = (uint64_t)first << 32 | second;
    uint32_t low = 0, high = in->config->pairs;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (((uint64_t)in->pairs[middle].first << 32 | in->pairs[middle].second) < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < in->config->pairs && in->pairs[low].first == first && in->pairs[low].second == second;
    return found ? in->pairs[low].composed : 0;
}

/* Whether no grapheme ends between characters of these classes (Unicode Standard Annex #29), but for flags and for the
 * conjuncts of Indic scripts, whose graphemes are longer than a table replaces. joiner: a zero-width joiner behind a pictograph
 * came before. */
static bool belongs(uint8_t before, uint8_t class, bool joiner)
{
    if (before == LETTER_CONTROL || class == LETTER_CONTROL)
        return false;
    if (class == LETTER_EXTEND || class == LETTER_SPACING || class == LETTER_ZWJ || before == LETTER_PREPEND)
        return true;
    switch (class) {
    case LETTER_L: case LETTER_LV: case LETTER_LVT:
        return before == LETTER_L;
    case LETTER_V:
        return before == LETTER_L || before == LETTER_V || before == LETTER_LV;
    case LETTER_T:
        return before == LETTER_V || before == LETTER_LV || before == LETTER_T || before == LETTER_LVT;
    default:
        return class == LETTER_PICTURE && joiner;
    }
}

size_t letters_grapheme(const letter_tables *in, const uint8_t *text, size_t count)
{
    uint32_t point;
    bool whole, picture = false;
    size_t at = 0;
    for (uint8_t before = 0; at < count;) {
        size_t length = utf8_read(text + at, count - at, &point, &whole);
        uint8_t class = letters_class(in, point) & (LETTER_ALONE - 1);
        if (at && !belongs(before, class, picture && before == LETTER_ZWJ))
            break;
        picture = class == LETTER_PICTURE || (picture && (class == LETTER_EXTEND || class == LETTER_ZWJ));
        before = class;
        at += length;
    }
    return at;
}

/* Fields of a unit of the double array. */
static uint32_t offset_of(uint32_t unit)
{
    return unit >> 10 << ((unit & 1 << 9) >> 6);
}

const uint8_t *letters_replacement(const letter_tables *in, const uint8_t *text, size_t count, size_t *length)
{
    const uint32_t units = in->config->units, byte_bits = 1u << 31 | 0xFF;
    if (!units)
        return NULL;
    for (uint32_t at = offset_of(in->trie[0]), i = 0; i < count && text[i]; i++) {
        at ^= text[i];
        if (at >= units || (in->trie[at] & byte_bits) != text[i])
            return NULL;
        bool ends = in->trie[at] >> 8 & 1;
        at ^= offset_of(in->trie[at]);
        if (!ends)
            continue;
        uint32_t start = at < units ? in->trie[at] & ~(1u << 31) : UINT32_MAX;
        if (start >= in->config->text_bytes)
            return NULL;
        *length = strlen((const char *)in->text + start); /* the last byte is \0 */
        return in->text + start;
    }
    return NULL;
}
