/* Shared by the files of JSON schemas: schema.c has alternatives and types, schema_scalars.c constants, numbers and strings,
 * schema_members.c arrays and objects, schema_base.c what they stand on.
 *
 * What holds for one value is a conjunction of schemas, since $ref, allOf, anyOf and the properties of several of them join.
 * Each conjunction becomes a rule, once. An alternative joins its conjunction in place of the anyOf that has it. */
#ifndef EDGE_SCHEMA_PARTS_H
#define EDGE_SCHEMA_PARTS_H

#include <string.h>

#include "json.h"
#include "numbers.h"
#include "regexp.h"
#include "rules.h"
#include "schema.h"

enum {
    MOST_JOINED = 24,      /* schemas of one conjunction */
    MOST_POOL = 1 << 15,   /* of all */
    MOST_MEMBERS = 512, LONGEST_NAME = 100, /* bytes */
    MOST_COMPARED = 1 << 16, /* pairs of schemas, for whether cases of oneOf exclude each other */
    BLANKS = 8             /* blanks between the parts of a JSON text, as edge/grammar/matcher.py */
};
enum { T_NULL = 1, T_BOOLEAN = 2, T_INTEGER = 4, T_FRACTION = 8, T_STRING = 16, T_ARRAY = 32, T_OBJECT = 64, T_ALL = 127 };

typedef struct { uint32_t value, seen; } joined; /* seen: SEEN_ANY, SEEN_ONE */
typedef struct { joined of[MOST_JOINED]; uint32_t count; } conjunction;
typedef struct { uint32_t hash, first, count, rule; } known;
typedef struct { const char *text; uint32_t length; bool required; } member;

struct schema {
    json_tree *tree;
    regex *regex;
    known *known;     /* [MOST_RULES] conjunctions that have a rule */
    joined *pool;     /* [MOST_POOL] of them */
    member *members;  /* [MOST_MEMBERS] of the object that is being written */
    uint32_t known_count, used, member_count, blank, compared; /* compared: cases of oneOf */
    uint32_t root, written; /* where references lead; conjunctions whose rule is written */
    bool compact;           /* the blanks of json.dumps alone, as calls of tools have them */
    rules *r;
};

static inline const json_value *at(const schema *in, uint32_t index)
{
    return in->tree->values + index;
}

static inline uint32_t mark(schema *in, char c, uint32_t next)
{
    return rules_char(in->r, (uint8_t)c, next);
}

static inline uint32_t blanks(schema *in, uint32_t next)
{
    return in->compact ? next : rules_repeat(in->r, in->blank, 0, BLANKS, next);
}

/* A comma or a colon, with the blanks behind it. */
static inline uint32_t separator(schema *in, char c, uint32_t next)
{
    return mark(in, c, in->compact ? mark(in, ' ', next) : blanks(in, next));
}

static inline bool is_true(const schema *in, uint32_t index, const char *key)
{
    return at(in, json_named(in->tree, index, key))->kind == JSON_TRUE;
}

/* Begins to read schemas within in->tree, as JSON with these blanks. */
void schema_begin(schema *in, rules *r, bool compact);
/* Returns the first node of the rules of a conjunction, whose references lead within `root`, before `next`. */
uint32_t schema_write(schema *in, const conjunction *of, uint32_t root, uint32_t next);
/* Adds the schemas that $ref and allOf name, before the ones that name them. Returns false if nothing matches. */
bool schema_complete(schema *in, conjunction *all);
/* The number of alternatives of the first anyOf or oneOf that is left, after schema_complete; 0: there is none. */
uint32_t schema_alternatives(schema *in, const conjunction *all);
void schema_choose(schema *in, const conjunction *all, uint32_t number, conjunction *with); /* with one of them */
/* schema_members.c: lists in->members. Returns whether others are forbidden because no schema speaks of them. */
bool schema_list_members(schema *in, const conjunction *of);
/* The schemas of a member by all objects' schemas. Returns false if there may be none. */
bool schema_property(schema *in, const conjunction *of, const member *name, bool closed, conjunction *found);

void schema_refuse(schema *in, const char *what);
void schema_malformed(schema *in, const char *what);
/* A whole number of a keyword; `unset` where the schema lacks it. */
uint32_t schema_number(schema *in, uint32_t index, const char *key, uint32_t unset);
/* The most of a keyword's whole numbers, and the least of another's: 0, WITHOUT_END where no schema has them. */
void schema_limits(schema *in, const conjunction *of, const char *low, const char *high, uint32_t *least, uint32_t *most);
/* Adds a schema to a conjunction, before number `place`. */
void schema_join(schema *in, conjunction *to, uint32_t index, uint32_t place);
uint32_t schema_rule(schema *in, const conjunction *of); /* the rule of a conjunction, which is written later */
static inline uint32_t value(schema *in, const conjunction *of, uint32_t next)
{
    return rules_call(in->r, schema_rule(in, of), next);
}

int schema_type_named(const json_value *name);           /* 0: there is none of this name */
int schema_types(schema *in, uint32_t index);            /* by its `type` */
/* The first of the values of `enum`, or the one of `const`; 0: the schema has neither. */
uint32_t schema_listed(schema *in, uint32_t index);
uint32_t schema_next(const schema *in, uint32_t item); /* the item behind it; 0 for the value of a keyword, which is alone */

/* schema_scalars.c */
uint32_t schema_name(schema *in, const char *text, uint32_t length, uint32_t next); /* a string in JSON */
uint32_t schema_constant(schema *in, uint32_t index, uint32_t next);                /* a value in JSON */
int schema_type_of(const schema *in, uint32_t value);
bool schema_has_constant(schema *in, uint32_t index, uint32_t wanted);
bool schema_fits(schema *in, uint32_t wanted, uint32_t index); /* whether a listed value matches the keywords beside it */
uint32_t schema_numbers(schema *in, const conjunction *of, bool integer, uint32_t next);
uint32_t schema_text(schema *in, const conjunction *of, uint32_t next);
/* schema_members.c */
uint32_t schema_array(schema *in, const conjunction *of, uint32_t next);
uint32_t schema_object(schema *in, const conjunction *of, uint32_t next);

#endif
