/* Whisper's spectrogram. */
#ifndef EDGE_MEL_H
#define EDGE_MEL_H

#include "base.h"

typedef struct mel mel;
mel *mel_layout(arena *from, uint32_t bands);
/* Fills the tables. filters: float [bands][MEL_WINDOW / 2 + 1], valid as long as the mel. */
void mel_start(mel *m, const float *filters);
/* Writes the model's input, out [frames][bands], from samples [MEL_WINDOW - MEL_HOP + MEL_HOP * frames]: the middle of the
 * first frame is at sample MEL_WINDOW / 2. */
void mel_write(mel *m, const float *samples, uint32_t frames, float *out);

#endif
