// SPDX-License-Identifier: Apache-2.0
//
// Folding records into a state on the CUDA cores, for every op that does it (flush, fused or on its own; prefill;
// materialize), but for pools whose flushes and materialised states come from the tensor cores (mma.cuh):
//
//     S <- exp(e(0,h)) S + sum_{j=1..h} (delta_j exp(e(j,h))) x_j (outer) B_j,    e(j,h) = a_{j+1} + ... + a_h
//
// The exponents are summed from the newest record backwards. Every rounding is spelled out (__fmul_rn, __fadd_rn,
// fmaf), so that no two callers can be contracted differently: the same records give the same bits wherever they are
// folded.
//
// A group of 8 lanes owns kRows consecutive rows of the state. Chunk c of a lane holds the kVec columns from
// (c * 8 + lane) * kVec on: 16 stored bytes, a group's chunk one line of 128 bytes.
#pragma once

#include "mma.cuh"

namespace replayssm {
namespace cuda {

// Rows of the state that a group holds at a time: the whole head if its size is known at compile time (the tuned set,
// with a state_dim of 128), else (kHeadDim = 0) blocks of two.
template <int kHeadDim>
struct Tile {
  static constexpr bool kTuned = kHeadDim > 0;
  static constexpr int kRows = kTuned ? kHeadDim / kGroups : 2;
  static constexpr int kBlockRows = kRows * kGroups;
  static constexpr int kCtasPerSm = kHeadDim == 80 ? 3 : 4;  // what the registers for the rows allow
  static_assert(!kTuned || kHeadDim % kGroups == 0);
};

// What step, prefill, conventional_step and conventional_verify take.
struct ScanParams {
  Problem problem;
  replayssm_layer layer;
  replayssm_error* error;
  const replayssm_plan_row* planned;
  replayssm_scan_args args;
  int32_t num_slots;
  bool flushed;  // step: the rows flagged FLUSH were folded by the flush op
  bool append;   // step: x and B of new tokens come as tensors; else they are in the rings already
  bool x_aligned, b_aligned, c_aligned;
};

inline ScanParams make_scan_params(const Problem& problem, const replayssm_layer& layer, const replayssm_table& table,
                                   const void* plan, const replayssm_scan_args& args, bool flushed) {
  const bool append = args.x.data != nullptr;
  return {problem,
          layer,
          table.error,
          plan_rows(plan),
          args,
          table.num_slots,
          flushed,
          append,
          !append || is_aligned(args.x),
          !append || is_aligned(args.B),
          is_aligned(args.C)};
}

// The head_dim to pick a tuned kernel by, 0: the generic kernel. It does the same arithmetic in the same order, so that
// inputs that vector loads can't take, which go there too, give the same bits.
inline int tuned_head_dim(const ScanParams& params) {
  const replayssm_geometry& g = params.problem.geometry;
  const bool tuned = (g.head_dim == 64 || g.head_dim == 80) && g.state_dim == kMaxStateDim &&
                     params.problem.config.activation != REPLAYSSM_FP32;
  return tuned && params.x_aligned && params.b_aligned && params.c_aligned ? g.head_dim : 0;
}

// Before the kernel before has ended, for one thread: has the L2 fetch `bytes` of what a section holds of head `index`
// of all rows' heads, from `offset` on.
__device__ inline void fetch_head(const ScanParams& params, const replayssm_buffer& section, int64_t head_bytes,
                                  int index, int offset, int bytes) {
  const int H = params.problem.geometry.num_heads, row = index / H;
  const int32_t slot = peek_slot(params.planned[row], params.num_slots);
  if (slot >= 0) fetch_to_l2(section_of(section, slot) + (index - row * H) * head_bytes + offset, bytes);
}

// delta = clamp(softplus(dt + bias), dt_min, dt_max); softplus(v) = log1p(exp(v)), v itself above 20. NaN stays NaN.
__device__ inline float discretised_step(float dt, float bias, float dt_min, float dt_max) {
  const float v = dt + bias;
  const float softplus = v > 20.0f ? v : log1pf(expf(v));
  return softplus < dt_min ? dt_min : softplus > dt_max ? dt_max : softplus;
}

// A = -exp(A_log), the decay rate of a head.
__device__ inline float decay_rate(const replayssm_tensor& A_log, int32_t head) {
  return -expf(load_scalar(A_log.data, A_log.dtype, head));
}

// Where one head of one slot lies.
struct HeadSlot {
  char* checkpoint;   // a chunk
  char* read_copy;    // a chunk, if the config has read copies
  char* x_ring;       // [R, P], rows x_stride elements apart
  char* b_ring;       // [R, N]
  float* delta_ring;  // [R], delta_stride apart
  int x_stride, delta_stride;

