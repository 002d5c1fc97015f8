/* Resampling of sound in pieces. */
#ifndef EDGE_RESAMPLE_H
#define EDGE_RESAMPLE_H

#include "base.h"

typedef struct resampler resampler;
resampler *resampler_layout(arena *from);
void resampler_start(resampler *r, uint32_t rate, uint32_t to); /* samples per second, at least SLOWEST_SOUND, at most FASTEST_SOUND */
/* Takes some of the next samples of the source, of which *count says how many, and changes it to those taken. Returns the
 * samples that can be computed so far, at most `room`. */
uint32_t resampler_push(resampler *r, const float *samples, size_t *count, float *out, uint32_t room);
/* Returns samples that the end of the source allows, at most `room`; 0: there are no more. */
uint32_t resampler_end(resampler *r, float *out, uint32_t room);

#endif
