// SPDX-License-Identifier: Apache-2.0
//
// The ops that bring new tokens to a layer: flush, step, prefill, conventional_step, conventional_verify. A task is one
// head of one row.
//
// step evaluates outputs only: with records 1..h of the slot and h+1..h+T of this step,
//     y_s = exp(e(0,h+s)) S_ckpt C_s + sum_{j<=h+s} delta_j exp(e(j,h+s)) (B_j . C_s) x_j + D x_s,
// so that no state is formed and the checkpoint (or its read copy) is read once. The others run the recurrence.
//
// A task returns whether the states that it stored, if any, are finite.
#include <algorithm>

#include "host/recurrence.h"
#include "host/rows.h"

namespace replayssm::host {
namespace {

// The new tokens of one row as one head sees them.
struct HeadTokens {
  const replayssm_scan_args& args;
  int64_t first_token;
  int32_t head, group;

  HeadTokens(const replayssm_scan_args& args_, const replayssm_plan_row& row, const HeadSlot& slot)
      : args(args_), first_token(row.first_token), head(slot.head), group(slot.group()) {}

  char* row(const replayssm_tensor& tensor, int32_t token, int32_t index) const {
    return element_address(tensor.data, tensor.dtype,
                           (first_token + token) * tensor.stride[0] + index * tensor.stride[1]);
  }
  bool are_records() const { return !args.x.data; }  // x and B are in the rings
  char* x(int32_t token) const { return row(args.x, token, head); }
  char* B(int32_t token) const { return row(args.B, token, group); }
  char* C(int32_t token) const { return row(args.C, token, group); }
  char* out(int32_t token) const { return row(args.out, token, head); }
  float delta(int32_t token) const {
    float dt;
    load_row(row(args.dt, token, head), args.dt.dtype, 1, &dt);
    const float bias = args.dt_bias.data ? load_element(args.dt_bias, head) : 0.0f;
    return discretised_step(dt, bias, args.dt_min, args.dt_max);
  }
  float skip() const { return args.D.data ? load_element(args.D, head) : 0.0f; }
};

bool flush_head(const HeadSlot& head, const replayssm_plan_row& row, float A, float* state) {
  load_checkpoint(head, row.flags & REPLAYSSM_ROW_EMPTY, state);
  fold_records(head, row.tokens, row.history, A, state);
  return write_state(head, row.stream, row.writes, state);
}

bool step_head(const HeadSlot& head, const replayssm_plan_row& row, const replayssm_scan_args& args, bool flushed) {
  const int32_t P = head.problem.geometry.head_dim, N = head.problem.geometry.state_dim;
  const int32_t dtype = head.problem.config.activation;
  const HeadTokens tokens(args, row, head);
  const float A = decay_rate(args.A_log, head.head);
  float state[kMaxHeadDim * kMaxStateDim];

  const bool flush = row.flags & REPLAYSSM_ROW_FLUSH;
  const bool finite = !flush || flushed || flush_head(head, row, A, state);
  // A flushed row reads what the next step will read: what is stored.
  load_for_step(head, (row.flags & REPLAYSSM_ROW_EMPTY) && !flush, state);
  const int32_t history = flush ? 0 : row.history;

  float delta[kMaxRecords], x[kMaxRecords][kMaxHeadDim], B[kMaxRecords][kMaxStateDim];
  for (int32_t j = 0; j < history; ++j) {
    const int64_t record = row.tokens - history + j;
    delta[j] = head.delta(record);
    load_row(head.x(record), dtype, P, x[j]);
    load_row(head.B(record), dtype, N, B[j]);
  }
  const bool first_of_group =
      head.head == 0 || HeadSlot{head.problem, head.layer, row.slot, head.head - 1}.group() != head.group();
  for (int32_t t = 0; t < row.count; ++t) {
    const int32_t j = history + t;
    const int64_t record = row.tokens + t;
    delta[j] = head.delta(record) = tokens.delta(t);
    load_row(tokens.are_records() ? head.x(record) : tokens.x(t), dtype, P, x[j]);
    load_row(tokens.are_records() ? head.B(record) : tokens.B(t), dtype, N, B[j]);
    if (tokens.are_records()) continue;
    store_row(x[j], P, dtype, head.x(record));
    if (first_of_group) store_row(B[j], N, dtype, head.B(record));
  }

  const float skip = tokens.skip();
  for (int32_t t = 0; t < row.count; ++t) {
    const int32_t records = history + t + 1;
    float C[kMaxStateDim], weights[kMaxRecords], y[kMaxHeadDim];
    load_row(tokens.C(t), dtype, N, C);
    const float decay = replay_weights(delta, records, A, weights);
    for (int32_t p = 0; p < P; ++p) y[p] = decay * dot(state + p * N, C, N);
    for (int32_t j = 0; j < records; ++j) {
      const float weight = weights[j] * dot(B[j], C, N);
      for (int32_t p = 0; p < P; ++p) y[p] += weight * x[j][p];
    }
    for (int32_t p = 0; p < P; ++p) y[p] += skip * x[records - 1][p];
    store_row(y, P, dtype, tokens.out(t));
  }
  return finite;
}

// Runs the recurrence over the row's tokens; after_token(t) sees the state after each.
template <typename AfterToken>
void recur(const HeadSlot& head, const replayssm_plan_row& row, const replayssm_scan_args& args, float* state,
           const AfterToken& after_token) {
  const int32_t P = head.problem.geometry.head_dim, N = head.problem.geometry.state_dim;
  const int32_t dtype = head.problem.config.activation;
  const HeadTokens tokens(args, row, head);
  const float A = decay_rate(args.A_log, head.head);
  const float skip = tokens.skip();
  for (int32_t t = 0; t < row.count; ++t) {
    float x[kMaxHeadDim], B[kMaxStateDim], C[kMaxStateDim], y[kMaxHeadDim];
    load_row(tokens.x(t), dtype, P, x);
    load_row(tokens.B(t), dtype, N, B);
    load_row(tokens.C(t), dtype, N, C);
    const float delta = tokens.delta(t);
    const float decay = std::exp(A * delta);
    for (int32_t p = 0; p < P; ++p) {
      const float scaled = delta * x[p];
      float* s = state + p * N;
      for (int32_t n = 0; n < N; ++n) s[n] = decay * s[n] + scaled * B[n];
      y[p] = dot(s, C, N) + skip * x[p];
    }
    store_row(y, P, dtype, tokens.out(t));
    after_token(t);
  }
}

bool prefill_head(const HeadSlot& head, const replayssm_plan_row& row, const replayssm_scan_args& args) {
  float state[kMaxHeadDim * kMaxStateDim];
  load_checkpoint(head, row.flags & REPLAYSSM_ROW_EMPTY, state);
  fold_records(head, row.tokens, row.history, decay_rate(args.A_log, head.head), state);
  recur(head, row, args, state, [](int32_t) {});
  return row.count == 0 || write_state(head, row.stream, row.writes, state);
}

bool verify_head(const HeadSlot& head, const replayssm_plan_row& row, const replayssm_scan_args& args,
                 const replayssm_buffer& snapshots) {
  float state[kMaxHeadDim * kMaxStateDim];
  if (row.flags & REPLAYSSM_ROW_SNAPSHOT) {
    load_state(head, head.snapshot(snapshots, row.history - 1), state);
  } else {
    load_checkpoint(head, row.flags & REPLAYSSM_ROW_EMPTY, state);
  }
  bool finite = true;
  recur(head, row, args, state, [&](int32_t t) {
    finite = store_state(head, row.stream, row.writes, state, head.snapshot(snapshots, t)) && finite;
  });
  return finite;
}

// task(row, head) for every head of every live row that `selects`; reports the first that stored a state that is not
// finite.
template <typename Selects, typename Task>
void for_each_head(const Problem& problem, const replayssm_layer& layer, const replayssm_table& table, const void* plan,
                   int32_t rows, int64_t tokens_per_row, const Selects& selects, const Task& task) {
  NotFinite not_finite(problem.geometry.num_heads);
  const int32_t heads = problem.geometry.num_heads;
  const int64_t work = tokens_per_row * problem.geometry.head_dim * problem.geometry.state_dim;
  parallel_for(int64_t{rows} * heads, work, [&](int64_t i) {
    const replayssm_plan_row& row = plan_rows(plan)[i / heads];
    if (row.slot < 0 || !selects(row)) return;
    const HeadSlot head{problem, layer, row.slot, static_cast<int32_t>(i % heads)};
    if (!task(head, row)) not_finite.note(static_cast<int32_t>(i / heads), head.head);
  });
  not_finite.report_to(table, layer.layer);
}

bool every_row(const replayssm_plan_row&) { return true; }

int64_t tokens_per_row(const replayssm_scan_args& args, int32_t rows) {
  return std::max<int64_t>(args.num_tokens / rows, 1);
}

// Reports and returns false if a row holds records, which the conventional ops do not read.
bool without_records(const replayssm_table& table, const void* plan, int32_t rows) {
  for (int32_t i = 0; i < rows; ++i) {
    const replayssm_plan_row& row = plan_rows(plan)[i];
    if (row.slot < 0 || !has_records(row)) continue;
    report(table, REPLAYSSM_ROW_HAS_RECORDS, i, row.history, 0);
    return false;
  }
  return true;
}

}  // namespace

replayssm_status flush(const replayssm_exec&, const Problem& problem, const replayssm_layer& layer,
                       const replayssm_table& table, const void* plan, int32_t rows, const replayssm_tensor& A_log) {
  for_each_head(
      problem, layer, table, plan, rows, problem.config.window,
      [](const replayssm_plan_row& row) { return (row.flags & REPLAYSSM_ROW_FLUSH) != 0; },
      [&](const HeadSlot& head, const replayssm_plan_row& row) {
        float state[kMaxHeadDim * kMaxStateDim];
        return flush_head(head, row, decay_rate(A_log, head.head), state);
      });
  return REPLAYSSM_OK;
}

replayssm_status step(const replayssm_exec&, const Problem& problem, const replayssm_layer& layer,
                      const replayssm_table& table, const void* plan, int32_t rows, const replayssm_scan_args& args,
                      bool flushed) {
  const int32_t max_count = std::min(args.max_count, problem.config.max_step_tokens);
  if (!rows_fit(table, plan, rows, args.num_tokens, max_count, false)) return REPLAYSSM_OK;
  for_each_head(
      problem, layer, table, plan, rows, tokens_per_row(args, rows), every_row,
      [&](const HeadSlot& head, const replayssm_plan_row& row) { return step_head(head, row, args, flushed); });
  return REPLAYSSM_OK;
}

replayssm_status prefill(const replayssm_exec&, const Problem& problem, const replayssm_layer& layer,
                         const replayssm_table& table, const void* plan, int32_t rows,
                         const replayssm_scan_args& args) {
  if (!rows_fit(table, plan, rows, args.num_tokens, args.max_count, false)) return REPLAYSSM_OK;
  for_each_head(problem, layer, table, plan, rows, tokens_per_row(args, rows), every_row,
                [&](const HeadSlot& head, const replayssm_plan_row& row) { return prefill_head(head, row, args); });
  return REPLAYSSM_OK;
}

replayssm_status conventional_step(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                                   const replayssm_table& table, const void* plan, int32_t rows,
                                   const replayssm_scan_args& args) {
  if (!without_records(table, plan, rows)) return REPLAYSSM_OK;
  return prefill(exec, problem, layer, table, plan, rows, args);
}

replayssm_status conventional_verify(const replayssm_exec&, const Problem& problem, const replayssm_layer& layer,
                                     const replayssm_table& table, const void* plan, int32_t rows,
                                     const replayssm_scan_args& args, const replayssm_buffer& snapshots) {
  if (!without_records(table, plan, rows)) return REPLAYSSM_OK;
  if (!rows_fit(table, plan, rows, args.num_tokens, args.max_count, true)) return REPLAYSSM_OK;
  for_each_head(
      problem, layer, table, plan, rows, tokens_per_row(args, rows), every_row,
      [&](const HeadSlot& head, const replayssm_plan_row& row) { return verify_head(head, row, args, snapshots); });
  return REPLAYSSM_OK;
}

}  // namespace replayssm::host
