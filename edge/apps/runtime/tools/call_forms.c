/* Calls behind their marks, in each form. */
#include <string.h>

#include "call_reader.h"
#include "calls.h"
#include "json.h"

static bool is(span mark, const char *text)
{
    return is_same(mark.bytes, mark.length, text);
}

static reading_result begin(call_reader *in, const void *name, size_t length)
{
    in->open = tool_named(in->tools, name, length);
    if (!in->open || in->complete == MOST_CALLS) {
        in->open = 0;
        return READ_OTHER;
    }
    in->start = in->used;
    in->begun++;
    return READ_FINE;
}

static reading_result end(call_reader *in)
{
    in->arguments[in->used++] = 0; /* `give` leaves room */
    in->found[in->complete++] = (found_call){in->open, in->start};
    in->open = 0;
    in->after = in->at;
    return READ_FINE;
}

/* ---- JSON ------------------------------------------------------------------------------------------------------- */

/* The arguments from `from` on, which stand before the name, or as text within JSON, as a JSON object. */
static reading_result as_object(call_reader *in, uint32_t from)
{
    uint8_t *text = (uint8_t *)in->arguments + from;
    size_t length = in->used - from;
    uint8_t first = text[0];
    if (first == '"') {
        length = unescape(text + 1, length - 2, (char *)text);
        in->used = from + (uint32_t)length;
        if (length && !is_json(text, length, &first))
            return READ_OTHER;
        first = length ? first : 'n';
    }
    if (first == 'n') {
        in->used = from;
        return give_word(in, "{}");
    }
    return first == '{' ? READ_FINE : READ_OTHER;
}

static reading_result json_call(call_reader *in)
{
    char name[4 * LONGEST_CALL_NAME + 1], key[4 * LONGEST_CALL_NAME + 1];
    size_t name_length = 0, length;
    bool early = false; /* arguments were read before the name */
    int byte;
    TRY(expect(in, "{", 1));
    SKIP_BLANKS(in, byte);
    while (byte != '}') {
        TRY(read_short(in, key, &length));
        const span found = {key, (uint32_t)length};
        SKIP_BLANKS(in, byte);
        TRY(expect(in, ":", 1));
        SKIP_BLANKS(in, byte);
        const bool unopened = !in->open && !early;
        if ((is(found, "name") || is(found, "function")) && byte == '"' && !name_length) {
            TRY(read_short(in, name, &name_length));
            if (!tool_named(in->tools, name, name_length))
                return READ_OTHER;
            if (early) {
                const uint32_t start = in->start;
                TRY(begin(in, name, name_length));
                in->start = start;
            }
        } else if ((is(found, "arguments") || is(found, "parameters")) && unopened) {
            if (name_length && byte == '{') {
                TRY(begin(in, name, name_length));
                TRY(read_json(in, true, 0));
            } else {
                const uint32_t start = in->used;
                TRY(read_json(in, true, 0));
                NEXT(in, byte);
                TRY(as_object(in, start));
                if (name_length)
                    TRY(begin(in, name, name_length));
                early = !name_length;
                in->start = start;
            }
        } else {
            TRY(read_json(in, false, 0));
        }
        SKIP_BLANKS(in, byte);
        if (byte == ',') {
            in->at++;
            SKIP_BLANKS(in, byte);
            if (byte != '"')
                return READ_OTHER;
        } else if (byte != '}') {
            return READ_OTHER;
        }
    }
    if (!in->open) {
        TRY(begin(in, name, name_length));
        TRY(give_word(in, "{}"));
    }
    in->at++;
    return end(in);
}

/* ---- names before arguments ------------------------------------------------------------------------------------- */

static reading_result named_call(call_reader *in)
{
    static const span behind[] = {{"[ARGS]", 6}, {"[CALL_ID]", 9}};
    const uint8_t *name = in->text + in->at;
    uint32_t characters = 0;
    int byte;
    for (;; in->at++) {
        NEXT(in, byte);
        if (byte == '{')
            break;
        characters += byte >= 0 && (byte & 0xC0) != 0x80;
        if (byte < 0 || characters > LONGEST_CALL_NAME)
            return READ_OTHER;
    }
    size_t length = (size_t)(in->text + in->at - name);
    for (size_t i = 0; i < length; i++)
        for (int j = 0; j < 2; j++)
            if (length - i >= behind[j].length && !memcmp(name + i, behind[j].bytes, behind[j].length))
                length = i;
    trim_text(&name, &length);
    TRY(begin(in, name, length));
    TRY(read_json(in, true, 0));
    return end(in);
}

