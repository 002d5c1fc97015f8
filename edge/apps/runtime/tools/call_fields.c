/* Arguments of calls that are no JSON: tags, Python's literals, and `call:NAME{key:value}`. */
#include <string.h>

#include "call_rules_parts.h"
#include "calls.h"
#include "json.h"
#include "rules.h"
#include "schema_parts.h"

typedef struct { member name; conjunction of; } field;

static const json_value *value_at(const call_writer *w, uint32_t index)
{
    return w->in->tree->values + index;
}

static span text_of(const char *text)
{
    return (span){text, (uint32_t)strlen(text)};
}

/* The one schema of a field; 0: several hold, or none. */
static uint32_t single(const conjunction *of)
{
    return of->count == 1 ? of->of[0].value : 0;
}

static bool has_type(const call_writer *w, uint32_t shape, const char *type)
{
    return json_is(value_at(w, json_named(w->in->tree, shape, "type")), type);
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

static uint32_t tag(call_writer *w, const field *of, uint32_t next)
{
    static const char closing[] = "\n</parameter>\n";
    const uint32_t shape = single(&of->of), listed = json_named(w->in->tree, shape, "enum");
    const uint32_t behind = call_word(w, closing, next);
    uint32_t found = NEVER;
    if (listed && has_type(w, shape, "string"))
        for (uint32_t each = value_at(w, listed)->child; each; each = value_at(w, each)->next) {
            const json_value *it = value_at(w, each);
            found = rules_either(w->r, it->kind == JSON_STRING ? rules_bytes(w->r, it->text, it->length, behind)
                                                               : schema_constant(w->in, each, behind), found);
        }
    else if (!of->of.count || (shape && tag_has_text(w->in->tree, shape)))
        found = call_until(w, text_of(closing), false, next);
    else
        found = call_json(w, &of->of, behind);
    found = call_word(w, ">\n", found);
    return call_word(w, "<parameter=", rules_bytes(w->r, of->name.text, of->name.length, found));
}

static uint32_t python_value(call_writer *w, const conjunction *of, uint32_t next)
{
    const uint32_t shape = single(of);
    if (has_type(w, shape, "boolean") && !json_any(w->in->tree, shape, "enum\0const\0"))
        return rules_either(w->r, call_word(w, "True", next), call_word(w, "False", next));
    if (has_type(w, shape, "null"))
        return call_word(w, "None", next);
    return call_json(w, of, next);
}

static uint32_t braces(call_writer *w, const conjunction *of, uint32_t next);

static uint32_t constant(call_writer *w, uint32_t index, uint32_t next)
{
    const span quote = w->choice->form->quote;
    const json_value *it = value_at(w, index);
    if (it->kind != JSON_STRING)
        return schema_constant(w->in, index, next);
    return call_mark_rule(w, quote, rules_bytes(w->r, it->text, it->length, call_mark_rule(w, quote, next)));
}

static uint32_t brace_value(call_writer *w, uint32_t shape, int type, uint32_t next);

static uint32_t referred(call_writer *w, uint32_t reference, uint32_t next)
{
    const uint32_t target = json_pointed(w->in->tree, w->root, value_at(w, reference));
    for (uint32_t i = 0; i < w->known_count; i++)
        if (w->known[i].target == target)
            return rules_call(w->r, w->known[i].rule, next);
    if (!target || w->known_count == MOST_REFERENCES) {
        schema_refuse(w->in, target ? "too many references" : "a reference to what it lacks, or outside of it");
        return NEVER;
    }
    const uint32_t rule = rules_new(w->r); /* first its number: the schema may refer to itself */
    w->known[w->known_count].target = target;
    w->known[w->known_count++].rule = rule;
    rules_set(w->r, rule, brace_value(w, target, 0, END));
    return rules_call(w->r, rule, next);
}

/* A value of this schema. type: in place of its own; 0: its own. */
static uint32_t brace_value(call_writer *w, uint32_t shape, int type, uint32_t next)
{
    const json_tree *tree = w->in->tree;
    const span quote = w->choice->form->quote;
    const uint32_t reference = json_named(tree, shape, "$ref"), stated = type ? 0 : json_named(tree, shape, "type");
    uint32_t found = NEVER, each;
    if (w->r->status)
        return NEVER;
    if (!type && value_at(w, reference)->kind == JSON_STRING)
        return referred(w, reference, next);
    if ((each = schema_listed(w->in, shape))) {
        for (; each; each = schema_next(w->in, each))
            found = rules_either(w->r, found, constant(w, each, next));
        return found;
    }
    if (value_at(w, stated)->kind == JSON_ARRAY) {
        for (each = value_at(w, stated)->child; each; each = value_at(w, each)->next)
            if ((type = schema_type_named(value_at(w, each))))
                found = rules_either(w->r, found, brace_value(w, shape, type, next));
        return found;
    }
    for (int i = 0; i < 2 && !stated && !type; i++)
        for (each = json_child(tree, shape, i ? "oneOf" : "anyOf"); each; each = value_at(w, each)->next)
            found = rules_either(w->r, found, brace_value(w, each, 0, next));
    if (found != NEVER)
        return found;
    const conjunction own = {{{shape, 0}}, 1};
    if (stated && !(type = schema_type_named(value_at(w, stated)))) {
        schema_malformed(w->in, "type");
        return NEVER;
    }
    if (type == T_OBJECT || json_any(tree, shape, "properties\0allOf\0"))
        return braces(w, &own, next);
    if (!type || type == T_STRING) {
        found = call_has_mark(w, quote) ? call_text(w, call_mark_rule(w, quote, next)) : call_until(w, quote, false, next);
        return call_mark_rule(w, quote, found);
    }
    if (type == T_ARRAY) {
        const uint32_t items = json_named(tree, shape, "items"), rule = rules_new(w->r), end = call_word(w, "]", next);
        rules_set(w->r, rule, brace_value(w, items, items ? 0 : T_STRING, END));
        found = rules_repeat(w->r, call_word(w, ",", rules_call(w->r, rule, END)), 0, WITHOUT_END, end);
        return call_word(w, "[", rules_either(w->r, end, rules_call(w->r, rule, found)));
    }
    if (type == T_BOOLEAN)
        return rules_either(w->r, call_word(w, "true", next), call_word(w, "false", next));
    if (type == T_NULL)
        return call_word(w, "null", next);
    return schema_numbers(w->in, &own, type == T_INTEGER, next);
}

/* ---- fields ----------------------------------------------------------------------------------------------------- */

static int lower(char c)
{
    return c >= 'A' && c <= 'Z' ? c | 32 : (uint8_t)c;
}

static bool comes_before(const member *one, const member *other) /* in lower case */
{
    for (uint32_t i = 0; i < one->length && i < other->length; i++)
        if (lower(one->text[i]) != lower(other->text[i]))
            return lower(one->text[i]) < lower(other->text[i]);
    return one->length < other->length;
}

static uint32_t write_field(call_writer *w, const field *of, uint32_t next)
{
    const enum call_body body = w->choice->form->body;
    const uint32_t shape = single(&of->of);
    uint32_t value;
    if (body == CALL_TAGS)
        return tag(w, of, next);
    if (body == CALL_PYTHON)
        value = call_word(w, "=", python_value(w, &of->of, next));
    else
        value = call_word(w, ":", shape || !of->of.count ? brace_value(w, shape, 0, next) : braces(w, &of->of, next));
    return rules_bytes(w->r, of->name.text, of->name.length, value);
}

/* The fields of an object, in their order, with separators: all required ones, and any of the others. */
static uint32_t series(call_writer *w, const conjunction *of, const char *between, uint32_t next)
{
    member fields[MOST_FIELDS];
    uint32_t count = 0;
    const bool closed = schema_list_members(w->in, of);
    for (uint32_t i = 0; i < w->in->member_count; i++) {
        const member it = w->in->members[i];
        bool named = false;
        for (uint32_t j = 0; j < of->count; j++)
            named |= json_member(w->in->tree, json_named(w->in->tree, of->of[j].value, "properties"), it.text, it.length) != 0;
        if (!named)
            continue;
        if (count == MOST_FIELDS) {
            schema_refuse(w->in, "more than 96 arguments");
            return NEVER;
        }
        uint32_t place = count++;
        for (; w->choice->form->body == CALL_BRACES && place && comes_before(&it, fields + place - 1); place--)
            fields[place] = fields[place - 1];
        fields[place] = it;
    }
    uint32_t first = next, more = next;
    while (count-- && !w->r->status) {
        field it = {.name = fields[count]};
        if (!schema_property(w->in, of, &it.name, closed, &it.of))
            continue;
        const uint32_t written = write_field(w, &it, more), behind = call_word(w, between, written);
        first = it.name.required ? written : rules_either(w->r, written, first);
        more = it.name.required ? behind : rules_either(w->r, behind, more);
    }
    return first;
}

/* The objects that schemas describe: one for each of their alternatives. */
static uint32_t objects(call_writer *w, const conjunction *given, const char *between, uint32_t next)
{
    conjunction of = *given;
    uint32_t found = NEVER;
    if (!schema_complete(w->in, &of) || w->r->status)
        return NEVER;
    const uint32_t choices = schema_alternatives(w->in, &of);
    for (uint32_t i = 0; i < choices && !w->r->status; i++) {
        conjunction with;
        schema_choose(w->in, &of, i, &with);
        found = rules_either(w->r, found, objects(w, &with, between, next));
    }
    return choices ? found : series(w, &of, between, next);
}

static uint32_t braces(call_writer *w, const conjunction *of, uint32_t next)
{
    if (w->depth == MOST_OBJECTS) { /* such as one that allOf leads back to, which has no rule of its own */
        schema_refuse(w->in, "objects in more than 32 others");
        return NEVER;
    }
    w->depth++;
    const uint32_t found = call_word(w, "{", objects(w, of, ",", call_word(w, "}", next)));
    w->depth--;
    return found;
}

static uint32_t call_fields(call_writer *w, span name, const conjunction *of, uint32_t next)
{
    const enum call_body body = w->choice->form->body;
    const char *opening = body == CALL_TAGS ? ">\n" : "(", *before = body == CALL_TAGS ? "<function=" : "";
    uint32_t found;
    if (body == CALL_BRACES)
        return call_word(w, "call:", rules_bytes(w->r, name.bytes, name.length, braces(w, of, next)));
    found = body == CALL_TAGS ? objects(w, of, "", call_word(w, "</function>", next)) : objects(w, of, ", ", call_word(w, ")", next));
    return call_word(w, before, rules_bytes(w->r, name.bytes, name.length, call_word(w, opening, found)));
}

uint32_t call_rules_of_fields(schema *in, rules *r, const call_choice *choice)
{
    return call_rules_by(call_fields, in, r, choice);
}
