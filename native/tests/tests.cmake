# Plain executables run by ctest; see check.h. engine_tests.cmake adds the engine's.
function(atoll_add_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE atoll_core)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 120)
endfunction()

atoll_add_test(kernels_test native/tests/kernels_test.cc)
include(native/tests/engine_tests.cmake OPTIONAL)
