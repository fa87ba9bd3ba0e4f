# SPDX-License-Identifier: Apache-2.0
# Run in the project's root: the digest that the build embedded is the one scripts/templates_digest computes.
execute_process(COMMAND scripts/templates_digest OUTPUT_VARIABLE tree OUTPUT_STRIP_TRAILING_WHITESPACE
                COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${GENERATED} line REGEX "string_view templates_digest")
string(REGEX MATCH "[0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f][0-9a-f]+" embedded "${line}")
if(NOT tree STREQUAL embedded OR tree STREQUAL "")
  message(FATAL_ERROR "scripts/templates_digest says '${tree}', the build embedded '${embedded}'.")
endif()
message("templates digest ${tree}")
