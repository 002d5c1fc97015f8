/* Arrays and objects of JSON schemas. */
#include "json.h"
#include "regexp.h"
#include "rules.h"
#include "schema_parts.h"
#include "utf8.h"

/* ---- arrays ----------------------------------------------------------------------------------------------------- */

/* The schemas of item number `place` in all arrays' schemas. Returns false if there may be none. */
static bool item(schema *in, const conjunction *of, uint32_t place, conjunction *found)
{
    bool may = true;
    found->count = 0;
    for (uint32_t i = 0; i < of->count; i++) {
        uint32_t index = of->of[i].value, fixed = json_named(in->tree, index, "prefixItems"), rest = json_named(in->tree, index, "items");
        if (!fixed && rest && at(in, rest)->kind == JSON_ARRAY) { /* before draft 2020 */
            fixed = rest;
            rest = json_named(in->tree, index, "additionalItems");
        }
        uint32_t each = at(in, fixed)->child;
        for (uint32_t j = 0; each && j < place; j++)
            each = at(in, each)->next;
        each = each ? each : rest;
        if (each && at(in, each)->kind == JSON_FALSE)
            may = false;
        else if (each)
            schema_join(in, found, each, found->count);
    }
    return may;
}

uint32_t schema_array(schema *in, const conjunction *of, uint32_t next)
{
    uint32_t least, most, fixed = 0;
    conjunction each;
    schema_limits(in, of, "minItems", "maxItems", &least, &most);
    for (uint32_t i = 0; i < of->count; i++) {
        uint32_t index = of->of[i].value, list = json_named(in->tree, index, "prefixItems");
        if (!list && (list = json_named(in->tree, index, "items")) && at(in, list)->kind != JSON_ARRAY)
            list = 0;
        if (list && at(in, list)->count > fixed)
            fixed = at(in, list)->count;
        if (is_true(in, index, "uniqueItems"))
            schema_refuse(in, "uniqueItems");
    }
    if (in->r->status || least > most)
        return NEVER;
    const uint32_t end = mark(in, ']', next);
    uint32_t found = end; /* the node behind item number `place` */
    fixed = smaller(fixed, most);
    if (fixed < most && item(in, of, fixed, &each)) {
        uint32_t more = value(in, &each, blanks(in, END));
        more = separator(in, ',', more);
        if (fixed)
            found = rules_repeat(in->r, more, least > fixed ? least - fixed : 0, most == WITHOUT_END ? most : most - fixed, end);
        else {
            found = rules_repeat(in->r, more, least ? least - 1 : 0, most == WITHOUT_END ? most : most - 1, end);
            found = value(in, &each, blanks(in, found));
            found = least ? found : rules_either(in->r, end, found);
        }
    } else if (least > fixed)
        return NEVER;
    for (uint32_t place = fixed; place--;) {
        uint32_t one = item(in, of, place, &each) ? value(in, &each, blanks(in, found)) : NEVER;
        if (place)
            one = separator(in, ',', one);
        found = least > place ? one : rules_either(in->r, one, end);
    }
    return mark(in, '[', blanks(in, found));
}

/* ---- objects ---------------------------------------------------------------------------------------------------- */

static member *name_member(schema *in, const char *text, uint32_t length)
{
    for (uint32_t i = 0; i < in->member_count; i++)
        if (in->members[i].length == length && !memcmp(in->members[i].text, text, length))
            return in->members + i;
    if (in->member_count == MOST_MEMBERS || length > LONGEST_NAME) {
        schema_refuse(in, length > LONGEST_NAME ? "a property with a name of more than 100 bytes" : "more than 512 properties");
        return NULL;
    }
    in->members[in->member_count] = (member){text, length, false};
    return in->members + in->member_count++;
}

