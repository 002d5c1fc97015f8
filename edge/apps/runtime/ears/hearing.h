/* Section HEARING of model.edge: a hearing_config, followed without gaps by
 *
 *     int32 never[…], blank[…]    tokens that are never written; those that a text does not begin with
 *     int32 languages[…]          tokens, in the order of
 *     names                       their codes, each with \0 */
#ifndef EDGE_HEARING_H
#define EDGE_HEARING_H

#include "base.h"
#include "model.h"

const hearing_config *model_hearing(const edge_model *model); /* NULL: the model does not hear, or the section is damaged */
const int32_t *hearing_never(const hearing_config *config);
const int32_t *hearing_blank(const hearing_config *config);
const int32_t *hearing_languages(const hearing_config *config);
const char *hearing_name(const hearing_config *config, uint32_t language); /* "" if there is none */

#endif
