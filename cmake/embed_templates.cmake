# SPDX-License-Identifier: Apache-2.0
# cmake -DROOT=… -DOUTPUT=… "-DNAMES=a.cu;common/b.cuh" -P embed_templates.cmake
# Writes the definition of src/compile/kernel_templates.h: every file byte for byte as a raw string literal, and the
# SHA-256 of the text that `sha256sum` prints for all of them in the order of their names (scripts/templates_digest
# computes the same from the tree).
set(delimiter "qkvjit_template")
set(names ${NAMES} qkvjit/specialization.h)
list(SORT names COMPARE STRING)

set(entries "")
set(digest_text "")
foreach(name IN LISTS names)
  if(name STREQUAL "qkvjit/specialization.h")
    set(path ${ROOT}/include/${name})
  else()
    set(path ${ROOT}/kernel_templates/${name})
  endif()
  file(READ ${path} text)
  # What a raw literal, or file(READ), would not carry unchanged.
  file(SIZE ${path} size)
  string(LENGTH "${text}" length)  # bytes
  string(FIND "${text}" ")${delimiter}\"" clash)
  string(FIND "${text}" "\r" carriage_return)
  if(NOT size EQUAL length OR NOT clash EQUAL -1 OR NOT carriage_return EQUAL -1)
    message(FATAL_ERROR "${path} cannot be embedded: it holds a NUL, a carriage return or )${delimiter}\".")
  endif()
  file(SHA256 ${path} hash)
  string(APPEND digest_text "${hash}  ${name}\n")
  string(APPEND entries "    {\"${name}\", R\"${delimiter}(${text})${delimiter}\"},\n")
endforeach()
string(SHA256 digest "${digest_text}")

file(WRITE ${OUTPUT}.tmp "// Written by cmake/embed_templates.cmake. Do not edit.
#include \"compile/kernel_templates.h\"

namespace qkvjit {
namespace {
constexpr TemplateFile kFiles[] = {
${entries}};
}  // namespace

std::span<const TemplateFile> kernel_templates() noexcept { return kFiles; }
std::string_view templates_digest() noexcept { return \"${digest}\"; }

}  // namespace qkvjit
")
file(RENAME ${OUTPUT}.tmp ${OUTPUT})
