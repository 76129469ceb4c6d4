// SPDX-License-Identifier: Apache-2.0
//
// materialize, restore, refresh_read_copy and copy on the host. Each checks every row before it touches a slot.
#include <algorithm>

#include "host/recurrence.h"
#include "host/rows.h"

namespace replayssm::host {
namespace {

// `padding` tells whether -1 names a row to skip or is out of range.
bool in_range(const replayssm_table& table, const int32_t* slots, int32_t i, bool padding) {
  if (slots[i] >= (padding ? -1 : 0) && slots[i] < table.num_slots) return true;
  report(table, REPLAYSSM_ROW_SLOT_RANGE, i, slots[i], table.num_slots);
  return false;
}

// Whether the slot of row i passes `rule` (slot_readable or slot_writable).
bool passes(replayssm_row_error (*rule)(int32_t flags), const replayssm_table& table, const int32_t* slots, int32_t i) {
  const int32_t flags = table.cursors[slots[i]].flags;
  const replayssm_row_error error = rule(flags);
  if (error != REPLAYSSM_ROW_OK) report(table, error, i, slots[i], flags);
  return error == REPLAYSSM_ROW_OK;
}

char* conv_row(const Problem& problem, const replayssm_layer& layer, int32_t slot, int64_t record) {
  char* ring = static_cast<char*>(layer.conv_ring.base) + slot * layer.conv_ring.slot_stride;
  return element_address(ring, problem.config.activation, (record % problem.conv_rows) * problem.conv_channels);
}

}  // namespace

replayssm_status materialize(const replayssm_exec&, const Problem& problem, const replayssm_layer& layer,
                             const replayssm_table& table, const int32_t* slots, int32_t rows,
                             const replayssm_tensor& A_log, float* state, float* conv_tail) {
  for (int32_t i = 0; i < rows; ++i) {
    if (!in_range(table, slots, i, true)) return REPLAYSSM_OK;
    if (slots[i] < 0) continue;
    if (!passes(slot_readable, table, slots, i)) return REPLAYSSM_OK;
    if (state && !A_log.data && table.cursors[slots[i]].history > 0) {
      report(table, REPLAYSSM_ROW_NO_DECAY, i, table.cursors[slots[i]].history, 0);
      return REPLAYSSM_OK;
    }
  }
  if (state) {
    const int32_t heads = problem.geometry.num_heads;
    const int64_t state_size = int64_t{problem.geometry.head_dim} * problem.geometry.state_dim;
    parallel_for(int64_t{rows} * heads, state_size, [&](int64_t task) {
      const int32_t slot = slots[task / heads];
      if (slot < 0) return;
      const replayssm_cursor& cursor = table.cursors[slot];
      const HeadSlot head{problem, layer, slot, static_cast<int32_t>(task % heads)};
      load_checkpoint(head, cursor.writes == 0, state + task * state_size);
      const float A = cursor.history > 0 ? decay_rate(A_log, head.head) : 0.0f;
      fold_records(head, cursor.tokens, cursor.history, A, state + task * state_size);
    });
  }
  if (conv_tail) {
    const int32_t taps = problem.geometry.conv_kernel - 1;
    for (int32_t i = 0; i < rows; ++i) {
      if (slots[i] < 0) continue;
      for (int32_t k = 0; k < taps; ++k) {
        float* tail = conv_tail + (int64_t{i} * taps + k) * problem.conv_channels;
        const int64_t record = table.cursors[slots[i]].tokens - taps + k;
        if (record < 0) {
          std::fill_n(tail, problem.conv_channels, 0.0f);
        } else {
          load_row(conv_row(problem, layer, slots[i], record), problem.config.activation, problem.conv_channels, tail);
        }
      }
    }
  }
  return REPLAYSSM_OK;
}

replayssm_status restore(const replayssm_exec&, const Problem& problem, const replayssm_layer& layer,
                         const replayssm_table& table, const int32_t* slots, int32_t rows, const float* state,
                         const float* conv_tail) {
  for (int32_t i = 0; i < rows; ++i) {
    if (!in_range(table, slots, i, true)) return REPLAYSSM_OK;
    if (slots[i] >= 0 && !passes(slot_writable, table, slots, i)) return REPLAYSSM_OK;
  }
  const int32_t heads = problem.geometry.num_heads, taps = problem.geometry.conv_kernel - 1;
  const int64_t state_size = int64_t{problem.geometry.head_dim} * problem.geometry.state_dim;
  NotFinite not_finite(heads);
  for (int32_t i = 0; i < rows; ++i) {
    if (slots[i] < 0) continue;
    replayssm_cursor& cursor = table.cursors[slots[i]];
    for (int32_t h = 0; h < heads; ++h) {
      const HeadSlot head{problem, layer, slots[i], h};
      if (!write_state(head, cursor.stream, cursor.writes, state + (int64_t{i} * heads + h) * state_size))
        not_finite.note(i, h);
    }
    for (int32_t k = 0; k < taps; ++k)
      store_row(conv_tail + (int64_t{i} * taps + k) * problem.conv_channels, problem.conv_channels,
                problem.config.activation, conv_row(problem, layer, slots[i], k));

    uint8_t* restored = table.restored + int64_t{slots[i]} * table.num_layers;
    if (!(cursor.flags & REPLAYSSM_SLOT_RESTORING)) std::fill_n(restored, table.num_layers, uint8_t{0});
    cursor.flags = REPLAYSSM_SLOT_RESTORING;
    restored[layer.layer] = 1;
    if (std::find(restored, restored + table.num_layers, uint8_t{0}) == restored + table.num_layers)
      cursor = replayssm_cursor{taps, cursor.stream, cursor.writes + 1, 0, 0};
  }
  not_finite.report_to(table, layer.layer);
  return REPLAYSSM_OK;
}

replayssm_status refresh_read_copy(const replayssm_exec&, const Problem& problem, const replayssm_layer& layer,
                                   const replayssm_table& table, const int32_t* slots, int32_t rows) {
  for (int32_t i = 0; i < rows; ++i) {
    if (!in_range(table, slots, i, true)) return REPLAYSSM_OK;
    if (slots[i] >= 0 && !passes(slot_writable, table, slots, i)) return REPLAYSSM_OK;
  }
  const int32_t heads = problem.geometry.num_heads;
  NotFinite not_finite(heads);
  float state[kMaxHeadDim * kMaxStateDim];
  for (int32_t i = 0; i < rows; ++i) {
    if (slots[i] < 0 || table.cursors[slots[i]].writes == 0) continue;
    for (int32_t h = 0; h < heads; ++h) {
      const HeadSlot head{problem, layer, slots[i], h};
      load_checkpoint(head, false, state);
      if (!store_read_copy(head, state)) not_finite.note(i, h);
    }
  }
  not_finite.report_to(table, layer.layer);
  return REPLAYSSM_OK;
}

replayssm_status copy(const replayssm_exec&, const replayssm_table& table, void* data, int64_t layer_stride,
                      int64_t slot_stride, const int32_t* src, const int32_t* dst, int32_t rows) {
  for (int32_t i = 0; i < rows; ++i) {
    if (!in_range(table, src, i, false) || !in_range(table, dst, i, false)) return REPLAYSSM_OK;
    if (!passes(slot_readable, table, src, i) || !passes(slot_writable, table, dst, i)) return REPLAYSSM_OK;
    if (std::find(dst, dst + i, dst[i]) != dst + i || std::find(src, src + rows, dst[i]) != src + rows) {
      report(table, REPLAYSSM_ROW_SLOT_OPEN, i, dst[i], 0);
      return REPLAYSSM_OK;
    }
  }
  parallel_for(int64_t{rows} * table.num_layers, slot_stride / 4, [&](int64_t task) {
    const int64_t row = task / table.num_layers, layer = task % table.num_layers;
    char* slots = static_cast<char*>(data) + layer * layer_stride;
    std::copy_n(slots + src[row] * slot_stride, slot_stride, slots + dst[row] * slot_stride);
  });
  for (int32_t i = 0; i < rows; ++i) table.cursors[dst[i]] = table.cursors[src[i]];
  return REPLAYSSM_OK;
}

}  // namespace replayssm::host
