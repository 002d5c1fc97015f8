/* Texts of a conversation become tokens that wait, with the template's text around them. */
#include <string.h>

#include "bundle.h"
#include "calling.h"
#include "calls.h"
#include "chat.h"
#include "context.h"
#include "given.h"
#include "kv.h"
#include "policy.h"
#include "session.h"
#include "tokenizer.h"
#include "tool_prompt.h"
#include "tools.h"

static bool push_system(void *to, const int32_t *ids, size_t count)
{
    edge_session *s = ((appending *)to)->session;
    const int32_t bos = ((appending *)to)->bos;
    ((appending *)to)->bos = -1;
    if (bos >= 0 && (!count || ids[0] != bos) && !push_system(to, &bos, 1))
        return false;
    if (count > s->model->config->capacity - s->system_count)
        return false;
    memcpy(s->system + s->system_count, ids, count * sizeof *ids);
    s->system_count += (uint32_t)count;
    return true;
}

/* The part that the template writes in place of another where the conversation has tools; TOOL_PARTS: none. */
static enum tool_part with_tools(const edge_session *s, enum chat_part part)
{
    if (!s->tools || (part != CHAT_OPENING && part != CHAT_NEXT))
        return TOOL_PARTS;
    return part == CHAT_NEXT ? TOOL_NEXT : s->tools->given ? TOOL_ANSWER : TOOL_OPENING;
}

static bool push_part(edge_session *s, enum chat_part part, ids_out out)
{
    static const tool_texts none;
    const enum tool_part other = with_tools(s, part);
    uint32_t count;
    const int32_t *ids = chat_ids(s->model, part, &count);
    appending to = {s, -1};
    return other < TOOL_PARTS ? EDGE_TOOLS->write(s->tools, other, &none, s->tokenizer, out, &to) : !count || out(&to, ids, count);
}

static bool has_part(const edge_session *s, enum chat_part part)
{
    const enum tool_part other = with_tools(s, part);
    uint32_t count;
    return other < TOOL_PARTS ? tool_template_has(&s->tools->template, other) : chat_ids(s->model, part, &count) != NULL;
}

static bool count_ids(void *to, const int32_t *ids, size_t count)
{
    (void)ids;
    ((appending *)to)->session->reserved += (uint32_t)count;
    return true;
}

/* Keeps rows for the template's text before the answer. */
static void reserve_opening(edge_session *s)
{
    s->reserved = 0;
    push_part(s, CHAT_OPENING, count_ids);
}

static bool pictures_wait(const edge_session *s)
{
    return s->given && given_count(s->given) > s->shown;
}

static edge_status system_full(edge_session *s, edge_error *error)
{
    s->system_count = 0;
    return edge_fail(error, EDGE_FULL, "the system's text, with tools, has more tokens than the KV cache has rows (%d)",
                     (int64_t)s->model->config->capacity);
}

void begin_anew(edge_session *s)
{
    context_reset(s);
    s->system_count = 0;
    s->turn = TURN_NEW;
}

/* Begins a conversation with tools, as the template writes them before the first text of the user. */
static edge_status begin_with_tools(edge_session *s, const char *text, size_t count, edge_error *error)
{
    const tool_texts texts = {.system = {text, (uint32_t)count}};
    const enum tool_part part = count ? TOOL_SYSTEM : TOOL_FIRST;
    if (!tool_template_has(&s->tools->template, part))
        return edge_fail(error, EDGE_UNSUPPORTED, "the model's chat template takes no system prompt beside tools");
    appending to = {s, s->vocabulary->config->bos};
    begin_anew(s);
    if (!EDGE_TOOLS->write(s->tools, part, &texts, s->tokenizer, push_system, &to))
        return system_full(s, error);
    s->tools->alone = !count;
    s->turn = TURN_SYSTEM;
    return EDGE_OK;
}

