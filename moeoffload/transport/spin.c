/* Waits for news without sleeping, for a bounded time, and tells when another thread of this system wants the core.

   A sleeping thread is woken 20 to 50 microseconds late; one that spins sees news within one. It yields the core all the
   time, so that a peer on the same core works on, and gives up when the system says that it was displaced for long:
   time that a hypervisor took was not wanted by another thread of this system. */

#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <sys/resource.h>
#include <time.h>

enum seen { NOTHING = 0, NEWS = 1, CROWDED = 2 };

#define LOOKS 16   /* at a word between two readings of the clock */
#define ROUNDS 64  /* readings of the clock between two questions how often the thread was displaced */

struct watch {
    int64_t started, before, limit_ns, crowded_ns;
    long displaced;
    int rounds;
};

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static long times_displaced(void) {
    struct rusage usage = {0};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
}

static void pause_core(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static struct watch begin(int64_t limit_ns, int64_t crowded_ns) {
    int64_t now = now_ns();
    return (struct watch){now, now, limit_ns, crowded_ns, times_displaced(), 0};
}

/* Yields the core once; whether to look on (-1), or why not. */
static int yield_core(struct watch *watch) {
    sched_yield();
    int64_t now = now_ns();
    if (now - watch->before > watch->crowded_ns && times_displaced() != watch->displaced)
        return CROWDED;
    if (++watch->rounds % ROUNDS == 0)
        watch->displaced = times_displaced();
    if (now - watch->started > watch->limit_ns)
        return NOTHING;
    watch->before = now;
    return -1;
}

/* Until the int64 at `word` is `value`: what its writer wrote before can be read then. Returns an enum seen. */
int moeoffload_spin_word(const int64_t *word, int64_t value, int64_t limit_ns, int64_t crowded_ns) {
    struct watch watch = begin(limit_ns, crowded_ns);
    for (;;) {
        for (int look = 0; look < LOOKS; look++) {
            if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value)
                return NEWS;
            pause_core();
        }
        int end = yield_core(&watch);
        if (end >= 0)  /* perhaps it was the peer who had the core, and was quick */
            return __atomic_load_n(word, __ATOMIC_ACQUIRE) == value ? NEWS : end;
    }
}

/* As above, until something happens on one of `count` descriptors. */
int moeoffload_spin_poll(struct pollfd *descriptors, int count, int64_t limit_ns, int64_t crowded_ns) {
    struct watch watch = begin(limit_ns, crowded_ns);
    for (;;) {
        if (poll(descriptors, (nfds_t)count, 0) != 0)
            return NEWS;
        int end = yield_core(&watch);
        if (end >= 0)
            return end;
    }
}
