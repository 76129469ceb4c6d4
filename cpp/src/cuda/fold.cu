// SPDX-License-Identifier: Apache-2.0
//
// flush and materialize: the state of a slot with its records folded in, stored as the slot's new state or handed out.
//
// A CTA owns a head: every thread asks for its part of the state, 2 rows by N/8 columns, all loads in flight at once;
// records and their weights go to shared memory meanwhile, once for the whole head; the sums are formed in registers,
// from which the stored formats are cast. Then it goes on to the next head: the grid has a fixed size, since only the
// device knows how many rows flush.
//
// The pools whose plain checkpoints step_mma.cu folds are folded as there, on tensor cores, so that the checkpoint of a
// pool with a read copy has the bits of one without. The layouts of the two differ: the state passes through shared
// memory, and each warp folds parts of it in turn.
#include <algorithm>

#include "head_state.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int64_t kFoldBlocks = 2048;

// Shared memory of a CTA that folds on tensor cores; records newest first. Staged: the activations' type.
template <typename Staged>
struct MmaRecords {
  static constexpr int kPart = 2;  // blocks of 16 columns that a warp folds at a time
  static constexpr int kParts = kMaxStateDim / (kPart * 4 * kHeadVec);  // of a slice

  float* state;   // [P][N]
  Staged *B, *x;  // [h][kStride]; [P / kSliceWidth][records][kSliceWidth]; zeros from h to a multiple of 8
  float *weight, *delta, *decay;  // [round_up(h, 32)]; [h]; [1]
  int records;                    // round_up(window, 8)

  static constexpr size_t bytes(int window, int P) {
    return P * kMaxStateDim * 4 + round_up(window, 8) * (kStride + P) * 2 + (round_up(window, 32) + window + 1) * 4;
  }

  __device__ MmaRecords(float* shared, int window, int P) : state(shared), records(round_up(window, 8)) {
    B = reinterpret_cast<Staged*>(state + P * kMaxStateDim);
    x = B + records * kStride;
    weight = reinterpret_cast<float*>(x + records * P);
    delta = weight + round_up(window, 32);
    decay = delta + window;
  }

  // Folds the h records before ring row `next` into the state of which a thread has rows p and p + 1. For a whole CTA.
  __device__ void fold(const Problem& problem, const HeadSlot& head, int next, int h, float A, uint32_t mask, int p,
                       HeadState<kMaxStateDim>& own) const {
    const int P = problem.geometry.head_dim, R = problem.ring_rows;
    const int tid = threadIdx.x, lane = tid % 32, column = tid % kLanes * kHeadVec;
    const int x_chunks = P / 8, chunks = x_chunks + kMaxStateDim / 8;
    for (int item = tid; item < round_up(h, 8) * chunks; item += blockDim.x) {
      const int i = item / chunks, chunk = item % chunks;
      const bool is_x = chunk < x_chunks;
      const int first = (is_x ? chunk : chunk - x_chunks) * 8;
      uint4 value = make_uint4(0, 0, 0, 0);
      if (i < h) {
        const int row = ring_position(next, -1 - i, R);
        value = *reinterpret_cast<const uint4*>(
            is_x ? reinterpret_cast<const Staged*>(head.x_ring) + row * head.x_stride + first
                 : reinterpret_cast<const Staged*>(head.b_ring) + row * kMaxStateDim + first);
      }
      Staged* const target =
          is_x ? x + (first / kSliceWidth * records + i) * kSliceWidth + first % kSliceWidth : B + i * kStride + first;
      *reinterpret_cast<uint4*>(target) = value;
    }
    for (int i = tid; i < h; i += blockDim.x) {
      delta[i] = head.delta_ring[ring_position(next, -1 - i, R) * head.delta_stride];
    }
    if (p < P) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i)
#pragma unroll
        for (int c = 0; c < kHeadChunks<kMaxStateDim>; ++c) {
          store_vector<kHeadVec>(state, REPLAYSSM_FP32, (p + i) * kMaxStateDim + c * kLanes * kHeadVec + column, true,
                                 own[i][c]);
        }
    }
    __syncthreads();
    if (tid < 32) {
      const float total = weigh_history(delta, A, h, lane, weight);
      if (lane == 0) *decay = total;
    }
    __syncthreads();
    for (int item = tid / 32; item < P / kSliceWidth * kParts; item += blockDim.x / 32) {
      const int slice = item / kParts, block = item % kParts * kPart, g = lane / 4, t = lane % 4;
      float* const target = state + (slice * kSliceWidth + 2 * g) * kMaxStateDim + (block * 4 + t) * kHeadVec;
      float part[2][kPart][kHeadVec];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int b = 0; b < kPart; ++b) load_shared<kHeadVec>(target + i * kMaxStateDim + b * 4 * kHeadVec, part[i][b]);
      add_records(part, x + slice * records * kSliceWidth + 2 * g, B + block * 4 * kHeadVec, weight, *decay, h, lane,
                  mask);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int b = 0; b < kPart; ++b) {
          store_vector<kHeadVec>(target, REPLAYSSM_FP32, i * kMaxStateDim + b * 4 * kHeadVec, true, part[i][b]);
        }
    }
    __syncthreads();
    if (p < P) {
#pragma unroll
      for (int i = 0; i < kRowsPerGroup; ++i)
#pragma unroll
        for (int c = 0; c < kHeadChunks<kMaxStateDim>; ++c) {
          load_shared<kHeadVec>(state + (p + i) * kMaxStateDim + c * kLanes * kHeadVec + column, own[i][c]);
        }
    }
  }
};
static_assert(MmaRecords<__half>::bytes(REPLAYSSM_MAX_WINDOW, kMaxHeadDim) <= kSharedLimit);

