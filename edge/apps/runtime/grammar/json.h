/* A JSON text as a tree of values. */
#ifndef EDGE_JSON_H
#define EDGE_JSON_H

#include "base.h"

enum json_kind { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT };
enum { MOST_VALUES = 1 << 14, DEEPEST_JSON = 64, MOST_JSON = 1 << 18, LONGEST_REFERENCE = 512 }; /* values; levels; bytes */

typedef struct {
    uint8_t kind;
    const char *key, *text;    /* without escapes, in UTF-8: the name of a member; a string. A number as it is written */
    uint32_t key_length, length;
    uint32_t child, next;      /* the first of its own values, and the one behind it; 0: none */
    uint32_t count;            /* its own values */
} json_value;

typedef struct {
    json_value *values;        /* [MOST_VALUES]; values[0] is null, and stands for what is lacking; values[1] is the whole text */
    char *bytes;               /* [MOST_JSON]: of strings */
    uint32_t count, used;
    const char *name;          /* in messages, with its verb */
} json_tree;

json_tree *json_layout(arena *from);
/* Fails for what is no JSON, and for more than the limits above. The tree refers to the text. */
edge_status json_read(json_tree *tree, const char *text, size_t length, edge_error *error);
/* Adds a further text, whose value is `index`. */
edge_status json_add(json_tree *tree, const char *text, size_t length, uint32_t *index, edge_error *error);
uint32_t json_member(const json_tree *tree, uint32_t object, const char *key, size_t length); /* 0: it has none */
uint32_t json_named(const json_tree *tree, uint32_t object, const char *key);
uint32_t json_child(const json_tree *tree, uint32_t object, const char *key); /* the first value within that member */
uint32_t json_any(const json_tree *tree, uint32_t object, const char *keys);  /* of keys that end with \0, the last with another */
/* The value within `root` that a reference such as #/$defs/a names; 0: there is none. */
uint32_t json_pointed(const json_tree *tree, uint32_t root, const json_value *reference);
bool json_is_number(const char *text, size_t length);
int hex_digit(int c);         /* -1: it is none */
char json_letter(int c);      /* the letter of its escape, such as n; 0: it has none, or needs none */
char json_meant(int letter);  /* the character of an escape; 0: there is none with this letter */
bool is_same(const void *text, size_t length, const char *word); /* which ends with \0 */
bool json_is(const json_value *string, const char *text);
bool json_equal(const json_tree *tree, uint32_t one, uint32_t other);

#endif
