/* Ports of edge/model/tokens/word_piece.py and unigram.py, with the normalizers of the `tokenizers` library that they use. */
#include <math.h>
#include <string.h>

#include "hangul.h"
#include "letters.h"
#include "pieces.h"
#include "utf8.h"
#include "vocabulary.h"

/* ---- WordPiece: the longest pieces, from the first on -------------------------------------------------------------- */

/* A word behind a space, which the first of its pieces has. count: characters. */
typedef struct {
    const vocabulary *in;
    const letter_tables *of;
    ids_out out;
    void *to;
    size_t used, count;
    uint8_t word[1 + 4 * LONGEST_WORD];
} word_splitter;

/* Passes the pieces of the word on, or the unknown token, and begins the next one. */
static bool end_word(word_splitter *s)
{
    int32_t ids[LONGEST_WORD];
    size_t found = 0, used = s->used;
    bool known = s->count <= LONGEST_WORD;
    if (!s->count)
        return true;
    s->used = 1, s->count = 0;
    for (size_t at = 0, end; known && at < used; at = end) {
        uint32_t hash = HASH_START;
        end = 0;
        for (size_t i = at; i < used && i - at < s->in->config->longest; i++) {
            hash = hash_byte(hash, s->word[i]);
            int32_t token = vocabulary_hashed(s->in, hash, s->word + at, i + 1 - at);
            if (token >= 0 && i && found < LONGEST_WORD) /* the blank alone is no beginning of a word */
                ids[found] = token, end = i + 1;
        }
        known = end > 0;
        found += known;
    }
    return known ? s->out(s->to, ids, found) : s->out(s->to, &s->in->config->unknown, 1);
}

/* Takes a character of the normalized text. */
static bool add_point(word_splitter *s, uint32_t point)
{
    uint8_t flags = letters_class(s->of, point) & (LETTER_ALONE | LETTER_BLANK);
    if (flags && !end_word(s))
        return false;
    if (flags & LETTER_BLANK)
        return true;
    if (s->count < LONGEST_WORD)
        s->used += utf8_write(point, s->word + s->used);
    s->count++;
    return !(flags & LETTER_ALONE) || end_word(s);
}

bool split_word_pieces(const vocabulary *in, const letter_tables *of, piece_room room, const uint8_t *text, size_t count,
                       ids_out out, void *to)
{
    (void)room;
    word_splitter s = {.in = in, .of = of, .out = out, .to = to, .used = 1, .word = " "};
    bool whole, going = true;
    for (const uint8_t *at = text, *end = text + count; going && at < end;) {
        uint32_t point;
        at += utf8_read(at, (size_t)(end - at), &point, &whole);
        uint32_t parts[3];
        const uint32_t *points = &point;
        uint32_t some = 1;
        switch (letters_class(of, point) & (LETTER_ALONE - 1)) {
        case LETTER_DROPPED:
            continue;
        case LETTER_MAPPED:
            some = letters_mapped(of, point, &points);
            break;
        case LETTER_SYLLABLE:
            points = parts, some = hangul_parts(point, parts);
        }
        for (uint32_t i = 0; going && i < some; i++)
            going = add_point(&s, points[i]);
    }
    return going && end_word(&s);
}

/* ---- unigrams: the pieces with the largest sum of scores ------------------------------------------------------------ */

enum { RING = 2 * LONGEST_PIECE };                     /* positions of a word whose best sums are known */
static const uint8_t SPACE_SIGN[] = {0xE2, 0x96, 0x81};

typedef struct { const vocabulary *in; piece_room room; size_t used; ids_out out; void *to; } unigram_splitter;

static size_t character_bytes(const uint8_t *text)
{
    return *text < 0x80 ? 1 : *text < 0xE0 ? 2 : *text < 0xF0 ? 3 : 4;
}

static int32_t token_of(const vocabulary *in, const uint8_t *piece, size_t count)
{
    uint32_t hash = HASH_START;
    for (size_t i = 0; i < count; i++)
        hash = hash_byte(hash, piece[i]);
    return vocabulary_hashed(in, hash, piece, count);
}

