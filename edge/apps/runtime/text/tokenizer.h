/* Text to token ids. */
#ifndef EDGE_TOKENIZER_H
#define EDGE_TOKENIZER_H

#include "base.h"
#include "model.h"
#include "pieces.h"
#include "vocabulary.h"

typedef struct tokenizer tokenizer; /* tables of model.edge, and working memory */
tokenizer *tokenizer_layout(arena *from, const edge_model *model);
edge_status tokenizer_check(const edge_model *model, edge_error *error); /* at edge_open, in constant time */
/* Encodes a text block by block, as Tokenizer.encode_blocks, and passes the ids to `out` until it returns false; then
 * returns false, too. start: the text opens a prompt. special: control tokens are recognized. */
bool tokenizer_encode(tokenizer *t, const char *text, size_t length, bool special, bool start, ids_out out, void *to);
/* Encodes `before` and `text` as one text. before: less than TEXT_BLOCK bytes, valid UTF-8. */
bool tokenizer_encode_after(tokenizer *t, const char *before, const char *text, size_t length, ids_out out, void *to);
const vocabulary *tokenizer_vocabulary(const tokenizer *t);

#endif
