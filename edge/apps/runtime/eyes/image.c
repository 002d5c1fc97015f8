/* The calls that show pictures: their arguments are checked here, and see.c does the rest in bundles that see. */
#include "bundle.h"
#include "context.h"
#include "session.h"

static edge_status check_sees(const edge_model *model, edge_error *error)
{
    if (EDGE_EYES && model->sizes[SECTION_EYES] && !model->sizes[SECTION_SOUNDS])
        return EDGE_OK;
    return edge_fail(error, EDGE_UNSUPPORTED, "the bundle has no eyes: export the model with --mmproj");
}

int64_t edge_image_tokens(const edge_model *model, uint32_t width, uint32_t height, uint32_t most, edge_error *error)
{
    if (!model)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the model is NULL: edge_open makes one");
    edge_status status = check_sees(model, error);
    return status ? status : EDGE_EYES->count(model, width, height, most, error);
}

static edge_status check_picture(const edge_picture *picture, edge_error *error)
{
    if (!picture || picture->size < sizeof *picture || !picture->pixels)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "edge_image needs an edge_picture whose size is set, and its pixels");
    if (picture->channels != 3 && picture->channels != 4)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture has 3 channels (RGB) or 4 (RGBA), not %d", (int64_t)picture->channels);
    if (picture->stride < (uint64_t)picture->width * picture->channels)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture's stride is %d bytes, and its rows have more: check the width of %d",
                         (int64_t)picture->stride, (int64_t)picture->width);
    return EDGE_OK;
}

edge_status edge_image(edge_session *s, const edge_source *eyes, const edge_picture *picture, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status)
        return status;
    if ((status = check_sees(s->model, error)) || (status = check_picture(picture, error))
        || (status = begin_medium(s, eyes, "edge_image", "eyes.edge", "picture", error)))
        return leave(s, status);
    return leave(s, EDGE_EYES->show(s, eyes, picture, error));
}
