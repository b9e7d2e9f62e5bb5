// Detects CPU features, once when the library is loaded.

#include "common.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Returns the feature flags of common.h. Asks Linux for permission to use the matrix unit's registers (AMX), which a
// process needs before it uses them.
int32_t moe_cpu_features(void) {
    int32_t found = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= HAS_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        found |= HAS_AVX512;
    if (found & HAS_AVX512) {
        unsigned eax = 7, ebx, ecx = 0, edx;
        __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
        const int has_tiles = (edx >> 24 & 1) && (edx >> 22 & 1);  // AMX-TILE, AMX-BF16
        if (ecx >> 11 & 1) found |= HAS_INTEGER_DOT;               // AVX512-VNNI
        if (ecx >> 1 & 1) found |= HAS_BYTE_LOOKUP;                // AVX512-VBMI
        eax = 7, ecx = 1;
        __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
        if (eax >> 5 & 1) found |= HAS_BF16_DOT;
        enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
        if (has_tiles && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)
            found |= HAS_MATRIX_UNIT;
    }
#endif
    return found;
}
