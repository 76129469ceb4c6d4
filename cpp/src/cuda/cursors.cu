// SPDX-License-Identifier: Apache-2.0
//
// reset, plan, plan_next, plan_lengths, commit, abandon: the ops that make plans or move cursors. A thread owns a row.
//
// plan and plan_next are one kernel, of one CTA that walks the rows in tiles of its size. Within a tile every row first
// looks at its slot's flags, then the rows whose slot is usable bid for it with an atomicMax on the flags word (the
// lowest row bids highest), and only the winner opens it: a slot named twice is refused for every row but the first,
// whatever the scheduling. (plan_next takes open slots too, so what a tile has planned stays marked until the last
// one.) Two block-wide prefix sums give each row its first token and, if it is live, its place in the order.
// plan_lengths has no cursors to bid for: a row looks for its slot in the rows before it.
#include "common.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kPlanThreads = 512;
constexpr int kRowThreads = 128;
constexpr int kBidShift = 16;          // bids lie above the REPLAYSSM_SLOT_* flags and the outstanding count
constexpr int32_t kClaimed = 1 << 30;  // of a slot that an earlier tile of this plan_next has planned

__device__ bool slot_in_range(const replayssm_table& table, const int32_t* slots, int32_t i) {
  if (slots[i] >= -1 && slots[i] < table.num_slots) return true;
  report(table.error, REPLAYSSM_ROW_SLOT_RANGE, i, slots[i], table.num_slots);
  return false;
}

__global__ void reset_kernel(replayssm_table table, const int32_t* slots, const int64_t* streams, int32_t rows,
                             int64_t writes) {
  const int32_t i = blockIdx.x * kRowThreads + threadIdx.x;
  if (i >= rows || !slot_in_range(table, slots, i) || slots[i] < 0) return;
  table.cursors[slots[i]] = replayssm_cursor{0, static_cast<uint64_t>(streams[i]), writes, 0, 0};
}

// Inclusive prefix sum over the CTA; `total` is the sum of all. Ends with warp_sums free for the next call.
__device__ int64_t block_prefix_sum(int64_t value, int64_t* warp_sums, int64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  if (lane == 31) warp_sums[warp] = value;
  __syncthreads();
  int64_t sum = 0;
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w < warp) value += warp_sums[w];
    sum += warp_sums[w];
  }
  *total = sum;
  __syncthreads();
  return value;
}

// One atomic a warp and counter: a batch would queue up at six words otherwise. All lanes of the warp call it.
__device__ void add_counters(const replayssm_table& table, int64_t (&added)[REPLAYSSM_NUM_COUNTERS]) {
#pragma unroll
  for (int k = 0; k < REPLAYSSM_NUM_COUNTERS; ++k) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      added[k] += __shfl_down_sync(0xffffffffu, added[k], distance);
    }
    if (threadIdx.x % 32 == 0 && added[k] != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(table.counters + k), static_cast<unsigned long long>(added[k]));
    }
  }
}

// The plan's row_order, by a CTA that walks the rows in tiles: live rows that flush from the begin on, the others from
// the end on.
struct RowOrder {
  int32_t* order;
  int32_t rows, live = 0, flushes = 0;  // live: those that flush, too

  __device__ RowOrder(replayssm_plan_row* planned, int32_t rows)
      : order(reinterpret_cast<int32_t*>(planned + rows)), rows(rows) {}

  // Row i of the thread's; all threads call it.
  __device__ void take(bool is_live, bool flush, int32_t i, int64_t* warp_sums) {
    int64_t in_tile;  // flushing rows, and live rows above bit 32
    const int64_t through = block_prefix_sum(flush + (static_cast<int64_t>(is_live) << 32), warp_sums, &in_tile);
    const int32_t flushes_through = flushes + static_cast<int32_t>(through),
                  live_through = live + static_cast<int32_t>(through >> 32);
    if (is_live) order[flush ? flushes_through - 1 : rows - (live_through - flushes_through)] = i;
    flushes += static_cast<int32_t>(in_tile);
    live += static_cast<int32_t>(in_tile >> 32);
  }
  // Behind the last tile: what stands for rows that are not live.
  __device__ void finish() const {
    for (int64_t i = flushes + threadIdx.x; i < rows - (live - flushes); i += kPlanThreads) order[i] = -1;
  }
};

