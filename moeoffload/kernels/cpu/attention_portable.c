// Attention and norms for any CPU, in vectors of four floats.

#define LANES 4
#define TARGET
#define TILE_ROWS 2
#define VALUE_ROWS 4
#define NAME(name) name##_portable
#include "attention_head.h"
#include "norm_rows.h"
