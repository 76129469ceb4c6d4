// SPDX-License-Identifier: Apache-2.0
//
// reset, plan, plan_next, plan_lengths, commit, abandon on the host. Each checks every row before it changes the first
// cursor.
#include <algorithm>
#include <cstdint>

#include "host/rows.h"

namespace replayssm::host {
namespace {

// Whether `slot` was named by a live row before row i. Quadratic, but rows are few and nothing is allocated.
bool named_before(const int32_t* slots, int32_t i) { return std::find(slots, slots + i, slots[i]) != slots + i; }

bool slot_in_range(const replayssm_table& table, const int32_t* slots, int32_t i) {
  if (slots[i] >= -1 && slots[i] < table.num_slots) return true;
  report(table, REPLAYSSM_ROW_SLOT_RANGE, i, slots[i], table.num_slots);
  return false;
}

// Fills num_flush and row_order, once the rows are planned.
void order_rows(replayssm_plan_header* header) {
  auto* planned = reinterpret_cast<replayssm_plan_row*>(header + 1);
  auto* row_order = reinterpret_cast<int32_t*>(planned + header->rows);
  int32_t end = header->rows;
  for (int32_t i = 0; i < header->rows; ++i) {
    if (planned[i].slot < 0) continue;
    row_order[planned[i].flags & REPLAYSSM_ROW_FLUSH ? header->num_flush++ : --end] = i;
  }
  std::fill(row_order + header->num_flush, row_order + end, -1);
}

}  // namespace

replayssm_status reset(const replayssm_exec&, const replayssm_table& table, const int32_t* slots,
                       const int64_t* streams, int32_t rows, int64_t writes) {
  for (int32_t i = 0; i < rows; ++i)
    if (!slot_in_range(table, slots, i)) return REPLAYSSM_OK;
  for (int32_t i = 0; i < rows; ++i) {
    if (slots[i] < 0) continue;
    table.cursors[slots[i]] = replayssm_cursor{0, static_cast<uint64_t>(streams[i]), writes, 0, 0};
  }
  return REPLAYSSM_OK;
}

replayssm_status plan(const replayssm_exec&, const Problem& problem, const replayssm_table& table, const int32_t* slots,
                      const int32_t* counts, int32_t uniform_count, int32_t rows, void* plan) {
  auto* header = static_cast<replayssm_plan_header*>(plan);
  auto* planned = reinterpret_cast<replayssm_plan_row*>(header + 1);
  auto count_of = [&](int32_t i) { return counts ? counts[i] : uniform_count; };

  bool good = true;
  int64_t end = 0;
  for (int32_t i = 0; good && i < rows; ++i) {
    good = slot_in_range(table, slots, i);
    end += std::max(count_of(i), 0);
    if (!good || slots[i] < 0) continue;
    if (count_of(i) < 0) {
      report(table, REPLAYSSM_ROW_COUNT_RANGE, i, count_of(i), 0);
      good = false;
    } else if (end > INT32_MAX) {
      report(table, REPLAYSSM_ROW_TOKEN_RANGE, i, end, INT32_MAX);
      good = false;
    } else {
      const replayssm_row_error error =
          named_before(slots, i) ? REPLAYSSM_ROW_SLOT_OPEN : slot_usable(table.cursors[slots[i]].flags);
      good = error == REPLAYSSM_ROW_OK;
      if (!good) report(table, error, i, slots[i], table.cursors[slots[i]].flags);
    }
  }

  *header = {};
  header->rows = rows;
  end = 0;
  for (int32_t i = 0; i < rows; ++i) {
    const int32_t count = std::max(count_of(i), 0);
    const auto first_token = static_cast<int32_t>(std::min<int64_t>(end, INT32_MAX));
    if (good && slots[i] >= 0) {
      replayssm_cursor& cursor = table.cursors[slots[i]];
      planned[i] = make_plan_row(problem, cursor, slots[i], first_token, count);
      cursor.flags |= REPLAYSSM_SLOT_OPEN;
      header->num_live += 1;
    } else {
      planned[i] = padded_plan_row(first_token, count);
    }
    end += count;
  }
  order_rows(header);
  header->num_tokens = static_cast<int32_t>(std::min<int64_t>(end, INT32_MAX));
  return REPLAYSSM_OK;
}

replayssm_status plan_next(const replayssm_exec&, const Problem& problem, const replayssm_table& table,
                           const int32_t* slots, const int32_t* counts, const int32_t* accepted, int32_t rows,
                           int32_t row_tokens, void* plan, replayssm_error* status) {
  auto* header = static_cast<replayssm_plan_header*>(plan);
  auto* planned = reinterpret_cast<replayssm_plan_row*>(header + 1);
  const bool folded = row_tokens > problem.config.max_step_tokens;
  auto count_of = [&](int32_t i) { return std::clamp(counts[i], 0, row_tokens); };
  auto next_of = [&](int32_t i) {
    return next_plan(problem, table.cursors[slots[i]], slots[i], accepted[i], i * row_tokens, count_of(i), folded);
  };

  bool good = true;
  for (int32_t i = 0; good && i < rows; ++i) {
    good = slot_in_range(table, slots, i);
    if (!good || slots[i] < 0) continue;
    if (counts[i] < 0) {
      report(table, REPLAYSSM_ROW_COUNT_RANGE, i, counts[i], 0);
      good = false;
    } else if (counts[i] > row_tokens) {
      report(table, REPLAYSSM_ROW_TOKEN_RANGE, i, int64_t{i} * row_tokens + counts[i], int64_t{i + 1} * row_tokens);
      good = false;
    } else if (named_before(slots, i)) {
      report(table, REPLAYSSM_ROW_SLOT_OPEN, i, slots[i], REPLAYSSM_SLOT_OPEN);
      good = false;
    } else {
      const NextPlan next = next_of(i);
      good = next.error == REPLAYSSM_ROW_OK;
      if (!good) report(table, next.error, i, next.given, next.expected);
    }
  }

  *header = {};
  header->rows = rows;
  header->num_tokens = rows * row_tokens;
  for (int32_t i = 0; i < rows; ++i) {
    if (good && slots[i] >= 0) {
      const NextPlan next = next_of(i);
      planned[i] = next.row;
      table.cursors[slots[i]] = next.cursor;
      for (int32_t k = 0; k < REPLAYSSM_NUM_COUNTERS; ++k) table.counters[k] += next.added[k];
      header->num_live += 1;
    } else {
      planned[i] = padded_plan_row(i * row_tokens, count_of(i));
    }
  }
  order_rows(header);
  if (status) *status = *table.error;
  return REPLAYSSM_OK;
}

replayssm_status plan_lengths(const replayssm_exec&, const Problem& problem, const LengthsArgs& args, int32_t rows,
                              void* plan, replayssm_error* error) {
  auto* header = static_cast<replayssm_plan_header*>(plan);
  auto* planned = reinterpret_cast<replayssm_plan_row*>(header + 1);
  *error = {};
  for (int32_t i = 0; error->code == REPLAYSSM_ROW_OK && i < rows; ++i) {
    if (args.slots[i] == -1) continue;
    LengthsRow row = row_of_lengths(problem, args, i);
    if (row.error == REPLAYSSM_ROW_OK && named_before(args.slots, i))
      row.error = REPLAYSSM_ROW_SLOT_OPEN, row.given = args.slots[i], row.expected = 0;
    if (row.error != REPLAYSSM_ROW_OK) *error = {row.error, i, row.given, row.expected, 0};
  }

  *header = {};
  header->rows = rows;
  header->num_tokens = rows ? args.token_ends[rows - 1] : 0;
  for (int32_t i = 0; i < rows; ++i) {
    if (error->code == REPLAYSSM_ROW_OK && args.slots[i] >= 0) {
      planned[i] = row_of_lengths(problem, args, i).row;
      header->num_live += 1;
    } else {
      planned[i] = padded_plan_row(i ? args.token_ends[i - 1] : 0, 0);
    }
  }
  order_rows(header);
  return REPLAYSSM_OK;
}

replayssm_status commit(const replayssm_exec&, const replayssm_table& table, const void* plan, int32_t rows,
                        const int32_t* accepted, replayssm_plan_use use) {
  const replayssm_plan_row* planned = plan_rows(plan);
  auto accepted_of = [&](int32_t i) { return accepted ? accepted[i] : planned[i].count; };
  for (int32_t i = 0; i < rows; ++i) {
    if (planned[i].slot < 0) continue;
    if (!planned_by(table.cursors[planned[i].slot], planned[i])) {
      report(table, REPLAYSSM_ROW_NOT_PLANNED, i, planned[i].slot, 0);
      return REPLAYSSM_OK;
    }
    if (!accepted_in_range(planned[i], accepted_of(i), use)) {
      report(table, REPLAYSSM_ROW_ACCEPTED_RANGE, i, accepted_of(i), planned[i].count);
      return REPLAYSSM_OK;
    }
  }
  int64_t added[REPLAYSSM_NUM_COUNTERS] = {};
  for (int32_t i = 0; i < rows; ++i) {
    if (planned[i].slot < 0) continue;
    replayssm_cursor& cursor = table.cursors[planned[i].slot];
    count_traffic(planned[i], accepted_of(i), use, added);
    cursor = committed(cursor, planned[i], accepted_of(i), use);
  }
  for (int32_t k = 0; k < REPLAYSSM_NUM_COUNTERS; ++k) table.counters[k] += added[k];
  return REPLAYSSM_OK;
}

replayssm_status abandon(const replayssm_exec&, const replayssm_table& table, const void* plan, int32_t rows,
                         replayssm_plan_use use) {
  const replayssm_plan_row* planned = plan_rows(plan);
  for (int32_t i = 0; i < rows; ++i) {
    if (planned[i].slot < 0) continue;
    if (!planned_by(table.cursors[planned[i].slot], planned[i])) {
      report(table, REPLAYSSM_ROW_NOT_PLANNED, i, planned[i].slot, 0);
      return REPLAYSSM_OK;
    }
  }
  for (int32_t i = 0; i < rows; ++i) {
    if (planned[i].slot < 0) continue;
    replayssm_cursor& cursor = table.cursors[planned[i].slot];
    cursor = abandoned(cursor, planned[i], use);
  }
  return REPLAYSSM_OK;
}

}  // namespace replayssm::host
