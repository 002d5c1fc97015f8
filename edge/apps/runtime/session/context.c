/* The conversation: KV rows of the tokens that have run, and tokens that wait. A port of
 * edge/run/sequences/sequence.py and of `prefill` in edge/run/decoding/loop.py. */
#include <math.h>
#include <string.h>

#include "budgets.h"
#include "bundle.h"
#include "constraint.h"
#include "context.h"
#include "drafts.h"
#include "encoder.h"
#include "given.h"
#include "kv.h"
#include "pass.h"
#include "policy.h"
#include "reclaim.h"
#include "sampler.h"
#include "system.h"
#include "usage.h"

static void forget_pictures(edge_session *s)
{
    if (s->given)
        given_clear(s->given);
    policy_forget(s->policy);
    s->shown = 0;
}

/* Tells what drafts that the last pass has run `count` tokens. */
static void note_states(edge_session *s, const int32_t *tokens, uint32_t count)
{
    if (s->own_drafts && EDGE_DRAFTER->ran)
        EDGE_DRAFTER->ran(s->own_drafts, tokens, count);
}

void context_truncate(edge_session *s, uint32_t rows)
{
    kv_truncate(s->rows, rows);
    note_states(s, NULL, 0);
}

void context_reset(edge_session *s)
{
    context_truncate(s, 0);
    if (s->drafts)
        drafts_clear(s->drafts);
    policy_pin(s->policy, 0, kv_capacity(s->rows));
    s->first = s->waiting = s->turns = s->turn_rows = s->system_rows = 0;
    s->evicted = 0;
    forget_pictures(s);
    context_settle(s);
}

/* The rows may stay unless they depend on later text: by observed attention, or by the choice of LongRoPE factors. */
void context_restart(edge_session *s)
{
    uint32_t rows = s->system_count ? s->system_rows : 0;
    bool stay = rows && !s->evicted && kv_length(s->rows) >= rows && kv_can_truncate(s->rows, rows) &&
                !policy_observes(s->policy) && !s->model->config->long_from;
    if (!stay) {
        context_reset(s);
        return;
    }
    context_truncate(s, rows);
    s->first = s->waiting = s->turns = s->turn_rows = 0;
    forget_pictures(s);
    context_settle(s);
}

void context_drop(edge_session *s)
{
    if (!s->drafted)
        return;
    if (!s->picked)
        drafts_judge(s->drafts, s->drafted, s->drafted - s->ahead);
    pass_settle(s->pass, s->ahead);
    if (s->own_drafts && EDGE_DRAFTER->drop)
        EDGE_DRAFTER->drop(s->own_drafts, s->ahead);
    s->drafted = s->ahead = 0;
}

void context_settle(edge_session *s)
{
    s->started = false;
    s->turn_ran = s->ran;
    __atomic_store_n(&s->cancelled, 0, __ATOMIC_RELAXED); /* a question that waits can be answered */
    s->stopped = s->finish = EDGE_GOING;
    s->text_at = s->text_end = 0;
}

static bool make_room(edge_session *s, uint32_t count)
{
    uint64_t before = s->evicted;
    bool fits = policy_make_room(s->policy, s->rows, count, &s->evicted);
    s->all_evicted += s->evicted - before;
    return fits;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* Tokens per pass for a prompt of `count` tokens. */
static uint32_t chunk_for(const edge_session *s, uint32_t count)
{
    uint32_t capacity = kv_capacity(s->rows);
    if (count > kv_free(s->rows) && s->chunk > capacity / 2) /* an unplanned eviction must leave most rows */
        return evicted_share(capacity);
    return s->chunk;
}

/* Reclaimable bytes, if a new reading of memory makes the next look at budgets ask for them. */
static double spare_bytes(const edge_session *s)
{
    return s->watch.memory_is_new ? reclaimable(s) : 0;
}

/* Before each pass: waits, returns memory or stops, as budgets, the system and the app demand. tokens: run since the last
 * call. */
edge_finish context_look(edge_session *s, uint32_t tokens)
{
    double wanted = 0;
    if (__atomic_load_n(&s->trim, __ATOMIC_RELAXED))
        reclaim_trim(s);
    note_usage(s);
    edge_finish reason = watch_look(&s->watch, tokens, &s->cancelled, s->needed, spare_bytes(s), &wanted);
    if (wanted > 0)
        reclaim(s, wanted);
    return __atomic_load_n(&s->cancelled, __ATOMIC_RELAXED) ? EDGE_INTERRUPTED : reason;
}

void context_pay(edge_session *s)
{
    double wanted = 0;
    watch_pay(&s->watch, &s->cancelled, s->needed, spare_bytes(s), &wanted);
    if (wanted > 0)
        reclaim(s, wanted);
}

/* Notes the pictures of `count` rows behind `length`, of tokens that have run. */
static void note_pictures(edge_session *s, uint32_t length, uint32_t count)
{
    const int32_t *ids = s->ids + s->first;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = given_find(s->given, ids[i]);
        policy_show(s->policy, length + i, number < given_count(s->given) ? number + 1 : 0);
    }
    if (!context_has_tail(s)) /* else they may run again */
        given_ran(s->given, ids, count);
}

