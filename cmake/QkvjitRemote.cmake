# SPDX-License-Identifier: Apache-2.0
# The transports of qkvjit_remote: QKVJIT_WITH_REDIS (hiredis) and QKVJIT_WITH_HTTP (libcurl), each AUTO (where its
# library is found), ON (else configuring fails) or OFF.

# An installed archive names the library alone: where it lies is the user's machine's business.
function(qkvjit_remote_library name include_dir library)
  target_include_directories(qkvjit_remote SYSTEM PRIVATE ${include_dir})
  target_link_libraries(qkvjit_remote PRIVATE $<BUILD_INTERFACE:${library}> $<INSTALL_INTERFACE:${name}>)
endfunction()

function(qkvjit_remote_transport option header library package source)
  set(${option} AUTO CACHE STRING "The shared cache's transport over lib${library}: AUTO, ON or OFF")
  set_property(CACHE ${option} PROPERTY STRINGS AUTO ON OFF)
  find_path(${option}_INCLUDE_DIR ${header})
  find_library(${option}_LIBRARY ${library})
  mark_as_advanced(${option}_INCLUDE_DIR ${option}_LIBRARY)
  set(is_found OFF)
  if(${option}_INCLUDE_DIR AND ${option}_LIBRARY)
    set(is_found ON)
  endif()
  if("${${option}}" STREQUAL "AUTO")
    set(is_wanted ${is_found})
  else()
    set(is_wanted ${${option}})
  endif()
  if(is_wanted AND NOT is_found)
    message(FATAL_ERROR "${option}=ON needs lib${library} with its headers (Debian: ${package}). Install it, or configure "
                        "with ${option}=OFF.")
  endif()
  message(STATUS "Shared cache, ${option}: ${is_wanted}")
  if(is_wanted)
    target_sources(qkvjit_remote PRIVATE ${source})
    target_compile_definitions(qkvjit_remote PRIVATE ${option})
    qkvjit_remote_library(${library} ${${option}_INCLUDE_DIR} ${${option}_LIBRARY})
  endif()
  set(${option}_BUILT ${is_wanted} PARENT_SCOPE)
endfunction()

qkvjit_remote_transport(QKVJIT_WITH_REDIS hiredis/hiredis.h hiredis libhiredis-dev src/cache/remote/redis.cpp)
qkvjit_remote_transport(QKVJIT_WITH_HTTP curl/curl.h curl libcurl4-openssl-dev src/cache/remote/http.cpp)
if(QKVJIT_WITH_REDIS_BUILT)
  target_sources(qkvjit_remote PRIVATE src/cache/remote/socket.h src/cache/remote/socket.cpp)
endif()
if(QKVJIT_WITH_REDIS_BUILT OR QKVJIT_WITH_HTTP_BUILT)
  target_sources(qkvjit_remote PRIVATE
    src/cache/remote/breaker.h
    src/cache/remote/connection_pool.h
    src/cache/remote/envelope.h
    src/cache/remote/envelope.cpp
    src/cache/remote/remote_store.cpp
    src/cache/remote/store_queue.h
    src/cache/remote/store_queue.cpp)
  target_link_libraries(qkvjit_remote PRIVATE Sodium::sodium)
endif()
