/* Tools as text: JSON as Python's json.dumps writes it, or dicts as Python writes them. What templates get of a tool is what
 * `parse_tools` and `with_properties` of edge/model/chat/messages.py make of it. */
#include <string.h>

#include "calls.h"
#include "json.h"
#include "tool_prompt.h"
#include "utf8.h"

prompt_text *prompt_text_layout(arena *from)
{
    prompt_text *room = take(from, sizeof *room);
    char *bytes = take(from, MOST_PROMPT);
    uint8_t *trusted = take(from, MOST_PROMPT);
    if (room)
        *room = (prompt_text){bytes, trusted, 0, false};
    return room;
}

void prompt_put(prompt_text *to, const char *text, size_t length, bool trusted)
{
    to->full |= length > MOST_PROMPT - to->used;
    if (to->full)
        return;
    memcpy(to->bytes + to->used, text, length);
    memset(to->trusted + to->used, trusted, length);
    to->used += length;
}

typedef struct { const tool_template *t; const json_tree *tree; prompt_text *to; } describer;

/* Whether a text is a word of JSON Schema, which is the template's own: as _WORDS of edge/model/chat/messages.py. */
static bool is_word(const char *text, size_t length)
{
    static const char words[] =
        " type function name description parameters properties required items enum nullable default strict anyOf oneOf allOf "
        "additionalProperties title format minimum maximum minLength maxLength minItems maxItems pattern const response return "
        "arguments id string number integer boolean array object null STRING NUMBER INTEGER BOOLEAN ARRAY OBJECT $ref $defs "
        "definitions ";
    for (const char *at = words; length && *(at + 1); at = strchr(at + 1, ' '))
        if (strchr(at + 1, ' ') - (at + 1) == (ptrdiff_t)length && !memcmp(at + 1, text, length))
            return true;
    return false;
}

static bool flag(const describer *d, uint32_t wanted)
{
    return d->t->config->flags & wanted;
}

static void own(describer *d, const char *text)
{
    prompt_put(d->to, text, strlen(text), true);
}

static void escape(prompt_text *to, uint32_t point, bool trusted, const char *kind, int digits)
{
    static const char hex[] = "0123456789abcdef";
    char written[12] = {'\\', kind[0]};
    for (int i = 0; i < digits; i++)
        written[2 + i] = hex[point >> 4 * (digits - 1 - i) & 15];
    prompt_put(to, written, 2 + (size_t)digits, trusted);
}

void write_escaped(prompt_text *to, enum written_as written, const char *text, size_t length, bool trusted)
{
    static const char python[] = "\n\r\t\\'", python_names[] = "nrt\\'";
    const bool as_python = written == WRITTEN_REPR;
    if (written == WRITTEN_AS_IS) {
        prompt_put(to, text, length, trusted);
        return;
    }
    for (size_t i = 0, size; i < length; i += size) {
        uint32_t point;
        bool whole;
        size = utf8_read((const uint8_t *)text + i, length - i, &point, &whole);
        const char *known = as_python && point && point < 0x80 ? strchr(python, (int)point) : NULL;
        const char letter = known ? python_names[known - python] : as_python || point > 0x7F ? 0 : json_letter((int)point);
        const char pair[] = {'\\', letter};
        if (letter)
            prompt_put(to, pair, 2, trusted);
        else if (as_python && (point < 0x20 || (point >= 0x7F && point <= 0xA0) || point == 0xAD))
            escape(to, point, trusted, "x", 2);
        else if (!as_python && point < 0x20)
            escape(to, point, trusted, "u", 4);
        else if (written == WRITTEN_ASCII && point > 0xFFFF) {
            escape(to, 0xD800 + ((point - 0x10000) >> 10), trusted, "u", 4);
            escape(to, 0xDC00 + ((point - 0x10000) & 0x3FF), trusted, "u", 4);
        } else if (written == WRITTEN_ASCII && point > 0x7F)
            escape(to, point, trusted, "u", 4);
        else
            prompt_put(to, text + i, size, trusted);
    }
}

static void string(describer *d, const char *text, size_t length)
{
    const bool python = flag(d, TOOLS_REPR);
    own(d, python ? "'" : "\"");
    write_escaped(d->to, python ? WRITTEN_REPR : flag(d, TOOLS_ASCII) ? WRITTEN_ASCII : WRITTEN_JSON, text, length, is_word(text, length));
    own(d, python ? "'" : "\"");
}

