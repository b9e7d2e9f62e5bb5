// The kernels for any CPU, with vectors of four floats.

#include "experts.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LANES 4
#define TARGET
#define TILE_ROWS 3
#include "formats.h"

#define KEY_ROWS 2
#define VALUE_ROWS 4
#define SET(name) name##_portable
#include "attention_few.h"
#include "norm_rows.h"
#include "rotary_rows.h"

const Kernels *const portable_kernels[N_TYPES] = {&kernels_bf16, &kernels_f16, &kernels_f32};
