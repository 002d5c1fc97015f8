/* SHA-256 (FIPS 180-4). */
#include <string.h>

#include "hash.h"

static const uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotated(uint32_t word, int by)
{
    return word >> by | word << (32 - by);
}

static void add_block(uint32_t state[8], const uint8_t *block)
{
    uint32_t spread[64], s[8];
    for (int i = 0; i < 16; i++, block += 4)
        spread[i] = (uint32_t)block[0] << 24 | (uint32_t)block[1] << 16 | (uint32_t)block[2] << 8 | block[3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = spread[i - 15], b = spread[i - 2];
        spread[i] = spread[i - 16] + spread[i - 7] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3)
            + (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]), majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
        uint32_t one = s[7] + (rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25)) + choice + ROUNDS[i] + spread[i];
        uint32_t two = (rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22)) + majority;
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += one;
        s[0] = one + two;
    }
    for (int i = 0; i < 8; i++)
        state[i] += s[i];
}

void hash_start(hasher *h)
{
    static const uint32_t first[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    memset(h, 0, sizeof *h);
    memcpy(h->state, first, sizeof first);
}

void hash_add(hasher *h, const void *data, uint64_t size)
{
    const uint8_t *from = data;
    while (size) {
        uint64_t at = h->length % 64, part = size < 64 - at ? size : 64 - at;
        memcpy(h->block + at, from, (size_t)part);
        h->length += part;
        from += part;
        size -= part;
        if (h->length % 64 == 0)
            add_block(h->state, h->block);
    }
}

void hash_end(hasher *h, uint8_t digest[32])
{
    static const uint8_t padding[64] = {0x80};
    uint64_t bits = 8 * h->length;
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(bits >> (56 - 8 * i));
    hash_add(h, padding, 1 + (119 - h->length % 64) % 64);
    hash_add(h, length, sizeof length);
    for (int i = 0; i < 32; i++)
        digest[i] = (uint8_t)(h->state[i / 4] >> (24 - 8 * (i % 4)));
}
