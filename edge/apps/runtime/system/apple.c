/* macOS and iOS. See posix.c. */
#ifdef __APPLE__
#define _DARWIN_C_SOURCE
#include <errno.h>
#include <mach/mach.h>
#include <pthread.h>
#include <pthread/qos.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/sysctl.h>
#include <unistd.h>

#include "system.h"

int64_t system_read(int32_t fd, void *to, uint64_t size)
{
    int64_t count;
    do
        count = read(fd, to, size);
    while (count < 0 && errno == EINTR);
    return count;
}

int64_t system_write(int32_t fd, const void *from, uint64_t size)
{
    int64_t count;
    do
        count = write(fd, from, size);
    while (count < 0 && errno == EINTR);
    return count;
}

bool system_random(uint64_t *value)
{
    arc4random_buf(value, sizeof *value);
    return true;
}

uint64_t system_page_size(void)
{
    return (uint64_t)getpagesize();
}

void system_clear(void *first, uint64_t size)
{
    /* MADV_FREE may keep the old content */
    mmap(first, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

void private_bytes(uint64_t *anonymous, uint64_t *swapped)
{
    task_vm_info_data_t about;
    mach_msg_type_number_t count = TASK_VM_INFO_COUNT;
    bool told = task_info(mach_task_self(), TASK_VM_INFO, (task_info_t)&about, &count) == KERN_SUCCESS;
    *anonymous = told ? about.internal : 0;
    *swapped = told ? about.compressed : 0; /* compressed in memory, or in swap space */
}

/* ---- CPUs: no masks; threads without a quality of service run on slow cores -------------------------------------- */

void system_place_worker(uint64_t cpu_mask)
{
    (void)cpu_mask;
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0);
}

bool bind_thread(uint64_t cpu_mask, cpu_binding *before)
{
    (void)cpu_mask, (void)before;
    return false;
}

void unbind_thread(const cpu_binding *before)
{
    (void)before;
}

uint32_t fastest_cores(void)
{
    int32_t count = 0;
    size_t size = sizeof count;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &count, &size, NULL, 0) || count < 1)
        count = 1;
    return (uint32_t)count;
}

#endif

/* ---- sleeping and waking ----------------------------------------------------------------------------------------- */

#if defined(__APPLE__) || defined(EDGE_WAIT_ON_ADDRESS) /* with it, tests run this on Linux */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "system.h"

/* os_sync_wait_on_address and os_sync_wake_by_address_all exist from iOS 17.4 and macOS 14.4 on; before, a condition
 * variable does it. Functions or variable lie behind the pass's two words in its line, so that nothing is global. */
typedef int wait_on_address(void *address, uint64_t value, size_t size, uint32_t flags);
typedef int wake_by_address(void *address, size_t size, uint32_t flags);
typedef struct {
    int32_t words[2];
    wait_on_address *wait;
    union {
        wake_by_address *wake;
        struct { pthread_mutex_t mutex; pthread_cond_t changed; } lock;
    } by;
} waiting_line;
_Static_assert(sizeof(waiting_line) <= LINE * sizeof(int32_t), "the words and this fit into a line");

void prepare_line(int32_t line[LINE])
{
    waiting_line *own = (waiting_line *)line;
    void *wait = dlsym(RTLD_DEFAULT, "os_sync_wait_on_address");
    void *wake = dlsym(RTLD_DEFAULT, "os_sync_wake_by_address_all");
    if (wait && wake) {
        memcpy(&own->wait, &wait, sizeof wait); /* ISO C has no conversion from object to function pointers */
        memcpy(&own->by.wake, &wake, sizeof wake);
    } else {
        own->wait = NULL;
        pthread_mutex_init(&own->by.lock.mutex, NULL);
        pthread_cond_init(&own->by.lock.changed, NULL);
    }
}

int32_t edge_doze(int32_t *word, int32_t value)
{
    waiting_line *own = (waiting_line *)word;
    if (own->wait)
        return own->wait(word, (uint32_t)value, sizeof *word, 0);
    pthread_mutex_lock(&own->by.lock.mutex);
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) == value)
        pthread_cond_wait(&own->by.lock.changed, &own->by.lock.mutex);
    pthread_mutex_unlock(&own->by.lock.mutex);
    return 0;
}

int32_t edge_wake(int32_t *word)
{
    waiting_line *own = (waiting_line *)word;
    if (own->wait)
        return own->by.wake(word, sizeof *word, 0);
    pthread_mutex_lock(&own->by.lock.mutex); /* a thread that has checked the word is waiting by now */
    pthread_cond_broadcast(&own->by.lock.changed);
    pthread_mutex_unlock(&own->by.lock.mutex);
    return 0;
}

#endif
