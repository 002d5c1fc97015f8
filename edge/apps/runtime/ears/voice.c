/* Frames that rise above the noise around them: a port of edge/run/speech/voice.py. */
#include <math.h>
#include <string.h>

#include "mel.h"
#include "voice.h"

void voice_layout(arena *from, uint32_t frames, voice_room *room)
{
    room->levels = take(from, frames * sizeof *room->levels);
    room->sorted = take(from, frames * sizeof *room->sorted);
    room->found = take(from, (frames / 2 + 1) * sizeof *room->found);
}

/* The loudness of each frame, in dB of full scale. */
static void find_levels(const float *samples, uint32_t frames, float *levels)
{
    const double per_ten = 10 / log(10.0);
    for (uint32_t frame = 0; frame < frames; frame++, samples += MEL_HOP) {
        double mean = 0, squares = 0;
        for (uint32_t i = 0; i < MEL_HOP; i++)
            mean += (double)samples[i] / MEL_HOP;
        for (uint32_t i = 0; i < MEL_HOP; i++)
            squares += ((double)samples[i] - mean) * ((double)samples[i] - mean) / MEL_HOP;
        levels[frame] = (float)(log(squares + 1e-12) * per_ten);
    }
}

/* The number that VOICE_NOISE per cent of them are at most, between two neighbours as numpy.percentile has it. */
static double noise_of(const float *levels, float *sorted, uint32_t frames)
{
    memcpy(sorted, levels, frames * sizeof *sorted);
    uint32_t gap = 1;
    while (gap < frames / 3)
        gap = 3 * gap + 1;
    for (; gap; gap /= 3)
        for (uint32_t i = gap; i < frames; i++) {
            const float held = sorted[i];
            uint32_t at = i;
            for (; at >= gap && sorted[at - gap] > held; at -= gap)
                sorted[at] = sorted[at - gap];
            sorted[at] = held;
        }
    const double place = (frames - 1) * (VOICE_NOISE / 100.0);
    const uint32_t below = (uint32_t)place, above = below + 1 < frames ? below + 1 : below;
    return sorted[below] + (place - below) * ((double)sorted[above] - sorted[below]);
}

uint32_t find_voices(const voice_room *room, const float *samples, uint32_t frames)
{
    uint32_t count = 0, kept = 0;
    if (!frames)
        return 0;
    find_levels(samples, frames, room->levels);
    double bound = noise_of(room->levels, room->sorted, frames) + VOICE_ABOVE;
    bound = bound < VOICE_LOUD_NOISE ? bound : VOICE_LOUD_NOISE;
    bound = bound > VOICE_FLOOR ? bound : VOICE_FLOOR;
    for (uint32_t at = 0, end; at < frames; at = end) {
        end = at + 1;
        if (!(room->levels[at] > bound))
            continue;
        while (end < frames && room->levels[end] > bound)
            end++;
        voiced *last = room->found + count - 1;
        if (count && at - last->end <= VOICE_JOINED && (last->end - last->begin >= VOICE_SHORTEST || end - at >= VOICE_CLICK))
            last->end = end;
        else
            room->found[count++] = (voiced){at, end};
    }
    for (uint32_t i = 0; i < count; i++)
        if (room->found[i].end - room->found[i].begin >= VOICE_SHORTEST)
            room->found[kept++] = room->found[i];
    return kept;
}
