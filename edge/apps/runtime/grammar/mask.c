/* Masks: all tokens are tried, in the order of their bytes, so that beginnings are tried once.
 *
 * Within a JSON string, tokens of plain characters need no trial: only those with quotes, backslashes, control characters or
 * parts of characters do. The last masks are kept, since many states recur. */
#include <math.h>
#include <string.h>

#include "automaton.h"
#include "mask.h"
#include "rules.h"
#include "utf8.h"
#include "vocabulary.h"

enum { KEPT = 16, NOT_PLAIN = 255, LONGEST_WAY = 4096, LONGEST_CLOSING = 32 };

/* Tokens in the order of their bytes. alike: the first bytes that each shares with the one before; behind: the end of those
 * that begin with a byte. */
typedef struct { uint32_t *tokens, count; uint8_t *alike; uint32_t behind[256]; } ordered;

struct mask {
    automaton *automaton;
    const vocabulary *in;
    ordered all, odd;       /* tokens with bytes; those of them that are not plain */
    uint8_t *characters;    /* [32 * words]: of plain tokens; NOT_PLAIN */
    uint32_t words, state, longest; /* words of a mask; characters of the longest plain token */
    uint32_t *masks, kept[KEPT], turn; /* [KEPT][words]; of these states, DEAD: free */
    uint32_t path[LONGEST_PIECE + 1]; /* states behind the bytes of a token */
    uint8_t way[LONGEST_WAY];
    mark_token marks[MOST_MARK_TOKENS];
    uint32_t mark_count;
    int32_t first_mark, last_mark;
};

mask *mask_layout(arena *from, uint32_t vocab)
{
    mask *m = take(from, sizeof *m);
    automaton *a = automaton_layout(from);
    uint32_t *all = take(from, vocab * sizeof *all), *odd = take(from, vocab * sizeof *odd), words = (vocab + 31) / 32;
    uint8_t *all_alike = take(from, vocab), *odd_alike = take(from, vocab), *characters = take(from, 32ull * words);
    uint32_t *masks = take(from, (uint64_t)KEPT * words * sizeof *masks);
    if (m) {
        memset(m, 0, sizeof *m);
        m->automaton = a;
        m->all = (ordered){all, 0, all_alike, {0}};
        m->odd = (ordered){odd, 0, odd_alike, {0}};
        m->characters = characters;
        m->words = words;
        m->masks = masks;
    }
    return m;
}

/* ---- the vocabulary --------------------------------------------------------------------------------------------- */

/* The bytes of a token to a grammar. */
static const uint8_t *piece_of(const mask *m, int32_t token, size_t *length)
{
    if (token >= m->first_mark && token <= m->last_mark)
        for (uint32_t i = 0; i < m->mark_count; i++)
            if (m->marks[i].token == token) {
                *length = sizeof m->marks[i].bytes;
                return m->marks[i].bytes;
            }
    return vocabulary_piece(m->in, token, length);
}

static bool is_mark(const mask *m, const uint8_t *bytes)
{
    return bytes >= (const uint8_t *)m->marks && bytes < (const uint8_t *)(m->marks + MOST_MARK_TOKENS);
}

static int byte_at(const mask *m, uint32_t token, uint32_t depth)
{
    size_t length;
    const uint8_t *bytes = piece_of(m, (int32_t)token, &length);
    return depth < length ? bytes[depth] : -1;
}

/* Sorts tokens whose first `depth` bytes are equal: quicksort, by one byte after another. */
static void sort(const mask *m, uint32_t *tokens, uint32_t count, uint32_t depth)
{
    while (count > 1) {
        const int pivot = byte_at(m, tokens[count / 2], depth);
        uint32_t less = 0, at = 0, more = count;
        while (at < more) {
            int byte = byte_at(m, tokens[at], depth);
            uint32_t to = byte < pivot ? less++ : byte > pivot ? --more : at, swapped = tokens[to];
            tokens[to] = tokens[at];
            tokens[at] = swapped;
            at += byte <= pivot;
        }
        if (pivot >= 0)
            sort(m, tokens + less, more - less, depth + 1);
        sort(m, tokens, less, depth);
        tokens += more;
        count -= more;
    }
}

static void order(const mask *m, ordered *o)
{
    sort(m, o->tokens, o->count, 0);
    for (uint32_t i = 0; i < o->count; i++) {
        uint32_t same = 0;
        o->behind[byte_at(m, o->tokens[i], 0)] = i + 1;
        if (!i)
            continue;
        while (same < 255 && byte_at(m, o->tokens[i], same) == byte_at(m, o->tokens[i - 1], same) && byte_at(m, o->tokens[i], same) >= 0)
            same++;
        o->alike[i] = (uint8_t)same;
    }
}

