// SPDX-License-Identifier: Apache-2.0
//
// Row checks and the parallel loop that the host ops share.
#pragma once

#include <atomic>
#include <cstdint>

#include "cursor_rules.h"

namespace replayssm::host {

// Keeps the first error; but one that refuses a row replaces the report of a state that is not finite.
inline void report(const replayssm_table& table, replayssm_row_error code, int32_t row, int64_t given,
                   int64_t expected) {
  const int32_t kept = table.error->code;
  if (kept == REPLAYSSM_ROW_OK || (kept == REPLAYSSM_ROW_STATE_NOT_FINITE && code != REPLAYSSM_ROW_STATE_NOT_FINITE))
    *table.error = {code, row, given, expected, 0};
}

// Of the heads whose stored state is not finite, the first: tasks run in any order, the report is always the same.
class NotFinite {
 public:
  explicit NotFinite(int32_t num_heads) : num_heads_(num_heads) {}

  void note(int32_t row, int32_t head) {
    const int64_t index = int64_t{row} * num_heads_ + head;
    int64_t least = first_.load();
    while (index < least && !first_.compare_exchange_weak(least, index)) {
    }
  }

  void report_to(const replayssm_table& table, int32_t layer) const {
    const int64_t first = first_.load();
    if (first == INT64_MAX) return;
    report(table, REPLAYSSM_ROW_STATE_NOT_FINITE, static_cast<int32_t>(first / num_heads_), first % num_heads_, layer);
  }

 private:
  int32_t num_heads_;
  std::atomic<int64_t> first_{INT64_MAX};
};

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
