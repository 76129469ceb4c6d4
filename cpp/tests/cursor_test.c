/* SPDX-License-Identifier: Apache-2.0
 *
 * The cursor code alone, through the C ABI: a million random operations on the slots of pools without layers, against a
 * model that knows neither rings nor cursors.
 *
 * The model of a slot is a list: the ids of its live records, oldest first (ids count up and are never used twice), the
 * number of its tokens, and which snapshot is its state. Beside it stands a ring of record ids, which is written and
 * read only where plan rows point to, as the kernels do it. Before every step all of the list must lie in the ring, in
 * order, in the rows before ring_row, and none of the rows that the step writes may hold a record of the list, whatever
 * is accepted afterwards and even if the step flushes it: other CTAs may still read it.
 */
#include <string.h>

#include "check.h"

enum { SLOTS = 5, MOST_RING_ROWS = REPLAYSSM_MAX_WINDOW + REPLAYSSM_MAX_STEP_TOKENS, OPERATIONS = 1000000 };

typedef struct {
  int64_t live[REPLAYSSM_MAX_WINDOW]; /* ids, oldest first */
  int64_t ring[MOST_RING_ROWS];       /* the id that each ring row holds */
  int64_t tokens, writes;
  int records, snapshot, lost;
} Model;

static int below(int limit) { return rand() % limit; }

static int flags_of(const Model* m) {
  return m->lost ? REPLAYSSM_SLOT_INVALID : m->snapshot ? REPLAYSSM_SLOT_SNAPSHOT : 0;
}

static void check_cursor(const Model* m, const replayssm_cursor* cursor) {
  CHECK(cursor->tokens == m->tokens && cursor->writes == m->writes && cursor->flags == flags_of(m));
  CHECK(m->lost || cursor->history == (m->snapshot ? m->snapshot : m->records));
}

