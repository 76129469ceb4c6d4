# SPDX-License-Identifier: Apache-2.0
# Sets REPLAYSSM_NVCC: nvcc from PATH or CUDACXX, else from the PyPI packages of the Python that builds
# (nvidia-cuda-nvcc, nvidia-cuda-crt, nvidia-nvvm, nvidia-cuda-runtime, nvidia-cuda-cccl), else empty.
set(REPLAYSSM_NVCC "")
if(REPLAYSSM_CUDA STREQUAL "OFF")
  return()
endif()

if(DEFINED ENV{CUDACXX})
  set(REPLAYSSM_NVCC "$ENV{CUDACXX}")
else()
  find_program(REPLAYSSM_NVCC_ON_PATH nvcc NO_CMAKE_PATH NO_CMAKE_ENVIRONMENT_PATH NO_CMAKE_SYSTEM_PATH)
  if(REPLAYSSM_NVCC_ON_PATH)
    set(REPLAYSSM_NVCC "${REPLAYSSM_NVCC_ON_PATH}")
  endif()
endif()

if(NOT REPLAYSSM_NVCC)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import pathlib, sys; print(next((str(r) for p in sys.path for r in [pathlib.Path(p, 'nvidia', 'cu13')] if (r / 'bin' / 'nvcc').exists()), ''))"
      OUTPUT_VARIABLE REPLAYSSM_CUDA_WHEELS OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(REPLAYSSM_CUDA_WHEELS)
      set(REPLAYSSM_NVCC "${REPLAYSSM_CUDA_WHEELS}/bin/nvcc")
      # The wheels keep their libraries in lib, where nvcc does not look.
      set(CMAKE_CUDA_FLAGS "${CMAKE_CUDA_FLAGS} -L${REPLAYSSM_CUDA_WHEELS}/lib")
    endif()
  endif()
endif()

if(NOT REPLAYSSM_NVCC AND REPLAYSSM_CUDA STREQUAL "ON")
  message(FATAL_ERROR "REPLAYSSM_CUDA=ON, but there is no nvcc on PATH, in CUDACXX or in this Python's packages")
endif()
