# The library as consumers link it: unisono::unisono (libunisono.so) and unisono::static (libunisono.a), of the same objects.

include(GNUInstallDirs)
add_library(unisono SHARED)
add_library(unisono_static STATIC)
add_library(unisono::unisono ALIAS unisono)
add_library(unisono::static ALIAS unisono_static)

foreach(library IN ITEMS unisono unisono_static)
  foreach(object IN LISTS objects)
    target_sources(${library} PRIVATE $<TARGET_OBJECTS:${object}>)
  endforeach()
  target_include_directories(${library} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  )
  target_compile_features(${library} PUBLIC cxx_std_20)
  target_link_libraries(${library} PRIVATE ${dependencies})
  set_target_properties(${library} PROPERTIES LINKER_LANGUAGE CXX)
endforeach()

# The minor version is in the library's name: until 1.0 each may break the ABI (src/core/communicator.cpp checks it too).
set_target_properties(unisono PROPERTIES SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
  LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/exports.map
)
target_link_options(unisono PRIVATE LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/exports.map LINKER:-Bsymbolic-functions)
if(NOT UNISONO_SANITIZE)
  target_link_options(unisono PRIVATE LINKER:-z,defs) # with a sanitizer, the program has its functions
endif()
set_target_properties(unisono_static PROPERTIES OUTPUT_NAME unisono EXPORT_NAME static)
