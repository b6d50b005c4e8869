# What every folder's CMakeLists.txt uses.

add_library(ps_flags INTERFACE)
target_compile_definitions(ps_flags INTERFACE _GNU_SOURCE)
target_include_directories(ps_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(ps_flags INTERFACE
  -Wall -Wextra -Wshadow -Wvla -Wundef -fno-common
  $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes -Wmissing-prototypes>
  $<$<BOOL:${PARAMSYNC_WERROR}>:-Werror>)
target_link_libraries(ps_flags INTERFACE Threads::Threads)
if(PARAMSYNC_SANITIZER STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(PARAMSYNC_SANITIZER STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
endif()

if(PARAMSYNC_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# ps_add_library(NAME SOURCES... LIBS...): a static, position-independent library with the house's flags.
function(ps_add_library name)
  cmake_parse_arguments(A "" "" "SOURCES;LIBS;PRIVATE_LIBS" ${ARGN})
  add_library(${name} STATIC ${A_SOURCES})
  target_link_libraries(${name} PUBLIC ps_flags ${A_LIBS} PRIVATE ${A_PRIVATE_LIBS})
endfunction()

# ps_add_test(NAME SOURCES... LIBS... [LABELS...] [ENV...] [TIMEOUT s]): a cmocka program run by ctest. NAME is test_<source file's name>.
function(ps_add_test name)
  if(NOT PARAMSYNC_TESTS)
    return()
  endif()
  cmake_parse_arguments(A "" "TIMEOUT" "SOURCES;LIBS;LABELS;ENV" ${ARGN})
  if(NOT A_SOURCES)
    set(A_SOURCES ${CMAKE_SOURCE_DIR}/tests/unit/${name}.c)
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 120)
  endif()
  if(NOT A_LABELS)
    set(A_LABELS unit)
  endif()
  pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
  add_executable(${name} ${A_SOURCES})
  target_link_libraries(${name} PRIVATE ps_flags ${A_LIBS} PkgConfig::CMOCKA)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${A_TIMEOUT} LABELS "${A_LABELS}" ENVIRONMENT "${A_ENV}" SKIP_RETURN_CODE 77)
endfunction()

# ps_add_script_test(NAME COMMAND... [LABELS...] [TIMEOUT s]): a script run by ctest; exit status 77 means skipped.
# The script finds the programs in $PS_BIN, the source tree in $PS_SOURCE, the build tree in $PS_BUILD.
function(ps_add_script_test name)
  if(NOT PARAMSYNC_TESTS)
    return()
  endif()
  cmake_parse_arguments(A "SERIAL" "TIMEOUT" "COMMAND;LABELS;ENV" ${ARGN})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  if(NOT A_LABELS)
    set(A_LABELS integration)
  endif()
  add_test(NAME ${name} COMMAND ${A_COMMAND} WORKING_DIRECTORY ${CMAKE_BINARY_DIR})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${A_TIMEOUT} LABELS "${A_LABELS}" SKIP_RETURN_CODE 77
    ENVIRONMENT "PS_BIN=${CMAKE_BINARY_DIR}/bin;PS_SOURCE=${CMAKE_SOURCE_DIR};PS_BUILD=${CMAKE_BINARY_DIR};PS_SANITIZER=${PARAMSYNC_SANITIZER};${A_ENV}")
  if(A_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()

# ps_embed_file(FILE SYMBOL OUT.c): SYMBOL[] and SYMBOL_size hold the file's bytes.
add_executable(ps_embed ${CMAKE_SOURCE_DIR}/cmake/embed.c)
set_target_properties(ps_embed PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tools)
function(ps_embed_file file symbol out)
  add_custom_command(OUTPUT ${out} COMMAND ps_embed ${file} ${symbol} ${out} DEPENDS ${file} ps_embed VERBATIM)
endfunction()
