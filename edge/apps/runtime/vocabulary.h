/* The tables of tokens. Section TOKENIZER, made by edge/apps/vocabulary.py, is a tokenizer_config and then, each without
 * a gap:
 *
 *     uint64 merges[…]                  right token << 44 | rank << 20 | result, ascending for each left token
 *     uint32 firsts[tokens + 1]         the merges whose left token is i are those from firsts[i] to firsts[i + 1]
 *     character characters[…]           tokens of a single character, ascending; none for byte-level vocabularies
 *     int32  slots[…]                   hash table of tokens that are never merged, by their bytes; -1: free
 *     uint32 piece_starts[tokens + 1]   where the bytes that a token adds to a text begin in `pieces`
 *     special_token specials[…]         tokens that match whole, before any merging, ascending by their bytes
 *     int32  ends[…], banned[…]         tokens that end a turn; that are never generated
 *     uint8  pieces[…], special_texts[…]
 *
 * The section has no checksum, since a start should not read all of it: every number is checked where it is used. */
#ifndef EDGE_VOCABULARY_H
#define EDGE_VOCABULARY_H

#include "base.h"
#include "model.h"

static const uint32_t NONE = UINT32_MAX;

typedef struct {
    const tokenizer_config *config;
    const uint64_t *merges;
    const uint32_t *firsts;
    const character *characters;
    const int32_t *slots;
    const uint32_t *piece_starts;
    const special_token *specials;
    const int32_t *ends, *banned;
    const uint8_t *pieces, *special_texts;
} vocabulary;

bool vocabulary_find(const edge_model *model, vocabulary *in); /* false: the section is damaged */
int32_t vocabulary_character(const vocabulary *in, uint32_t point); /* a token, or -1 */
/* The rank of a merge, or NONE. */
uint32_t vocabulary_merge(const vocabulary *in, int32_t left, int32_t right, uint32_t *merged);
/* The bytes that a token adds to a text. */
const uint8_t *vocabulary_piece(const vocabulary *in, int32_t token, size_t *length);
/* A token with these bytes that is not merged of others, or -1. */
int32_t vocabulary_whole(const vocabulary *in, const uint8_t *word, size_t count);
/* The longest special token that the text begins with, or NULL. special: control tokens count. */
const special_token *vocabulary_special(const vocabulary *in, const uint8_t *text, size_t count, bool special);

static inline int32_t known_token(const vocabulary *in, int64_t token) /* or -1 */
{
    return token >= 0 && token < in->config->tokens ? (int32_t)token : -1;
}

#endif
