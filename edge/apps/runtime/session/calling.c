/* edge_tools, edge_choose and edge_calls. */
#include <string.h>

#include "calling.h"
#include "calls.h"
#include "constraint.h"
#include "session.h"
#include "tool_prompt.h"
#include "tools.h"

/* Frees the form of answers that calls have. */
static void drop_form(edge_session *s)
{
    if (!s->tools || !s->tools->holds)
        return;
    constraint_free(s->constraint);
    s->constraint = NULL;
    s->tools->holds = false;
}

static edge_status check_form(const edge_session *s, edge_error *error)
{
    const bool other = s->constraint && !(s->tools && s->tools->holds);
    return other ? edge_fail(error, EDGE_BAD_ARGUMENT, "answers have the form of edge_constrain: set EDGE_FREE first") : EDGE_OK;
}

/* Gives calls their form. t: the session's tools, or those that will be: then nothing has changed if it fails.
 * required: an answer must call. */
static edge_status hold_form(edge_session *s, tools *t, bool required, edge_error *error)
{
    int32_t marks[MOST_TOOL_MARKS];
    const uint32_t count = t->template.config->marks;
    for (uint32_t i = 0; i < count; i++)
        marks[i] = t->template.marks[i].token;
    const call_choice chosen = {&t->template.form, &t->list, t->template.marks, count, t->only, required, !tools_one(t)};
    constraint *made = t->holds ? s->constraint : constraint_make(s->vocabulary, marks, count);
    if (!made)
        return edge_fail(error, EDGE_NO_MEMORY, "no memory for the tables of a grammar");
    edge_status status = constraint_calls(made, EDGE_TOOLS->grammar, &chosen, error);
    if (status && !t->holds)
        constraint_free(made);
    else if (status)
        drop_form(s);
    else if (!t->holds) {
        drop_form(s);
        s->constraint = made;
        t->holds = true;
    }
    return status;
}

static edge_status set_tools(edge_session *s, const char *text, size_t length, edge_error *error)
{
    tools *made = NULL;
    drop_tools_text(s);
    if (s->turn != TURN_NEW)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "tools are stated before the conversation begins: rewind all turns first");
    if (text && !length)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the list of tools is empty");
    edge_status status = text ? tool_template_check(s->model, EDGE_TOOLS != NULL, error) : EDGE_OK;
    if (text && !status)
        status = EDGE_TOOLS->make(s->model, text, length, &made, error);
    if (status)
        return status;
    const bool strict = made && made->strict;
    if (strict && ((status = check_form(s, error)) || (status = hold_form(s, made, false, error)))) {
        tools_free(made);
        return status;
    }
    if (!strict)
        drop_form(s);
    tools_free(s->tools);
    s->tools = made;
    return EDGE_OK;
}

edge_status edge_tools(edge_session *s, const char *tools_json, size_t length, edge_error *error)
{
    edge_status status = enter(s, error);
    return status ? status : leave(s, set_tools(s, tools_json, length, error));
}

static edge_status choose(edge_session *s, const char *choice, bool parallel, edge_error *error)
{
    tools *t = s->tools;
    if (!t)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "there are no tools: call edge_tools first");
    if (answers(s))
        return edge_fail(error, EDGE_BAD_ARGUMENT, "an answer is being written: read it to its end, or append a text");
    const bool none = choice && !strcmp(choice, "none"), any = !choice || !strcmp(choice, "auto") || none;
    const bool required = choice && !strcmp(choice, "required");
    const uint32_t only = any || required ? 0 : tool_named(&t->list, choice, strlen(choice));
    if (!any && !required && !only)
        return edge_fail(error, EDGE_BAD_ARGUMENT, "the choice must be auto, none, required, or the name of a tool, not %s", choice);
    const bool holds = !none && (!any || t->strict);
    edge_status status = holds ? check_form(s, error) : EDGE_OK;
    if (status)
        return status;
    t->only = only;
    t->parallel = parallel;
    if (!holds)
        drop_form(s);
    else if ((status = hold_form(s, t, !any, error)))
        t->only = 0;
    t->allowed = !none && !(status && t->strict); /* rather none than calls without their form */
    return status;
}

edge_status edge_choose(edge_session *s, const char *choice, uint32_t parallel, edge_error *error)
{
    edge_status status = enter(s, error);
    return status ? status : leave(s, choose(s, choice, parallel != 0, error));
}

int64_t edge_calls(edge_session *s, uint32_t index, edge_call *call, edge_error *error)
{
    edge_status status = enter_answer(s, error);
    if (status)
        return status;
    tools *t = s->tools;
    const uint32_t count = t ? calls_count(t->calls) : 0;
    if (call && call->size < sizeof *call)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "edge_calls needs an edge_call whose size is set"));
    if (call && index >= count)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "the answer has no call %d: it has %d", (int64_t)index, (int64_t)count));
    if (call) {
        tool_texts texts;
        tools_name(t, index, &texts);
        call->id = t->ids[index];
        call->name = t->names[index];
        call->arguments = calls_arguments(t->calls, calls_at(t->calls, index));
    }
    leave(s, EDGE_OK);
    return count;
}

