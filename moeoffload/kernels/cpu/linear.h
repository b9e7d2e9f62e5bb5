// A linear layer for few rows, and its two steps for calls that compute several layers together.
#pragma once

#include "tiles.h"

typedef struct {
    int64_t dtype, features;
    const char *weight;  // (n_out, n_in); NULL: packed
    const Matrix *parts;
    const char *bias;    // (n_out), or NULL
    const char *rows;    // (n_rows, n_in)
    char *out;           // (n_rows, n_out)
    int64_t n_in, n_out, n_rows, n_threads;
    Parallel parallel;
    char *operands;  // moe_operand_bytes(n_in) bytes for each row
    char *scratch;   // (n_threads, scratch_bytes()) for packed weights
    _Atomic int64_t claimed, n_started;
} LinearCall;

int64_t moe_operand_bytes(int64_t n);
// Converts the rows to operands, in the calling thread.
void prepare_linear(LinearCall *c);
// Claims and computes blocks of weight rows until none are left; `thread` is the number of the calling thread.
void compute_linear(LinearCall *c, int64_t thread);
void moe_linear(LinearCall *c);
