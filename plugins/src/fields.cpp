// SPDX-License-Identifier: Apache-2.0
#include "fields.h"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>
#include <variant>

namespace trtllm_replayssm {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

constexpr uint32_t kLayerKinds = kConv | kFlush | kStep;
constexpr uint32_t kAllKinds = kPlan | kLayerKinds;

struct FieldSpec {
  const char* name;
  std::variant<int32_t FieldValues::*, float FieldValues::*, std::string FieldValues::*> value;
  uint32_t kinds;

  PluginFieldType type() const {
    constexpr PluginFieldType types[] = {PluginFieldType::kINT32, PluginFieldType::kFLOAT32, PluginFieldType::kCHAR};
    return types[value.index()];
  }
};

const FieldSpec kFields[] = {
    {"num_heads", &FieldValues::num_heads, kAllKinds},
    {"head_dim", &FieldValues::head_dim, kAllKinds},
    {"num_groups", &FieldValues::num_groups, kAllKinds},
    {"state_dim", &FieldValues::state_dim, kAllKinds},
    {"conv_kernel", &FieldValues::conv_kernel, kAllKinds},
    {"window", &FieldValues::window, kAllKinds},
    {"max_step_tokens", &FieldValues::max_step_tokens, kAllKinds},
    {"checkpoint", &FieldValues::checkpoint, kAllKinds},
    {"read_copy", &FieldValues::read_copy, kAllKinds},
    {"activation", &FieldValues::activation, kAllKinds},
    {"seed", &FieldValues::seed, kAllKinds},
    {"num_slots", &FieldValues::num_slots, kAllKinds},
    {"state_io", &FieldValues::state_io, kAllKinds},
    {"plan_mode", &FieldValues::plan_mode, kAllKinds},
    {"num_layers", &FieldValues::num_layers, kAllKinds},
    {"layer", &FieldValues::layer, kLayerKinds},
    {"slot_stride", &FieldValues::slot_stride, kLayerKinds},
    {"first_head", &FieldValues::first_head, kFlush | kStep},
    {"in_offset", &FieldValues::in_offset, kConv},
    {"dt_offset", &FieldValues::dt_offset, kStep},
    {"dt_min", &FieldValues::dt_min, kStep},
    {"dt_max", &FieldValues::dt_max, kStep},
};

template <typename F>
void for_each_field(PluginKind kind, F&& f) {
  for (const FieldSpec& spec : kFields) {
    if (spec.kinds & kind) f(spec);
  }
}

const char* type_name(PluginFieldType type) {
  static const char* const names[] = {"FLOAT16", "FLOAT32", "FLOAT64", "INT8",  "INT16", "INT32", "CHAR",
                                      "DIMS",    "UNKNOWN", "BF16",    "INT64", "FP8",   "INT4",  "FP4"};
  const auto index = static_cast<size_t>(type);
  return index < std::size(names) ? names[index] : "of an unknown code";
}

[[noreturn]] void refuse_field(const FieldSpec& spec, const std::string& expected, const PluginField& given) {
  throw Refusal(std::string(spec.name) + ": expected " + expected + ", got type " + type_name(given.type) +
                ", length " + std::to_string(given.length) + (given.data ? "" : ", no data"));
}

template <typename T>
T read_as(const PluginField& field) {
  T value;
  std::memcpy(&value, field.data, sizeof(value));
  return value;
}

void read(const FieldSpec& spec, const PluginField& field, int32_t& value) {
  const bool narrow = field.type == PluginFieldType::kINT32;
  if (!field.data || field.length != 1 || !(narrow || field.type == PluginFieldType::kINT64))
    refuse_field(spec, "one integer (INT32 or INT64)", field);
  const int64_t given = narrow ? read_as<int32_t>(field) : read_as<int64_t>(field);
  if (given < INT32_MIN || given > INT32_MAX)
    throw Refusal(std::string(spec.name) + ": expected an integer of 32 bits, got " + std::to_string(given));
  value = static_cast<int32_t>(given);
}

void read(const FieldSpec& spec, const PluginField& field, float& value) {
  if (!field.data || field.length != 1) refuse_field(spec, "one number (FLOAT32)", field);
  switch (field.type) {
    case PluginFieldType::kFLOAT32:
      value = read_as<float>(field);
      return;
    case PluginFieldType::kFLOAT64:
      value = static_cast<float>(read_as<double>(field));
      return;
    case PluginFieldType::kINT32:
      value = static_cast<float>(read_as<int32_t>(field));
      return;
    default:
      refuse_field(spec, "one number (FLOAT32)", field);
  }
}

void read(const FieldSpec& spec, const PluginField& field, std::string& value) {
  constexpr int32_t kMost = 64;
  if (!field.data || field.type != PluginFieldType::kCHAR || field.length < 1 || field.length > kMost)
    refuse_field(spec, "a text (CHAR) of 1.." + std::to_string(kMost) + " characters", field);
  const auto* text = static_cast<const char*>(field.data);
  value.assign(text, strnlen(text, static_cast<size_t>(field.length)));  // ONNX strings count their NUL
}

std::string quoted(const std::string& text) { return "'" + text + "'"; }

// The code of a name, by a list of libreplayssm that counts from 0.
int32_t code_of(const char* field, const std::string& name, const char* (*name_of)(int32_t)) {
  std::string known;
  for (int32_t code = 0; name_of(code); ++code) {
    if (name == name_of(code)) return code;
    known += (code ? ", " : "") + quoted(name_of(code));
  }
  throw Refusal(std::string(field) + ": expected one of " + known + ", got " + quoted(name));
}

const char* state_io_name(int32_t code) {
  static const char* const names[] = {"alias", "same_pointer", "host_pointer"};
  return code >= 0 && code < 3 ? names[code] : nullptr;
}

const char* plan_mode_name(int32_t code) {
  static const char* const names[] = {"cursors", "lengths"};
  return code >= 0 && code < 2 ? names[code] : nullptr;
}

uint64_t parse_seed(const std::string& text) {
  errno = 0;
  char* end = nullptr;
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  const unsigned long long seed = digits ? std::strtoull(text.c_str(), &end, 10) : 0;
  if (!digits || errno != 0)
    throw Refusal("seed: expected decimal digits of 0.." + std::to_string(UINT64_MAX) + ", got " + quoted(text));
  return seed;
}

void require_range(const char* field, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw Refusal(std::string(field) + ": expected " + std::to_string(least) + ".." + std::to_string(most) + ", got " +
                  std::to_string(value));
}

}  // namespace

