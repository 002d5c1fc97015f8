/* Stop strings. */
#ifndef EDGE_STOPS_H
#define EDGE_STOPS_H

#include "base.h"

typedef struct stops stops;
stops *stops_layout(arena *from);
/* Replaces the stop strings; if one is refused, the old ones stay. */
edge_status stops_set(stops *s, const char *const *texts, uint32_t count, edge_error *error);
void stops_start(stops *s); /* begins an answer */
/* Adds text, and writes to `out` (length + LONGEST_STOP bytes) what may be shown by now; returns its bytes. *met: a stop
 * string was found. */
size_t stops_feed(stops *s, const char *text, size_t length, char *out, bool *met);
size_t stops_rest(stops *s, char *out); /* at the end of an answer: writes the text that was held back; returns its bytes */

#endif
