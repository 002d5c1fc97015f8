/* Constants, numbers and strings of JSON schemas. */
#include "json.h"
#include "numbers.h"
#include "regexp.h"
#include "rules.h"
#include "schema_parts.h"

/* ---- JSON texts of given values --------------------------------------------------------------------------------- */

uint32_t schema_name(schema *in, const char *text, uint32_t length, uint32_t next)
{
    next = mark(in, '"', next);
    while (length--)
        next = (uint8_t)text[length] < 0x80 ? rules_json(in->r, (uint8_t)text[length], next) : mark(in, text[length], next);
    return mark(in, '"', next);
}

uint32_t schema_constant(schema *in, uint32_t index, uint32_t next)
{
    static const char words[][6] = {"null", "false", "true"};
    const json_value *it = at(in, index);
    if (it->kind <= JSON_TRUE)
        return rules_word(in->r, words[it->kind], next);
    if (it->kind == JSON_NUMBER)
        return rules_bytes(in->r, it->text, it->length, next);
    if (it->kind == JSON_STRING)
        return schema_name(in, it->text, it->length, next);
    const bool object = it->kind == JSON_OBJECT;
    uint32_t end = mark(in, object ? '}' : ']', next), later[256], count = 0;
    for (uint32_t each = it->child; each; each = at(in, each)->next) {
        if (count == 256) {
            schema_refuse(in, "a constant of more than 256 values");
            return NEVER;
        }
        later[count++] = each;
    }
    uint32_t found = blanks(in, end);
    while (count--) {
        const json_value *each = at(in, later[count]);
        found = schema_constant(in, later[count], found);
        if (object)
            found = schema_name(in, each->key, each->key_length, blanks(in, separator(in, ':', found)));
        if (count)
            found = blanks(in, separator(in, ',', found));
    }
    return mark(in, object ? '{' : '[', blanks(in, found));
}

int schema_type_of(const schema *in, uint32_t index)
{
    const json_value *it = at(in, index);
    bound read;
    switch (it->kind) {
    case JSON_NULL: return T_NULL;
    case JSON_NUMBER: return bound_read(&read, it->text, it->length, false) && read.fraction_count ? T_FRACTION : T_INTEGER;
    case JSON_STRING: return T_STRING;
    case JSON_ARRAY: return T_ARRAY;
    case JSON_OBJECT: return T_OBJECT;
    default: return T_BOOLEAN;
    }
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

/* Takes the bound of a keyword if it is tighter. sign: 1 for a lower bound, -1 for an upper one. */
static void tighten(schema *in, uint32_t index, const char *key, bool excluded, int sign, bound *to)
{
    bound read;
    uint32_t found = json_named(in->tree, index, key);
    if (at(in, found)->kind <= JSON_TRUE) /* true, false: of draft 4 */
        return;
    if (at(in, found)->kind != JSON_NUMBER)
        schema_malformed(in, key);
    else if (!bound_read(&read, at(in, found)->text, at(in, found)->length, excluded))
        schema_refuse(in, "a bound of many digits");
    else if (!to->set || sign * bound_compare(&read, to) > 0 || (!bound_compare(&read, to) && excluded))
        *to = read;
}

static void bounds_of(schema *in, uint32_t index, bound *low, bound *high)
{
    tighten(in, index, "minimum", is_true(in, index, "exclusiveMinimum"), 1, low);
    tighten(in, index, "exclusiveMinimum", true, 1, low);
    tighten(in, index, "maximum", is_true(in, index, "exclusiveMaximum"), -1, high);
    tighten(in, index, "exclusiveMaximum", true, -1, high);
}

uint32_t schema_numbers(schema *in, const conjunction *of, bool integer, uint32_t next)
{
    bound low = {0}, high = {0};
    for (uint32_t i = 0; i < of->count; i++) {
        uint32_t index = of->of[i].value, step = json_named(in->tree, index, "multipleOf");
        bounds_of(in, index, &low, &high);
        if (step && !(integer && at(in, step)->length == 1 && at(in, step)->text[0] == '1'))
            schema_refuse(in, "multipleOf");
    }
    return numbers_between(in->r, &low, &high, integer, next);
}

/* ---- strings ---------------------------------------------------------------------------------------------------- */

/* Formats by RFC 3339, 5321, 1123, 2673, 4291, 4122, 3986. A byte below ' ' stands for a part with this number. */
#define HOUR "\1"
#define DATE "\2"
#define TIME "\3"
#define SPAN "\4"
#define BYTE "\5"
#define LABEL "\6"
#define WORD "\7"
#define HOST "\10"
#define V4 "\11"
#define H4 "\12"
#define HEAD "\13"
#define TAIL "\14"
#define UP_TO_9 "\15"

static const char PARTS[] =
    "(?:[01][0-9]|2[0-3])\0"
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)\0"
    HOUR ":[0-5][0-9]:(?:[0-5][0-9]|60)(?:\\." UP_TO_9 ")?(?:[Zz]|[+-]" HOUR ":[0-5][0-9])\0"
    "(?:" UP_TO_9 "H(?:" UP_TO_9 "M(?:" UP_TO_9 "S)?)?|" UP_TO_9 "M(?:" UP_TO_9 "S)?|" UP_TO_9 "S)\0"
    "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\0"
    "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\0"
    "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+\0"
    LABEL "(?:\\." LABEL ")*\0"
    BYTE "(?:\\." BYTE "){3}\0"
    "[0-9A-Fa-f]{1,4}\0"
    "(?:" H4 ":)\0"
    "(?::" H4 ")\0"
    "[0-9]{1,9}";

