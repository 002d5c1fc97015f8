/* Parts of prompts with tools as tokens. As in edge/model/model.py, texts of tools, names and identifiers are encoded
 * together with the template's text around them, unless a control token would appear in them; a system's text and
 * results on their own. */
#include <string.h>

#include "tokenizer.h"
#include "tool_prompt.h"
#include "vocabulary.h"

static bool take_texts(const char **at, uint64_t *left, const char **text, uint64_t length)
{
    if (length > *left)
        return false;
    *text = *at;
    *at += length;
    *left -= length;
    return true;
}

static bool find(const edge_model *model, tool_template *t)
{
    const char *at = (const char *)model->sections[SECTION_TOOLS];
    uint64_t left = model->sizes[SECTION_TOOLS], items = 0, size;
    const tools_config *config = (const tools_config *)(const void *)at;
    memset(t, 0, sizeof *t);
    if (left < sizeof *config || config->body > CALL_HEADER || config->marks > MOST_TOOL_MARKS || config->indent > 8)
        return false;
    for (int part = 0; part < TOOL_PARTS; part++)
        items += config->items[part];
    size = sizeof *config + config->marks * sizeof(tool_mark) + items * sizeof(tool_item);
    if (items > 1 << 10 || size > left)
        return false;
    const tool_mark *marks = (const tool_mark *)(const void *)(config + 1);
    const tool_item *item = (const tool_item *)(const void *)(marks + config->marks);
    at += size;
    left -= size;
    t->config = config;
    t->form = (call_form){.body = config->body, .bare = config->flags & TOOLS_BARE, .joined = config->flags & TOOLS_JOINED};
    span *texts[TOOL_TEXTS] = {&t->form.opening, &t->form.closing, &t->form.also, &t->form.quote, &t->form.arguments, &t->form.between,
                               &t->separator};
    for (int i = 0; i < TOOL_TEXTS; i++) {
        texts[i]->length = config->texts[i];
        if (config->texts[i] > (i == TOOL_TEXTS - 1 ? 1024 : 63) || !take_texts(&at, &left, &texts[i]->bytes, config->texts[i]))
            return false;
    }
    for (uint32_t i = 0; i < config->marks; i++) {
        t->marks[i] = (call_mark){marks[i].token, {NULL, marks[i].length}};
        if (marks[i].token < 0 || (uint32_t)marks[i].token >= model->config->vocab || marks[i].length > 63
            || !take_texts(&at, &left, &t->marks[i].text.bytes, marks[i].length))
            return false;
    }
    for (int part = 0; part < TOOL_PARTS; part++) {
        t->items[part] = item;
        t->texts[part] = at;
        for (uint32_t i = 0; i < config->items[part]; i++, item++) {
            const char *text;
            if (item->kind > TOOL_ITEM_ID || item->written > WRITTEN_REPR || !take_texts(&at, &left, &text, item->length))
                return false;
        }
    }
    return !left;
}

edge_status tool_template_check(const edge_model *model, bool linked, edge_error *error)
{
    if (!model->config->chat)
        return edge_fail(error, EDGE_UNSUPPORTED, "the model has no chat template, by which tools are stated");
    if (!linked || !model->sizes[SECTION_TOOLS])
        return edge_fail(error, EDGE_UNSUPPORTED, "the model's chat template writes tools in a notation of its own, which apps lack");
    return EDGE_OK;
}

edge_status tool_template_find(const edge_model *model, tool_template *found, edge_error *error)
{
    return find(model, found) ? EDGE_OK : edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its tools): export it again");
}

bool tool_template_has(const tool_template *t, enum tool_part part)
{
    return t->config->items[part] != 0;
}

/* Whether all control tokens of a text lie within the template's own. */
static bool is_plain(const prompt_text *room, const vocabulary *in)
{
    for (size_t at = 0, length; at < room->used; at += length) {
        const special_token *found = vocabulary_special(in, (const uint8_t *)room->bytes + at, room->used - at, true);
        length = 1;
        if (!found || !(found->flags & (IS_CONTROL | ONLY_SPECIAL)))
            continue;
        length = found->length;
        for (size_t i = at; i < at + length; i++)
            if (!room->trusted[i])
                return false;
    }
    return true;
}

/* Encodes the text written so far. */
static bool flush(prompt_text *room, bool *starts, tokenizer *by, ids_out out, void *to)
{
    const bool plain = is_plain(room, tokenizer_vocabulary(by));
    for (size_t at = 0, end; at < room->used; at = end, *starts = false) {
        for (end = plain ? room->used : at + 1; end < room->used && room->trusted[end] == room->trusted[at];)
            end++;
        if (!tokenizer_encode(by, room->bytes + at, end - at, plain || room->trusted[at], *starts, out, to))
            return false;
    }
    room->used = 0;
    return true;
}

static bool is_blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

bool tool_part_write(const tool_template *t, enum tool_part part, const tool_list *tools, const tool_texts *texts, bool starts,
                     prompt_text *room, tokenizer *by, ids_out out, void *to)
{
    const char *text = t->texts[part];
    room->used = 0;
    room->full = false;
    for (const tool_item *item = t->items[part]; item < t->items[part] + t->config->items[part]; text += item++->length) {
        span given = item->kind == TOOL_ITEM_SYSTEM ? texts->system : item->kind == TOOL_ITEM_RESULT ? texts->result
                   : item->kind == TOOL_ITEM_NAME ? texts->name : texts->id;
        if (item->kind == TOOL_ITEM_TEXT) {
            prompt_put(room, text, item->length, true);
        } else if (item->kind == TOOL_ITEM_TOOLS) {
            tools_describe(t, tools, room);
        } else if (item->kind == TOOL_ITEM_NAME || item->kind == TOOL_ITEM_ID) {
            prompt_put(room, given.bytes, given.length, false);
        } else {
            span core = given;
            while (core.length && is_blank(core.bytes[core.length - 1]))
                core.length--;
            while (core.length && is_blank(*core.bytes))
                core.bytes++, core.length--;
            given = item->trims ? core : given;
            if (!core.length) { /* blanks alone are the template's own */
                write_escaped(room, item->written, given.bytes, given.length, true);
                prompt_put(room, text, item->length, true);
                continue;
            }
            if (room->full || !flush(room, &starts, by, out, to))
                return false;
            write_escaped(room, item->written, given.bytes, given.length, false);
            prompt_put(room, text, item->length, false);
            if (room->full || !tokenizer_encode(by, room->bytes, room->used, false, starts, out, to))
                return false;
            starts = false;
            room->used = 0;
        }
    }
    return !room->full && flush(room, &starts, by, out, to);
}