// What plan_next knows beyond plan.
struct NextArgs {
  const int32_t* accepted;
  int32_t row_tokens;
  bool folded;
  replayssm_error* status;
};

template <bool kNext>
__global__ __launch_bounds__(kPlanThreads) void plan_kernel(Problem problem, replayssm_table table,
                                                            const int32_t* slots, const int32_t* counts,
                                                            int32_t uniform_count, int32_t rows, void* plan,
                                                            NextArgs args) {
  await_previous();
  let_next_begin();  // only now: what steps load early must be written
  __shared__ int64_t warp_sums[kPlanThreads / 32];
  auto* header = static_cast<replayssm_plan_header*>(plan);
  auto* planned = reinterpret_cast<replayssm_plan_row*>(header + 1);
  RowOrder order(planned, rows);

  int64_t tokens_before = 0;
  for (int64_t tile = 0; tile < rows; tile += kPlanThreads) {
    const int32_t i = static_cast<int32_t>(tile) + threadIdx.x;
    const bool exists = tile + threadIdx.x < rows;

    int32_t slot = -1, count = 0;
    replayssm_cursor cursor{};
    if (exists) {
      count = counts ? counts[i] : uniform_count;
      if (slot_in_range(table, slots, i)) slot = slots[i];
      if (count < 0) {
        if (slot >= 0) report(table.error, REPLAYSSM_ROW_COUNT_RANGE, i, count, 0);
        slot = -1;
        count = 0;
      }
      if (kNext && count > args.row_tokens) {
        const int64_t first = static_cast<int64_t>(i) * args.row_tokens;
        if (slot >= 0) report(table.error, REPLAYSSM_ROW_TOKEN_RANGE, i, first + count, first + args.row_tokens);
        slot = -1;
        count = args.row_tokens;
      }
      if (slot >= 0) cursor = table.cursors[slot];
    }

    int64_t tokens_in_tile;
    const int64_t end = tokens_before + block_prefix_sum(count, warp_sums, &tokens_in_tile);
    if (slot >= 0 && end > INT32_MAX) {
      report(table.error, REPLAYSSM_ROW_TOKEN_RANGE, i, end, INT32_MAX);
      slot = -1;
    }

    const int32_t first_token =
        kNext ? i * args.row_tokens : static_cast<int32_t>(min(end - count, static_cast<int64_t>(INT32_MAX)));
    [[maybe_unused]] NextPlan next{};
    if (kNext && slot >= 0) {
      next = next_plan(problem, cursor, slot, args.accepted[i], first_token, count, args.folded);
      if (tile > 0 && (cursor.flags & kClaimed)) {
        next.error = REPLAYSSM_ROW_SLOT_OPEN, next.given = slot, next.expected = REPLAYSSM_SLOT_OPEN;
      }
    }

    // block_prefix_sum was a barrier: every row of the tile has read the flags before the first bid.
    const int32_t bid = (kPlanThreads - static_cast<int32_t>(threadIdx.x)) << kBidShift;
    if (slot >= 0) {
      const replayssm_row_error error = kNext ? next.error : slot_usable(cursor.flags);
      if (error != REPLAYSSM_ROW_OK) {
        report(table.error, error, i, kNext ? next.given : slot, kNext ? next.expected : cursor.flags);
        slot = -1;
      }
    }
    if constexpr (kNext) {  // NEW_SEQUENCE also takes flags that would outbid every row
      if (slot >= 0) table.cursors[slot].flags = 0;
      __syncthreads();
    }
    if (slot >= 0) atomicMax(&table.cursors[slot].flags, bid);
    __syncthreads();
    bool won = false;
    if (slot >= 0) {
      won = *const_cast<volatile int32_t*>(&table.cursors[slot].flags) == bid;
      if (!won) report(table.error, REPLAYSSM_ROW_SLOT_OPEN, i, slot, REPLAYSSM_SLOT_OPEN);
    }
    __syncthreads();
    replayssm_plan_row row = padded_plan_row(first_token, count);
    if constexpr (kNext) {
      int64_t added[REPLAYSSM_NUM_COUNTERS] = {};
      if (won) {
        table.cursors[slot] = next.cursor;
        if (rows > kPlanThreads) table.cursors[slot].flags |= kClaimed;
        row = next.row;
        for (int k = 0; k < REPLAYSSM_NUM_COUNTERS; ++k) added[k] = next.added[k];
      }
      add_counters(table, added);
    } else if (won) {
      table.cursors[slot].flags = cursor.flags | REPLAYSSM_SLOT_OPEN;
      row = make_plan_row(problem, cursor, slot, first_token, count);
    }
    if (exists) planned[i] = row;

    order.take(won, won && (row.flags & REPLAYSSM_ROW_FLUSH), i, warp_sums);
    tokens_before += tokens_in_tile;
  }
  order.finish();
  // The slot of a row is the same thread's in both loops.
  for (int64_t i = threadIdx.x; kNext && rows > kPlanThreads && i < rows; i += kPlanThreads) {
    if (planned[i].slot >= 0) table.cursors[planned[i].slot].flags &= ~kClaimed;
  }
  if (threadIdx.x == 0) {
    replayssm_plan_header filled{};
    filled.rows = rows;
    filled.num_tokens =
        kNext ? rows * args.row_tokens : static_cast<int32_t>(min(tokens_before, static_cast<int64_t>(INT32_MAX)));
    filled.num_live = order.live;
    filled.num_flush = order.flushes;
    *header = filled;
    // Every row has passed a barrier since it may have reported.
    if (kNext && args.status) *args.status = *table.error;
  }
}

