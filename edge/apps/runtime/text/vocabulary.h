/* The tables of tokens: a port of edge/model/tokens/vocabulary.py. Section TOKENIZER, made by edge/apps/sections/vocabulary.py, is a
 * tokenizer_config, followed without gaps by:
 *
 *     uint64 merges[…]                  right token << 44 | rank << 20 | result, ascending for each left token
 *     uint32 firsts[tokens + 1]         merges with left token i begin at firsts[i] and end at firsts[i + 1]
 *     character characters[…]           tokens of single characters, ascending; none in byte-level vocabularies
 *     int32  slots[…]                   hash table, by bytes, of tokens that no merge produces; of all pieces of words; -1: free
 *     uint32 piece_starts[tokens + 1]   offset in `pieces` of the bytes that token i adds to a text
 *     special_token specials[…]         tokens that are matched before any merging, ascending by bytes
 *     int32  ends[…], banned[…]         tokens that end a turn; tokens that are never generated
 *     float  scores[…]                  of a unigram tokenizer's tokens
 *     uint8  pieces[…], special_texts[…]
 *
 * The section has no checksum, so that opening a model need not read all of it: numbers are checked where they are used. */
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
    const float *scores;
    const uint8_t *pieces, *special_texts;
} vocabulary;

bool vocabulary_find(const edge_model *model, vocabulary *in); /* returns false if the section is damaged */
int32_t vocabulary_character(const vocabulary *in, uint32_t point); /* returns a token, or -1 */
/* Returns the rank of a merge, or NONE. */
uint32_t vocabulary_merge(const vocabulary *in, int32_t left, int32_t right, uint32_t *merged);
/* Returns the bytes that a token adds to a text, valid as long as the model. *length: at most LONGEST_PIECE, may be 0. */
const uint8_t *vocabulary_piece(const vocabulary *in, int32_t token, size_t *length);
/* Returns the token with these bytes in the hash table, or -1. */
int32_t vocabulary_whole(const vocabulary *in, const uint8_t *word, size_t count);
/* The same for bytes whose hash is known: hash_byte of all, from HASH_START on (FNV-1a). */
int32_t vocabulary_hashed(const vocabulary *in, uint32_t hash, const uint8_t *word, size_t count);
static const uint32_t HASH_START = 2166136261u;
static inline uint32_t hash_byte(uint32_t hash, uint8_t byte)
{
    return (hash ^ byte) * 16777619u;
}
/* Returns the longest special token at the beginning of the text, or NULL. special: include control tokens. */
const special_token *vocabulary_special(const vocabulary *in, const uint8_t *text, size_t count, bool special);

bool vocabulary_ends(const vocabulary *in, int32_t token); /* whether the token ends a turn */

static inline int32_t known_token(const vocabulary *in, int64_t token) /* -1: it is unknown */
{
    return token >= 0 && token < in->config->tokens ? (int32_t)token : -1;
}

#endif
