/* Turns: texts become tokens that wait, answers come piece by piece, and turns are taken back. The loop of an answer is
 * that of edge/run/loop.py. */
#include <math.h>
#include <string.h>

#include "budgets.h"
#include "bundle.h"
#include "calls.h"
#include "chat.h"
#include "constraint.h"
#include "context.h"
#include "given.h"
#include "kv.h"
#include "model.h"
#include "policy.h"
#include "sampler.h"
#include "session.h"
#include "stops.h"
#include "system.h"
#include "tokenizer.h"
#include "tool_prompt.h"
#include "tools.h"
#include "utf8.h"
#include "vocabulary.h"

/* ---- text to tokens that wait ----------------------------------------------------------------------------------- */

typedef struct { edge_session *session; int32_t bos; } appending; /* bos: token that must begin the prompt; -1: none */

static bool push_ids(void *to, const int32_t *ids, size_t count)
{
    appending *own = to;
    int32_t bos = own->bos;
    own->bos = -1;
    if (bos >= 0 && (!count || ids[0] != bos) && !context_push(own->session, &bos, 1))
        return false;
    return context_push(own->session, ids, count);
}

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
    return other < TOOL_PARTS ? tools_write(s->tools, other, &none, s->tokenizer, out, &to) : out(&to, ids, count);
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

