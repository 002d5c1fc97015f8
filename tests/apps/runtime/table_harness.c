/* Rows of section TABLE of a file, for tests that call this through ctypes. */
#include "bundle.h"
#include "model.h"

const accelerator_kind *const EDGE_PAGE = NULL; /* which trusted.c has elsewhere */

bool read_table(table_reader *read, const int32_t *about, uint64_t size, uint64_t end, const int32_t *tokens,
                uint32_t count, float *out);

/* about: the open file, the vocabulary, layers, and values of a token's vector for each. The table is the file's last
 * `size` bytes, of which `end` are there. */
bool read_table(table_reader *read, const int32_t *about, uint64_t size, uint64_t end, const int32_t *tokens,
                uint32_t count, float *out)
{
    edge_config config = {.vocab = (uint32_t)about[1], .layers = (uint32_t)about[2], .layer_inputs = (uint32_t)about[3]};
    edge_model model = {.config = &config, .table = end - size};
    model.file.fd = about[0], model.file.size = model.file.end = end;
    model.sizes[SECTION_TABLE] = size;
    return read(&model, tokens, count, out);
}