void drop_tools_text(edge_session *s)
{
    if (s->turn != TURN_SYSTEM || !s->tools || !s->tools->alone || pictures_wait(s))
        return;
    begin_anew(s);
}

static edge_status append_system(edge_session *s, const char *text, size_t count, edge_error *error)
{
    if ((s->turn != TURN_NEW && s->turn != TURN_SYSTEM) || pictures_wait(s))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the system's text comes first: rewind all turns before it");
    if (!has_part(s, CHAT_SYSTEM))
        return edge_fail(error, EDGE_UNSUPPORTED, "the model's chat template takes no system prompt");
    if (s->tools)
        return begin_with_tools(s, text, count, error);
    appending to = {s, -1};
    begin_anew(s);
    bool fits = push_part(s, CHAT_SYSTEM, push_system) &&
                tokenizer_encode(s->tokenizer, text, count, false, chat_starts(s->model, CHAT_SYSTEM), push_system, &to) &&
                push_part(s, CHAT_AFTER_SYSTEM, push_system);
    if (!fits)
        return system_full(s, error);
    s->turn = TURN_SYSTEM;
    return EDGE_OK;
}

static edge_status append_ids(edge_session *s, const int32_t *ids, size_t count, edge_error *error)
{
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= s->model->config->vocab)
            return edge_fail(error, EDGE_BAD_ARGUMENT, "%d is not a token: the model has %d", (int64_t)ids[i],
                             (int64_t)s->model->config->vocab);
    context_push(s, ids, count);
    return EDGE_OK;
}

/* Pushes the system prompt's tokens that context_restart has not kept as rows. shown: without the template's text
 * between it and the first user's, whose place another has before pictures. */
static void push_system_rows(edge_session *s, bool shown)
{
    appending to = {s, -1};
    uint32_t behind = 0;
    if (shown)
        chat_ids(s->model, CHAT_AFTER_SYSTEM, &behind);
    const uint32_t before = kv_prefix(s->rows), rows = before + s->system_count - smaller(behind, s->system_count);
    if (kv_length(s->rows) > rows)
        context_truncate(s, kv_can_truncate(s->rows, rows) ? rows : 0);
    s->turn_rows = kv_length(s->rows);
    policy_pin(s->policy, rows, kv_capacity(s->rows));
    push_ids(&to, s->system + (s->turn_rows - before), rows - s->turn_rows);
    s->system_rows = rows;
}

/* Checks that a text of this role may come now, and appends the template's part before it. */
static edge_status before_text(edge_session *s, edge_role role, edge_error *error)
{
    const bool asked = s->turn == TURN_ASKED;
    if (role == EDGE_USER || role == EDGE_ASSISTANT) {
        if (!s->model->config->chat)
            return edge_fail(error, EDGE_UNSUPPORTED, "the model has no chat template: append EDGE_RAW");
        if (role == EDGE_ASSISTANT && !asked)
            return edge_fail(error, EDGE_BAD_ARGUMENT, "an earlier answer must follow a user's text");
        if (role == EDGE_USER && asked && s->tools && s->tools->given)
            return edge_fail(error, EDGE_BAD_ARGUMENT, "the results wait for their answer: call edge_next");
        if (role == EDGE_USER && s->turn == TURN_TEXT)
            return edge_fail(error, EDGE_BAD_ARGUMENT, "the text before this one waits for its answer: call edge_next");
        if (role == EDGE_USER && (s->turn == TURN_ANSWERED || asked) && !has_part(s, CHAT_NEXT))
            return edge_fail(error, EDGE_UNSUPPORTED,
                             "the model's chat template cannot continue a conversation: rewind all turns");
    } else if (s->turn == TURN_SYSTEM) {
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a system's text needs a chat: append EDGE_USER");
    }
    const bool shown = pictures_wait(s);
    if (shown && s->tools)
        return edge_fail(error, EDGE_UNSUPPORTED, "a picture beside tools: apps have one or the other");
    const uint32_t form = role == EDGE_RAW ? CHAT_PARTS : s->turn == TURN_SYSTEM ? CHAT_AFTER_SYSTEM
        : s->turn == TURN_ANSWERED || asked ? CHAT_NEXT : CHAT_FIRST;
    if (shown && role != EDGE_USER && role != EDGE_RAW)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a picture waits for a text of the user: append that first");
    if (shown && !EDGE_EYES->takes(s, form))
        return edge_fail(error, EDGE_UNSUPPORTED, "the model's chat template takes no picture here: append EDGE_RAW");
    if (role == EDGE_ASSISTANT || (role == EDGE_USER && asked)) /* a question without an answer has an empty one */
        push_part(s, CHAT_PAST, push_ids);
    if (role == EDGE_USER) {
        if (s->turn == TURN_SYSTEM)
            push_system_rows(s, shown);
        if (shown)
            EDGE_EYES->say(s, form, s->turn == TURN_NEW ? s->vocabulary->config->bos : -1);
        else if (s->turn != TURN_SYSTEM)
            push_part(s, form, push_ids);
        reserve_opening(s);
    } else if (asked && role != EDGE_ASSISTANT) { /* the beginning of the answer */
        push_part(s, CHAT_OPENING, push_ids);
    }
    if (shown && role == EDGE_RAW)
        EDGE_EYES->say(s, form, s->turn == TURN_NEW ? s->vocabulary->config->bos : -1);
    return EDGE_OK;
}

