/* The convolutions before Whisper's encoder. */
#ifndef EDGE_STEM_H
#define EDGE_STEM_H

#include "base.h"
#include "model.h"

typedef struct stem stem;
stem *stem_layout(arena *from, uint32_t mels, uint32_t hidden);
/* The section STEM of ears.edge, checked; NULL: it is damaged, or for other sizes. */
const stem_config *find_stem(const edge_model *ears, uint32_t mels, uint32_t hidden, uint32_t positions);
const float *stem_filters(const stem_config *config); /* as mel_start takes them */
const float *stem_end(const stem_config *config); /* what stands behind its tables */
/* Writes the encoder's inputs, rows [count][stride], of a spectrogram [frames][mels], around which there are zeros. */
void stem_run(stem *s, const stem_config *config, const float *mel, uint32_t frames, uint32_t count, float *rows, uint32_t stride);

#endif
