/* Literals of Python or of a family's own notation in calls, which become JSON. A port of edge/tools/literals.py. */
#include <string.h>

#include "call_reader.h"
#include "json.h"
#include "utf8.h"

static bool is_space(uint32_t point) /* as str.strip has them */
{
    return (point >= 9 && point <= 13) || (point >= 28 && point <= 32) || point == 0x85 || point == 0xA0 || point == 0x1680
        || (point >= 0x2000 && point <= 0x200A) || point == 0x2028 || point == 0x2029 || point == 0x202F || point == 0x205F
        || point == 0x3000;
}

void trim_text(const uint8_t **text, size_t *length)
{
    uint32_t point;
    bool whole;
    while (*length) {
        size_t size = utf8_read(*text, *length, &point, &whole);
        if (!is_space(point))
            break;
        *text += size;
        *length -= size;
    }
    while (*length) {
        size_t from = *length - 1;
        while (from && ((*text)[from] & 0xC0) == 0x80)
            from--;
        utf8_read(*text + from, *length - from, &point, &whole);
        if (!is_space(point))
            break;
        *length = from;
    }
}

const char *literal_of(const uint8_t *text, size_t length)
{
    static const char written[][6] = {"True", "False", "None", "true", "false", "null"};
    for (int i = 0; i < 6; i++)
        if (is_same(text, length, written[i]))
            return written[3 + i % 3];
    return NULL;
}

/* The escape behind a backslash of Python's. */
static reading_result read_escape(call_reader *in)
{
    static const char names[] = "ntrbf0\\'\"\n", meant[] = "\n\t\r\b\f\0\\'\"\n", sizes[] = "xuU";
    int byte;
    NEXT(in, byte);
    const uint8_t *start = in->text + in->at;
    if (byte < 0)
        return READ_OTHER;
    in->at++;
    const char *known = byte ? strchr(names, byte) : NULL, *sized = byte ? strchr(sizes, byte) : NULL;
    if (known)
        return give_quoted(in, (const uint8_t *)meant + (known - names), 1);
    if (!sized) {
        TRY(give_word(in, "\\\\"));
        return give_quoted(in, start, 1);
    }
    const uint32_t size = 2u << (sized - sizes);
    uint32_t count = 0, code = 0;
    for (; count < size; count++, in->at++) {
        NEXT(in, byte);
        if (byte < 0 || hex_digit(byte) < 0)
            break;
        code = code << 4 | (uint32_t)hex_digit(byte);
    }
    if (count < size || code > 0x10FFFF) {
        TRY(give_word(in, "\\\\"));
        return give_json(in, (const char *)start, count + 1);
    }
    if (code >= 0xD800 && code < 0xE000)
        return give_escape(in, code);
    uint8_t out[4];
    return give_quoted(in, out, utf8_write(code, out));
}

static reading_result read_quoted(call_reader *in)
{
    const span mark = in->form->quote;
    int quote, byte, behind;
    NEXT(in, quote);
    if (mark.length && quote == (uint8_t)mark.bytes[0]) {
        const uint8_t *text;
        size_t length;
        TRY(expect(in, mark.bytes, mark.length));
        TRY(find_mark(in, mark, &text, &length));
        return give_string(in, text, length);
    }
    TRY(give_word(in, "\""));
    for (in->at++;;) {
        NEXT(in, byte);
        const uint8_t *at = in->text + in->at;
        if (byte < 0)
            return READ_OTHER;
        in->at++;
        if (byte == quote) { /* models write apostrophes without a backslash */
            NEXT(in, behind);
            if (behind < 0 || (behind && strchr(" \t\r\n,)]}:=", behind)))
                return give_word(in, "\"");
        }
        TRY(byte == '\\' ? read_escape(in) : give_quoted(in, at, 1));
    }
}

static reading_result begins_quoted(call_reader *in, bool *found)
{
    int byte;
    NEXT(in, byte);
    *found = byte == '"' || byte == (in->form->quote.length ? (uint8_t)in->form->quote.bytes[0] : '\'');
    return READ_FINE;
}

static reading_result read_literal(call_reader *in, int depth);

static reading_result read_field(call_reader *in, char assign, int depth)
{
    bool quoted;
    int byte;
    TRY(begins_quoted(in, &quoted));
    if (quoted) {
        TRY(read_quoted(in));
        SKIP_BLANKS(in, byte);
        TRY(expect(in, &assign, 1));
    } else {
        const uint8_t *key;
        size_t length;
        TRY(read_until(in, assign, &key, &length));
        trim_text(&key, &length);
        TRY(give_string(in, key, length));
    }
    TRY(give_word(in, ": "));
    SKIP_BLANKS(in, byte);
    return read_literal(in, depth + 1);
}

/* Items with commas between them, up to the closing bracket; a trailing comma is allowed. assign: of fields; 0: values. */
static reading_result read_items(call_reader *in, char closing, char assign, int depth)
{
    int byte;
    SKIP_BLANKS(in, byte);
    for (bool first = true; byte != closing; first = false) {
        if (!first) {
            TRY(expect(in, ",", 1));
            SKIP_BLANKS(in, byte);
            if (byte == closing)
                break;
            TRY(give_word(in, ", "));
        }
        TRY(assign ? read_field(in, assign, depth) : read_literal(in, depth + 1));
        SKIP_BLANKS(in, byte);
    }
    in->at++;
    return READ_FINE;
}

reading_result read_fields(call_reader *in, char closing, char assign, int depth)
{
    if (depth > DEEPEST_CALL)
        return READ_OTHER;
    TRY(give_word(in, "{"));
    TRY(read_items(in, closing, assign, depth));
    return give_word(in, "}");
}

static reading_result read_literal(call_reader *in, int depth)
{
    int byte;
    bool quoted;
    if (depth > DEEPEST_CALL)
        return READ_OTHER;
    TRY(begins_quoted(in, &quoted));
    if (quoted)
        return read_quoted(in);
    NEXT(in, byte);
    if (byte == '{') {
        in->at++;
        return read_fields(in, '}', ':', depth);
    }
    if (byte == '[' || byte == '(') {
        in->at++;
        TRY(give_word(in, "["));
        TRY(read_items(in, byte == '[' ? ']' : ')', 0, depth));
        return give_word(in, "]");
    }
    const uint8_t *word = in->text + in->at;
    for (;; in->at++) {
        NEXT(in, byte);
        if (byte < 0)
            return READ_OTHER;
        if (byte && strchr(",)]}:", byte))
            break;
    }
    size_t length = (size_t)(in->text + in->at - word);
    trim_text(&word, &length);
    const char *known = literal_of(word, length);
    if (known)
        return give_word(in, known);
    if (json_is_number((const char *)word, length))
        return give_json(in, (const char *)word, length);
    return give_string(in, word, length);
}