  __device__ HeadSlot(const Problem& problem, const replayssm_layer& layer, int32_t slot, int32_t head) {
    const replayssm_geometry& g = problem.geometry;
    const int64_t activation = problem.config.activation == REPLAYSSM_FP32 ? 4 : 2;
    delta_stride = g.num_heads / g.num_groups;
    x_stride = delta_stride * g.head_dim;
    const int64_t group = head / delta_stride;
    const int64_t first_record = group * problem.ring_rows * delta_stride + head % delta_stride;
    checkpoint = section_of(layer.checkpoint, slot) + head * problem.checkpoint_head_bytes;
    read_copy = section_of(layer.read_copy, slot) + head * problem.read_copy_head_bytes;
    x_ring = section_of(layer.x_ring, slot) + first_record * g.head_dim * activation;
    b_ring = section_of(layer.b_ring, slot) + group * (problem.ring_rows * g.state_dim * activation);
    delta_ring = reinterpret_cast<float*>(section_of(layer.delta_ring, slot)) + first_record;
  }
};

// exponent[j * stride] = e(j, count) for the log decays of `count` records, oldest first; returns exp(e(0, count)).
// Serial: for one thread.
__device__ inline float sum_exponents_backwards(const float* log_decay, int count, int stride, float* exponent) {
  float sum = 0.0f;
#pragma unroll 4
  for (int j = count - 1; j >= 0; --j) {
    exponent[j * stride] = sum;
    sum = __fadd_rn(sum, log_decay[j]);
  }
  return expf(sum);
}

__device__ inline float record_weight(float delta, float exponent) { return __fmul_rn(delta, expf(exponent)); }

// Folds h records. x: the group's first row of record 0, records x_stride apart; B: record 0, records b_stride apart;
// columns beyond N (a chunk that the run-time size does not have) are left alone.
template <int kRows, int kChunks, int kVec, typename Staged>
__device__ inline void fold_records(float (&state)[kRows][kChunks][kVec], const Staged* x, int x_stride,
                                    const Staged* B, int b_stride, const float* weight, float decay, int h, int lane,
                                    int N) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int v = 0; v < kVec; ++v) state[i][c][v] = __fmul_rn(decay, state[i][c][v]);
  for (int j = 0; j < h; ++j) {
    float scaled[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) scaled[i] = __fmul_rn(weight[j], static_cast<float>(x[j * x_stride + i]));
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int column = (c * kLanes + lane) * kVec;
      if (column >= N) break;
      float b[kVec];
      load_shared<kVec>(B + j * b_stride + column, b);
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int v = 0; v < kVec; ++v) state[i][c][v] = fmaf(scaled[i], b[v], state[i][c][v]);
    }
  }
}

// The records of a head, staged as float32.
struct StagedRecords {
  __host__ __device__ static constexpr int x_stride(int P) {
    return P + 4;
  }  // keeps 16-byte alignment, spreads records over the banks

  float *B, *x;                       // [h][N], [h][x_stride]
  float *delta, *log_decay, *weight;  // [h]
  float* decay;                       // [1]

  static constexpr size_t bytes(int window, int P, int N) {
    return (window * (N + x_stride(P) + 3) + 1) * sizeof(float);
  }

  __device__ StagedRecords(float* shared, int window, int P, int N) {
    B = shared;
    x = B + window * N;
    delta = x + window * x_stride(P);
    log_decay = delta + window;
    weight = log_decay + window;
    decay = weight + window;
  }

  // Stages records and weights; `oldest` is the ring row of record 0. Ends with all of it visible to the CTA.
  __device__ void stage(const Problem& problem, const HeadSlot& head, int oldest, int h, float A) const {
    const int P = problem.geometry.head_dim, N = problem.geometry.state_dim, dtype = problem.config.activation;
    const int x_chunks = P / 8, chunks = x_chunks + N / 8;
    for (int item = threadIdx.x; item < h * chunks; item += blockDim.x) {
      const int j = item / chunks, chunk = item % chunks;
      const int row = ring_position(oldest, j, problem.ring_rows);
      const bool is_x = chunk < x_chunks;
      const int column = (is_x ? chunk : chunk - x_chunks) * 8;
      float value[8];
      load_vector<8>(is_x ? head.x_ring : head.b_ring, dtype, row * (is_x ? head.x_stride : N) + column, true, value);
      float* target = is_x ? x + j * x_stride(P) + column : B + j * N + column;
      *reinterpret_cast<float4*>(target) = make_float4(value[0], value[1], value[2], value[3]);
      *reinterpret_cast<float4*>(target + 4) = make_float4(value[4], value[5], value[6], value[7]);
    }
    if (threadIdx.x < h) {
      delta[threadIdx.x] = head.delta_ring[ring_position(oldest, threadIdx.x, problem.ring_rows) * head.delta_stride];
      log_decay[threadIdx.x] = __fmul_rn(A, delta[threadIdx.x]);
    }
    __syncthreads();
    if (threadIdx.x == 0) *decay = sum_exponents_backwards(log_decay, h, 1, weight);
    __syncthreads();
    if (threadIdx.x < h) weight[threadIdx.x] = record_weight(delta[threadIdx.x], weight[threadIdx.x]);
    __syncthreads();
  }
};
static_assert(REPLAYSSM_MAX_WINDOW <= kThreads, "one thread weighs one record");
static_assert(StagedRecords::bytes(REPLAYSSM_MAX_WINDOW, kMaxHeadDim, kMaxStateDim) <= kSharedLimit);

