// SPDX-License-Identifier: Apache-2.0
//
// The pieces of the recurrence for one head of one slot, in float32. Every sum has a fixed order that depends on sizes
// alone, so that a row's bits do not depend on the batch around it.
#pragma once

#include <cmath>
#include <cstdint>

#include "host/chunks.h"
#include "layout.h"

namespace replayssm::host {

constexpr int32_t kMaxRecords = REPLAYSSM_MAX_WINDOW + REPLAYSSM_MAX_STEP_TOKENS;

// Where one head of one slot lies.
struct HeadSlot {
  const Problem& problem;
  const replayssm_layer& layer;
  int32_t slot;
  int32_t head;

  int32_t group() const { return head / (problem.geometry.num_heads / problem.geometry.num_groups); }
  int64_t state_size() const { return int64_t{problem.geometry.head_dim} * problem.geometry.state_dim; }
  int32_t row_of(int64_t record) const { return static_cast<int32_t>(record % problem.ring_rows); }

  char* checkpoint() const { return at(layer.checkpoint) + head * problem.checkpoint_head_bytes; }
  char* read_copy() const { return at(layer.read_copy) + head * problem.read_copy_head_bytes; }
  // Snapshot t of the head in a buffer of [slots, max_step_tokens] checkpoints.
  char* snapshot(const replayssm_buffer& snapshots, int32_t t) const {
    return at(snapshots) + (int64_t{t} * problem.geometry.num_heads + head) * problem.checkpoint_head_bytes;
  }
  char* x(int64_t record) const {
    return element_address(at(layer.x_ring), problem.config.activation,
                           record_of_head(record) * problem.geometry.head_dim);
  }
  char* B(int64_t record) const {
    return element_address(at(layer.b_ring), problem.config.activation,
                           (int64_t{group()} * problem.ring_rows + row_of(record)) * problem.geometry.state_dim);
  }
  float& delta(int64_t record) const { return reinterpret_cast<float*>(at(layer.delta_ring))[record_of_head(record)]; }

