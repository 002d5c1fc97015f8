/* Where a sound may hold speech. */
#ifndef EDGE_VOICE_H
#define EDGE_VOICE_H

#include "base.h"

typedef struct { uint32_t begin, end; } voiced; /* frames of MEL_HOP samples; end: the one behind the last */
/* Working memory for `frames`. */
typedef struct { float *levels, *sorted; voiced *found; } voice_room;
void voice_layout(arena *from, uint32_t frames, voice_room *room);
uint32_t find_voices(const voice_room *room, const float *samples, uint32_t frames); /* returns the number of those found */

#endif
