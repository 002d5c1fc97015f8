#include <string.h>

#include "hearing.h"

const int32_t *hearing_never(const hearing_config *config)
{
    return (const int32_t *)(config + 1);
}

const int32_t *hearing_blank(const hearing_config *config)
{
    return hearing_never(config) + config->never;
}

const int32_t *hearing_languages(const hearing_config *config)
{
    return hearing_blank(config) + config->blank;
}

const char *hearing_name(const hearing_config *config, uint32_t language)
{
    const char *name = (const char *)(hearing_languages(config) + config->languages);
    if (language >= config->languages)
        return "";
    for (; language; language--)
        name += strlen(name) + 1;
    return name;
}

/* Whether the section has all that its numbers say. */
static bool is_whole(const hearing_config *c, uint64_t size, uint32_t vocab)
{
    const uint64_t most = size / sizeof(int32_t);
    if (c->never > most || c->blank > most || c->languages > most)
        return false;
    const uint64_t lists = (uint64_t)c->never + c->blank + c->languages, names = sizeof *c + lists * sizeof(int32_t);
    if (names > size)
        return false;
    for (uint64_t i = 0; i < lists; i++)
        if (hearing_never(c)[i] < 0 || (uint32_t)hearing_never(c)[i] >= vocab)
            return false;
    const char *at = (const char *)c + names, *end = (const char *)c + size;
    uint32_t found = 0;
    for (; at < end; at++)
        found += !*at;
    return found == c->languages && (!found || !end[-1]);
}

const hearing_config *model_hearing(const edge_model *model)
{
    const hearing_config *c = (const hearing_config *)model->sections[SECTION_HEARING];
    const edge_config *own = model->config;
    const uint64_t size = model->sizes[SECTION_HEARING];
    if (size < sizeof *c || c->mels > MOST_BANDS || !c->mels || c->frames % 2 || c->frames < 2 || c->frames > MOST_MEL_FRAMES
        || c->text_bytes < 64 || c->text_bytes > MOST_TEXT_BYTES || own->encoder || !own->crossings)
        return NULL;
    const uint32_t tokens[] = {c->sot, c->eot, c->translate, c->transcribe, c->prev, c->no_speech, c->first_timestamp};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        if (tokens[i] >= own->vocab)
            return NULL;
    return own->context >= 2 * ALIGNED_TOKENS && own->capacity >= own->context && is_whole(c, size, own->vocab) ? c : NULL;
}
