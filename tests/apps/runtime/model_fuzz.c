/* A fuzzer over model.edge: damages a copy in memory again and again, also the file in its section DRAFT, repairs the checksums in
 * half of the cases, and opens it. What opens is used: text to ids and back, angles, tables; with -DWITH_SESSIONS now and then a conversation. It is built with ASan and UBSan, so that any access
 * outside the file ends it.
 *
 *     model_fuzz FILE COUNT SEED    prints how many opened, of how many
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <sanitizer/asan_interface.h>

#include "model.h"
#include "system.h"
#include "tokenizer.h"

/* The system's files are replaced by the copy. */
#define map_file mapped_by_the_system
#define unmap_file unmapped_by_the_system
#define read_file read_by_the_system
#include "platform.c"
#undef map_file
#undef unmap_file
#undef read_file

enum { MOST_UNDONE = 64, PAGE = 16384 };
static const uint64_t AROUND = 1ull << 32; /* bytes before and behind the copy that even compiled code cannot read */

static uint8_t *copy;
static uint64_t size, shown;
static uint64_t state;
static void *work;

static uint64_t draw(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

edge_status map_file(const edge_source *source, mapping *file, edge_error *error)
{
    (void)source;
    (void)error;
    *file = (mapping){.data = copy, .size = shown};
    return EDGE_OK;
}

void unmap_file(mapping *file)
{
    (void)file;
}

bool read_file(const mapping *file, uint64_t at, void *to, uint64_t length)
{
    if (at > file->size || length > file->size - at)
        return false;
    memcpy(to, copy + at, length);
    return true;
}

static uint32_t sum_of(const uint8_t *data, uint64_t length) /* CRC-32, bit by bit */
{
    static uint32_t table[256];
    if (!table[1])
        for (uint32_t i = 0; i < 256; i++) {
            table[i] = i;
            for (int bit = 0; bit < 8; bit++)
                table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xEDB88320 : 0);
        }
    uint32_t sum = ~0u;
    for (uint64_t i = 0; i < length; i++)
        sum = sum >> 8 ^ table[(sum ^ data[i]) & 255];
    return ~sum;
}

/* Bytes that were changed, to be put back. */
static struct { uint64_t at; uint8_t was[8]; } undo[MOST_UNDONE];
static uint32_t undone;

static void change(uint64_t at, const void *bytes, uint64_t count)
{
    if (at >= size || undone == MOST_UNDONE)
        return;
    count = count < size - at ? count : size - at;
    uint64_t room = size - at < 8 ? size - at : 8;
    undo[undone].at = at;
    memcpy(undo[undone++].was, copy + at, room);
    memcpy(copy + at, bytes, count);
}

static void put_back(void)
{
    while (undone--)
        memcpy(copy + undo[undone].at, undo[undone].was, size - undo[undone].at < 8 ? size - undo[undone].at : 8);
    undone = 0;
}

/* begin: of the file, or of the one inside it. */
static void repair(uint64_t begin)
{
    const file_header *header = (const file_header *)(copy + begin);
    const uint64_t room = size - begin;
    for (uint32_t i = 0; i < header->sections && i < SECTIONS; i++) {
        uint64_t place = begin + sizeof *header + i * sizeof(file_section);
        file_section each;
        if (place + sizeof each > size)
            return;
        memcpy(&each, copy + place, sizeof each);
        if (each.kind == SECTION_WEIGHTS || each.kind == SECTION_TOKENIZER || each.kind == SECTION_DRAFT || each.offset > room
            || each.size > room - each.offset)
            continue;
        uint32_t sum = sum_of(copy + begin + each.offset, each.size);
        if (sum != each.crc)
            change(place + offsetof(file_section, crc), &sum, sizeof sum);
    }
}

/* Cuts a section short and moves it to the end of its file. */
static void move(const file_section *entry, uint64_t end)
{
    const uint64_t at = end / PAGE * PAGE, left = end - at;
    change((uint64_t)((const uint8_t *)&entry->offset - copy), &at, sizeof at);
    change((uint64_t)((const uint8_t *)&entry->size - copy), &left, sizeof left);
}

static void damage(uint64_t begin)
{
    static const uint64_t telling[] = {0, 1, 2, 15, 16, 63, 255, 256, 0x7F, 0x80, 0xFFFF, 0x10000, 0x7FFFFFFF,
                                       0x80000000, 0xFFFFFFFF, 0x100000000, 0x7FFFFFFFFFFFFFFF, ~0ull};
    const file_header *header = (const file_header *)(copy + begin);
    const file_section *entries = (const file_section *)(header + 1);
    const uint32_t sections = header->sections;
    uint64_t head = sizeof *header + sections * sizeof *entries;
    uint32_t which = (uint32_t)draw(sections + 1); /* 0: the header and the table */
    uint64_t at = begin, length = head;
    if (which) {
        const file_section *each = entries + which - 1;
        if (!draw(16))
            move(each, header->resident);
        at += each->offset;
        length = each->kind == SECTION_WEIGHTS || each->kind == SECTION_DRAFT ? 0 : each->size;
    }
    for (uint64_t i = 1 + draw(3); length && i; i--) {
        uint64_t width = 1ull << draw(4), value = draw(2) ? telling[draw(sizeof telling / 8)] : draw(~0ull);
        uint64_t place = at + draw(length) / width * width;
        if (!draw(3) && place + 8 <= size) { /* a little more or less */
            memcpy(&value, copy + place, 8);
            value += draw(2) ? 1 + draw(16) : -(1 + draw(16));
        }
        change(place, &value, width);
    }
    if (!draw(16))
        shown = draw(size + 1);
}

