// SPDX-License-Identifier: Apache-2.0
//
// A step of one token from one head, by four warps, in launches so small that their CTAs stand on the multiprocessors
// while the kernel before is still at work: see step_read.cu.
//
// What steps before have left is loaded, and the history weighed, before the kernel before has ended, by what the plan
// says then (the rules stand in common.cuh, above peek()). What comes after is as little as can be: C, step size and
// records of the token, which are asked for together with the row itself, B^T C, the token's weights, and the products
// with state and x. Each warp has its own part of B^T C, from registers, so that one barrier suffices, at which all
// threads also say whether the row is still what they have found; should it not be, all is done anew.
#pragma once

#include "read_cta.cuh"

namespace replayssm {
namespace cuda {
namespace {

// The longest window: a warp has 16 records of B in registers.
constexpr int kEarlyWindow = 16 * kWarps;

// A row of a plan that may not be there yet, of what steps need: past the L1, and the same for all lanes of a warp.
__device__ inline replayssm_plan_row peek_row(const replayssm_plan_row& planned) {
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
  for (int32_t* field : {&row.slot, &row.first_token, &row.count, &row.history, &row.flags, &row.ring_row}) {
    *field = __shfl_sync(~0u, *field, 0);
  }
  return row;
}

// Past the L1, and not behind await_previous(), where the compiler might put it.
__device__ inline uint4 load_early(const uint4* source) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source)
               : "memory");
  return value;
}
__device__ inline float load_early(const float* source) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(source) : "memory");
  return value;
}

template <typename Format, typename Staged>
struct EarlyStep {
  using Cta = ReadCta<Format, Staged, false, true, true>;
  static constexpr bool kPlain = Cta::kPlain;
  static constexpr int N = kMaxStateDim;
  static constexpr int kTokenWarp = 2, kQueryWarp = 3;  // have the fewest records

  Cta cta;
  typename Cta::Head head;
  typename Cta::Places places;
  typename Cta::QueryPlaces of_query;
  typename Cta::Slices slices;
  uint4 b[2][4];  // of the warp's 16 records, rows g and g + 8
  uint4 new_b[4];
  float rate, step;

  __device__ __forceinline__ explicit EarlyStep(const ReadParams& params, char* shared)
      : cta(params, shared, kWarpBits) {}

  __device__ __forceinline__ void run(uint32_t task) {
    cta.set_up();
    cta.find(task);
    bool known = peek(), sure = false;
#pragma unroll 1
    while (true) {
      if (known) {
        request_history();
        await_requests();
      }
      cta.synchronise();
      if (!sure) await_previous();
      const replayssm_plan_row& planned = cta.params.scan.planned[cta.row_index];
      const int32_t slot = planned.slot, first_token = planned.first_token, count = planned.count,
                    history = planned.history, flags = planned.flags, ring_row = planned.ring_row;
      if (known) weigh_token();
      const replayssm_plan_row& row = cta.row;
      const bool same = slot == row.slot && first_token == row.first_token && count == row.count &&
                        history == row.history && flags == row.flags && ring_row == row.ring_row;
      if (agree(known && (sure || same))) break;
      if (known) await_state();
      if (!cta.take(task)) return;
      begin_anew();
      known = sure = true;
    }
    append();
    if constexpr (kPlain) {
      cta.read_plain(0, places, places.terms, head.out, slices);
    } else {
      cta.await_head(0);
      cta.read_token(0, places, of_query, places.terms, head, true);
    }
  }

  // Makes anew what set_up() has made; nothing is under way.
  __device__ void begin_anew() const {
    cta.synchronise();
    if (kPlain && cta.lane < kSlots) end_barrier(cta.slot_barrier(cta.lane));
    if (!kPlain && cta.member == 0 && cta.lane == 0) end_barrier(cta.barrier());
    cta.synchronise();
    cta.set_up();
  }

  // take() before await_previous().
  __device__ bool peek() {
    const ReadParams& params = cta.params;
    replayssm_plan_row& row = cta.row;
    row = peek_row(params.scan.planned[cta.row_index]);
    return row.slot < params.scan.num_slots && row.count > 0 && row.history >= 0 && row.first_token >= 0 &&
           row.ring_row >= 0 && row.ring_row < cta.problem.ring_rows && cta.consider(false);
  }

