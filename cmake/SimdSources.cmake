# simd_sources(<target> <stem>): adds <stem>_scalar.cc, <stem>_avx2.cc and <stem>_avx512.cc of the current folder
# to the target, each compiled for its instruction set (kernels/device/cpu/simd.h).
function(simd_sources target stem)
  set(avx2 -mavx2 -mfma)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ 12 takes the undefined registers in its own AVX-512 intrinsics for a mistake of ours.
    list(APPEND avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  foreach(set scalar avx2 avx512)
    set(file ${CMAKE_CURRENT_SOURCE_DIR}/${stem}_${set}.cc)
    target_sources(${target} PRIVATE ${file})
    set_source_files_properties(${file} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "${${set}}")
  endforeach()
endfunction()
