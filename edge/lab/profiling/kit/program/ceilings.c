/* Measures memory bandwidth, and products of float32 and of bytes in registers, on several threads. */
#define _GNU_SOURCE
#include "ceilings.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cores.h"
#include "machine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

bool runs_isa(const char *name); /* defined in the runtime */

enum { MOST_THREADS = 256, CHAINS = 10, BATCH = 100000 };
static const uint64_t BUFFER = 256u << 20; /* bytes to read, more than most caches hold */

typedef uint64_t words __attribute__((vector_size(16), aligned(16)));
typedef double (*job)(uint64_t first, uint64_t length); /* returns bytes read or operations done */

static words *buffer;
static volatile uint64_t sink;

typedef struct {
    job work;
    uint64_t first, length;
    double until, done, took;
    pthread_barrier_t *start;
} part;

static void *run_part(void *argument)
{
    part *own = argument;
    pthread_barrier_wait(own->start);
    double began = now();
    do
        own->done += own->work(own->first, own->length);
    while (now() - began < own->until);
    own->took = now() - began;
    return NULL;
}

/* The sum of all threads' rates. */
static double rate_of(job work, uint32_t threads, double seconds, uint64_t size)
{
    static part parts[MOST_THREADS];
    static pthread_t handles[MOST_THREADS];
    pthread_barrier_t start;
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    pthread_barrier_init(&start, NULL, threads);
    for (uint32_t i = 0; i < threads; i++) {
        uint64_t each = size / threads;
        parts[i] = (part){.work = work, .first = i * each, .length = each, .until = seconds, .start = &start};
        if (i && pthread_create(&handles[i], NULL, run_part, &parts[i]))
            abort();
    }
    run_part(&parts[0]);
    double rate = parts[0].done / parts[0].took;
    for (uint32_t i = 1; i < threads; i++) {
        pthread_join(handles[i], NULL);
        rate += parts[i].done / parts[i].took;
    }
    pthread_barrier_destroy(&start);
    return rate;
}

static double read_part(uint64_t first, uint64_t length)
{
    words a = {0}, b = a, c = a, d = a; /* registers, as below */
    const words *at = buffer + first, *end = at + length / 4 * 4;
    for (; at < end; at += 4)
        a ^= at[0], b ^= at[1], c ^= at[2], d ^= at[3];
    a ^= b ^ c ^ d;
    sink = a[0] ^ a[1];
    return (double)(length / 4 * 4) * sizeof *at;
}

/* Bytes per second that threads read from memory. */
static double read_bandwidth(uint32_t threads, double seconds)
{
    uint64_t most = memory_bytes() / 8, size = most < BUFFER ? most : BUFFER; /* small machines: an eighth of memory */
    size = size / sizeof *buffer * sizeof *buffer;
    if (posix_memalign((void **)&buffer, 4096, size))
        return 0;
    memset(buffer, 1, size);
    double rate = rate_of(read_part, threads, seconds, size / sizeof *buffer);
    free(buffer);
    return rate;
}

/* A function that multiplies and adds in CHAINS registers at once: enough to hide the latency of one. They are variables
 * of their own, since GCC keeps an array in memory. */
#define FOR(features) __attribute__((target(features)))
#define STEP(x, next) x = next(x); __asm__ volatile("" : KEEP(x));
#define SPIN(name, isa, type, start, next, operations) \
    isa static double name(uint64_t first, uint64_t length) \
    { \
        (void)first, (void)length; \
        type a = start, b = a, c = a, d = a, e = a, f = a, g = a, h = a, i = a, j = a; \
        for (int round = 0; round < BATCH; round++) { \
            STEP(a, next) STEP(b, next) STEP(c, next) STEP(d, next) STEP(e, next) \
            STEP(f, next) STEP(g, next) STEP(h, next) STEP(i, next) STEP(j, next) \
        } \
        return (double)BATCH * CHAINS * (operations); \
    }

#if defined(__x86_64__)
#define KEEP(value) "+v"(value)
#define FLOATS_SSE(x) _mm_add_ps(_mm_mul_ps(x, _mm_set1_ps(0.5f)), _mm_set1_ps(1))
#define FLOATS_AVX2(x) _mm256_fmadd_ps(x, _mm256_set1_ps(0.5f), _mm256_set1_ps(1))
#define FLOATS_AVX512(x) _mm512_fmadd_ps(x, _mm512_set1_ps(0.5f), _mm512_set1_ps(1))
#define BYTES_AVX2(x) \
    _mm256_add_epi32(x, _mm256_madd_epi16(_mm256_maddubs_epi16(x, _mm256_set1_epi8(1)), _mm256_set1_epi16(1)))
