#include "json.h"

#include <stdbool.h>
#include <string.h>

static void put(json *out, const char *text, uint32_t count)
{
    if (count <= out->room - out->used)
        memcpy(out->text + out->used, text, count);
    out->used += count <= out->room - out->used ? count : out->room - out->used;
}

static void put_string(json *out, const char *text)
{
    put(out, "\"", 1);
    for (; *text; text++) {
        uint8_t byte = (uint8_t)*text;
        char escape[6] = {'\\', 'u', '0', '0', "0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
        if (byte < ' ' || byte == '"' || byte == '\\')
            put(out, escape, sizeof escape);
        else
            put(out, text, 1);
    }
    put(out, "\"", 1);
}

static void put_whole(json *out, uint64_t value, uint32_t digits) /* at least so many digits */
{
    char text[20];
    uint32_t at = sizeof text;
    while (value || sizeof text - at < digits) {
        text[--at] = (char)('0' + value % 10);
        value /= 10;
    }
    put(out, text + at, sizeof text - at);
}

/* The member's name. Returns where the object ended before. */
static uint32_t put_name(json *out, const char *name)
{
    uint32_t before = out->used;
    if (before > 1)
        put(out, ",", 1);
    put_string(out, name);
    put(out, ":", 1);
    return before;
}

/* Takes a member back if there is no room for it and the end. */
static void settle(json *out, uint32_t before)
{
    if (out->used + 2 > out->room)
        out->used = before;
}

json json_begin(char *text, uint32_t room)
{
    text[0] = '{';
    return (json){text, room, 1};
}

void json_text(json *out, const char *name, const char *value)
{
    uint32_t before = put_name(out, name);
    put_string(out, value);
    settle(out, before);
}

void json_number(json *out, const char *name, double value)
{
    uint32_t before = put_name(out, name);
    if (!(value > -1e18 && value < 1e18)) /* nor NaN */
        value = 0;
    if (value < 0)
        put(out, "-", 1);
    double size = value < 0 ? -value : value;
    uint64_t whole = (uint64_t)size, millionths = (uint64_t)((size - (double)whole) * 1e6 + 0.5);
    put_whole(out, whole + millionths / 1000000, 1);
    if (millionths % 1000000) {
        put(out, ".", 1);
        put_whole(out, millionths % 1000000, 6);
    }
    settle(out, before);
}

const char *json_end(json *out)
{
    memcpy(out->text + out->used, "}", 2);
    return out->text;
}
