# Compiler flags. unisono_language: for all code that is compiled against the library; unisono_flags: for our own only.

add_library(unisono_language INTERFACE)
target_compile_features(unisono_language INTERFACE cxx_std_20)

add_library(unisono_flags INTERFACE)
target_compile_options(unisono_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
  # g++ 12 warns wrongly on "text" + std::string (GCC bug 105651)
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>
  # several sources as one: g++ takes all but one for headers, whose coroutines must not hold lambdas
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>,$<BOOL:${CMAKE_UNITY_BUILD}>>:-Wno-subobject-linkage>
  # a fused multiply-add would round once where the portable code rounds twice: the bits would differ between machines
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
  # errors of CUDA name their source file: keeps the build machine's folder out of the library
  $<$<COMPILE_LANGUAGE:CXX>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>
)

# A sanitizer's checks take minutes to optimise.
if(UNISONO_SANITIZE STREQUAL "thread")
  set(sanitizers -fsanitize=thread)
  set(level -O1)
elseif(UNISONO_SANITIZE STREQUAL "address")
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all)
  set(level -O0)
elseif(UNISONO_SANITIZE)
  message(FATAL_ERROR "UNISONO_SANITIZE=${UNISONO_SANITIZE} is unknown: use thread or address.")
endif()
if(sanitizers)
  add_compile_options(${sanitizers} ${level} -fno-omit-frame-pointer -g1)
  add_link_options(${sanitizers})
endif()
