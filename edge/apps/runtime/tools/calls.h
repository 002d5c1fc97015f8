/* Calls of tools in generated text: a port of edge/tools/parser.py. The text from a mark on is kept, and read again with each
 * piece until it is certain what it is; so calls come whole, and text is passed on as soon as it can be no call. */
#ifndef EDGE_CALLS_H
#define EDGE_CALLS_H

#include "base.h"
#include "json.h"

enum call_body { CALL_JSON, CALL_TAGS, CALL_BRACES, CALL_PYTHON, CALL_NAMED, CALL_HEADER }; /* `Body` of edge/tools/formats.py */
enum { DEEPEST_REFERENCES = 8, MOST_CALLS = 64, MOST_HELD = 1 << 16, MOST_ARGUMENTS = 1 << 17 }; /* of an answer; bytes */

typedef struct { const char *bytes; uint32_t length; } span;
typedef struct { /* as `ToolFormat` */
    enum call_body body;
    bool bare, joined;
    span opening, closing, also, quote, arguments, between;
} call_form;

typedef struct { const json_tree *tree; uint32_t first; } tool_list; /* first: of its tools; 0: there are none */
/* The function of a tool, or of the one with this name; 0: there is none. */
uint32_t tool_function(const json_tree *tree, uint32_t tool);
bool tag_has_text(const json_tree *tree, uint32_t shape); /* whether a value in tags is its text as it stands */
uint32_t tool_named(const tool_list *tools, const char *name, size_t length);

typedef struct { uint32_t function, start; } found_call; /* start: of its arguments, which end with \0 */

typedef struct calls calls;
calls *calls_layout(arena *from);
void calls_begin(calls *c, const call_form *form, const tool_list *tools); /* begins an answer */
void calls_feed(calls *c, const char *text, size_t length);
/* Ends the answer. cut: something else ended it than its writer, so that a mark without its call's name is no text. */
void calls_finish(calls *c, bool cut);
size_t calls_text(calls *c, char *out, size_t most); /* takes whole characters of the answer's text; returns their bytes */
void calls_drop(calls *c);                           /* forgets that text */
bool calls_waits(const calls *c);                    /* whether calls_text has some */
bool calls_ended(const calls *c);                    /* whether calls_finish has ended the answer */
uint32_t calls_count(const calls *c);                /* complete calls; those that were cut are none */
const found_call *calls_at(const calls *c, uint32_t index);
const char *calls_arguments(const calls *c, const found_call *call); /* a JSON object, which ends with \0 */
bool calls_whole(const calls *c);                    /* whether the answer ended with calls that lack at most their closing */
bool calls_cut(const calls *c);                      /* whether a call had begun and was not complete */

#endif