static const char FORMATS[] =
    "date-time\0" DATE "[Tt]" TIME "\0"
    "date\0" DATE "\0"
    "time\0" TIME "\0"
    "duration\0P(?:(?:" UP_TO_9 "Y(?:" UP_TO_9 "M(?:" UP_TO_9 "D)?)?|" UP_TO_9 "M(?:" UP_TO_9 "D)?|" UP_TO_9 "D)(?:T" SPAN ")?|T" SPAN "|" UP_TO_9 "W)\0"
    "email\0" WORD "(?:\\." WORD ")*@" HOST "\0"
    "hostname\0" HOST "\0"
    "ipv4\0" V4 "\0"
    "ipv6\0(?:" HEAD "{7}" H4 "|" HEAD "{1,7}:|" HEAD "{1,6}:" H4 "|" HEAD "{1,5}" TAIL "{1,2}|" HEAD "{1,4}" TAIL "{1,3}|" HEAD "{1,3}" TAIL "{1,4}|"
        HEAD "{1,2}" TAIL "{1,5}|" H4 ":" TAIL "{1,6}|:" TAIL "{1,7}|::|" HEAD "{6}" V4 "|::(?:[Ff]{4}:)?" V4 ")\0"
    "uuid\0[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\0"
    "uri\0[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+\0";
enum { LONGEST_FORMAT = 1024 }; /* bytes, with all parts */

/* Returns the end of what it wrote: `end` where there is no room for all of it. */
static char *expand(char *out, const char *end, const char *text)
{
    for (; *text && out < end; text++) {
        if (*text >= ' ') {
            *out++ = *text;
            continue;
        }
        const char *part = PARTS;
        for (int number = *text; number > 1; number--)
            part += strlen(part) + 1;
        out = expand(out, end, part);
    }
    return out;
}

static bool read_format(schema *in, const json_value *name)
{
    char text[LONGEST_FORMAT], *end = text + sizeof text;
    for (const char *each = FORMATS, *format; *each; each = format + strlen(format) + 1) {
        format = each + strlen(each) + 1;
        char *last = json_is(name, each) ? expand(text, end, format) : end;
        if (last < end) {
            regex_read(in->regex, in->r, text, (size_t)(last - text));
            return true;
        }
    }
    rules_fail(in->r, EDGE_UNSUPPORTED, "the JSON schema cannot be enforced: %s%s", "format ", name->text, name->length);
    return false;
}

