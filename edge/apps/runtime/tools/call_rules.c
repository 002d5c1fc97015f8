/* The rules of an answer that calls tools. */
#include <string.h>

#include "call_rules_parts.h"
#include "calls.h"
#include "json.h"
#include "mask.h"
#include "rules.h"
#include "schema_parts.h"

static uint32_t named_mark(call_writer *w, const char *mark, uint32_t next)
{
    return call_mark_rule(w, (span){mark, (uint32_t)strlen(mark)}, next);
}

/* ---- calls ------------------------------------------------------------------------------------------------------ */

static span name_of(const call_writer *w, uint32_t function)
{
    const json_value *name = w->in->tree->values + json_named(w->in->tree, function, "name");
    return (span){name->text, name->length};
}

/* The schemas of a function's arguments: an object, which has none unless the schema speaks of them. */
static void arguments_of(call_writer *w, uint32_t function, conjunction *found)
{
    static const char object[] = "{\"type\": \"object\"}", empty[] = "{\"type\": \"object\", \"properties\": {}}";
    static const char speaking[] = "properties\0additionalProperties\0patternProperties\0$ref\0allOf\0anyOf\0oneOf\0";
    json_tree *tree = w->in->tree;
    const uint32_t stated = json_named(tree, function, "parameters");
    const bool speaks = json_any(tree, stated, speaking);
    uint32_t added = 0;
    edge_status status = json_add(tree, speaks ? object : empty, speaks ? sizeof object - 1 : sizeof empty - 1, &added, w->r->error);
    if (status && !w->r->status)
        w->r->status = status;
    found->count = 0;
    if (tree->values[stated].kind == JSON_OBJECT)
        found->of[found->count++] = (joined){stated, 0};
    found->of[found->count++] = (joined){added, 0};
    w->root = w->in->root = found->of[0].value;
}

static uint32_t one_call(call_writer *w, uint32_t function, uint32_t next)
{
    const call_form *form = w->choice->form;
    const span name = name_of(w, function);
    conjunction arguments;
    arguments_of(w, function, &arguments);
    if (form->body == CALL_NAMED)
        return call_put(w, name, named_mark(w, "[ARGS]", call_json(w, &arguments, next)));
    if (form->body != CALL_JSON)
        return w->fields ? w->fields(w, name, &arguments, next) : NEVER;
    const uint32_t behind = call_word(w, "\": ", call_json(w, &arguments, call_word(w, "}", next)));
    return call_word(w, "{\"name\": \"", call_put(w, name, call_word(w, "\", \"", call_put(w, form->arguments, behind))));
}

static uint32_t any_call(call_writer *w, uint32_t (*write)(call_writer *, uint32_t, uint32_t))
{
    const call_choice *choice = w->choice;
    uint32_t found = NEVER;
    for (uint32_t tool = choice->tools->first; tool && !w->r->status; tool = w->in->tree->values[tool].next) {
        const uint32_t function = tool_function(w->in->tree, tool);
        if (!choice->only || choice->only == function)
            found = rules_either(w->r, found, write(w, function, END));
    }
    const uint32_t rule = rules_new(w->r);
    rules_set(w->r, rule, found);
    return rule;
}

/* One call or several; from their mark on, or behind it. */
static uint32_t calls_rule(call_writer *w, bool behind_mark)
{
    const call_form *form = w->choice->form;
    const uint32_t call = any_call(w, one_call);
    rules *r = w->r;
    if (form->joined) {
        uint32_t end = call_word(w, "]", call_mark_rule(w, form->closing, END));
        if (w->choice->parallel)
            end = rules_repeat(r, call_word(w, ", ", rules_call(r, call, END)), 0, MOST_CALLS_AT_ONCE - 1, end);
        end = call_word(w, "[", rules_call(r, call, end));
        return behind_mark ? end : call_mark_rule(w, form->opening, end);
    }
    const char *blank = (form->body == CALL_JSON || form->body == CALL_TAGS) && form->closing.length ? "\n" : "";
    uint32_t next = END;
    for (int turn = 0; turn < 2; turn++) { /* those behind the first, then the first */
        uint32_t one = call_word(w, blank, call_mark_rule(w, form->closing, next));
        one = call_word(w, blank, rules_call(r, call, one));
        if (turn)
            return behind_mark ? one : call_mark_rule(w, form->opening, one);
        one = call_put(w, form->between, call_mark_rule(w, form->opening, one));
        next = w->choice->parallel && form->opening.length ? rules_repeat(r, one, 0, MOST_CALLS_AT_ONCE - 1, END) : END;
    }
    return NEVER;
}

static uint32_t headed_call(call_writer *w, uint32_t function, uint32_t next)
{
    const span to = w->choice->form->opening, name = name_of(w, function);
    conjunction arguments;
    arguments_of(w, function, &arguments);
    uint32_t behind = call_word(w, "json", named_mark(w, "<|message|>", call_json(w, &arguments, next)));
    behind = call_word(w, " ", rules_either(w->r, behind, named_mark(w, "<|constrain|>", behind)));
    return rules_either(w->r, call_put(w, to, call_put(w, name, named_mark(w, "<|channel|>", call_word(w, "commentary", behind)))),
                        named_mark(w, "<|channel|>", call_word(w, "commentary", call_put(w, to, call_put(w, name, behind)))));
}

/* An answer whose parts have headers: a thought, then a call or a text. */
static uint32_t parts_rule(call_writer *w)
{
    static const span end = {"<|end|>", 7};
    rules *r = w->r;
    uint32_t last = rules_call(r, any_call(w, headed_call), END);
    if (!w->choice->required)
        last = rules_either(r, last, named_mark(w, "<|channel|>", call_word(w, "final", named_mark(w, "<|message|>", call_text(w, END)))));
    uint32_t behind = named_mark(w, "<|start|>", call_word(w, "assistant", last));
    behind = call_has_mark(w, end) ? call_text(w, call_mark_rule(w, end, behind)) : call_until(w, end, false, behind);
    behind = named_mark(w, "<|channel|>", call_word(w, "analysis", named_mark(w, "<|message|>", behind)));
    return rules_either(r, behind, last);
}

static uint32_t answer(call_writer *w)
{
    static const point_range others[] = {{0, 'Z'}, {'\\', 'z'}, {'|', 0x10FFFF}}; /* than [ and { */
    const call_form *form = w->choice->form;
    rules *r = w->r;
    if (form->body == CALL_HEADER)
        return parts_rule(w);
    if (w->choice->required)
        return calls_rule(w, false);
    if (call_has_mark(w, form->opening))
        return call_text(w, rules_either(r, END, calls_rule(w, false)));
    if (form->opening.length)
        return call_until(w, form->opening, true, calls_rule(w, true));
    return rules_either(r, calls_rule(w, false), rules_either(r, END, rules_points(r, others, 3, call_text(w, END))));
}

uint32_t call_rules_by(field_writer *fields, schema *in, rules *r, const call_choice *choice)
{
    static const point_range all[] = {{0, 0x10FFFF}};
    call_writer w = {.choice = choice, .fields = fields, .in = in, .r = r, .any = rules_points(r, all, 1, END)};
    json_tree *own = in->tree;
    const uint32_t count = choice->tools->tree->count, used = choice->tools->tree->used;
    in->tree = (json_tree *)choice->tools->tree;
    schema_begin(in, r, true);
    const uint32_t start = answer(&w);
    in->tree->count = count; /* without the added values */
    in->tree->used = used;
    in->tree = own;
    return start;
}

uint32_t call_rules(schema *in, rules *r, const call_choice *choice)
{
    return call_rules_by(NULL, in, r, choice);
}
