# Finds what compiled kernels link to, in the Python environment of the build: the DSL runtime of the CUDA toolkit that
# the compiler uses, and tvm-ffi. Sets CUTE_LIBRARIES and CUTE_RPATH; of tvm-ffi alone, for code in C, TVM_FFI_LIBRARY,
# TVM_FFI_INCLUDE and TVM_FFI_RPATH.

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "from cute_kernels.compile import runtime_libraries as r; print(*(p.resolve().as_posix() for p in r()), sep=';', end='')"
  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
  OUTPUT_VARIABLE CUTE_LIBRARIES
  COMMAND_ERROR_IS_FATAL ANY)
if(CMAKE_CROSSCOMPILING)
  # those of the other processor's wheels
  list(TRANSFORM CUTE_LIBRARIES REPLACE ".*/(nvidia_cutlass_dsl|tvm_ffi)/" "${CMAKE_FIND_ROOT_PATH}/\\1/")
endif()

# The wheels that carry them install beside ours, so paths relative to twell/_lib find them on any machine. Where kernels
# run, the runtime may be that of the other toolkit.
set(folders nvidia_cutlass_dsl/cu12/lib nvidia_cutlass_dsl/cu13/lib tvm_ffi/lib)
list(TRANSFORM folders PREPEND "$ORIGIN/../../" OUTPUT_VARIABLE CUTE_RPATH)
list(GET CUTE_LIBRARIES 1 TVM_FFI_LIBRARY)
list(GET CUTE_RPATH 2 TVM_FFI_RPATH)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c
    "from tvm_ffi import libinfo as i; print(i.find_include_path(), i.find_dlpack_include_path(), sep=';', end='')"
  OUTPUT_VARIABLE TVM_FFI_INCLUDE
  COMMAND_ERROR_IS_FATAL ANY)
foreach(library IN LISTS CUTE_LIBRARIES)
  cmake_path(GET library PARENT_PATH folder)
  if(NOT folder MATCHES "/(nvidia_cutlass_dsl/cu1[23]|tvm_ffi)/lib$")
    message(FATAL_ERROR "expected ${library} in one of ${folders} of an installed wheel")
  endif()
endforeach()
