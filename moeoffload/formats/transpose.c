// Transposes matrices of 4-bit codes that files store column by column, (in, out), to rows, (out, in).
#include "vectors.h"

// BLOCK: columns of words that are processed together, a cache line of the input. RUN: words of an output row that are
// written together, because single words of rows a power of two apart would evict each other from the cache.
enum { BLOCK = 16, RUN = 16, MOST_BYTES = 8 };
typedef uint32_t Words __attribute__((vector_size(4 * BLOCK)));

// Exchanges nibble i of word k with nibble k of word i in BLOCK sets of eight words: a transpose of 8 x 8 codes.
static void exchange_codes(Words words[8])
{
    static const uint32_t masks[3] = {0x0000FFFF, 0x00FF00FF, 0x0F0F0F0F};
    for (int step = 0, distance = 4; step < 3; step++, distance /= 2)
        for (int k = 0; k < 8; k++)
            if (!(k & distance)) {
                Words moved = (words[k] >> 4 * distance ^ words[k + distance]) & masks[step];
                words[k + distance] ^= moved;
                words[k] ^= moved << 4 * distance;
            }
}

// Copies n bytes, which usually are `usual`, a constant: such copies are much faster than those of any length.
INLINE void copy(void *to, const void *from, const long n, const long usual)
{
    if (n == usual) memcpy(to, from, usual);
    else memcpy(to, from, n);
}

INLINE void transpose(const uint8_t *from, uint8_t *to, const long n_rows, const long n_columns, const long size)
{
    for (long column = 0; column < n_columns; column += BLOCK) {
        long width = n_columns - column < BLOCK ? n_columns - column : BLOCK;
        for (long row = 0; row < n_rows; row += RUN) {
            long height = n_rows - row < RUN ? n_rows - row : RUN;
            uint8_t runs[BLOCK][RUN * MOST_BYTES];
            for (long k = 0; k < height; k++)
                for (long m = 0; m < width; m++)
                    memcpy(runs[m] + k * size, from + ((row + k) * n_columns + column + m) * size, size);
            for (long m = 0; m < width; m++)
                copy(to + ((column + m) * n_rows + row) * size, runs[m], size * height, size * RUN);
        }
    }
}

// Transposes items of `size` bytes (rows, columns). Numbers: rows, columns, size.
void moe_transpose_items(const uint8_t *from, uint8_t *to, const int64_t *n)
{
    switch (n[2]) {
    case 2: return transpose(from, to, n[0], n[1], 2);
    case 4: return transpose(from, to, n[0], n[1], 4);
    default: return transpose(from, to, n[0], n[1], n[2]);
    }
}

// Transposes words (rows, columns), each of one code of eight output rows, of which the i-th is in nibble i of `places`,
// to (8 * columns, rows / 8) words of eight codes of one row. Numbers: rows, columns, places.
void moe_transpose_codes(const uint8_t *from, uint8_t *to, const int64_t *n)
{
    const long n_blocks = n[0] / 8, n_columns = n[1], places = n[2];
    for (long column = 0; column < n_columns; column += BLOCK) {
        const long width = n_columns - column < BLOCK ? n_columns - column : BLOCK;
        for (long first = 0; first < n_blocks; first += RUN) {
            const long height = n_blocks - first < RUN ? n_blocks - first : RUN;
            Four runs[8 * BLOCK][RUN / 4];
            for (long block = 0; block < height; block += 4) {
                Words sets[4][8] = {0};
                for (long b = 0; b < 4 && block + b < height; b++) {
                    const uint8_t *row = from + 4 * (8 * (first + block + b) * n_columns + column);
                    for (int k = 0; k < 8; k++) copy(&sets[b][k], row + 4 * k * n_columns, 4 * width, 4 * BLOCK);
                    exchange_codes(sets[b]);
                }
                for (int i = 0; i < 8; i++)
                    for (int m = 0; m < BLOCK; m += 4) {
                        Four words[4];
                        for (int b = 0; b < 4; b++)
                            memcpy(&words[b], (uint32_t *)&sets[b][places >> 4 * i & 7] + m, sizeof words[b]);
                        transpose_words(words);
                        for (int b = 0; b < 4; b++) runs[8 * (m + b) + i][block / 4] = words[b];
                    }
            }
            for (long row = 0; row < 8 * width; row++)
                copy(to + 4 * ((8 * column + row) * n_blocks + first), runs[row], 4 * height, 4 * RUN);
        }
    }
}

// Splits words of the zero points of eight rows. Numbers: words of a group, groups, words from one to the next of a
// group, and of a row; what to add to each word; the nibble of each row.
void moe_split_zeros(const uint8_t *from, uint8_t *to, const int64_t *n)
{
    const uint32_t *words = (const uint32_t *)from;
    for (int64_t i = 0; i < n[0]; i++)
        for (int64_t group = 0; group < n[1]; group++) {
            const uint32_t word = words[i * n[2] + group * n[3]] + (uint32_t)n[4];
            for (int row = 0; row < 8; row++)
                to[(8 * i + row) * n[1] + group] = word >> 4 * (n[5] >> 4 * row & 7) & 15;
        }
}
