/* The size of a text in zlib's format at its usual level, 6: openai-whisper knows by it whether a text repeats itself. The
 * format is RFC 1950's and RFC 1951's; which matches are taken, and which of equal codes, is zlib's choice, since the size
 * depends on it. Nothing is written: only frequencies and lengths of codes are counted.
 *
 *     text --matches--> symbols --frequencies--> lengths of codes --> bits of the cheapest of three kinds of blocks
 */
#include <string.h>

#include "deflate.h"

enum {
    SHORTEST = 3, LONGEST = 258,           /* bytes of a match */
    GOOD = 8, LAZY = 16, NICE = 128,       /* lengths of matches at level 6: search less, look no further ahead, stop */
    CHAIN = 128,                           /* candidates for a match */
    TOO_FAR = 4096,                        /* distance from which a match of SHORTEST bytes costs more than it saves */
    FARTHEST = MOST_DEFLATED,              /* distance of a match */
    HASHES = 1 << 15,
    LITERALS = 286, DISTANCES = 30, LENGTHS = 19, /* symbols of the three codes */
    END = 256,                             /* the symbol behind a block */
    BLOCK_SYMBOLS = (1 << 14) - 1,         /* of a block at most */
    LONGEST_CODE = 15, LONGEST_OF_LENGTHS = 7,
    NODES = 2 * LITERALS + 1
};

typedef struct { uint32_t frequency[NODES]; uint8_t length[NODES + 1]; int32_t last; } code; /* last: its greatest symbol */

struct deflater {
    code literals, distances, lengths;
    uint32_t symbols, stored; /* of the block; bytes that it stands for */
    uint64_t bits;            /* of all blocks before */
    uint16_t heads[HASHES], before[MOST_DEFLATED + LONGEST]; /* the newest place of each hash; the place before each. 0: none */
    uint8_t text[MOST_DEFLATED + LONGEST + 2];               /* with zeros behind it */
};

deflater *deflater_layout(arena *from)
{
    return take(from, sizeof(deflater));
}

/* ---- codes ---------------------------------------------------------------------------------------------------------- */

typedef struct { int32_t heap[NODES]; uint8_t depth[NODES]; uint16_t parent[NODES]; int32_t count, sorted; } builder;

static bool lighter(const code *c, const builder *b, int32_t one, int32_t other)
{
    return c->frequency[one] < c->frequency[other]
        || (c->frequency[one] == c->frequency[other] && b->depth[one] <= b->depth[other]);
}

static void sink(const code *c, builder *b, int32_t at)
{
    const int32_t node = b->heap[at];
    for (int32_t child = 2 * at; child <= b->count; at = child, child *= 2) {
        if (child < b->count && lighter(c, b, b->heap[child + 1], b->heap[child]))
            child++;
        if (lighter(c, b, node, b->heap[child]))
            break;
        b->heap[at] = b->heap[child];
    }
    b->heap[at] = node;
}

/* Sets the lengths of the leaves, of which none may exceed `most`: longer ones move up in place of a shorter leaf. */
static void limit_lengths(code *c, builder *b, uint32_t most)
{
    uint32_t counts[LONGEST_CODE + 1] = {0}, excess = 0;
    c->length[b->heap[b->sorted]] = 0; /* the root */
    int32_t at = b->sorted + 1;
    for (; at < NODES; at++) {
        const int32_t node = b->heap[at];
        uint32_t length = c->length[b->parent[node]] + 1u;
        if (length > most)
            length = most, excess++;
        c->length[node] = (uint8_t)length;
        if (node <= c->last)
            counts[length]++;
    }
    if (!excess)
        return;
    for (int32_t left = (int32_t)excess; left > 0; left -= 2) {
        uint32_t length = most - 1;
        while (!counts[length])
            length--;
        counts[length]--, counts[length + 1] += 2, counts[most]--;
    }
    for (uint32_t length = most; length; length--)
        for (uint32_t count = counts[length]; count;) {
            const int32_t node = b->heap[--at];
            if (node > c->last)
                continue;
            c->length[node] = (uint8_t)length;
            count--;
        }
}

