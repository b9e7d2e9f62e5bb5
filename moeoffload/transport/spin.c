/* Waits for a word or a file descriptor to change without sleeping, for a bounded time, and reports when another thread
   of this system wants the core.

   A sleeping thread is woken 20 to 50 microseconds late; a spinning one sees a change within one. It keeps yielding the
   core, so that a peer on the same core can work, and gives up if it lost the core for long and the kernel counts an
   involuntary context switch: without one, the time was taken by a hypervisor, not by a thread of this system. */

#define _GNU_SOURCE
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <sys/resource.h>
#include <time.h>

enum seen { NOTHING = 0, NEWS = 1, CROWDED = 2 };

#define LOOKS 16   /* at the word between two clock readings */
#define ROUNDS 64  /* clock readings between two queries of the number of involuntary context switches */

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

/* The awaited event; `look` returns whether it has happened. */
struct awaited {
    int (*look)(const struct awaited *);
    const int64_t *word;
    int64_t value;
    struct pollfd *descriptors;
    int n_descriptors;
};

static int word_has_value(const struct awaited *awaited) {
    for (int look = 0; look < LOOKS; look++) {
        if (__atomic_load_n(awaited->word, __ATOMIC_ACQUIRE) == awaited->value)
            return 1;
        pause_core();
    }
    return 0;
}

static int can_be_read(const struct awaited *awaited) {
    return poll(awaited->descriptors, (nfds_t)awaited->n_descriptors, 0) != 0;
}

static int spin(const struct awaited *awaited, int64_t limit_ns, int64_t crowded_ns) {
    const int64_t started = now_ns();
    int64_t before = started;
    long displaced = times_displaced();
    for (int round = 1;; round++) {
        if (awaited->look(awaited))
            return NEWS;
        sched_yield();
        const int64_t now = now_ns();
        const int is_crowded = now - before > crowded_ns && times_displaced() != displaced;
        if (is_crowded || now - started > limit_ns) {
            if (awaited->look(awaited))  /* the peer had the core and may have been quick */
                return NEWS;
            return is_crowded ? CROWDED : NOTHING;
        }
        if (round % ROUNDS == 0)
            displaced = times_displaced();
        before = now;
    }
}

/* Spins until the int64 at `word` is `value`; what its writer wrote before is visible then. Returns an enum seen. */
int moeoffload_spin(const int64_t *word, int64_t value, int64_t limit_ns, int64_t crowded_ns) {
    const struct awaited awaited = {.look = word_has_value, .word = word, .value = value};
    return spin(&awaited, limit_ns, crowded_ns);
}

/* Spins until poll(2) reports one of `descriptors`. Returns an enum seen. */
int moeoffload_spin_poll(struct pollfd *descriptors, int n, int64_t limit_ns, int64_t crowded_ns) {
    const struct awaited awaited = {.look = can_be_read, .descriptors = descriptors, .n_descriptors = n};
    return spin(&awaited, limit_ns, crowded_ns);
}