/* Finds the best last piece of each beginning of the word: lengths[i], in bytes, of the piece that ends before byte i. */
static void find_pieces(const unigram_splitter *s)
{
    const vocabulary *in = s->in;
    const uint8_t *word = s->room.word;
    double best[RING];
    for (size_t i = 0; i < RING; i++)
        best[i] = -INFINITY;
    best[0] = 0;
    for (size_t start = 0, next; start < s->used; start = next) {
        double before = best[start % RING];
        bool known = false;
        next = start + character_bytes(word + start);
        uint32_t hash = HASH_START;
        for (size_t end = start; end < s->used && end - start < in->config->longest;) {
            for (size_t behind = end + character_bytes(word + end); end < behind; end++)
                hash = hash_byte(hash, word[end]);
            int32_t token = end - start <= in->config->longest ? vocabulary_hashed(in, hash, word + start, end - start) : -1;
            if (token < 0)
                continue;
            known = known || end == next;
            if (before + (double)in->scores[token] > best[end % RING])
                best[end % RING] = before + (double)in->scores[token], s->room.lengths[end] = (uint16_t)(end - start);
        }
        if (!known && before + in->config->least > best[next % RING])
            best[next % RING] = before + in->config->least, s->room.lengths[next] = (uint16_t)(next - start);
        if (!(best[next % RING] > -INFINITY)) /* scores of a damaged file */
            best[next % RING] = 0, s->room.lengths[next] = (uint16_t)(next - start);
        best[start % RING] = -INFINITY;
    }
}

/* Passes the tokens of the word on; unknown characters in a row are one. */
static bool end_unigrams(unigram_splitter *s)
{
    uint16_t *lengths = s->room.lengths;
    size_t used = s->used;
    int32_t last = -1;
    if (!used)
        return true;
    find_pieces(s);
    for (size_t end = used, length = lengths[end], before; end; end -= length, length = before) { /* lengths[start] instead */
        before = lengths[end - length];
        lengths[end - length] = (uint16_t)length;
    }
    s->used = 0;
    for (size_t start = 0; start < used; start += lengths[start]) {
        int32_t token = token_of(s->in, s->room.word + start, lengths[start]);
        token = token < 0 ? s->in->config->unknown : token;
        if ((token != s->in->config->unknown || token != last) && !s->out(s->to, &token, 1))
            return false;
        last = token;
    }
    return true;
}

/* Takes a character of the normalized text. A word begins with the sign for a space, and another one begins at each. */
static bool add_character(unigram_splitter *s, const letter_tables *of, uint32_t point)
{
    bool blank = letters_class(of, point) & LETTER_BLANK, sign = point == 0x2581;
    if ((blank || sign || s->used + 8 > s->room.room) && !end_unigrams(s))
        return false;
    if (blank)
        return true;
    if (!s->used && !sign) {
        memcpy(s->room.word, SPACE_SIGN, sizeof SPACE_SIGN);
        s->used = sizeof SPACE_SIGN;
    }
    s->used += utf8_write(point, s->room.word + s->used);
    return true;
}

static bool add_text(unigram_splitter *s, const letter_tables *of, const uint8_t *text, size_t count)
{
    for (size_t at = 0; at < count;) {
        uint32_t point;
        bool whole;
        at += utf8_read(text + at, count - at, &point, &whole);
        if (!add_character(s, of, point))
            return false;
    }
    return true;
}

bool split_unigrams(const vocabulary *in, const letter_tables *of, piece_room room, const uint8_t *text, size_t count,
                    ids_out out, void *to)
{
    unigram_splitter s = {in, room, 0, out, to};
    for (size_t at = 0, end; at < count; at = end) {
        end = at + letters_grapheme(of, text + at, count - at);
        size_t length;
        const uint8_t *other = end - at < 6 ? letters_replacement(of, text + at, end - at, &length) : NULL;
        if (other && !add_text(&s, of, other, length))
            return false;
        for (size_t next; !other && at < end; at = next) {
            next = at + character_bytes(text + at);
            const uint8_t *one = letters_replacement(of, text + at, next - at, &length);
            if (!(one ? add_text(&s, of, one, length) : add_text(&s, of, text + at, next - at)))
                return false;
        }
    }
    return end_unigrams(&s);
}
