// SPDX-License-Identifier: Apache-2.0
//
// The ops behind the C ABI. api.cpp checks every argument that can be checked on the host, computes the layout once a
// call, and hands both implementations the same validated values. host:: reports bad rows through the table's error
// word exactly as cuda:: does.
#pragma once

#include <cstddef>
#include <cstdint>

#include "replayssm/replayssm.h"

namespace replayssm {

// What every layer op knows: sizes, formats, and where sections lie. Passed to kernels by value.
struct Problem {
  replayssm_geometry geometry;
  replayssm_config config;
  int32_t ring_rows;
  int32_t conv_rows;
  int32_t conv_channels;
  int64_t checkpoint_head_bytes;  // of a head's chunk; 0: no such section
  int64_t read_copy_head_bytes;
};

inline const replayssm_plan_row* plan_rows(const void* plan) {
  return reinterpret_cast<const replayssm_plan_row*>(static_cast<const char*>(plan) + sizeof(replayssm_plan_header));
}

// What plan_lengths is told of its rows. Passed to the kernel by value.
struct LengthsArgs {
  const int32_t* slots;
  const int32_t* prompt_lengths;
  const int32_t* sequence_lengths;
  const int32_t* token_ends;
  int32_t num_slots;
  bool prompts;
};

#define REPLAYSSM_DECLARE_OPS                                                                                         \
  replayssm_status reset(const replayssm_exec&, const replayssm_table&, const int32_t* slots, const int64_t* streams, \
                         int32_t rows, int64_t writes);                                                               \
  replayssm_status plan(const replayssm_exec&, const Problem&, const replayssm_table&, const int32_t* slots,          \
                        const int32_t* counts, int32_t uniform_count, int32_t rows, void* plan);                      \
  replayssm_status plan_next(const replayssm_exec&, const Problem&, const replayssm_table&, const int32_t* slots,     \
                             const int32_t* counts, const int32_t* accepted, int32_t rows, int32_t row_tokens,        \
                             void* plan, replayssm_error* status);                                                    \
  replayssm_status plan_lengths(const replayssm_exec&, const Problem&, const LengthsArgs&, int32_t rows, void* plan,  \
                                replayssm_error* error);                                                              \
  replayssm_status commit(const replayssm_exec&, const replayssm_table&, const void* plan, int32_t rows,              \
                          const int32_t* accepted, replayssm_plan_use);                                               \
  replayssm_status abandon(const replayssm_exec&, const replayssm_table&, const void* plan, int32_t rows,             \
                           replayssm_plan_use);                                                                       \
  replayssm_status conv_step(const replayssm_exec&, const Problem&, const replayssm_layer&, const replayssm_table&,   \
                             const void* plan, int32_t rows, const replayssm_conv_args&);                             \
  replayssm_status rms_norm(const replayssm_exec&, const replayssm_norm_args&);                                       \
  replayssm_status relu2(const replayssm_exec&, void* x, int32_t dtype, int64_t count);                               \
  replayssm_status attend(const replayssm_exec&, const replayssm_attend_args&);                                       \
  replayssm_status flush(const replayssm_exec&, const Problem&, const replayssm_layer&, const replayssm_table&,       \
                         const void* plan, int32_t rows, const replayssm_tensor& A_log);                              \
  replayssm_status step(const replayssm_exec&, const Problem&, const replayssm_layer&, const replayssm_table&,        \
                        const void* plan, int32_t rows, const replayssm_scan_args&, bool flushed);                    \
  replayssm_status prefill(const replayssm_exec&, const Problem&, const replayssm_layer&, const replayssm_table&,     \
                           const void* plan, int32_t rows, const replayssm_scan_args&);                               \
  replayssm_status conventional_step(const replayssm_exec&, const Problem&, const replayssm_layer&,                   \
                                     const replayssm_table&, const void* plan, int32_t rows,                          \
                                     const replayssm_scan_args&);                                                     \
  replayssm_status conventional_verify(const replayssm_exec&, const Problem&, const replayssm_layer&,                 \
                                       const replayssm_table&, const void* plan, int32_t rows,                        \
                                       const replayssm_scan_args&, const replayssm_buffer& snapshots);                \
  replayssm_status materialize(const replayssm_exec&, const Problem&, const replayssm_layer&, const replayssm_table&, \
                               const int32_t* slots, int32_t rows, const replayssm_tensor& A_log, float* state,       \
                               float* conv_tail);                                                                     \
  replayssm_status restore(const replayssm_exec&, const Problem&, const replayssm_layer&, const replayssm_table&,     \
                           const int32_t* slots, int32_t rows, const float* state, const float* conv_tail);           \
  replayssm_status refresh_read_copy(const replayssm_exec&, const Problem&, const replayssm_layer&,                   \
                                     const replayssm_table&, const int32_t* slots, int32_t rows);                     \
  replayssm_status copy(const replayssm_exec&, const replayssm_table&, void* data, int64_t layer_stride,              \
                        int64_t slot_stride, const int32_t* src, const int32_t* dst, int32_t rows);

namespace host {
REPLAYSSM_DECLARE_OPS
}
namespace cuda {
REPLAYSSM_DECLARE_OPS
replayssm_status load_kernels();
const char* architectures();
}  // namespace cuda

#undef REPLAYSSM_DECLARE_OPS

// Stores the text for replayssm_last_error() (printf-style) and returns `status`, so that `return fail(...)` reads
// well.
replayssm_status fail(replayssm_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace replayssm