/* Begins a conversation with tools, as the template writes them before the first text of the user. */
static edge_status begin_with_tools(edge_session *s, const char *text, size_t count, edge_error *error)
{
    const tool_texts texts = {.system = {text, (uint32_t)count}};
    const enum tool_part part = count ? TOOL_SYSTEM : TOOL_FIRST;
    if (!tool_template_has(&s->tools->template, part))
        return edge_fail(error, EDGE_UNSUPPORTED, "the model's chat template takes no system prompt beside tools");
    appending to = {s, s->vocabulary->config->bos};
    context_reset(s);
    s->system_count = 0;
    s->turn = TURN_NEW;
    if (!tools_write(s->tools, part, &texts, s->tokenizer, push_system, &to))
        return system_full(s, error);
    s->turn = TURN_SYSTEM;
    return EDGE_OK;
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
    context_reset(s);
    s->system_count = 0;
    s->turn = TURN_NEW;
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

/* Pushes the system prompt's tokens that context_restart has not kept as rows. shown: without the template's text between it and
 * the first user's, whose place another has before pictures. */
static void push_system_rows(edge_session *s, bool shown)
{
    appending to = {s, -1};
    uint32_t behind = 0;
    if (shown)
        chat_ids(s->model, CHAT_AFTER_SYSTEM, &behind);
    const uint32_t count = s->system_count - behind;
    if (kv_length(s->rows) > count && kv_can_truncate(s->rows, count))
        kv_truncate(s->rows, count);
    else if (kv_length(s->rows) > count)
        kv_clear(s->rows);
    s->turn_rows = kv_length(s->rows);
    policy_pin(s->policy, count, kv_capacity(s->rows));
    push_ids(&to, s->system + s->turn_rows, count - s->turn_rows);
    s->system_rows = count;
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

/* Whether the text begins one: nothing stands before it, or what the template ends with. shown: pictures do. */
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
    s->turn_ran = first ? s->ran : s->turn_ran;
    s->full = false;
    t->given++;
    reserve_opening(s);
    bool fits = tools_write(t, first ? TOOL_RESULT : TOOL_MORE, &texts, s->tokenizer, push_ids, &to) && !s->full;
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

/* Ends an answer, for whatever reason. */
void end_answer(edge_session *s)
{
    context_drop(s);
    s->seconds = now_seconds() - s->watch.started;
    s->joules = watch_joules(&s->watch);
    s->turn = TURN_ANSWERED;
    context_settle(s);
}

/* Refuses what only models that generate can do. */
static edge_status check_generates(const edge_session *s, edge_error *error)
{
    if (s->ears)
        return edge_fail(error, EDGE_UNSUPPORTED, "the model hears, and answers no prompts: call edge_listen and edge_hear");
    if (!s->model->config->encoder)
        return EDGE_OK;
    return edge_fail(error, EDGE_UNSUPPORTED, "the model is an encoder, which answers no prompts: call edge_embed");
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
    status = role == EDGE_SYSTEM ? append_system(s, text, count, error)
           : role == EDGE_RESULT ? append_result(s, text, count, error) : append(s, role, text, count, error);
    return leave(s, status);
}

/* ---- the answer ------------------------------------------------------------------------------------------------- */

static void start_sampler(edge_session *s)
{
    const edge_config *model = s->model->config;
    const edge_options *own = &s->options;
#define CHOSEN(type, name) .name = own->name < 0 ? model->name : (type)own->name,
#define GIVEN(type, name) .name = (type)own->name,
    sampling params = {SAMPLING_OPTIONS(CHOSEN, GIVEN) .seed = own->seeded ? own->seed : random_seed()};
#undef CHOSEN
#undef GIVEN
    const vocabulary *in = s->vocabulary;
    sampler_start(s->sampler, &params, in->banned, in->config->banned, in->ends, own->ignore_eos ? in->config->ends : 0);
}

static void start_prompt(edge_session *s)
{
    const bool asked = s->turn == TURN_ASKED;
    s->full = s->stuck = false;
    if (asked)
        push_part(s, CHAT_OPENING, push_ids);
    if (s->tools)
        tools_start(s->tools, asked);
    if (s->full || !s->waiting) /* rows were returned to the system meanwhile; or the text has no token */
        s->stopped = s->full ? EDGE_MEMORY : EDGE_CAPACITY;
    s->turn = TURN_PROMPT;
    s->joiner = (utf8_joiner){{0}, 0};
}

/* Runs a chunk of the prompt; behind the last one the answer begins. */
static void run_prompt(edge_session *s)
{
    if (s->turn != TURN_PROMPT)
        start_prompt(s);
    s->finish = context_prompt(s);
    s->done = (uint32_t)(s->ran - s->turn_ran);
    if (s->waiting && !s->finish)
        return;
    s->turn = TURN_ANSWERING;
    stops_start(s->stops);
    if (constraint_holds(s->constraint))
        constraint_start(s->constraint);
    start_sampler(s);
}

static bool reads_calls(const edge_session *s)
{
    return s->tools && s->tools->reads;
}

/* Appends text between calls, as much as there is room for. */
static void show_between(edge_session *s, bool *met)
{
    size_t length = calls_text(s->tools->calls, s->fed, sizeof s->fed);
    s->text_end = (uint32_t)stops_feed(s->stops, s->fed, length, s->text, met);
}

/* Appends the text of a token. */
static void show(edge_session *s, int32_t token, bool *met)
{
    size_t length;
    const char *bytes = (const char *)vocabulary_piece(s->vocabulary, token, &length);
    const span *mark = reads_calls(s) ? tools_mark(s->tools, token) : NULL;
    if (mark)
        bytes = mark->bytes, length = mark->length;
    length = utf8_feed(&s->joiner, bytes, length, s->fed);
    if (reads_calls(s)) {
        calls_feed(s->tools->calls, s->fed, length);
        show_between(s, met);
    } else {
        s->text_end = (uint32_t)stops_feed(s->stops, s->fed, length, s->text, met);
    }
}

/* Reads the end of an answer that may have calls: an answer with calls ends with these. */
static void end_calls(edge_session *s)
{
    tools *t = s->tools;
    const bool natural = s->finish == EDGE_EOS;
    t->ended = true;
    calls_finish(t->calls, !natural);
    if (natural && calls_count(t->calls))
        s->finish = EDGE_TOOL_CALLS;
    t->turns = s->turns;
    t->ran = s->ran;
    if (!s->text_end) { /* the last token's text is shown first */
        bool met = false;
        show_between(s, &met);
        s->finish = met ? EDGE_STOP : s->finish;
    }
}

/* Tokens that the answer may still have. */
static uint32_t tokens_left(const edge_session *s)
{
    uint32_t left = s->options.max_tokens ? s->options.max_tokens - s->generated : UINT32_MAX;
    return policy_evicts(s->policy) ? left : smaller(left, kv_free(s->rows));
}

/* Draws a token that the form of the answer allows. *ended: nothing can follow it; -1: nor it, since options ban what could. */
static int32_t draw_within(edge_session *s, bool *ended)
{
    const bool complete = constraint_mask(s->constraint, s->logits, &s->stuck);
    bool allowed = false;
    sampler_ban(s->sampler, s->logits);
    for (uint32_t i = 0; i < s->vocabulary->config->tokens && !allowed; i++)
        allowed = s->logits[i] != -INFINITY;
    *ended = complete && !allowed;
    s->stuck |= !complete && !allowed;
    int32_t token = allowed && !s->stuck ? sampler_next(s->sampler, s->logits) : -1;
    if (token >= 0) {
        token = constraint_take(s->constraint, token, tokens_left(s), ended);
        s->stuck = token < 0;
    }
    return token;
}

/* Chooses the next token: from the logits, or the one that an accelerator chose. */
static void choose(edge_session *s)
{
    bool met = false, ended = false;
    int32_t token = s->picked ? s->draft[1 + s->drafted - s->ahead]
                  : constraint_holds(s->constraint) ? draw_within(s, &ended) : sampler_next(s->sampler, s->logits);
    s->failed = s->stuck || (token < 0 && !ended);
    if (s->failed)
        return;
    if (token < 0 || vocabulary_ends(s->vocabulary, token)) {
        s->finish = EDGE_EOS;
        return;
    }
    s->token = token;
    s->generated++;
    s->first = 0;
    s->waiting = 1;
    s->ids[0] = token;
    show(s, token, &met);
    const bool enough = reads_calls(s) && tools_one(s->tools) && calls_count(s->tools->calls);
    s->finish = met ? EDGE_STOP : enough || (ended && !constraint_closed(s->constraint)) ? EDGE_EOS
              : ended || s->generated == s->options.max_tokens ? EDGE_LENGTH : EDGE_GOING;
}

/* Fills a piece with whole characters, as many as fit. */
static void fill(edge_session *s, edge_piece *piece)
{
    uint32_t left = s->text_end - s->text_at, length = left;
    if (length > sizeof piece->text) {
        length = sizeof piece->text;
        while (length && ((uint8_t)s->text[s->text_at + length] & 0xC0) == 0x80)
            length--;
    }
    memcpy(piece->text, s->text + s->text_at, length);
    piece->length = length;
    piece->token = s->token;
    piece->finish = length == left && !(reads_calls(s) && calls_waits(s->tools->calls)) ? s->finish : EDGE_GOING;
    piece->done = s->done;
    piece->asked = s->done + (s->turn == TURN_PROMPT ? s->waiting : 0);
    s->token = -1;
    s->text_at += length;
}

static edge_status rewind_turns(edge_session *s, uint32_t turns, edge_error *error);

/* Forgets a question that was cancelled before its answer began, or where rows cannot be taken back, what has not run of it. */
static void take_back(edge_session *s)
{
    if (rewind_turns(s, 1, NULL))
        s->first = s->waiting = 0;
    __atomic_store_n(&s->cancelled, 0, __ATOMIC_RELAXED); /* an earlier question may wait, and can be answered */
}

bool answers(const edge_session *s)
{
    return s->turn == TURN_ANSWERING || s->turn == TURN_PROMPT;
}

void abandon(edge_session *s)
{
    const bool unanswered = s->turn == TURN_PROMPT;
    if (answers(s))
        end_answer(s);
    if (unanswered)
        take_back(s);
}

static edge_status next_piece(edge_session *s, edge_piece *piece, edge_error *error)
{
    edge_status status;
    bool going = s->turn == TURN_ANSWERING;
    if (!going && s->turn != TURN_ASKED && s->turn != TURN_TEXT && s->turn != TURN_PROMPT)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "there is nothing to answer: call edge_append first");
    if (!going && s->tools && s->tools->given && s->tools->given < calls_count(s->tools->calls))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "%d of %d calls have their result: append the others'", (int64_t)s->tools->given,
                         (int64_t)calls_count(s->tools->calls));
    if (!going || s->text_at == s->text_end) {
        const bool more = going && reads_calls(s) && calls_waits(s->tools->calls);
        bool met = false;
        s->text_at = s->text_end = 0;
        s->token = -1;
        if (more)
            show_between(s, &met);
        else if (going)
            s->finish = context_step(s);
        else
            run_prompt(s);
        if (!s->finish && !more && s->turn == TURN_ANSWERING)
            choose(s);
        s->finish = met ? EDGE_STOP : s->finish;
        if (s->failed) {
            end_answer(s);
            if ((status = model_is_whole(s->model, error)) || (status = check_threads(s, error))
                || (status = check_accelerator(s, error)))
                return status;
            if (s->stuck)
                return edge_fail(error, EDGE_UNSUPPORTED, "no token matches the answer's grammar here, or it is too ambiguous");
            return edge_fail(error, EDGE_FAILED, "the model computed no number (NaN): its file may be damaged");
        }
        if (s->finish && reads_calls(s) && !s->tools->ended)
            end_calls(s);
        if (s->finish && s->finish != EDGE_STOP && !(reads_calls(s) && calls_waits(s->tools->calls))) /* text that was held back; an incomplete character is lost */
            s->text_end += (uint32_t)stops_rest(s->stops, s->text + s->text_end);
    }
    fill(s, piece);
    if (piece->finish) {
        context_drop(s);
        context_pay(s);
        bool unanswered = piece->finish == EDGE_INTERRUPTED && !s->generated;
        end_answer(s);
        if (unanswered)
            take_back(s);
    }
    return EDGE_OK;
}