#define BYTES_AVXVNNI(x) _mm256_dpbusd_avx_epi32(x, _mm256_set1_epi8(1), _mm256_set1_epi8(2))
#define BYTES_AVX512(x) _mm512_dpbusd_epi32(x, _mm512_set1_epi8(1), _mm512_set1_epi8(2))
SPIN(floats_sse, , __m128, _mm_set1_ps(1), FLOATS_SSE, 8)
SPIN(floats_avx2, FOR("avx2,fma"), __m256, _mm256_set1_ps(1), FLOATS_AVX2, 16)
SPIN(floats_avx512, FOR("avx512f"), __m512, _mm512_set1_ps(1), FLOATS_AVX512, 32)
SPIN(bytes_avx2, FOR("avx2"), __m256i, _mm256_set1_epi32(1), BYTES_AVX2, 64)
SPIN(bytes_avxvnni, FOR("avx2,avxvnni"), __m256i, _mm256_set1_epi32(1), BYTES_AVXVNNI, 64)
SPIN(bytes_avx512, FOR("avx512f,avx512vnni"), __m512i, _mm512_set1_epi32(1), BYTES_AVX512, 128)

static job float_job(void)
{
    return runs_isa("avx512vnni") ? floats_avx512 : runs_isa("avx2") ? floats_avx2 : floats_sse;
}

static job byte_job(void)
{
    if (runs_isa("avx512vnni"))
        return bytes_avx512;
    return runs_isa("avxvnni") ? bytes_avxvnni : runs_isa("avx2") ? bytes_avx2 : NULL;
}
#elif defined(__aarch64__)
#define KEEP(value) "+w"(value)
#define FLOATS_NEON(x) vfmaq_f32(vdupq_n_f32(1), x, vdupq_n_f32(0.5f))
#define BYTES_DOTPROD(x) vdotq_s32(x, vdupq_n_s8(1), vdupq_n_s8(1))
#define BYTES_I8MM(x) vmmlaq_s32(x, vdupq_n_s8(1), vdupq_n_s8(1))
SPIN(floats_neon, , float32x4_t, vdupq_n_f32(1), FLOATS_NEON, 8)
SPIN(bytes_dotprod, FOR("arch=armv8.2-a+dotprod"), int32x4_t, vdupq_n_s32(1), BYTES_DOTPROD, 32)
SPIN(bytes_i8mm, FOR("arch=armv8.2-a+i8mm"), int32x4_t, vdupq_n_s32(1), BYTES_I8MM, 64)

static job float_job(void)
{
    return floats_neon;
}

static job byte_job(void)
{
    return runs_isa("i8mm") ? bytes_i8mm : runs_isa("dotprod") ? bytes_dotprod : NULL;
}
#endif

/* Operations per second on float32, in registers. */
static double float_rate(uint32_t threads, double seconds)
{
    return rate_of(float_job(), threads, seconds, threads);
}

/* The same on bytes, with sums of 32 bits; 0: no instruction. */
static double byte_rate(uint32_t threads, double seconds)
{
    job work = byte_job();
    return work ? rate_of(work, threads, seconds, threads) : 0;
}

static void print_rates(double read, double floats, double bytes)
{
    printf("\"read\": %.6g, \"f32\": %.6g, \"int8\": ", read, floats);
    printf(bytes > 0 ? "%.6g" : "null", bytes);
}

/* Prints the rates of threads on the cores of one kind. */
static void print_kind(const core_kind *kind, double seconds)
{
    cpu_set_t before;
    bool bound = !sched_getaffinity(0, sizeof before, &before) && !sched_setaffinity(0, sizeof kind->cpus, &kind->cpus);
    printf("{\"cores\": %u, \"capacity\": %.0f, \"kilohertz\": %.0f, \"midr\": \"%s\", \"hybrid\": \"%s\", ",
           kind->cores, kind->capacity, kind->kilohertz, kind->midr, kind->hybrid);
    if (bound)
        print_rates(read_bandwidth(kind->cores, seconds), float_rate(kind->cores, seconds),
                    byte_rate(kind->cores, seconds));
    else
        printf("\"read\": null, \"f32\": null, \"int8\": null"); /* the kernel has taken these cores offline */
    printf("}");
    if (bound)
        sched_setaffinity(0, sizeof before, &before);
}

void print_ceilings(uint32_t threads, double seconds, void (*say)(const char *what, double done))
{
    static core_kind kinds[MOST_KINDS];
    uint32_t found = find_kinds(kinds), count = found > 1 ? found : 0;
    double steps = 4 + count;
    say("memory and arithmetic at most", 0);
    double read = read_bandwidth(threads, seconds);
    say("memory and arithmetic at most", 1 / steps);
    double one = threads > 1 ? read_bandwidth(1, seconds) : read;
    say("memory and arithmetic at most", 2 / steps);
    double floats = float_rate(threads, seconds);
    say("memory and arithmetic at most", 3 / steps);
    printf("\"ceilings\": {\"threads\": %u, \"read_one_core\": %.6g, ", threads, one);
    print_rates(read, floats, byte_rate(threads, seconds));
    printf(", \"kinds\": [");
    for (uint32_t i = 0; i < count; i++) {
        say("memory and arithmetic of each kind of cores", (4 + i) / steps);
        printf(i ? ",\n  " : "\n  ");
        print_kind(&kinds[i], seconds / 3);
    }
    printf("]},\n");
}