/* The characters of a token of whole characters that JSON strings have as they are; NOT_PLAIN. */
static uint8_t plain_characters(const uint8_t *bytes, size_t length)
{
    uint32_t count = 0, point;
    bool whole;
    for (size_t at = 0; at < length; count++) {
        uint8_t first = bytes[at];
        at += utf8_read(bytes + at, length - at, &point, &whole);
        if (!whole || first < 0x20 || first == '"' || first == '\\' || first == 0x7F || (point == UTF8_REPLACEMENT && first != 0xEF))
            return NOT_PLAIN;
    }
    return count < NOT_PLAIN ? (uint8_t)count : NOT_PLAIN;
}

void mask_open(mask *m, const vocabulary *in, const int32_t *marks, uint32_t count)
{
    m->in = in;
    m->mark_count = smaller(count, MOST_MARK_TOKENS);
    m->first_mark = INT32_MAX;
    m->last_mark = -1;
    for (uint32_t i = 0; i < m->mark_count; i++) {
        m->marks[i] = mark_of(marks[i]);
        m->first_mark = marks[i] < m->first_mark ? marks[i] : m->first_mark;
        m->last_mark = marks[i] > m->last_mark ? marks[i] : m->last_mark;
    }
    m->all.count = m->odd.count = m->longest = 0;
    memset(m->characters, NOT_PLAIN, 32ull * m->words);
    for (uint32_t token = 0; token < in->config->tokens; token++) {
        size_t length;
        const uint8_t *bytes = piece_of(m, (int32_t)token, &length);
        if (!length || length > 255 || vocabulary_ends(in, (int32_t)token))
            continue;
        if (memchr(bytes, MARK_BYTE, length) && !is_mark(m, bytes)) /* which would spell a mark */
            continue;
        m->characters[token] = plain_characters(bytes, length);
        m->all.tokens[m->all.count++] = token;
        if (m->characters[token] == NOT_PLAIN)
            m->odd.tokens[m->odd.count++] = token;
        else if (m->characters[token] > m->longest)
            m->longest = m->characters[token];
    }
    order(m, &m->all);
    order(m, &m->odd);
}

/* ---- the answer's state ----------------------------------------------------------------------------------------- */

bool mask_begin(mask *m, const rules *r, uint32_t start)
{
    memset(m->kept, 0, sizeof m->kept);
    m->state = automaton_begin(m->automaton, r, start);
    return m->state != DEAD;
}

static void forget(mask *m)
{
    memset(m->kept, 0, sizeof m->kept);
    m->state = automaton_forget(m->automaton, m->state);
}

/* The state behind bytes, DEAD if they do not match. Returns false if the tables do not suffice. */
static bool walk(mask *m, const uint8_t *bytes, size_t count, uint32_t *end)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        bool full = false;
        *end = m->state;
        for (size_t i = 0; i < count && *end != DEAD && !full; i++)
            *end = automaton_step(m->automaton, *end, bytes[i], &full);
        if (!full)
            return true;
        forget(m);
    }
    return false;
}

bool mask_accept(mask *m, int32_t token)
{
    size_t length;
    uint32_t end;
    const uint8_t *bytes = piece_of(m, token, &length);
    if (!walk(m, bytes, length, &end) || end == DEAD)
        return false;
    m->state = end;
    return true;
}

bool mask_complete(const mask *m)
{
    return automaton_accepts(m->automaton, m->state);
}

bool mask_ended(const mask *m)
{
    uint32_t count;
    automaton_threads(m->automaton, m->state, &count);
    return mask_complete(m) && !count;
}

/* ---- masks ------------------------------------------------------------------------------------------------------ */

/* Whether plain characters may come otherwise than as any of a JSON string's, whose threads share a frame with its mark. */
static bool other_text(const mask *m, const rules *r)
{
    uint32_t count;
    const thread *threads = automaton_threads(m->automaton, m->state, &count);
    for (uint32_t i = 0; i < count; i++) {
        const rule_node *n = r->nodes + threads[i].node;
        bool of_text = n->kind != RULE_BYTES || (n->low == '"' && n->high == '"');
        for (uint32_t j = 0; !of_text && threads[i].node < r->text_end && j < count; j++)
            of_text = threads[j].node == r->text && threads[j].frame == threads[i].frame;
        if (!of_text)
            return true;
    }
    return false;
}

/* Tries tokens and sets the bits of those that are allowed. Returns false if the tables do not suffice. */
static bool try_all(mask *m, const ordered *o, uint32_t *bits)
{
    uint32_t dead_at = UINT32_MAX; /* bytes of the beginning that does not match */
    uint32_t known = 0;            /* bytes of the last token for which m->path is known */
    bool fresh = false;
    for (uint32_t i = 0; i < o->count; i++) {
        const uint32_t alike = i ? o->alike[i] : 0;
        size_t length;
        bool full = false;
        if (alike >= dead_at)
            continue;
        const uint8_t *bytes = piece_of(m, (int32_t)o->tokens[i], &length);
        uint32_t depth = smaller(alike, known);
        dead_at = UINT32_MAX;
        m->path[0] = m->state;
        for (; depth < length && !full; depth++) {
            m->path[depth + 1] = automaton_step(m->automaton, m->path[depth], bytes[depth], &full);
            if (m->path[depth + 1] == DEAD)
                break;
        }
        if (full) { /* try this token again, from its first byte, with empty tables */
            if (fresh)
                return false;
            fresh = true;
            forget(m);
            known = 0;
            dead_at = UINT32_MAX;
            i--;
            continue;
        }
        fresh = false;
        known = depth;
        if (depth == length)
            bits[o->tokens[i] / 32] |= 1u << o->tokens[i] % 32;
        else if (depth)
            dead_at = depth + 1;
        else /* nothing begins with this byte */
            i = o->behind[bytes[0]] - 1;
    }
    return true;
}

