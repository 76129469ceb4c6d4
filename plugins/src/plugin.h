// SPDX-License-Identifier: Apache-2.0
//
// What the four plugins share: everything of IPluginV3 but the tensors that a plugin takes and the op that it launches.
// A plugin says which tensors it has once, in its constructor; types, formats, shapes and aliases follow from that
// list.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "fields.h"

namespace trtllm_replayssm {

constexpr char kNamespace[] = "trtllm_replayssm";
constexpr char kVersion[] = "1";

enum class TensorType { kInt32, kInt64, kIndex /* INT32 or INT64 */, kFloat /* FP32, BF16 or FP16 */, kActivation };

// A dimension: a size, a least size, or one of the sizes that a call brings.
struct Dim {
  enum Kind { kExactly, kAtLeast, kRows, kTokens, kPlanWords /* of kRows */ } kind;
  int64_t size = 0;
};
constexpr int64_t kTableHeadWords = 32;  // error word and counters of a table

constexpr Dim kRows{Dim::kRows}, kTokens{Dim::kTokens}, kPlanWords{Dim::kPlanWords};
inline Dim exactly(int64_t size) { return {Dim::kExactly, size}; }
inline Dim at_least(int64_t size) { return {Dim::kAtLeast, size}; }

struct TensorSpec {
  const char* name;
  TensorType type;
  std::vector<Dim> dims;
};

// One execution, checked: every tensor is there and has the shape that the plugin wants.
struct Call {
  const nvinfer1::PluginTensorDesc* in;
  const void* const* inputs;
  void* const* outputs;
  int32_t rows, tokens;  // B and S, -1 where no input shows them
  replayssm_exec exec;

  template <typename T>
  const T* input(int32_t index) const {
    return static_cast<const T*>(inputs[index]);
  }
};

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuildV2,
               public nvinfer1::IPluginV3OneRuntime {
 public:
  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;
  // Core
  const char* getPluginName() const noexcept override { return name_; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  // Build
  int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(outputs_.size()); }
  int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t num_outputs, const nvinfer1::DataType* inputs,
                             int32_t num_inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs,
                          const nvinfer1::DimsExprs* shape_inputs, int32_t num_shape_inputs,
                          nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t num_outputs) noexcept override;
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
  int32_t getAliasedInput(int32_t output) noexcept override;
  const char* getMetadataString() noexcept override { return metadata_.c_str(); }
  // Runtime
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                        const nvinfer1::PluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
                  const void* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

 protected:
  // `node` is for messages only.
  Plugin(const char* name, PluginKind kind, const char* node, FieldValues values);
  Plugin(const Plugin&) = delete;  // fields_ points into values_: copies are made anew

  virtual Plugin* copy() const = 0;
  virtual void run(const Call& call) const = 0;  // throws Refusal

  StateIo state_io() const { return settings_.state_io; }
  int64_t conv_channels() const { return settings_.layout.conv_channels; }
  int64_t inner_channels() const { return int64_t{settings_.geometry.num_heads} * settings_.geometry.head_dim; }

  bool of_lengths() const { return settings_.plan_mode == PlanMode::kLengths; }
  // [rows, tokens, columns], or, with plans of lengths, [all tokens, columns].
  std::vector<Dim> tokens_by(Dim columns) const;

  // How a layer op takes the tokens of this call. Plans of lengths learn it from tensors in host memory, as
  // TensorRT-LLM's own plugins do: its runtime brings prompts or decode steps, never both.
  struct Batch {
    bool prompts;
    int64_t num_tokens;
    int32_t longest;  // an upper bound of any row's tokens
  };
  void add_lengths();  // of plans of lengths only: host_request_types, host_context_lengths
  Batch batch(const Call& call) const;
  bool brings_prompts(const Call& call, int32_t types_input) const;

  // Memory that lasts between executions. A table comes as an input, and with `returned` as an output too; so does a
  // layer's slots. In host_pointer either is an address, and never an output. Plans of lengths have no such table: the
  // plan brings the head of one, with the error word, to the layers.
  void add_table(bool returned);
  void add_state(bool returned);
  replayssm_table table(const Call& call) const;
  replayssm_layer layer(const Call& call) const;

  static replayssm_tensor vector(const Call& call, int32_t input);
  // The columns from `offset` on of an input tokens_by(columns), with a second stride of `inner`.
  static replayssm_tensor columns(const Call& call, int32_t input, int64_t offset, int64_t inner);
  static void check(replayssm_status status);

  std::string node_;
  FieldValues values_;
  Settings settings_;
  std::vector<TensorSpec> inputs_, outputs_;

 private:
  struct Sizes {
    int64_t rows = -1, tokens = -1, plan_words = -1;
  };
  template <typename DimOf>
  Sizes checked_sizes(int32_t num_inputs, const DimOf& dim_of) const;
  template <typename F>
  bool guarded(F&& f) const noexcept;
  void require_counts(int32_t num_inputs, int32_t num_outputs) const;
  bool accepts(TensorType expected, nvinfer1::DataType given) const;
  nvinfer1::DataType activation() const;
  int32_t add_memory(const char* name, const char* output_name, std::vector<Dim> shape, bool returned);
  void* address(const Call& call, int32_t input) const;

  const char* name_;
  PluginKind kind_;
  std::string metadata_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
  int32_t table_input_ = -1, state_input_ = -1, lengths_input_ = -1;
  int32_t returned_input_ = -1, returned_output_ = -1;  // of the table or the state
  bool attached_ = false;                               // to an execution context (or a builder)
};

// The creators, one a plugin; made once and never destroyed, since a registry may outlive this library's static
// objects.
nvinfer1::IPluginCreatorV3One* plan_creator();
nvinfer1::IPluginCreatorV3One* causal_conv_creator();
nvinfer1::IPluginCreatorV3One* flush_creator();
nvinfer1::IPluginCreatorV3One* step_creator();

// Logs "PLUGIN 'NODE': why".
void log_refusal(const char* plugin, const char* node, const char* why) noexcept;

template <typename P>
class Creator : public nvinfer1::IPluginCreatorV3One {
 public:
  static Creator* instance() {
    static Creator* const creator = new Creator();
    return creator;
  }
  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    try {
      return new P(name ? name : "", parse_fields(P::kKind, fields));
    } catch (const std::exception& e) {
      log_refusal(P::kName, name, e.what());
      return nullptr;
    }
  }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  const char* getPluginName() const noexcept override { return P::kName; }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  Creator() : fields_(field_names(P::kKind)) {
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
  }
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace trtllm_replayssm
