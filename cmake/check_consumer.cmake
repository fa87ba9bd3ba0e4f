# SPDX-License-Identifier: Apache-2.0
# Installs BUILD into a fresh prefix, builds README.md's example against it as a user would (with fmt, spdlog and
# nlohmann-json hidden, since the package must not need them) and runs it: with no GPU it must end with one sentence.
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

# The first ```cpp block of README.md.
file(READ ${SOURCE}/README.md readme)
string(FIND "${readme}" "```cpp\n" begin)
if(begin EQUAL -1)
  message(FATAL_ERROR "README.md has no ```cpp block.")
endif()
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${readme}" ${begin} -1 rest)
string(FIND "${rest}" "```" end)
string(SUBSTRING "${rest}" 0 ${end} example)
file(WRITE ${WORK}/example.cpp "${example}")

execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix OUTPUT_QUIET
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(
  COMMAND ${CMAKE_COMMAND} --no-warn-unused-cli -S ${SOURCE}/tests/consumer -B ${WORK}/build -G ${GENERATOR} -DCMAKE_BUILD_TYPE=Release
          -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_PREFIX_PATH=${WORK}/prefix -DEXAMPLE=${WORK}/example.cpp
          -DQKVJIT_EXPECTED_VERSION=${VERSION} -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON
          -DCMAKE_DISABLE_FIND_PACKAGE_spdlog=ON -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON
  COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${WORK}/build COMMAND_ERROR_IS_FATAL ANY)

execute_process(COMMAND ${WORK}/build/version OUTPUT_VARIABLE output OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
if(NOT output STREQUAL VERSION)
  message(FATAL_ERROR "The installed library says version '${output}', not '${VERSION}'.")
endif()

execute_process(COMMAND ${WORK}/build/example RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE error)
message("exit code ${code}\n${output}${error}")
if(code EQUAL 0 AND output MATCHES "Q \\[16, 4096\\]")
  return()  # there is a GPU here, and it computed
endif()
string(REGEX MATCHALL "\n" lines "${error}")
list(LENGTH lines count)
if(NOT code EQUAL 1 OR NOT count EQUAL 1 OR NOT output STREQUAL "" OR NOT error MATCHES "driver|libcuda|GPU")
  message(FATAL_ERROR "With no GPU the example must end with exit code 1 and one line that says what is missing.")
endif()
