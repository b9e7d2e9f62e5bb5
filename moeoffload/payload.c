/* Writes rows into a frame and checks them in one pass, for which torch needs a dozen calls. */

#include <stdint.h>
#include <string.h>

/* The codes of payload.PayloadDtype. */
enum { F32 = 1, F16 = 2, BF16 = 3 };

static uint32_t load_f32(const char *at) {
    uint32_t raw;
    memcpy(&raw, at, sizeof raw);
    return raw;
}
static uint32_t load_half(const char *at) {
    uint16_t raw;
    memcpy(&raw, at, sizeof raw);
    return raw;
}
static void store_half(char *at, uint32_t raw) {
    const uint16_t half = (uint16_t)raw;
    memcpy(at, &half, sizeof half);
}

/* Rounds a float32 to bfloat16, to nearest even; a NaN stays a NaN. */
static uint32_t round_bf16(uint32_t raw) {
    return (raw & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (raw + 0x7FFF + (raw >> 16 & 1)) >> 16;
}

/* Returns 1 if all bits of the exponent are set (NaN or infinity), else 0. */
static uint32_t is_special(uint32_t raw, uint32_t exponent) { return (raw & exponent) == exponent; }

/* Writes rows (n_rows, hidden) of type `from` as type `to`. Returns the first row that then holds a NaN or an infinity,
   -1 if none does, or -2 if this pair of types is not supported. */
int64_t moeoffload_store_rows(const char *rows, int64_t from, char *stored, int64_t to, int64_t n_rows, int64_t hidden) {
    int64_t bad = -1;
    for (int64_t row = n_rows - 1; row >= 0; row--) {
        const char *in = rows + row * hidden * (from == F32 ? 4 : 2);
        char *out = stored + row * hidden * (to == F32 ? 4 : 2);
        uint32_t special = 0;
        if (from == F32 && to == BF16) {
            for (int64_t i = 0; i < hidden; i++) {
                const uint32_t half = round_bf16(load_f32(in + 4 * i));
                store_half(out + 2 * i, half);
                special |= is_special(half, 0x7F80);
            }
        } else if (from == F32 && to == F32) {
            memcpy(out, in, 4 * hidden);
            for (int64_t i = 0; i < hidden; i++) special |= is_special(load_f32(out + 4 * i), 0x7F800000);
        } else if (from == to) {
            const uint32_t exponent = from == F16 ? 0x7C00 : 0x7F80;
            memcpy(out, in, 2 * hidden);
            for (int64_t i = 0; i < hidden; i++) special |= is_special(load_half(out + 2 * i), exponent);
        } else {
            return -2;
        }
        if (special) bad = row;
    }
    return bad;
}
