// SPDX-License-Identifier: Apache-2.0
//
// ReplayCausalConv: silu(causal convolution) of the new tokens, first in its layer. x and B of tokens that a step takes
// go into the slots' rings, as the records of these tokens, and `out` gets C alone, in C's columns. A prompt's tokens
// become no records: all of them are in `out`, for prefill.
#include "plugin.h"

namespace trtllm_replayssm {
namespace {

class CausalConv final : public Plugin {
 public:
  static constexpr char kName[] = "ReplayCausalConv";
  static constexpr PluginKind kKind = kConv;

  CausalConv(const char* node, FieldValues values) : Plugin(kName, kKind, node, std::move(values)) {
    const int64_t channels = conv_channels();
    inputs_ = {{"plan", TensorType::kInt32, {kPlanWords}}};
    add_table(false);
    inputs_.insert(inputs_.end(),
                   {{"in", TensorType::kActivation, tokens_by(at_least(values_.in_offset + channels))},
                    {"weight", TensorType::kFloat, {exactly(channels), exactly(settings_.geometry.conv_kernel)}},
                    {"bias", TensorType::kFloat, {exactly(channels)}}});
    add_lengths();
    outputs_ = {{"out", TensorType::kActivation, tokens_by(exactly(channels))}};
    if (state_io() != StateIo::kAlias) outputs_.push_back({"order", TensorType::kInt32, {exactly(1)}});
    add_state(state_io() == StateIo::kAlias);
  }

 private:
  Plugin* copy() const override { return new CausalConv(node_.c_str(), values_); }

  void run(const Call& call) const override {
    const replayssm_layer slots = layer(call);
    const replayssm_table shared = table(call);
    const Batch tokens = batch(call);
    const auto& [H, P, G, N, K] = settings_.geometry;
    const int64_t element = settings_.config.activation == REPLAYSSM_FP32 ? 4 : 2;
    const int64_t first = tokens.prompts ? 0 : conv_channels() - int64_t{G} * N;
    void* const out = static_cast<char*>(call.outputs[0]) + first * element;
    const replayssm_conv_args args = {columns(call, 2, values_.in_offset, 0),
                                      vector(call, 3),
                                      vector(call, 4),
                                      {out, settings_.config.activation, {conv_channels(), 1}},
                                      tokens.num_tokens,
                                      tokens.longest,
                                      /*records=*/!tokens.prompts};
    check(replayssm_conv_step(&call.exec, &settings_.geometry, &settings_.config, &slots, &shared, call.inputs[0],
                              call.rows, &args));
  }
};

}  // namespace

nvinfer1::IPluginCreatorV3One* causal_conv_creator() { return Creator<CausalConv>::instance(); }

}  // namespace trtllm_replayssm
