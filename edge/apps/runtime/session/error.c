/* Formats messages without stdio, whose ABI differs between C libraries. */
#include <stdarg.h>
#include <string.h>

#include "base.h"

typedef struct { char *to; size_t room, used; } line; /* room: bytes, without \0 */

static void put(line *out, const char *text, size_t count)
{
    for (size_t i = 0; i < count && out->used < out->room; i++)
        out->to[out->used++] = (text[i] & 0x80) == 0 && text[i] < ' ' ? ' ' : text[i]; /* keep it one line */
}

static void put_number(line *out, int64_t number)
{
    char digits[20];
    uint64_t rest = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    size_t at = sizeof digits;
    do
        digits[--at] = (char)('0' + rest % 10);
    while (rest /= 10);
    if (number < 0)
        put(out, "-", 1);
    put(out, digits + at, sizeof digits - at);
}

/* Length of a text without an incomplete UTF-8 character at its end. */
static size_t whole_characters(const char *text, size_t length)
{
    size_t start = length;
    while (start && length - start < 4 && (text[start - 1] & 0xC0) == 0x80)
        start--;
    if (!start || (text[start - 1] & 0xC0) != 0xC0)
        return length;
    uint8_t first = (uint8_t)text[start - 1];
    size_t wanted = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    return length - start + 1 == wanted ? length : start - 1;
}

edge_status edge_fail(edge_error *error, edge_status code, const char *form, ...)
{
    if (!error || error->size <= offsetof(edge_error, message))
        return code;
    size_t size = error->size < sizeof *error ? error->size : sizeof *error;
    line out = {error->message, size - offsetof(edge_error, message) - 1, 0};
    va_list values;
    va_start(values, form);
    for (const char *at = form; *at; at++) {
        if (*at == '%' && at[1] == 's') {
            const char *text = va_arg(values, const char *);
            put(&out, text, strlen(text));
            at++;
        } else if (*at == '%' && at[1] == 'd') {
            put_number(&out, va_arg(values, int64_t));
            at++;
        } else {
            put(&out, at, 1);
        }
    }
    va_end(values);
    error->code = code;
    error->message[whole_characters(error->message, out.used)] = 0;
    return code;
}
