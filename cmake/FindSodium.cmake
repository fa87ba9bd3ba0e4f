# SPDX-License-Identifier: Apache-2.0
# Sodium::sodium: libsodium, the static library where there is one, so that binaries run on machines without it.
find_path(Sodium_INCLUDE_DIR sodium.h)
find_library(Sodium_LIBRARY NAMES libsodium.a sodium)
mark_as_advanced(Sodium_INCLUDE_DIR Sodium_LIBRARY)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Sodium REQUIRED_VARS Sodium_LIBRARY Sodium_INCLUDE_DIR
                                  REASON_FAILURE_MESSAGE "install libsodium's development files (Debian: libsodium-dev)")
if(Sodium_FOUND AND NOT TARGET Sodium::sodium)
  add_library(Sodium::sodium UNKNOWN IMPORTED)
  set_target_properties(Sodium::sodium PROPERTIES IMPORTED_LOCATION ${Sodium_LIBRARY}
                                                  INTERFACE_INCLUDE_DIRECTORIES ${Sodium_INCLUDE_DIR})
endif()
