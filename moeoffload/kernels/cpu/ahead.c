// Measures once per process how far ahead of a stream of weights to prefetch. This depends on the CPU: one whose
// hardware prefetcher follows the stream reads a fifth faster with a short distance, another one needs software
// prefetches far ahead.

#include "tiles.h"

int64_t ahead_bytes = FAR_BYTES;

#if defined(__x86_64__)
#include <sys/mman.h>
#include <time.h>

enum { CACHE_LINE = 64, INNER = 2048, N_OUT = 512, ROW_BYTES = INNER + INNER / INTEGERS * 2, ROUNDS = 24, DISTANCES = 2 };
enum { HUGE_PAGE = 2 << 20 };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Chooses the prefetch distance with which one row is multiplied by weights from memory in less time; returns it in
// bytes. The distances alternate, and the fastest round of each counts, because other processes use the machine, too.
// Takes about ten milliseconds.
int64_t moe_choose_ahead(int64_t features) {
    if (!(features & HAS_AVX2)) return ahead_bytes;
    static const int64_t distances[DISTANCES] = {NEAR_BYTES, FAR_BYTES};
    const int64_t n_bytes = (int64_t)ROUNDS * DISTANCES * N_OUT * ROW_BYTES;
    char *weights = mmap(NULL, n_bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (weights == MAP_FAILED) return ahead_bytes;
    char *part = weights + (-(uintptr_t)weights & (HUGE_PAGE - 1));
    madvise(part, n_bytes, MADV_HUGEPAGE);
    memset(part, 1, n_bytes);
    for (int64_t at = 0; at < n_bytes; at += CACHE_LINE) __builtin_ia32_clflush(part + at);
    // 8-bit codes with a scale for each block: of all kinds this one depends most on the distance.
    Matrix matrix = {.n_out = N_OUT, .n_in = INNER, .row_bytes = ROW_BYTES, .codes = CODES_INT8, .scales = SCALES_F16,
                     .shift = 5, .n_groups = INNER / INTEGERS, .kind = WEIGHTS_INT8 + 1, .unit = 1.0f};
    const TileKernels *tiles = tiles_for(&matrix, BF16, features);
    static const uint16_t row[INNER];
    static uint16_t out[N_OUT];
    static Block operand[INNER / INTEGERS];
    tiles->prepare(row, BF16, operand, INNER);
    int64_t best[DISTANCES] = {INT64_MAX, INT64_MAX};
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < DISTANCES; i++, part += N_OUT * ROW_BYTES) {
            matrix.data = part;
            const Product product = {.parts = &matrix, .operands = operand, .out = out, .dtype = BF16, .n_out = N_OUT,
                                     .inner = INNER, .last = 1, .to = N_OUT, .bias_mode = NO_BIAS};
            ahead_bytes = distances[i];
            const int64_t started = now_ns();
            tiles->project(&product);
            best[i] = at_most(best[i], now_ns() - started);
        }
    ahead_bytes = distances[best[0] < best[1] ? 0 : 1];
    munmap(weights, n_bytes + HUGE_PAGE);
    return ahead_bytes;
}
#else
int64_t moe_choose_ahead(int64_t features) {
    (void)features;
    return ahead_bytes;
}
#endif
