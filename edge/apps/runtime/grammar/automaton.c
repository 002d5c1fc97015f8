/* States of a grammar, made while an answer is written. */
#include <string.h>

#include "automaton.h"
#include "rules.h"

typedef struct { uint32_t key, to; } step; /* key: state << 8 | byte; 0: free, since DEAD has no steps */

struct automaton {
    const rules *r;
    frame *frames;       /* [FRAME_ROOM]; frame 0 is the end of the answer */
    state *states;       /* [MOST_STATES] */
    thread *threads;     /* [MOST_THREADS]: of all states */
    step *steps;         /* [2 * MOST_STEPS]: hash table */
    uint32_t *frame_slots, *state_slots; /* [2 * FRAME_ROOM], [2 * MOST_STATES]: hash tables */
    uint32_t frame_count, state_count, thread_count, step_count;
    /* While a state is made: */
    thread *work, *found; /* [MOST_AT_ONCE] nodes that are still to be followed; threads */
    thread *seen;        /* [4 * MOST_AT_ONCE]: hash table of nodes that were followed */
    uint32_t *marks;     /* [4 * MOST_AT_ONCE]: `round` where `seen` is of this state */
    uint32_t work_count, found_count, seen_count, round;
    bool accepts, full;
};

automaton *automaton_layout(arena *from)
{
    automaton *a = take(from, sizeof *a);
    frame *frames = take(from, FRAME_ROOM * sizeof *frames);
    state *states = take(from, MOST_STATES * sizeof *states);
    thread *threads = take(from, MOST_THREADS * sizeof *threads);
    step *steps = take(from, 2 * MOST_STEPS * sizeof *steps);
    uint32_t *frame_slots = take(from, 2 * FRAME_ROOM * sizeof *frame_slots),
             *state_slots = take(from, 2 * MOST_STATES * sizeof *state_slots);
    thread *work = take(from, MOST_AT_ONCE * sizeof *work), *found = take(from, MOST_AT_ONCE * sizeof *found),
           *seen = take(from, 4 * MOST_AT_ONCE * sizeof *seen);
    uint32_t *marks = take(from, 4 * MOST_AT_ONCE * sizeof *marks);
    if (a) {
        memset(a, 0, sizeof *a);
        a->frames = frames, a->states = states, a->threads = threads, a->steps = steps;
        a->frame_slots = frame_slots, a->state_slots = state_slots;
        a->work = work, a->found = found, a->seen = seen, a->marks = marks;
    }
    return a;
}

static uint32_t mixed(uint32_t hash, uint32_t value)
{
    hash = (hash ^ value) * 2654435761u;
    return hash ^ hash >> 15;
}

static uint32_t frame_of(automaton *a, uint32_t node, uint32_t count, uint32_t parent)
{
    for (uint32_t hash = mixed(mixed(mixed(0, node), count), parent);; hash++) {
        uint32_t *slot = a->frame_slots + hash % (2 * FRAME_ROOM);
        const frame *known = a->frames + *slot;
        if (*slot && known->node == node && known->count == count && known->parent == parent)
            return *slot;
        if (*slot)
            continue;
        if (a->frame_count == FRAME_ROOM) {
            a->full = true;
            return 0;
        }
        a->frames[a->frame_count] = (frame){node, count, parent};
        return *slot = a->frame_count++;
    }
}

/* ---- a state ---------------------------------------------------------------------------------------------------- */

/* Queues a node, unless it was queued before or no text can end behind it. */
static void follow(automaton *a, uint32_t node, uint32_t within)
{
    if (a->r->shortest[node] == UNREACHABLE || a->full)
        return;
    for (uint32_t hash = mixed(mixed(1, node), within);; hash++) {
        uint32_t at = hash % (4 * MOST_AT_ONCE);
        if (a->marks[at] != a->round) {
            if (a->work_count == MOST_AT_ONCE || a->seen_count == 2 * MOST_AT_ONCE) {
                a->full = true;
                return;
            }
            a->marks[at] = a->round;
            a->seen[at] = (thread){node, within};
            a->seen_count++;
            a->work[a->work_count++] = (thread){node, within};
            return;
        }
        if (a->seen[at].node == node && a->seen[at].frame == within)
            return;
    }
}

static void find(automaton *a, uint32_t node, uint32_t within)
{
    if (a->found_count == MOST_AT_ONCE)
        a->full = true;
    else
        a->found[a->found_count++] = (thread){node, within};
}

