/* Tools of the C runtime for Python: calls in generated text. */
#include <stdlib.h>
#include <string.h>

#include "calls.h"

static struct { json_tree *tree; calls *calls; } made;
static tool_list tools;

static void lay_out(arena *from)
{
    made.tree = json_layout(from);
    made.calls = calls_layout(from);
}

edge_status harness_tools(const char *text, size_t length, edge_error *error)
{
    if (!made.tree) {
        arena size = {NULL, 0}, memory;
        lay_out(&size);
        memory = (arena){calloc(1, size.used + 64), 0};
        memory.memory += 64 - (uintptr_t)memory.memory % 64;
        lay_out(&memory);
    }
    edge_status status = json_read(made.tree, text, length, error);
    tools = (tool_list){made.tree, status ? 0 : made.tree->values[1].child};
    return status;
}

/* texts: opening, closing, another opening, quote, name of arguments, text between; each ends with \0. */
void harness_begin(uint32_t body, uint32_t bare, uint32_t joined, const char *const *texts)
{
    static call_form form;
    span *spans[] = {&form.opening, &form.closing, &form.also, &form.quote, &form.arguments, &form.between};
    form.body = body;
    form.bare = bare;
    form.joined = joined;
    for (int i = 0; i < 6; i++)
        *spans[i] = (span){texts[i], (uint32_t)strlen(texts[i])};
    calls_begin(made.calls, &form, &tools);
}

void harness_feed(const char *text, size_t length)
{
    calls_feed(made.calls, text, length);
}

void harness_finish(uint32_t cut)
{
    calls_finish(made.calls, cut);
}

size_t harness_text(char *out, size_t most)
{
    return calls_text(made.calls, out, most);
}

uint32_t harness_count(void)
{
    return calls_count(made.calls);
}

const char *harness_call(uint32_t index, char *name)
{
    const found_call *found = calls_at(made.calls, index);
    const json_value *own = made.tree->values + json_named(made.tree, found->function, "name");
    memcpy(name, own->text, own->length);
    name[own->length] = 0;
    return calls_arguments(made.calls, found);
}

uint32_t harness_whole(void)
{
    return calls_whole(made.calls);
}

uint32_t harness_cut(void)
{
    return calls_cut(made.calls);
}
