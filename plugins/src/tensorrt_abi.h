// SPDX-License-Identifier: Apache-2.0
//
// The interfaces of TensorRT that this library calls (all others it implements, and those are the same everywhere) come
// in two ABIs. TensorRT 11 and TensorRT-RTX 1.5 and later made ILogger and ILoggerFinder versioned interfaces, so that
// other virtual functions stand before log() and findLogger(), and dropped the plugin V2 functions of IPluginRegistry,
// so that all others moved up. The headers are those of 10; which ABI an object has is asked from the library that
// implements it.
//
// Nothing here stands in an unnamed namespace: the compiler would see that nothing implements the classes and drop
// calls.
#pragma once

#include <NvInferRuntime.h>

static_assert(NV_TENSORRT_MAJOR == 10, "the classes below take the place of those that 11 changed");

namespace trtllm_replayssm {

enum class Abi { kUnknown, kV10, kV11 };  // an object of unknown origin is not called

Abi abi_of(const void* object);

class LoggerV11 : public nvinfer1::IVersionedInterface {
 public:
  virtual void log(nvinfer1::ILogger::Severity severity, const char* text) noexcept = 0;
};

class LoggerFinderV11 : public nvinfer1::IVersionedInterface {
 public:
  virtual LoggerV11* findLogger() = 0;
};

class PluginRegistryV11 {
 protected:
  virtual ~PluginRegistryV11() noexcept = default;

 public:
  virtual void setErrorRecorder(nvinfer1::IErrorRecorder* recorder) noexcept = 0;
  virtual nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept = 0;
  virtual bool isParentSearchEnabled() const = 0;
  virtual void setParentSearchEnabled(bool enabled) = 0;
  virtual void* loadLibrary(const char* path) noexcept = 0;
  virtual void deregisterLibrary(void* handle) noexcept = 0;
  virtual bool registerCreator(nvinfer1::IPluginCreatorInterface& creator, const char* name_space) noexcept = 0;
  virtual nvinfer1::IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept = 0;
  virtual nvinfer1::IPluginCreatorInterface* getCreator(const char* name, const char* version,
                                                        const char* name_space) noexcept = 0;
};

}  // namespace trtllm_replayssm
