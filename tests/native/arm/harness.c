/* Runs a compiled pass without Python: a prompt, then greedy decoding, on several threads.
 *
 *     harness IMAGE INPUT LOGITS    prints the tokens, writes the logits of every pass, float32 [passes, vocab]
 *
 * IMAGE is what linking.py makes, loaded here as loading.py does. Built with -DLINKED the pass is part of the program
 * (run.o on the compiler's command line) and IMAGE is not read. INPUT: see `write_input` in test_arm.py.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ARRAYS = 17, MOST_THREADS = 16, PAGE = 4096 };
enum { JOB, LINES, WEIGHTS, TABLE, FLOATS, INTEGERS, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, LENGTHS, POSITIONS,
       TOKENS, LOGITS, ROPE, ATTENTION };
enum { KIND, THREADS, COUNT, POSITION, ANGLE, WANTED, OBSERVED, VOTES, DISK, SEQUENCE, DRAFTS, PARTS, FIXED }; /* of the job */
enum { QUIT, STEP, CHUNK };                                        /* its kinds */
enum { INTEGER = 1, POINTER = 4 };                                 /* TVM's calling convention */

typedef struct { int32_t type, padding; union { int64_t integer; void *pointer; }; } Any;
typedef int (*Function)(void *, Any *, int32_t, Any *);

static Function run;
static void *arrays[ARRAYS];

static void check(int good, const char *complaint)
{
    if (!good) {
        fprintf(stderr, "harness: %s\n", complaint);
        exit(1);
    }
}

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count)
{
    fprintf(stderr, "%s: ", kind);
    for (int32_t i = 0; i < count; i++)
        fputs(parts[i], stderr);
    check(0, "the pass refused its arguments");
}

/* macOS's, which passes for it call, by Linux's: FUTEX_WAIT_PRIVATE and FUTEX_WAKE_PRIVATE */
int __ulock_wait(uint32_t operation, void *address, uint64_t value, uint32_t timeout)
{
    check(operation == 0x1000001 && !timeout, "__ulock_wait of other arguments");
    return (int)syscall(SYS_futex, address, 128, (uint32_t)value, NULL);
}

int __ulock_wake(uint32_t operation, void *address, uint64_t value)
{
    check(operation == 0x1000101 && !value, "__ulock_wake of other arguments");
    return (int)syscall(SYS_futex, address, 129, INT32_MAX);
}

static int64_t read_number(FILE *file)
{
    int64_t number;
    check(fread(&number, sizeof number, 1, file) == 1, "the input ends too early");
    return number;
}

#ifdef LINKED
int __tvm_ffi_run(void *, Any *, int32_t, Any *);

static void load(const char *path)
{
    (void)path;
    run = __tvm_ffi_run;
}
#else
/* The number behind "name": in the image's header, -1 if there is none. */
static long offset_of(const char *header, const char *name)
{
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\": ", name);
    const char *found = strstr(header, quoted);
    return found ? atol(found + strlen(quoted)) : -1;
}

static void load(const char *path)
{
    static const struct { const char *name; void *address; } outside[] = {
        {"TVMFFIErrorSetRaisedFromCStrParts", TVMFFIErrorSetRaisedFromCStrParts},
        {"syscall", syscall}, {"clock_gettime", clock_gettime}, {"__ulock_wait", __ulock_wait}, {"__ulock_wake", __ulock_wake}, {"madvise", madvise}, {"memset", memset}, {"memcpy", memcpy}, {"memmove", memmove},
    };
    FILE *file = fopen(path, "rb");
    char magic[8], *header;
    check(file && fread(magic, 8, 1, file) == 1 && !memcmp(magic, "EDGEIMG1", 8), "no image");
    int64_t length = read_number(file);
    check((header = calloc(length + 1, 1)) && fread(header, length, 1, file) == 1, "no header");
    long start = (16 + length + PAGE - 1) / PAGE * PAGE;
    fseek(file, 0, SEEK_END);
    size_t size = ftell(file) - start;
    fseek(file, start, SEEK_SET);
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED && fread(memory, size, 1, file) == 1, "no bytes");
    fclose(file);
    int imports = 0, filled = 0;
    for (const char *at = strchr(strstr(header, "\"imports\"") + 9, ':') + 1; (at = strchr(at, ':')); at++)
        imports++;
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        long slot = offset_of(header, outside[i].name);
        if (slot >= 0) {
            memcpy(memory + slot, &outside[i].address, sizeof(void *));
            filled++;
        }
    }
    check(imports == filled, "the image imports functions that the harness does not know");
    check(!mprotect(memory, size, PROT_READ | PROT_EXEC), "mprotect");
    run = (Function)(memory + offset_of(header, "run"));
    free(header);
}
#endif

static void *work(void *number)
{
    Any arguments[ARRAYS + 1] = {0}, result;
    for (int i = 0; i < ARRAYS; i++) {
        arguments[i].type = POINTER;
        arguments[i].pointer = arrays[i];
    }
    arguments[ARRAYS].type = INTEGER;
    arguments[ARRAYS].integer = (intptr_t)number;
    check(run(NULL, arguments, ARRAYS + 1, &result) == 0, "the pass failed");
    return NULL;
}

int main(int count, char **values)
{
    check(count == 4, "usage: harness IMAGE INPUT LOGITS");
    load(values[1]);
    FILE *input = fopen(values[2], "rb"), *output = fopen(values[3], "wb");
    check(input && output, "cannot open the input or the output");
    int64_t threads = read_number(input), prompt = read_number(input), steps = read_number(input);
    int64_t vocab = read_number(input), heads = read_number(input);
    check(threads <= MOST_THREADS, "too many threads");
    for (int i = 0; i < ARRAYS; i++) {
        int64_t size = read_number(input);
        /* Kernels may read a little beyond the end of the cache. */
        check(!posix_memalign(&arrays[i], 64, size + (1 << 16)), "no memory");
        memset((char *)arrays[i] + size, 0, 1 << 16);
        check(size == 0 || fread(arrays[i], size, 1, input) == 1, "the input ends too early");
    }
    fclose(input);

    int64_t *job = arrays[JOB];
    int32_t *tokens = arrays[TOKENS], *lengths = arrays[LENGTHS];
    const float *logits = arrays[LOGITS];
    pthread_t others[MOST_THREADS];
    job[THREADS] = job[PARTS] = threads;
    job[FIXED] = 1;
    for (intptr_t i = 1; i < threads; i++)
        check(!pthread_create(&others[i], NULL, work, (void *)i), "no thread");
    int64_t position = 0;
    for (int64_t pass = 0; pass <= steps; pass++) {
        int64_t many = pass ? 1 : prompt, best = 0;
        job[KIND] = many > 1 ? CHUNK : STEP;
        job[COUNT] = many;
        job[POSITION] = job[ANGLE] = position;
        job[WANTED] = 1;
        work(NULL);
        position += many;
        for (int64_t i = 0; i < heads; i++)
            lengths[i] += many;
        check(fwrite(logits, sizeof *logits, vocab, output) == (size_t)vocab, "cannot write logits");
        for (int64_t i = 1; i < vocab; i++)
            if (logits[i] > logits[best])
                best = i;
        printf("%d\n", tokens[0] = (int32_t)best);
    }
    job[KIND] = QUIT;
    work(NULL);
    for (int64_t i = 1; i < threads; i++)
        pthread_join(others[i], NULL);
    return fclose(output);
}
