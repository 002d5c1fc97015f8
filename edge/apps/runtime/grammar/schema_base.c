/* Conjunctions of JSON schemas, and single keywords. */
#include "json.h"
#include "numbers.h"
#include "regexp.h"
#include "rules.h"
#include "schema_parts.h"

schema *schema_layout(arena *from)
{
    schema *in = take(from, sizeof *in);
    known *all = take(from, MOST_RULES * sizeof *all);
    joined *pool = take(from, MOST_POOL * sizeof *pool);
    member *members = take(from, MOST_MEMBERS * sizeof *members);
    json_tree *tree = json_layout(from);
    regex *expression = regex_layout(from);
    if (in)
        *in = (schema){.tree = tree, .regex = expression, .known = all, .pool = pool, .members = members};
    return in;
}

void schema_refuse(schema *in, const char *what)
{
    rules_fail(in->r, EDGE_UNSUPPORTED, "the JSON schema cannot be enforced: %s%s", what, "", 0);
}

void schema_malformed(schema *in, const char *what)
{
    rules_fail(in->r, EDGE_BAD_ARGUMENT, "the JSON schema is malformed: %s%s", what, "", 0);
}

void schema_join(schema *in, conjunction *to, uint32_t index, uint32_t place)
{
    for (uint32_t i = 0; i < to->count; i++)
        if (to->of[i].value == index)
            return;
    if (to->count == MOST_JOINED)
        schema_refuse(in, "too many schemas hold for one value");
    else {
        memmove(to->of + place + 1, to->of + place, (to->count++ - place) * sizeof *to->of);
        to->of[place] = (joined){index, 0};
    }
}

uint32_t schema_number(schema *in, uint32_t index, const char *key, uint32_t unset)
{
    uint32_t found = json_named(in->tree, index, key), number = 0;
    bound read;
    if (!found)
        return unset;
    if (at(in, found)->kind != JSON_NUMBER || !bound_read(&read, at(in, found)->text, at(in, found)->length, false)
        || read.negative || read.fraction_count || read.whole_count > 9) {
        schema_malformed(in, key);
        return unset;
    }
    for (uint32_t i = 0; i < read.whole_count; i++)
        number = number * 10 + read.whole[i];
    return number;
}

void schema_limits(schema *in, const conjunction *of, const char *low, const char *high, uint32_t *least, uint32_t *most)
{
    *least = 0, *most = WITHOUT_END;
    for (uint32_t i = 0; i < of->count; i++) {
        const uint32_t own = schema_number(in, of->of[i].value, low, 0);
        *least = *least > own ? *least : own;
        *most = smaller(*most, schema_number(in, of->of[i].value, high, WITHOUT_END));
    }
}

uint32_t schema_rule(schema *in, const conjunction *of)
{
    uint32_t hash = of->count;
    for (uint32_t i = 0; i < of->count; i++)
        hash = (hash ^ (of->of[i].value * 4 + of->of[i].seen)) * 2654435761u;
    for (uint32_t i = 0; i < in->known_count; i++) {
        const known *one = in->known + i;
        if (one->hash == hash && one->count == of->count && !memcmp(in->pool + one->first, of->of, of->count * sizeof *of->of))
            return one->rule;
    }
    if (in->used + of->count > MOST_POOL)
        schema_refuse(in, "it is too large with all that it refers to");
    uint32_t rule = rules_new(in->r);
    if (in->r->status)
        return 0;
    memcpy(in->pool + in->used, of->of, of->count * sizeof *of->of);
    in->known[in->known_count++] = (known){hash, in->used, of->count, rule};
    in->used += of->count;
    return rule;
}

int schema_type_named(const json_value *name)
{
    static const struct { char name[8]; uint8_t type; } names[] = {
        {"null", T_NULL}, {"boolean", T_BOOLEAN}, {"integer", T_INTEGER}, {"number", T_INTEGER | T_FRACTION},
        {"string", T_STRING}, {"array", T_ARRAY}, {"object", T_OBJECT},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (json_is(name, names[i].name))
            return names[i].type;
    return 0;
}

uint32_t schema_next(const schema *in, uint32_t item)
{
    return at(in, item)->key ? 0 : at(in, item)->next;
}

int schema_types(schema *in, uint32_t index)
{
    uint32_t each = json_named(in->tree, index, "type");
    int found = each ? 0 : T_ALL;
    if (at(in, each)->kind == JSON_ARRAY)
        each = at(in, each)->child;
    for (; each; each = schema_next(in, each)) {
        const int one = schema_type_named(at(in, each));
        if (!one)
            schema_malformed(in, "type");
        found |= one;
    }
    return found;
}

uint32_t schema_listed(schema *in, uint32_t index)
{
    uint32_t one = json_named(in->tree, index, "const"), list = json_named(in->tree, index, "enum");
    if (!one && list && (at(in, list)->kind != JSON_ARRAY || !at(in, list)->count))
        schema_malformed(in, "enum");
    return one ? one : at(in, list)->child;
}
