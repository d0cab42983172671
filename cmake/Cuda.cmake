# The CUDA language and toolkit of the CUDA backend. Included only when DFLASHD_WITH_CUDA is on.
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(FATAL_ERROR "DFLASHD_WITH_CUDA needs nvcc on PATH or in CUDACXX")
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  # 90a: wgmma. A release for more machines: "80-real;86-real;89-real;90a-real;100-real;120".
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()
# The static runtime: a program starts on a machine without CUDA and can say so itself. For the same reason
# nothing links libcuda (CUDA::cuda_driver): the few driver functions are looked up at run time.
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(CMAKE_VERSION VERSION_LESS 3.26)  # 3.25 does not know nvcc's -std=c++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -lineinfo")
find_package(CUDAToolkit 13.0 REQUIRED)

# -fmad=false: kernels say fma where they mean it, so that formulas shared with the CPU give the same bits.
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;--expt-relaxed-constexpr;-Werror=all-warnings>"
                    # Unused: what an older architecture of the same build leaves out.
                    "$<$<COMPILE_LANGUAGE:CUDA>:--diag-suppress=177>"
                    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>")