/* Finds the lengths of Huffman's code; at least two symbols have one. */
static void build(code *c, uint32_t symbols, uint32_t most)
{
    builder b = {.sorted = NODES};
    int32_t node = (int32_t)symbols;
    c->last = -1;
    for (uint32_t symbol = 0; symbol < symbols; symbol++)
        if (c->frequency[symbol])
            b.heap[++b.count] = c->last = (int32_t)symbol;
        else
            c->length[symbol] = 0;
    while (b.count < 2) {
        const int32_t forced = c->last < 2 ? ++c->last : 0;
        b.heap[++b.count] = forced;
        c->frequency[forced] = 1;
    }
    for (int32_t at = b.count / 2; at; at--)
        sink(c, &b, at);
    for (; b.count >= 2; node++) {
        const int32_t one = b.heap[1];
        b.heap[1] = b.heap[b.count--];
        sink(c, &b, 1);
        const int32_t other = b.heap[1];
        b.heap[--b.sorted] = one;
        b.heap[--b.sorted] = other;
        c->frequency[node] = c->frequency[one] + c->frequency[other];
        b.depth[node] = (uint8_t)((b.depth[one] > b.depth[other] ? b.depth[one] : b.depth[other]) + 1);
        b.parent[one] = b.parent[other] = (uint16_t)node;
        b.heap[1] = node;
        sink(c, &b, 1);
    }
    b.heap[--b.sorted] = b.heap[1];
    limit_lengths(c, &b, most);
}

/* Counts how a code's lengths are written themselves: as lengths, and repetitions of one. */
static void count_lengths(code *of, const code *c)
{
    int32_t before = -1;
    for (int32_t at = 0; at <= c->last;) {
        const uint8_t length = c->length[at];
        int32_t run = 1;
        while (at + run <= c->last && c->length[at + run] == length)
            run++;
        at += run;
        for (int32_t part; run; run -= part) {
            const int32_t most = !length ? 138 : length == before ? 6 : 7, least = length && length != before ? 4 : 3;
            part = run < most ? run : most;
            if (part < least)
                of->frequency[length] += (uint32_t)part;
            else if (length)
                of->frequency[length] += length != before, of->frequency[16]++;
            else
                of->frequency[part <= 10 ? 17 : 18]++;
            before = length;
        }
    }
}

/* ---- blocks --------------------------------------------------------------------------------------------------------- */

static uint32_t extra_of_literal(uint32_t symbol) /* bits behind it */
{
    return symbol < 265 || symbol == 285 ? 0 : (symbol - 261) / 4;
}

static uint32_t extra_of_distance(uint32_t symbol)
{
    return symbol < 4 ? 0 : symbol / 2 - 1;
}

static uint32_t fixed_length(uint32_t symbol)
{
    return symbol < 144 ? 8 : symbol < 256 ? 9 : symbol < 280 ? 7 : 8;
}

static void begin_block(deflater *d)
{
    memset(&d->literals, 0, sizeof d->literals);
    memset(&d->distances, 0, sizeof d->distances);
    memset(&d->lengths, 0, sizeof d->lengths);
    d->literals.frequency[END] = 1;
    d->symbols = d->stored = 0;
}

/* Adds the bits of the block in the kind that takes fewest bytes. */
static void end_block(deflater *d)
{
    static const uint8_t order[LENGTHS] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    uint64_t own = 0, fixed = 0;
    uint32_t literals[LITERALS], distances[DISTANCES];
    memcpy(literals, d->literals.frequency, sizeof literals); /* without those that a code must have */
    memcpy(distances, d->distances.frequency, sizeof distances);
    build(&d->literals, LITERALS, LONGEST_CODE);
    build(&d->distances, DISTANCES, LONGEST_CODE);
    count_lengths(&d->lengths, &d->literals);
    count_lengths(&d->lengths, &d->distances);
    uint32_t of_lengths[LENGTHS], written = LENGTHS - 1;
    memcpy(of_lengths, d->lengths.frequency, sizeof of_lengths);
    build(&d->lengths, LENGTHS, LONGEST_OF_LENGTHS);
    while (written >= 3 && !d->lengths.length[order[written]])
        written--;
    own = 14 + 3 * (written + 1);
    for (uint32_t each = 0; each < LENGTHS; each++)
        own += of_lengths[each] * (d->lengths.length[each] + (each < 16 ? 0u : each == 16 ? 2u : each == 17 ? 3u : 7u));
    for (uint32_t each = 0; each < LITERALS; each++) {
        own += (uint64_t)literals[each] * (d->literals.length[each] + extra_of_literal(each));
        fixed += (uint64_t)literals[each] * (fixed_length(each) + extra_of_literal(each));
    }
    for (uint32_t each = 0; each < DISTANCES; each++) {
        own += (uint64_t)distances[each] * (d->distances.length[each] + extra_of_distance(each));
        fixed += (uint64_t)distances[each] * (5 + extra_of_distance(each));
    }
    const uint64_t bytes = (own + 3 + 7) / 8, fixed_bytes = (fixed + 3 + 7) / 8, least = fixed_bytes <= bytes ? fixed_bytes : bytes;
    if (d->stored + 4 <= least)
        d->bits = (d->bits + 3 + 7) / 8 * 8 + 32 + 8ull * d->stored;
    else
        d->bits += 3 + (fixed_bytes == least ? fixed : own);
}

