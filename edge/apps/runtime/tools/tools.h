/* Tools of a session, as edge_tools states them, and the calls of the last answer. */
#ifndef EDGE_TOOLS_H
#define EDGE_TOOLS_H

#include "calls.h"
#include "tool_prompt.h"

enum { LONGEST_TOOL_NAME = 128, LONGEST_CALL_ID = 10 }; /* bytes; with \0, since Mistral's templates want nine letters or digits */

typedef struct tools {
    uint64_t size;         /* of this memory of its own */
    tool_template template;
    json_tree *tree;
    tool_list list;
    calls *calls;          /* of the last answer */
    prompt_text *room;
    uint32_t only;         /* the function that answers must call; 0: any */
    bool allowed, parallel;
    bool strict, holds;    /* whether calls have their form wherever they are allowed; whether the session's form is that of calls */
    bool alone;            /* the system's part of the prompt has the tools, and no text of the app */
    bool asked;            /* whether the prompt that runs is a chat's */
    bool reads;            /* whether this answer may call */
    uint32_t given;        /* results that were appended */
    uint32_t before;       /* calls of earlier answers, which count in identifiers */
    uint32_t turns;        /* of the conversation when the answer ended, with the tokens that had run: results come then */
    uint64_t ran;
    char names[MOST_CALLS][LONGEST_TOOL_NAME + 1], ids[MOST_CALLS][LONGEST_CALL_ID];
} tools;

void tools_free(tools *t); /* t: may be NULL */
/* Name and identifier of a call of the last answer. */
void tools_name(tools *t, uint32_t index, tool_texts *found);
void tools_start(tools *t, bool reads); /* begins an answer, and forgets the calls of the last one and their results */
const span *tools_mark(const tools *t, int32_t token); /* the text of a special token that is a mark; NULL: it is none */
static inline bool tools_one(const tools *t) /* whether answers make one call at most */
{
    return !t->parallel || t->only || t->template.config->flags & TOOLS_SINGLE;
}

#endif
