/* The norm of hidden states behind the last layer, as before an output head. */
#ifndef EDGE_NORM_H
#define EDGE_NORM_H

#include "base.h"
#include "model.h"

bool norm_is_possible(const edge_model *model, const embed_config *config); /* its places lie within the weights */
void norm_state(const edge_model *model, const embed_config *config, const float *state, double *out); /* [hidden] */

#endif
