// SPDX-License-Identifier: Apache-2.0
//
// ReplaySsmPlan, the first node of a graph: commits the last step of each row's slot, then plans this one. With
// plan_mode lengths there is nothing to commit, and the plan follows from the lengths that TensorRT-LLM's runtime
// binds.
#include "plugin.h"

namespace trtllm_replayssm {
namespace {

class Plan final : public Plugin {
 public:
  static constexpr char kName[] = "ReplaySsmPlan";
  static constexpr PluginKind kKind = kPlan;

  Plan(const char* node, FieldValues values) : Plugin(kName, kKind, node, std::move(values)) {
    if (of_lengths()) {
      for (const char* name : {"slots", "host_request_types", "context_lengths", "sequence_lengths", "token_ends"})
        inputs_.push_back({name, TensorType::kInt32, {kRows}});
      outputs_ = {{"plan", TensorType::kInt32, {kPlanWords}},
                  {"table", TensorType::kInt32, {exactly(kTableHeadWords)}}};
      return;
    }
    inputs_ = {{"slots", TensorType::kInt32, {kRows}},
               {"tokens", TensorType::kInt32, {kRows}},
               {"accepted", TensorType::kInt32, {kRows}},
               {"token_ids", TensorType::kIndex, {kRows, kTokens}}};
    outputs_ = {{"plan", TensorType::kInt32, {kPlanWords}},
                {"status", TensorType::kInt32, {exactly(sizeof(replayssm_error) / 4)}}};
    add_table(true);
  }

 private:
  Plugin* copy() const override { return new Plan(node_.c_str(), values_); }

  void run(const Call& call) const override {
    if (of_lengths()) {
      check(replayssm_plan_lengths(&call.exec, &settings_.geometry, &settings_.config, values_.num_slots,
                                   call.input<int32_t>(0), call.input<int32_t>(2), call.input<int32_t>(3),
                                   call.input<int32_t>(4), call.rows, brings_prompts(call, 1), call.outputs[0],
                                   static_cast<replayssm_error*>(call.outputs[1])));
      return;
    }
    const replayssm_table shared = table(call);
    check(replayssm_plan_next(&call.exec, &settings_.geometry, &settings_.config, &shared, call.input<int32_t>(0),
                              call.input<int32_t>(1), call.input<int32_t>(2), call.rows, call.tokens, call.outputs[0],
                              static_cast<replayssm_error*>(call.outputs[1])));
  }
};

}  // namespace

nvinfer1::IPluginCreatorV3One* plan_creator() { return Creator<Plan>::instance(); }

}  // namespace trtllm_replayssm