  // State and x to shared memory, B to registers, delta to the warp that weighs the history.
  __device__ __forceinline__ void request_history() {
    const ReadParams& params = cta.params;
    head = typename Cta::Head(cta, 0);
    if constexpr (kPlain) {
      slices = typename Cta::Slices(cta, head);
      cta.begin_slices(slices);
    } else if (cta.has_state()) {
      cta.request_state(head.state);
    } else {
      for (int i = cta.tid * 16; i < params.state_bytes; i += kThreads * 16) {
        *reinterpret_cast<uint4*>(cta.state() + i) = make_uint4(0, 0, 0, 0);
      }
    }
    float delta[kEarlyWindow / 32] = {};
    uint32_t rate_bits = 0;
    if (cta.warp == kTokenWarp) {
#pragma unroll
      for (int i = 0; i < kEarlyWindow / 32; ++i) {
        const int record = cta.lane + 32 * i;
        if (record < cta.history) {
          delta[i] = load_early(cta.delta_ring(0) + cta.ring_row_of(record) * params.heads_per_group);
        }
      }
      rate_bits = load_bits(cta.args.A_log.data, cta.args.A_log.dtype, cta.head_of(0));
    }
    places = typename Cta::Places(cta);
    cta.request_x(head, places, cta.history);
    const int first = 16 * cta.warp;
    if (first < cta.history) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int record = min(first + cta.g + 8 * half, cta.history - 1);
        const Staged* const from = cta.b_ring() + cta.ring_row_of(record) * N + cta.t * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) b[half][i] = load_early(reinterpret_cast<const uint4*>(from + 32 * i));
      }
    }
    places.find_inputs(cta);
    if constexpr (!kPlain) of_query = typename Cta::QueryPlaces(cta);
    if (cta.warp == kTokenWarp) {
      rate = -expf(bits_to_float(rate_bits, cta.args.A_log.dtype));
#pragma unroll
      for (int i = 0; i < kEarlyWindow / 32; ++i) {
        const int record = cta.lane + 32 * i;
        if (record < cta.history) cta.delta(0, record) = delta[i];
      }
      weigh_history();
    }
  }

  // v and d, in the order of ReadCta::discretise() and weigh_records().
  __device__ __forceinline__ void weigh_history() const {
    float* const v = cta.floats(cta.layout.v);
    __syncwarp();
    if (cta.lane == 0) {
      float sum = 0.0f;
#pragma unroll 4
      for (int i = cta.history - 1; i >= 0; --i) {
        v[i] = sum;
        sum = __fadd_rn(sum, __fmul_rn(rate, cta.delta(0, i)));
      }
      *cta.floats(cta.layout.decay) = expf(sum);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = cta.lane; i < round_up(cta.history, 16); i += 32) {
      v[i] = i < cta.history ? record_weight(cta.delta(0, i), v[i]) : 0.0f;
    }
  }

  // All that the token brings. Nothing is stored in global memory.
  __device__ __forceinline__ void weigh_token() {
    const ReadParams& params = cta.params;
    const replayssm_scan_args& args = cta.args;
    const ReadShared& layout = cta.layout;
    const replayssm_plan_row& row = cta.row;
    const int lane = cta.lane, warp = cta.warp, first = 16 * warp;
    const bool append = params.scan.append;
    const Staged* const C = static_cast<const Staged*>(args.C.data) + row.first_token * args.C.stride[0] +
                            cta.group * args.C.stride[1];
    if (cta.x_row == 0) {
      request_16_bytes(cta.staged(places.x) + cta.history * layout.x_stride,
                       append ? head.new_x : beyond(head.ring, row.ring_row * params.x_ring_stride));
    }
    uint4 query[4];
    uint2 part;
    uint32_t dt = 0, bias = 0, skip = 0;
    if (first < cta.history || warp == kTokenWarp) {
#pragma unroll
      for (int i = 0; i < 4; ++i) query[i] = *reinterpret_cast<const uint4*>(C + cta.t * 8 + 32 * i);
    }
    if (warp == kTokenWarp) {
      const Staged* const from =
          (append ? static_cast<const Staged*>(args.B.data) + row.first_token * args.B.stride[0] +
                        cta.group * args.B.stride[1]
                  : cta.b_ring() + row.ring_row * N) +
          cta.t * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) new_b[i] = *reinterpret_cast<const uint4*>(from + 32 * i);
      const int h = cta.head_of(0);
      dt = load_bits(args.dt.data, args.dt.dtype, row.first_token * args.dt.stride[0] + h * args.dt.stride[1]);
      if (args.dt_bias.data) bias = load_bits(args.dt_bias.data, args.dt_bias.dtype, h);
      if (args.D.data) skip = load_bits(args.D.data, args.D.dtype, h);
    } else if (warp == kQueryWarp) {
      part = *reinterpret_cast<const uint2*>(C + lane * 4);
    }

    if (warp == kTokenWarp) {
      step = discretised_step(bits_to_float(dt, args.dt.dtype), bits_to_float(bias, args.dt_bias.dtype), args.dt_min,
                              args.dt_max);
      float sum[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) multiply_parts<Staged>(new_b[i], new_b[i], query[i], sum);
      const float product = __fadd_rn(sum[0][0], sum[1][0]);
      float* const terms = cta.floats(layout.terms);
      if (lane == 0) {
        terms[0] = expf(__fadd_rn(0.0f, __fmul_rn(rate, step)));
        terms[1] = fmaf(record_weight(step, 0.0f), product, bits_to_float(skip, args.D.dtype));
        if (!kPlain) terms[2] = *cta.floats(layout.decay);
      }
    }
    if (first < cta.history) {
      float sum[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) multiply_parts<Staged>(b[0][i], b[1][i], query[i], sum);
      if (cta.t == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int record = first + cta.g + 8 * half;
          const float product = record < cta.history ? __fadd_rn(sum[0][2 * half], sum[1][2 * half]) : 0.0f;
          if constexpr (kPlain) {
            cta.floats(layout.g)[record] = product;
          } else {
            float* const v = cta.floats(layout.v) + record;
            *v = Cta::weight_in_parts(*v, product);
          }
        }
      }
    }
    if (warp == kQueryWarp) {
      *reinterpret_cast<uint2*>(cta.staged(layout.c) + lane * 4) = part;
      __syncwarp();
      cta.form_query();
      __syncwarp();
      if (!kPlain && lane == 0) cta.floats(layout.terms)[3] = *cta.floats(layout.query_scale);
    }
    await_requests();
  }

  // Whether all threads say so, after which they are together.
  __device__ bool agree(bool yes) const {
    int all;
    asm volatile(
        "{ .reg .pred yes, all; setp.ne.b32 yes, %1, 0; barrier.red.and.pred all, %2, %3, yes; selp.b32 %0, 1, 0, all; "
        "}"
        : "=r"(all)
        : "r"(static_cast<int>(yes)), "r"(1 + Cta::step_half()), "n"(kThreads)
        : "memory");
    return all != 0;
  }

  // Until what has been requested of the state is there.
  __device__ void await_state() const {
    if (!cta.has_state()) return;
    if constexpr (kPlain) {
#pragma unroll 1
      for (int i = 0; i < min(slices.own, kSlots); ++i) await(cta.barrier_of(slices, i), 0);
    } else if (cta.member == 0) {
      cta.await_head(0);
    }
  }

  // The token's records into the rings, but for those that are there.
  __device__ __forceinline__ void append() const {
    if (cta.warp == kTokenWarp) {
      const int position = cta.row.ring_row;
      if (cta.lane == 0) cta.delta_ring(0)[position * cta.params.heads_per_group] = step;
      if (cta.params.scan.append && cta.group_head == 0 && cta.g == 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          *reinterpret_cast<uint4*>(cta.b_ring() + position * N + cta.t * 8 + 32 * i) = new_b[i];
        }
      }
    }
    cta.append_x(head, places);
  }
};

}  // namespace
}  // namespace cuda
}  // namespace replayssm
