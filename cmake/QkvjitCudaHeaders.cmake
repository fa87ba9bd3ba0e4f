# SPDX-License-Identifier: Apache-2.0
# qkvjit_cuda_headers: an interface target with the folders of cuda.h and nvrtc.h, which is all that a build needs
# of CUDA. Looked for in QKVJIT_CUDA_INCLUDE_DIR (one folder or a list), CUDA_HOME, CUDA_PATH, the active virtual
# environment and .venv (the PyPI wheels nvidia-cuda-runtime and nvidia-cuda-nvrtc), and /usr/local/cuda*.
set(QKVJIT_CUDA_INCLUDE_DIR "" CACHE STRING "Folder, or list of folders, with cuda.h and nvrtc.h")

set(qkvjit_cuda_roots "")
foreach(variable IN ITEMS CUDA_HOME CUDA_PATH)
  if(DEFINED ENV{${variable}})
    list(APPEND qkvjit_cuda_roots $ENV{${variable}})
  endif()
endforeach()
file(GLOB qkvjit_cuda_toolkits LIST_DIRECTORIES true /usr/local/cuda /usr/local/cuda-*)
list(SORT qkvjit_cuda_toolkits COMPARE NATURAL ORDER DESCENDING)
file(GLOB qkvjit_cuda_wheels LIST_DIRECTORIES true
     $ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/cu*
     ${CMAKE_CURRENT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu*)
list(APPEND qkvjit_cuda_roots ${qkvjit_cuda_toolkits} ${qkvjit_cuda_wheels})

foreach(header IN ITEMS cuda nvrtc)
  if(QKVJIT_CUDA_INCLUDE_DIR)
    find_path(QKVJIT_${header}_H_DIR ${header}.h PATHS ${QKVJIT_CUDA_INCLUDE_DIR} NO_DEFAULT_PATH)
  else()
    find_path(QKVJIT_${header}_H_DIR ${header}.h HINTS ${qkvjit_cuda_roots}
              PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include)
  endif()
  mark_as_advanced(QKVJIT_${header}_H_DIR)
  if(NOT QKVJIT_${header}_H_DIR)
    message(FATAL_ERROR
      "${header}.h was not found. Install a CUDA toolkit (12.3 or newer), or: python3 -m venv .venv && "
      ".venv/bin/pip install nvidia-cuda-runtime nvidia-cuda-nvrtc; or name its folder: "
      "-DQKVJIT_CUDA_INCLUDE_DIR=FOLDER.")
  endif()
endforeach()

add_library(qkvjit_cuda_headers INTERFACE)
target_include_directories(qkvjit_cuda_headers SYSTEM INTERFACE
                           ${QKVJIT_cuda_H_DIR} ${QKVJIT_nvrtc_H_DIR})