/* Whether the text begins a turn: the prompt is empty, or ends with the template's own text. shown: pictures come first. */
static bool starts_text(const edge_session *s, edge_role role, bool shown)
{
    if (shown)
        return false;
    if (role == EDGE_RAW)
        return s->turn == TURN_NEW;
    if (role != EDGE_USER || s->turn == TURN_SYSTEM)
        return role == EDGE_USER && !s->tools && chat_starts(s->model, CHAT_AFTER_SYSTEM);
    return !s->tools && chat_starts(s->model, s->turn == TURN_NEW ? CHAT_FIRST : CHAT_NEXT);
}

static edge_status no_room(const edge_session *s, uint32_t rows, edge_error *error)
{
    return edge_fail(error, EDGE_FULL, "the text does not fit into the %d KV rows that are free, and the policy %s evicts none: "
                     "rewind, or export with more rows", (int64_t)(kv_capacity(s->rows) - rows), s->model->policy);
}

/* The result of the next call of the last answer, a part of its turn. */
static edge_status append_result(edge_session *s, const char *text, size_t count, edge_error *error)
{
    tools *t = s->tools;
    const uint32_t waiting = s->waiting, at = kv_length(s->rows);
    const uint64_t ran = s->ran;
    const bool first = t && !t->given;
    tool_texts texts = {.result = {text, (uint32_t)count}};
    appending to = {s, -1};
    if (!t || t->given == calls_count(t->calls) || s->turn != (first ? TURN_ANSWERED : TURN_ASKED)
        || (first && (t->turns != s->turns || t->ran != ran)))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "no call waits for a result");
    if (!tool_template_has(&t->template, first ? TOOL_RESULT : TOOL_MORE))
        return edge_fail(error, EDGE_UNSUPPORTED, "the model's chat template takes no results%s", first ? "" : " of further calls");
    tools_name(t, t->given, &texts);
    if (first) {
        s->results = context_mark(s);
        s->turn_ran = s->ran;
    }
    s->full = false;
    t->given++;
    reserve_opening(s);
    bool fits = EDGE_TOOLS->write(t, first ? TOOL_RESULT : TOOL_MORE, &texts, s->tokenizer, push_ids, &to) && !s->full;
    s->reserved = 0;
    if (!fits && !s->stopped && s->ran == ran) { /* undo it */
        s->waiting = waiting;
        t->given--;
        return no_room(s, at, error);
    }
    s->turn = TURN_ASKED;
    return EDGE_OK;
}

