# The extension unisono._core and its type stub, in the wheel and beside the sources (for mypy and editors).

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
find_package(nanobind CONFIG REQUIRED)

nanobind_add_module(_core NB_STATIC NOMINSIZE
  bindings/arguments.cpp
  bindings/array.cpp
  bindings/batch.cpp
  bindings/combine.cpp
  bindings/communicator.cpp
  bindings/dtypes.cpp
  bindings/fabric.cpp
  bindings/module.cpp
  bindings/moe.cpp
  bindings/new_array.cpp
  bindings/norm.cpp
  bindings/numpy_array.cpp
  bindings/py_communicator.cpp
  bindings/py_moe.cpp
  bindings/py_norm.cpp
  bindings/torch_tensor.cpp
  bindings/traits.cpp
  bindings/transports.cpp
  bindings/window.cpp
)
target_include_directories(_core PRIVATE src)
target_compile_definitions(_core PRIVATE UNISONO_VERSION="${PROJECT_VERSION}")
target_link_libraries(_core PRIVATE unisono unisono_flags)
foreach(target IN ITEMS _core nanobind-static) # nanobind's assertions name its files
  target_compile_options(${target} PRIVATE -fmacro-prefix-map=${NB_DIR}=nanobind)
  # else nanobind asks at each reference whether this thread has the GIL: a fifth of a small call
  target_compile_definitions(${target} PRIVATE $<$<NOT:$<CONFIG:Debug>>:NDEBUG>)
endforeach()
set_target_properties(_core PROPERTIES INSTALL_RPATH "$ORIGIN/lib") # libunisono.so of the same package
if(with_cuda)
  target_sources(_core PRIVATE bindings/links.cpp)
  target_compile_definitions(_core PRIVATE UNISONO_CUDA)
  target_link_libraries(_core PRIVATE unisono_links CUDA::cudart_static)
endif()
install(TARGETS _core LIBRARY DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)

set(stub ${PROJECT_SOURCE_DIR}/python/unisono/_core.pyi)
if(NOT CMAKE_CROSSCOMPILING)
  nanobind_add_stub(_core_stub MODULE _core OUTPUT ${stub} PYTHON_PATH $<TARGET_FILE_DIR:_core> DEPENDS _core)
elseif(EXISTS ${stub})
  add_custom_target(_core_stub) # the stub of this machine's own build: the interpreter cannot load the extension
else()
  message(FATAL_ERROR "${stub} is missing: build the package for this machine first (make wheel).")
endif()
install(FILES ${stub} DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)

# A wheel holds no symbolic links: its libunisono.so, which -lunisono looks for, is a linker script.
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/package/libunisono.so CONTENT "INPUT($<TARGET_SONAME_FILE_NAME:unisono>)\n")
install(FILES ${PROJECT_BINARY_DIR}/package/libunisono.so DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT python EXCLUDE_FROM_ALL)

