/* A deterministic automaton over rules, made while it is used, as lazy regular-expression engines make theirs.
 *
 * A state is a set of threads; a thread is a RULE_BYTES node and a frame. A frame is what follows the end of its rule: the node
 * that called it, how often that was repeated, and the frame of that node. Frames and states exist once, so that equal ones have
 * equal numbers. When their tables are full, all but what the answer's state needs is forgotten. */
#ifndef EDGE_AUTOMATON_H
#define EDGE_AUTOMATON_H

#include "rules.h"

enum {
    FRAME_ROOM = 1 << 14, MOST_STATES = 1 << 13, MOST_THREADS = 1 << 16, MOST_STEPS = 1 << 16,
    MOST_AT_ONCE = 2048, /* threads of one state */
    DEAD = 0             /* the state without threads, from which nothing matches */
};

typedef struct { uint32_t node, frame; } thread; /* node: rules.text marks that a character of a JSON string may begin */
typedef struct { uint32_t node, count, parent; } frame;
typedef struct { uint32_t first, count; bool accepts; } state; /* accepts: the answer may end here */

typedef struct automaton automaton;
automaton *automaton_layout(arena *from);
/* Returns the state before the first byte of rule `start`; DEAD beyond the limits above. The rules are finished. */
uint32_t automaton_begin(automaton *a, const rules *r, uint32_t start);
const rules *automaton_rules(const automaton *a);
/* Returns the state behind a byte. DEAD, and *full: the tables are full, call automaton_forget. */
uint32_t automaton_step(automaton *a, uint32_t from, uint8_t byte, bool *full);
/* Forgets all other states; returns the new number of this one. */
uint32_t automaton_forget(automaton *a, uint32_t kept);
const thread *automaton_threads(const automaton *a, uint32_t of, uint32_t *count);
bool automaton_accepts(const automaton *a, uint32_t of);
/* The fewest bytes to the end of the answer, and the first of them. */
uint32_t automaton_shortest(const automaton *a, uint32_t of, uint8_t *first);
bool automaton_crowded(const automaton *a); /* whether half of a table is used */
/* How many characters of a JSON string may follow in this state; 0: it is within none. */
uint32_t automaton_text_left(const automaton *a, uint32_t of);

#endif
