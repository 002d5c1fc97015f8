/* JSON schemas as rules. */
#ifndef EDGE_SCHEMA_H
#define EDGE_SCHEMA_H

#include "json.h"
#include "regexp.h"
#include "rules.h"

typedef struct schema schema;
schema *schema_layout(arena *from);
/* Returns the first node of the rules that match the schema's JSON texts; fails in r. `text` must stay until then. */
uint32_t schema_rules(schema *in, rules *r, const char *text, size_t length);

#endif
