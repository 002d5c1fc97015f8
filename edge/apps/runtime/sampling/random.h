/* Random numbers, as numpy.random.default_rng draws them. */
#ifndef EDGE_RANDOM_H
#define EDGE_RANDOM_H

#include "base.h"

typedef struct { unsigned __int128 state, step; } generator;
void seed_generator(generator *random, uint64_t seed);
double next_uniform(generator *random); /* in [0, 1): the upper 53 bits of PCG64 (XSL-RR) */

#endif
