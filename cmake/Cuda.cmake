# The CUDA lane. Target unisono_cuda holds an instantiation of every program; nothing links it yet, so it is built by name.

set(with_cuda ${UNISONO_CUDA})
if(UNISONO_CUDA STREQUAL "AUTO")
  set(with_cuda OFF)
  include(CheckLanguage)
  if(CMAKE_VERSION VERSION_LESS 3.26)
    message(STATUS "CMake ${CMAKE_VERSION} is older than 3.26: the CUDA lane is left out.")
  else()
    check_language(CUDA)
    set(with_cuda ${CMAKE_CUDA_COMPILER})
    if(NOT with_cuda)
      message(STATUS "No CUDA compiler was found: the CUDA lane is left out.")
    endif()
  endif()
endif()

if(with_cuda)
  cmake_minimum_required(VERSION 3.26) # knows sm_90a, and C++20 in CUDA 13
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 100-real)
  endif()
  enable_language(CUDA)
  add_library(unisono_cuda OBJECT EXCLUDE_FROM_ALL
    src/lane/cuda/links.cu
    src/lane/cuda/programs.cu
    src/lane/cuda/reductions.cu
  )
  # Separable: a kernel calls the reductions through a table, and would otherwise hold a copy of each. What is called from
  # a kernel of kMaxThreads threads has no more than 65536 / 512 registers.
  set_target_properties(unisono_cuda PROPERTIES
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_SEPARABLE_COMPILATION ON
  )
  target_include_directories(unisono_cuda PRIVATE include src)
  target_compile_options(unisono_cuda PRIVATE
    --expt-relaxed-constexpr --fmad=false --maxrregcount=128 --threads=2 -Xcompiler=-Wall,-Wextra
  )
endif()