 private:
  // Index in [G,R,H/G].
  int64_t record_of_head(int64_t record) const {
    const int32_t heads = problem.geometry.num_heads / problem.geometry.num_groups;
    return (int64_t{group()} * problem.ring_rows + row_of(record)) * heads + head % heads;
  }
  char* at(const replayssm_buffer& buffer) const { return static_cast<char*>(buffer.base) + slot * buffer.slot_stride; }
};

// delta = clamp(softplus(dt + bias), dt_min, dt_max); softplus(v) = log1p(exp(v)), v itself above 20.
inline float discretised_step(float dt, float bias, float dt_min, float dt_max) {
  const float v = dt + bias;
  const float softplus = v > 20.0f ? v : std::log1p(std::exp(v));
  return softplus < dt_min ? dt_min : softplus > dt_max ? dt_max : softplus;
}

// A = -exp(A_log), the decay rate of a head.
inline float decay_rate(const replayssm_tensor& A_log, int32_t head) { return -std::exp(load_element(A_log, head)); }

// a . b over n (a multiple of 8) elements, in eight interleaved partial sums.
inline float dot(const float* a, const float* b, int32_t n) {
  float partial[8] = {};
  for (int32_t i = 0; i < n; i += 8)
    for (int32_t k = 0; k < 8; ++k) partial[k] += a[i + k] * b[i + k];
  return ((partial[0] + partial[4]) + (partial[2] + partial[6])) +
         ((partial[1] + partial[5]) + (partial[3] + partial[7]));
}

// weights[j] = delta_j exp(e(j, count)) for the records delta[0..count-1], oldest first; returns exp(e(0, count)). The
// exponents are summed from the newest record backwards: differences of prefix sums would lose five times the accuracy.
inline float replay_weights(const float* delta, int32_t count, float A, float* weights) {
  float exponent = 0.0f;
  for (int32_t j = count - 1; j >= 0; --j) {
    weights[j] = delta[j] * std::exp(exponent);
    exponent += A * delta[j];
  }
  return std::exp(exponent);
}

// state [P,N] of the head from, and to, where it is `stored` in the checkpoint format. store_state returns whether it
// is finite as stored; `stream` and `writes` are those of the slot before this write.
inline void load_state(const HeadSlot& head, const char* stored, float* state) {
  const replayssm_geometry& g = head.problem.geometry;
  const int32_t format = head.problem.config.checkpoint;
  if (format == REPLAYSSM_CHECKPOINT_FP8_SR) return load_fp8(stored, g.head_dim, g.state_dim, state);
  if (format == REPLAYSSM_CHECKPOINT_NVFP4) return load_blocks<Nvfp4Amax>(stored, g.head_dim, g.state_dim, state);
  load_row(stored, checkpoint_dtype(format), head.state_size(), state);
}

inline bool store_state(const HeadSlot& head, uint64_t stream, int64_t writes, const float* state, char* stored) {
  const replayssm_geometry& g = head.problem.geometry;
  const int32_t format = head.problem.config.checkpoint;
  if (format == REPLAYSSM_CHECKPOINT_NVFP4) return store_nvfp4_amax(state, g.head_dim, g.state_dim, stored);
  if (format == REPLAYSSM_CHECKPOINT_FP16_SR || format == REPLAYSSM_CHECKPOINT_FP8_SR) {
    const int32_t global_head = head.layer.first_head + head.head;
    const Rounding rounding{rounding_key(head.problem.config.seed, stream, head.layer.layer, global_head), writes};
    return format == REPLAYSSM_CHECKPOINT_FP16_SR ? store_fp16_sr(state, g.head_dim, g.state_dim, rounding, stored)
                                                  : store_fp8(state, g.head_dim, g.state_dim, &rounding, stored);
  }
  return store_plain(state, head.state_size(), checkpoint_dtype(format), stored);
}

// state = what the recurrence continues from: the checkpoint, or zero for a slot whose state was never written.
inline void load_checkpoint(const HeadSlot& head, bool empty, float* state) {
  if (empty) {
    std::fill_n(state, head.state_size(), 0.0f);
  } else {
    load_state(head, head.checkpoint(), state);
  }
}

// state = what steps read: the read copy, if there is one.
inline void load_for_step(const HeadSlot& head, bool empty, float* state) {
  const replayssm_geometry& g = head.problem.geometry;
  const int32_t P = g.head_dim, N = g.state_dim;
  if (empty) return load_checkpoint(head, true, state);
  switch (head.problem.config.read_copy) {
    case REPLAYSSM_READ_COPY_FP8:
      return load_fp8(head.read_copy(), P, N, state);
    case REPLAYSSM_READ_COPY_NVFP4:
      return load_blocks<Nvfp4>(head.read_copy(), P, N, state);
    case REPLAYSSM_READ_COPY_NVFP4_AMAX:
      return load_blocks<Nvfp4Amax>(head.read_copy(), P, N, state);
    case REPLAYSSM_READ_COPY_E2M2:
      return load_blocks<E2m2>(head.read_copy(), P, N, state);
    default:
      return load_checkpoint(head, false, state);
  }
}

// Writes the read copy, if there is one; returns whether it is finite as stored.
inline bool store_read_copy(const HeadSlot& head, const float* state) {
  const replayssm_geometry& g = head.problem.geometry;
  const int32_t P = g.head_dim, N = g.state_dim;
  switch (head.problem.config.read_copy) {
    case REPLAYSSM_READ_COPY_FP8:
      return store_fp8(state, P, N, nullptr, head.read_copy());
    case REPLAYSSM_READ_COPY_NVFP4:
      return store_searched<Nvfp4>(state, P, N, head.read_copy());
    case REPLAYSSM_READ_COPY_NVFP4_AMAX:
      return store_nvfp4_amax(state, P, N, head.read_copy());
    case REPLAYSSM_READ_COPY_E2M2:
      return store_searched<E2m2>(state, P, N, head.read_copy());
    default:
      return true;
  }
}

// Writes checkpoint and read copy; returns whether both are finite as stored.
inline bool write_state(const HeadSlot& head, uint64_t stream, int64_t writes, const float* state) {
  const bool finite = store_state(head, stream, writes, state, head.checkpoint());
  return store_read_copy(head, state) && finite;
}

// state = exp(e(0,h)) state + sum_j exp(e(j,h)) delta_j x_j (outer) B_j over the last `history` records before
// `tokens`.
inline void fold_records(const HeadSlot& head, int64_t tokens, int32_t history, float A, float* state) {
  if (history == 0) return;
  const int32_t P = head.problem.geometry.head_dim, N = head.problem.geometry.state_dim;
  const int32_t dtype = head.problem.config.activation;
  float delta[kMaxRecords], weights[kMaxRecords];
  for (int32_t j = 0; j < history; ++j) delta[j] = head.delta(tokens - history + j);
  const float decay = replay_weights(delta, history, A, weights);
  for (int64_t i = 0; i < head.state_size(); ++i) state[i] *= decay;
  for (int32_t j = 0; j < history; ++j) {
    float x[kMaxHeadDim], B[kMaxStateDim];
    load_row(head.x(tokens - history + j), dtype, P, x);
    load_row(head.B(tokens - history + j), dtype, N, B);
    for (int32_t p = 0; p < P; ++p) {
      const float scaled = weights[j] * x[p];
      for (int32_t n = 0; n < N; ++n) state[p * N + n] += scaled * B[n];
    }
  }
}

}  // namespace replayssm::host
