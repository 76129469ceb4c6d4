// SPDX-License-Identifier: Apache-2.0
//
// The only symbols that this library exports, and its registration without a loader call.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "log.h"
#include "plugin.h"
#include "tensorrt_abi.h"

#define TRTLLM_REPLAYSSM_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace trtllm_replayssm;

struct Creators {
  static constexpr int32_t kCount = 4;
  nvinfer1::IPluginCreatorInterface* creators[kCount] = {plan_creator(), causal_conv_creator(), flush_creator(),
                                                         step_creator()};
};

// Never destroyed, like the creators.
const Creators& all_creators() {
  static const Creators* const creators = new Creators();
  return *creators;
}

template <typename Registry>
void register_all(Registry* registry, const char* soname) {
  int32_t registered = 0, known = 0;
  for (nvinfer1::IPluginCreatorInterface* creator : all_creators().creators) {
    const auto* named = static_cast<nvinfer1::IPluginCreatorV3One*>(creator);
    if (registry->getCreator(named->getPluginName(), kVersion, kNamespace)) {
      ++known;
    } else {
      registered += registry->registerCreator(*creator, kNamespace);
    }
  }
  std::fprintf(stderr, "[trtllm_replayssm] registered %d plugins with %s, %d were there already\n", registered, soname,
               known);
}

// TensorRT-LLM's runtime loads no foreign plugin library, but any process loads what LD_PRELOAD names. libnvinfer
// itself is not loaded then, so it must be named.
void register_with(const char* soname) {
  using GetRegistry = nvinfer1::IPluginRegistry* (*)();
  auto get_registry = reinterpret_cast<GetRegistry>(dlsym(RTLD_DEFAULT, "getPluginRegistry"));
  const char* failure = nullptr;
  if (!get_registry) {
    void* const library = dlopen(soname, RTLD_NOW | RTLD_GLOBAL);
    if (library) get_registry = reinterpret_cast<GetRegistry>(dlsym(library, "getPluginRegistry"));
    if (!get_registry) failure = dlerror();
  }
  nvinfer1::IPluginRegistry* const registry = get_registry ? get_registry() : nullptr;
  switch (registry ? abi_of(registry) : Abi::kUnknown) {
    case Abi::kV10:
      return register_all(registry, soname);
    case Abi::kV11:
      return register_all(reinterpret_cast<PluginRegistryV11*>(registry), soname);
    case Abi::kUnknown:
      std::fprintf(stderr, "[trtllm_replayssm] TRTLLM_REPLAYSSM_AUTOREGISTER=%s: no plugin registry: %s\n", soname,
                   failure ? failure : "not one of TensorRT");
  }
}

__attribute__((constructor)) void register_at_load() {
  const char* const soname = std::getenv("TRTLLM_REPLAYSSM_AUTOREGISTER");
  if (soname && *soname) register_with(soname);
}

}  // namespace

TRTLLM_REPLAYSSM_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  try {
    count = Creators::kCount;
    return all_creators().creators;
  } catch (...) {
    count = 0;
    return nullptr;
  }
}

TRTLLM_REPLAYSSM_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { set_logger_finder(finder); }

TRTLLM_REPLAYSSM_EXPORT const char* replayssm_plugins_last_error() { return last_error(); }
