// SPDX-License-Identifier: Apache-2.0
//
// The plugin library as a stranger sees it: a file to open, creators, and TensorRT's headers.
#pragma once

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::printf("%s:%d: failed: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
                  plugin_library::last_error());                                          \
      std::_Exit(1);                                                                      \
    }                                                                                     \
  } while (0)

namespace plugin_library {

using nvinfer1::IPluginCreatorInterface;
using nvinfer1::IPluginCreatorV3One;
using nvinfer1::IPluginV3;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

inline void* handle = nullptr;

template <typename Function>
Function symbol(const char* name) {
  void* const found = dlsym(handle, name);
  if (!found) throw std::runtime_error(std::string(name) + ": not in the library");
  return reinterpret_cast<Function>(found);
}

inline void open(const char* path) {
  handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(dlerror());
}

inline const char* last_error() { return handle ? symbol<const char* (*)()>("replayssm_plugins_last_error")() : ""; }

inline std::vector<IPluginCreatorV3One*> creators() {
  int32_t count = 0;
  auto* const* list = symbol<IPluginCreatorInterface* const* (*)(int32_t&)>("getCreators")(count);
  std::vector<IPluginCreatorV3One*> result;
  for (int32_t i = 0; i < count; ++i) result.push_back(static_cast<IPluginCreatorV3One*>(list[i]));
  return result;
}

// Fields by name, in the order in which they were set. Owns what a PluginFieldCollection points to.
class Fields {
 public:
  Fields& set(const std::string& name, int32_t value) { return put(name, PluginFieldType::kINT32, 1, value); }
  Fields& set(const std::string& name, int64_t value) { return put(name, PluginFieldType::kINT64, 1, value); }
  Fields& set(const std::string& name, float value) { return put(name, PluginFieldType::kFLOAT32, 1, value); }
  Fields& set(const std::string& name, const char* text) {
    Field& field = at(name);
    field.bytes.assign(text, text + std::strlen(text) + 1);
    field.type = PluginFieldType::kCHAR;
    field.length = static_cast<int32_t>(field.bytes.size());
    return *this;
  }
  Fields& remove(const std::string& name) {
    for (size_t i = 0; i < fields_.size(); ++i) {
      if (fields_[i].name == name) {
        fields_.erase(fields_.begin() + static_cast<int64_t>(i));
        break;
      }
    }
    return *this;
  }
  Fields& retype(const std::string& name, PluginFieldType type, int32_t length) {
    at(name).type = type;
    at(name).length = length;
    return *this;
  }
  Fields& drop_data(const std::string& name) {
    at(name).bytes.clear();
    return *this;
  }

  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const Field& field : fields_) result.push_back(field.name);
    return result;
  }
  PluginFieldType type_of(const std::string& name) const {
    for (const Field& field : fields_) {
      if (field.name == name) return field.type;
    }
    return PluginFieldType::kUNKNOWN;
  }
  // Points into this object.
  std::vector<PluginField> list() const {
    std::vector<PluginField> result;
    for (const Field& field : fields_)
      result.emplace_back(field.name.c_str(), field.bytes.empty() ? nullptr : field.bytes.data(), field.type,
                          field.length);
    return result;
  }

 private:
  struct Field {
    std::string name;
    std::vector<char> bytes;
    PluginFieldType type = PluginFieldType::kUNKNOWN;
    int32_t length = 0;
  };
  Field& at(const std::string& name) {
    for (Field& field : fields_) {
      if (field.name == name) return field;
    }
    fields_.push_back({name, {}, PluginFieldType::kUNKNOWN, 0});
    return fields_.back();
  }
  template <typename T>
  Fields& put(const std::string& name, PluginFieldType type, int32_t length, T value) {
    Field& field = at(name);
    const auto* bytes = reinterpret_cast<const char*>(&value);
    field.bytes.assign(bytes, bytes + sizeof(value));
    field.type = type;
    field.length = length;
    return *this;
  }
  std::deque<Field> fields_;
};

struct PluginV3 {
  std::unique_ptr<IPluginV3> plugin;
  nvinfer1::IPluginV3OneCore* core = nullptr;
  nvinfer1::IPluginV3OneBuildV2* build = nullptr;
  nvinfer1::IPluginV3OneRuntime* runtime = nullptr;

  explicit PluginV3(IPluginV3* made) : plugin(made) {
    using Type = nvinfer1::PluginCapabilityType;
    if (!made) return;
    core = static_cast<nvinfer1::IPluginV3OneCore*>(made->getCapabilityInterface(Type::kCORE));
    build = static_cast<nvinfer1::IPluginV3OneBuildV2*>(made->getCapabilityInterface(Type::kBUILD));
    runtime = static_cast<nvinfer1::IPluginV3OneRuntime*>(made->getCapabilityInterface(Type::kRUNTIME));
  }
  explicit operator bool() const { return plugin != nullptr; }
};

inline PluginV3 create(IPluginCreatorV3One* creator, const std::vector<PluginField>& fields,
                       TensorRTPhase phase = TensorRTPhase::kBUILD, const char* node = "node") {
  nvinfer1::PluginFieldCollection collection;
  collection.nbFields = static_cast<int32_t>(fields.size());
  collection.fields = fields.data();
  return PluginV3(creator->createPlugin(node, &collection, phase));
}

}  // namespace plugin_library
