// SPDX-License-Identifier: Apache-2.0
//
// The cursor arithmetic, shared by both implementations: what a plan row says about a slot, what may be planned, and
// how a commit moves a cursor.
#pragma once

#include "host_device.h"
#include "ops.h"

namespace replayssm {

// The row error of planning a slot with these flags, REPLAYSSM_ROW_OK if it is closed and valid.
REPLAYSSM_HOST_DEVICE inline replayssm_row_error slot_usable(int32_t flags) {
  if (flags & REPLAYSSM_SLOT_OPEN) return REPLAYSSM_ROW_SLOT_OPEN;
  if (flags & (REPLAYSSM_SLOT_INVALID | REPLAYSSM_SLOT_RESTORING)) return REPLAYSSM_ROW_SLOT_INVALID;
  return REPLAYSSM_ROW_OK;
}

// The row error of overwriting a slot of the pool.
REPLAYSSM_HOST_DEVICE inline replayssm_row_error slot_writable(int32_t flags) {
  if (flags & REPLAYSSM_SLOT_OPEN) return REPLAYSSM_ROW_SLOT_OPEN;
  return flags & REPLAYSSM_SLOT_SNAPSHOT ? REPLAYSSM_ROW_HAS_SNAPSHOTS : REPLAYSSM_ROW_OK;
}

// The row error of reading the state of a slot out of the pool.
REPLAYSSM_HOST_DEVICE inline replayssm_row_error slot_readable(int32_t flags) {
  const replayssm_row_error error = slot_usable(flags);
  return error != REPLAYSSM_ROW_OK ? error : slot_writable(flags);
}

REPLAYSSM_HOST_DEVICE inline replayssm_plan_row padded_plan_row(int32_t first_token, int32_t count) {
  replayssm_plan_row row{};
  row.slot = -1;
  row.first_token = first_token;
  row.count = count;
  return row;
}

REPLAYSSM_HOST_DEVICE inline replayssm_plan_row make_plan_row(const Problem& problem, const replayssm_cursor& cursor,
                                                              int32_t slot, int32_t first_token, int32_t count) {
  replayssm_plan_row row{};
  row.tokens = cursor.tokens;
  row.stream = cursor.stream;
  row.writes = cursor.writes;
  row.slot = slot;
  row.first_token = first_token;
  row.count = count;
  row.history = cursor.history;
  if (cursor.writes == 0) row.flags |= REPLAYSSM_ROW_EMPTY;
  if (cursor.flags & REPLAYSSM_SLOT_SNAPSHOT) row.flags |= REPLAYSSM_ROW_SNAPSHOT;
  if (count > problem.config.max_step_tokens) {
    row.flags |= REPLAYSSM_ROW_LONG;
  } else if (!(row.flags & REPLAYSSM_ROW_SNAPSHOT) && cursor.history > 0 &&
             cursor.history + count > problem.config.window) {
    row.flags |= REPLAYSSM_ROW_FLUSH;
  }
  row.ring_row = static_cast<int32_t>(cursor.tokens % problem.ring_rows);
  row.conv_row = static_cast<int32_t>(cursor.tokens % problem.conv_rows);
  return row;
}

// The tokens of the step that plan_next left outstanding in a slot; 0: none, or the slot was opened by plan.
REPLAYSSM_HOST_DEVICE inline int32_t outstanding(int32_t flags) { return flags >> REPLAYSSM_SLOT_COUNT_SHIFT; }

REPLAYSSM_HOST_DEVICE inline int32_t closed(int32_t flags) {
  return flags & ((1 << REPLAYSSM_SLOT_COUNT_SHIFT) - 1) & ~REPLAYSSM_SLOT_OPEN;
}

// Whether `cursor` still stands where `row` saw it, opened by that plan.
REPLAYSSM_HOST_DEVICE inline bool planned_by(const replayssm_cursor& cursor, const replayssm_plan_row& row) {
  return (cursor.flags & REPLAYSSM_SLOT_OPEN) && cursor.stream == row.stream && cursor.tokens == row.tokens &&
         cursor.history == row.history && cursor.writes == row.writes;
}

// Whether conventional_step and conventional_verify would miss records of the row.
REPLAYSSM_HOST_DEVICE inline bool has_records(const replayssm_plan_row& row) {
  return row.history > 0 && !(row.flags & REPLAYSSM_ROW_SNAPSHOT);
}

// Whether an op of this use takes the row.
REPLAYSSM_HOST_DEVICE inline bool takes(const replayssm_plan_row& row, replayssm_plan_use use) {
  if (use == REPLAYSSM_SNAPSHOTTED) return !(row.flags & REPLAYSSM_ROW_LONG) && !has_records(row);
  if (row.flags & REPLAYSSM_ROW_SNAPSHOT) return false;
  return use == REPLAYSSM_FOLDED || !(row.flags & REPLAYSSM_ROW_LONG);
}

// Whether a verification overwrote the snapshot that the row began with.
REPLAYSSM_HOST_DEVICE inline bool verify_overwrote(const replayssm_plan_row& row) {
  return takes(row, REPLAYSSM_SNAPSHOTTED) && row.count > 0 && (row.flags & REPLAYSSM_ROW_SNAPSHOT);
}

// A folded plan commits all of its tokens, the others a prefix; of a row that the ops refused, nothing. A long row
// can't be committed as anything but folded: conv_step has treated it as a prompt.
REPLAYSSM_HOST_DEVICE inline bool accepted_in_range(const replayssm_plan_row& row, int32_t accepted,
                                                    replayssm_plan_use use) {
  if (use != REPLAYSSM_FOLDED && (row.flags & REPLAYSSM_ROW_LONG)) return false;
  const int32_t most = takes(row, use) ? row.count : 0;
  if (use == REPLAYSSM_FOLDED) return accepted == row.count && accepted == most;
  return accepted >= 0 && accepted <= most;
}

REPLAYSSM_HOST_DEVICE inline replayssm_cursor committed(replayssm_cursor cursor, const replayssm_plan_row& row,
                                                        int32_t accepted, replayssm_plan_use use) {
  cursor.flags = closed(cursor.flags);
  if (row.count == 0) return cursor;
  cursor.tokens += accepted;
  if (use == REPLAYSSM_STEPPED) {
    const bool flush = row.flags & REPLAYSSM_ROW_FLUSH;
    cursor.history = (flush ? 0 : row.history) + accepted;
    cursor.writes += flush;
  } else if (use == REPLAYSSM_FOLDED) {
    cursor.history = 0;
    cursor.writes += 1;
  } else if (accepted > 0) {
    cursor.history = accepted;
    cursor.writes += 1;
    cursor.flags = REPLAYSSM_SLOT_SNAPSHOT;
  } else if (verify_overwrote(row)) {
    cursor.flags = REPLAYSSM_SLOT_INVALID;
  }
  return cursor;
}

REPLAYSSM_HOST_DEVICE inline replayssm_cursor abandoned(replayssm_cursor cursor, const replayssm_plan_row& row,
                                                        replayssm_plan_use use) {
  cursor.flags = closed(cursor.flags);
  const bool touched = use == REPLAYSSM_STEPPED  ? row.flags & (REPLAYSSM_ROW_FLUSH | REPLAYSSM_ROW_LONG)
                       : use == REPLAYSSM_FOLDED ? takes(row, use)
                                                 : verify_overwrote(row);
  if (touched) cursor.flags = REPLAYSSM_SLOT_INVALID;
  return cursor;
}

// What one committed row adds to the counters of a layer.
REPLAYSSM_HOST_DEVICE inline void count_traffic(const replayssm_plan_row& row, int32_t accepted, replayssm_plan_use use,
                                                int64_t (&added)[REPLAYSSM_NUM_COUNTERS]) {
  if (row.count == 0 || !takes(row, use)) return;
  const bool flush = use == REPLAYSSM_STEPPED && (row.flags & REPLAYSSM_ROW_FLUSH);
  added[REPLAYSSM_COUNT_TOKENS] += accepted;
  added[REPLAYSSM_COUNT_FLUSHES] += flush;
  const bool reads = !(row.flags & REPLAYSSM_ROW_EMPTY);
  added[REPLAYSSM_COUNT_STATE_READS] += reads;
  added[REPLAYSSM_COUNT_STEP_READS] += reads && use == REPLAYSSM_STEPPED && !flush;
  added[REPLAYSSM_COUNT_STATE_WRITES] += use == REPLAYSSM_SNAPSHOTTED ? row.count : flush || use == REPLAYSSM_FOLDED;
  added[REPLAYSSM_COUNT_RECORD_READS] += use == REPLAYSSM_SNAPSHOTTED ? 0 : row.history;
  added[REPLAYSSM_COUNT_RECORD_WRITES] += use == REPLAYSSM_STEPPED ? row.count : 0;
}

// How plan_next moves the cursor of a row. The row that the slot's outstanding step had follows from the cursor, which
// has not moved since, and the number of its tokens.
struct NextPlan {
  replayssm_cursor cursor;  // the slot's, once its new tokens are planned
  replayssm_plan_row row;
  replayssm_row_error error;  // not OK: the slot stays as it was, and only `given` and `expected` mean something
  int64_t given, expected;
  int64_t added[REPLAYSSM_NUM_COUNTERS];
};

REPLAYSSM_HOST_DEVICE inline NextPlan next_plan(const Problem& problem, replayssm_cursor cursor, int32_t slot,
                                                int32_t accepted, int32_t first_token, int32_t count, bool folded) {
  NextPlan next{};
  if (accepted == REPLAYSSM_NEW_SEQUENCE) {
    cursor = replayssm_cursor{};
  } else {
    const int32_t pending = outstanding(cursor.flags);
    next.error = pending > 0 ? slot_usable(closed(cursor.flags)) : slot_readable(cursor.flags);
    if (next.error != REPLAYSSM_ROW_OK) {
      next.given = slot, next.expected = cursor.flags;
      return next;
    }
    const replayssm_plan_row row = make_plan_row(problem, cursor, slot, 0, pending);
    if (accepted == REPLAYSSM_ACCEPT_ALL) accepted = pending;
    if (!accepted_in_range(row, accepted, REPLAYSSM_STEPPED)) {
      next.error = REPLAYSSM_ROW_ACCEPTED_RANGE;
      next.given = accepted, next.expected = pending;
      return next;
    }
    count_traffic(row, accepted, REPLAYSSM_STEPPED, next.added);
    cursor = committed(cursor, row, accepted, REPLAYSSM_STEPPED);
  }
  next.row = make_plan_row(problem, cursor, slot, first_token, count);
  if (folded) {
    next.row.flags &= ~REPLAYSSM_ROW_FLUSH;
    count_traffic(next.row, count, REPLAYSSM_FOLDED, next.added);
    cursor = committed(cursor, next.row, count, REPLAYSSM_FOLDED);
  } else if (count > 0) {
    cursor.flags |= REPLAYSSM_SLOT_OPEN | count << REPLAYSSM_SLOT_COUNT_SHIFT;
  }
  next.cursor = cursor;
  return next;
}

// A row of plan_lengths, from its sequence's lengths alone; not OK: only `given` and `expected` mean something.
struct LengthsRow {
  replayssm_plan_row row;
  replayssm_row_error error;
  int64_t given, expected;
};

REPLAYSSM_HOST_DEVICE inline LengthsRow row_of_lengths(const Problem& problem, const LengthsArgs& args, int32_t i) {
  LengthsRow result{};
  const int32_t slot = args.slots[i], first_token = i ? args.token_ends[i - 1] : 0;
  const int64_t prompt = args.prompt_lengths[i];
  const int64_t decoded = args.prompts ? 0 : args.sequence_lengths[i] - prompt - 1;
  const int64_t count = args.prompts ? prompt : 1;
  if (slot < -1 || slot >= args.num_slots) {
    result.error = REPLAYSSM_ROW_SLOT_RANGE, result.given = slot, result.expected = args.num_slots;
  } else if (prompt < 1) {
    result.error = REPLAYSSM_ROW_LENGTH_RANGE, result.given = prompt, result.expected = 1;
  } else if (decoded < 0) {
    result.error = REPLAYSSM_ROW_LENGTH_RANGE, result.given = decoded + 1, result.expected = 1;
  } else if (first_token < 0 || args.token_ends[i] != first_token + count) {
    result.error = REPLAYSSM_ROW_TOKEN_RANGE, result.given = args.token_ends[i], result.expected = first_token + count;
  }
  if (result.error != REPLAYSSM_ROW_OK) return result;
  replayssm_cursor cursor{};
  if (!args.prompts) {
    const int64_t window = problem.config.window;
    cursor.tokens = prompt + decoded;
    cursor.history = decoded ? static_cast<int32_t>((decoded - 1) % window + 1) : 0;
    cursor.writes = 1 + (decoded ? (decoded - 1) / window : 0);
  }
  result.row = make_plan_row(problem, cursor, slot, first_token, static_cast<int32_t>(count));
  return result;
}

}  // namespace replayssm
