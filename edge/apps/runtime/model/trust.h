/* Compiled code uses the numbers of some sections unchecked. */
#ifndef EDGE_TRUST_H
#define EDGE_TRUST_H

#include "base.h"
#include "model.h"

/* Fails unless these sections are those that the library was exported with. */
edge_status check_trusted(const edge_model *model, const uint8_t digest[32], edge_error *error);

#endif
