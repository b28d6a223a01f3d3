// The loops for x86-64-v3. Fused multiply-adds are not named: what cannot be generated cannot be
// contracted.
#include "kernels/block_codebook.h"
#include "kernels/block_float.h"
#include "kernels/block_level.h"
#include "kernels/bodies.h"
#include "kernels/loops.h"
#include "kernels/runs.h"

#if ATOLL_X86_64_TARGETS
#include <immintrin.h>

#define ATOLL_HAS_AVX2
#define ATOLL_INSTANCE v3
#define ATOLL_TARGET __attribute__((target("avx2,bmi,bmi2")))
#define ATOLL_NAME "x86-64-v3"
#include "kernels/instance.inc"
#endif
