/* Calls of ears' parts for tests, each with memory of its own. */
#include <string.h>

#include "deflate.h"
#include "mel.h"
#include "resample.h"
#include "system.h"
#include "voice.h"

typedef void *layout(arena *from, uint32_t number);

static void *lay_out(layout *part, uint32_t number)
{
    arena count = {NULL, 0};
    part(&count, number);
    arena memory = {map_memory(count.used), 0};
    return part(&memory, number);
}

static void *lay_out_mel(arena *from, uint32_t bands)
{
    return mel_layout(from, bands);
}

static void *lay_out_resampler(arena *from, uint32_t number)
{
    (void)number;
    return resampler_layout(from);
}

static void *lay_out_deflater(arena *from, uint32_t number)
{
    (void)number;
    return deflater_layout(from);
}

void test_mel(const float *filters, uint32_t bands, const float *samples, uint32_t frames, float *out)
{
    mel *m = lay_out(lay_out_mel, bands);
    mel_start(m, filters);
    mel_write(m, samples, frames, out);
}

/* In pieces of `piece` samples, with little room. Returns the number of samples. */
uint64_t test_resample(uint32_t rate, const float *samples, size_t count, size_t piece, float *out)
{
    resampler *r = lay_out(lay_out_resampler, 0);
    uint64_t made = 0;
    resampler_start(r, rate, SOUND_RATE);
    for (size_t at = 0; at < count;) {
        size_t some = piece < count - at ? piece : count - at;
        made += resampler_push(r, samples + at, &some, out + made, 777);
        at += some;
    }
    for (uint32_t some; (some = resampler_end(r, out + made, 777)) > 0;)
        made += some;
    return made;
}

uint32_t test_voices(const float *samples, uint32_t frames, voiced *found)
{
    arena count = {NULL, 0};
    voice_room room;
    voice_layout(&count, frames, &room);
    arena memory = {map_memory(count.used), 0};
    voice_layout(&memory, frames, &room);
    const uint32_t number = find_voices(&room, samples, frames);
    memcpy(found, room.found, number * sizeof *found);
    return number;
}

uint32_t test_deflated(const uint8_t *text, uint32_t count)
{
    static deflater *d;
    if (!d)
        d = lay_out(lay_out_deflater, 0);
    return deflated_size(d, text, count);
}
