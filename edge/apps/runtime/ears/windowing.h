/* A sound in windows of some seconds: samples before the window are dropped. */
#ifndef EDGE_WINDOWING_H
#define EDGE_WINDOWING_H

#include "base.h"
#include "voice.h"

typedef struct windows windows;
windows *windows_layout(arena *from, uint32_t frames); /* frames: of a window, MEL_HOP samples each */
void windows_start(windows *w, uint32_t rate, bool live); /* live: a window ends at a pause */
/* Takes samples of the source, as far as the window from frame `seek` needs them; returns the number of those taken. */
size_t windows_take(windows *w, uint64_t seek, const float *samples, size_t count);
void windows_end(windows *w);                  /* the source has ended */
bool windows_ready(windows *w, uint64_t seek); /* whether the window from frame `seek` is complete */
uint32_t windows_frames(const windows *w, uint64_t seek); /* those with sound, of a complete window; 0: the sound has ended */
bool windows_go_on(const windows *w, uint64_t end); /* whether there is sound from this frame on, of those that were taken */
double windows_seconds(const windows *w);      /* of sound that were taken */
uint32_t windows_voices(const windows *w, uint64_t seek, uint32_t frames, const voiced **found);
/* Returns the samples of mel_write: those of the frames and around them, [MEL_WINDOW - MEL_HOP + MEL_HOP * frames]. The
 * beginning of a sound is reflected; zeros stand behind its end. */
const float *windows_around(windows *w, uint64_t seek, uint32_t frames);

#endif
