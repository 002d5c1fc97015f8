/* Properties of characters for tokenizers. Section NORMALIZER, made by edge/apps/sections/letters.py:
 *
 *     letters_config
 *     uint16 blocks[0x110000 / 128]      number of the block of classes of a code point
 *     uint8  classes[block_count][128]   classes of the block's code points: a number, and flags
 *     letter_mapping mapped[mapped + 1]  characters that become others, ascending
 *     uint32 points[points]              which others
 *     uint32 trie[units]                 texts that a unigram tokenizer replaces: a double array, as Darts has it
 *     letter_pair pairs[pairs]           characters that compose to one, ascending
 *     uint8  text[text_bytes]            by which; each ends with \0
 */
#ifndef EDGE_LETTERS_H
#define EDGE_LETTERS_H

#include "base.h"
#include "model.h"

typedef struct {
    const letters_config *config;
    const uint16_t *blocks;
    const uint8_t *classes;
    const letter_mapping *mapped;
    const uint32_t *points, *trie;
    const letter_pair *pairs;
    const uint8_t *text;
} letter_tables;

bool letters_find(const edge_model *model, letter_tables *found); /* returns false if the section is damaged */
uint8_t letters_class(const letter_tables *in, uint32_t point);
/* Returns the number of characters that a mapped one becomes. */
uint32_t letters_mapped(const letter_tables *in, uint32_t point, const uint32_t **points);
uint32_t letters_composed(const letter_tables *in, uint32_t first, uint32_t second); /* 0: they do not compose */
/* Returns the bytes of the first grapheme of a text, at least one character. */
size_t letters_grapheme(const letter_tables *in, const uint8_t *text, size_t count);
/* Returns the replacement of the text's shortest prefix in the trie, *length bytes; NULL: the trie has no prefix of it. */
const uint8_t *letters_replacement(const letter_tables *in, const uint8_t *text, size_t count, size_t *length);

#endif
