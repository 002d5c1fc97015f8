/* Reading JSON. */
#include <string.h>

#include "json.h"
#include "utf8.h"

static const char LETTERS[] = "bfnrt\"\\/", MEANT[] = "\b\f\n\r\t\"\\/";

int hex_digit(int c)
{
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

char json_letter(int c)
{
    const char *found = c && c != '/' ? strchr(MEANT, c) : NULL;
    return found ? LETTERS[found - MEANT] : 0;
}

char json_meant(int letter)
{
    const char *found = letter ? strchr(LETTERS, letter) : NULL;
    return found ? MEANT[found - LETTERS] : 0;
}

typedef struct { json_tree *tree; const char *text; size_t length, at; edge_status status; edge_error *error; } reading;

json_tree *json_layout(arena *from)
{
    json_tree *tree = take(from, sizeof *tree);
    json_value *values = take(from, MOST_VALUES * sizeof *values);
    char *bytes = take(from, MOST_JSON);
    if (tree)
        *tree = (json_tree){values, bytes, 0, 0, "the JSON schema is"};
    return tree;
}

static void fail(reading *in, const char *what)
{
    if (!in->status)
        in->status = edge_fail(in->error, EDGE_BAD_ARGUMENT, "%s no JSON: %s at byte %d", in->tree->name, what, (int64_t)in->at);
}

static int peek(reading *in)
{
    while (in->at < in->length && strchr(" \t\r\n", in->text[in->at]) && in->text[in->at])
        in->at++;
    return in->at < in->length ? (uint8_t)in->text[in->at] : -1;
}

static bool accept(reading *in, char wanted)
{
    bool found = peek(in) == wanted;
    in->at += found;
    return found;
}

static int32_t four_digits(reading *in)
{
    int32_t value = 0;
    for (int i = 0; i < 4; i++, in->at++) {
        int digit = in->at < in->length ? hex_digit((uint8_t)in->text[in->at]) : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

/* The character of a \u escape, which may be written as a pair of surrogates. */
static int32_t escaped_point(reading *in)
{
    int32_t point = four_digits(in);
    if (point >= 0xD800 && point < 0xDC00 && in->at + 1 < in->length && in->text[in->at] == '\\' && in->text[in->at + 1] == 'u') {
        in->at += 2;
        int32_t low = four_digits(in);
        return low >= 0xDC00 && low < 0xE000 ? 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00) : -1;
    }
    return point >= 0xD800 && point < 0xE000 ? -1 : point;
}

static void string(reading *in, const char **text, uint32_t *length)
{
    json_tree *tree = in->tree;
    char *start = tree->bytes + tree->used, *out = start;
    for (in->at++;;) {
        int c = in->at < in->length ? (uint8_t)in->text[in->at] : -1;
        if (c < 0x20) {
            fail(in, c < 0 ? "a string without end" : "a control character in a string");
            return;
        }
        in->at++;
        if (c == '"')
            break;
        if (c != '\\') {
            *out++ = (char)c;
            continue;
        }
        const char meant = in->at < in->length ? json_meant(in->text[in->at]) : 0;
        if (meant) {
            *out++ = meant;
            in->at++;
            continue;
        }
        int32_t point = in->at++ < in->length && in->text[in->at - 1] == 'u' ? escaped_point(in) : -1;
        if (point < 0) {
            fail(in, "an unknown escape");
            return;
        }
        out += utf8_write((uint32_t)point, (uint8_t *)out);
    }
    *text = start;
    *length = (uint32_t)(out - start);
    tree->used += *length;
}

static size_t digits_of(const char *text, size_t length)
{
    size_t count = 0;
    while (count < length && text[count] >= '0' && text[count] <= '9')
        count++;
    return count;
}

bool json_is_number(const char *text, size_t length)
{
    size_t at = length && text[0] == '-', count = digits_of(text + at, length - at);
    if (!count || (count > 1 && text[at] == '0'))
        return false;
    at += count;
    if (at < length && text[at] == '.') {
        count = digits_of(text + at + 1, length - at - 1);
        if (!count)
            return false;
        at += 1 + count;
    }
    if (at < length && (text[at] | 32) == 'e') {
        at++;
        at += at < length && (text[at] == '+' || text[at] == '-');
        count = digits_of(text + at, length - at);
        if (!count)
            return false;
        at += count;
    }
    return at == length;
}

static void number(reading *in, json_value *value)
{
    value->text = in->text + in->at;
    for (; in->at < in->length && in->text[in->at] && strchr("+-.0123456789eE", in->text[in->at]); in->at++)
        value->length++;
    if (!json_is_number(value->text, value->length))
        fail(in, "an unknown value");
}

static uint32_t read_value(reading *in, int depth);

/* Reads the values of an array or an object up to `end`. */
static void inside(reading *in, uint32_t parent, char end, int depth)
{
    json_value *values = in->tree->values;
    uint32_t last = 0;
    in->at++;
    if (accept(in, end))
        return;
    do {
        const char *key = NULL;
        uint32_t length = 0;
        if (end == '}') {
            if (peek(in) != '"') {
                fail(in, "a member without a name");
                return;
            }
            string(in, &key, &length);
            if (!in->status && !accept(in, ':'))
                fail(in, "no colon behind a name");
        }
        uint32_t child = in->status ? 0 : read_value(in, depth + 1);
        if (in->status)
            return;
        values[child].key = key;
        values[child].key_length = length;
        *(last ? &values[last].next : &values[parent].child) = child;
        last = child;
        values[parent].count++;
    } while (accept(in, ','));
    if (!accept(in, end))
        fail(in, "no comma, or an end that is missing");
}

static uint32_t read_value(reading *in, int depth)
{
    static const char words[][6] = {"null", "false", "true"};
    json_tree *tree = in->tree;
    if (tree->count == MOST_VALUES || depth > DEEPEST_JSON) {
        if (!in->status)
            in->status = edge_fail(in->error, EDGE_UNSUPPORTED, "%s too large: at most %d values, %d deep", tree->name,
                                   (int64_t)MOST_VALUES, (int64_t)DEEPEST_JSON);
        return 0;
    }
    uint32_t index = tree->count++;
    json_value *value = tree->values + index;
    memset(value, 0, sizeof *value);
    int first = peek(in);
    if (first == '{' || first == '[') {
        value->kind = first == '{' ? JSON_OBJECT : JSON_ARRAY;
        inside(in, index, first == '{' ? '}' : ']', depth);
    } else if (first == '"') {
        value->kind = JSON_STRING;
        string(in, &value->text, &value->length);
    } else {
        for (uint8_t i = 0; i < 3; i++) {
            size_t length = strlen(words[i]);
            if (in->length - in->at >= length && !memcmp(in->text + in->at, words[i], length)) {
                value->kind = JSON_NULL + i;
                in->at += length;
                return index;
            }
        }
        value->kind = JSON_NUMBER;
        number(in, value);
    }
    return index;
}

edge_status json_add(json_tree *tree, const char *text, size_t length, uint32_t *index, edge_error *error)
{
    if (length > MOST_JSON - tree->used)
        return edge_fail(error, EDGE_UNSUPPORTED, "%s of %d bytes: at most %d may be", tree->name, (int64_t)length, (int64_t)MOST_JSON);
    reading in = {tree, text, length, 0, EDGE_OK, error};
    *index = read_value(&in, 0);
    if (!in.status && peek(&in) >= 0)
        fail(&in, "text behind its end");
    return in.status;
}

edge_status json_read(json_tree *tree, const char *text, size_t length, edge_error *error)
{
    uint32_t index;
    memset(tree->values, 0, sizeof *tree->values);
    tree->count = 1;
    tree->used = 0;
    return json_add(tree, text, length, &index, error);
}

uint32_t json_member(const json_tree *tree, uint32_t object, const char *key, size_t length)
{
    if (tree->values[object].kind == JSON_OBJECT)
        for (uint32_t each = tree->values[object].child; each; each = tree->values[each].next)
            if (tree->values[each].key_length == length && !memcmp(tree->values[each].key, key, length))
                return each;
    return 0;
}

uint32_t json_named(const json_tree *tree, uint32_t object, const char *key)
{
    return json_member(tree, object, key, strlen(key));
}

uint32_t json_child(const json_tree *tree, uint32_t object, const char *key)
{
    return tree->values[json_named(tree, object, key)].child;
}

uint32_t json_any(const json_tree *tree, uint32_t object, const char *keys)
{
    uint32_t found = 0;
    for (; *keys && !found; keys += strlen(keys) + 1)
        found = json_named(tree, object, keys);
    return found;
}

uint32_t json_pointed(const json_tree *tree, uint32_t root, const json_value *reference)
{
    char part[LONGEST_REFERENCE];
    uint32_t found = root, length;
    if (reference->kind != JSON_STRING || !reference->length || reference->text[0] != '#')
        return 0;
    for (uint32_t i = 1; found && i < reference->length;) {
        for (i += reference->text[i] == '/', length = 0; i < reference->length && reference->text[i] != '/' && length < LONGEST_REFERENCE; i++) {
            char c = reference->text[i];
            if (c == '~' && i + 1 < reference->length) {
                c = reference->text[++i] == '1' ? '/' : '~';
            } else if (c == '%' && i + 2 < reference->length) {
                unsigned code = 0;
                for (int j = 1; j < 3; j++)
                    code = code * 16 + (unsigned)hex_digit(reference->text[i + j]);
                c = (char)code;
                i += 2;
            }
            part[length++] = c;
        }
        if (tree->values[found].kind == JSON_ARRAY) {
            uint32_t place = 0, each = tree->values[found].child;
            for (uint32_t j = 0; j < length && place < MOST_VALUES; j++)
                place = place * 10 + (uint32_t)(part[j] - '0');
            while (each && place--)
                each = tree->values[each].next;
            found = each;
        } else if (length) {
            found = json_member(tree, found, part, length);
        }
    }
    return found;
}

bool is_same(const void *text, size_t length, const char *word)
{
    return length == strlen(word) && !memcmp(text, word, length);
}

bool json_is(const json_value *string, const char *text)
{
    return string->kind == JSON_STRING && is_same(string->text, string->length, text);
}

bool json_equal(const json_tree *tree, uint32_t one, uint32_t other)
{
    const json_value *a = tree->values + one, *b = tree->values + other;
    if (a->kind != b->kind || a->count != b->count || a->length != b->length || (a->length && memcmp(a->text, b->text, a->length)))
        return false;
    for (uint32_t i = a->child, j = b->child; i; i = tree->values[i].next, j = tree->values[j].next) {
        uint32_t match = a->kind == JSON_OBJECT ? json_member(tree, other, tree->values[i].key, tree->values[i].key_length) : j;
        if (!match || !json_equal(tree, i, match))
            return false;
    }
    return true;
}
