/* Grammars of calls: a port of edge/tools/lark.py. */
#ifndef EDGE_CALL_RULES_H
#define EDGE_CALL_RULES_H

#include "calls.h"
#include "rules.h"
#include "schema.h"

typedef struct { int32_t token; span text; } call_mark; /* a mark that is a special token */
typedef struct {
    const call_form *form;
    const tool_list *tools;
    const call_mark *marks;
    uint32_t mark_count;
    uint32_t only;        /* the function that must be called; 0: any */
    bool required, parallel;
} call_choice;

/* Returns the first node of the rules of an answer that calls tools, or may; fails in r. in: tables for schemas. */
typedef uint32_t call_grammar(schema *in, rules *r, const call_choice *choice);
uint32_t call_rules(schema *in, rules *r, const call_choice *choice);
uint32_t call_rules_of_fields(schema *in, rules *r, const call_choice *choice); /* for arguments that are no JSON */

#endif
