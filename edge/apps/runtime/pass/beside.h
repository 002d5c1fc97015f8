/* Layers beside a model: steps over the rows of its cache, without a copy. */
#ifndef EDGE_BESIDE_H
#define EDGE_BESIDE_H

#include "kv.h"
#include "model.h"
#include "pass.h"

/* layers: a model without tokens, whose layers read rows of `rows`, those of `model`. pass_start and pass_stop must be
 * called. */
pass *beside_layout(arena *from, const edge_model *layers, const design_config *design, const edge_model *model, kv *rows);
/* Runs a step over all rows, to which it adds none. x: [hidden], before the first layer. Returns the state behind the last one,
 * valid until the next call; NULL: the file was cut short. */
const float *beside_run(pass *p, const float *x);
/* Writes the embeddings [count][hidden] of tokens where the states of the last pass were. Returns NULL as above. */
const float *embed_tokens(pass *main, const int32_t *tokens, uint32_t count);
/* Copies the normals of the reflections of keys of the first `layers` layers of the model, whose rows the pass reads. */
void beside_normals(pass *p, const uint8_t *normals, uint32_t layers);

#endif
