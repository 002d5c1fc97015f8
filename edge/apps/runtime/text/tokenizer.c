/* Text to token ids: a port of edge/model/tokens/tokenizer.py and of Vocabulary.merge (edge/model/tokens/vocabulary.py). */
#include <string.h>

#include "bundle.h"
#include "letters.h"
#include "system.h"
#include "tokenizer.h"
#include "utf8.h"
#include "vocabulary.h"
#include "words.h"

enum { MOST_BYTES = 4 * LONGEST_BLOCK, MOST_SYMBOLS = MOST_BYTES + 16 };
enum { RELEASED = 4 << 10 };                        /* longer words return working memory to the system */
enum { SPACE_SIGN = 0x2581 };                       /* SentencePiece's sign for a space */

/* A block of text, and a linked list of the symbols of a word. A symbol and the next one may merge into `merged`. */
typedef struct {
    int32_t ids[MOST_SYMBOLS];
    uint32_t following[MOST_SYMBOLS], previous[MOST_SYMBOLS], merged[MOST_SYMBOLS];
    uint32_t ranks[4 * MOST_BYTES]; /* ranks of pairs as a tree of minima: node i has the smaller of nodes 2i and 2i + 1 */
    uint8_t text[MOST_BYTES];       /* valid UTF-8 */
} workspace;

struct tokenizer {
    vocabulary in;
    words rules;
    letter_tables letters;
    int32_t ascii[128];  /* tokens of ASCII characters */
    uint32_t count, most; /* symbols of the word; of the longest word so far */
    bool mapped;          /* the tables are in a mapped file */
    uint8_t *composed;    /* [3 * MOST_BYTES + 4], where text is composed */
    workspace *work;      /* few of its pages are ever touched */
};

/* ---- merging ------------------------------------------------------------------------------------------------------ */

static void set_rank(tokenizer *t, uint32_t leaves, uint32_t place, uint32_t rank)
{
    uint32_t node = leaves + place;
    t->work->ranks[node] = rank;
    for (node /= 2; node; node /= 2) {
        uint32_t left = t->work->ranks[2 * node], right = t->work->ranks[2 * node + 1], best = left < right ? left : right;
        if (t->work->ranks[node] == best)
            return;
        t->work->ranks[node] = best;
    }
}

static uint32_t pair_rank(tokenizer *t, uint32_t place)
{
    uint32_t next = t->work->following[place];
    if (next >= t->count)
        return NONE;
    return vocabulary_merge(&t->in, t->work->ids[place], t->work->ids[next], &t->work->merged[place]);
}

/* Byte pair encoding: applies the best merge, the leftmost among equals, until none is left. */
static void merge_symbols(tokenizer *t)
{
    uint32_t leaves = 1;
    while (leaves < t->count)
        leaves *= 2;
    for (uint32_t i = 0; i < t->count; i++) {
        t->work->following[i] = i + 1;
        t->work->previous[i] = i - 1; /* NONE for the first */
    }
    for (uint32_t i = 0; i < leaves; i++)
        t->work->ranks[leaves + i] = i + 1 < t->count ? pair_rank(t, i) : NONE;
    for (uint32_t node = leaves - 1; node; node--) {
        uint32_t left = t->work->ranks[2 * node], right = t->work->ranks[2 * node + 1];
        t->work->ranks[node] = left < right ? left : right;
    }
    uint32_t best;
    while ((best = t->work->ranks[1]) != NONE) {
        uint32_t node = 1;
        while (node < leaves)
            node = 2 * node + (t->work->ranks[2 * node] != best);
        uint32_t place = node - leaves, gone = t->work->following[place], after = t->work->following[gone];
        t->work->ids[place] = (int32_t)t->work->merged[place];
        t->work->following[place] = after;
        if (after < t->count)
            t->work->previous[after] = place;
        set_rank(t, leaves, gone, NONE);
        set_rank(t, leaves, place, pair_rank(t, place));
        if (t->work->previous[place] != NONE)
            set_rank(t, leaves, t->work->previous[place], pair_rank(t, t->work->previous[place]));
    }
    uint32_t kept = 0; /* kept <= place, so that no id is overwritten unread */
    for (uint32_t place = 0; place < t->count; place = t->work->following[place])
        t->work->ids[kept++] = t->work->ids[place];
    t->count = kept;
}

/* ---- words -------------------------------------------------------------------------------------------------------- */

static void add_symbol(tokenizer *t, int32_t token)
{
    if (token >= 0 && t->count < MOST_SYMBOLS)
        t->work->ids[t->count++] = token;
}

/* Adds the tokens of a character before merging: its own, those of its bytes, the unknown token, or none. */
static void add_character(tokenizer *t, uint32_t point)
{
    const tokenizer_config *c = t->in.config;
    int32_t own = point < 128 ? t->ascii[point] : vocabulary_character(&t->in, point);
    if (own < 0) {
        uint8_t bytes[4];
        size_t count = utf8_write(point, bytes), found = 0;
        while (found < count && known_token(&t->in, c->bytes[bytes[found]]) >= 0)
            found++;
        if (found == count) {
            for (size_t i = 0; i < count; i++)
                add_symbol(t, c->bytes[bytes[i]]);
            return;
        }
        own = c->unknown;
    }
    if (own >= 0 && own == c->unknown && t->count && t->work->ids[t->count - 1] == own)
        return; /* consecutive unknown characters share a token */
    add_symbol(t, own);
}

