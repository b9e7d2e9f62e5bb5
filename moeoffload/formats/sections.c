// Makes sections of packed rows from the parts of a file, where their order differs: see formats/conversion.py.
#include "vectors.h"

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint16_t Pairs __attribute__((vector_size(16)));
typedef uint64_t Longs __attribute__((vector_size(16)));

#define FIRST(a, b) PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define SECOND(a, b) PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define EVEN(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)

void moe_convert(const Step *steps, int64_t n_steps) {
    for (const Step *each = steps; each < steps + n_steps; each++) each->convert(each->from, each->to, each->numbers);
}

// Turns bytes with an offset of 128 into signed ones. Numbers: rows, bytes of a row.
void moe_flip_signs(const uint8_t *from, uint8_t *to, const int64_t *n) {
    const int64_t n_bytes = n[0] * n[1];
    for (int64_t i = 0; i < n_bytes; i++) to[i] = from[i] ^ 128;
}

// Writes one byte for each of GGUF's blocks. Numbers: blocks, bytes of a block, value.
void moe_block_fill(const uint8_t *from, uint8_t *to, const int64_t *n) { memset(to, (int)n[2], n[0]); }

// Copies bytes of GGUF's blocks. Numbers: blocks, bytes of a block, first byte there, bytes.
void moe_block_bytes(const uint8_t *from, uint8_t *to, const int64_t *n) {
    for (int64_t i = 0; n[3] == 2 && i < n[0]; i++) memcpy(to + i * 2, from + i * n[1] + n[2], 2);
    for (int64_t i = 0; n[3] == 32 && i < n[0]; i++) memcpy(to + i * 32, from + i * n[1] + n[2], 32);
    for (int64_t i = 0; n[3] != 2 && n[3] != 32 && i < n[0]; i++) memcpy(to + i * n[3], from + i * n[1] + n[2], n[3]);
}

// Of each `width` bytes the low halves are the first `width` codes and the high halves the next; puts neighbours into
// one byte.
INLINE void block_codes(const uint8_t *from, uint8_t *to, const int64_t *n, const int size, const int width) {
    for (int64_t i = 0; i < n[0]; i++, to += size)
        for (int at = 0; at < size; at += width) {
            Bytes codes[8];  // low halves, then high halves, each in the lower byte of a pair
            for (int j = 0; j < width / 16; j++) {
                Pairs pairs;
                memcpy(&pairs, from + i * n[1] + n[2] + at + 16 * j, 16);
                codes[j] = (Bytes)((pairs & 15) | (pairs >> 4 & 240));
                codes[j + width / 16] = (Bytes)((pairs >> 4 & 15) | (pairs >> 8 & 240));
            }
            for (int j = 0; j < width / 16; j++) {
                const Bytes ordered = EVEN(codes[2 * j], codes[2 * j + 1]);
                memcpy(to + at + 16 * j, &ordered, 16);
            }
        }
}

// Orders the 4-bit codes of GGUF's blocks. Numbers: blocks, bytes of a block, first byte there, bytes, width.
void moe_block_codes(const uint8_t *from, uint8_t *to, const int64_t *n) {
    switch (n[4]) {
    case 16: return n[3] == 16 ? block_codes(from, to, n, 16, 16) : block_codes(from, to, n, 128, 16);
    case 32: return block_codes(from, to, n, 128, 32);
    case 64: return block_codes(from, to, n, 128, 64);
    }
}

// As `exchange`, for longer words.
INLINE Longs exchange_longs(Longs word, int distance, uint64_t mask) {
    const Longs moved = (word >> distance ^ word) & mask;
    return word ^ moved ^ moved << distance;
}

// Interleaves the two halves of 32 bytes `times` times, and writes them.
INLINE void interleave(Bytes a, Bytes b, const int times, uint8_t *to) {
    for (int i = 0; i < times; i++) {
        const Bytes first = FIRST(a, b), second = SECOND(a, b);
        a = first, b = second;
    }
    memcpy(to, &a, 16), memcpy(to + 16, &b, 16);
}

// Orders the high bits of Q5_K, bit b of byte j that of weight 32 * b + j. Numbers: blocks, bytes of a block, first
// byte there.
void moe_block_bits(const uint8_t *from, uint8_t *to, const int64_t *n) {
    for (int64_t i = 0; i < n[0]; i++, to += 32) {
        Longs words[2];
        memcpy(words, from + i * n[1] + n[2], 32);
        for (int half = 0; half < 2; half++) {  // transposes 8 bytes of 8 bits (Hacker's Delight, 7-3)
            words[half] = exchange_longs(words[half], 7, 0x00AA00AA00AA00AA);
            words[half] = exchange_longs(words[half], 14, 0x0000CCCC0000CCCC);
            words[half] = exchange_longs(words[half], 28, 0x00000000F0F0F0F0);
        }
        interleave((Bytes)words[0], (Bytes)words[1], 2, to);
    }
}

// Orders the high pairs of bits of Q6_K, pair s of byte j of each half that of weight 32 * s + j. Numbers: as above.
void moe_block_pairs(const uint8_t *from, uint8_t *to, const int64_t *n) {
    for (int64_t i = 0; i < 2 * n[0]; i++, to += 32) {
        Four words[2];
        memcpy(words, from + i / 2 * n[1] + n[2] + i % 2 * 32, 32);
        interleave((Bytes)fold_pairs(words[0]), (Bytes)fold_pairs(words[1]), 3, to);
    }
}

// Joins the 6-bit scales or offsets of Q4_K and Q5_K. Numbers: blocks, bytes of a block, first byte of the low bits of
// four and the high ones of the next, first byte of their other bits, the distance of these from bit 0.
void moe_block_sixes(const uint8_t *from, uint8_t *to, const int64_t *n) {
    for (int64_t i = 0; i < n[0]; i++) {
        uint32_t first, rest;
        memcpy(&first, from + i * n[1] + n[2], 4), memcpy(&rest, from + i * n[1] + n[3], 4);
        const uint32_t joined[2] = {first & 0x3F3F3F3F, (rest >> n[4] & 0x0F0F0F0F) | (first >> 2 & 0x30303030)};
        memcpy(to + 8 * i, joined, 8);
    }
}

// Joins the 6-bit scales of IQ4_XS and subtracts 32. Numbers: blocks, bytes of a block, first byte of their high bits,
// before their low ones.
void moe_block_signed(const uint8_t *from, uint8_t *to, const int64_t *n) {
    for (int64_t i = 0; i < n[0]; i++) {
        const uint8_t *at = from + i * n[1] + n[2], *low = at + 2;
        const uint16_t high = at[0] | at[1] << 8;
        for (int j = 0; j < 8; j++) to[8 * i + j] = ((low[j / 2] >> j % 2 * 4 & 15) | (high >> 2 * j & 3) << 4) - 32;
    }
}