/* Before a part of an object or array, or its end. */
static void line(describer *d, int depth)
{
    if (!d->t->config->indent)
        return;
    own(d, "\n");
    for (uint32_t i = 0; i < d->t->config->indent * (uint32_t)depth; i++)
        own(d, " ");
}

static void separate(describer *d, bool first, int depth)
{
    if (!first)
        own(d, d->t->config->indent || flag(d, TOOLS_COMPACT) ? "," : ", ");
    line(d, depth);
}

static void key(describer *d, const char *text, size_t length, bool first, int depth)
{
    separate(d, first, depth);
    string(d, text, length);
    own(d, flag(d, TOOLS_COMPACT) ? ":" : ": ");
}

static void named(describer *d, const char *text, bool first, int depth)
{
    key(d, text, strlen(text), first, depth);
}

static void value(describer *d, uint32_t index, int depth)
{
    static const char python[][6] = {"None", "False", "True"}, json[][6] = {"null", "false", "true"};
    const json_value *values = d->tree->values, *it = values + index;
    if (it->kind <= JSON_TRUE) {
        own(d, (flag(d, TOOLS_REPR) ? python : json)[it->kind - JSON_NULL]);
    } else if (it->kind == JSON_NUMBER) {
        prompt_put(d->to, it->text, it->length, true);
    } else if (it->kind == JSON_STRING) {
        string(d, it->text, it->length);
    } else {
        const bool object = it->kind == JSON_OBJECT;
        own(d, object ? "{" : "[");
        for (uint32_t each = it->child; each; each = values[each].next) {
            if (object)
                key(d, values[each].key, values[each].key_length, each == it->child, depth + 1);
            else
                separate(d, each == it->child, depth + 1);
            value(d, each, depth + 1);
        }
        if (it->child)
            line(d, depth);
        own(d, object ? "}" : "]");
    }
}

static bool is_key(const json_value *it, const char *name)
{
    return is_same(it->key, it->key_length, name);
}

static void parameters(describer *d, uint32_t index, int depth)
{
    const json_value *values = d->tree->values;
    if (values[index].child && json_named(d->tree, index, "properties")) {
        value(d, index, depth);
        return;
    }
    bool first = true, typed = false;
    own(d, "{");
    for (uint32_t each = values[index].child; each; each = values[each].next, first = false) {
        key(d, values[each].key, values[each].key_length, first, depth + 1);
        if (is_key(values + each, "type"))
            string(d, "object", 6), typed = true;
        else
            value(d, each, depth + 1);
    }
    if (!typed) {
        named(d, "type", first, depth + 1);
        string(d, "object", 6);
    }
    named(d, "properties", false, depth + 1);
    own(d, "{}");
    line(d, depth);
    own(d, "}");
}

static void function(describer *d, uint32_t index, bool flat, int depth)
{
    const json_value *values = d->tree->values;
    bool first = true, described = false, stated = false;
    own(d, "{");
    for (uint32_t each = values[index].child; each; each = values[each].next) {
        if (flat && is_key(values + each, "type"))
            continue;
        key(d, values[each].key, values[each].key_length, first, depth + 1);
        first = false;
        if (is_key(values + each, "description")) {
            described = true;
            string(d, values[each].kind == JSON_STRING ? values[each].text : "", values[each].kind == JSON_STRING ? values[each].length : 0);
        } else if (is_key(values + each, "parameters")) {
            stated = true;
            parameters(d, each, depth + 1);
        } else {
            value(d, each, depth + 1);
        }
    }
    if (!described) {
        named(d, "description", first, depth + 1);
        string(d, "", 0);
    }
    if (!stated) {
        named(d, "parameters", false, depth + 1);
        parameters(d, 0, depth + 1);
    }
    line(d, depth);
    own(d, "}");
}

void tools_describe(const tool_template *t, const tool_list *tools, prompt_text *to)
{
    describer d = {t, tools->tree, to};
    for (uint32_t tool = tools->first; tool; tool = tools->tree->values[tool].next) {
        const uint32_t own_function = tool_function(tools->tree, tool);
        const bool whole = flag(&d, TOOLS_WHOLE);
        if (tool != tools->first)
            prompt_put(to, t->separator.bytes, t->separator.length, true);
        if (whole) {
            own(&d, "{");
            named(&d, "type", true, 1);
            string(&d, "function", 8);
            named(&d, "function", false, 1);
        }
        function(&d, own_function, own_function == tool, whole);
        if (whole) {
            line(&d, 0);
            own(&d, "}");
        }
    }
}
