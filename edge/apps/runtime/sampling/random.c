/* NumPy's generator: SeedSequence and PCG64. */
#include "random.h"

enum { POOL = 4 }; /* words of a SeedSequence */

typedef unsigned __int128 uint128;

static uint32_t hashed(uint32_t value, uint32_t *constant, uint32_t factor)
{
    value ^= *constant;
    *constant *= factor;
    value *= *constant;
    return value ^ value >> 16;
}

static uint32_t mixed(uint32_t one, uint32_t other)
{
    uint32_t value = 0xca01f9ddu * one - 0x4973f715u * other;
    return value ^ value >> 16;
}

/* numpy.random.SeedSequence(seed).generate_state(4, numpy.uint64) */
static void spread_seed(uint64_t seed, uint64_t state[4])
{
    uint32_t pool[POOL] = {(uint32_t)seed, (uint32_t)(seed >> 32), 0, 0}, constant = 0x43b0d7e5u;
    for (int i = 0; i < POOL; i++)
        pool[i] = hashed(pool[i], &constant, 0x931e8875u);
    for (int from = 0; from < POOL; from++)
        for (int to = 0; to < POOL; to++)
            if (from != to)
                pool[to] = mixed(pool[to], hashed(pool[from], &constant, 0x931e8875u));
    constant = 0x8b51f9ddu;
    for (int i = 0; i < 4; i++) {
        uint64_t low = hashed(pool[2 * i % POOL], &constant, 0x58f38dedu);
        state[i] = low | (uint64_t)hashed(pool[(2 * i + 1) % POOL], &constant, 0x58f38dedu) << 32;
    }
}

static void advance(generator *random)
{
    const uint128 factor = (uint128)2549297995355413924u << 64 | 4865540595714422341u;
    random->state = random->state * factor + random->step;
}

void seed_generator(generator *random, uint64_t seed)
{
    uint64_t numbers[4];
    spread_seed(seed, numbers);
    random->step = ((uint128)numbers[2] << 64 | numbers[3]) << 1 | 1;
    random->state = random->step;
    random->state += (uint128)numbers[0] << 64 | numbers[1];
    advance(random);
}

double next_uniform(generator *random)
{
    advance(random);
    uint64_t value = (uint64_t)(random->state >> 64) ^ (uint64_t)random->state;
    uint32_t turn = (uint32_t)(random->state >> 122);
    value = value >> turn | value << (-turn & 63);
    return (double)(value >> 11) * (1.0 / 9007199254740992.0);
}
