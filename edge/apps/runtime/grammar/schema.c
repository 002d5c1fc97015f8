/* JSON schemas as rules: the subset of docs/structured.md, of which what follows is refused by name. */
#include "json.h"
#include "rules.h"
#include "schema_parts.h"

enum { SEEN_ANY = 1, SEEN_ONE = 2 }; /* of a schema whose anyOf, oneOf was replaced by an alternative */

/* ---- any value -------------------------------------------------------------------------------------------------- */

/* The schema that a reference within the document names. */
static uint32_t resolve(schema *in, const json_value *reference)
{
    if (reference->kind != JSON_STRING || !reference->length || reference->text[0] != '#') {
        rules_fail(in->r, EDGE_UNSUPPORTED, "the JSON schema cannot be enforced: %s%s", "a reference outside of it, ", reference->text,
                   reference->length);
        return 0;
    }
    const uint32_t found = json_pointed(in->tree, in->root, reference);
    if (!found)
        rules_fail(in->r, EDGE_BAD_ARGUMENT, "the JSON schema %s: %s", "refers to what it lacks", reference->text, reference->length);
    return found;
}

/* The target of a case of oneOf that is a reference alone. */
static uint32_t case_of(schema *in, uint32_t index)
{
    for (uint32_t i = 0, found; i < 8 && (found = json_named(in->tree, index, "$ref")) && (found = resolve(in, at(in, found))); i++)
        index = found;
    return index;
}

/* Types that the values of a schema may have. */
static int values_of(schema *in, uint32_t index)
{
    int types = schema_types(in, index), found = 0;
    uint32_t each = schema_listed(in, index);
    if (!each)
        return types;
    for (; each; each = schema_next(in, each))
        found |= schema_type_of(in, each);
    return types & found;
}

/* Whether no value matches both schemas, as far as their types, constants and required constant members tell. */
static bool exclude(schema *in, uint32_t one, uint32_t other, int depth)
{
    if (++in->compared > MOST_COMPARED)
        return false;
    uint32_t first = schema_listed(in, one = case_of(in, one));
    int types = values_of(in, one), others = values_of(in, other = case_of(in, other));
    if (!(types & others))
        return true;
    if (first && schema_listed(in, other)) {
        bool shared = false;
        for (uint32_t each = first; each; each = schema_next(in, each))
            shared |= schema_has_constant(in, other, each);
        return !shared;
    }
    if ((types & others) != T_OBJECT || depth > 4)
        return false;
    const uint32_t mine = json_named(in->tree, one, "properties"), theirs = json_named(in->tree, other, "properties");
    for (uint32_t each = json_child(in->tree, one, "required"); each; each = at(in, each)->next)
        for (uint32_t match = json_child(in->tree, other, "required"); match; match = at(in, match)->next)
            if (json_equal(in->tree, each, match)) {
                const json_value *name = at(in, each);
                uint32_t a = json_member(in->tree, mine, name->text, name->length), b = json_member(in->tree, theirs, name->text, name->length);
                if (a && b && exclude(in, a, b, depth + 1))
                    return true;
            }
    return false;
}

static void check_exclusive(schema *in, uint32_t list)
{
    for (uint32_t one = at(in, list)->child; one; one = at(in, one)->next)
        for (uint32_t other = at(in, one)->next; other && !in->r->status; other = at(in, other)->next)
            if (!exclude(in, one, other, 0))
                schema_refuse(in, "cases of oneOf that may hold at once");
}

static void check_keywords(schema *in, uint32_t index)
{
    static const char unknown[] =
        "not\0if\0dependentSchemas\0dependentRequired\0dependencies\0contains\0propertyNames\0unevaluatedProperties\0"
        "unevaluatedItems\0$dynamicRef\0$recursiveRef\0extends\0disallow\0";
    for (const char *each = unknown; *each; each += strlen(each) + 1) {
        const uint32_t found = json_named(in->tree, index, each);
        const bool idle = at(in, found)->kind == JSON_OBJECT && !at(in, found)->count && each > unknown + sizeof "not";
        if (found && at(in, found)->kind != JSON_TRUE && !idle) /* `not` and `if` say something even if they are empty */
            schema_refuse(in, each);
    }
}

bool schema_complete(schema *in, conjunction *all)
{
    for (uint32_t i = 0; i < all->count && !in->r->status;) {
        const uint32_t index = all->of[i].value, before = all->count;
        uint32_t reference = json_named(in->tree, index, "$ref");
        if (at(in, index)->kind == JSON_FALSE)
            return false;
        if (at(in, index)->kind != JSON_OBJECT && at(in, index)->kind != JSON_TRUE)
            schema_malformed(in, "a schema is neither an object nor true nor false");
        check_keywords(in, index);
        if (reference && (reference = resolve(in, at(in, reference))))
            schema_join(in, all, reference, i);
        for (uint32_t each = json_child(in->tree, index, "allOf"); each; each = at(in, each)->next)
            schema_join(in, all, each, i + all->count - before);
        i += all->count == before; /* otherwise the new ones come next, and this one again, which then adds none */
    }
    return true;
}

