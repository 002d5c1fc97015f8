/* edge_bias: which tokens are likelier than the model says. */
#include <math.h>

#include "model.h"
#include "sampler.h"
#include "session.h"

edge_status edge_bias(edge_session *s, const edge_logit_bias *biases, size_t count, edge_error *error)
{
    edge_status status = enter(s, error);
    if (status)
        return status;
    if (count > MOST_BIASES || (count && !biases))
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "biases must be at most %d tokens", (int64_t)MOST_BIASES));
    for (size_t i = 0; i < count; i++)
        if (biases[i].token < 0 || (uint32_t)biases[i].token >= s->model->config->vocab || !(fabs(biases[i].bias) <= LARGEST_BIAS))
            return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "a bias is of token %d, which the vocabulary lacks, or no number",
                                      (int64_t)biases[i].token));
    if (answers(s))
        return leave(s, edge_fail(error, EDGE_BAD_ARGUMENT, "an answer is being written: read it to its end, or append a text"));
    sampler_unbias(s->sampler);
    for (size_t i = 0; i < count; i++)
        sampler_bias(s->sampler, (uint32_t)i, biases[i].token, biases[i].bias);
    return leave(s, EDGE_OK);
}
