# SPDX-License-Identifier: Apache-2.0
# cmake -DREADELF=… "-DFILES=a;b" -DSTATIC_RUNTIME=ON -P check_links.cmake: the files need only the C library's own
# shared objects (and the sanitizers' and libstdc++'s where the build says so); above all nothing of CUDA.
set(allowed "^(libc|libm|libdl|libpthread|librt|ld-linux.*)\\.so")
if(NOT STATIC_RUNTIME)
  set(allowed "^(libc|libm|libdl|libpthread|librt|ld-linux.*|libstdc\\+\\+|libgcc_s|lib[alut]+san)\\.so")
endif()
foreach(file IN LISTS FILES)
  execute_process(COMMAND ${READELF} -d ${file} OUTPUT_VARIABLE output COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "[" "<" output "${output}")  # an open bracket would glue the elements of a list together
  string(REGEX MATCHALL "Shared library: <[^]>]+" needed "${output}")
  if(NOT needed)
    message(SEND_ERROR "${file}: no needed library was read at all.")
  endif()
  set(names "")
  foreach(entry IN LISTS needed)
    string(REGEX REPLACE "^.*<" "" name "${entry}")
    list(APPEND names ${name})
    if(NOT name MATCHES "${allowed}" AND NOT name MATCHES "^libqkvjit")
      message(SEND_ERROR "${file} needs ${name}, which must not be a link dependency.")
    endif()
  endforeach()
  message("${file}: ${names}")
endforeach()
