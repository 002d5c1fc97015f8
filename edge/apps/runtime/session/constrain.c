/* edge_constrain: the form of answers. */
#include "constraint.h"
#include "session.h"

edge_status edge_constrain(edge_session *s, edge_form form, const char *text, size_t length, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status)
        return status;
    if (form < EDGE_FREE || form > EDGE_REGEX)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "%d is not an edge_form", (int64_t)form));
    if (answers(s))
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "an answer is being written: read it to its end, or append a text"));
    if (s->tools && s->tools->holds)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT,
                                  "calls have a form: choose auto first, or none if tools are strict, with edge_choose"));
    if (form == EDGE_FREE) {
        constraint_free(s->constraint);
        s->constraint = NULL;
        return leave(s, EDGE_OK);
    }
    if (!text || !length)
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "the grammar is empty"));
    if ((status = check_length(length, 1, error)))
        return leave(s, status);
    if (!s->constraint && !(s->constraint = constraint_make(s->vocabulary, NULL, 0)))
        return leave(s, edge_fail(error, EDGE_NO_MEMORY, "no memory for the tables of a grammar"));
    return leave(s, constraint_set(s->constraint, form, text, length, error));
}
