// SPDX-License-Identifier: Apache-2.0
//
// What a node is given: its fields, from a PluginFieldCollection and back, and all that follows from them.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "replayssm/replayssm.h"

namespace trtllm_replayssm {

// What is wrong with what the caller gave. Never leaves the library: the ABI functions log it and return a failure.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum PluginKind : uint32_t { kPlan = 1, kConv = 2, kFlush = 4, kStep = 8 };

enum class StateIo { kAlias, kSamePointer, kHostPointer };

// What plans are made of: cursors that the table keeps, or the lengths that a runtime tells of its sequences.
enum class PlanMode { kCursors, kLengths };

// The values of the fields, as they are serialized. A plugin only has those of its kind.
struct FieldValues {
  int32_t num_heads = 0, head_dim = 0, num_groups = 0, state_dim = 0, conv_kernel = 0;
  int32_t window = 0, max_step_tokens = 0;
  std::string checkpoint, read_copy, activation, seed;
  int32_t num_slots = 0;
  std::string state_io, plan_mode;
  int32_t num_layers = 0, layer = 0, slot_stride = 0, first_head = 0, in_offset = 0, dt_offset = 0;
  float dt_min = 0, dt_max = 0;
};

// Names and types of a kind's fields; what getFieldNames returns.
std::vector<nvinfer1::PluginField> field_names(PluginKind kind);

// Reads a collection; throws Refusal with what is missing, unknown, of a wrong type or not a single value.
FieldValues parse_fields(PluginKind kind, const nvinfer1::PluginFieldCollection* fields);

// The fields of a kind, pointing into `values`.
std::vector<nvinfer1::PluginField> serialized_fields(PluginKind kind, const FieldValues& values);

// "name=value name=value ...", in the order of field_names.
std::string metadata(PluginKind kind, const FieldValues& values);

// What the values mean together. Throws Refusal on an impossible one.
struct Settings {
  Settings(PluginKind kind, const FieldValues& values);

  replayssm_geometry geometry;
  replayssm_config config;
  replayssm_layout layout;  // of a layer plugin with the field's slot stride
  StateIo state_io;
  PlanMode plan_mode;
};

}  // namespace trtllm_replayssm
