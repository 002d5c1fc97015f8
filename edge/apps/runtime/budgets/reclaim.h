/* Memory that a session can return to the system. */
#ifndef EDGE_RECLAIM_H
#define EDGE_RECLAIM_H

#include "session.h"

double reclaimable(const edge_session *s);       /* bytes of KV rows; 0 on accelerators */
void reclaim(edge_session *s, double bytes);     /* returns rows of about `bytes`; evicts where the policy does */
void reclaim_trim(edge_session *s);              /* trims as edge_trim has requested; drafts must be dropped */

#endif
