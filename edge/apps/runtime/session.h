/* A session: the state of one conversation, and the calls by which the functions of edge.h enter and leave it. */
#ifndef EDGE_SESSION_H
#define EDGE_SESSION_H

#include "accelerator.h"
#include "base.h"
#include "budgets.h"
#include "drafts.h"
#include "kv.h"
#include "model.h"
#include "pass.h"
#include "policy.h"
#include "sampler.h"
#include "stops.h"
#include "tokenizer.h"
#include "utf8.h"

enum {
    MOST_MARKS = 64,                                   /* turns that can be taken back */
    MOST_LEFT = 4,                                     /* tokens that a mark remembers */
    LONGEST_TEXT = 3 * LONGEST_PIECE + 12,             /* of a token with what was held back of a character */
    TEXT_ROOM = LONGEST_TEXT + 2 * LONGEST_STOP        /* and of a stop string */
};

enum turn {
    TURN_NEW,       /* nothing has been said */
    TURN_SYSTEM,    /* but the system's text */
    TURN_ASKED,     /* a user's text waits for its answer, and for the opening of it */
    TURN_TEXT,      /* text without the template waits for its answer */
    TURN_ANSWERING,
    TURN_ANSWERED
};

/* Where the conversation was when a turn began: rows, and the tokens that had not been run. */
typedef struct { uint64_t evicted; uint32_t rows, count; int32_t left[MOST_LEFT]; } turn_mark;

typedef struct { uint8_t hash[32]; double scale; } adapter_name;

struct edge_session {
    edge_model *model;
    void *memory;
    uint64_t size;
    volatile int32_t busy, cancelled, trim; /* trim: the level that is asked for, plus 1; 0: none */
    int64_t process; /* that began it, and has its threads */

    tokenizer *tokenizer;
    sampler *sampler;
    stops *stops, *next_stops; /* of this answer; of the next, if new_stops */
    bool new_stops;
    utf8_joiner joiner;

    /* The conversation: see context.c. */
    kv *rows;
    policy *policy;
    pass *pass;
    accelerator *accelerator; /* NULL: the CPU computes */
    drafts *drafts;           /* NULL: the bundle has no room for any */
    /* Tokens of the last pass: the one that was generated, and `drafted` behind it. picked: a device has chosen them, and
     * one more, which has not run. */
    int32_t draft[(MOST_DRAFTS > MOST_PICKS ? MOST_DRAFTS : MOST_PICKS) + 1];
    bool picked;
    uint32_t drafted, ahead;  /* those of them that the answer has not come to */
    double pace;              /* seconds of a token that a device chose */
    uint64_t all_drafted, accepted; /* since edge_begin */
    char why[sizeof((edge_error *)0)->message]; /* it is the engine; empty: the app has said so */
    int32_t *ids;             /* [room]: tokens that have not been run: `waiting` from `first` on */
    uint32_t room, first, waiting;
    int32_t *run_ids;         /* [capacity]: tokens of all rows, if the model has a tail, and while none is evicted */
    int32_t *system;          /* [capacity]: the beginning of a conversation with a system's text */
    uint32_t system_count, system_rows, turns; /* system_rows: the first ones, which are its tokens', once they have run */
    uint64_t evicted;         /* rows, of this conversation */
    turn_mark marks[MOST_MARKS];
    uint32_t turn_rows;       /* with which the last turn began */
    enum turn turn;
    uint32_t chunk;           /* most tokens of a prompt that run at once */
    double needed;            /* the planned peak of the process, in bytes */
    uint64_t ran, all_evicted; /* since edge_begin */
    adapter_name adapter;     /* the one that is set; zeros: none */

    /* The answer, and the prompt before it. */
    edge_options options, next_options;
    edge_readings readings;
    watch watch;
    bool started;             /* its budgets count */
    uint32_t pass_size, last; /* tokens of a prompt that run at once; that ran since the last look around */
    uint32_t reserved;        /* rows that an opening will need */
    bool full;                /* a text does not fit */
    edge_finish stopped;      /* why the prompt did not run to its end */
    edge_finish finish;
    bool failed;              /* no number came out */
    uint32_t generated;
    int32_t token;
    float *logits;
    double seconds, joules;   /* that it took, once it has ended */
    uint32_t text_at, text_end;
    char text[TEXT_ROOM], fed[LONGEST_TEXT];
};

/* A call begins, unless another thread is in one; and ends, with `status`. */
edge_status enter(edge_session *s, edge_error *error);
edge_status enter_answer(edge_session *s, edge_error *error); /* the same, and rows of drafts stay */
edge_status leave(edge_session *s, edge_status status);
edge_status check_accelerator(const edge_session *s, edge_error *error); /* fails if the accelerator has failed */
edge_status check_options(const edge_model *model, const edge_options *options, edge_error *error);
/* The rest of edge_begin, once the engine is known. */
edge_status begin_on(edge_model *model, const edge_options *options, const accelerator_kind *kind,
                     edge_session **session, edge_error *error); /* kind: NULL for the CPU */
double paused_seconds(const edge_session *s); /* in this answer and its prompt, for limits; kits read them */
/* Refuses lengths that no text has, such as (size_t)-1. size: of one of `count`, in bytes. */
edge_status check_length(size_t count, size_t size, edge_error *error);

#endif
