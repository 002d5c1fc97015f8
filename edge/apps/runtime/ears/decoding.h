/* The text of a window that was heard. */
#ifndef EDGE_DECODING_H
#define EDGE_DECODING_H

#include "base.h"
#include "model.h"

typedef struct decoder decoder;

/* tokens: without the one that ended the text. logprob: mean natural logarithm of their probabilities, with the end's. ratio:
 * of the text's bytes to those of zlib; 0: it has none. */
typedef struct {
    const int32_t *tokens;
    const float *logprobs; /* of each token */
    uint32_t count;
    double logprob, no_speech, temperature, ratio;
    bool silent; /* the window holds no speech */
} decoded;

decoder *decoder_layout(arena *from, const edge_model *model);
/* Finds the number of the likeliest language. */
edge_finish decoder_language(decoder *d, edge_session *s, uint32_t *language);
/* Decodes the window that the encoder ran last. before: tokens of the text before. opening: of the transcript, from
 * <|startoftranscript|> on. seed: of draws. temperature: less than 0: those of openai-whisper, one after the other.
 * Returns why it ended early, or EDGE_GOING; then s->failed says whether the pass failed. */
edge_finish decoder_run(decoder *d, edge_session *s, const int32_t *before, uint32_t before_count, const int32_t *opening,
                        uint32_t opening_count, uint64_t seed, double temperature, decoded *found);
/* Writes the text of tokens as whole characters, without \0; returns its bytes, less than text_bytes of the config. */
uint32_t decoder_text(const decoder *d, const edge_session *s, const int32_t *tokens, uint32_t count, char *out);
/* Returns the text without spaces around it. */
const char *stripped(const char *text, uint32_t *length);

#endif