/* Runs `operations` on pools of one config; a live row of a plan, a reset and a copy count as one each. */
static void run(int window, int step_tokens, int operations) {
  const replayssm_geometry geometry = {1, 8, 1, 64, 4};
  const replayssm_config config = {
      window, step_tokens, REPLAYSSM_CHECKPOINT_FP32, REPLAYSSM_READ_COPY_NONE, REPLAYSSM_FP32, 0};
  const replayssm_exec host = {REPLAYSSM_HOST, NULL};
  const int ring_rows = window + step_tokens;
  replayssm_cursor cursors[SLOTS] = {{0}};
  replayssm_error error = {0};
  int64_t counters[REPLAYSSM_NUM_COUNTERS] = {0}, next_id = 1, committed = 0, flushes = 0;
  const replayssm_table table = {cursors, &error, counters, NULL, SLOTS, 0};
  static Model models[SLOTS];
  memset(models, 0, sizeof(models));
  _Alignas(64) char plan[64 + SLOTS * 68 + 64];
  CHECK(replayssm_plan_bytes(SLOTS) <= (int64_t)sizeof(plan));
  const replayssm_plan_row* planned = (const replayssm_plan_row*)(plan + sizeof(replayssm_plan_header));

  for (int done = 0; done < operations;) {
    const int kind = below(100);
    if (kind < 12) { /* reset, mostly of slots that can't go on otherwise */
      int32_t slot = below(SLOTS);
      for (int i = 0; i < SLOTS && !flags_of(&models[slot]); ++i) slot = (slot + 1) % SLOTS;
      const int64_t stream = done;
      CHECK(replayssm_reset(&host, &table, &slot, &stream, 1) == REPLAYSSM_OK);
      memset(models[slot].live, 0, sizeof(models[slot].live));
      models[slot].tokens = models[slot].writes = 0;
      models[slot].records = models[slot].snapshot = models[slot].lost = 0;
      ++done;
      continue;
    }
    if (kind < 15) { /* copy; the memory of the ring goes with it */
      const int32_t src = below(SLOTS), dst = (src + 1 + below(SLOTS - 1)) % SLOTS;
      char nothing;
      CHECK(replayssm_copy(&host, &table, &nothing, 0, 0, &src, &dst, 1) == REPLAYSSM_OK);
      const int refused = flags_of(&models[src]) || models[dst].snapshot;
      CHECK((error.code != REPLAYSSM_ROW_OK) == refused);
      if (!refused) models[dst] = models[src];
      memset(&error, 0, sizeof(error));
      check_cursor(&models[dst], &cursors[dst]);
      ++done;
      continue;
    }

    /* A plan of distinct slots, some rows padded. Slots of one plan are all fit for its use. */
    const replayssm_plan_use use = kind < 85 ? REPLAYSSM_STEPPED : kind < 92 ? REPLAYSSM_FOLDED : REPLAYSSM_SNAPSHOTTED;
    const int abandon = below(20) == 0;
    int32_t slots[SLOTS], counts[SLOTS], accepted[SLOTS];
    int rows = 0;
    for (int slot = below(SLOTS), i = 0; i < SLOTS; ++i, slot = (slot + 1) % SLOTS) {
      const Model* m = &models[slot];
      const int fit = !m->lost && (use == REPLAYSSM_SNAPSHOTTED ? m->records == 0 : !m->snapshot);
      if (below(3) == 0) continue;
      slots[rows] = fit ? slot : -1;
      counts[rows] = below(use == REPLAYSSM_FOLDED ? 3 * window : step_tokens + 1);
      if (below(3) == 0 && use != REPLAYSSM_FOLDED) counts[rows] = step_tokens;
      accepted[rows] = use == REPLAYSSM_FOLDED ? counts[rows] : below(counts[rows] + 1);
      ++rows;
    }
    CHECK(replayssm_plan(&host, &geometry, &config, &table, slots, counts, 0, rows, plan) == REPLAYSSM_OK);
    CHECK(error.code == REPLAYSSM_ROW_OK);

    for (int i = 0; i < rows; ++i) {
      if (slots[i] < 0) continue;
      ++done;
      Model* m = &models[slots[i]];
      const replayssm_plan_row* row = &planned[i];
      const int count = counts[i];
      const int flush = !m->snapshot && count <= step_tokens && m->records > 0 && m->records + count > window;
      CHECK(row->slot == slots[i] && row->count == count && row->tokens == m->tokens && row->writes == m->writes);
      CHECK(row->history == (m->snapshot ? m->snapshot : m->records));
      CHECK(row->flags ==
            ((flush ? REPLAYSSM_ROW_FLUSH : 0) | (m->writes == 0 ? REPLAYSSM_ROW_EMPTY : 0) |
             (count > step_tokens ? REPLAYSSM_ROW_LONG : 0) | (m->snapshot ? REPLAYSSM_ROW_SNAPSHOT : 0)));
      for (int j = 0; j < m->records; ++j)
        CHECK(m->ring[(row->ring_row - m->records + j + ring_rows) % ring_rows] == m->live[j]);

      if (use == REPLAYSSM_STEPPED) {
        int64_t first_id = next_id;
        for (int t = 0; t < count; ++t) {
          int64_t* place = &m->ring[(row->ring_row + t) % ring_rows];
          for (int j = 0; j < m->records; ++j) CHECK(*place != m->live[j]);
          *place = next_id++;
        }
        if (abandon) {
          m->lost = flush;
          continue;
        }
        if (flush) m->records = 0;
        m->writes += flush;
        flushes += flush;
        for (int t = 0; t < accepted[i]; ++t) m->live[m->records++] = first_id++;
      } else if (count > 0 && use == REPLAYSSM_FOLDED) {
        if (!abandon) m->records = 0, m->writes += 1;
        m->lost = abandon;
      } else if (count > 0) {
        if (!abandon && accepted[i] > 0) {
          m->snapshot = accepted[i], m->writes += 1;
        } else if (m->snapshot) { /* what it would fall back to is overwritten */
          m->snapshot = 0, m->lost = 1;
        }
      } else if (use == REPLAYSSM_FOLDED) {
        m->lost = abandon;
      }
      if (!abandon) m->tokens += accepted[i], committed += accepted[i];
    }
    if (abandon) {
      CHECK(replayssm_abandon(&host, &table, plan, rows, use) == REPLAYSSM_OK);
    } else {
      CHECK(replayssm_commit(&host, &table, plan, rows, accepted, use) == REPLAYSSM_OK);
    }
    CHECK(error.code == REPLAYSSM_ROW_OK);
    for (int slot = 0; slot < SLOTS; ++slot) check_cursor(&models[slot], &cursors[slot]);
  }
  CHECK(counters[REPLAYSSM_COUNT_TOKENS] == committed && counters[REPLAYSSM_COUNT_FLUSHES] == flushes);
  CHECK(flushes > operations / 100); /* the slots do live long enough */
}

void test_cursors(void) {
  static const int configs[][2] = {{16, 16}, {16, 4}, {24, 5}, {32, 8}, {17, 3}, {5, 2}, {1, 1}, {64, 16}};
  const int number = sizeof(configs) / sizeof(configs[0]);
  for (int i = 0; i < number; ++i) run(configs[i][0], configs[i][1], OPERATIONS / number);
}
