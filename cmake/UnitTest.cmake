# unit_test(<name> SOURCES ... LIBRARIES ... [LABELS unit|slow|...] [TIMEOUT seconds] [FILTER gtest filter]
#           [THREADS_FILTER gtest filter] [SHORT_FILTER gtest filter] [NO_MAIN])
# One GoogleTest program, registered with CTest as one test so that a label decides where it runs. Label `threads`:
# it runs our code on several threads, so preset tsan builds (target thread_tests) and runs it, with THREADS_FILTER
# in place of FILTER if there is one. Label `long`: it takes so long under the address sanitizer that preset asan leaves
# it out (target short_tests); SHORT_FILTER leaves out a part of it. Tests find their data through DFLASHD_SOURCE_DIR.
#
# test_part(<name> PROGRAM <test program> FILTER <gtest filter> LABELS ... [TIMEOUT seconds])
# Some of the tests of such a program as a test of their own: other labels, more time, or they may be skipped.
add_custom_target(thread_tests)
add_custom_target(short_tests)
if(DFLASHD_SANITIZE MATCHES "thread")
  set(DFLASHD_TSAN ON)
  add_library(absl_mutex_for_tsan OBJECT ${PROJECT_SOURCE_DIR}/tests/sanitizers/absl_mutex.cc)
  target_include_directories(absl_mutex_for_tsan PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(absl_mutex_for_tsan PRIVATE absl::synchronization)
endif()

function(set_test_up name labels timeout)
  # A program that skipped a test counts as skipped, so that it shows. Only GoogleTest's list at the very end says so,
  # which is not the end of the output when anything failed: CTest asks this before the exit code.
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout}
                       SKIP_REGULAR_EXPRESSION "tests?, listed below:\n(\\[  SKIPPED \\] [^\n]*\n?)+$")
endfunction()

function(test_part name)
  cmake_parse_arguments(A "" "PROGRAM;TIMEOUT;FILTER" "LABELS" ${ARGN})
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  add_test(NAME ${name} COMMAND ${A_PROGRAM} --gtest_filter=${A_FILTER})
  set_test_up(${name} "${A_LABELS}" ${A_TIMEOUT})
endfunction()

function(unit_test name)
  cmake_parse_arguments(A "NO_MAIN" "TIMEOUT;FILTER;THREADS_FILTER;SHORT_FILTER" "SOURCES;LIBRARIES;LABELS" ${ARGN})
  if(NOT A_LABELS)
    set(A_LABELS unit)
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  add_executable(${name} ${A_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${name} PRIVATE DFLASHD_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE ${A_LIBRARIES} GTest::gmock)
  if(NOT A_NO_MAIN)
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
  endif()
  if(DFLASHD_TSAN)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:absl_mutex_for_tsan>)
    if(A_THREADS_FILTER)
      set(A_FILTER ${A_THREADS_FILTER})
    endif()
  elseif(DFLASHD_SANITIZE MATCHES "address" AND A_SHORT_FILTER)
    set(A_FILTER ${A_SHORT_FILTER})
  endif()
  add_test(NAME ${name} COMMAND ${name} $<$<BOOL:${A_FILTER}>:--gtest_filter=${A_FILTER}>)
  set_test_up(${name} "${A_LABELS}" ${A_TIMEOUT})
  if("threads" IN_LIST A_LABELS)
    add_dependencies(thread_tests ${name})
  endif()
  if(NOT "long" IN_LIST A_LABELS)
    add_dependencies(short_tests ${name})
  endif()
endfunction()
