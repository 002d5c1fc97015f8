/* What the chat template writes of tools and results, by section TOOLS, which edge/apps/sections/tools_file.py makes: a
 * tools_config, tool_mark[marks], tool_item[…] of all parts in their order, then without gaps the texts of the config,
 * of the marks, and of the items. */
#ifndef EDGE_TOOL_PROMPT_H
#define EDGE_TOOL_PROMPT_H

#include "call_rules.h"
#include "model.h"
#include "tokenizer.h"

enum { MOST_PROMPT = 1 << 20, MOST_TOOL_MARKS = MOST_MARK_TOKENS }; /* bytes of tools in a prompt */

typedef struct {
    const tools_config *config;
    call_form form;
    span separator;                  /* between tools */
    call_mark marks[MOST_TOOL_MARKS];
    const tool_item *items[TOOL_PARTS];
    const char *texts[TOOL_PARTS];   /* of the items of each part */
} tool_template;

/* Fails if apps cannot write tools as the model's template does. linked: whether the library has the code for tools. */
edge_status tool_template_check(const edge_model *model, bool linked, edge_error *error);
/* Reads section TOOLS. */
edge_status tool_template_find(const edge_model *model, tool_template *found, edge_error *error);
bool tool_template_has(const tool_template *t, enum tool_part part);

typedef struct { char *bytes; uint8_t *trusted; size_t used; bool full; } prompt_text; /* [MOST_PROMPT]; trusted: the template's own */
prompt_text *prompt_text_layout(arena *from);
void prompt_put(prompt_text *to, const char *text, size_t length, bool trusted);
/* Writes tools as the template writes them. */
void tools_describe(const tool_template *t, const tool_list *tools, prompt_text *to);
/* Writes text as within JSON or Python. */
void write_escaped(prompt_text *to, enum written_as written, const char *text, size_t length, bool trusted);

typedef struct { span system, result, name, id; } tool_texts;
/* Passes the tokens of a part to `out`. starts: it opens a prompt. Returns false if `out` does, or the text is too long. */
bool tool_part_write(const tool_template *t, enum tool_part part, const tool_list *tools, const tool_texts *texts, bool starts,
                     prompt_text *room, tokenizer *by, ids_out out, void *to);

#endif
