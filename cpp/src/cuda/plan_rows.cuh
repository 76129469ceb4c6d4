// SPDX-License-Identifier: Apache-2.0
//
// Rows of a plan for step_read.cu: which of them flush, and loads for what begins before the kernel before has ended,
// when the plan may not be there yet. What is read then is compared behind await_previous(); common.cuh says what may
// come before.
#pragma once

#include <cstddef>

#include "read_layout.cuh"

namespace replayssm {
namespace cuda {
namespace {

// Past the L1, and not behind await_previous(), where the compiler might put it.
__device__ inline uint4 load_early(const uint4* source) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source)
               : "memory");
  return value;
}
__device__ inline uint2 load_early(const uint2* source) {
  uint2 value;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(source) : "memory");
  return value;
}
__device__ inline float load_early(const float* source) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(source) : "memory");
  return value;
}

// A row of a plan that may not be there yet, of what steps need: past the L1, and the same for all lanes of a warp.
// meanwhile(): what can be done while it is on its way.
template <typename F>
__device__ inline replayssm_plan_row peek_row(const replayssm_plan_row& planned, F&& meanwhile) {
  replayssm_plan_row row = {};
  static_assert(offsetof(replayssm_plan_row, slot) == 24 && offsetof(replayssm_plan_row, count) == 32);
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];"
               : "=r"(row.slot), "=r"(row.first_token)
               : "l"(&planned.slot)
               : "memory");
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(row.count), "=r"(row.history), "=r"(row.flags), "=r"(row.ring_row)
               : "l"(&planned.count)
               : "memory");
  meanwhile();
  for (int32_t* field : {&row.slot, &row.first_token, &row.count, &row.history, &row.flags, &row.ring_row}) {
    *field = __shfl_sync(~0u, *field, 0);
  }
  return row;
}

__device__ inline replayssm_plan_row peek_row(const replayssm_plan_row& planned) {
  return peek_row(planned, [] {});
}

// The rows of a step that flush. Of few rows they are told by looking at all of them at once, which takes one access to
// memory where the plan's header, its list and the row would take three, one after the other.
struct FlushingRows {
  static constexpr int kFewRows = 32;

  const int32_t* listed;
  uint32_t few;  // bits of rows, if there are at most kFewRows
  int count;

  // What tells of them, of a lane: two loads, of which neither waits for the other.
  struct Seen {
    int32_t first, second;
  };
  template <bool kFew>
  __device__ static Seen see(const ReadParams& params) {
    const replayssm_plan_row* const planned = params.scan.planned;
    if (kFew && params.rows <= kFewRows) {
      const replayssm_plan_row& row = planned[min(threadIdx.x % 32, params.rows - 1)];
      return {row.slot, row.flags};
    }
    return {(reinterpret_cast<const replayssm_plan_header*>(planned) - 1)->num_flush, 0};
  }
  // For whole warps.
  template <bool kFew>
  __device__ static FlushingRows of(const ReadParams& params, const Seen& seen) {
    FlushingRows rows{reinterpret_cast<const int32_t*>(params.scan.planned + params.rows), 0, 0};
    if (kFew && params.rows <= kFewRows) {
      rows.take_few(seen.first, seen.second, params.rows);
    } else {
      rows.count = seen.first;
    }
    return rows;
  }
  template <bool kFew>
  __device__ static FlushingRows of(const ReadParams& params) {
    return of<kFew>(params, see<kFew>(params));
  }
  // Of few rows, as the plan reads before await_previous(); of many, none.
  __device__ static FlushingRows peek(const ReadParams& params) {
    FlushingRows rows{};
    const replayssm_plan_row* const planned = params.scan.planned;
    if (params.rows > kFewRows) return rows;
    const replayssm_plan_row& row = planned[min(threadIdx.x % 32, params.rows - 1)];
    const int32_t flags = cuda::peek(row.flags), slot = cuda::peek(row.slot);
    rows.take_few(slot, flags, params.rows);
    return rows;
  }
  __device__ void take_few(int32_t slot, int32_t flags, int rows) {
    few = __ballot_sync(~0u, static_cast<int>(threadIdx.x % 32) < rows && slot >= 0 && flags & REPLAYSSM_ROW_FLUSH);
    count = __popc(few);
  }
  __device__ int operator[](int index) const {
    if (few == 0) return listed[index];
    uint32_t rest = few;
#pragma unroll 1
    for (; index > 0; --index) rest &= rest - 1;
    return __ffs(rest) - 1;
  }
};

}  // namespace
}  // namespace cuda
}  // namespace replayssm
