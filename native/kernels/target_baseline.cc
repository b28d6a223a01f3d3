// The loops for any processor of this architecture.
#include "kernels/block_codebook.h"
#include "kernels/block_float.h"
#include "kernels/block_level.h"
#include "kernels/bodies.h"
#include "kernels/loops.h"
#include "kernels/runs.h"

#define ATOLL_INSTANCE baseline
#define ATOLL_TARGET
#define ATOLL_NAME "baseline"
#include "kernels/instance.inc"
