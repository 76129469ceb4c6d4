# SPDX-License-Identifier: Apache-2.0
# Sets REPLAYSSM_TENSORRT_INCLUDE_DIR, where it is not given, to a directory with the headers of TensorRT 10.14 or a later
# 10: those of the Python package kernel-lens, which ships them (Apache-2.0), else those of the system. Headers of 11 do not
# do: a library built with them fails in 10, the other way round plugins/src/tensorrt_abi.h knows what to do.
set(REPLAYSSM_TENSORRT_INCLUDE_DIR "" CACHE PATH "Directory of NvInferRuntime.h (TensorRT 10.14 or a later 10)")
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
  set(version "")
  if(EXISTS "${REPLAYSSM_TENSORRT_INCLUDE_DIR}/NvInferVersion.h")
    foreach(part MAJOR MINOR)
      file(STRINGS "${REPLAYSSM_TENSORRT_INCLUDE_DIR}/NvInferVersion.h" line REGEX "#define (NV_TENSORRT|TRT)_${part}.* [0-9]+")
      string(REGEX MATCH "[0-9]+" number "${line}")
      string(APPEND version "${number}.")
    endforeach()
  endif()
  if(version VERSION_LESS 10.14 OR version VERSION_GREATER_EQUAL 11)
    message(FATAL_ERROR "${REPLAYSSM_TENSORRT_INCLUDE_DIR}: expected the headers of TensorRT 10.14 or a later 10, got "
                        "version '${version}'; set REPLAYSSM_TENSORRT_INCLUDE_DIR, or REPLAYSSM_PLUGINS=OFF")
  endif()
  set(REPLAYSSM_TENSORRT_HEADERS_FOUND TRUE)
endif()
