# SPDX-License-Identifier: Apache-2.0
# Sets REPLAYSSM_TENSORRT_INCLUDE_DIR, where it is not given, to a directory with NvInferRuntime.h of TensorRT 10.14 or
# later: that of the Python package kernel-lens, which ships the headers (Apache-2.0), else one of the system.
set(REPLAYSSM_TENSORRT_INCLUDE_DIR "" CACHE PATH "Directory of NvInferRuntime.h (TensorRT 10.14 or later)")
set(REPLAYSSM_TENSORRT_HEADERS_FOUND FALSE)

if(NOT REPLAYSSM_TENSORRT_INCLUDE_DIR)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import pathlib, sys; print(next((str(d) for p in sys.path for d in [pathlib.Path(p, 'kernel_lens', 'include', 'tensorrt')] if (d / 'NvInferRuntime.h').exists()), ''))"
      OUTPUT_VARIABLE REPLAYSSM_TENSORRT_WHEEL OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  if(REPLAYSSM_TENSORRT_WHEEL)
    set(REPLAYSSM_TENSORRT_INCLUDE_DIR "${REPLAYSSM_TENSORRT_WHEEL}")
  else()
    find_path(REPLAYSSM_TENSORRT_SYSTEM NvInferRuntime.h NO_CACHE)
    if(REPLAYSSM_TENSORRT_SYSTEM)
      set(REPLAYSSM_TENSORRT_INCLUDE_DIR "${REPLAYSSM_TENSORRT_SYSTEM}")
    endif()
  endif()
endif()

if(REPLAYSSM_TENSORRT_INCLUDE_DIR)
  if(NOT EXISTS "${REPLAYSSM_TENSORRT_INCLUDE_DIR}/NvInferRuntime.h")
    message(FATAL_ERROR "REPLAYSSM_TENSORRT_INCLUDE_DIR=${REPLAYSSM_TENSORRT_INCLUDE_DIR}: there is no NvInferRuntime.h")
  endif()
  set(REPLAYSSM_TENSORRT_HEADERS_FOUND TRUE)
endif()
