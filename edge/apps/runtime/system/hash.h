/* SHA-256 (FIPS 180-4). */
#ifndef EDGE_HASH_H
#define EDGE_HASH_H

#include "base.h"

typedef struct { uint32_t state[8]; uint64_t length; uint8_t block[64]; } hasher;
void hash_start(hasher *h);
void hash_add(hasher *h, const void *data, uint64_t size);
void hash_end(hasher *h, uint8_t digest[32]);

#endif