static edge_status append(edge_session *s, edge_role role, const void *text, size_t count, edge_error *error)
{
    bool opens = s->turn == TURN_NEW || s->turn == TURN_SYSTEM || s->turn == TURN_ANSWERED ||
                 (s->turn == TURN_ASKED && role == EDGE_USER);
    turn_mark mark = context_mark(s);
    if (opens) {
        s->turn_rows = mark.rows;
        s->turn_ran = s->ran;
    }
    const uint32_t waiting = s->waiting, at = kv_length(s->rows), before = s->shown;
    const bool shown = pictures_wait(s); /* until before_text has said them */
    uint64_t ran = s->ran;
    s->full = false;
    edge_status status = before_text(s, role, error);
    if (status)
        return status;
    appending to = {s, role == EDGE_RAW && s->turn == TURN_NEW && !shown ? s->vocabulary->config->bos : -1};
    if (role == EDGE_IDS)
        status = append_ids(s, text, count, error);
    else
        tokenizer_encode(s->tokenizer, text, count, role == EDGE_RAW, starts_text(s, role, shown), push_ids, &to);
    if (!status && !s->full && to.bos >= 0)
        push_ids(&to, NULL, 0);
    s->reserved = 0;
    if (!status && s->full)
        status = no_room(s, at, error);
    if (status && s->ran == ran) { /* undo the whole call */
        s->waiting = waiting;
        s->shown = before;
        return status;
    }
    if (s->given)
        s->shown = given_count(s->given);
    if (opens)
        s->marks[s->turns++ % MOST_MARKS] = mark;
    s->turn = role == EDGE_USER ? TURN_ASKED : role == EDGE_ASSISTANT ? TURN_ANSWERED : TURN_TEXT;
    return status;
}

edge_status edge_append(edge_session *s, edge_role role, const void *text, size_t count, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status)
        return status;
    if ((status = check_generates(s, error)))
        return leave(s, status);
    if (role < EDGE_SYSTEM || role > EDGE_RESULT)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "%d is not an edge_role", (int64_t)role));
    if ((count && !text) || (!count && role != EDGE_SYSTEM && role != EDGE_ASSISTANT && role != EDGE_RESULT))
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "the text is empty"));
    if ((status = check_length(count, role == EDGE_IDS ? sizeof(int32_t) : 1, error)))
        return leave(s, status);
    abandon(s);
    if (!s->started)
        __atomic_store_n(&s->cancelled, 0, __ATOMIC_RELAXED);
    text = text ? text : "";
    if (role == EDGE_USER && s->tools && s->turn == TURN_NEW && (status = begin_with_tools(s, "", 0, error)))
        return leave(s, status);
    if (role == EDGE_RAW || role == EDGE_IDS)
        drop_tools_text(s);
    status = role == EDGE_SYSTEM ? append_system(s, text, count, error)
           : role == EDGE_RESULT ? append_result(s, text, count, error) : append(s, role, text, count, error);
    return leave(s, status);
}

void push_opening(edge_session *s)
{
    push_part(s, CHAT_OPENING, push_ids);
}

edge_status begin_medium(edge_session *s, const edge_source *file, const char *call, const char *encoder, const char *medium,
                         edge_error *error)
{
    if (!file || file->size < sizeof *file || (file->path ? !*file->path : file->fd < 0))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "%s needs the place of %s: an edge_source with its size, and a path or an open file",
                         call, encoder);
    if (s->accelerator)
        return edge_fail(error, EDGE_UNSUPPORTED, "%s takes no %ss: begin the session with engine cpu", s->accelerator->kind->called,
                         medium);
    abandon(s);
    if (s->turn == TURN_ASKED)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "a %s comes before the text about it: call edge_next first", medium);
    if (!s->started)
        __atomic_store_n(&s->cancelled, 0, __ATOMIC_RELAXED);
    return EDGE_OK;
}