edge_status edge_next(edge_session *s, edge_piece *piece, edge_error *error)
{
    edge_status status = enter_answer(s, error);
    if (status)
        return status;
    if ((status = check_generates(s, error)))
        return leave(s, status);
    if (!piece || piece->size < sizeof *piece)
        status = edge_fail(error, EDGE_BAD_ARGUMENT, "edge_next needs an edge_piece whose size is set");
    else
        status = next_piece(s, piece, error);
    return leave(s, status);
}

void edge_cancel(edge_session *s)
{
    if (s)
        __atomic_store_n(&s->cancelled, 1, __ATOMIC_RELAXED);
}

/* ---- turns taken back ------------------------------------------------------------------------------------------- */

static edge_status rewind_turns(edge_session *s, uint32_t turns, edge_error *error)
{
    if (!turns)
        abandon(s);
    else if (answers(s))
        end_answer(s);
    if (s->given)
        given_drop(s->given, s->shown); /* those that wait for a text */
    if (!turns)
        return EDGE_OK;
    if (turns >= s->turns) {
        if (turns == UINT32_MAX)
            s->system_count = 0;
        context_restart(s);
        s->turn = s->system_count ? TURN_SYSTEM : TURN_NEW;
        return EDGE_OK;
    }
    const turn_mark *mark = &s->marks[(s->turns - turns) % MOST_MARKS];
    if (turns > MOST_MARKS || !context_rewind(s, mark))
        return edge_fail(error, EDGE_UNSUPPORTED, "the KV rows of these turns cannot be taken back: rewind all, and append "
                         "the conversation again");
    if (s->given) {
        given_drop(s->given, mark->pictures);
        s->shown = given_count(s->given);
    }
    s->turns -= turns;
    s->turn = mark->asked ? TURN_ASKED : TURN_ANSWERED;
    context_settle(s);
    return EDGE_OK;
}

edge_status edge_rewind(edge_session *s, uint32_t turns, edge_error *error)
{
    edge_status status = enter(s, error);
    return status ? status : leave(s, rewind_turns(s, turns, error));
}
