# Installed files, by component: library (libunisono.so.*), namelink (libunisono.so), static (libunisono.a), development
# (headers, CMake package, pkg-config file). Files find each other by relative paths, so that a prefix may be moved. A wheel
# has the same layout under unisono/.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/unisono)

install(TARGETS unisono EXPORT unisono LIBRARY COMPONENT library NAMELINK_COMPONENT namelink)
install(EXPORT unisono NAMESPACE unisono:: DESTINATION ${package_dir} FILE unisono-targets.cmake COMPONENT development)

set(static_targets unisono_static)
if(with_cuda)
  list(APPEND static_targets unisono_cuda)
endif()
install(TARGETS ${static_targets} EXPORT unisono_static ARCHIVE COMPONENT static)
install(EXPORT unisono_static NAMESPACE unisono:: DESTINATION ${package_dir} FILE unisono-static-targets.cmake COMPONENT static)

install(DIRECTORY include/unisono TYPE INCLUDE COMPONENT development)
configure_package_config_file(cmake/unisono-config.cmake.in package/unisono-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(package/unisono-config-version.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/package/unisono-config.cmake ${PROJECT_BINARY_DIR}/package/unisono-config-version.cmake
  DESTINATION ${package_dir} COMPONENT development
)

file(RELATIVE_PATH pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/unisono.pc.in package/unisono.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/package/unisono.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
