# SPDX-License-Identifier: Apache-2.0
# The device sources that are compiled into the library as text, by the names they include each other by.
# A file missing from this list cannot be found by NVRTC; a test compares the list with the tree.
set(qkvjit_template_names
    qkv_params.h
    qkv_simple.cu
    qkv_decode.cu
    qkv_gemv.cu
    qkv_mma_sync.cu
    qkv_prefill.cu
    qkv_prepack.cu
    qkv_unpack.cu
    qkv_wgmma.cu
    common/copy.cuh
    common/decode_ring.cuh
    common/dequantize.cuh
    common/epilogue.cuh
    common/packed_tiles.cuh
    common/tile_space.cuh
    ptx/grid.cuh
    ptx/mbarrier.cuh
    ptx/memory.cuh
    ptx/mma.cuh
    ptx/numeric.cuh
    ptx/tma.cuh
    ptx/wgmma.cuh
    ptx/wgmma_shapes.cuh)
set(qkvjit_template_files ${PROJECT_SOURCE_DIR}/include/qkvjit/specialization.h)
foreach(name IN LISTS qkvjit_template_names)
  list(APPEND qkvjit_template_files ${PROJECT_SOURCE_DIR}/kernel_templates/${name})
endforeach()

set(qkvjit_kernel_templates_cpp ${PROJECT_BINARY_DIR}/generated/kernel_templates.cpp)
add_custom_command(
  OUTPUT ${qkvjit_kernel_templates_cpp}
  COMMAND ${CMAKE_COMMAND} -DROOT=${PROJECT_SOURCE_DIR} -DOUTPUT=${qkvjit_kernel_templates_cpp}
          "-DNAMES=${qkvjit_template_names}" -P ${PROJECT_SOURCE_DIR}/cmake/embed_templates.cmake
  DEPENDS ${qkvjit_template_files} ${PROJECT_SOURCE_DIR}/cmake/embed_templates.cmake
  COMMENT "Embedding the kernel templates"
  VERBATIM)
