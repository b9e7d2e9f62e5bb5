// What the C files of this folder share.
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

// The elements of a and b, counted through, with the given numbers.
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif

// One word of each of four rows, or four words of one row.
typedef uint32_t Four __attribute__((vector_size(16)));

// Transposes a matrix of four by four words.
INLINE void transpose_words(Four w[4]) {
    const Four a = PICK(w[0], w[1], 0, 4, 1, 5), b = PICK(w[0], w[1], 2, 6, 3, 7);
    const Four c = PICK(w[2], w[3], 0, 4, 1, 5), d = PICK(w[2], w[3], 2, 6, 3, 7);
    w[0] = PICK(a, c, 0, 1, 4, 5), w[1] = PICK(a, c, 2, 3, 6, 7);
    w[2] = PICK(b, d, 0, 1, 4, 5), w[3] = PICK(b, d, 2, 3, 6, 7);
}

// Exchanges the bits in `mask` with those `distance` above them.
INLINE Four exchange(Four word, int distance, uint32_t mask) {
    const Four moved = (word >> distance ^ word) & mask;
    return word ^ moved ^ moved << distance;
}

// Turns 16 pairs of bits in order into four bytes in which pair s of byte j is that of weight 4 * s + j; its own
// inverse.
INLINE Four fold_pairs(Four word) { return exchange(exchange(word, 6, 0x00CC00CC), 12, 0x0000F0F0); }

// A conversion, as in formats/conversion.py; the first number is proportional to the rows.
typedef struct {
    void (*convert)(const uint8_t *from, uint8_t *to, const int64_t *numbers);
    const uint8_t *from;
    uint8_t *to;
    int64_t numbers[6];
} Step;

void moe_convert(const Step *steps, int64_t n_steps);