static uint32_t next_character(const uint8_t **at, const uint8_t *end)
{
    uint32_t point;
    bool whole;
    *at += utf8_read(*at, (size_t)(end - *at), &point, &whole);
    return point;
}

/* Passes the tokens of a word to `out`. spaced: with a space before it. */
static bool encode_word(tokenizer *t, const uint8_t *word, size_t count, bool spaced, ids_out out, void *to)
{
    const tokenizer_config *c = t->in.config;
    bool whole = c->kind == KIND_GPT2 ? (c->flags & WHOLE_WORDS) != 0 : c->kind == KIND_GEMMA4 && word[0] == '\n';
    int32_t found = whole && !spaced ? vocabulary_whole(&t->in, word, count) : -1;
    if (found >= 0)
        return out(to, &found, 1);
    t->count = 0;
    if (c->kind == KIND_GPT2) {
        for (size_t i = 0; i < count; i++)
            add_symbol(t, known_token(&t->in, c->bytes[word[i]]));
    } else {
        if (spaced)
            add_character(t, SPACE_SIGN);
        for (const uint8_t *at = word; at < word + count;) {
            uint32_t point = next_character(&at, word + count);
            add_character(t, point == ' ' ? SPACE_SIGN : point);
        }
    }
    if (t->count > t->most)
        t->most = t->count;
    if (t->count > 1)
        merge_symbols(t);
    return !t->count || out(to, t->work->ids, t->count);
}

static bool is_letter(uint32_t point)
{
    return (point | 0x20) - 'a' < 26;
}

/* Length of the first part of SentencePiece's text, which is one word, that no merge joins to the rest: up to a space
 * between two letters; with `newlines` (Gemma 4) also up to or behind a run of newlines. */
static size_t safe_word(const uint8_t *text, size_t count, bool newlines)
{
    const uint8_t *at = text, *end = text + count;
    uint32_t before = next_character(&at, end);
    while (at < end) {
        const uint8_t *here = at;
        uint32_t point = next_character(&at, end);
        bool space = point == ' ' || point == SPACE_SIGN;
        if ((space && is_letter(before) && at < end && is_letter(*at))
            || (newlines && (before == '\n') != (point == '\n')))
            return (size_t)(here - text);
        before = point;
    }
    return count;
}

