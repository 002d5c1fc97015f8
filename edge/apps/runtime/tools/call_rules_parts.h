/* Shared by the files of call grammars: call_rules.c has answers, call_parts.c
 * texts and marks, call_fields.c arguments that are no JSON. Rules are
 * written from their end: `next` is what follows. */
#ifndef EDGE_CALL_RULES_PARTS_H
#define EDGE_CALL_RULES_PARTS_H

#include "call_rules.h"
#include "schema_parts.h"

enum { MOST_FIELDS = 96, MOST_REFERENCES = 128, MOST_CALLS_AT_ONCE = 8, /* of an object; of all tools; as edge/tools/lark.py */
       MOST_OBJECTS = 32 }; /* in each other, where their grammar is written in line */

/* Writes a call with its name and arguments in a form other than JSON. */
typedef struct call_writer call_writer;
typedef uint32_t field_writer(call_writer *w, span name, const conjunction *of, uint32_t next);

struct call_writer {
    const call_choice *choice;
    field_writer *fields;
    schema *in;
    rules *r;
    uint32_t root;        /* the schema of the function's arguments, where references lead */
    uint32_t any;         /* a character */
    struct { uint32_t target, rule; } known[MOST_REFERENCES]; /* references whose rule is begun */
    uint32_t known_count;
    uint32_t depth;       /* objects around the current value */
};

uint32_t call_word(call_writer *w, const char *word, uint32_t next); /* which ends with \0 */
uint32_t call_put(call_writer *w, span text, uint32_t next);         /* this text */
uint32_t call_text(call_writer *w, uint32_t next);                   /* any text */
uint32_t call_mark_rule(call_writer *w, span mark, uint32_t next);   /* its token, or its text */
bool call_has_mark(const call_writer *w, span mark);                 /* whether it is a token */
/* Any text up to the first mark, then `next`. ends: the text may also end without a mark. */
uint32_t call_until(call_writer *w, span mark, bool ends, uint32_t next);
uint32_t call_json(call_writer *w, const conjunction *of, uint32_t next);
uint32_t call_rules_by(field_writer *fields, schema *in, rules *r, const call_choice *choice);

#endif