static bool count_ids(void *to, const int32_t *ids, size_t count)
{
    (void)ids;
    *(uint64_t *)to += count;
    return true;
}

static void use(edge_model *model)
{
    static const char text[] = "Hello, wörld!  123 \xF0\x9F\x99\x82<|im_start|>\n\t x\xFF\xC3";
    edge_model_info info = {.size = sizeof info};
    edge_info(model, &info, NULL);
    for (uint32_t kind = 0; kind < model->config->rope_kinds; kind++)
        state += find_angles(model, kind, true)->pairs & 1;
    const design_config *designs, *found;
    for (uint32_t i = model_designs(model, &designs); i--;)
        find_design(model, designs[i].isa, &found, NULL);
    if (model->sizes[SECTION_TOKENIZER]) {
        arena counted = {NULL, 0};
        tokenizer_layout(&counted, model);
        if (!work && posix_memalign(&work, 64, counted.used)) /* 8 MB, of which little is used */
            return;
        arena real = {work, 0};
        tokenizer *t = tokenizer_layout(&real, model);
        uint64_t ids = 0;
        tokenizer_encode(t, text, sizeof text - 1, draw(2), draw(2), count_ids, &ids);
        for (int i = 0; i < 4; i++) {
            size_t length = 0;
            int32_t token = (int32_t)draw(model->config->vocab);
            const uint8_t *piece = vocabulary_piece(tokenizer_vocabulary(t), token, &length);
            for (size_t at = 0; piece && at < length; at++)
                state += piece[at] & 1;
            state += vocabulary_ends(tokenizer_vocabulary(t), token);
        }
    }
}

#ifdef WITH_SESSIONS
/* Two turns, on one thread. */
static void converse(edge_model *model)
{
    edge_options options = EDGE_OPTIONS;
    options.threads = 1;
    options.max_tokens = 6;
    edge_session *session;
    if (edge_begin(model, &options, &session, NULL))
        return;
    static const edge_role roles[] = {EDGE_SYSTEM, EDGE_USER, EDGE_RAW};
    for (int turn = 0; turn < 2; turn++) {
        edge_append(session, roles[draw(3)], "Be kind. Hi!", 1 + draw(12), NULL);
        edge_piece piece = {.size = sizeof piece};
        while (!edge_next(session, &piece, NULL) && !piece.finish)
            ;
    }
    edge_end(session);
}
#else
static void converse(edge_model *model)
{
    (void)model;
}
#endif

int main(int count, char **arguments)
{
    FILE *file = count == 4 ? fopen(arguments[1], "rb") : NULL;
    if (!file || fseek(file, 0, SEEK_END))
        return fprintf(stderr, "usage: model_fuzz FILE COUNT SEED\n"), 2;
    size = shown = (uint64_t)ftell(file);
    rewind(file);
    const uint64_t whole = (size + PAGE - 1) / PAGE * PAGE;
    uint8_t *memory = mmap(NULL, 2 * AROUND + whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return 2;
    copy = memory + AROUND + (PAGE - (uintptr_t)memory % PAGE) % PAGE;
    if (mprotect(copy, whole, PROT_READ | PROT_WRITE) || fread(copy, size, 1, file) != 1)
        return 2;
    fclose(file);
    __asan_poison_memory_region(copy + size, whole - size);
    const file_header *header = (const file_header *)copy;
    const file_section *entries = (const file_section *)(header + 1);
    uint64_t inner = 0; /* where the file in section DRAFT begins */
    for (uint32_t i = 0; i < header->sections; i++)
        inner = entries[i].kind == SECTION_DRAFT ? entries[i].offset : inner;
    uint64_t runs = strtoull(arguments[2], NULL, 10), opened = 0;
    state = strtoull(arguments[3], NULL, 10) * 0x9E3779B97F4A7C15 + 1;
    edge_source source = {.size = sizeof source, .path = "copy"};
    for (uint64_t run = 0; run <= runs; run++) {
        if (run) { /* the first one is as it was made */
            const uint64_t begin = inner && draw(2) ? inner : 0;
            damage(begin);
            if (draw(2))
                repair(begin);
        }
        edge_error error = {.size = sizeof error};
        edge_model *model;
        edge_status status = edge_open(&source, &model, &error);
        if (status != EDGE_OK && (status != error.code || !error.message[0]))
            return fprintf(stderr, "run %llu: an error without a message\n", (unsigned long long)run), 1;
        if (status && !run)
            return fprintf(stderr, "the file itself: %s\n", error.message), 1;
        if (!status) {
            opened++;
            use(model);
            if (!draw(8))
                converse(model);
            edge_close(model, NULL);
        }
        put_back();
        shown = size;
    }
    free(work);
    printf("%llu of %llu\n", (unsigned long long)opened - 1, (unsigned long long)runs);
    return 0;
}
