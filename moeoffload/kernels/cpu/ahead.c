// Measures once per process how to prefetch a stream of weights. How far ahead depends on the CPU: one whose hardware
// prefetcher follows the stream reads a fifth faster with a short distance, another one needs software prefetches far
// ahead. Weights that pass the outer caches leave there what Python and torch work with between two products; but on
// some CPUs the first-level cache has fewer reads in flight, and the stream would be slower.

#include "tiles.h"

int64_t ahead_bytes = FAR_BYTES, batch_ahead_bytes = 8192, passes_caches = 0;

#if defined(__x86_64__)
#include <sys/mman.h>
#include <time.h>

enum { CACHE_LINE = 64, INNER = 2048, N_OUT = 512, ROW_BYTES = INNER + INNER / INTEGERS * 2, ROUNDS = 12 };
enum { PLAIN_BYTES = N_OUT * INNER * 2, N_BYTES = 2 * ROUNDS * PLAIN_BYTES, HUGE_PAGE = 2 << 20 };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Returns the nanoseconds in which one row is multiplied by the weights at `part`, for which `matrix` is NULL if plain.
static int64_t time_of(Matrix *matrix, const char *part, const void *operand, int64_t features) {
    static uint16_t out[N_OUT];
    Product product = {.kernels = kernels_for(BF16, features), .tiles = tiles_for(matrix, BF16, features), .weights = part,
                       .operands = operand, .out = out, .dtype = BF16, .n_out = N_OUT, .inner = INNER, .last = 1,
                       .to = N_OUT, .bias_mode = NO_BIAS};
    if (matrix) matrix->data = part, product.parts = matrix, product.weights = NULL;
    const int64_t started = now_ns();
    compute(&product);
    return now_ns() - started;
}

// Sets `*setting` to the one of two values with which weights from memory are multiplied in less time; to `first` only
// if that takes at most `factor` times as long. The values alternate, and the fastest round of each counts, because
// other processes use the machine, too. Only what is read next is out of the caches: an empty one has room for the lines
// that another leaves to it, which costs time once it is full.
static void choose(int64_t *setting, int64_t first, int64_t second, double factor, Matrix *matrix, const char *weights,
                   int64_t part_bytes, const void *operand, int64_t features) {
    for (int64_t at = 0; at < N_BYTES; at += CACHE_LINE) (void)*(const volatile char *)(weights + at);
    int64_t best[2] = {INT64_MAX, INT64_MAX};
    for (int round = 0; round < 2 * ROUNDS; round++) {
        const char *part = weights + round * part_bytes;
        for (int64_t at = 0; at < part_bytes; at += CACHE_LINE) __builtin_ia32_clflush(part + at);
        *setting = round % 2 ? second : first;
        best[round % 2] = at_most(best[round % 2], time_of(matrix, part, operand, features));
    }
    *setting = (double)best[0] <= factor * (double)best[1] ? first : second;
}

// Chooses how weights are prefetched; returns the distance in bytes. Takes ten to twenty milliseconds, and the first
// time what it takes to map 50 MB.
int64_t moe_choose_ahead(int64_t features) {
    if (!(features & HAS_AVX2)) return ahead_bytes;
    char *memory = mmap(NULL, N_BYTES + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return ahead_bytes;
    char *weights = memory + (-(uintptr_t)memory & (HUGE_PAGE - 1));
    madvise(weights, N_BYTES, MADV_HUGEPAGE);
    memset(weights, 1, N_BYTES);
    static const uint16_t row[INNER];
    static _Alignas(CACHE_LINE) char operand[INNER / INTEGERS * sizeof(Block) + INNER * sizeof(float)];
    // 8-bit codes with a scale for each block: of all kinds this one depends most on the distance.
    Matrix matrix = {.n_out = N_OUT, .n_in = INNER, .row_bytes = ROW_BYTES, .codes = CODES_INT8, .scales = SCALES_F16,
                     .shift = 5, .n_groups = INNER / INTEGERS, .kind = WEIGHTS_INT8 + 1, .unit = 1.0f};
    tiles_for(&matrix, BF16, features)->prepare(row, BF16, operand, INNER);
    choose(&ahead_bytes, NEAR_BYTES, FAR_BYTES, 1.0, &matrix, weights, (int64_t)N_OUT * ROW_BYTES, operand, features);
    kernels_for(BF16, features)->prepare(row, operand, INNER);
    choose(&passes_caches, 1, 0, 1.05, NULL, weights, PLAIN_BYTES, operand, features);
    munmap(memory, N_BYTES + HUGE_PAGE);
    return ahead_bytes;
}
#else
int64_t moe_choose_ahead(int64_t features) {
    (void)features;
    return ahead_bytes;
}
#endif
