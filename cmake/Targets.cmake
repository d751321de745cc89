# One library a folder, one test binary a noun; every target gets the same warnings.

include(GoogleTest)

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

add_library(dmuon_flags INTERFACE)
target_include_directories(dmuon_flags INTERFACE ${PROJECT_SOURCE_DIR})
set(DMUON_COMPILE_OPTIONS
  -Wall -Wextra -Wno-missing-field-initializers -fno-rtti
  $<$<CONFIG:Release>:-fno-omit-frame-pointer>)
if(PROJECT_IS_TOP_LEVEL)
  target_compile_options(dmuon_flags INTERFACE ${DMUON_COMPILE_OPTIONS})
else()
  add_compile_options(${DMUON_COMPILE_OPTIONS})  # whoever links the client has warnings and RTTI as he likes
endif()
if(DMUON_SANITIZE)
  # vptr needs the type information that -fno-rtti leaves out.
  add_compile_options(-fsanitize=${DMUON_SANITIZE} -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${DMUON_SANITIZE})
endif()

# dmuon_library(NAME SRCS a.cc ... DEPS x ...): a static library of this folder.
function(dmuon_library NAME)
  cmake_parse_arguments(A "" "" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  if(A_SRCS)
    add_library(${NAME} STATIC ${A_SRCS})
    target_link_libraries(${NAME} PUBLIC dmuon_flags ${A_DEPS} PRIVATE ${A_PRIVATE_DEPS})
  else()
    add_library(${NAME} INTERFACE)
    target_link_libraries(${NAME} INTERFACE dmuon_flags ${A_DEPS})
  endif()
endfunction()

# dmuon_test(NAME SRCS a_test.cc ... DEPS x ... [LABELS l ...] [TIMEOUT s]): a GoogleTest binary, known to ctest.
function(dmuon_test NAME)
  cmake_parse_arguments(A "" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${NAME} ${A_SRCS})
  target_link_libraries(${NAME} PRIVATE dmuon_flags ${A_DEPS} GTest::gmock_main)
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 120)
  endif()
  gtest_discover_tests(${NAME} PROPERTIES LABELS "${A_LABELS}" TIMEOUT ${A_TIMEOUT} DISCOVERY_TIMEOUT 60)
endfunction()
