/* Prompts with tools of the C runtime for Python, by sections of model.edge: parts as tokens. See tokens_harness.c. */
#include <stdlib.h>
#include <string.h>

#include "tool_prompt.h"

typedef struct { edge_model model; edge_config config; tokenizer *tokens; } opened; /* begins as tokens_harness.c's */
typedef struct { int32_t *ids; int64_t count, most; } list;

static bool add_ids(void *to, const int32_t *ids, size_t count)
{
    list *all = to;
    for (size_t i = 0; i < count && all->count < all->most; i++)
        all->ids[all->count++] = ids[i];
    return all->count < all->most;
}

/* texts: system, result, name, identifier; each ends with \0. Returns the number of ids, or an edge_status. */
int64_t prompt_part(opened *o, const uint8_t *section, uint64_t size, const char *tools_json, uint32_t part, const char *const *texts,
                    int32_t *ids, int64_t most, edge_error *error)
{
    arena counting = {NULL, 0};
    json_layout(&counting);
    prompt_text_layout(&counting);
    void *memory = calloc(1, counting.used + 64);
    arena held = {(uint8_t *)memory + (64 - (uintptr_t)memory % 64), 0};
    json_tree *tree = json_layout(&held);
    prompt_text *room = prompt_text_layout(&held);
    tool_template template;
    list all = {ids, 0, most};
    o->config.chat = 1;
    o->model.sections[SECTION_TOOLS] = section;
    o->model.sizes[SECTION_TOOLS] = size;
    edge_status status = tool_template_check(&o->model, true, error);
    if (!status)
        status = tool_template_find(&o->model, &template, error);
    if (!status)
        status = json_read(tree, tools_json, strlen(tools_json), error);
    if (!status) {
        const tool_list tools = {tree, tree->values[1].child};
        tool_texts given;
        span *spans[] = {&given.system, &given.result, &given.name, &given.id};
        for (int i = 0; i < 4; i++)
            *spans[i] = (span){texts[i], (uint32_t)strlen(texts[i])};
        bool whole = tool_part_write(&template, part, &tools, &given, part == TOOL_FIRST || part == TOOL_SYSTEM, room, o->tokens, add_ids, &all);
        status = whole ? EDGE_OK : EDGE_FULL;
    }
    free(memory);
    return status ? status : all.count;
}
