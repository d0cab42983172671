# unit_test(<name> SOURCES ... LIBRARIES ... [LABELS unit|slow|...] [TIMEOUT seconds] [FILTER gtest filter] [NO_MAIN])
# One GoogleTest program, registered with CTest as one test so that a label decides where it runs. Label `threads`:
# it runs our code on several threads, so preset tsan builds (target thread_tests) and runs it.
# Tests find their data through DFLASHD_SOURCE_DIR.
add_custom_target(thread_tests)
function(unit_test name)
  cmake_parse_arguments(A "NO_MAIN" "TIMEOUT;FILTER" "SOURCES;LIBRARIES;LABELS" ${ARGN})
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
  add_test(NAME ${name} COMMAND ${name} $<$<BOOL:${A_FILTER}>:--gtest_filter=${A_FILTER}>)
  # A program that skipped a test counts as skipped, so that it shows. Only GoogleTest's list at the very end says so,
  # which is not the end of the output when anything failed: CTest asks this before the exit code.
  set_tests_properties(${name} PROPERTIES LABELS "${A_LABELS}" TIMEOUT ${A_TIMEOUT}
                       SKIP_REGULAR_EXPRESSION "tests?, listed below:\n(\\[  SKIPPED \\] [^\n]*\n?)+$")
  if("threads" IN_LIST A_LABELS)
    add_dependencies(thread_tests ${name})
  endif()
endfunction()
