// Packed rows become tiles of 16 rows, and back: see formats/tiles.py.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 16, BLOCK = 32 };  // rows of a tile, weights of a block

// The structure is that of formats/tiles.py. Places are in bytes from the beginning of a row, -1: there are none.
typedef struct {
    int64_t n_in, row_bytes, code_bits, high_bits, high, scales, scale_bytes, offsets, factors, min_factors;
    int64_t group;  // weights that share a scale
} Rows;

// One tile and its rows. `at` moves over the tile.
typedef struct {
    uint8_t *rows, *at;
    int64_t row_bytes;
    int is_back;
} Move;

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
static uint32_t flip_signs(uint32_t word) { return word ^ 0x80808080; }

// `size` bytes at `place` of each row.
static void move_bytes(Move *m, int64_t place, int64_t size) {
    for (int r = 0; r < TILE; r++, m->at += size) {
        uint8_t *row = m->rows + r * m->row_bytes + place;
        memcpy(m->is_back ? row : m->at, m->is_back ? m->at : row, size);
    }
}

// A word at `place` of each row, changed.
static inline __attribute__((always_inline)) void move_words(Move *m, int64_t place, uint32_t there(uint32_t),
                                                             uint32_t back(uint32_t)) {
    for (int r = 0; r < TILE; r++, m->at += 4) {
        uint8_t *row = m->rows + r * m->row_bytes + place;
        uint32_t word;
        memcpy(&word, m->is_back ? m->at : row, 4);
        word = m->is_back ? back(word) : there(word);
        memcpy(m->is_back ? row : m->at, &word, 4);
    }
}

static void move_tile(const Rows *of, Move *m) {
    for (int64_t k = 0; k < of->n_in; k += BLOCK) {
        if (k % 256 == 0 && of->factors >= 0) move_bytes(m, of->factors + k / 256 * 2, 2);
        if (k % 256 == 0 && of->min_factors >= 0) move_bytes(m, of->min_factors + k / 256 * 2, 2);
        for (int64_t group = k; group < k + BLOCK; group += of->group < BLOCK ? of->group : BLOCK) {
            if (group % of->group) continue;
            move_bytes(m, of->scales + group / of->group * of->scale_bytes, of->scale_bytes);
            if (of->offsets >= 0) move_bytes(m, of->offsets + group / of->group, 1);
        }
        if (of->high_bits == 1) move_words(m, of->high + k / 8, fold_bits, unfold_bits);
        if (of->high_bits == 2)
            for (int half = 0; half < 2; half++) move_words(m, of->high + k / 4 + 4 * half, fold_pairs, fold_pairs);
        if (of->code_bits == 8)
            for (int i = 0; i < BLOCK; i += 4) move_words(m, k + i, flip_signs, flip_signs);
        else
            for (int i = 0; i < BLOCK / 2; i += 4) move_words(m, k / 2 + i, fold_nibbles, unfold_nibbles);
    }
}

// Rows at `rows` become tiles there. Returns whether there was memory for it.
int moe_make_tiles(const Rows *of, uint8_t *rows, int64_t n_tiles) {
    const int64_t bytes = TILE * of->row_bytes;
    uint8_t *copy = malloc(bytes);
    if (!copy) return 0;
    for (int64_t i = 0; i < n_tiles; i++, rows += bytes) {
        memcpy(copy, rows, bytes);
        Move move = {copy, rows, of->row_bytes, 0};
        move_tile(of, &move);
        memset(move.at, 0, rows + bytes - move.at);
    }
    free(copy);
    return 1;
}

// Rows of tiles at `tiles`, written to `rows`.
void moe_read_tiles(const Rows *of, uint8_t *tiles, uint8_t *rows, int64_t n_tiles) {
    const int64_t bytes = TILE * of->row_bytes;
    memset(rows, 0, n_tiles * bytes);
    for (int64_t i = 0; i < n_tiles; i++, tiles += bytes, rows += bytes) {
        Move move = {rows, tiles, of->row_bytes, 1};
        move_tile(of, &move);
    }
}
