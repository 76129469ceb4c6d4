// SPDX-License-Identifier: Apache-2.0
//
// flush and materialize: the state of a slot with its records folded in, stored as the slot's new state or handed out.
//
// A CTA owns a head: every thread asks for its part of the state, 2 rows by N/8 columns, all loads in flight at once;
// records and their weights go to shared memory meanwhile, once for the whole head; the sums are formed in registers,
// from which the stored formats are cast. Then it goes on to the next head: the grid has a fixed size, since only the
// device knows how many rows flush.
#include <algorithm>

#include "head_state.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int64_t kFoldBlocks = 2048;

template <int kStateDim>
__global__ __launch_bounds__(kMaxHeadThreads) void fold_kernel(const __grid_constant__ FoldParams params) {
  extern __shared__ __align__(16) float fold_shared[];
  const Problem& problem = params.problem;
  const int P = problem.geometry.head_dim, H = problem.geometry.num_heads;
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int p = group * kRowsPerGroup;
  const bool flush = params.state == nullptr;
  const int listed = flush ? static_cast<const replayssm_plan_header*>(params.plan)->num_flush : params.rows;
  const auto* planned = reinterpret_cast<const replayssm_plan_row*>(static_cast<const char*>(params.plan) +
                                                                    sizeof(replayssm_plan_header));
  const auto* flush_rows = reinterpret_cast<const int32_t*>(planned + params.rows);

  for (int64_t item = blockIdx.x; item < static_cast<int64_t>(listed) * H; item += gridDim.x) {
    const int head = static_cast<int>(item % H), index = static_cast<int>(item / H);
    int32_t slot_index, h, next;
    bool empty;
    if (flush) {
      const replayssm_plan_row& row = planned[flush_rows[index]];
      if (!admit(row, 0, params.num_tokens, params.max_count, problem.config.window, false, nullptr, false)) {
        continue;  // step reports it
      }
      slot_index = row.slot, h = row.history, next = row.ring_row;
      empty = row.flags & REPLAYSSM_ROW_EMPTY;
    } else {
      slot_index = params.slots[index];
      if (slot_index < 0 || slot_index >= params.table.num_slots) continue;
      const replayssm_cursor cursor = params.table.cursors[slot_index];
      if (materialize_error(cursor, problem, params.A_log.data != nullptr) != REPLAYSSM_ROW_OK) continue;
      h = cursor.history, next = static_cast<int32_t>(cursor.tokens % problem.ring_rows);
      empty = cursor.writes == 0;
    }
    const HeadSlot slot(problem, params.layer, slot_index, head);

    HeadState<kStateDim> state = {};
    if (!empty && p < P) load_state<kStateDim>(problem, slot.checkpoint, p, lane, state);
    if (h > 0) {
      const StagedRecords records(fold_shared, problem.config.window, P, kStateDim);
      records.stage(problem, slot, ring_position(next, -h, problem.ring_rows), h, decay_rate(params.A_log, head));
      if (p < P) {
        fold_records(state, records.x + p, StagedRecords::x_stride(P), records.B, kStateDim, records.weight,
                     *records.decay, h, lane, kStateDim);
      }
      __syncthreads();  // before the next head is staged
    }
    if (flush) {
      const int32_t row = flush_rows[index];
      const StateOwner owner{problem, params.layer,        params.table.error, head,
                             row,     planned[row].stream, planned[row].writes};
      store_state<kStateDim>(owner, slot, p, lane, state);
    } else if (p < P) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i)
#pragma unroll
        for (int c = 0; c < kHeadChunks<kStateDim>; ++c) {
          const int64_t row = (static_cast<int64_t>(index) * H + head) * P + p + i;
          store_vector<kHeadVec>(params.state, REPLAYSSM_FP32, row * kStateDim + (c * kLanes + lane) * kHeadVec,
                                 params.state_aligned, state[i][c]);
        }
    }
  }
}

}  // namespace

replayssm_status launch_fold(const char* op, const replayssm_exec& exec, const FoldParams& params) {
  const replayssm_geometry& g = params.problem.geometry;
  const int64_t blocks = std::min<int64_t>(kFoldBlocks, static_cast<int64_t>(params.rows) * g.num_heads);
  const size_t shared = StagedRecords::bytes(params.problem.config.window, g.head_dim, g.state_dim);
  return launch(op, g.state_dim == 64 ? fold_kernel<64> : fold_kernel<128>, blocks, head_threads(g), shared, exec,
                params);
}

replayssm_status flush(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                       const replayssm_table& table, const void* plan, int32_t rows, const replayssm_tensor& A_log) {
  if (rows == 0) return REPLAYSSM_OK;
  return launch_fold("flush", exec, flush_params(problem, layer, table, A_log, plan, rows, INT32_MAX, INT64_MAX));
}

cudaError_t load_fold_kernels() {
  for (auto* kernel : {fold_kernel<64>, fold_kernel<128>}) {
    const cudaError_t error = load_kernel(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