std::vector<PluginField> field_names(PluginKind kind) {
  std::vector<PluginField> fields;
  for_each_field(kind, [&](const FieldSpec& spec) { fields.emplace_back(spec.name, nullptr, spec.type(), 1); });
  return fields;
}

FieldValues parse_fields(PluginKind kind, const nvinfer1::PluginFieldCollection* collection) {
  if (!collection || collection->nbFields < 0 || (collection->nbFields > 0 && !collection->fields))
    throw Refusal("fields: expected a collection, got none");
  FieldValues values;
  std::vector<std::string> seen;
  for (int32_t i = 0; i < collection->nbFields; ++i) {
    const PluginField& field = collection->fields[i];
    const std::string name = field.name ? field.name : "";
    const FieldSpec* known = nullptr;
    for_each_field(kind, [&](const FieldSpec& spec) { known = name == spec.name ? &spec : known; });
    if (!known) throw Refusal(quoted(name) + ": no such field");
    for (const std::string& other : seen) {
      if (other == name) throw Refusal(name + ": given twice");
    }
    seen.push_back(name);
    std::visit([&](auto member) { read(*known, field, values.*member); }, known->value);
  }
  for_each_field(kind, [&](const FieldSpec& spec) {
    bool given = false;
    for (const std::string& name : seen) given = given || name == spec.name;
    if (!given) throw Refusal(std::string(spec.name) + ": field is missing");
  });
  return values;
}

