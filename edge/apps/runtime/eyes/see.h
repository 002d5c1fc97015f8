/* What pictures and sounds share: an encoder makes rows, which wait for the text behind them. */
#ifndef EDGE_SEE_H
#define EDGE_SEE_H

#include "base.h"
#include "encoder.h"
#include "given.h"
#include "session.h"

typedef struct {
    const char *called, *advice; /* what to do if it is too long */
    uint64_t patches;            /* rows of all passes of the encoder */
    uint32_t width;              /* values of a row, before those of other layers */
    edge_status (*encode)(encoder *e, const void *own, const volatile int32_t *cancelled, float *rows, edge_error *error);
    const void *own;
} seen_medium;

/* shown: with its hash, and without rows and width. */
edge_status see_medium(edge_session *s, const edge_source *source, const seen_medium *medium, picture_rows shown, edge_error *error);

#endif
