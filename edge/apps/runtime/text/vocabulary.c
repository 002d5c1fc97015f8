/* Look-ups in the tables of tokens, which check every number. */
#include <string.h>

#include "vocabulary.h"

bool vocabulary_find(const edge_model *model, vocabulary *in)
{
    const uint8_t *at = model->sections[SECTION_TOKENIZER];
    uint64_t size = model->sizes[SECTION_TOKENIZER];
    const tokenizer_config *c = (const tokenizer_config *)at;
    memset(in, 0, sizeof *in);
    if (size < sizeof *c || c->kind > KIND_T5 || c->tokens != model->config->vocab || !c->tokens
        || (c->slots & (c->slots - 1)) || c->probes > MOST_PROBES || c->bos >= (int64_t)c->tokens
        || c->unknown >= (int64_t)c->tokens || c->longest > LONGEST_PIECE || c->scores != (c->kind == KIND_T5 ? c->tokens : 0)
        || (c->kind >= KIND_BERT && (c->unknown < 0 || c->bos < 0)))
        return false;
    uint64_t sizes[] = {
        sizeof *c, 8 * (uint64_t)c->merges, 4 * ((uint64_t)c->tokens + 1),
        (uint64_t)c->characters * sizeof(character), 4 * (uint64_t)c->slots, 4 * ((uint64_t)c->tokens + 1),
        (uint64_t)c->specials * sizeof(special_token), 4 * (uint64_t)c->ends, 4 * (uint64_t)c->banned,
        4 * (uint64_t)c->scores, c->piece_bytes, c->special_bytes,
    };
    const uint8_t *starts[sizeof sizes / sizeof *sizes];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sizes[i] > size)
            return false;
        starts[i] = at;
        at += sizes[i];
        size -= sizes[i];
    }
    *in = (vocabulary){
        c, (const uint64_t *)starts[1], (const uint32_t *)starts[2], (const character *)starts[3],
        (const int32_t *)starts[4], (const uint32_t *)starts[5], (const special_token *)starts[6],
        (const int32_t *)starts[7], (const int32_t *)starts[8], (const float *)starts[9], starts[10],
        starts[11],
    };
    return !size;
}

int32_t vocabulary_character(const vocabulary *in, uint32_t point)
{
    uint32_t low = 0, high = in->config->characters;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (in->characters[middle].point < point)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < in->config->characters && in->characters[low].point == point;
    return found ? known_token(in, in->characters[low].token) : -1;
}

uint32_t vocabulary_merge(const vocabulary *in, int32_t left, int32_t right, uint32_t *merged)
{
    uint32_t low = in->firsts[left], end = in->firsts[left + 1], high = end;
    uint64_t wanted = (uint64_t)right << (TOKEN_BITS + RANK_BITS);
    if (end > in->config->merges)
        return NONE;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (in->merges[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    uint64_t found = low < end ? in->merges[low] - wanted : UINT64_MAX;
    if (found >> (TOKEN_BITS + RANK_BITS)) /* another right token */
        return NONE;
    *merged = found & ((1u << TOKEN_BITS) - 1);
    return *merged < in->config->tokens ? (uint32_t)(found >> TOKEN_BITS) : NONE;
}

const uint8_t *vocabulary_piece(const vocabulary *in, int32_t token, size_t *length)
{
    bool known = known_token(in, token) >= 0;
    uint32_t start = known ? in->piece_starts[token] : 0, end = known ? in->piece_starts[token + 1] : 0;
    bool possible = start <= end && end <= in->config->piece_bytes && end - start <= LONGEST_PIECE;
    *length = possible ? end - start : 0;
    return in->pieces + (possible ? start : 0);
}

bool vocabulary_ends(const vocabulary *in, int32_t token)
{
    for (uint32_t i = 0; i < in->config->ends; i++)
        if (in->ends[i] == token)
            return true;
    return false;
}

int32_t vocabulary_whole(const vocabulary *in, const uint8_t *word, size_t count)
{
    uint32_t hash = HASH_START;
    for (size_t i = 0; i < count && count <= LONGEST_PIECE; i++)
        hash = hash_byte(hash, word[i]);
    return vocabulary_hashed(in, hash, word, count);
}

int32_t vocabulary_hashed(const vocabulary *in, uint32_t hash, const uint8_t *word, size_t count)
{
    if (!in->config->slots || count > LONGEST_PIECE)
        return -1;
    for (uint32_t probe = 0; probe < in->config->probes; probe++) {
        int32_t token = known_token(in, in->slots[(hash + probe) & (in->config->slots - 1)]);
        if (token < 0)
            return -1;
        size_t length;
        const uint8_t *bytes = vocabulary_piece(in, token, &length);
        if (length == count && !memcmp(bytes, word, count))
            return token;
    }
    return -1;
}

/* The byte of a special token at this depth; -1 at its end. */
static int special_byte(const vocabulary *in, uint32_t index, size_t depth)
{
    const special_token *token = in->specials + index;
    uint64_t at = (uint64_t)token->start + depth;
    return depth < token->length && at < in->config->special_bytes ? in->special_texts[at] : -1;
}

const special_token *vocabulary_special(const vocabulary *in, const uint8_t *text, size_t count, bool special)
{
    const special_token *longest = NULL;
    uint32_t low = in->config->special_starts[text[0]], high = in->config->special_starts[text[0] + 1];
    if (high > in->config->specials)
        return NULL;
    for (size_t depth = 1; low < high; depth++) {
        if (special_byte(in, low, depth) < 0) { /* one token ends here */
            if (special || !(in->specials[low].flags & ONLY_SPECIAL))
                longest = in->specials + low;
            low++;
        }
        if (depth == count)
            break;
        int wanted[] = {text[depth], text[depth] + 1};
        uint32_t bounds[2];
        for (int i = 0; i < 2; i++) {
            uint32_t from = low, end = high;
            while (from < end) {
                uint32_t middle = from + (end - from) / 2;
                if (special_byte(in, middle, depth) < wanted[i])
                    from = middle + 1;
                else
                    end = middle;
            }
            bounds[i] = from;
        }
        low = bounds[0];
        high = bounds[1];
    }
    return longest && longest->length && known_token(in, longest->token) >= 0 ? longest : NULL;
}