// Staged: the activations' type if the tensor cores fold, else float.
template <int kStateDim, typename Staged>
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
  const auto* row_order = reinterpret_cast<const int32_t*>(planned + params.rows);

  for (int64_t item = blockIdx.x; item < static_cast<int64_t>(listed) * H; item += gridDim.x) {
    const int head = static_cast<int>(item % H), index = static_cast<int>(item / H);
    int32_t slot_index, h, next;
    bool empty;
    if (flush) {
      const replayssm_plan_row& row = planned[row_order[index]];
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
      const float A = decay_rate(params.A_log, head);
      if constexpr (std::is_same_v<Staged, float>) {
        const StagedRecords records(fold_shared, problem.config.window, P, kStateDim);
        records.stage(problem, slot, ring_position(next, -h, problem.ring_rows), h, A);
        if (p < P) {
          fold_records(state, records.x + p, StagedRecords::x_stride(P), records.B, kStateDim, records.weight,
                       *records.decay, h, lane, kStateDim);
        }
      } else {
        const MmaRecords<Staged> records(fold_shared, problem.config.window, P);
        records.fold(problem, slot, next, h, A, params.tf32_mask, p, state);
      }
      __syncthreads();  // before the next head is staged
    }
    if (flush) {
      const int32_t row = row_order[index];
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
  const int window = params.problem.config.window;
  const int64_t blocks = std::min<int64_t>(kFoldBlocks, static_cast<int64_t>(params.rows) * g.num_heads);
  if (has_mma_fold(params.problem)) {
    const bool bf16 = params.problem.config.activation == REPLAYSSM_BF16;
    return launch(op, bf16 ? fold_kernel<128, __nv_bfloat16> : fold_kernel<128, __half>, blocks, head_threads(g),
                  MmaRecords<__half>::bytes(window, g.head_dim), exec, params);
  }
  return launch(op, g.state_dim == 64 ? fold_kernel<64, float> : fold_kernel<128, float>, blocks, head_threads(g),
                StagedRecords::bytes(window, g.head_dim, g.state_dim), exec, params);
}

replayssm_status flush(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                       const replayssm_table& table, const void* plan, int32_t rows, const replayssm_tensor& A_log) {
  if (rows == 0) return REPLAYSSM_OK;
  if (has_step_mma(problem)) return flush_mma(exec, problem, layer, table, plan, rows, A_log);
  return launch_fold("flush", exec, flush_params(problem, layer, table, A_log, plan, rows, INT32_MAX, INT64_MAX));
}

cudaError_t load_fold_kernels() {
  for (auto* kernel :
       {fold_kernel<64, float>, fold_kernel<128, float>, fold_kernel<128, __nv_bfloat16>, fold_kernel<128, __half>}) {
    const cudaError_t error = load_kernel(kernel, kSharedLimit);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
