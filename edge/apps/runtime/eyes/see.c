/* Pictures in a conversation: edge_image encodes one, whose rows wait for the text behind them. */
#include <string.h>

#include "budgets.h"
#include "bundle.h"
#include "chat.h"
#include "context.h"
#include "encoder.h"
#include "eyes.h"
#include "given.h"
#include "hash.h"
#include "kv.h"
#include "pass.h"
#include "policy.h"
#include "see.h"
#include "session.h"
#include "system.h"
#include "tokenizer.h"
#include "usage.h"

static const eyes_config *config_of(const edge_model *model, edge_error *error)
{
    const eyes_config *c = eyes_of(model);
    const bool right = c && c->projected == model->config->hidden && c->parts <= 1 + model->config->deepstack
        && !c->cells == !model->config->components;
    if (!right)
        edge_fail(error, EDGE_BAD_FILE, "model.edge is damaged (its eyes): copy or export it again");
    return right ? c : NULL;
}

static int64_t count_image(const edge_model *model, uint32_t width, uint32_t height, uint32_t most, edge_error *error)
{
    eyes_layout layout;
    const eyes_config *c = config_of(model, error);
    edge_status status = c ? eyes_lay_out(c, width, height, most, &layout, error) : EDGE_BAD_FILE;
    return status ? status : (int64_t)eyes_tokens(&layout);
}

/* ---- tokens ------------------------------------------------------------------------------------------------------------- */

/* The texts before a first picture, by the part of the chat template that they replace; EYES_TEXTS: none. */
static enum eyes_text text_before(uint32_t form)
{
    return form == CHAT_FIRST ? EYES_TEXT_FIRST : form == CHAT_AFTER_SYSTEM ? EYES_TEXT_AFTER_SYSTEM
        : form == CHAT_NEXT ? EYES_TEXT_NEXT : EYES_TEXTS;
}

static bool takes_image(const edge_session *s, uint32_t form)
{
    const eyes_config *c = eyes_of(s->model);
    const enum eyes_text text = text_before(form);
    return c && (text == EYES_TEXTS || c->chats >> text & 1);
}

/* Text of the template and of layouts, which is encoded together up to the next rows. */
typedef struct { appending to; bool starts; uint32_t length; char text[2 * LONGEST_MARK]; } spoken;

static void add_text(spoken *p, const char *text, size_t length)
{
    memcpy(p->text + p->length, text, length); /* eyes_of has checked lengths */
    p->length += (uint32_t)length;
}

static void encode_text(spoken *p)
{
    if (p->length)
        tokenizer_encode(p->to.session->tokenizer, p->text, p->length, true, p->starts, push_ids, &p->to);
    p->starts = false;
    p->length = 0;
}

static void say_picture(spoken *p, const eyes_config *c, const picture_rows *picture)
{
    char mark[LONGEST_MARK];
    uint32_t tiles = picture->down * picture->across;
    eyes_layout layout = {.down = picture->down, .across = picture->across, .tiles = tiles > 1 ? tiles + 1 : 1};
    int32_t id = picture->first;
    for (uint32_t tile = 0; tile < layout.tiles; tile++) {
        const bool last = tile == layout.tiles - 1;
        const int32_t stop = last ? picture->first + (int32_t)picture->count : id + (int32_t)picture->each;
        add_text(p, mark, eyes_mark(c, &layout, tile, mark));
        encode_text(p);
        for (; id < stop; id++)
            push_ids(&p->to, &id, 1);
    }
    add_text(p, mark, eyes_mark(c, &layout, layout.tiles, mark));
}

static void say_images(edge_session *s, uint32_t form, int32_t bos)
{
    const eyes_config *c = eyes_of(s->model);
    const enum eyes_text before = text_before(form);
    spoken p = {.to = {s, bos}, .starts = s->turn == TURN_NEW};
    const char *text = before == EYES_TEXTS ? "" : eyes_text(c, before);
    const uint32_t first = s->shown;
    s->shown = given_count(s->given); /* so that passes that run meanwhile know them */
    for (uint32_t number = first; number < s->shown; number++) {
        add_text(&p, text, strlen(text));
        say_picture(&p, c, given_picture(s->given, number));
        text = eyes_text(c, EYES_TEXT_BETWEEN);
    }
    text = before == EYES_TEXTS ? "" : eyes_text(c, EYES_TEXT_AFTER);
    add_text(&p, text, strlen(text));
    encode_text(&p);
}

/* ---- edge_image --------------------------------------------------------------------------------------------------------- */

static void hash_picture(const edge_session *s, const edge_picture *picture, const eyes_layout *layout, uint8_t digest[32])
{
    hasher h;
    hash_start(&h);
    hash_add(&h, EDGE_SEES->trusted, sizeof EDGE_SEES->trusted);
    hash_add(&h, s->model->sections[SECTION_EYES], s->model->sizes[SECTION_EYES]);
    hash_add(&h, &picture->width, sizeof picture->width);
    hash_add(&h, &picture->channels, sizeof picture->channels);
    hash_add(&h, layout, sizeof *layout);
    for (uint32_t y = 0; y < picture->height; y++)
        hash_add(&h, (const uint8_t *)picture->pixels + (size_t)y * picture->stride, (uint64_t)picture->width * picture->channels);
    hash_end(&h, digest);
}