// ---- the kernel of flush and materialize (fold.cu) ----------------------------------------------------------------

// Folds the records of one list of slots: the flagged rows of a plan (state NULL: the sum is stored as checkpoint and
// read copy), or `slots` as their cursors stand (the sum goes to state [rows,H,P,N] in float32, the slot stays as it
// is).
struct FoldParams {
  Problem problem;
  replayssm_layer layer;
  replayssm_table table;
  replayssm_tensor A_log;
  const void* plan;
  const int32_t* slots;
  float* state;
  int32_t rows;
  int32_t max_count;   // rows of a plan with more tokens,
  int64_t num_tokens;  // or with tokens beyond these, are left alone
  bool state_aligned;
  uint32_t tf32_mask;  // see split() in mma.cuh
};

inline FoldParams flush_params(const Problem& problem, const replayssm_layer& layer, const replayssm_table& table,
                               const replayssm_tensor& A_log, const void* plan, int32_t rows, int32_t max_count,
                               int64_t num_tokens) {
  return {problem, layer, table, A_log, plan, nullptr, nullptr, rows, max_count, num_tokens, false, kTf32Mask};
}

inline FoldParams materialize_params(const Problem& problem, const replayssm_layer& layer, const replayssm_table& table,
                                     const replayssm_tensor& A_log, const int32_t* slots, int32_t rows, float* state,
                                     bool state_aligned) {
  return {problem, layer, table, A_log, nullptr, slots, state, rows, 0, 0, state_aligned, kTf32Mask};
}

// Why the state of a slot in range cannot be materialized; REPLAYSSM_ROW_OK if it can.
__device__ inline replayssm_row_error materialize_error(const replayssm_cursor& cursor, const Problem& problem,
                                                        bool has_decay) {
  const replayssm_row_error error = slot_readable(cursor.flags);
  if (error != REPLAYSSM_ROW_OK) return error;
  if (cursor.history > 0 && !has_decay) return REPLAYSSM_ROW_NO_DECAY;
  return cursor.history > problem.config.window ? REPLAYSSM_ROW_HAS_RECORDS : REPLAYSSM_ROW_OK;
}

replayssm_status launch_fold(const char* op, const replayssm_exec& exec, const FoldParams& params);

// ---- step and flush on tensor cores (step_mma.cu) ------------------------------------------------------------------

// Whether the pool's states are folded on tensor cores (mma.cuh), and whether these kernels take its flushes, and its
// steps if has_fused_step_read() does not and they are no small batch of FP32 states (step_head.cu). All of them, or
// none: the bits differ from those of the generic kernels.
inline bool has_mma_fold(const Problem& problem) {
  return problem.geometry.state_dim == kMaxStateDim && problem.geometry.head_dim % 16 == 0 &&
         problem.config.activation != REPLAYSSM_FP32;
}
inline bool has_step_mma(const Problem& problem) {
  return has_mma_fold(problem) && problem.read_copy_head_bytes == 0 &&
         problem.config.checkpoint <= REPLAYSSM_CHECKPOINT_FP16_SR;
}

replayssm_status step_mma(const replayssm_exec& exec, const ScanParams& params, int32_t rows);
replayssm_status flush_mma(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                           const replayssm_table& table, const void* plan, int32_t rows, const replayssm_tensor& A_log);
cudaError_t load_step_mma_kernels();

// ---- step of float32 checkpoints in small batches (step_head.cu) ---------------------------------------------------

// Whether this kernel takes a step that step_mma() could take: the bits are the same.
bool has_step_head(const ScanParams& params, int32_t rows);
replayssm_status step_head(const replayssm_exec& exec, const ScanParams& params, int32_t rows);
cudaError_t load_step_head_kernels();

// ---- step from quantised and 16-bit states on tensor cores (step_read.cu) -------------------------------------------

// Whether these kernels take the pool's steps; if not fused, rows flagged FLUSH must have been folded before.
bool has_step_read(const Problem& problem);
bool has_fused_step_read(const Problem& problem);
replayssm_status step_read(const replayssm_exec& exec, const ScanParams& params, int32_t rows);
cudaError_t load_step_read_kernels();

// ---- prefill on tensor cores (prefill_mma.cu) ----------------------------------------------------------------------

// Whether this kernel takes the pool's prompts.
bool has_prefill_mma(const Problem& problem);
replayssm_status prefill_mma(const replayssm_exec& exec, const ScanParams& params, int32_t rows);
cudaError_t load_prefill_mma_kernels();

}  // namespace cuda
}  // namespace replayssm