std::vector<PluginField> serialized_fields(PluginKind kind, const FieldValues& values) {
  std::vector<PluginField> fields;
  for_each_field(kind, [&](const FieldSpec& spec) {
    if (const auto* text = std::get_if<std::string FieldValues::*>(&spec.value)) {
      const std::string& value = values.**text;
      fields.emplace_back(spec.name, value.c_str(), spec.type(), static_cast<int32_t>(value.size() + 1));
    } else if (const auto* number = std::get_if<float FieldValues::*>(&spec.value)) {
      fields.emplace_back(spec.name, &(values.**number), spec.type(), 1);
    } else {
      fields.emplace_back(spec.name, &(values.*std::get<int32_t FieldValues::*>(spec.value)), spec.type(), 1);
    }
  });
  return fields;
}

std::string metadata(PluginKind kind, const FieldValues& values) {
  std::ostringstream text;
  text.precision(std::numeric_limits<float>::max_digits10);
  for_each_field(kind, [&](const FieldSpec& spec) {
    text << (text.tellp() > 0 ? " " : "") << spec.name << "=";
    std::visit([&](auto member) { text << values.*member; }, spec.value);
  });
  return text.str();
}

Settings::Settings(PluginKind kind, const FieldValues& values) {
  geometry = {values.num_heads, values.head_dim, values.num_groups, values.state_dim, values.conv_kernel};
  config = {values.window,
            values.max_step_tokens,
            code_of("checkpoint", values.checkpoint, replayssm_checkpoint_name),
            code_of("read_copy", values.read_copy, replayssm_read_copy_name),
            code_of("activation", values.activation, replayssm_dtype_name),
            parse_seed(values.seed)};
  state_io = static_cast<StateIo>(code_of("state_io", values.state_io, state_io_name));
  plan_mode = static_cast<PlanMode>(code_of("plan_mode", values.plan_mode, plan_mode_name));
  if (plan_mode == PlanMode::kLengths && state_io != StateIo::kHostPointer)
    throw Refusal("plan_mode: 'lengths' expects state_io 'host_pointer', got " + quoted(values.state_io));
  if (replayssm_layout_init(&geometry, &config, &layout) != REPLAYSSM_OK) throw Refusal(replayssm_last_error());
  require_range("num_slots", values.num_slots, 1, INT32_MAX);
  require_range("num_layers", values.num_layers, 1, INT32_MAX);
  if (replayssm_table_bytes(values.num_slots, values.num_layers) / 4 > INT32_MAX)
    throw Refusal("num_slots: a table of " + std::to_string(values.num_slots) + " slots and " +
                  std::to_string(values.num_layers) + " layers is too large for a tensor");
  if (kind == kPlan) return;
  require_range("layer", values.layer, 0, values.num_layers - 1);
  require_range("first_head", values.first_head, 0, INT32_MAX);
  if (values.slot_stride != 0) {
    if (values.slot_stride < layout.slot_stride || values.slot_stride % 256 != 0)
      throw Refusal("slot_stride: expected 0 (the layout's) or a multiple of 256, at least the layout's " +
                    std::to_string(layout.slot_stride) + ", got " + std::to_string(values.slot_stride));
    layout.slot_stride = values.slot_stride;
  }
  if (kind == kConv) require_range("in_offset", values.in_offset, 0, INT32_MAX);
  if (kind == kStep) {
    require_range("dt_offset", values.dt_offset, 0, INT32_MAX);
    if (!(values.dt_min >= 0 && values.dt_min <= values.dt_max)) {
      std::ostringstream text;
      text << "dt_min, dt_max: expected 0 <= dt_min <= dt_max, got " << values.dt_min << ", " << values.dt_max;
      throw Refusal(text.str());
    }
  }
}

}  // namespace trtllm_replayssm
