// SPDX-License-Identifier: Apache-2.0
//
// Kernels of this library load lazily, a module at its first launch, which stream capture forbids: load_kernels()
// brings every instance into the current context ahead of that.
#include "common.cuh"

namespace replayssm {
namespace cuda {

replayssm_status load_kernels() {
  for (auto load :
       {load_cursor_kernels, load_conv_kernels, load_norm_kernels, load_activation_kernels, load_attention_kernels,
        load_fold_kernels, load_step_kernels, load_scan_kernels, load_snapshot_kernels}) {
    const replayssm_status status = check(load(), "load_kernels");
    if (status != REPLAYSSM_OK) return status;
  }
  return REPLAYSSM_OK;
}

const char* architectures() { return REPLAYSSM_ARCHITECTURES; }

}  // namespace cuda
}  // namespace replayssm
