// Packed rows become tiles of 16 rows, and back: see formats/tiles.py.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 16, BLOCK = 32 };  // rows of a tile, weights of a block

// The structure is that of formats/tiles.py. Places are in bytes from the beginning of a row, -1: there are none.
typedef struct {
    int64_t n_in, row_bytes, code_bits, high_bits, high, scales, scale_bytes, offsets, factors, min_factors;
    int64_t group;  // weights that share a scale
    int64_t is_fp8;
} Rows;

static uint32_t spread(uint32_t nibbles) {
    nibbles = (nibbles | nibbles << 8) & 0x00FF00FF;
    return (nibbles | nibbles << 4) & 0x0F0F0F0F;
}
static uint32_t gather(uint32_t bytes) {
    bytes = (bytes | bytes >> 4) & 0x00FF00FF;
    return (bytes | bytes >> 8) & 0xFFFF;
}

// Eight codes of 4 bits in order, and as the bytes of the first four with the next four in their upper halves.
static uint32_t fold_nibbles(uint32_t word) { return spread(word & 0xFFFF) | spread(word >> 16) << 4; }
static uint32_t unfold_nibbles(uint32_t word) { return gather(word & 0x0F0F0F0F) | gather(word >> 4 & 0x0F0F0F0F) << 16; }

// 32 bits in order, and as four bytes: bit s of byte j is that of weight 4 * s + j.
static uint32_t fold_bits(uint32_t word) {
    uint32_t out = 0;
    for (int s = 0; s < 8; s++) out |= ((word >> 4 * s & 15) * 0x00204081 & 0x01010101) << s;
    return out;
}
static uint32_t unfold_bits(uint32_t word) {
    uint32_t out = 0;
    for (int s = 0; s < 8; s++) out |= ((word >> s & 0x01010101) * 0x01020408 >> 24 & 15) << 4 * s;
    return out;
}

// 16 pairs of bits likewise: its own inverse, a matrix of pairs transposed.
static uint32_t fold_pairs(uint32_t word) {
    uint32_t moved = (word >> 6 ^ word) & 0x00CC00CC;
    word ^= moved ^ moved << 6;
    moved = (word >> 12 ^ word) & 0x0000F0F0;
    return word ^ moved ^ moved << 12;
}
static uint32_t same(uint32_t word) { return word; }
static uint32_t flip_signs(uint32_t word) { return word ^ 0x80808080; }

#define INLINE static inline __attribute__((always_inline))

// `size` bytes at `place` of each row, to the tile or back; returns what follows them in the tile.
INLINE uint8_t *move_bytes(const int is_back, const Rows *of, uint8_t *rows, int64_t place, int64_t size, uint8_t *at) {
    const int64_t row_bytes = of->row_bytes;
    rows += place;
    for (int r = 0; r < TILE; r++, rows += row_bytes, at += size)
        memcpy(is_back ? rows : at, is_back ? at : rows, size);
    return at;
}

// `n_words` words at `place` of each row, likewise, changed; all first words, then all second ones.
INLINE uint8_t *move_words(const int is_back, const Rows *of, uint8_t *rows, int64_t place, const int n_words, uint8_t *at,
                           uint32_t there(uint32_t), uint32_t back(uint32_t)) {
    const int64_t row_bytes = of->row_bytes;
    uint32_t words[TILE][BLOCK / 4], tile[BLOCK / 4][TILE];
    rows += place;
    if (is_back) {
        memcpy(tile, at, 4 * TILE * n_words);
        for (int r = 0; r < TILE; r++) {
            for (int i = 0; i < n_words; i++) words[r][i] = back(tile[i][r]);
            memcpy(rows + r * row_bytes, words[r], 4 * n_words);
        }
    } else {
        for (int r = 0; r < TILE; r++) memcpy(words[r], rows + r * row_bytes, 4 * n_words);
        for (int i = 0; i < n_words; i++)
            for (int r = 0; r < TILE; r++) tile[i][r] = there(words[r][i]);
        memcpy(at, tile, 4 * TILE * n_words);
    }
    return at + 4 * TILE * n_words;
}

// Returns the end of what is used of the tile.
INLINE uint8_t *move_tile(const int is_back, const Rows *of, uint8_t *rows, uint8_t *at) {
    const int64_t step = of->group < BLOCK ? of->group : BLOCK;
    for (int64_t k = 0; k < of->n_in; k += BLOCK) {
        if (k % 256 == 0 && of->factors >= 0) at = move_bytes(is_back, of, rows, of->factors + k / 256 * 2, 2, at);
        if (k % 256 == 0 && of->min_factors >= 0) at = move_bytes(is_back, of, rows, of->min_factors + k / 256 * 2, 2, at);
        for (int64_t start = k; start < k + BLOCK; start += step) {
            const int64_t group = start / of->group;
            if (start % of->group) continue;
            at = move_bytes(is_back, of, rows, of->scales + group * of->scale_bytes, of->scale_bytes, at);
            if (of->offsets >= 0) at = move_bytes(is_back, of, rows, of->offsets + group, 1, at);
        }
        if (of->high_bits == 1) at = move_words(is_back, of, rows, of->high + k / 8, 1, at, fold_bits, unfold_bits);
        if (of->high_bits == 2) at = move_words(is_back, of, rows, of->high + k / 4, 2, at, fold_pairs, fold_pairs);
        at = of->is_fp8           ? move_words(is_back, of, rows, k, 8, at, same, same)
             : of->code_bits == 8 ? move_words(is_back, of, rows, k, 8, at, flip_signs, flip_signs)
                                  : move_words(is_back, of, rows, k / 2, 4, at, fold_nibbles, unfold_nibbles);
    }
    return at;
}

// Rows at `rows` become tiles there. Returns whether there was memory for it.
int moe_make_tiles(const Rows *of, uint8_t *rows, int64_t n_tiles) {
    const int64_t bytes = TILE * of->row_bytes;
    uint8_t *copy = malloc(bytes);
    if (!copy) return 0;
    for (int64_t i = 0; i < n_tiles; i++, rows += bytes) {
        memcpy(copy, rows, bytes);
        uint8_t *end = move_tile(0, of, copy, rows);
        memset(end, 0, rows + bytes - end);
    }
    free(copy);
    return 1;
}

// Rows of tiles at `tiles`, written to `rows`.
void moe_read_tiles(const Rows *of, uint8_t *tiles, uint8_t *rows, int64_t n_tiles) {
    const int64_t bytes = TILE * of->row_bytes;
    memset(rows, 0, n_tiles * bytes);
    for (int64_t i = 0; i < n_tiles; i++, tiles += bytes, rows += bytes) move_tile(1, of, rows, tiles);
}
