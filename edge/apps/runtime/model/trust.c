#include <string.h>

#include "hash.h"
#include "trust.h"

edge_status check_trusted(const edge_model *model, const uint8_t digest[32], edge_error *error)
{
    static const enum section_kind trusted[] = {
        SECTION_CONFIG, SECTION_LAYERS, SECTION_DESIGNS, SECTION_ANGLES, SECTION_NORMALS,
        SECTION_ADAPTERS, SECTION_GPU, SECTION_NPU, SECTION_PREFIX,
    };
    hasher h;
    hash_start(&h);
    for (size_t i = 0; i < sizeof trusted / sizeof *trusted; i++)
        hash_add(&h, model->sections[trusted[i]], model->sizes[trusted[i]]);
    uint8_t found[32];
    hash_end(&h, found);
    if (memcmp(found, digest, sizeof found))
        return edge_fail(error, EDGE_BAD_FILE, "this model.edge belongs to another library: export both together");
    return EDGE_OK;
}