__global__ __launch_bounds__(kPlanThreads) void plan_lengths_kernel(Problem problem, LengthsArgs args, int32_t rows,
                                                                    void* plan, replayssm_error* error) {
  __shared__ int64_t warp_sums[kPlanThreads / 32];
  auto* header = static_cast<replayssm_plan_header*>(plan);
  auto* planned = reinterpret_cast<replayssm_plan_row*>(header + 1);
  RowOrder order(planned, rows);
  if (threadIdx.x == 0) *error = {};
  __syncthreads();

  for (int64_t tile = 0; tile < rows; tile += kPlanThreads) {
    const int32_t i = static_cast<int32_t>(tile) + threadIdx.x;
    const bool exists = tile + threadIdx.x < rows;
    bool live = false;
    replayssm_plan_row row{};
    if (exists) {
      const int32_t slot = args.slots[i];
      row = padded_plan_row(i ? args.token_ends[i - 1] : 0, 0);
      if (slot != -1) {
        LengthsRow planned_row = row_of_lengths(problem, args, i);
        for (int32_t j = 0; j < i && planned_row.error == REPLAYSSM_ROW_OK; ++j) {
          if (args.slots[j] == slot) planned_row.error = REPLAYSSM_ROW_SLOT_OPEN, planned_row.given = slot;
        }
        live = planned_row.error == REPLAYSSM_ROW_OK;
        if (live) {
          row = planned_row.row;
        } else {
          report(error, planned_row.error, i, planned_row.given, planned_row.expected);
        }
      }
      planned[i] = row;
    }
    order.take(live, live && (row.flags & REPLAYSSM_ROW_FLUSH), i, warp_sums);
  }
  order.finish();
  if (threadIdx.x == 0) {
    replayssm_plan_header filled{};
    filled.rows = rows;
    filled.num_tokens = rows ? args.token_ends[rows - 1] : 0;
    filled.num_live = order.live;
    filled.num_flush = order.flushes;
    *header = filled;
  }
}

__device__ bool still_planned(const replayssm_table& table, const replayssm_plan_row& row, int32_t i) {
  if (planned_by(table.cursors[row.slot], row)) return true;
  report(table.error, REPLAYSSM_ROW_NOT_PLANNED, i, row.slot, 0);
  return false;
}