/* Rows of pictures that wait for a text. */
static uint32_t rows_behind(const edge_session *s)
{
    uint32_t found = 0;
    for (uint32_t number = s->shown; number < given_count(s->given); number++)
        found += given_picture(s->given, number)->count;
    return found;
}

/* Puts zeros behind the values of each row, for which there is room. */
static void widen(float *rows, uint32_t count, uint32_t width, uint32_t wider)
{
    for (uint32_t row = count; row-- > 0 && width < wider;) {
        memmove(rows + (size_t)row * wider, rows + (size_t)row * width, width * sizeof *rows);
        memset(rows + (size_t)row * wider + width, 0, (wider - width) * sizeof *rows);
    }
}

edge_status see_medium(edge_session *s, const edge_source *source, const seen_medium *medium, picture_rows shown, edge_error *error)
{
    const uint32_t count = shown.count, capacity = kv_capacity(s->rows), pinned = policy_pinned(s->policy);
    const uint32_t waiting = s->waiting + rows_behind(s);
    edge_status status;
    if (count + pinned + 1 > capacity || (!policy_evicts(s->policy) && count + waiting > kv_free(s->rows)))
        return edge_fail(error, EDGE_FULL, "the %s's %d tokens do not fit into the KV rows that are free (%d): %s, rewind, or export "
                         "with more rows", medium->called, (int64_t)count, (int64_t)kv_free(s->rows), medium->advice);
    if (given_count(s->given) == MOST_PICTURES)
        return edge_fail(error, EDGE_FULL, "the conversation has %d %ss, the most: rewind all turns", (int64_t)MOST_PICTURES, medium->called);
    shown.width = s->model->config->hidden * (1 + s->model->config->deepstack);
    const uint64_t bytes = (uint64_t)count * shown.width * sizeof *shown.rows;
    shown.rows = map_memory(bytes);
    if (!shown.rows)
        return edge_fail(error, EDGE_NO_MEMORY, "no memory is left for the rows of a %s: end other sessions", medium->called);
    encoder *e;
    const uint32_t threads = pass_threads(s->pass);
    const uint64_t mask = s->next_options.cpu_mask;
    watch own;
    watch_start(&own, s->model->config, &s->next_options, &s->readings);
    pass_stop(s->pass); /* its threads would wait: the encoder's run in their place */
    status = encoder_open(EDGE_SEES, source, NULL, threads, mask, &e, error);
    if (!status) {
        const edge_config *of_encoder = encoder_model(e)->config;
        const uint64_t passes = (medium->patches + of_encoder->capacity - 1) / of_encoder->capacity;
        watch_bytes(&own, (double)passes * (double)of_encoder->weight_bytes);
        s->encoder = e;
        note_usage(s);
        status = medium->encode(e, medium->own, &s->cancelled, shown.rows, error);
        s->encoder = NULL;
    }
    s->picture_joules += watch_joules(&own);
    s->picture_seconds += now_seconds() - own.started;
    if (!status) {
        widen(shown.rows, count, medium->width, shown.width);
        given_add(s->given, shown);
    } else {
        unmap_memory(shown.rows, bytes);
    }
    encoder_close(e);
    pass_start_some(s->pass, threads, mask);
    return status;
}

typedef struct { const eyes_config *config; const edge_picture *picture; eyes_layout layout; } shown_picture;

static edge_status encode_picture(encoder *e, const void *of, const volatile int32_t *cancelled, float *rows, edge_error *error)
{
    const shown_picture *own = of;
    return eyes_encode(e, own->config, own->picture, &own->layout, cancelled, rows, error);
}

static edge_status show_image(edge_session *s, const edge_source *source, const edge_picture *picture, edge_error *error)
{
    shown_picture own = {config_of(s->model, error), picture, {0}};
    const eyes_config *c = own.config;
    if (!c)
        return EDGE_BAD_FILE;
    edge_status status = eyes_lay_out(c, picture->width, picture->height, picture->tokens, &own.layout, error);
    if (status)
        return status;
    const eyes_layout *layout = &own.layout;
    picture_rows shown = {.count = eyes_tokens(layout), .down = layout->down, .across = layout->across, .each = layout->each,
                          .whole = c->whole};
    if (c->cells)
        shown.grid_down = layout->last_down / c->join, shown.grid_across = layout->last_across / c->join;
    hash_picture(s, picture, layout, shown.hash);
    const seen_medium medium = {"picture", "allow fewer tokens", (uint64_t)shown.count * c->join * c->join, eyes_width(c), encode_picture, &own};
    return see_medium(s, source, &medium, shown, error);
}

const eyes_kind edge_eyes = {count_image, show_image, takes_image, say_images};
