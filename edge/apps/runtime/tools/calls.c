/* The text of an answer between its calls. */
#include <string.h>

#include "call_reader.h"

struct calls {
    const call_form *form;
    const tool_list *tools;
    uint8_t *held;          /* [MOST_HELD]: text that is not yet certain: from `at` on unread, before it from `from` on no text yet */
    char *out;              /* [2 * MOST_HELD]: text of the answer, from `taken` to `said`; then blanks, which calls drop */
    found_call *found;      /* [MOST_CALLS] */
    char *arguments;        /* [MOST_ARGUMENTS] */
    size_t at, from, count;
    size_t taken, said, blanks;
    uint32_t complete, used, begun;
    bool plain;             /* nothing but blanks and calls so far */
    bool whole;             /* the newest calls lack at most their closing */
    bool skips;             /* the rest of a malformed call */
    bool ended, cut, past;  /* past: a call failed at the text's end */
    bool was_cut;
};

calls *calls_layout(arena *from)
{
    calls *c = take(from, sizeof *c);
    uint8_t *held = take(from, MOST_HELD);
    char *out = take(from, 2 * MOST_HELD), *arguments = take(from, MOST_ARGUMENTS);
    found_call *found = take(from, MOST_CALLS * sizeof *found);
    if (c)
        *c = (calls){.held = held, .out = out, .arguments = arguments, .found = found};
    return c;
}

void calls_begin(calls *c, const call_form *form, const tool_list *tools)
{
    *c = (calls){form, tools, c->held, c->out, c->found, c->arguments, .plain = true};
}

/* ---- text ------------------------------------------------------------------------------------------------------- */

/* Adds text of the answer; blanks at its end wait for more. */
static void say(calls *c, const uint8_t *text, size_t count)
{
    bool between = c->plain && c->begun;
    for (size_t i = 0; i < count && between; i++)
        between = is_blank(text[i]) || text[i] == ';';
    if (between || count > 2 * MOST_HELD - c->blanks)
        return;
    memcpy(c->out + c->blanks, text, count);
    c->blanks += count;
    for (size_t end = count; end; end--)
        if (!is_blank(text[end - 1])) {
            c->said = c->blanks - count + end;
            c->plain = false;
            break;
        }
}

void calls_drop(calls *c)
{
    c->taken = c->said = c->blanks = 0;
}

bool calls_waits(const calls *c)
{
    return c->taken < c->said;
}

size_t calls_text(calls *c, char *out, size_t most)
{
    size_t count = c->said - c->taken;
    if (count > most)
        for (count = most; count && ((uint8_t)c->out[c->taken + count] & 0xC0) == 0x80;)
            count--;
    memcpy(out, c->out + c->taken, count);
    c->taken += count;
    if (c->taken == c->said) { /* to the beginning */
        memmove(c->out, c->out + c->said, c->blanks - c->said);
        c->blanks -= c->said;
        c->taken = c->said = 0;
    }
    return count;
}

/* ---- marks ------------------------------------------------------------------------------------------------------ */

static bool ends_with(const uint8_t *text, size_t count, span mark)
{
    return mark.length && count >= mark.length && !memcmp(text + count - mark.length, mark.bytes, mark.length);
}

/* Bytes at the end of a text with which a mark may begin. */
static size_t overlap(const uint8_t *text, size_t count, span mark)
{
    for (size_t longest = mark.length && count >= mark.length ? mark.length - 1 : mark.length ? count : 0; longest; longest--)
        if (!memcmp(text + count - longest, mark.bytes, longest))
            return longest;
    return 0;
}

/* Whether an answer may begin with this byte as a call without its mark. */
static bool starts(const calls *c, uint8_t byte)
{
    return c->form->bare && ((byte == '{' && c->form->body == CALL_JSON) || (byte == '[' && (c->form->body == CALL_JSON || c->form->body == CALL_PYTHON)));
}

/* Skips the rest of a malformed call. */
static void skip(calls *c)
{
    const span closing = c->form->closing;
    for (; closing.length && c->count - c->at >= closing.length; c->at++)
        if (!memcmp(c->held + c->at, closing.bytes, closing.length)) {
            c->from = c->at += closing.length;
            c->skips = false;
            return;
        }
    if (!closing.length)
        c->at = c->count;
    c->from = c->at;
}

