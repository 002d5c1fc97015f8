/* Text to token ids. */
#ifndef EDGE_TOKENIZER_H
#define EDGE_TOKENIZER_H

#include "base.h"
#include "model.h"

typedef struct tokenizer tokenizer; /* tables of model.edge, and working memory */
tokenizer *tokenizer_layout(arena *from, const edge_model *model);
edge_status tokenizer_check(const edge_model *model, edge_error *error); /* at edge_open, in constant time */
typedef bool (*ids_out)(void *to, const int32_t *ids, size_t count);
/* Encodes a text block by block, as Tokenizer.encode_blocks, and passes the ids to `out` until it returns false; then
 * returns false, too. start: the text opens a prompt. special: control tokens are recognized. */
bool tokenizer_encode(tokenizer *t, const char *text, size_t length, bool special, bool start, ids_out out, void *to);
/* The bytes that a token adds to a text, valid as long as the model. *length: at most 1024, may be 0. */
const char *tokenizer_piece(const tokenizer *t, int32_t token, size_t *length);
bool tokenizer_ends(const tokenizer *t, int32_t token);                /* whether the token ends a turn */
uint32_t tokenizer_banned(const tokenizer *t, const int32_t **ids);    /* count of tokens that are never generated */
uint32_t tokenizer_end_ids(const tokenizer *t, const int32_t **ids);   /* count of tokens that end a turn */
int32_t tokenizer_bos(const tokenizer *t);                             /* first token of prompts; -1: none */

#endif
