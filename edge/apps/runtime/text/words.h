/* Words, as the regular expressions of a pre-tokenizer cut them. */
#ifndef EDGE_WORDS_H
#define EDGE_WORDS_H

#include "base.h"
#include "model.h"

typedef struct { /* tables of section WORDS: one automaton for each expression; they are applied one after the other */
    const uint16_t *blocks;
    const uint8_t *classes;
    const uint16_t *moves[MOST_SPLITS];
    uint32_t class_count, splits;
} words;
edge_status words_find(const edge_model *model, words *found, edge_error *error); /* checks the whole section */
typedef struct { const words *rules; const uint8_t *text; size_t left[MOST_SPLITS + 1]; } word_cutter;
void words_begin(word_cutter *cutter, const words *rules, const uint8_t *text, size_t count); /* text: valid UTF-8 */
size_t words_next(word_cutter *cutter, const uint8_t **word); /* returns the bytes of the next word; 0 at the end */

#endif