/* Lists the members by all objects' schemas. Returns whether others are forbidden because no schema speaks of them. */
bool schema_list_members(schema *in, const conjunction *of)
{
    bool named = false, spoken = false;
    in->member_count = 0;
    for (uint32_t i = 0; i < of->count; i++) {
        uint32_t index = of->of[i].value, own = json_named(in->tree, index, "properties");
        named |= own != 0;
        spoken |= json_any(in->tree, index, "additionalProperties\0patternProperties\0minProperties\0") != 0;
        if (own && at(in, own)->kind != JSON_OBJECT)
            schema_malformed(in, "properties");
        for (uint32_t each = at(in, own)->child; each && !in->r->status; each = at(in, each)->next)
            name_member(in, at(in, each)->key, at(in, each)->key_length);
    }
    for (uint32_t i = 0; i < of->count; i++)
        for (uint32_t each = json_child(in->tree, of->of[i].value, "required"); each && !in->r->status; each = at(in, each)->next) {
            member *found = at(in, each)->kind == JSON_STRING ? name_member(in, at(in, each)->text, at(in, each)->length) : NULL;
            if (found)
                found->required = true;
            else
                schema_malformed(in, "required");
        }
    return named && !spoken;
}

/* The schemas of a member by all objects' schemas; name: NULL for one that none of them names. Returns false if there may be
 * none. */
bool schema_property(schema *in, const conjunction *of, const member *name, bool closed, conjunction *found)
{
    bool may = !closed || name;
    found->count = 0;
    for (uint32_t i = 0; i < of->count; i++) {
        uint32_t index = of->of[i].value, each = 0;
        if (name)
            each = json_member(in->tree, json_named(in->tree, index, "properties"), name->text, name->length);
        if (!each)
            each = json_named(in->tree, index, "additionalProperties");
        if (each && at(in, each)->kind == JSON_FALSE)
            may = false;
        else if (each)
            schema_join(in, found, each, found->count);
    }
    return may;
}

/* A colon and a value of this rule, with the blanks behind it: the rest of a member. */
static uint32_t named_value(schema *in, uint32_t rule)
{
    return blanks(in, separator(in, ':', rules_call(in->r, rule, blanks(in, END))));
}

/* Any name but those of members, from the byte number `depth` on; order: of members that begin alike, as bytes, from `from` to
 * `to`. */
static uint32_t other_name(schema *in, const uint16_t *order, uint32_t from, uint32_t to, uint32_t depth, uint32_t next)
{
    rules *r = in->r;
    const uint32_t free = rules_repeat(r, r->text, 0, WITHOUT_END, next);
    const bool ends = in->members[order[from]].length == depth; /* the shortest comes first */
    bool led[0x80] = {false}, whole;
    point_range beyond = {0x80, 0x10FFFF}; /* characters beyond ASCII, behind those of members */
    uint32_t found = ends ? NEVER : next, point;
    led['"'] = led['\\'] = true;
    for (uint32_t i = from + ends, until; i < to; i = until) {
        const member *it = in->members + order[i];
        const char *text = it->text + depth;
        const uint32_t length = (uint32_t)utf8_read((const uint8_t *)text, it->length - depth, &point, &whole);
        for (until = i + 1; until < to; until++) { /* the same lead byte has the same length */
            const char *other = in->members[order[until]].text + depth;
            if (other[0] != text[0] || memcmp(other, text, length))
                break;
        }
        if (point >= 0x80 || (point >= 0x20 && point < 0x7F && !led[point]))
            found = rules_either(r, found, rules_bytes(r, text, length, other_name(in, order, i, until, depth + length, next)));
        if (point < 0x80) {
            led[point] = true;
            continue;
        }
        const point_range before = {beyond.low, point - 1};
        found = rules_either(r, found, rules_points(r, &before, before.low < point, free));
        beyond.low = point + 1;
    }
    for (uint32_t c = 0x20; c < 0x7F; c++)
        if (!led[c]) {
            uint32_t last = c;
            while (last < 0x7E && !led[last + 1])
                last++;
            found = rules_either(r, found, rules_byte(r, (uint8_t)c, (uint8_t)last, free));
            c = last;
        }
    return rules_either(r, found, rules_points(r, &beyond, 1, free));
}

