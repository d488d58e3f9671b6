# Finds what compiled kernels link to, in the Python environment of the build: the DSL runtime of the CUDA toolkit that
# the compiler uses, and tvm-ffi. Sets CUTE_LIBRARIES and CUTE_RPATH.

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "from cute_kernels.compile import runtime_libraries as r; print(*(p.resolve().as_posix() for p in r()), sep=';', end='')"
  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
  OUTPUT_VARIABLE CUTE_LIBRARIES
  COMMAND_ERROR_IS_FATAL ANY)

# The wheels that carry them install beside ours, so paths relative to twell/_lib find them on any machine.
set(CUTE_RPATH "")
foreach(library IN LISTS CUTE_LIBRARIES)
  if(NOT library MATCHES "/((nvidia_cutlass_dsl|tvm_ffi)/.*)/[^/]+$")
    message(FATAL_ERROR "expected ${library} inside an installed wheel")
  endif()
  list(APPEND CUTE_RPATH "$ORIGIN/../../${CMAKE_MATCH_1}")
endforeach()