static bool make(mask *m, const rules *r, uint32_t *bits)
{
    const uint32_t left = automaton_text_left(m->automaton, m->state);
    if (!left || (left < m->longest && other_text(m, r))) {
        memset(bits, 0, m->words * sizeof *bits);
        return try_all(m, &m->all, bits);
    }
    const uint8_t most = (uint8_t)smaller(left, NOT_PLAIN - 1);
    for (uint32_t word = 0, token = 0; word < m->words; word++) {
        uint32_t found = 0;
        for (uint32_t bit = 0; bit < 32; bit++) /* `characters` has whole words */
            found |= (uint32_t)(m->characters[token++] <= most) << bit;
        bits[word] = found;
    }
    return try_all(m, &m->odd, bits);
}

bool mask_logits(mask *m, float *logits)
{
    const uint32_t tokens = m->in->config->tokens;
    uint32_t place = 0;
    while (place < KEPT && m->kept[place] != m->state)
        place++;
    if (place == KEPT) {
        place = m->turn++ % KEPT;
        m->kept[place] = DEAD;
        uint32_t *made = m->masks + place * m->words;
        if (!make(m, automaton_rules(m->automaton), made))
            return false;
        for (uint32_t i = 0; i < m->in->config->ends && mask_complete(m); i++)
            if (known_token(m->in, m->in->ends[i]) >= 0)
                made[m->in->ends[i] / 32] |= 1u << m->in->ends[i] % 32;
        m->kept[place] = m->state; /* which may have a new number */
    }
    const uint32_t *bits = m->masks + place * m->words;
    for (uint32_t word = 0, first = 0; word < m->words; word++, first += 32) {
        const uint32_t allowed = bits[word], count = smaller(32, tokens - first);
        for (uint32_t i = 0; !allowed && i < count; i++) /* most are all or none */
            logits[first + i] = -INFINITY;
        for (uint32_t i = 0; allowed && allowed != UINT32_MAX && i < count; i++)
            logits[first + i] = allowed >> i & 1 ? logits[first + i] : -INFINITY;
    }
    return true;
}

/* ---- the way to the end ----------------------------------------------------------------------------------------- */

/* The longest token that bytes begin with; -1: none. */
static int32_t longest_token(const mask *m, const uint8_t *way, uint32_t count, uint32_t *used)
{
    for (uint32_t length = smaller(count, LONGEST_CLOSING); length; length--) {
        uint32_t low = 0, high = m->all.count;
        while (low < high) {
            uint32_t middle = low + (high - low) / 2;
            size_t own;
            const uint8_t *bytes = piece_of(m, (int32_t)m->all.tokens[middle], &own);
            int order = memcmp(bytes, way, own < length ? own : length);
            if (!order && own == length) {
                *used = length;
                return (int32_t)m->all.tokens[middle];
            }
            if (order < 0 || (!order && own < length))
                low = middle + 1;
            else
                high = middle;
        }
    }
    return -1;
}

/* The tokens of a shortest way, in bytes, from a state to the end, and the first of them; UINT32_MAX: it is too long. */
static uint32_t way_from(mask *m, uint32_t at, int32_t *first)
{
    uint32_t count = 0, tokens = 0, used = 0;
    while (automaton_shortest(m->automaton, at, m->way + count)) {
        bool full = false;
        at = automaton_step(m->automaton, at, m->way[count], &full);
        if (at == DEAD || ++count == LONGEST_WAY)
            return UINT32_MAX;
    }
    for (uint32_t i = 0; i < count; i += used, tokens++) {
        int32_t token = longest_token(m, m->way + i, count - i, &used);
        if (token < 0)
            return UINT32_MAX;
        if (!i)
            *first = token;
    }
    return tokens;
}

int32_t mask_within(mask *m, int32_t token, uint32_t left)
{
    size_t length;
    uint32_t behind, from;
    uint8_t byte;
    int32_t first = -1;
    const uint8_t *bytes = piece_of(m, token, &length);
    if (automaton_crowded(m->automaton))
        forget(m);
    from = m->state;
    if (vocabulary_ends(m->in, token) || !walk(m, bytes, length, &behind) || behind == DEAD
        || automaton_shortest(m->automaton, behind, &byte) < left || m->state != from)
        return token;
    uint32_t tokens = way_from(m, behind, &first);
    if (tokens < left)
        return token;
    return way_from(m, m->state, &first) <= left && first >= 0 ? first : token;
}
