/* The drafting model of bundles that have section DRAFT. */
#ifndef EDGE_ASSISTANT_H
#define EDGE_ASSISTANT_H

#include "kv.h"
#include "model.h"
#include "pass.h"

typedef struct assistant assistant;
typedef struct {
    /* layers: of section DRAFT. main, rows: the model's. isa: of the model's design. Returns NULL while memory is counted, and
     * where it cannot draft. */
    assistant *(*layout)(arena *from, const edge_model *layers, const edge_model *model, pass *main, kv *rows, const char *isa);
    /* Drafts at most `most` tokens behind `token`, which the model has not run. row: of the token before it in the model's last
     * pass, whose states it overwrites. Returns their number. */
    uint32_t (*draft)(assistant *a, int32_t token, uint32_t row, uint32_t most, int32_t *draft);
    double (*share)(const assistant *a); /* its bytes read for a token divided by the model's */
    edge_status (*check)(const edge_model *layers, const edge_model *model, edge_error *error);
} drafter_kind;
extern const drafter_kind edge_assistant;

#endif
