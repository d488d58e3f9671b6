# cute_aot_library(TARGET ARCH arch FOLDER folder RPATH path... [SYMBOLS symbol...])
#
# Compiles kernels ahead of time for one architecture and links them into one shared library in a folder of the build,
# with manifest.json beside it. Needs no GPU and no CUDA toolkit. Kernels whose names begin with the same word share a
# process, and all of words with one or two kernels, because importing the compiler takes as long as a kernel; the
# depfile makes their objects stale if one of their sources changed. No target where the architecture runs none of the
# symbols.

function(cute_aot_library target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "ARCH;FOLDER" "RPATH;SYMBOLS")
  execute_process(
    COMMAND ${Python_EXECUTABLE} -m cute_kernels list ${arg_SYMBOLS} --arch ${arg_ARCH}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    OUTPUT_VARIABLE symbols OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" symbols "${symbols}")
  if(NOT symbols)
    message(WARNING "no kernel for ${arg_ARCH}: it compiles none of ${arg_SYMBOLS}")
    return()
  endif()
  # the list is read when the build is configured
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/cute_kernels/specs.py ${PROJECT_SOURCE_DIR}/cute_kernels/catalog.py)

  set(groups "")
  foreach(symbol IN LISTS symbols)
    string(REGEX REPLACE "_.*" "" group ${symbol})
    list(APPEND groups ${group})
    list(APPEND symbols_${group} ${symbol})
  endforeach()
  list(REMOVE_DUPLICATES groups)
  set(words ${groups})
  foreach(group IN LISTS words)
    list(LENGTH symbols_${group} count)
    if(count LESS 3)
      list(APPEND symbols_others ${symbols_${group}})
      list(REMOVE_ITEM groups ${group})
    endif()
  endforeach()
  if(symbols_others)
    list(APPEND groups others)
  endif()
  # the last ones, of training, take longest: they start first
  list(REVERSE groups)

  set(directory ${arg_FOLDER}/objects)
  file(MAKE_DIRECTORY ${directory}/kept)
  set(objects "")
  foreach(group IN LISTS groups)
    list(TRANSFORM symbols_${group} REPLACE "(.+)" "${directory}/\\1.o" OUTPUT_VARIABLE outputs)
    add_custom_command(
      OUTPUT ${outputs}
      # PTX, for the emulator of tests; the compiler's own copy of it goes to a folder that is not read
      COMMAND ${CMAKE_COMMAND} -E env CUTE_DSL_DUMP_DIR=${directory}/kept ${Python_EXECUTABLE} -m cute_kernels compile ${symbols_${group}} --keep-ptx
        --arch ${arg_ARCH} --host ${CMAKE_SYSTEM_PROCESSOR} -d ${directory} --depfile ${directory}/${group}.d
      DEPFILE ${directory}/${group}.d
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
      COMMENT "Compiling ${group} for ${arg_ARCH}"
      VERBATIM)
    list(APPEND objects ${outputs})
  endforeach()

  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cute_kernels/*.py)
  set(manifest ${arg_FOLDER}/manifest.json)
  add_custom_command(
    OUTPUT ${manifest}
    COMMAND ${Python_EXECUTABLE} -m cute_kernels manifest ${symbols} --arch ${arg_ARCH} > ${manifest}
    DEPENDS ${sources}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    COMMENT "Writing manifest.json"
    VERBATIM)
  add_custom_target(${target}_manifest ALL DEPENDS ${manifest})

  add_library(${target} SHARED ${objects})
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME twell_kernels
    LIBRARY_OUTPUT_DIRECTORY ${arg_FOLDER}
    LINKER_LANGUAGE C
    INSTALL_RPATH "${arg_RPATH}"
    # no path of the build machine, not even before the install step
    BUILD_WITH_INSTALL_RPATH TRUE)
  target_link_libraries(${target} PRIVATE ${CUTE_LIBRARIES})
  target_link_options(${target} PRIVATE LINKER:-z,defs LINKER:--strip-all)
endfunction()