static void add_symbol(deflater *d, uint32_t symbol, uint32_t bytes)
{
    d->literals.frequency[symbol]++;
    d->stored += bytes;
    if (++d->symbols == BLOCK_SYMBOLS) {
        end_block(d);
        begin_block(d);
    }
}

static uint32_t highest_bit(uint32_t value)
{
    return 31 - (uint32_t)__builtin_clz(value);
}

static void add_match(deflater *d, uint32_t length, uint32_t distance)
{
    uint32_t symbol = 285, far = distance - 1, rest = length - SHORTEST;
    if (length < LONGEST)
        symbol = rest < 8 ? 257 + rest : 257 + 4 * (highest_bit(rest) - 1) + (rest >> (highest_bit(rest) - 2) & 3);
    d->distances.frequency[far < 4 ? far : 2 * highest_bit(far) + (far >> (highest_bit(far) - 1) & 1)]++;
    add_symbol(d, symbol, length);
}

/* ---- matches -------------------------------------------------------------------------------------------------------- */

/* Enters a place, and returns the newest one before with the same hash; 0: none, so the text's first place is never found. */
static uint32_t enter_place(deflater *d, uint32_t at)
{
    uint16_t *head = d->heads + (((uint32_t)d->text[at] << 10 ^ (uint32_t)d->text[at + 1] << 5 ^ d->text[at + 2]) & (HASHES - 1));
    const uint32_t found = *head;
    d->before[at] = (uint16_t)found;
    *head = (uint16_t)at;
    return found;
}

/* Returns the length of the longest match that is longer than `held`, or `held`. *start: its place. */
static uint32_t longest_match(const deflater *d, uint32_t at, uint32_t candidate, uint32_t held, uint32_t left, uint32_t *start)
{
    const uint8_t *text = d->text;
    const uint32_t nice = left < NICE ? left : NICE;
    uint32_t chain = held >= GOOD ? CHAIN / 4 : CHAIN;
    for (; candidate && chain; chain--, candidate = d->before[candidate]) {
        uint32_t length = 0;
        while (length < LONGEST && text[candidate + length] == text[at + length])
            length++;
        if (length > held) {
            *start = candidate, held = length;
            if (length >= nice)
                break;
        }
    }
    return held < left ? held : left;
}

uint32_t deflated_size(deflater *d, const uint8_t *text, uint32_t count)
{
    memset(d->heads, 0, sizeof d->heads);
    memset(d->text + count, 0, LONGEST + 2);
    memcpy(d->text, text, count);
    d->bits = 0;
    begin_block(d);
    uint32_t length = SHORTEST - 1, start = 0, at = 0;
    bool waits = false; /* the byte before `at`, in the hope of a longer match here */
    while (at < count) {
        const uint32_t left = count - at, candidate = left >= SHORTEST ? enter_place(d, at) : 0, held = length, from = start;
        length = SHORTEST - 1;
        if (candidate && held < LAZY && at - candidate <= FARTHEST) {
            length = longest_match(d, at, candidate, held, left, &start);
            if (length == SHORTEST && at - start > TOO_FAR)
                length = SHORTEST - 1;
        }
        if (held >= SHORTEST && length <= held) { /* the match before is the better one */
            add_match(d, held, at - 1 - from);
            for (const uint32_t end = at - 1 + held; ++at < end;)
                if (at + SHORTEST <= count)
                    enter_place(d, at);
            waits = false, length = SHORTEST - 1;
        } else {
            if (waits)
                add_symbol(d, d->text[at - 1], 1);
            waits = true, at++;
        }
    }
    if (waits)
        add_symbol(d, d->text[count - 1], 1);
    end_block(d);
    return (uint32_t)((d->bits + 7) / 8) + 6; /* with zlib's header and checksum */
}
