/* The functions of edge.h for models that hear, which ears.c runs, and for prompts with sounds, which sounds.c encodes. */
#include "bundle.h"
#include "context.h"
#include "ears.h"
#include "model.h"
#include "session.h"

static edge_status enter_hearing(edge_session *s, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status || s->ears)
        return status;
    return leave(s, edge_fail(error, EDGE_UNSUPPORTED, "the bundle hears nothing: export a Whisper model, such as whisper-base"));
}

edge_status edge_listen(edge_session *s, const edge_source *file, const edge_hearing *options, edge_error *error)
{
    edge_status status = enter_hearing(s, error);
    if (status)
        return status;
    if (!options || options->size < sizeof *options)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "edge_listen needs an edge_hearing: begin with EDGE_HEARING"));
    return leave(s, EDGE_EARS->listen(s, file, options, error));
}

int64_t edge_hear(edge_session *s, const float *samples, size_t count, edge_segment *segment, edge_error *error)
{
    edge_status status = enter_hearing(s, error);
    if (status)
        return status;
    if (!segment || segment->size < sizeof *segment)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "edge_hear needs an edge_segment whose size is set"));
    if (count && !samples)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "edge_hear needs samples; none, 0 of them, are the end of the sound"));
    if ((status = check_length(count, sizeof *samples, error)))
        return leave(s, status);
    const int64_t taken = EDGE_EARS->hear(s, samples, count, segment, error);
    if (taken >= 0 && s->failed) {
        if (!(status = model_is_whole(s->model, error)) && !(status = check_threads(s, error)))
            status = edge_fail(error, EDGE_FAILED, "the model computed no number (NaN), or ears.edge was cut short: copy it again");
        return leave(s, status);
    }
    leave(s, EDGE_OK);
    return taken;
}

/* ---- prompts ------------------------------------------------------------------------------------------------------------ */

static edge_status check_hears(const edge_model *model, uint64_t count, uint32_t rate, edge_error *error)
{
    if (!EDGE_SOUNDS || !model->sizes[SECTION_SOUNDS])
        return edge_fail(error, EDGE_UNSUPPORTED, "the bundle hears no sounds in prompts: export a model with its encoder as --mmproj");
    if (!count || count > UINT32_MAX / 2)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a sound has 1 to %d samples, not %d", (int64_t)(UINT32_MAX / 2), (int64_t)count);
    if (rate < SLOWEST_SOUND || rate > FASTEST_SOUND)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "rate must be from %d to %d samples per second, not %d", (int64_t)SLOWEST_SOUND,
                         (int64_t)FASTEST_SOUND, (int64_t)rate);
    return EDGE_OK;
}

int64_t edge_sound_tokens(const edge_model *model, uint64_t count, uint32_t rate, edge_error *error)
{
    if (!model)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the model is NULL: edge_open makes one");
    edge_status status = check_hears(model, count, rate, error);
    return status ? status : EDGE_SOUNDS->count(model, count, rate, error);
}

edge_status edge_sound(edge_session *s, const edge_source *file, const float *samples, size_t count, uint32_t rate, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status)
        return status;
    if ((status = check_hears(s->model, count, rate, error)))
        return leave(s, status);
    if (!samples)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "edge_sound needs samples: floats from -1 to 1"));
    if ((status = begin_medium(s, file, "edge_sound", "sounds.edge", "sound", error)))
        return leave(s, status);
    return leave(s, EDGE_SOUNDS->play(s, file, samples, count, rate, error));
}
