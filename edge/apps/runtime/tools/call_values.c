/* JSON of calls. A port of edge/tools/json_values.py and scanner.py. */
#include <string.h>

#include "call_reader.h"
#include "json.h"
#include "utf8.h"

int next_byte(const call_reader *in)
{
    return in->at < in->count ? in->text[in->at] : in->ended ? TEXT_ENDS : TEXT_WAITS;
}

int behind_blanks(call_reader *in)
{
    int byte;
    while (is_blank(byte = next_byte(in)))
        in->at++;
    return byte;
}

reading_result expect(call_reader *in, const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++, in->at++) {
        int byte;
        NEXT(in, byte);
        if (byte != (uint8_t)text[i])
            return READ_OTHER;
    }
    return READ_FINE;
}

reading_result give_json(call_reader *in, const char *text, size_t length)
{
    if (length >= MOST_ARGUMENTS - in->used) /* \0 follows */
        return READ_OTHER;
    memcpy(in->arguments + in->used, text, length);
    in->used += (uint32_t)length;
    return READ_FINE;
}

reading_result give_word(call_reader *in, const char *text)
{
    return give_json(in, text, strlen(text));
}

reading_result give_escape(call_reader *in, uint32_t code)
{
    static const char digits[] = "0123456789abcdef";
    const char written[] = {'\\', 'u', digits[code >> 12 & 15], digits[code >> 8 & 15], digits[code >> 4 & 15], digits[code & 15]};
    return give_json(in, written, 6);
}

reading_result give_quoted(call_reader *in, const uint8_t *text, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        const char letter = json_letter(text[i]), pair[] = {'\\', letter};
        if (letter)
            TRY(give_json(in, pair, 2));
        else if (text[i] < ' ')
            TRY(give_escape(in, text[i]));
        else
            TRY(give_json(in, (const char *)text + i, 1));
    }
    return READ_FINE;
}

reading_result give_string(call_reader *in, const uint8_t *text, size_t length)
{
    TRY(give_word(in, "\""));
    TRY(give_quoted(in, text, length));
    return give_word(in, "\"");
}

reading_result read_until(call_reader *in, char mark, const uint8_t **name, size_t *length)
{
    uint32_t characters = 0;
    *name = in->text + in->at;
    for (int byte;; in->at++) {
        NEXT(in, byte);
        if (byte == mark)
            break;
        characters += byte >= 0 && (byte & 0xC0) != 0x80;
        if (byte < 0 || characters > LONGEST_CALL_NAME || (byte && strchr("\n\"'{}()<>[],", byte)))
            return READ_OTHER;
    }
    *length = (size_t)(in->text + in->at++ - *name);
    return READ_FINE;
}

reading_result find_mark(call_reader *in, span mark, const uint8_t **text, size_t *length)
{
    *text = in->text + in->at;
    for (; in->count - in->at >= mark.length; in->at++)
        if (!memcmp(in->text + in->at, mark.bytes, mark.length)) {
            *length = (size_t)(in->text + in->at - *text);
            in->at += mark.length;
            return READ_FINE;
        }
    in->at = in->count;
    return in->ended ? READ_OTHER : READ_MORE;
}

/* ---- JSON ------------------------------------------------------------------------------------------------------- */

static reading_result keep(call_reader *in, bool kept, const void *text, size_t length)
{
    return kept ? give_json(in, text, length) : READ_FINE;
}

static reading_result read_string(call_reader *in, bool kept)
{
    int byte;
    TRY(keep(in, kept, "\"", 1));
    for (in->at++;;) {
        NEXT(in, byte);
        const uint8_t *at = in->text + in->at;
        if (byte < 0)
            return READ_OTHER;
        if (in->strict && byte < ' ')
            return READ_OTHER;
        in->at++;
        if (byte == '"') {
            NEXT(in, byte); /* as Python's reader, which is one character ahead */
            return keep(in, kept, "\"", 1);
        }
        if (byte != '\\') {
            TRY(!kept ? READ_FINE : byte < ' ' ? give_quoted(in, at, 1) : give_json(in, (const char *)at, 1));
            continue;
        }
        NEXT(in, byte);
        if (byte < 0 || (byte != 'u' && !json_meant(byte)))
            return READ_OTHER;
        in->at++;
        for (int i = 0; byte == 'u' && i < 4; i++, in->at++) {
            int digit;
            NEXT(in, digit);
            if (digit < 0 || hex_digit(digit) < 0)
                return READ_OTHER;
        }
        TRY(keep(in, kept, at, (size_t)(in->text + in->at - at)));
    }
}

