/* Speech to text, in bundles of models that hear. */
#ifndef EDGE_EARS_H
#define EDGE_EARS_H

#include "base.h"

typedef struct listener listener;
/* The parts of edge_listen and edge_hear, whose sessions are entered and whose structs have the right size. layout:
 * returns NULL for a model that does not hear. */
typedef struct {
    listener *(*layout)(arena *from, const edge_model *model);
    edge_status (*listen)(edge_session *session, const edge_source *source, const edge_hearing *options, edge_error *error);
    /* Sets failed of the session if a pass fails. */
    int64_t (*hear)(edge_session *session, const float *samples, size_t count, edge_segment *segment, edge_error *error);
    void (*end)(listener *own);
} ears_kind;
extern const ears_kind edge_ears;

#endif
