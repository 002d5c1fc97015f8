/* The chat template as data: token ids around the texts of messages. Section CHAT is a chat_header, then the ids of each part.
 * A count of CHAT_ABSENT means that the template lacks the part.
 *
 *     CHAT_FIRST          before the first user text
 *     CHAT_SYSTEM         before the system prompt
 *     CHAT_AFTER_SYSTEM   from the system prompt to the first user text
 *     CHAT_OPENING        from a user text to the answer
 *     CHAT_PAST           the same before an earlier answer that is appended
 *     CHAT_NEXT           from the end of an answer to the next user text */
#ifndef EDGE_CHAT_H
#define EDGE_CHAT_H

#include "base.h"
#include "model.h"

edge_status chat_check(const edge_model *model, edge_error *error);
const int32_t *chat_ids(const edge_model *model, enum chat_part part, uint32_t *count); /* NULL: the part is absent */
bool chat_starts(const edge_model *model, enum chat_part part); /* whether text after this part opens the prompt */

#endif
