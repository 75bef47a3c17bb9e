# The CUDA lane. `with_cuda`: whether it is built; add_cuda_lane() adds it to the library.

set(with_cuda ${UNISONO_CUDA})
if(UNISONO_CUDA STREQUAL "AUTO")
  set(with_cuda OFF)
  include(CheckLanguage)
  if(CMAKE_VERSION VERSION_LESS 3.26)
    message(STATUS "CMake ${CMAKE_VERSION} is older than 3.26: the CUDA lane is left out.")
  else()
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      set(with_cuda ON)
    else()
      message(STATUS "No CUDA compiler was found: the CUDA lane is left out.")
    endif()
  endif()
endif()

if(with_cuda)
  cmake_minimum_required(VERSION 3.26) # knows sm_90a, and C++20 in CUDA 13
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 100) # the last as PTX too, for newer GPUs
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
endif()

# Adds a static library of CUDA sources, with its device code linked.
function(add_kernels name)
  add_library(${name} STATIC ${ARGN})
  set_target_properties(${name} PROPERTIES
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_SEPARABLE_COMPILATION ON CUDA_RESOLVE_DEVICE_SYMBOLS ON
    CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden UNITY_BUILD OFF
  )
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(${name} PRIVATE
    --expt-relaxed-constexpr --fmad=false --maxrregcount=128 --threads=2 -Xcompiler=-Wall,-Wextra
  )
endfunction()

function(add_cuda_lane library)
  # Separable: a kernel calls the reductions through a table, and would otherwise hold a copy of each. A function that a
  # kernel of kMaxThreads threads calls has at most 65536 / 512 registers.
  add_kernels(unisono_cuda
    src/cuda/kernels/combine.cu
    src/cuda/kernels/exchange.cu
    src/cuda/kernels/programs.cu
    src/cuda/kernels/quantised.cu
    src/cuda/kernels/reductions.cu
    src/cuda/kernels/window.cu
    src/fused/cuda/norm.cu
    src/fused/cuda/one_step.cu
    src/fused/cuda/short_one_step_lines.cu
    src/fused/cuda/short_one_step_packets.cu
    src/fused/cuda/short_rows.cu
    src/fused/cuda/two_steps.cu
    src/moe/cuda/at_once.cu
    src/moe/cuda/at_once_by_expert.cu
    src/moe/cuda/at_once_by_rank.cu
    src/moe/cuda/combine.cu
    src/moe/cuda/dispatch.cu
    src/moe/cuda/low_latency_combine.cu
    src/moe/cuda/low_latency_dispatch.cu
    src/moe/cuda/route.cu
    src/moe/cuda/sort.cu
  )
  add_kernels(unisono_links src/cuda/kernels/links.cu) # for the bench, in the Python extension alone
  target_sources(${library} PRIVATE src/cuda/api.cpp src/cuda/calls.cpp src/cuda/copy_calls.cpp src/cuda/engine.cpp
    src/cuda/exchange_calls.cpp src/cuda/memory.cpp src/cuda/nic.cpp src/cuda/registration.cpp src/cuda/space.cpp
    src/cuda/symmetric.cpp src/cuda/window_calls.cpp src/fused/cuda/gpu_norm.cpp src/moe/cuda/by_copies.cpp
    src/moe/cuda/copies.cpp src/moe/cuda/engine.cpp src/moe/cuda/layout.cpp)
  target_link_libraries(${library} PRIVATE CUDA::cudart_static) # its headers
endfunction()
