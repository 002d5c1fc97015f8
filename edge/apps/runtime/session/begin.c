/* Begins a session with the engine that the app has chosen, or with the faster one. */
#include "bundle.h"
#include "model.h"
#include "session.h"

edge_status edge_begin(edge_model *model, const edge_options *options, edge_session **session, edge_error *error)
{
    const edge_options as_exported = EDGE_OPTIONS;
    edge_status status;
    if (!model || !session)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_begin needs a model and a place for the session");
    *session = NULL;
    options = options ? options : &as_exported;
    if ((status = model_is_whole(model, error)) || (status = check_options(model, options, error)))
        return status;
    bool programs = EDGE_GPU && model->sizes[SECTION_GPU], on_gpu = options->engine == EDGE_ENGINE_GPU;
    if (options->engine == EDGE_ENGINE_NPU && !(EDGE_NPU && model->sizes[SECTION_NPU]))
        return edge_fail(error, EDGE_UNSUPPORTED, "the bundle has no graphs for an NPU: export it with --npu, or set engine "
                         "to cpu or auto");
    if (on_gpu && !programs)
        return edge_fail(error, EDGE_UNSUPPORTED, "the bundle has no programs for a GPU: export it with --gpu, or set engine "
                         "to cpu or auto");
    if (programs && options->engine == EDGE_ENGINE_AUTO)
        return EDGE_RACE(model, options, session, error);
    const accelerator_kind *kind = on_gpu ? EDGE_GPU : options->engine == EDGE_ENGINE_NPU ? EDGE_NPU : NULL;
    return begin_on(model, options, kind, session, error);
}
