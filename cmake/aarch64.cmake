# Toolchain for processors with the ARM instruction set, see tools/wheel.py: a C compiler, which also links for an old
# glibc, and the libraries to link to, from the package index.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
cmake_path(SET folder NORMALIZE ${CMAKE_CURRENT_LIST_DIR}/../build/aarch64)
set(CMAKE_C_COMPILER ${folder}/compiler/ziglang/zig cc -target aarch64-linux-gnu.2.28)
set(CMAKE_FIND_ROOT_PATH ${folder}/linked)
# Python runs here
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
