# SPDX-License-Identifier: Apache-2.0
# qkvjit_third_party: fmt and spdlog as headers only. spdlog's own header-only target links the shared libfmt, which
# would make the binaries need that package where they run; so only include folders and definitions are taken.
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(Sodium REQUIRED)
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

add_library(qkvjit_third_party INTERFACE)
foreach(dependency IN ITEMS fmt::fmt-header-only spdlog::spdlog_header_only)
  # Read here, not by a generator expression, which would also follow spdlog's link to the shared libfmt.
  get_target_property(includes ${dependency} INTERFACE_INCLUDE_DIRECTORIES)
  get_target_property(definitions ${dependency} INTERFACE_COMPILE_DEFINITIONS)
  target_include_directories(qkvjit_third_party SYSTEM INTERFACE ${includes})
  target_compile_definitions(qkvjit_third_party INTERFACE ${definitions})
endforeach()