/* Encodes text without special tokens. spaced: with a space before it. */
static bool encode_plain(tokenizer *t, const uint8_t *text, size_t count, bool spaced, ids_out out, void *to)
{
    uint32_t kind = t->in.config->kind;
    if (kind == KIND_GPT2) {
        word_cutter cutter;
        const uint8_t *word;
        if (t->in.config->flags & COMPOSES) {
            count = EDGE_COMPOSER(&t->letters, text, count, t->work->ranks, t->composed);
            text = t->composed;
        }
        words_begin(&cutter, &t->rules, text, count);
        for (size_t length; (length = words_next(&cutter, &word));)
            if (!encode_word(t, word, length, false, out, to))
                return false;
        return true;
    }
    if (kind == KIND_BERT || kind == KIND_T5) { /* the arrays of merges have room for a word */
        workspace *w = t->work;
        piece_room room = {(uint8_t *)w->ranks, (uint16_t *)(void *)w->ids, offsetof(workspace, ranks) / sizeof(uint16_t) - 1};
        t->most = count > RELEASED ? (uint32_t)count : t->most;
        return EDGE_PIECES(&t->in, &t->letters, room, text, count, out, to);
    }
    for (size_t length; count; text += length, count -= length, spaced = false) {
        length = safe_word(text, count, kind == KIND_GEMMA4);
        if (!encode_word(t, text, length, spaced, out, to))
            return false;
    }
    return true;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------- */

/* Whether a space is added before text that opens a prompt (`first`) or follows a control token. */
static bool wants_space(uint32_t flags, const uint8_t *text, size_t count, bool first)
{
    static const uint8_t sign[] = {0xE2, 0x96, 0x81};
    if (!(flags & (SPACE_FIRST | SPACE_ALWAYS)))
        return flags & ADDS_SPACE;
    bool begins = text[0] == ' ' || (count >= sizeof sign && !memcmp(text, sign, sizeof sign));
    return flags & ADDS_SPACE && (first || flags & SPACE_ALWAYS) && !begins;
}

static size_t count_blanks(const uint8_t *text, size_t count)
{
    size_t blanks = 0;
    while (blanks < count && (text[blanks] == ' ' || (text[blanks] >= '\t' && text[blanks] <= '\r')))
        blanks++;
    return blanks;
}

static bool encode_block(tokenizer *t, size_t count, bool special, bool start, ids_out out, void *to)
{
    const uint8_t *text = t->work->text;
    bool swallow = false, first = true;
    for (size_t from = 0;; first = false) {
        const special_token *next = NULL;
        size_t at = from;
        while (at < count && !(next = vocabulary_special(&t->in, text + at, count - at, special)))
            at++;
        if (swallow)
            from += count_blanks(text + from, at - from);
        if (from < at) {
            bool spaced = start && wants_space(t->in.config->flags, text + from, at - from, first);
            if (!encode_plain(t, text + from, at - from, spaced, out, to))
                return false;
        }
        if (!next)
            return true;
        if (!out(to, &next->token, 1))
            return false;
        start = next->flags & IS_CONTROL;
        swallow = next->flags & SWALLOWS;
        from = at + (next->length < count - at ? next->length : count - at);
    }
}

/* Copies the next block of a text, advances *from, and returns its bytes. A block ends where a cut changes no token: at the
 * last such place within TEXT_BLOCK characters, or else the first behind. used: bytes of the block that are there already. */
static size_t read_block(tokenizer *t, size_t used, const uint8_t **from, const uint8_t *end)
{
    const uint8_t *at = *from, *safe = NULL; /* the last place for a cut: before a space */
    size_t safe_used = 0, count = 0;
    uint32_t before = 0, last = 0; /* the two previous characters */
    for (const uint8_t *there = t->work->text; there < t->work->text + used; count++)
        next_character(&there, t->work->text + used);
    for (; at < end; count++) {
        if (safe && count >= TEXT_BLOCK) {
            *from = safe;
            return safe_used;
        }
        if (count == LONGEST_BLOCK)
            break;
        uint32_t point = next_character(&at, end);
        used += utf8_write(point, t->work->text + used);
        if (is_letter(before) && last == ' ' && is_letter(point) && (count < TEXT_BLOCK || count > TEXT_BLOCK)) {
            safe = at - 2;
            safe_used = used - 2;
        }
        before = last;
        last = point;
    }
    *from = at;
    return used;
}

/* used: bytes of the first block that are there already. */
static bool encode(tokenizer *t, size_t used, const char *text, size_t length, bool special, bool start, ids_out out, void *to)
{
    const uint8_t *at = (const uint8_t *)text, *end = at + length;
    bool all = true;
    t->most = 0;
    for (; all && (used || at < end); start = false, used = 0) {
        size_t count = read_block(t, used, &at, end);
        all = encode_block(t, count, special, start, out, to);
    }
    if (t->most > RELEASED)
        release_memory(t->work, sizeof *t->work);
    if (t->mapped) /* only the tokenizer reads merges */
        forget_memory(t->in.merges, (size_t)((const uint8_t *)t->in.characters - (const uint8_t *)t->in.merges));
    return all;
}

bool tokenizer_encode(tokenizer *t, const char *text, size_t length, bool special, bool start, ids_out out, void *to)
{
    return encode(t, 0, text, length, special, start, out, to);
}

bool tokenizer_encode_after(tokenizer *t, const char *before, const char *text, size_t length, ids_out out, void *to)
{
    size_t used = strlen(before);
    memcpy(t->work->text, before, used);
    return encode(t, used, text, length, false, true, out, to);
}

/* ---- a session's tokenizer ---------------------------------------------------------------------------------------- */

static bool ids_are_known(const int32_t *ids, uint32_t count, uint32_t tokens)
{
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= tokens)
            return false;
    return true;
}

edge_status tokenizer_check(const edge_model *model, edge_error *error)
{
    vocabulary in;
    words rules;
    letter_tables letters;
    if (!vocabulary_find(model, &in) || !ids_are_known(in.ends, in.config->ends, in.config->tokens)
        || !ids_are_known(in.banned, in.config->banned, in.config->tokens))
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its tokens): copy or export it again");
    const bool composes = in.config->flags & COMPOSES, splits = in.config->kind >= KIND_BERT;
    if ((composes && !EDGE_COMPOSER) || (splits && !EDGE_PIECES) || ((composes || splits) && !letters_find(model, &letters)))
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its characters): copy or export it again");
    return in.config->kind == KIND_GPT2 ? words_find(model, &rules, error) : EDGE_OK;
}

tokenizer *tokenizer_layout(arena *from, const edge_model *model)
{
    tokenizer *t = take(from, sizeof *t);
    workspace *work = take(from, sizeof *work);
    uint8_t *composed = take(from, EDGE_COMPOSER ? 3ull * MOST_BYTES + 4 : 0);
    if (!t)
        return NULL;
    t->work = work, t->composed = composed;
    t->mapped = model->file.mapped;
    vocabulary_find(model, &t->in); /* tokenizer_check has checked it */
    words_find(model, &t->rules, NULL);
    letters_find(model, &t->letters);
    for (uint32_t point = 0; point < 128; point++)
        t->ascii[point] = vocabulary_character(&t->in, point);
    return t;
}

const vocabulary *tokenizer_vocabulary(const tokenizer *t)
{
    return &t->in;
}
