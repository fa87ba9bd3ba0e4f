# SPDX-License-Identifier: Apache-2.0
# Flags that every target of this project shares.

function(qkvjit_warnings target)
  # maybe-uninitialized: gcc's guess differs by optimisation level, and std::optional of a struct trips it.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic
                         $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  if(QKVJIT_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF)
  if(QKVJIT_SANITIZE)
    # enum: a driver newer than the headers returns codes that they do not name.
    target_compile_options(${target} PRIVATE -fsanitize=${QKVJIT_SANITIZE} -fno-sanitize-recover=all
                                             -fno-sanitize=enum -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${QKVJIT_SANITIZE})
  endif()
endfunction()

# An installable library: public headers in include/, private ones in src/; third-party headers stay private, so
# that a user of the installed package needs none of them.
function(qkvjit_configure_target target)
  qkvjit_warnings(${target})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
    PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target}
    PUBLIC Threads::Threads ${CMAKE_DL_LIBS}
    PRIVATE $<BUILD_INTERFACE:qkvjit_third_party> $<BUILD_INTERFACE:qkvjit_cuda_headers>)
  set_target_properties(${target} PROPERTIES
    POSITION_INDEPENDENT_CODE ON VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endfunction()

function(qkvjit_static_runtime target)
  if(QKVJIT_STATIC_RUNTIME)
    target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc)
  endif()
endfunction()

# A tool or test of this project: may include private headers.
function(qkvjit_private_user target)
  qkvjit_warnings(${target})
  qkvjit_static_runtime(${target})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target} PRIVATE qkvjit qkvjit_third_party qkvjit_cuda_headers)
endfunction()
