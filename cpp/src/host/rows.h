// SPDX-License-Identifier: Apache-2.0
//
// Row checks and the parallel loop that the host ops share.
#pragma once

#include <cstdint>

#include "cursor_rules.h"

namespace replayssm::host {

inline void report(const replayssm_table& table, replayssm_row_error code, int32_t row, int64_t given,
                   int64_t expected) {
  if (table.error->code == REPLAYSSM_ROW_OK) *table.error = {code, row, given, expected, 0};
}

// Reports and returns false if a live row's tokens lie beyond the tensors, its count above max_count, or its state
// among snapshots that the op does not know.
inline bool rows_fit(const replayssm_table& table, const void* plan, int32_t rows, int64_t num_tokens,
                     int32_t max_count, bool knows_snapshots) {
  for (int32_t i = 0; i < rows; ++i) {
    const replayssm_plan_row& row = plan_rows(plan)[i];
    if (row.slot < 0) continue;
    if (int64_t{row.first_token} + row.count > num_tokens) {
      report(table, REPLAYSSM_ROW_TOKEN_RANGE, i, int64_t{row.first_token} + row.count, num_tokens);
      return false;
    }
    if (row.count > max_count) {
      report(table, REPLAYSSM_ROW_TOO_LONG, i, row.count, max_count);
      return false;
    }
    if ((row.flags & REPLAYSSM_ROW_SNAPSHOT) && !knows_snapshots) {
      report(table, REPLAYSSM_ROW_HAS_SNAPSHOTS, i, row.slot, 0);
      return false;
    }
  }
  return true;
}

// task(i) for i in 0..tasks-1, on all cores if the work (in multiply-adds) pays for waking them.
template <typename Task>
void parallel_for(int64_t tasks, int64_t work_per_task, const Task& task) {
  constexpr int64_t kWorthWaking = 1 << 18;
#pragma omp parallel for schedule(static) if (tasks > 1 && tasks * work_per_task > kWorthWaking)
  for (int64_t i = 0; i < tasks; ++i) task(i);
}

}  // namespace replayssm::host
