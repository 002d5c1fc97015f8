/* A session: the state of one conversation, and the calls by which the functions of edge.h enter and leave it. */
#ifndef EDGE_SESSION_H
#define EDGE_SESSION_H

#include "accelerator.h"
#include "base.h"
#include "budgets.h"
#include "constraint.h"
#include "drafter.h"
#include "drafts.h"
#include "ears.h"
#include "given.h"
#include "kv.h"
#include "model.h"
#include "pass.h"
#include "policy.h"
#include "sampler.h"
#include "stops.h"
#include "tokenizer.h"
#include "tools.h"
#include "utf8.h"
#include "vocabulary.h"

enum {
    MOST_MARKS = 64,                                   /* turns that edge_rewind can take back */
    MOST_LEFT = 4,                                     /* waiting tokens that a mark holds */
    LONGEST_TEXT = 3 * LONGEST_PIECE + 12,             /* bytes of a token, with an incomplete character before it */
    TEXT_ROOM = LONGEST_TEXT + 2 * LONGEST_STOP        /* with text that may become a stop string */
};

enum turn {
    TURN_NEW,       /* no text yet */
    TURN_SYSTEM,    /* only a system prompt */
    TURN_ASKED,     /* a user text waits for its answer; the template's opening of the answer is still to come */
    TURN_TEXT,      /* text without the template waits for its answer */
    TURN_ANSWERING,
    TURN_ANSWERED,
    TURN_PROMPT      /* the prompt of an answer runs, chunk by chunk */
};

/* The conversation at the beginning of a turn: its rows, the tokens that waited, its pictures, and whether a question
 * waited. */
typedef struct { uint64_t evicted; uint32_t rows, count; int32_t left[MOST_LEFT]; uint32_t pictures, asked; } turn_mark;

typedef struct { uint8_t hash[32]; double scale; } adapter_name;

struct edge_session {
    edge_model *model;
    void *memory;
    uint64_t size;
    volatile int32_t busy, cancelled, trim; /* trim: the requested level plus 1; 0: none */
    volatile int32_t noting;  /* 1: a thread reads or writes `noted` */
    edge_usage noted;         /* the answer of edge_use while another thread computes; without bytes of the process */
    int64_t process; /* the process that began it and has its threads */

    tokenizer *tokenizer;
    const vocabulary *vocabulary; /* the tokenizer's */
    sampler *sampler;
    constraint *constraint; /* NULL: answers are free; memory of its own */
    tools *tools;           /* NULL: none; memory of its own */
    turn_mark results;      /* the conversation before the first result of its calls */
    stops *stops, *next_stops; /* of this answer; of the next one if new_stops is set */
    bool new_stops;
    utf8_joiner joiner;

    /* The conversation: see context.c. */
    kv *rows;
    policy *policy;
    pass *pass;
    accelerator *accelerator; /* NULL: the CPU computes */
    given *given;             /* pictures; NULL: the bundle has no eyes */
    struct encoder *encoder;  /* NULL: none is open */
    double picture_joules, picture_seconds;
    uint32_t shown;           /* pictures whose tokens wait or have run; later ones wait for a text */
    drafts *drafts;           /* NULL: the bundle verifies none */
    draft_layers *own_drafts; /* NULL: drafts are copied text only */
    uint64_t draft_bytes;     /* of both */
    uint32_t state_row;       /* of the last pass, of the token that the logits follow */
    /* Tokens of the last pass: the generated one and `drafted` more. picked: an accelerator has chosen them, and one more,
     * which has not run. */
    int32_t draft[(MOST_DRAFTS > MOST_PICKS ? MOST_DRAFTS : MOST_PICKS) + 1];
    bool picked;
    uint32_t drafted, ahead;  /* drafted tokens; those that the answer has not reached */
    double pace;              /* seconds per token that an accelerator chooses */
    uint64_t all_drafted, accepted; /* since edge_begin */
    char why[sizeof((edge_error *)0)->message]; /* why engine 0 became this one; empty: the app chose */
    int32_t *ids;             /* [room]: tokens that have not been run are ids[first], …: `waiting` of them */
    uint32_t room, first, waiting;
    int32_t *run_ids;         /* [capacity]: tokens of all rows, if the model has a tail, until rows are evicted */
    int32_t *system;          /* [capacity]: tokens of the system prompt, with its part of the template */
    uint32_t system_count, system_rows, turns; /* system_rows: the first rows: a prefix and its tokens' */
    uint64_t evicted;         /* rows of this conversation */
    turn_mark marks[MOST_MARKS];
    uint32_t turn_rows;       /* rows at the beginning of the last turn */
    uint64_t turn_ran;        /* `ran` at that time */
    uint32_t done;            /* tokens of the prompt that have run */
    enum turn turn;
    uint32_t chunk;           /* most tokens of a prompt in one pass */
    double needed;            /* the planned peak of the process, in bytes */
    uint64_t ran, all_evicted; /* since edge_begin */
    adapter_name adapter;     /* the present adapter; zeros: none */

