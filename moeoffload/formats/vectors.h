// What tiles.c and sections.c share.
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

// The elements of a and b, counted through, with the given numbers.
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (__typeof__(a)){__VA_ARGS__})
#endif

// A conversion, as in formats/conversion.py; the first number is proportional to the rows.
typedef struct {
    void (*convert)(const uint8_t *from, uint8_t *to, const int64_t *numbers);
    const uint8_t *from;
    uint8_t *to;
    int64_t numbers[6];
} Step;

void moe_convert(const Step *steps, int64_t n_steps);
