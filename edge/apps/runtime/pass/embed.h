/* Texts to vectors. */
#ifndef EDGE_EMBED_H
#define EDGE_EMBED_H

#include "base.h"

/* The work of edge_embed, whose arguments are checked: embed.c. */
typedef edge_status embedder(edge_session *session, const char *const *texts, const size_t *lengths, size_t count,
                             const edge_embedding *options, float *vectors, edge_error *error);
embedder embed_texts;

#endif