/* Notes that `count` waiting tokens have run, behind `length` rows. */
static void note(edge_session *s, uint32_t length, uint32_t count)
{
    if (s->given)
        note_pictures(s, length, count);
    if (context_has_tail(s) && !s->evicted)
        memcpy(s->run_ids + length, s->ids + s->first, count * sizeof *s->run_ids);
    s->first += count;
    s->waiting -= count;
    s->ran += count;
}

void context_note_share(edge_session *s, double share)
{
    double rows = (double)kv_used(s->rows) / (double)kv_capacity(s->rows);
    watch_bytes(&s->watch, share * ((double)s->model->config->weight_bytes + (double)kv_fixed(s->rows) +
                                    (double)kv_bytes(s->rows) * rows));
}

static void note_bytes(edge_session *s)
{
    context_note_share(s, 1);
}

static bool run(edge_session *s, uint32_t count, picking *pick)
{
    uint32_t length = kv_length(s->rows);
    if (length && (length == s->turn_rows || length == s->system_rows ||
                   (length < s->turn_rows && length % SNAPSHOT_STEP == 0)) && pass_catch_up(s->pass))
        kv_remember(s->rows, s->system_rows);
    double began = now_seconds(), cpu = cpu_seconds();
    s->state_row = count - 1;
    s->logits = pass_run(s->pass, s->ids + s->first, count, policy_observes(s->policy) ? count : 0, pick);
    if (s->accelerator && s->accelerator->kind->engine == EDGE_ENGINE_GPU)
        watch_gpu(&s->watch, (now_seconds() - began) * s->model->config->threads, cpu_seconds() - cpu);
    if (!s->logits)
        return false;
    s->picked = pick && pick->count;
    note_bytes(s);
    note_states(s, s->ids + s->first, count);
    note(s, length, count);
    return true;
}

static void start(edge_session *s)
{
    s->started = true;
    if (s->drafts)
        drafts_begin(s->drafts);
    s->options = s->next_options;
    if (s->new_stops) {
        stops *before = s->stops;
        s->stops = s->next_stops;
        s->next_stops = before;
        s->new_stops = false;
    }
    s->last = 0;
    s->generated = 0;
    s->failed = s->picked = false;
    s->pace = BURST_S;
    s->pass_size = chunk_for(s, s->waiting);
    watch_start(&s->watch, s->model->config, &s->options, &s->readings);
}

/* Of `count` tokens, those before the next snapshot: `run` takes one at the end of the system prompt, at the beginning of
 * the last turn, and every SNAPSHOT_STEP tokens before it, so that edge_rewind can return there. */
static uint32_t up_to_turn(const edge_session *s, uint32_t count)
{
    uint32_t length = kv_length(s->rows), step = SNAPSHOT_STEP - length % SNAPSHOT_STEP;
    if (!kv_remembered(s->rows) || s->waiting > kv_free(s->rows))
        return count;
    if (s->system_rows > length)
        count = smaller(count, s->system_rows - length);
    return s->turn_rows > length ? smaller(count, smaller(step, s->turn_rows - length)) : count;
}

/* How many of the waiting tokens to run in a pass of about `count`, a port of GivenRows.undivided: so that it divides
 * no picture that is whole. *room: rows that it needs: all of a picture that it begins, before which it ends if both
 * are too many. */
static uint32_t undivided(const edge_session *s, uint32_t count, uint32_t *room)
{
    const int32_t *ids = s->ids + s->first;
    uint32_t number = s->shown ? given_find(s->given, ids[count - 1]) : 0, begin = count - 1, end = count, run = count;
    *room = count;
    if (!s->shown || number == given_count(s->given))
        return count;
    const picture_rows *p = given_picture(s->given, number);
    while (begin && ids[begin] != p->first)
        begin--;
    while (end < s->waiting && ids[end - 1] != p->first + (int32_t)p->count - 1)
        end++;
    if (end == count)
        return count;
    if (p->whole || (begin && end > kv_capacity(s->rows) - policy_pinned(s->policy)))
        run = begin ? begin : smaller(end, s->model->config->chunk);
    *room = end > run && begin < run ? smaller(end, kv_capacity(s->rows)) : run;
    return run;
}

