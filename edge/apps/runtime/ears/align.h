/* When each word of a window was said. */
#ifndef EDGE_ALIGN_H
#define EDGE_ALIGN_H

#include "base.h"
#include "model.h"

typedef struct aligner aligner;
/* first, last: tokens of the text, and the one behind them. start, end: seconds from the beginning of the window. */
typedef struct { uint32_t first, last; double start, end, probability; } timed_word;
typedef struct { timed_word *each; uint32_t count; } timed_words;

aligner *aligner_layout(arena *from, const edge_model *model);
/* Whether ears.edge has the heads that align_words reads, whole. ears: the file with the section STEM that is `data`. */
bool can_align(const edge_model *ears, const stem_config *data, const edge_model *words);
/* Finds the words of a text without timestamps, about the window that was heard last, whose rows it replaces. opening: tokens before
 * it. frames: of the window, those with sound. spaces: words are parted by them. Looks at budgets before each pass; returns why it
 * ended early, or EDGE_GOING; then s->failed says whether a pass failed. */
edge_finish align_words(aligner *a, edge_session *s, const stem_config *data, const int32_t *opening, uint32_t opening_count,
                        const int32_t *tokens, const float *logprobs, uint32_t count, uint32_t frames, bool spaces, timed_words *found);
/* The median of words' lengths, at most 0.7 s. */
double typical_length(aligner *a, const timed_word *words, uint32_t count);
/* Writes words of those that were found last in JSON, valid until the next call. NULL: the file is damaged, since they are longer
 * than its text_bytes. */
const char *words_in_json(aligner *a, const timed_word *words, uint32_t count);

#endif