/* Reads calls from c->at on, behind a mark. Returns false if more text must come first. */
static bool try_calls(calls *c, span mark)
{
    call_reader in = {c->form, c->tools, c->held, c->at, c->count, c->ended, .found = c->found, .arguments = c->arguments,
                      .complete = c->complete, .used = c->used};
    const bool full = c->from == 0 && c->count == MOST_HELD;
    reading_result result = read_calls(&in, mark);
    if (result == READ_MORE && !full)
        return false;
    const size_t start = c->from; /* of the mark */
    c->complete = in.complete;
    c->used = in.begun ? in.used : c->used; /* drops the arguments of text that was no call */
    c->begun += in.begun;
    c->was_cut |= in.open != 0;
    c->from = c->at = in.at;
    c->whole = !result;
    if (in.begun) {
        c->blanks = c->said;
        c->plain = true;
    }
    if (!result)
        return true;
    const bool by_end = c->ended && in.at == in.count;
    c->past |= by_end;
    if (in.open) {
        c->used = in.start;
        c->skips = true;
    } else if (mark.length && c->cut && c->past && c->form->body != CALL_HEADER) {
        c->whole = in.begun != 0; /* and no text */
        for (size_t i = in.after; i < in.at; i++)
            c->whole &= is_blank(in.text[i]);
    } else if (in.begun) { /* read the text behind the last call again */
        c->from = c->at = in.after;
    } else {
        const size_t said = mark.length ? mark.length : 1;
        c->plain = false;
        say(c, c->held + start, said);
        c->from = c->at = start + said;
    }
    return true;
}

static void read_text(calls *c)
{
    const span none = {"", 0}, marks[] = {c->form->opening, c->form->also};
    while (c->at < c->count || c->from < c->at) {
        if (c->skips) {
            skip(c);
            if (c->skips)
                return;
            continue;
        }
        if (c->from == c->at && c->plain && starts(c, c->held[c->at])) {
            if (!try_calls(c, none))
                return;
            continue;
        }
        span found = none;
        for (int i = 0; i < 2 && !found.length; i++)
            if (ends_with(c->held + c->from, c->at - c->from, marks[i]))
                found = marks[i];
        if (found.length) {
            const size_t start = c->at - found.length;
            say(c, c->held + c->from, start - c->from);
            c->from = start;
            if (!try_calls(c, found))
                return;
            continue;
        }
        size_t keep = 0;
        for (int i = 0; i < 2; i++) {
            const size_t own = overlap(c->held + c->from, c->at - c->from, marks[i]);
            keep = own > keep ? own : keep;
        }
        if (c->at - keep > c->from) {
            say(c, c->held + c->from, c->at - keep - c->from);
            c->from = c->at - keep;
            continue; /* a call without its mark may begin here */
        }
        if (c->at == c->count)
            return;
        c->at++;
    }
}

/* Moves the text that is still held to the beginning. */
static void make_room(calls *c)
{
    memmove(c->held, c->held + c->from, c->count - c->from);
    c->count -= c->from;
    c->at -= c->from;
    c->from = 0;
}

void calls_feed(calls *c, const char *text, size_t length)
{
    while (length) {
        make_room(c);
        const size_t part = length < MOST_HELD - c->count ? length : MOST_HELD - c->count;
        memcpy(c->held + c->count, text, part);
        c->count += part;
        text += part;
        length -= part;
        read_text(c);
    }
}

void calls_finish(calls *c, bool cut)
{
    c->ended = true;
    c->cut = cut;
    read_text(c);
    if (!c->skips)
        say(c, c->held + c->from, c->count - c->from);
    c->from = c->at = c->count;
    if (!(c->begun && c->plain))
        c->said = c->blanks;
}

bool calls_ended(const calls *c)
{
    return c->ended;
}

uint32_t calls_count(const calls *c)
{
    return c->complete;
}

const found_call *calls_at(const calls *c, uint32_t index)
{
    return c->found + index;
}

const char *calls_arguments(const calls *c, const found_call *call)
{
    return c->arguments + call->start;
}

bool calls_whole(const calls *c)
{
    return c->whole && c->plain;
}

bool calls_cut(const calls *c)
{
    return c->was_cut;
}
