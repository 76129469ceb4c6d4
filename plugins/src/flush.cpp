// SPDX-License-Identifier: Apache-2.0
//
// ReplaySsmFlush: folds the committed records of the rows whose window is full into their checkpoints, before the step.
#include "plugin.h"

namespace trtllm_replayssm {
namespace {

class Flush final : public Plugin {
 public:
  static constexpr char kName[] = "ReplaySsmFlush";
  static constexpr PluginKind kKind = kFlush;

  Flush(const char* node, FieldValues values) : Plugin(kName, kKind, node, std::move(values)) {
    inputs_ = {{"plan", TensorType::kInt32, {kPlanWords}}};
    add_table(false);
    inputs_.push_back({"A_log", TensorType::kFloat, {exactly(settings_.geometry.num_heads)}});
    if (state_io() != StateIo::kAlias) {
      inputs_.push_back({"order", TensorType::kInt32, {exactly(1)}});
      outputs_.push_back({"order", TensorType::kInt32, {exactly(1)}});
    }
    add_state(state_io() == StateIo::kAlias);
  }

 private:
  Plugin* copy() const override { return new Flush(node_.c_str(), values_); }

  void run(const Call& call) const override {
    const replayssm_layer slots = layer(call);
    const replayssm_table shared = table(call);
    const replayssm_tensor A_log = vector(call, 2);
    check(replayssm_flush(&call.exec, &settings_.geometry, &settings_.config, &slots, &shared, call.inputs[0],
                          call.rows, &A_log));
  }
};

}  // namespace

nvinfer1::IPluginCreatorV3One* flush_creator() { return Creator<Flush>::instance(); }

}  // namespace trtllm_replayssm
