// SPDX-License-Identifier: Apache-2.0
//
// ReplaySsmStep: the outputs of the new tokens, after the flush. Rows of up to max_step_tokens go through the op step,
// which finds x and B in the rings, where ReplayCausalConv of this layer stored them, and takes only C from `xBC`.
// Longer ones, which a profile for prompts brings, go through prefill. With plans of lengths the runtime tells which.
#include "plugin.h"

namespace trtllm_replayssm {
namespace {

class Step final : public Plugin {
 public:
  static constexpr char kName[] = "ReplaySsmStep";
  static constexpr PluginKind kKind = kStep;

  Step(const char* node, FieldValues values) : Plugin(kName, kKind, node, std::move(values)) {
    const Dim heads = exactly(settings_.geometry.num_heads);
    inputs_ = {{"plan", TensorType::kInt32, {kPlanWords}}};
    add_table(false);
    inputs_.insert(inputs_.end(), {{"xBC", TensorType::kActivation, tokens_by(exactly(conv_channels()))},
                                   {"dt", TensorType::kFloat,
                                    tokens_by(at_least(int64_t{values_.dt_offset} + settings_.geometry.num_heads))},
                                   {"A_log", TensorType::kFloat, {heads}},
                                   {"D", TensorType::kFloat, {heads}},
                                   {"dt_bias", TensorType::kFloat, {heads}}});
    add_lengths();
    if (state_io() != StateIo::kAlias) inputs_.push_back({"order", TensorType::kInt32, {exactly(1)}});
    outputs_ = {{"out", TensorType::kActivation, tokens_by(exactly(inner_channels()))}};
    add_state(true);
  }

 private:
  Plugin* copy() const override { return new Step(node_.c_str(), values_); }

  void run(const Call& call) const override {
    const auto& [H, P, G, N, K] = settings_.geometry;
    const replayssm_layer slots = layer(call);
    const replayssm_table shared = table(call);
    const Batch tokens = batch(call);
    const replayssm_tensor none{};
    const replayssm_scan_args args = {
        tokens.prompts ? columns(call, 2, 0, P) : none,
        tokens.prompts ? columns(call, 2, inner_channels(), N) : none,
        columns(call, 2, inner_channels() + int64_t{G} * N, N),
        columns(call, 3, values_.dt_offset, 1),
        vector(call, 4),
        vector(call, 5),
        vector(call, 6),
        {call.outputs[0], settings_.config.activation, {inner_channels(), P}},
        values_.dt_min,
        values_.dt_max,
        tokens.num_tokens,
        tokens.longest,
    };
    if (!tokens.prompts) {
      check(replayssm_step(&call.exec, &settings_.geometry, &settings_.config, &slots, &shared, call.inputs[0],
                           call.rows, &args, /*flushed=*/1));
    } else {
      check(replayssm_prefill(&call.exec, &settings_.geometry, &settings_.config, &slots, &shared, call.inputs[0],
                              call.rows, &args));
    }
  }
};

}  // namespace

nvinfer1::IPluginCreatorV3One* step_creator() { return Creator<Step>::instance(); }

}  // namespace trtllm_replayssm