/* Runs one pass of the prompt, if tokens wait. */
static edge_finish run_chunk(edge_session *s)
{
    if (!s->started)
        start(s);
    edge_finish reason = context_look(s, s->last);
    uint32_t left = s->waiting, size = chunk_for(s, left);
    s->last = 0;
    if (reason || !left)
        return reason;
    if (s->pass_size > size)
        s->pass_size = size;
    int64_t count = watch_affordable(&s->watch, up_to_turn(s, s->pass_size < left ? s->pass_size : left));
    if (count <= 0)
        return EDGE_ENERGY;
    uint32_t room;
    count = undivided(s, (uint32_t)count, &room);
    if (watch_affordable(&s->watch, (uint32_t)count) < count)
        return EDGE_ENERGY;
    if (!pass_reaches(s->pass, (uint32_t)count))
        return EDGE_CAPACITY;
    if (!make_room(s, room))
        return EDGE_MEMORY; /* planned rows were returned to the system */
    kv_announce(s->rows, left);
    if (s->drafts)
        drafts_add(s->drafts, s->ids + s->first, (uint32_t)count);
    if (!run(s, (uint32_t)count, NULL)) {
        s->failed = !__atomic_load_n(&s->cancelled, __ATOMIC_RELAXED);
        return EDGE_INTERRUPTED;
    }
    s->last = (uint32_t)count;
    return EDGE_GOING;
}

edge_finish context_prompt(edge_session *s)
{
    if (!s->started) /* the time of an answer counts even if it ends before its first pass */
        start(s);
    const bool all = !s->waiting;
    if (!s->stopped)
        s->stopped = run_chunk(s);
    if (!s->stopped && !all && !s->waiting)
        s->stopped = run_chunk(s); /* checks budgets after the last pass, too */
    return s->stopped;
}

/* ---- tokens ahead of the answer ----------------------------------------------------------------------------------- */

/* Of `most` tokens, those that one pass may run without an eviction and within budgets. */
static uint32_t room_ahead(const edge_session *s, uint32_t most)
{
    most = smaller(most, kv_free(s->rows));
    if (s->options.max_tokens)
        most = smaller(most, s->options.max_tokens - s->generated);
    most = kv_at_once(s->rows, most);
    while (most > 1 && !pass_reaches(s->pass, most))
        most--;
    int64_t count = most > 1 ? watch_affordable(&s->watch, most) : 1;
    return count > 1 ? (uint32_t)count : 1;
}

static uint32_t ask_layers(void *of, uint32_t most, int32_t *draft, double *seconds)
{
    edge_session *s = of;
    const double began = now_seconds();
    const uint32_t count = EDGE_DRAFTER->draft(s->own_drafts, s->ids[s->first], s->state_row, most, draft);
    *seconds = now_seconds() - began;
    return count;
}

/* Writes drafts behind the token of the next pass; returns their number. */
static uint32_t propose(edge_session *s)
{
    if (!s->drafts || s->options.speculate == EDGE_SPECULATE_OFF)
        return 0;
    uint32_t most = room_ahead(s, 1 + pass_drafts(s->pass));
    const drafter by = {s->own_drafts ? EDGE_DRAFTER->share(s->model->draft, s->model) : 0, s, ask_layers};
    uint32_t count = most > 1 ? drafts_propose(s->drafts, most - 1, kv_length(s->rows), s->own_drafts ? &by : NULL, s->draft + 1) : 0;
    for (uint32_t i = 0; i < count; i++)
        if ((uint32_t)s->draft[1 + i] >= s->model->config->vocab) /* of a picture */
            count = i;
    return count;
}

/* Tokens that an accelerator may choose at once, by the rule of `Ahead` in edge/run/drafting/ahead.py. */
static uint32_t burst(const edge_session *s)
{
    double fits = BURST_S / s->pace;
    uint32_t most = smaller(pass_picks(s->pass), 1 + s->generated / PICKED_IN_VAIN);
    most = fits < most ? (uint32_t)fits : most;
    return room_ahead(s, most > 1 ? most : 1);
}

/* Whether an accelerator may choose the tokens behind the waiting one, or return only few logits. */
static bool may_pick(const edge_session *s, picking *pick)
{
    if (!pass_picks(s->pass) || has_form(s))
        return false;
    if (sampler_picks(s->sampler, pick->banned, &pick->banned_count))
        pick->most = burst(s);
    return pick->most || pick->enough;
}

