/* Threads that meet as compiled passes do (backends/tvm/cpu/kernels/threads.py), with the waiting functions of the system.
 *
 *     barrier THREADS ROUNDS
 *
 * In every round a thread adds to its neighbour's number, which nothing but the barrier protects: ThreadSanitizer reports
 * it if the barrier lets a thread through. Threads sleep at once, rather than spin.
 */
#include <stdio.h>
#include <stdlib.h>

#include "system.h"

enum { MOST = 16 };
typedef struct { int32_t number; worker thread; } member;
static _Alignas(64) int32_t lines[MOST][LINE];
static int64_t numbers[MOST];
static int32_t threads, rounds;

static int32_t arrive(int32_t *line)
{
    int32_t before = __atomic_fetch_add(line, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(line + 1, __ATOMIC_SEQ_CST))
        edge_wake(line);
    return before + 1;
}

static void wait_for(int32_t *line, int32_t value)
{
    if (__atomic_load_n(line, __ATOMIC_ACQUIRE) >= value)
        return;
    __atomic_fetch_add(line + 1, 1, __ATOMIC_SEQ_CST);
    for (int32_t found; (found = __atomic_load_n(line, __ATOMIC_SEQ_CST)) < value;)
        edge_doze(line, found);
    __atomic_fetch_sub(line + 1, 1, __ATOMIC_SEQ_CST);
}

static void *work(void *argument)
{
    int32_t own = ((member *)argument)->number;
    for (int32_t round = 0; round < rounds; round++) {
        numbers[(own + round) % threads] += own + 1;
        int32_t mine = arrive(lines[own]);
        for (int32_t other = 0; other < threads; other++)
            if (other != own)
                wait_for(lines[other], mine);
    }
    return NULL;
}

int main(int count, char **values)
{
    threads = count > 2 ? atoi(values[1]) : 0;
    rounds = count > 2 ? atoi(values[2]) : 0;
    if (threads < 1 || threads > MOST)
        return 2;
    static member members[MOST];
    for (int32_t i = 0; i < threads; i++)
        prepare_line(lines[i]);
    for (int32_t i = 0; i < threads; i++) {
        members[i].number = i;
        if (i && !start_worker(&members[i].thread, work, &members[i], 1u << i % 2))
            return 3;
    }
    work(&members[0]);
    for (int32_t i = 1; i < threads; i++)
        join_worker(&members[i].thread);
    int64_t sum = 0;
    for (int32_t i = 0; i < threads; i++)
        sum += numbers[i];
    printf("%lld\n", (long long)sum);
    return 0;
}
