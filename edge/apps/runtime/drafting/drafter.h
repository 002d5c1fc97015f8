/* What drafts in bundles that have section DRAFT: an assistant, the model's own layer, an EAGLE-3 head, or a small model. */
#ifndef EDGE_DRAFTER_H
#define EDGE_DRAFTER_H

#include "kv.h"
#include "model.h"
#include "pass.h"

typedef struct draft_layers draft_layers; /* each kind has its own */
typedef struct {
    /* layers: of section DRAFT. main, rows: the model's. isa: of the model's design. Returns NULL while memory is counted, and
     * where it cannot draft. */
    draft_layers *(*layout)(arena *from, const edge_model *layers, const edge_model *model, pass *main, kv *rows, const char *isa);
    /* Drafts at most `most` tokens behind `token`, which the model has not run. row: of the token before it in the model's last
     * pass, whose states it may overwrite. Returns their number. */
    uint32_t (*draft)(draft_layers *d, int32_t token, uint32_t row, uint32_t most, int32_t *draft);
    double (*share)(const edge_model *layers, const edge_model *model); /* bytes read for a token, divided by the model's */
    edge_status (*check)(const edge_model *layers, const edge_model *model, edge_error *error);
    /* Of those that keep rows, else NULL, as in edge/run/drafting/drafter.py. The model has run tokens in its last pass, or dropped
     * the last of them; count 0: the next ones do not follow those before. */
    void (*ran)(draft_layers *d, const int32_t *tokens, uint32_t count);
    void (*drop)(draft_layers *d, uint32_t count);
    void (*start)(draft_layers *d, uint32_t threads, uint64_t cpu_mask); /* as pass_start, with fewer where it fails; 0: ends them */
} drafter_kind;
static inline double weights_share(const edge_model *layers, const edge_model *model)
{
    return (double)layers->config->weight_bytes / (double)model->config->weight_bytes;
}
extern const drafter_kind edge_assistant, edge_draft_model, edge_mtp_layer;

#endif