__global__ void commit_kernel(replayssm_table table, const replayssm_plan_row* planned, int32_t rows,
                              const int32_t* accepted, replayssm_plan_use use) {
  begin_early();
  const int32_t i = blockIdx.x * kRowThreads + threadIdx.x;
  int64_t added[REPLAYSSM_NUM_COUNTERS] = {};
  if (i < rows && planned[i].slot >= 0) {
    const replayssm_plan_row row = planned[i];
    const int32_t taken = accepted ? accepted[i] : row.count;
    if (!still_planned(table, row, i)) {
      // reported
    } else if (!accepted_in_range(row, taken, use)) {
      report(table.error, REPLAYSSM_ROW_ACCEPTED_RANGE, i, taken, row.count);
    } else {
      count_traffic(row, taken, use, added);
      table.cursors[row.slot] = committed(table.cursors[row.slot], row, taken, use);
    }
  }
  add_counters(table, added);
}

__global__ void abandon_kernel(replayssm_table table, const replayssm_plan_row* planned, int32_t rows,
                               replayssm_plan_use use) {
  const int32_t i = blockIdx.x * kRowThreads + threadIdx.x;
  if (i >= rows || planned[i].slot < 0) return;
  const replayssm_plan_row row = planned[i];
  if (still_planned(table, row, i)) table.cursors[row.slot] = abandoned(table.cursors[row.slot], row, use);
}

int64_t row_blocks(int32_t rows) { return (static_cast<int64_t>(rows) + kRowThreads - 1) / kRowThreads; }

}  // namespace

replayssm_status reset(const replayssm_exec& exec, const replayssm_table& table, const int32_t* slots,
                       const int64_t* streams, int32_t rows, int64_t writes) {
  if (rows == 0) return REPLAYSSM_OK;
  return launch("reset", reset_kernel, row_blocks(rows), kRowThreads, 0, exec, table, slots, streams, rows, writes);
}

replayssm_status plan(const replayssm_exec& exec, const Problem& problem, const replayssm_table& table,
                      const int32_t* slots, const int32_t* counts, int32_t uniform_count, int32_t rows, void* plan) {
  return launch_early("plan", plan_kernel<false>, 1, kPlanThreads, 0, exec, problem, table, slots, counts,
                      uniform_count, rows, plan, NextArgs{});
}

replayssm_status plan_next(const replayssm_exec& exec, const Problem& problem, const replayssm_table& table,
                           const int32_t* slots, const int32_t* counts, const int32_t* accepted, int32_t rows,
                           int32_t row_tokens, void* plan, replayssm_error* status) {
  const bool folded = row_tokens > problem.config.max_step_tokens;
  return launch_early("plan_next", plan_kernel<true>, 1, kPlanThreads, 0, exec, problem, table, slots, counts, 0, rows,
                      plan, NextArgs{accepted, row_tokens, folded, status});
}

replayssm_status plan_lengths(const replayssm_exec& exec, const Problem& problem, const LengthsArgs& args, int32_t rows,
                              void* plan, replayssm_error* error) {
  return launch("plan_lengths", plan_lengths_kernel, 1, kPlanThreads, 0, exec, problem, args, rows, plan, error);
}

replayssm_status commit(const replayssm_exec& exec, const replayssm_table& table, const void* plan, int32_t rows,
                        const int32_t* accepted, replayssm_plan_use use) {
  if (rows == 0) return REPLAYSSM_OK;
  return launch_early("commit", commit_kernel, row_blocks(rows), kRowThreads, 0, exec, table, plan_rows(plan), rows,
                      accepted, use);
}

replayssm_status abandon(const replayssm_exec& exec, const replayssm_table& table, const void* plan, int32_t rows,
                         replayssm_plan_use use) {
  if (rows == 0) return REPLAYSSM_OK;
  return launch("abandon", abandon_kernel, row_blocks(rows), kRowThreads, 0, exec, table, plan_rows(plan), rows, use);
}

cudaError_t load_cursor_kernels() {
  for (cudaError_t error :
       {load_kernel(reset_kernel), load_kernel(plan_kernel<false>), load_kernel(plan_kernel<true>),
        load_kernel(plan_lengths_kernel), load_kernel(commit_kernel), load_kernel(abandon_kernel)}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