/* A repetition, counted in the frame: its body once more, or the node behind it. */
static void again(automaton *a, uint32_t within)
{
    const rule_node *n = a->r->nodes + a->frames[within].node;
    if (a->full)
        return;
    if (a->frames[within].count < n->most)
        follow(a, n->other, within);
    if (a->frames[within].count >= n->least)
        follow(a, n->next, a->frames[within].parent);
}

static void follow_all(automaton *a)
{
    while (a->work_count && !a->full) {
        const thread it = a->work[--a->work_count];
        const rule_node *n = a->r->nodes + it.node;
        const frame *f = a->frames + it.frame;
        switch (n->kind) {
        case RULE_BYTES:
            find(a, it.node, it.frame);
            break;
        case RULE_EITHER:
            if (it.node == a->r->text)
                find(a, it.node, it.frame);
            follow(a, n->next, it.frame);
            follow(a, n->other, it.frame);
            break;
        case RULE_CALL: /* nothing is to be remembered of a call that ends a rule */
            follow(a, a->r->starts[n->other], n->next == END ? it.frame : frame_of(a, it.node, 0, it.frame));
            break;
        case RULE_REPEAT:
            again(a, frame_of(a, it.node, 0, it.frame));
            break;
        case RULE_END:
            if (!it.frame) {
                a->accepts = true;
            } else if (a->r->nodes[f->node].kind == RULE_CALL) {
                follow(a, a->r->nodes[f->node].next, f->parent);
            } else { /* counts beyond those that matter are one */
                const rule_node *repeated = a->r->nodes + f->node;
                bool enough = repeated->most == WITHOUT_END && f->count >= repeated->least;
                again(a, frame_of(a, f->node, f->count + !enough, f->parent));
            }
        }
    }
}

/* The state of the threads that were found. */
static uint32_t state_of(automaton *a)
{
    thread *found = a->found;
    uint32_t hash = a->accepts, bytes = a->found_count * (uint32_t)sizeof *found;
    if (!a->found_count && !a->accepts)
        return DEAD;
    for (uint32_t gap = a->found_count / 2; gap; gap /= 2) /* Shell's sort: equal sets are equal lists */
        for (uint32_t i = gap; i < a->found_count; i++) {
            thread it = found[i];
            uint32_t j = i;
            for (; j >= gap && (found[j - gap].node > it.node || (found[j - gap].node == it.node && found[j - gap].frame > it.frame)); j -= gap)
                found[j] = found[j - gap];
            found[j] = it;
        }
    for (uint32_t i = 0; i < a->found_count; i++)
        hash = mixed(mixed(hash, found[i].node), found[i].frame);
    for (;; hash++) {
        uint32_t *slot = a->state_slots + hash % (2 * MOST_STATES);
        const state *known = a->states + *slot;
        if (*slot && known->count == a->found_count && known->accepts == a->accepts
            && !memcmp(a->threads + known->first, found, bytes))
            return *slot;
        if (*slot)
            continue;
        if (a->state_count == MOST_STATES || a->found_count > MOST_THREADS - a->thread_count) {
            a->full = true;
            return DEAD;
        }
        memcpy(a->threads + a->thread_count, found, bytes);
        a->states[a->state_count] = (state){a->thread_count, a->found_count, a->accepts};
        a->thread_count += a->found_count;
        return *slot = a->state_count++;
    }
}

static void start_state(automaton *a)
{
    a->work_count = a->found_count = a->seen_count = 0;
    a->accepts = a->full = false;
    if (!++a->round) {
        memset(a->marks, 0, 4 * MOST_AT_ONCE * sizeof *a->marks);
        a->round = 1;
    }
}

static void clear(automaton *a)
{
    memset(a->frame_slots, 0, 2 * FRAME_ROOM * sizeof *a->frame_slots);
    memset(a->state_slots, 0, 2 * MOST_STATES * sizeof *a->state_slots);
    memset(a->steps, 0, 2 * MOST_STEPS * sizeof *a->steps);
    a->frame_count = a->state_count = 1;
    a->thread_count = a->step_count = 0;
}

uint32_t automaton_begin(automaton *a, const rules *r, uint32_t start)
{
    a->r = r;
    clear(a);
    start_state(a);
    follow(a, start, 0);
    follow_all(a);
    return a->full ? DEAD : state_of(a);
}

const rules *automaton_rules(const automaton *a)
{
    return a->r;
}

