/* An object in JSON, with names that need no escapes, written into a buffer. */
#ifndef EDGE_WEB_JSON_H
#define EDGE_WEB_JSON_H

#include <stdint.h>

typedef struct { char *text; uint32_t room, used; } json; /* what does not fit is left out, member by member */
json json_begin(char *text, uint32_t room);
void json_text(json *out, const char *name, const char *value); /* UTF-8 */
void json_number(json *out, const char *name, double value);    /* with six decimals, if it is not whole */
const char *json_end(json *out);

#endif
