/* Reads section CHAT, the token ids that edge/apps/sections/chat.py rendered at export. */
#include "chat.h"

static const chat_header *header_of(const edge_model *model)
{
    return (const chat_header *)(const void *)model->sections[SECTION_CHAT];
}

edge_status chat_check(const edge_model *model, edge_error *error)
{
    uint64_t size = model->sizes[SECTION_CHAT];
    if (!size != !model->config->chat || (size && size < sizeof(chat_header)))
        return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its chat template): export it again");
    if (!size)
        return EDGE_OK;
    const chat_header *header = header_of(model);
    const int32_t *ids = (const int32_t *)(const void *)(header + 1);
    uint64_t left = (size - sizeof *header) / sizeof *ids;
    for (int part = 0; part < CHAT_PARTS; part++) {
        int32_t count = header->counts[part] == CHAT_ABSENT ? 0 : header->counts[part];
        bool fits = count >= 0 && (uint64_t)count <= left;
        for (int32_t i = 0; fits && i < count; i++)
            fits = ids[i] >= 0 && (uint32_t)ids[i] < model->config->vocab;
        if (!fits)
            return edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its chat template): export it again");
        ids += count;
        left -= (uint64_t)count;
    }
    return EDGE_OK;
}

const int32_t *chat_ids(const edge_model *model, enum chat_part part, uint32_t *count)
{
    *count = 0;
    if (!model->sizes[SECTION_CHAT])
        return NULL;
    const chat_header *header = header_of(model);
    const int32_t *ids = (const int32_t *)(const void *)(header + 1);
    for (int before = 0; before < (int)part; before++)
        ids += header->counts[before] == CHAT_ABSENT ? 0 : header->counts[before];
    if (header->counts[part] == CHAT_ABSENT)
        return NULL;
    *count = (uint32_t)header->counts[part];
    return ids;
}

bool chat_starts(const edge_model *model, enum chat_part part)
{
    return model->sizes[SECTION_CHAT] && header_of(model)->starts >> part & 1;
}
