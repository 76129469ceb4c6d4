// SPDX-License-Identifier: Apache-2.0
//
// relu2: a task owns a stretch of elements.
#include <algorithm>

#include "host/number_formats.h"
#include "host/rows.h"

namespace replayssm::host {

replayssm_status relu2(const replayssm_exec&, void* x, int32_t dtype, int64_t count) {
  constexpr int64_t kStretch = 4096;
  parallel_for((count + kStretch - 1) / kStretch, kStretch, [&](int64_t task) {
    const int32_t length = static_cast<int32_t>(std::min(kStretch, count - task * kStretch));
    float value[kStretch];
    load_row(element_address(x, dtype, task * kStretch), dtype, length, value);
    for (int32_t i = 0; i < length; ++i) value[i] = value[i] <= 0.0f ? 0.0f : value[i] * value[i];
    store_row(value, length, dtype, element_address(x, dtype, task * kStretch));
  });
  return REPLAYSSM_OK;
}

}  // namespace replayssm::host
