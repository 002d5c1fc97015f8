/* A pass's data, which pass.c explains, for the files that have parts of it: threads, inputs. */
#ifndef EDGE_PASS_PARTS_H
#define EDGE_PASS_PARTS_H

#include "bundle.h"
#include "pass.h"
#include "places.h"
#include "system.h"

typedef struct { pass *pass; int64_t number; worker thread; } member;

/* left: tokens to come whose head runs as a whole. length: of the next run of such tokens; 0 counts as 1. */
typedef struct { uint32_t left, length; } head_stages;

struct pass {
    const edge_model *model;
    const design_config *design;                   /* NULL: compiled code runs none */
    kv *rows;
    const given *given;                            /* NULL: no pictures */
    accelerator *accelerator;                      /* NULL: compiled code runs all passes */
    compiled_run *run;
    pass_job *job;
    const int64_t *table;                          /* of the design; a copy if there is room for adapters, or rows across */
    adapter_room adapter;
    void *cross_keys, *cross_values;
    int32_t *lines;                                /* [threads][LINES][LINE] */
    float *floats;                                 /* scratch */
    float *inputs;                                 /* as a table_reader writes them */
    int32_t *integers;
    int32_t *tokens;
    places places;                                 /* of the pass's tokens; memory for positions where they have components */
    float *logits;
    float *rope;                                   /* tables of angles: see fill_angles */
    member *members;                               /* [threads]; 0 is the calling thread */
    kv_pointers cache;
    head_stages stages;
    uint64_t cpu_mask, bytes;
    int64_t first_angle;                           /* RoPE position of the first row of angles */
    uint32_t threads, angles;                      /* threads that run; rows of angles */
    bool lengthened;                               /* the angles have LongRoPE's long factors */
    bool placed, added;                            /* of this pass: `places` is set; given rows add to first layers' outputs */
    bool learned;                                  /* positions are rows of a learned table, `context` of them */
    uint32_t lists;                                /* of rows that layers beside a model read */
    uint32_t drafts;                               /* most drafts behind a token */
    int32_t ahead[MOST_BEHIND];                    /* tokens that are in the states of a page's GPU only */
    uint32_t unsettled;                            /* tokens of the last pass that are not yet in the fixed state */
};

/* team.c */
void run_alone(pass *p); /* the prepared job, on the calling thread's part of it: a stage of a head has one part */
void run_job(pass *p);   /* the prepared job, on all threads */

/* inputs.c */
bool has_learned_positions(const edge_model *model); /* no kind of layers rotates keys */
void write_tokens(pass *p, const int32_t *tokens, uint32_t count); /* NULL: all are given, and there */
/* Positions, what each sees, and angles, but for those that place_texts writes. texts: NULL if no encoder runs. */
void place_tokens(pass *p, const int32_t *tokens, uint32_t count, uint32_t rows, const text_places *texts);
void place_texts(pass *p, uint32_t count, const text_places *texts); /* the same of an encoder's */

#endif