uint32_t automaton_step(automaton *a, uint32_t from, uint8_t byte, bool *full)
{
    const uint32_t key = from << 8 | byte;
    step *slot;
    for (uint32_t hash = mixed(0, key);; hash++) {
        slot = a->steps + hash % (2 * MOST_STEPS);
        if (slot->key == key)
            return slot->to;
        if (!slot->key)
            break;
    }
    const state *at = a->states + from;
    start_state(a);
    for (uint32_t i = 0; i < at->count; i++) {
        const thread *it = a->threads + at->first + i;
        const rule_node *n = a->r->nodes + it->node;
        if (n->kind == RULE_BYTES && byte >= n->low && byte <= n->high)
            follow(a, n->next, it->frame);
    }
    follow_all(a);
    uint32_t to = a->full ? DEAD : state_of(a);
    if (a->full || a->step_count == MOST_STEPS) {
        *full = true;
        return DEAD;
    }
    *slot = (step){key, to};
    a->step_count++;
    return to;
}

uint32_t automaton_forget(automaton *a, uint32_t kept)
{
    const state it = a->states[kept];
    uint32_t *number = a->frame_slots, count = 1; /* new numbers of frames; they are cleared below */
    memset(number, 0, FRAME_ROOM * sizeof *number);
    for (uint32_t i = 0; i < it.count; i++)
        for (uint32_t f = a->threads[it.first + i].frame; f && !number[f]; f = a->frames[f].parent)
            number[f] = 1;
    for (uint32_t f = 1; f < a->frame_count; f++) /* parents come before their frames */
        if (number[f]) {
            const frame *old = a->frames + f;
            a->frames[count] = (frame){old->node, old->count, number[old->parent]};
            number[f] = count++;
        }
    start_state(a);
    for (uint32_t i = 0; i < it.count; i++) {
        const thread *old = a->threads + it.first + i;
        a->found[a->found_count++] = (thread){old->node, number[old->frame]};
    }
    clear(a);
    for (uint32_t f = 1; f < count; f++) /* at the places where they are */
        frame_of(a, a->frames[f].node, a->frames[f].count, a->frames[f].parent);
    a->accepts = it.accepts;
    return state_of(a);
}

/* ---- queries of a state ----------------------------------------------------------------------------------------- */

const thread *automaton_threads(const automaton *a, uint32_t of, uint32_t *count)
{
    *count = a->states[of].count;
    return a->threads + a->states[of].first;
}

bool automaton_accepts(const automaton *a, uint32_t of)
{
    return of != DEAD && a->states[of].accepts;
}

/* The fewest bytes from the end of a frame's rule to the end of the answer. */
static uint64_t rest_of(const automaton *a, uint32_t within)
{
    uint64_t bytes = 0;
    for (; within; within = a->frames[within].parent) {
        const uint32_t node = a->frames[within].node, done = a->frames[within].count + 1;
        const rule_node *n = a->r->nodes + node;
        bytes += a->r->shortest[n->next];
        if (n->kind == RULE_REPEAT && done < n->least)
            bytes += (uint64_t)(n->least - done) * a->r->shortest[n->other];
    }
    return bytes;
}

uint32_t automaton_shortest(const automaton *a, uint32_t of, uint8_t *first)
{
    const state *at = a->states + of;
    uint64_t least = at->accepts ? 0 : UNREACHABLE;
    for (uint32_t i = 0; i < at->count && least; i++) {
        const thread *it = a->threads + at->first + i;
        uint64_t bytes = a->r->shortest[it->node] + rest_of(a, it->frame);
        if (bytes < least && a->r->nodes[it->node].kind == RULE_BYTES) {
            least = bytes;
            *first = a->r->nodes[it->node].low;
        }
    }
    return (uint32_t)least;
}

bool automaton_crowded(const automaton *a)
{
    return a->step_count > MOST_STEPS / 2 || a->state_count > MOST_STATES / 2 || a->frame_count > FRAME_ROOM / 2
        || a->thread_count > MOST_THREADS / 2;
}

uint32_t automaton_text_left(const automaton *a, uint32_t of)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < a->states[of].count; i++) {
        const thread *it = a->threads + a->states[of].first + i;
        const frame *f = a->frames + it->frame;
        if (it->node != a->r->text)
            continue;
        const rule_node *n = a->r->nodes + f->node;
        uint32_t here = it->frame && n->kind == RULE_REPEAT && n->other == a->r->text
                      ? n->most == WITHOUT_END ? WITHOUT_END : n->most - f->count : 1;
        left = here > left ? here : left;
    }
    return left;
}
