set(ATOLL_KERNEL_SOURCES
    native/kernels/codec.cc
    native/kernels/digest.cc
    native/kernels/outer.cc
    native/kernels/sha256.cc
    native/kernels/target_baseline.cc
    native/kernels/target_v3.cc
    native/kernels/target_v4.cc
    native/kernels/targets.cc)

# Nobody looks at the floating-point exception flags; GCC vectorises a choice between two values only if it may set them.
# No value changes.
set_source_files_properties(
    native/kernels/target_baseline.cc native/kernels/target_v3.cc native/kernels/target_v4.cc PROPERTIES COMPILE_OPTIONS -fno-trapping-math)
