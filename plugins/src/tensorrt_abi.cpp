// SPDX-License-Identifier: Apache-2.0
#include "tensorrt_abi.h"

#include <dlfcn.h>

namespace trtllm_replayssm {

Abi abi_of(const void* object) {
  // An object's first word points to its class's table of functions, which lies in the library that implements it.
  const void* const functions = *static_cast<const void* const*>(object);
  Dl_info origin{};
  if (!dladdr(functions, &origin) || !origin.dli_fname) return Abi::kUnknown;
  void* const library = dlopen(origin.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return Abi::kUnknown;
  using Version = int32_t (*)();
  const auto major = reinterpret_cast<Version>(dlsym(library, "getInferLibMajorVersion"));
  const auto minor = reinterpret_cast<Version>(dlsym(library, "getInferLibMinorVersion"));
  Abi abi = Abi::kUnknown;
  if (major && minor) {
    const int32_t release = major() * 100 + minor();
    const bool rtx = release < 200;  // TensorRT-RTX counts from 1.0 again
    abi = release >= 1100 || (rtx && release >= 105) ? Abi::kV11 : Abi::kV10;
  }
  dlclose(library);
  return abi;
}

}  // namespace trtllm_replayssm
