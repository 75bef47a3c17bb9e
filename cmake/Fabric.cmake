# The fabric lane. `with_fabric`: whether it is built; add_fabric_lane() adds it to the library. The build needs only
# libfabric's headers: the library is opened at its first use (src/fabric/library.cpp says why).

set(with_fabric OFF)
if(NOT UNISONO_FABRIC STREQUAL "OFF")
  find_path(LIBFABRIC_INCLUDE_DIR rdma/fi_rma.h)
  find_library(LIBFABRIC_LIBRARY NAMES fabric libfabric.so.1)
  if(LIBFABRIC_INCLUDE_DIR)
    set(with_fabric ON)
  elseif(UNISONO_FABRIC STREQUAL "ON")
    message(FATAL_ERROR "rdma/fi_rma.h was not found: install libfabric-dev, or set LIBFABRIC_INCLUDE_DIR.")
  else()
    message(STATUS "libfabric's headers were not found (Debian: libfabric-dev): the fabric lane is left out.")
  endif()
endif()

function(add_fabric_lane library)
  if(NOT with_fabric)
    target_sources(${library} PRIVATE src/fabric/absent.cpp)
    return()
  endif()
  target_sources(${library} PRIVATE
    src/fabric/channel.cpp
    src/fabric/communicator.cpp
    src/fabric/endpoint.cpp
    src/fabric/fabric_group.cpp
    src/fabric/library.cpp
    src/fabric/memory.cpp
    src/fabric/port.cpp
    src/fabric/provider.cpp
    src/fabric/records.cpp
    src/fabric/settings.cpp
    src/fabric/shm_file.cpp
    src/fabric/transfers.cpp
    src/fabric/watchdog.cpp
  )
  target_include_directories(${library} SYSTEM PRIVATE ${LIBFABRIC_INCLUDE_DIR})
  if(LIBFABRIC_LIBRARY)
    set_source_files_properties(src/fabric/library.cpp PROPERTIES COMPILE_DEFINITIONS "UNISONO_LIBFABRIC=\"${LIBFABRIC_LIBRARY}\"")
  endif()
endfunction()
