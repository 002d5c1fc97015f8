/* Words into the pieces of a vocabulary: the tokenizers of encoders. */
#ifndef EDGE_PIECES_H
#define EDGE_PIECES_H

#include "letters.h"
#include "vocabulary.h"

typedef bool (*ids_out)(void *to, const int32_t *ids, size_t count);

/* Memory for the longest word of a unigram tokenizer. Still longer ones are divided. */
typedef struct { uint8_t *word; uint16_t *lengths; size_t room; } piece_room;

/* Passes the tokens of a block of text to `out` until it returns false; then returns false, too. */
typedef bool piece_splitter(const vocabulary *in, const letter_tables *of, piece_room room, const uint8_t *text, size_t count,
                            ids_out out, void *to);
piece_splitter split_word_pieces, split_unigrams;

#endif
