// The loops for x86-64-v4. AVX-512 brings fused multiply-adds of its own; -ffp-contract=off alone
// keeps them out.
#include "kernels/block_codebook.h"
#include "kernels/block_float.h"
#include "kernels/block_level.h"
#include "kernels/bodies.h"
#include "kernels/loops.h"
#include "kernels/runs.h"

#if ATOLL_X86_64_TARGETS
#include <immintrin.h>

#define ATOLL_HAS_AVX2
#define ATOLL_INSTANCE v4
#define ATOLL_TARGET \
  __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,prefer-vector-width=512")))
#define ATOLL_NAME "x86-64-v4"
#include "kernels/instance.inc"
#endif
