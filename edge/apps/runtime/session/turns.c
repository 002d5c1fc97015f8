/* Answers come piece by piece, by the loop of edge/run/decoding/loop.py. */
#include <math.h>
#include <string.h>

#include "calling.h"
#include "calls.h"
#include "constraint.h"
#include "context.h"
#include "kv.h"
#include "model.h"
#include "policy.h"
#include "sampler.h"
#include "session.h"
#include "stops.h"
#include "system.h"
#include "tools.h"
#include "utf8.h"
#include "vocabulary.h"

static bool breaks(const void *in, int32_t token)
{
    size_t length;
    const uint8_t *piece = vocabulary_piece(in, token, &length);
    for (size_t i = 0; i < length; i++)
        if (memchr(DRY_BREAKERS, piece[i], sizeof DRY_BREAKERS - 1))
            return true;
    return false;
}

static void start_sampler(edge_session *s)
{
    const edge_config *model = s->model->config;
    const edge_options *own = &s->options;
#define CHOSEN(type, name) .name = own->name < 0 ? model->name : (type)own->name,
#define GIVEN(type, name) .name = (type)own->name,
#define USUAL(type, name, usual) .name = own->name < 0 ? (type)(usual) : (type)own->name,
    sampling params = {SAMPLING_OPTIONS(CHOSEN, GIVEN, USUAL) .seed = own->seeded ? own->seed : random_seed()};
#undef CHOSEN
#undef GIVEN
#undef USUAL
    const vocabulary *in = s->vocabulary;
    sampler_read(s->sampler, breaks, in);
    sampler_start(s->sampler, &params, in->banned, in->config->banned, in->ends, own->ignore_eos ? in->config->ends : 0);
}

static void start_prompt(edge_session *s)
{
    const bool asked = s->turn == TURN_ASKED;
    s->full = s->stuck = false;
    if (asked)
        push_opening(s);
    if (s->tools) {
        s->tools->asked = asked;
        s->tools->reads = false; /* the calls of the last answer stay until this one begins: the prompt may be taken back */
    }
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
    if (s->tools && s->finish != EDGE_INTERRUPTED)
        tools_start(s->tools, s->tools->asked);
    stops_start(s->stops);
    if (has_form(s))
        constraint_start(s->constraint);
    start_sampler(s);
}

static bool reads_calls(const edge_session *s)
{
    return s->tools && s->tools->reads;
}

/* Whether text between calls is still to be shown. */
static bool text_waits(const edge_session *s)
{
    return reads_calls(s) && calls_waits(s->tools->calls);
}

/* Appends text between calls, up to the free room. */
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
        EDGE_TOOLS->feed(s->tools->calls, s->fed, length);
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
    EDGE_TOOLS->finish(t->calls, !natural);
    const bool whole = calls_whole(t->calls) && (!has_form(s) || constraint_whole(s->constraint));
    if (calls_count(t->calls) && (natural || (s->finish == EDGE_LENGTH && whole)))
        s->finish = EDGE_TOOL_CALLS;
    t->turns = s->turns;
    t->ran = s->ran;
    if (!s->text_end && s->finish != EDGE_STOP) { /* the last token's text is shown first */
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

/* Draws a token that the form of the answer allows. *ended: the form ends with it. -1: options ban all allowed tokens. */
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
                  : has_form(s) ? draw_within(s, &ended) : sampler_next(s->sampler, s->logits);
    s->failed = s->stuck || (token < 0 && !ended);
    if (s->failed)
        return;
    const edge_finish natural = has_form(s) && constraint_closed(s->constraint) ? EDGE_LENGTH : EDGE_EOS;
    if (token < 0 || vocabulary_ends(s->vocabulary, token)) {
        s->finish = natural;
        return;
    }
    s->token = token;
    s->generated++;
    s->first = 0;
    s->waiting = 1;
    s->ids[0] = token;
    show(s, token, &met);
    const bool enough = reads_calls(s) && tools_one(s->tools) && calls_count(s->tools->calls);
    s->finish = met ? EDGE_STOP : enough || ended ? natural
              : s->generated == s->options.max_tokens ? EDGE_LENGTH : EDGE_GOING;
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
    piece->finish = length == left && !text_waits(s) ? s->finish : EDGE_GOING;
    piece->done = s->done;
    piece->asked = s->done + (s->turn == TURN_PROMPT ? s->waiting : 0);
    s->token = -1;
    s->text_at += length;
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
        const bool more = going && text_waits(s);
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
        if (s->finish && reads_calls(s) && !calls_ended(s->tools->calls))
            end_calls(s);
        if (s->finish == EDGE_STOP && reads_calls(s))
            calls_drop(s->tools->calls); /* the text behind the stop string */
        if (s->finish && s->finish != EDGE_STOP && !text_waits(s)) /* text that was held back; incomplete characters are lost */
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
