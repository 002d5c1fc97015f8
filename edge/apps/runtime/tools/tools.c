/* The tools of a session: their text, the calls of an answer, and both in the prompt. */
#include <string.h>

#include "call_rules.h"
#include "call_rules.h"
#include "calling.h"
#include "calls.h"
#include "json.h"
#include "system.h"
#include "tool_prompt.h"
#include "tools.h"

static tools *lay_out(arena *from, size_t length, char **text)
{
    tools *t = take(from, sizeof *t);
    json_tree *tree = json_layout(from);
    calls *found = calls_layout(from);
    prompt_text *room = prompt_text_layout(from);
    *text = take(from, length + 1);
    if (t) {
        t->tree = tree;
        t->calls = found;
        t->room = room;
    }
    return t;
}

void tools_free(tools *t)
{
    if (t)
        unmap_memory(t, t->size);
}

static edge_status refuse(edge_error *error, edge_status code, uint32_t number, const char *why)
{
    return edge_fail(error, code, "tool %d: %s", (int64_t)number, why);
}

static bool is_name(const json_value *it)
{
    bool well = it->kind == JSON_STRING && it->length && it->length <= LONGEST_TOOL_NAME;
    for (uint32_t i = 0; well && i < it->length; i++) {
        const char c = it->text[i];
        well = (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_' || (i && c && strchr(".:/-", c));
    }
    return well;
}

/* Checks a tool as edge/model/chat/messages.py does. */
static edge_status check_tool(const json_tree *tree, uint32_t tool, uint32_t number, edge_error *error)
{
    const json_value *values = tree->values;
    const uint32_t function = tool_function(tree, tool), kind = json_named(tree, tool, "type");
    const uint32_t parameters = json_named(tree, function, "parameters");
    edge_status status = EDGE_BAD_ARGUMENT;
    const char *why = NULL;
    if (values[tool].kind != JSON_OBJECT || values[function].kind != JSON_OBJECT)
        why = "it must be an object with a function";
    else if (kind && !json_is(values + kind, "function"))
        why = "its type is not function: only functions are supported";
    else if (!is_name(values + json_named(tree, function, "name")))
        why = "the name of its function must have letters, digits, _, -, . and the like";
    else if (values[parameters].kind != JSON_OBJECT && values[parameters].kind != JSON_NULL)
        why = "its parameters must be a JSON schema";
    else if (json_any(tree, parameters, "$ref\0allOf\0anyOf\0oneOf\0") && !json_named(tree, parameters, "properties")) {
        why = "its parameters have no properties of their own, beside $ref, allOf, anyOf or oneOf";
        status = EDGE_UNSUPPORTED;
    }
    return why ? refuse(error, status, number, why) : EDGE_OK;
}

static bool is_strict(const json_tree *tree, uint32_t tool)
{
    return tree->values[json_named(tree, tool_function(tree, tool), "strict")].kind > JSON_FALSE;
}

static edge_status read_tools(tools *t, const char *text, size_t length, edge_error *error)
{
    t->tree->name = "the list of tools is";
    edge_status status = json_read(t->tree, text, length, error);
    const json_value *values = t->tree->values;
    if (!status && (values[1].kind != JSON_ARRAY || !values[1].count))
        status = edge_fail(error, EDGE_BAD_ARGUMENT, "tools must be a JSON array of one or more");
    t->list = (tool_list){t->tree, values[1].child};
    uint32_t number = 1;
    for (uint32_t tool = status ? 0 : values[1].child; tool && !status; tool = values[tool].next) {
        status = check_tool(t->tree, tool, number, error);
        const uint32_t function = tool_function(t->tree, tool), name = json_named(t->tree, function, "name");
        if (!status && tool_named(&t->list, values[name].text, values[name].length) != function)
            status = refuse(error, EDGE_BAD_ARGUMENT, number, "another tool has its name");
        number++;
        t->strict |= is_strict(t->tree, tool);
    }
    return status;
}

static edge_status make(const edge_model *model, const char *text, size_t length, tools **made, edge_error *error)
{
    char *copy;
    tool_template found;
    arena size = {NULL, 0}, memory = {NULL, 0};
    edge_status status = tool_template_find(model, &found, error);
    if (status)
        return status;
    if (length > MOST_JSON)
        return edge_fail(error, EDGE_UNSUPPORTED, "the list of tools has %d bytes, and may have at most %d", (int64_t)length,
                         (int64_t)MOST_JSON);
    lay_out(&size, length, &copy);
    memory.memory = map_memory(size.used);
    if (!memory.memory)
        return edge_fail(error, EDGE_NO_MEMORY, "no memory for tools");
    tools *t = lay_out(&memory, length, &copy);
    t->size = size.used;
    t->template = found;
    t->allowed = t->parallel = true;
    memcpy(copy, text, length);
    if (!(status = read_tools(t, copy, length, error))) {
        tools_start(t, false);
        tools_describe(&t->template, &t->list, t->room);
        if (t->room->full)
            status = edge_fail(error, EDGE_UNSUPPORTED, "the list of tools is too long");
    }
    if (status)
        tools_free(t);
    else
        *made = t;
    return status;
}

void tools_start(tools *t, bool reads)
{
    t->before += calls_count(t->calls);
    t->given = 0;
    t->reads = reads && t->allowed;
    calls_begin(t->calls, &t->template.form, &t->list);
}

void tools_name(tools *t, uint32_t index, tool_texts *found)
{
    const json_value *values = t->tree->values, *name = values + json_named(t->tree, calls_at(t->calls, index)->function, "name");
    uint32_t number = (t->before + index + 1) % 100000;
    memcpy(t->names[index], name->text, name->length);
    t->names[index][name->length] = 0;
    memcpy(t->ids[index], "call", 4);
    for (int i = LONGEST_CALL_ID - 2; i >= 4; i--, number /= 10)
        t->ids[index][i] = (char)('0' + number % 10);
    t->ids[index][LONGEST_CALL_ID - 1] = 0;
    found->name = (span){t->names[index], name->length};
    found->id = (span){t->ids[index], LONGEST_CALL_ID - 1};
}

static bool write_part(tools *t, enum tool_part part, const tool_texts *texts, tokenizer *by, ids_out out, void *to)
{
    const bool starts = part == TOOL_FIRST || part == TOOL_SYSTEM;
    return tool_part_write(&t->template, part, &t->list, texts, starts, t->room, by, out, to);
}

const span *tools_mark(const tools *t, int32_t token)
{
    for (uint32_t i = 0; i < t->template.config->marks; i++)
        if (t->template.marks[i].token == token)
            return &t->template.marks[i].text;
    return NULL;
}

const tools_kind edge_json_calls = {make, write_part, call_rules, calls_feed, calls_finish};
const tools_kind edge_calls_of_fields = {make, write_part, call_rules_of_fields, calls_feed, calls_finish};