    /* The answer, and the prompt before it. */
    edge_options options, next_options;
    edge_readings readings;
    watch watch;
    bool started;             /* budgets are counting */
    uint32_t pass_size, last; /* tokens of a prompt in one pass; tokens run since the last context_look */
    uint32_t reserved;        /* rows that the answer's opening will need */
    bool full;                /* the text does not fit */
    edge_finish stopped;      /* why the prompt ended early */
    edge_finish finish;
    bool failed;              /* the pass failed, or its logits were NaN */
    bool stuck;               /* no token matches the grammar, or its tables do not suffice */
    uint32_t generated;
    int32_t token;
    float *logits;
    double *pooled;           /* [2 * widest] of embed_config; NULL: the bundle makes no vectors */
    listener *ears;               /* NULL: the bundle hears nothing */
    double seconds, joules;   /* of the last answer that ended */
    uint32_t text_at, text_end;
    char text[TEXT_ROOM], fed[LONGEST_TEXT];
};

/* Begin and end a call. `enter` fails with EDGE_BUSY if another thread is inside one, and drops drafts; `leave` returns
 * `status`. */
edge_status enter(edge_session *s, edge_error *error);
edge_status enter_answer(edge_session *s, edge_error *error); /* as enter, but keeps drafts */
edge_status leave(edge_session *s, edge_status status);
edge_status check_threads(const edge_session *s, edge_error *error); /* fails if the system has ended one */
edge_status check_accelerator(const edge_session *s, edge_error *error); /* fails if the accelerator has failed */
edge_status check_generates(const edge_session *s, edge_error *error); /* fails for models that answer no prompts */
edge_status check_options(const edge_model *model, const edge_options *options, edge_error *error);
/* turns.c, append.c, rewind.c */
void push_opening(edge_session *s); /* the template's text before an answer */
void begin_anew(edge_session *s); /* forgets the conversation with its system prompt */
void drop_tools_text(edge_session *s); /* makes a conversation new of which only the tools' text is left */
void end_answer(edge_session *s);   /* complete or not */
void take_back(edge_session *s);    /* removes a question that was cancelled before its answer, or its tokens that wait */
void abandon(edge_session *s);    /* ends an answer that the app did not read to its end, or takes its question back */
/* What precedes a picture or sound, which the app gave by `call`: checks the place of its encoder and the conversation's. */
edge_status begin_medium(edge_session *s, const edge_source *file, const char *call, const char *encoder, const char *medium,
                         edge_error *error);
static inline bool has_form(const edge_session *s) { return s->constraint && constraint_holds(s->constraint); } /* its answers */
bool answers(const edge_session *s); /* an answer or its prompt is under way */
/* Checks a saved state up to its end, where its SHA-256 stands. */
edge_status state_check(const edge_session *s, const edge_stream *stream, edge_error *error);
/* The rest of edge_begin, when the engine is chosen. */
edge_status begin_on(edge_model *model, const edge_options *options, const accelerator_kind *kind,
                     edge_session **session, edge_error *error); /* kind: NULL for the CPU */
double paused_seconds(const edge_session *s); /* pauses in this answer and its prompt; kits read them */
/* Refuses impossible lengths, such as (size_t)-1. size: bytes of one of `count` items. */
edge_status check_length(size_t count, size_t size, edge_error *error);

#endif
