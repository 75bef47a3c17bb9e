# cmake -DBUILD=... -DSOURCE=... -DDIR=... -DCXX=... -DCC=... -DGENERATOR=... -P consumer.cmake
# Installs the library, moves the prefix, and builds and runs the consumer from there: by CMake, and by pkg-config.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${DIR})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${DIR}/first)
file(RENAME ${DIR}/first ${DIR}/prefix)
run(${CMAKE_CTEST_COMMAND} --build-and-test ${SOURCE}/tests/consumer ${DIR}/build --build-generator ${GENERATOR}
  --build-options -DCMAKE_PREFIX_PATH=${DIR}/prefix -DCMAKE_CXX_COMPILER=${CXX}
  -DCMAKE_C_COMPILER=${CC} --test-command ${CMAKE_CTEST_COMMAND} -V)
foreach(library IN ITEMS unisono static)
  if(NOT EXISTS ${DIR}/build/with_${library}_in_c)
    message(FATAL_ERROR "unisono::${library} is not in the package.")
  endif()
endforeach()

find_program(PKG_CONFIG NAMES pkgconf pkg-config)
if(NOT PKG_CONFIG)
  message(STATUS "There is no pkg-config: unisono.pc is not tried.")
  return()
endif()
file(GLOB_RECURSE pc ${DIR}/prefix/unisono.pc)
cmake_path(GET pc PARENT_PATH pc_dir)
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir} ${PKG_CONFIG} --cflags --libs unisono
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY
)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${CXX} -std=c++20 ${SOURCE}/examples/06_all_reduce.cpp -o ${DIR}/by_pkg_config ${flags})
run(${CC} -std=c11 ${SOURCE}/examples/11_all_reduce.c -o ${DIR}/by_pkg_config_in_c ${flags})
cmake_path(GET pc_dir PARENT_PATH libraries)
foreach(program IN ITEMS by_pkg_config by_pkg_config_in_c)
  run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${libraries} ${DIR}/${program})
endforeach()
