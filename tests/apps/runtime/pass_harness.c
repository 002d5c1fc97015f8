/* Runs passes of a model.edge without a session:
 *
 *     pass MODEL ISA THREADS CPUS INPUT OUTPUT
 *
 * INPUT is int32: 1 if attention is observed, the number of passes, and of each the number of its tokens, negative if
 * threads end and start anew before it, and the tokens. OUTPUT is float32: logits of each pass, and then, if it is observed,
 * the attention that each head's rows have received.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kv.h"
#include "model.h"
#include "pass.h"
#include "system.h"

static edge_error failure = {sizeof failure, 0, ""};

static int complain(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, failure.message);
    return 1;
}

static void lay_out(arena *from, const edge_model *model, const design_config *design, kv **rows, pass **made)
{
    *rows = kv_layout(from, model, false);
    *made = pass_layout(from, model, design, *rows, NULL);
}

static void write_attention(const kv *rows, int out)
{
    for (uint32_t head = 0; head < kv_heads(rows); head++) {
        uint32_t length = kv_length(rows);
        float *paid = calloc(length, sizeof *paid);
        int32_t *ages = calloc(length, sizeof *ages);
        if (paid && ages) {
            kv_attention(rows, head, paid, ages);
            write_fd(out, paid, length * sizeof *paid);
        }
        free(paid);
        free(ages);
    }
}

int main(int count, char **values)
{
    if (count != 7)
        return complain("usage: pass MODEL ISA THREADS CPUS INPUT OUTPUT");
    edge_model model;
    edge_source source = {sizeof source, values[1], -1, 0, 0};
    const design_config *design;
    if (model_map(&source, &model, &failure) || find_design(&model, values[2], &design, &failure))
        return complain("model.edge");
    uint32_t threads = (uint32_t)atoi(values[3]);
    uint64_t cpus = (uint64_t)atoi(values[4]);
    kv *rows;
    pass *made;
    arena counted = {NULL, 0};
    lay_out(&counted, &model, design, &rows, &made);
    arena memory = {map_memory(counted.used), 0};
    if (!memory.memory)
        return complain("memory");
    lay_out(&memory, &model, design, &rows, &made);
    if (memory.used != counted.used || pass_bytes(made) > counted.used)
        return complain("the arena");
    int in = open(values[5], O_RDONLY), out = open(values[6], O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (in < 0 || out < 0 || pass_start(made, threads, cpus, &failure))
        return complain("the start");
    int32_t head[2], length, *tokens = calloc(1 << 16, sizeof *tokens);
    read_fd(in, head, sizeof head);
    for (int32_t i = 0; tokens && i < head[1]; i++) {
        read_fd(in, &length, sizeof length);
        if (length < 0) {
            length = -length;
            pass_stop(made);
            if (pass_threads(made) || pass_start(made, threads, cpus, &failure) || pass_threads(made) != threads)
                return complain("another start");
        }
        read_fd(in, tokens, (uint64_t)length * sizeof *tokens);
        const float *logits = pass_run(made, tokens, (uint32_t)length, head[0] ? (uint32_t)length : 0, NULL);
        if (!logits)
            return complain("a pass is refused");
        write_fd(out, logits, model.config->vocab * sizeof *logits);
    }
    if (head[0])
        write_attention(rows, out);
    free(tokens);
    pass_stop(made);
    unmap_memory(memory.memory, memory.used);
    unmap_file(&model.file);
    return close(out) | close(in);
}
