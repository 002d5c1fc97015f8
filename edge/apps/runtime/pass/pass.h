/* The forward pass: tokens in, logits out. */
#ifndef EDGE_PASS_H
#define EDGE_PASS_H

#include "accelerator.h"
#include "base.h"
#include "given.h"
#include "kv.h"
#include "model.h"

typedef struct pass pass;
/* design: of the instruction set that runs; NULL: the accelerator, which holds the rows, runs all passes. */
pass *pass_layout(arena *from, const edge_model *model, const design_config *design, kv *rows,
                  accelerator *runs_all);
/* Finds the best design that this CPU runs, or that of an instruction set. isa: NULL for any. */
edge_status pass_choose(const edge_model *model, const char *isa, const design_config **design, edge_error *error);
void pass_see(pass *p, const given *pictures); /* whose rows ids beyond the vocabulary have; NULL: there are none */
/* Starts threads, the caller's included, or changes their number. Cannot fail for one thread. cpu_mask: bit i allows CPU i;
 * 0: all. */
edge_status pass_start(pass *p, uint32_t threads, uint64_t cpu_mask, edge_error *error);
void pass_start_some(pass *p, uint32_t threads, uint64_t cpu_mask); /* or one, where the system gives no others */
void pass_stop(pass *p);
uint32_t pass_threads(const pass *p);
int32_t pass_thread_id(const pass *p, uint32_t number); /* 0 is the calling thread; 0 where the system is not Linux */
bool pass_lost_thread(const pass *p); /* true: the system has ended one, and every later pass is refused */

/* Runs tokens and appends their rows (kv_announce, kv_prepare, kv_appended). observed: number of last tokens whose
 * attention is observed. Returns the logits [vocab] after the last token, valid until the next call; the caller may change
 * them. Returns NULL, and changes nothing, if tokens exceed a chunk or the free rows, an id is not in the vocabulary, a
 * position is beyond those that the model has learned, the file was cut short, a thread was lost, or an accelerator failed or
 * was cancelled.
 *
 * pick: NULL if all logits are needed. Otherwise, after a single token, an accelerator may choose up to pick->most
 * further tokens (at most pass_picks, kv_free and kv_at_once). It then appends the rows of all chosen tokens but the last,
 * and there are no logits. */
float *pass_run(pass *p, const int32_t *tokens, uint32_t count, uint32_t observed, picking *pick);
typedef struct {
    const uint32_t *ends;      /* the tokens up to the end of each text, which see each other */
    const int32_t (*cells)[2]; /* positions of two components; NULL: they are consecutive in each text */
    uint32_t first, stop;      /* layers: the first, and the one behind the last; 0: behind all. Also of models with cross attention. */
} text_places;
/* Runs whole texts of an encoder side by side, whose rows they replace, or, without texts, as pass_run without logits. tokens:
 * NULL if the caller has written rows to pass_inputs in their place. Returns the hidden states behind the last layer,
 * [count][*stride], valid until the next call. */
const float *pass_states(pass *p, const int32_t *tokens, uint32_t count, const text_places *texts, uint32_t *stride);
float *pass_inputs(pass *p, uint32_t *stride); /* the hidden states, which are embeddings before the first layer */
/* Where a layer that drafts reads the states that it joins with tokens, [tokens][hidden]; features: in the next pass,
 * [tokens][features], of a head. */
float *pass_given(pass *p, bool features);
const float *pass_taps(const pass *p, uint32_t *stride); /* the inputs of some layers in the last pass, [tokens][taps][*stride] */
uint32_t pass_picks(const pass *p); /* most tokens that an accelerator chooses at once; 0: it chooses none */
/* Runs a token and drafts behind it, at most pass_drafts and as kv_at_once allows. Returns the logits [count, padded_vocab]
 * after each, as passes of their own would give them. pass_settle must follow before rows are read or changed. */
float *pass_verify(pass *p, const int32_t *tokens, uint32_t count);
void pass_settle(pass *p, uint32_t dropped); /* removes the last `dropped` tokens from rows and fixed state */
bool pass_catch_up(pass *p); /* brings fixed states up to the newest rows; false as pass_run's NULL */
uint32_t pass_drafts(const pass *p); /* most drafts behind a token; 0: none, as while an accelerator may run the pass */
bool pass_reaches(const pass *p, uint32_t count); /* false: the model has not learned positions that far */

uint64_t pass_bytes(const pass *p); /* bytes of scratch */
void pass_release(pass *p);         /* returns scratch to the system until the next pass writes it; the last logits stay */
/* The pass's own table of offsets, and the memory of an adapter; NULLs if the model has no room for one. */
typedef struct { int64_t *table; uint8_t *memory; } adapter_room;
adapter_room pass_adapter(const pass *p);

/* Makes the keys and values that layers read across, of an encoder's states [count][stride], count at most cross_stride: tokens
 * see these from now on. Returns false if the file was cut short or a thread was lost. */
bool pass_cross(pass *p, const float *states, uint32_t count, uint32_t stride);
/* Writes a head's first `count` of these keys, [count][head]. crossing: the layer's number among those that read across. */
void pass_cross_keys(const pass *p, uint32_t crossing, uint32_t head, uint32_t count, float *keys);

#endif
