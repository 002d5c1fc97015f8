/* A sound in windows: a port of edge/run/speech/windows.py.
 *
 *     reflection | held samples, the first at place `start` of the sound | room
 */
#include <string.h>

#include "resample.h"
#include "voice.h"
#include "windowing.h"

enum { AROUND = MEL_WINDOW / 2 }; /* samples that the first and the last frame need beside theirs */

struct windows {
    uint32_t frames, held, room;
    uint64_t start;
    bool live, ended, resamples;
    uint64_t checked_at, checked_seek; /* where live speech was last searched for a pause */
    resampler *resampler;
    voice_room voices;
    float *memory; /* [AROUND + room + MEL_WINDOW] */
};

windows *windows_layout(arena *from, uint32_t frames)
{
    windows *w = take(from, sizeof *w), counted, *own = w ? w : &counted;
    own->frames = frames;
    own->room = frames * MEL_HOP + 2 * AROUND + MEL_HOP;
    own->resampler = resampler_layout(from);
    voice_layout(from, frames + 2, &own->voices);
    own->memory = take(from, (AROUND + own->room + MEL_WINDOW) * sizeof *own->memory);
    return w;
}

void windows_start(windows *w, uint32_t rate, bool live)
{
    w->held = 0, w->start = 0;
    w->live = live, w->ended = false, w->resamples = rate != SOUND_RATE;
    w->checked_at = w->checked_seek = UINT64_MAX;
    if (w->resamples)
        resampler_start(w->resampler, rate, SOUND_RATE);
}

static float *samples_of(const windows *w)
{
    return w->memory + AROUND;
}

static uint64_t needed(const windows *w, uint64_t seek)
{
    return (seek + w->frames) * MEL_HOP + AROUND;
}

static void drop(windows *w, uint64_t seek)
{
    const uint64_t until = seek * MEL_HOP > AROUND ? seek * MEL_HOP - AROUND : 0, gone = until > w->start ? until - w->start : 0;
    const uint32_t count = gone < w->held ? (uint32_t)gone : w->held;
    memmove(samples_of(w), samples_of(w) + count, (w->held - count) * sizeof(float));
    w->held -= count, w->start += count;
}

static uint32_t wanted(const windows *w, uint64_t seek)
{
    const uint64_t there = w->start + w->held, lacking = needed(w, seek) > there ? needed(w, seek) - there : 0;
    return lacking < w->room - w->held ? (uint32_t)lacking : w->room - w->held;
}

size_t windows_take(windows *w, uint64_t seek, const float *samples, size_t count)
{
    size_t taken = 0;
    drop(w, seek);
    while (taken < count) {
        uint32_t want = wanted(w, seek);
        if (w->live) /* pauses are looked for at the end of each part */
            want = smaller(want, SOUND_PART - (uint32_t)((w->start + w->held) % SOUND_PART));
        size_t some = count - taken;
        if (w->resamples) {
            w->held += resampler_push(w->resampler, samples + taken, &some, samples_of(w) + w->held, want);
        } else {
            some = some < want ? some : want;
            memcpy(samples_of(w) + w->held, samples + taken, some * sizeof *samples);
            w->held += (uint32_t)some;
        }
        taken += some;
        if (windows_ready(w, seek))
            break;
    }
    return taken;
}

void windows_end(windows *w)
{
    w->ended = true;
}

static bool pauses(windows *w, uint64_t seek)
{
    const uint64_t there = (w->start + w->held) / MEL_HOP, frames = there > seek ? there - seek : 0;
    const voiced *found;
    if (w->checked_at == (w->start + w->held) / SOUND_PART && w->checked_seek == seek)
        return false;
    w->checked_at = (w->start + w->held) / SOUND_PART, w->checked_seek = seek;
    const uint32_t count = frames > PAUSE_FRAMES ? windows_voices(w, seek, (uint32_t)frames, &found) : 0;
    return count && found[count - 1].end + PAUSE_FRAMES <= frames;
}

bool windows_ready(windows *w, uint64_t seek)
{
    drop(w, seek);
    if (w->ended && w->resamples) /* the rest of the source */
        while (wanted(w, seek)) {
            const uint32_t made = resampler_end(w->resampler, samples_of(w) + w->held, wanted(w, seek));
            w->held += made;
            if (!made)
                break;
        }
    return w->ended || w->start + w->held >= needed(w, seek) || (w->live && pauses(w, seek));
}

uint32_t windows_frames(const windows *w, uint64_t seek)
{
    const uint64_t there = (w->start + w->held) / MEL_HOP, frames = there > seek ? there - seek : 0;
    return frames < w->frames ? (uint32_t)frames : w->frames;
}

bool windows_go_on(const windows *w, uint64_t end)
{
    return (w->start + w->held) / MEL_HOP > end;
}

double windows_seconds(const windows *w)
{
    return (double)(w->start + w->held) / SOUND_RATE;
}

uint32_t windows_voices(const windows *w, uint64_t seek, uint32_t frames, const voiced **found)
{
    *found = w->voices.found;
    return find_voices(&w->voices, samples_of(w) + (seek * MEL_HOP - w->start), frames);
}

const float *windows_around(windows *w, uint64_t seek, uint32_t frames)
{
    float *samples = samples_of(w), *first = samples + ((int64_t)(seek * MEL_HOP) - AROUND - (int64_t)w->start);
    if (first < samples) { /* the beginning of the sound */
        const uint32_t count = smaller(AROUND, w->held - 1);
        for (uint32_t i = 1; i <= count; i++)
            samples[-(int64_t)i] = samples[i];
        first = samples - count;
    }
    const float *end = first + MEL_WINDOW - MEL_HOP + frames * MEL_HOP;
    if (end > samples + w->held)
        memset(samples + w->held, 0, (size_t)(end - (samples + w->held)) * sizeof *samples);
    return first;
}
