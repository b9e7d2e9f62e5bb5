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

/* Whether the int64 at `word` is `value`, or, without a word, poll(2) reports one of `descriptors`. */
static int has_happened(const int64_t *word, int64_t value, struct pollfd *descriptors, int n) {
    if (!word)
        return poll(descriptors, (nfds_t)n, 0) != 0;
    for (int look = 0; look < LOOKS; look++) {
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value)
            return 1;
        pause_core();
    }
    return 0;
}

/* Spins until the awaited event; what the writer of `word` wrote before is visible then. Returns an enum seen. */
int moeoffload_spin(const int64_t *word, int64_t value, struct pollfd *descriptors, int n, int64_t limit_ns,
                    int64_t crowded_ns) {
    const int64_t started = now_ns();
    int64_t before = started;
    long displaced = times_displaced();
    for (int round = 1;; round++) {
        if (has_happened(word, value, descriptors, n))
            return NEWS;
        sched_yield();
        const int64_t now = now_ns();
        const int is_crowded = now - before > crowded_ns && times_displaced() != displaced;
        if (is_crowded || now - started > limit_ns) {
            if (has_happened(word, value, descriptors, n))  /* the peer had the core and may have been quick */
                return NEWS;
            return is_crowded ? CROWDED : NOTHING;
        }
        if (round % ROUNDS == 0)
            displaced = times_displaced();
        before = now;
    }
}