static reading_result headed_call(call_reader *in)
{
    static const span message = {"<|message|>", 11};
    const uint8_t *header = in->text + in->at;
    size_t length = 0;
    uint32_t characters = 0;
    int byte;
    while (length < message.length || memcmp(header + length - message.length, message.bytes, message.length)) {
        NEXT(in, byte);
        characters += byte >= 0 && (byte & 0xC0) != 0x80;
        if (byte < 0 || characters > 2 * LONGEST_CALL_NAME)
            return READ_OTHER;
        in->at++;
        length++;
    }
    SKIP_BLANKS(in, byte);
    if (byte != '{')
        return READ_OTHER;
    for (length = 0; header[length] != '<' && header[length] > ' ';)
        length++;
    TRY(begin(in, header, length));
    TRY(read_json(in, true, 0));
    return end(in);
}

/* ---- tags ------------------------------------------------------------------------------------------------------- */

/* The schemas of a property by an object's schema: their number, and the last of them. As `properties_of` of
 * edge/json_schema.py. root: where references lead. */
static uint32_t property_of(const json_tree *tree, uint32_t root, uint32_t schema, span key, int depth, uint32_t *found)
{
    static const char joining[][6] = {"allOf", "anyOf", "oneOf"};
    uint32_t count = 0, each = json_member(tree, json_named(tree, schema, "properties"), key.bytes, key.length);
    if (each) {
        *found = each;
        count = 1;
    }
    if (depth > DEEPEST_REFERENCES)
        return count;
    if ((each = json_pointed(tree, root, tree->values + json_named(tree, schema, "$ref"))))
        count += property_of(tree, root, each, key, depth + 1, found);
    for (int i = 0; i < 3; i++)
        for (each = json_child(tree, schema, joining[i]); each; each = tree->values[each].next) {
            const uint32_t before = count;
            count += property_of(tree, root, each, key, depth + 1, found);
            if (i && count && (before || count > before)) /* of alternatives, the first with others or with the property */
                break;
        }
    return count;
}

/* Whether a value in tags is its text as it stands, as `is_text` of edge/json_schema.py. */
bool tag_has_text(const json_tree *tree, uint32_t shape)
{
    const uint32_t type = json_named(tree, shape, "type");
    if (tree->values[shape].kind != JSON_OBJECT)
        return true;
    return type ? json_is(tree->values + type, "string") : !json_any(tree, shape, "anyOf\0oneOf\0allOf\0enum\0$ref\0const\0");
}

static reading_result tag_value(call_reader *in, bool text)
{
    static const span closing = {"</parameter>", 12};
    const uint8_t *value;
    size_t length;
    uint8_t first;
    int byte;
    NEXT(in, byte);
    in->at += byte == '\n';
    TRY(find_mark(in, closing, &value, &length));
    length -= length && value[length - 1] == '\n';
    if (!text && is_json(value, length, &first)) {
        trim_text(&value, &length);
        return give_json(in, (const char *)value, length);
    }
    if (!text) {
        const uint8_t *word = value;
        size_t size = length;
        trim_text(&word, &size);
        const char *known = literal_of(word, size);
        if (known)
            return give_word(in, known);
    }
    return give_string(in, value, length);
}

