/* The end of an answer, and turns that are taken back. */
#include "budgets.h"
#include "context.h"
#include "given.h"
#include "session.h"
#include "system.h"
#include "tools.h"
#include "vocabulary.h"

/* Ends an answer, complete or not. */
void end_answer(edge_session *s)
{
    context_drop(s);
    s->seconds = now_seconds() - s->watch.started;
    s->joules = watch_joules(&s->watch);
    s->turn = TURN_ANSWERED;
    context_settle(s);
}

bool answers(const edge_session *s)
{
    return s->turn == TURN_ANSWERING || s->turn == TURN_PROMPT;
}

static edge_status rewind_turns(edge_session *s, uint32_t turns, edge_error *error);

/* Results that were cancelled with the answer to them: their calls wait for results again. */
static bool take_results_back(edge_session *s)
{
    if (!context_rewind(s, &s->results))
        return false;
    s->turn = TURN_ANSWERED;
    context_settle(s);
    return true;
}

/* Removes a question that was cancelled before its answer; of rows that cannot be taken back, only the tokens that wait. */
void take_back(edge_session *s)
{
    tools *t = s->tools;
    const bool back = t && t->given ? take_results_back(s) : !rewind_turns(s, 1, NULL);
    if (!back)
        s->first = s->waiting = 0;
    if (t) {
        t->given = 0;
        t->ran = back ? s->ran : t->ran; /* later tokens are gone: the conversation ends with the last calls */
    }
}

void abandon(edge_session *s)
{
    const bool unanswered = s->turn == TURN_PROMPT;
    if (answers(s))
        end_answer(s);
    if (unanswered)
        take_back(s);
}

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
    if (status)
        return status;
    status = rewind_turns(s, turns, error);
    if (turns && !status && s->tools)
        tools_start(s->tools, false);
    return leave(s, status);
}