/* The first schema that still has alternatives, and their list; 0: none has. */
static uint32_t find_list(const schema *in, const conjunction *all, uint32_t *of, uint32_t *kind)
{
    for (*of = 0; *of < all->count; ++*of)
        for (*kind = SEEN_ANY; *kind <= SEEN_ONE; ++*kind) {
            uint32_t list = json_named(in->tree, all->of[*of].value, *kind == SEEN_ANY ? "anyOf" : "oneOf");
            if (list && !(all->of[*of].seen & *kind))
                return list;
        }
    return 0;
}

uint32_t schema_alternatives(schema *in, const conjunction *all)
{
    uint32_t of, kind, list = find_list(in, all, &of, &kind);
    if (!list)
        return 0;
    if (at(in, list)->kind != JSON_ARRAY || !at(in, list)->count)
        schema_malformed(in, kind == SEEN_ANY ? "anyOf" : "oneOf");
    else if (kind == SEEN_ONE)
        check_exclusive(in, list);
    return in->r->status ? 0 : at(in, list)->count;
}

void schema_choose(schema *in, const conjunction *all, uint32_t number, conjunction *with)
{
    uint32_t of, kind, each = at(in, find_list(in, all, &of, &kind))->child;
    *with = *all;
    with->of[of].seen |= kind;
    while (number--)
        each = at(in, each)->next;
    schema_join(in, with, each, of);
}

static uint32_t write_value(schema *in, conjunction *all)
{
    rules *r = in->r;
    const uint32_t choices = schema_complete(in, all) && !r->status ? schema_alternatives(in, all) : 0;
    uint32_t found = NEVER, from = all->count;
    int types = T_ALL;
    for (uint32_t i = 0; i < choices && !r->status; i++) {
        conjunction with;
        schema_choose(in, all, i, &with);
        found = rules_either(r, found, value(in, &with, END));
    }
    if (found != NEVER || r->status)
        return found;
    for (uint32_t i = 0; i < all->count; i++) {
        if (at(in, all->of[i].value)->kind == JSON_FALSE)
            return NEVER;
        types &= schema_types(in, all->of[i].value);
        if (from == all->count && schema_listed(in, all->of[i].value))
            from = i;
    }
    if (from < all->count) {
        for (uint32_t each = schema_listed(in, all->of[from].value); each && !r->status; each = schema_next(in, each)) {
            bool may = true;
            for (uint32_t i = 0; i < all->count; i++)
                may &= schema_fits(in, each, all->of[i].value);
            found = may ? rules_either(r, schema_constant(in, each, END), found) : found;
        }
        return found;
    }
    if (types & T_NULL)
        found = rules_word(r, "null", END);
    if (types & T_BOOLEAN)
        found = rules_either(r, found, rules_either(r, rules_word(r, "true", END), rules_word(r, "false", END)));
    if (types & (T_INTEGER | T_FRACTION))
        found = rules_either(r, found, schema_numbers(in, all, !(types & T_FRACTION), END));
    if (types & T_STRING)
        found = rules_either(r, found, schema_text(in, all, END));
    if (types & T_ARRAY)
        found = rules_either(r, found, schema_array(in, all, END));
    return types & T_OBJECT ? rules_either(r, found, schema_object(in, all, END)) : found;
}

void schema_begin(schema *in, rules *r, bool compact)
{
    static const char spaces[] = "\t\n\r ";
    in->r = r;
    in->compact = compact;
    in->known_count = in->written = in->used = in->compared = 0;
    in->blank = NEVER;
    for (int i = 0; i < 4; i++)
        in->blank = rules_either(r, rules_char(r, (uint8_t)spaces[i], END), in->blank);
}

uint32_t schema_write(schema *in, const conjunction *of, uint32_t root, uint32_t next)
{
    in->root = root;
    uint32_t start = value(in, of, next);
    for (; in->written < in->known_count && !in->r->status; in->written++) { /* writing one may add others */
        const known *one = in->known + in->written;
        conjunction all = {.count = one->count};
        memcpy(all.of, in->pool + one->first, one->count * sizeof *all.of);
        rules_set(in->r, one->rule, write_value(in, &all));
    }
    return start;
}

uint32_t schema_rules(schema *in, rules *r, const char *source, size_t length)
{
    const conjunction all = {{{1, 0}}, 1};
    r->status = json_read(in->tree, source, length, r->error);
    if (r->status)
        return NEVER;
    schema_begin(in, r, false);
    return schema_write(in, &all, 1, END);
}