/* Runs the waiting token, and those that an accelerator chooses behind it. */
static bool run_picked(edge_session *s, picking *pick)
{
    double before = now_seconds();
    if (!run(s, 1, pick))
        return false;
    if (!pick->count)
        return true;
    s->drafted = s->ahead = pick->count - 1;
    s->last = pick->count;
    for (uint32_t passes = 1; passes < pick->count; passes++)
        note_bytes(s);
    s->pace = (now_seconds() - before) / pick->count;
    return true;
}

/* Runs the waiting token, perhaps with drafts or an accelerator's choice behind it. */
static bool run_ahead(edge_session *s)
{
    picking pick = {.chosen = s->draft + 1, .enough = has_form(s) ? 0 : sampler_candidates(s->sampler)};
    if (s->drafts)
        drafts_add(s->drafts, s->ids + s->first, 1);
    if (may_pick(s, &pick))
        return run_picked(s, &pick);
    uint32_t length = kv_length(s->rows), count = 1 + propose(s);
    bool timed = s->drafts && pass_drafts(s->pass); /* false while an accelerator may decline */
    double before = now_seconds();
    bool ran = count > 1 || run(s, 1, pick.enough ? &pick : NULL);
    if (count > 1) {
        s->picked = false;
        s->draft[0] = s->ids[s->first];
        s->state_row = 0;
        s->logits = pass_verify(s->pass, s->draft, count);
        ran = s->logits != NULL;
    }
    if (!ran)
        return false;
    if (timed)
        drafts_time(s->drafts, count, length, now_seconds() - before);
    if (count > 1) {
        s->drafted = s->ahead = count - 1;
        s->all_drafted += s->drafted;
        note_bytes(s);
        note_states(s, s->draft, count);
        note(s, length, 1);
    }
    return true;
}

/* The generated token was drafted or chosen, so that it has run: takes its logits, or the choice behind it. */
static void take_ahead(edge_session *s)
{
    note(s, kv_length(s->rows) - s->ahead, 1);
    s->ahead--;
    if (s->drafts)
        drafts_add(s->drafts, s->ids + s->first - 1, 1);
    if (s->picked)
        return;
    s->logits += s->model->config->padded_vocab;
    s->state_row++;
    s->accepted++;
}

edge_finish context_step(edge_session *s)
{
    edge_finish reason;
    if (s->ahead && s->draft[1 + s->drafted - s->ahead] == s->ids[s->first]) {
        reason = __atomic_load_n(&s->cancelled, __ATOMIC_RELAXED) ? EDGE_INTERRUPTED : watch_spent(&s->watch);
        if (!reason)
            take_ahead(s);
        return reason;
    }
    context_drop(s);
    if ((reason = context_look(s, s->last ? s->last : 1)))
        return reason;
    s->last = 1;
    if (!pass_reaches(s->pass, 1))
        return EDGE_CAPACITY;
    if (!make_room(s, 1))
        return kv_capacity(s->rows) == s->model->config->capacity ? EDGE_CAPACITY : EDGE_MEMORY;
    if (run_ahead(s))
        return EDGE_GOING;
    s->failed = true;
    return EDGE_INTERRUPTED;
}

/* ---- transcripts -------------------------------------------------------------------------------------------------- */

void context_begin(edge_session *s)
{
    context_settle(s);
    start(s);
}

void context_end(edge_session *s)
{
    context_pay(s);
    s->seconds = now_seconds() - s->watch.started;
    s->joules = watch_joules(&s->watch);
    context_settle(s);
}

/* Tokens that must wait before the next chunk can be decided, as in `read_ahead` of edge/run/decoding/loop.py. */
static uint32_t tokens_ahead(const edge_session *s)
{
    uint32_t held = s->model->config->capacity + s->model->config->chunk, wanted = kv_foresight(s->rows);
    return held > wanted ? held : wanted;
}

bool context_push(edge_session *s, const int32_t *ids, size_t count)
{
    if (!policy_evicts(s->policy) && count + s->waiting + s->reserved > kv_free(s->rows)) {
        s->full = true;
        return false;
    }
    while (count) {
        while (s->waiting >= tokens_ahead(s) && !s->stopped)
            s->stopped = run_chunk(s);
        if (s->stopped)
            return false;
        if (s->first) {
            memmove(s->ids, s->ids + s->first, s->waiting * sizeof *ids);
            s->first = 0;
        }
        size_t part = count < s->room - s->waiting ? count : s->room - s->waiting;
        memcpy(s->ids + s->waiting, ids, part * sizeof *ids);
        s->waiting += (uint32_t)part;
        ids += part;
        count -= part;
    }
    return true;
}
