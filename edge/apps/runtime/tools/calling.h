/* The code for tools of bundles whose chat template has them; others go without. trusted.c of a bundle sets EDGE_TOOLS. */
#ifndef EDGE_CALLING_H
#define EDGE_CALLING_H

#include "call_rules.h"
#include "tools.h"

typedef struct {
    /* Reads tools, in the form of OpenAI's protocol. */
    edge_status (*make)(const edge_model *model, const char *text, size_t length, tools **made, edge_error *error);
    /* Writes a part of the chat template, in which `tools` come. Returns false if `out` does, or the text is too long. */
    bool (*write)(tools *t, enum tool_part part, const tool_texts *texts, tokenizer *by, ids_out out, void *to);
    call_grammar *grammar;
    void (*feed)(calls *c, const char *text, size_t length);
    void (*finish)(calls *c, bool cut);
} tools_kind;
extern const tools_kind *const EDGE_TOOLS, edge_json_calls, edge_calls_of_fields; /* by the form of calls */

#endif
