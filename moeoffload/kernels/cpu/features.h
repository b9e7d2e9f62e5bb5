// Flags of what a CPU can do, as moe_cpu_features returns them.
#pragma once

#include <stdint.h>

enum { HAS_AVX2 = 1, HAS_AVX512 = 2, HAS_BF16_DOT = 4, HAS_VNNI = 8, HAS_MATRIX_UNIT = 16 };

int32_t moe_cpu_features(void);