static reading_result tagged_call(call_reader *in, bool begun)
{
    const uint8_t *name, *key;
    size_t length;
    int byte;
    if (!begun)
        TRY(expect(in, "<function=", 10));
    TRY(read_until(in, '>', &name, &length));
    while (length && (*name == ' ' || *name == '"' || *name == '\''))
        name++, length--;
    while (length && (name[length - 1] == ' ' || name[length - 1] == '"' || name[length - 1] == '\''))
        length--;
    TRY(begin(in, name, length));
    const json_tree *tree = in->tools->tree;
    const uint32_t schema = json_named(tree, in->open, "parameters");
    TRY(give_word(in, "{"));
    SKIP_BLANKS(in, byte);
    for (bool first = true;; first = false) {
        TRY(expect(in, "<", 1));
        NEXT(in, byte);
        if (byte != 'p')
            break;
        TRY(expect(in, "parameter=", 10));
        TRY(read_until(in, '>', &key, &length));
        TRY(give_word(in, first ? "" : ", "));
        TRY(give_string(in, key, length));
        TRY(give_word(in, ": "));
        uint32_t property = 0;
        const span wanted = {(const char *)key, (uint32_t)length};
        const uint32_t count = property_of(tree, schema, schema, wanted, 0, &property);
        TRY(tag_value(in, count < 2 && tag_has_text(tree, property)));
        SKIP_BLANKS(in, byte);
    }
    TRY(expect(in, "/function>", 10));
    TRY(give_word(in, "}"));
    return end(in);
}

/* ---- literals --------------------------------------------------------------------------------------------------- */

static reading_result literal_call(call_reader *in, char opening, char closing, char assign)
{
    const uint8_t *name;
    size_t length;
    TRY(read_until(in, opening, &name, &length));
    trim_text(&name, &length);
    TRY(begin(in, name, length));
    TRY(read_fields(in, closing, assign, 0));
    return end(in);
}

static reading_result python_calls(call_reader *in, bool listed)
{
    int byte;
    NEXT(in, byte);
    if (byte == '[') {
        listed = true;
        in->at++;
    }
    for (;;) {
        SKIP_BLANKS(in, byte);
        if (listed && byte == ']')
            break;
        TRY(literal_call(in, '(', ')', '='));
        SKIP_BLANKS(in, byte);
        if (listed && byte == ',')
            in->at++;
        else if (!listed)
            return READ_FINE;
        else if (byte != ']')
            return READ_OTHER;
    }
    in->at++;
    return READ_FINE;
}

/* ---- all -------------------------------------------------------------------------------------------------------- */

static reading_result json_calls(call_reader *in)
{
    int byte;
    NEXT(in, byte);
    if (byte != '[') {
        do { /* several objects between one pair of marks */
            TRY(json_call(in));
            SKIP_BLANKS(in, byte);
        } while (byte == '{');
        return READ_FINE;
    }
    in->at++;
    SKIP_BLANKS(in, byte);
    if (((byte | 32) >= 'a' && (byte | 32) <= 'z' && byte >= 0) || byte == '_')
        return python_calls(in, true);
    while (byte != ']') {
        TRY(json_call(in));
        SKIP_BLANKS(in, byte);
        if (byte == ',') {
            in->at++;
            SKIP_BLANKS(in, byte);
        } else if (byte != ']') {
            return READ_OTHER;
        }
    }
    in->at++;
    return READ_FINE;
}

/* The closing mark, which some models leave out, and which the end of the text may cut. */
static reading_result close(call_reader *in, span closing)
{
    int byte;
    SKIP_BLANKS(in, byte);
    if (byte != (uint8_t)closing.bytes[0])
        return READ_FINE;
    for (uint32_t i = 0; i < closing.length; i++) {
        NEXT(in, byte);
        if (byte >= 0)
            TRY(expect(in, closing.bytes + i, 1));
    }
    return READ_FINE;
}

static reading_result read_body(call_reader *in, span mark)
{
    int byte;
    if (is(mark, "<function="))
        return tagged_call(in, true);
    SKIP_BLANKS(in, byte);
    if (byte == '{' || (in->form->body == CALL_JSON && byte == '['))
        return json_calls(in);
    switch (in->form->body) {
    case CALL_TAGS: return tagged_call(in, false);
    case CALL_NAMED: return named_call(in);
    case CALL_HEADER: return headed_call(in);
    case CALL_BRACES:
        TRY(expect(in, "call:", 5));
        return literal_call(in, '{', '}', ':');
    default: return python_calls(in, false);
    }
}

reading_result read_calls(call_reader *in, span mark)
{
    TRY(read_body(in, mark));
    if (in->form->closing.length && mark.length)
        TRY(close(in, in->form->closing));
    return in->begun ? READ_FINE : READ_OTHER; /* an empty list */
}