uint32_t schema_text(schema *in, const conjunction *of, uint32_t next)
{
    uint32_t least, most, pattern = 0;
    bool format = false;
    schema_limits(in, of, "minLength", "maxLength", &least, &most);
    next = mark(in, '"', next);
    for (uint32_t i = 0; i < of->count; i++) {
        for (int kind = 0; kind < 2; kind++) {
            uint32_t found = json_named(in->tree, of->of[i].value, kind ? "format" : "pattern");
            if (!found || (pattern && json_equal(in->tree, pattern, found)))
                continue;
            if (at(in, found)->kind != JSON_STRING)
                schema_malformed(in, kind ? "format" : "pattern");
            else if (pattern)
                schema_refuse(in, "two patterns of one string");
            pattern = found;
            format = kind;
        }
    }
    if (in->r->status)
        return NEVER;
    if (!pattern)
        return mark(in, '"', rules_repeat(in->r, in->r->text, least, most, next));
    if (!format)
        regex_read(in->regex, in->r, at(in, pattern)->text, at(in, pattern)->length);
    else if (!read_format(in, at(in, pattern)))
        return NEVER;
    if (!in->r->status && !format && !regex_limit(in->regex, least, most))
        schema_refuse(in, "minLength or maxLength beside this pattern");
    if (!in->r->status && format && (least || most != WITHOUT_END)) {
        uint32_t own_least, own_most;
        regex_counts(in->regex, &own_least, &own_most);
        if (own_least < least || own_most > most)
            schema_refuse(in, "minLength or maxLength beside this format");
    }
    return mark(in, '"', regex_rules(in->regex, in->r, true, format, next));
}

/* ---- listed values ---------------------------------------------------------------------------------------------- */

bool schema_has_constant(schema *in, uint32_t index, uint32_t wanted)
{
    for (uint32_t each = schema_listed(in, index); each; each = schema_next(in, each))
        if (json_equal(in->tree, each, wanted))
            return true;
    return false;
}

bool schema_fits(schema *in, uint32_t wanted, uint32_t index)
{
    const json_value *it = at(in, wanted);
    const char *others = ""; /* which are not looked at */
    bound own, low = {0}, high = {0};
    if (!(schema_types(in, index) & schema_type_of(in, wanted)) || (schema_listed(in, index) && !schema_has_constant(in, index, wanted)))
        return false;
    if (it->kind == JSON_STRING)
        others = "pattern\0format\0";
    else if (it->kind == JSON_NUMBER)
        others = "multipleOf\0";
    else if (it->kind == JSON_ARRAY)
        others = "items\0prefixItems\0additionalItems\0minItems\0maxItems\0uniqueItems\0";
    else if (it->kind == JSON_OBJECT)
        others = "properties\0patternProperties\0additionalProperties\0required\0minProperties\0maxProperties\0";
    if (json_any(in->tree, index, others))
        schema_refuse(in, "enum or const beside other keywords");
    if (it->kind == JSON_NUMBER && bound_read(&own, it->text, it->length, false)) {
        bounds_of(in, index, &low, &high);
        int below = low.set ? bound_compare(&own, &low) : 1, above = high.set ? bound_compare(&own, &high) : -1;
        return (below > 0 || (!below && !low.excluded)) && (above < 0 || (!above && !high.excluded));
    }
    uint32_t points = 0;
    for (uint32_t i = 0; it->kind == JSON_STRING && i < it->length; i++)
        points += ((uint8_t)it->text[i] & 0xC0) != 0x80;
    return it->kind != JSON_STRING || (points >= schema_number(in, index, "minLength", 0)
                                       && points <= schema_number(in, index, "maxLength", WITHOUT_END));
}