static int compare_names(const member *one, const member *other)
{
    int found = memcmp(one->text, other->text, smaller(one->length, other->length));
    return found ? found : one->length < other->length ? -1 : one->length > other->length;
}

/* A member that no schema names; NEVER: there may be none. */
static uint32_t further(schema *in, const conjunction *of, bool closed)
{
    conjunction each;
    uint32_t patterns = 0, next;
    uint16_t order[MOST_MEMBERS];
    bool may = schema_property(in, of, NULL, closed, &each), spoken = false;
    for (uint32_t i = 0; i < of->count; i++) {
        uint32_t found = json_named(in->tree, of->of[i].value, "patternProperties");
        spoken |= json_named(in->tree, of->of[i].value, "additionalProperties") != 0;
        if (!at(in, found)->count)
            continue;
        if (patterns || in->member_count || at(in, found)->count > 1)
            schema_refuse(in, "patternProperties beside other keys");
        patterns = found;
    }
    if (patterns) {
        patterns = at(in, patterns)->child;
        if (may && spoken)
            schema_refuse(in, "patternProperties beside additionalProperties");
        each.count = 0;
        schema_join(in, &each, patterns, 0);
        regex_read(in->regex, in->r, at(in, patterns)->key, at(in, patterns)->key_length);
        next = mark(in, '"', named_value(in, schema_rule(in, &each)));
        return mark(in, '"', regex_rules(in->regex, in->r, true, false, next));
    }
    if (!may || in->r->status)
        return NEVER;
    for (uint32_t i = 0, j; i < in->member_count; i++) { /* insertion sort */
        for (j = i; j && compare_names(in->members + order[j - 1], in->members + i) > 0; j--)
            order[j] = order[j - 1];
        order[j] = (uint16_t)i;
    }
    next = mark(in, '"', named_value(in, schema_rule(in, &each)));
    return mark(in, '"', in->member_count ? other_name(in, order, 0, in->member_count, 0, next)
                                          : rules_repeat(in->r, in->r->text, 0, WITHOUT_END, next));
}

uint32_t schema_object(schema *in, const conjunction *of, uint32_t next)
{
    rules *r = in->r;
    conjunction each;
    const bool closed = schema_list_members(in, of);
    uint32_t least, most, required = 0;
    schema_limits(in, of, "minProperties", "maxProperties", &least, &most);
    const uint32_t other = further(in, of, closed), end = mark(in, '}', next);
    for (uint32_t i = 0; i < in->member_count; i++)
        required += in->members[i].required;
    if (in->member_count) {
        if (least > required || (most != WITHOUT_END && (other != NEVER || most < in->member_count)))
            schema_refuse(in, least > required ? "minProperties beside properties" : "maxProperties beside properties");
        least = 0, most = WITHOUT_END;
    }
    if (in->r->status || least > most)
        return NEVER;
    /* The nodes behind some members, and behind none. */
    uint32_t some = rules_repeat(r, separator(in, ',', other), least ? least - 1 : 0, most == WITHOUT_END ? most : most ? most - 1 : 0, end);
    uint32_t none = most ? rules_repeat(r, other, 1, 1, some) : NEVER;
    none = least ? none : rules_either(r, none, end);
    for (uint32_t i = in->member_count; i--;) {
        const member *it = in->members + i;
        uint32_t before_some = NEVER, before_none = NEVER;
        if (schema_property(in, of, it, closed, &each)) {
            uint32_t whole = schema_name(in, it->text, it->length, named_value(in, schema_rule(in, &each)));
            before_none = rules_repeat(r, whole, 1, 1, some);
            before_some = separator(in, ',', before_none);
        }
        some = it->required ? before_some : rules_either(r, before_some, some);
        none = it->required ? before_none : rules_either(r, before_none, none);
    }
    return mark(in, '{', blanks(in, none));
}
