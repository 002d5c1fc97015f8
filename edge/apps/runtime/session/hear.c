/* The functions of edge.h for models that hear, which ears.c runs. */
#include "bundle.h"
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
