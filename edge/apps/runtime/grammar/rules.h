/* The rules of a grammar over bytes: a graph of nodes, built from its end to its beginning.
 *
 *     RULE_BYTES    a byte from `low` to `high`, then `next`
 *     RULE_EITHER   `next` or `other`
 *     RULE_CALL     the rule number `other`, then `next`
 *     RULE_REPEAT   the nodes from `other` to their RULE_END, `least` to `most` times, then `next`
 *     RULE_END      the end of a rule, of what is repeated, or of the answer
 *     RULE_NEVER    nothing matches
 *
 * Nodes do not change and equal ones are one, so that alternatives with the same end share it. Rules may call themselves. */
#ifndef EDGE_RULES_H
#define EDGE_RULES_H

#include "base.h"

enum rule_kind { RULE_NEVER, RULE_END, RULE_BYTES, RULE_EITHER, RULE_CALL, RULE_REPEAT };
enum {
    MOST_NODES = 1 << 16,
    MOST_RULES = 1 << 13,
    NEVER = 0, END = 1       /* these two nodes exist once */
};
static const uint32_t WITHOUT_END = UINT32_MAX; /* `most` of an unbounded repetition */
static const uint32_t UNREACHABLE = 1u << 30;   /* `shortest` of nodes that never come to their end */

typedef struct { uint8_t kind, low, high; uint32_t next, other, least, most; } rule_node;
typedef struct { uint32_t low, high; } point_range; /* code points, both included */

typedef struct {
    rule_node *nodes;     /* [MOST_NODES] */
    uint32_t *shortest;   /* [MOST_NODES]: the fewest bytes from a node to its END, after rules_finish */
    uint32_t *slots;      /* [2 * MOST_NODES]: hash table of nodes */
    uint32_t *starts;     /* [MOST_RULES]: first nodes of rules */
    uint32_t count, rules;
    uint32_t text, text_end; /* nodes of one character of a JSON string: `text` is the first, others are below text_end */
    edge_status status;   /* the first failure; functions return NEVER after it */
    edge_error *error;
} rules;

/* A special token that rules name, by the bytes MARK_BYTE and its number, least first; no text has that byte. */
typedef struct { int32_t token; uint8_t bytes[4]; } mark_token;
enum { MOST_MARK_TOKENS = 16, MARK_BYTE = 0xFF };
static inline mark_token mark_of(int32_t token)
{
    return (mark_token){token, {MARK_BYTE, (uint8_t)token, (uint8_t)(token >> 8), (uint8_t)(token >> 16)}};
}

rules *rules_layout(arena *from);
void rules_begin(rules *r, edge_error *error);
uint32_t rules_byte(rules *r, uint8_t low, uint8_t high, uint32_t next);
uint32_t rules_char(rules *r, uint8_t c, uint32_t next);
uint32_t rules_bytes(rules *r, const char *bytes, size_t count, uint32_t next);
uint32_t rules_word(rules *r, const char *word, uint32_t next); /* which ends with \0 */
uint32_t rules_either(rules *r, uint32_t one, uint32_t other);
uint32_t rules_repeat(rules *r, uint32_t body, uint32_t least, uint32_t most, uint32_t next);
uint32_t rules_new(rules *r); /* returns the number of a rule, to be called before or after rules_set */
void rules_set(rules *r, uint32_t rule, uint32_t start);
uint32_t rules_call(rules *r, uint32_t rule, uint32_t next);
/* One character of these ranges, ascending, in UTF-8. */
uint32_t rules_points(rules *r, const point_range *ranges, uint32_t count, uint32_t next);
/* A character of ASCII in a JSON string: itself, or its escape. */
uint32_t rules_json(rules *r, uint8_t c, uint32_t next);
static inline bool json_escapes(uint32_t c)
{
    return c < 0x20 || c == '"' || c == '\\' || c == 0x7F;
}
/* Finds `shortest`; fails if nothing matches from `start` on. */
void rules_finish(rules *r, uint32_t start);
/* format: with %s twice, for `what` and for a piece of the grammar, which is cut to 60 bytes. */
void rules_fail(rules *r, edge_status code, const char *format, const char *what, const char *text, size_t length);

#endif
