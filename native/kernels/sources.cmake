set(ATOLL_KERNEL_SOURCES
    native/kernels/codec.cc
    native/kernels/digest.cc
    native/kernels/outer.cc
    native/kernels/sha256.cc
    native/kernels/targets.cc)
