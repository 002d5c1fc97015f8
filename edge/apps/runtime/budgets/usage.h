/* The figures of edge_use, also while another thread computes. */
#ifndef EDGE_USAGE_H
#define EDGE_USAGE_H

#include "session.h"

edge_usage usage_of(const edge_session *s); /* all but the bytes of the process */
void note_usage(edge_session *s);           /* before a pass */
/* Copies the note, of which one thread writes and others read: from or to `noted` of a session. */
void pass_note(edge_session *s, edge_usage *to, const edge_usage *from);

#endif