/* Spaces are kept, tabs and line breaks are not. */
static reading_result pass_blanks(call_reader *in, bool kept)
{
    for (int byte;; in->at++) {
        NEXT(in, byte);
        if (!is_blank(byte))
            return READ_FINE;
        if (byte == ' ')
            TRY(keep(in, kept, " ", 1));
    }
}

reading_result read_json(call_reader *in, bool kept, int depth)
{
    int byte;
    NEXT(in, byte);
    if (depth > DEEPEST_CALL)
        return READ_OTHER;
    if (byte == '"')
        return read_string(in, kept);
    if (byte != '{' && byte != '[') {
        const uint8_t *word = in->text + in->at;
        for (;; in->at++) {
            NEXT(in, byte);
            const bool letter = (byte >= '0' && byte <= '9') || ((byte | 32) >= 'a' && (byte | 32) <= 'z');
            if (byte < 0 || !(letter || byte == '+' || byte == '-' || byte == '.'))
                break;
        }
        const size_t length = (size_t)(in->text + in->at - word);
        if ((byte < 0 && !in->strict) || length > LONGEST_CALL_NAME || byte >= 0x80
            || !(is_same(word, length, "true") || is_same(word, length, "false") || is_same(word, length, "null") || json_is_number((const char *)word, length)))
            return READ_OTHER;
        return keep(in, kept, word, length);
    }
    const char opening = (char)byte, closing = opening == '{' ? '}' : ']';
    TRY(keep(in, kept, &opening, 1));
    in->at++;
    TRY(pass_blanks(in, kept));
    for (bool first = true;; first = false) {
        NEXT(in, byte);
        if (first && byte == closing)
            break;
        if (opening == '{') {
            if (byte != '"')
                return READ_OTHER;
            TRY(read_string(in, kept));
            TRY(pass_blanks(in, kept));
            TRY(expect(in, ":", 1));
            TRY(keep(in, kept, ":", 1));
            TRY(pass_blanks(in, kept));
        }
        TRY(read_json(in, kept, depth + 1));
        TRY(pass_blanks(in, kept));
        NEXT(in, byte);
        if (byte != ',')
            break;
        TRY(keep(in, kept, ",", 1));
        in->at++;
        TRY(pass_blanks(in, kept));
    }
    TRY(expect(in, &closing, 1));
    return keep(in, kept, &closing, 1);
}

static uint32_t four_digits(const uint8_t *at)
{
    return (uint32_t)(hex_digit(at[0]) << 12 | hex_digit(at[1]) << 8 | hex_digit(at[2]) << 4 | hex_digit(at[3]));
}

size_t unescape(const uint8_t *json, size_t length, char *out)
{
    char *to = out;
    for (size_t i = 0; i < length;) {
        if (json[i] != '\\') {
            *to++ = (char)json[i++];
            continue;
        }
        if (json[i + 1] != 'u') {
            *to++ = json_meant(json[i + 1]);
            i += 2;
            continue;
        }
        uint32_t point = four_digits(json + i + 2);
        i += 6;
        if (point >= 0xD800 && point < 0xDC00 && i + 6 <= length && json[i] == '\\' && json[i + 1] == 'u') {
            uint32_t low = four_digits(json + i + 2);
            if (low >= 0xDC00 && low < 0xE000) {
                point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
                i += 6;
            }
        }
        to += utf8_write(point >= 0xD800 && point < 0xE000 ? UTF8_REPLACEMENT : point, (uint8_t *)to);
    }
    return (size_t)(to - out);
}

reading_result read_short(call_reader *in, char *out, size_t *length)
{
    int byte;
    uint32_t characters = 0;
    NEXT(in, byte);
    if (byte != '"')
        return READ_OTHER;
    const uint8_t *start = in->text + in->at + 1;
    TRY(read_string(in, false));
    const uint8_t *end = in->text + in->at - 1;
    for (const uint8_t *at = start; at < end; characters++) {
        if (*at == '\\')
            at += at[1] == 'u' ? 6 : 2;
        else
            for (at++; at < end && (*at & 0xC0) == 0x80;)
                at++;
    }
    if (characters > LONGEST_CALL_NAME)
        return READ_OTHER;
    *length = unescape(start, (size_t)(end - start), out);
    return READ_FINE;
}

bool is_json(const uint8_t *text, size_t length, uint8_t *first)
{
    call_reader in = {.text = text, .count = length, .ended = true, .strict = true};
    behind_blanks(&in);
    *first = in.at < length ? text[in.at] : 0;
    if (read_json(&in, false, 0))
        return false;
    behind_blanks(&in);
    return in.at == length;
}
