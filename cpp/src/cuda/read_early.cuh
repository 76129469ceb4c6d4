// SPDX-License-Identifier: Apache-2.0
//
// A step in launches so small that their CTAs stand on the multiprocessors beside those of the kernel before: see
// step_read.cu.
//
// Four warps have one head, two or four, of one group of a row. What steps before have left is loaded, and the history
// weighed, before the kernel before has ended, by what the plan says then (the rules stand in common.cuh, above
// peek()). What comes after that is as little as can be. What tokens bring is asked for together with the row itself,
// by addresses that are there already. Of a row of one token each warp then does another part: B^T C of 16 records,
// step sizes, or C in FP16. One barrier follows, at which all threads also say whether the row is still what they have
// found, and the products with state and x. Should it be another row, all is done anew.
//
// Bits are those of ReadCta::run(): the same operations.
#pragma once

#include "read_cta.cuh"

namespace replayssm {
namespace cuda {
namespace {

// The longest window: two warps multiply 16 records of B each, and a lane of a third has a record's delta.
constexpr int kEarlyWindow = 32;

template <typename Format, typename Staged, bool kSingle>
struct EarlyStep {
  using Cta = ReadCta<Format, Staged, false, kSingle, true>;
  using State = typename Cta::State;
  static constexpr bool kPlain = Cta::kPlain;
  static constexpr int N = kMaxStateDim, kTiles = kEarlyWindow / 16;
  // Of one token: the first kTiles warps have 16 records each of the run, the history and the token behind it.
  static constexpr int kStepWarp = 2, kQueryWarp = 3;

  Cta cta;
  bool known;              // there is work, by the row as it has been found
  int own_slices;          // of the team's head, for this warp
  float rate, bias, skip;  // kStepWarp, of the lane-th head
  const char* next;        // slice of a plain checkpoint to request
  // Where the token's inputs are. Of the first kTiles warps the lane's part of C, of kStepWarp dt of the lane-th head,
  // of kQueryWarp four columns of C; of all of them 16 bytes of B, and of x.
  const char *input, *new_b, *new_x;
  Staged* out;
  float step;  // kStepWarp, of the lane-th head
  // Of rows of several tokens.
  typename Cta::Head head;
  typename Cta::Places places;
  typename Cta::QueryPlaces of_query;
  typename Cta::Slices slices;
  typename Cta::TokenInputs inputs;

  __device__ __forceinline__ explicit EarlyStep(const ReadParams& params, char* shared)
      : cta(params, shared, params.team_bits) {}

  __device__ __forceinline__ void run(uint32_t task) {
    cta.set_up();
    find(task);
    bool sure = false;
#pragma unroll 1
    while (!begin(sure)) {
      if (!cta.take(task)) return;
      end();
      cta.set_up();
      known = sure = true;
    }
    read();
  }
  // The same of what find() has taken, but false, behind await_previous(), if nothing is done: the row is another now,
  // or there is nothing to do.
  __device__ __forceinline__ bool run() {
    cta.set_up();
    if (!begin(false)) {
      end();
      return false;
    }
    read();
    return true;
  }

  // Takes a task by the plan as it reads then. Returns whether its row flushes.
  __device__ __forceinline__ bool find(uint32_t task) {
    cta.find(task);
    own_slices = cta.team < cta.heads ? cta.own_slices : 0;
    known = cta.peek_step();
    return cta.row.flags & REPLAYSSM_ROW_FLUSH;
  }

  // All that precedes the products with state and x. False: the row is another, and nothing is under way.
  __device__ __forceinline__ bool begin(bool sure) {
    if (known) {
      request_history();
      if (kSingle) find_token();
      await_requests();
    }
    cta.synchronise();
    if (!sure) await_previous();
    const replayssm_plan_row& planned = cta.params.scan.planned[cta.row_index];
    const uint2 named = load_early(reinterpret_cast<const uint2*>(&planned.slot));
    const uint4 rest = load_early(reinterpret_cast<const uint4*>(&planned.count));
    if (known) {
      if constexpr (kSingle) {
        weigh_token();
      } else {
        request_tokens();
      }
    }
    if (agree(known && (sure || cta.is_row(named, rest)))) return true;
    if (known) await_state();
    return false;
  }

  // What begin() has begun.
  __device__ __forceinline__ void read() {
    if constexpr (!kSingle) {
      read_several();
      return;
    } else if constexpr (kPlain) {
      if (own_slices > 0) read_plain();
    } else {
      if (own_slices > 0) read_quantised();
    }
    append();
  }

  // Takes back what set_up() has made; nothing is under way.
  __device__ void end() const {
    cta.synchronise();
    if (kPlain && cta.lane < kSlots) end_barrier(cta.slot_barrier(cta.lane));
    if (!kPlain && cta.member == 0 && cta.lane == 0) end_barrier(cta.barrier());
    cta.synchronise();
  }

  __device__ char* slot(int index) const {
    return cta.shared + cta.layout.state + (cta.warp * kSlots + index) * Cta::kSliceBytes;
  }
  // loaded: see ReadCta::after().
  __device__ void request_slice(int index, uint32_t loaded = 0) {
    const int bytes = cta.after(loaded, Cta::kSliceBytes);
#if __CUDA_ARCH__ >= 900
    if (elect_lane()) {
      arrive_expecting(cta.slot_barrier(index), bytes);
      request_block(slot(index), next, bytes, cta.slot_barrier(index));
    }
#else
#pragma unroll
    for (int i = 16 * cta.lane; i < bytes; i += 512) request_16_bytes(slot(index) + i, next + i);
    arrive_with_requests(cta.slot_barrier(index));
#endif
    next += Cta::kSliceBytes;
  }

  // What steps before have left, to shared memory. kStepWarp weighs the history.
  __device__ __forceinline__ void request_history() {
    const ReadParams& params = cta.params;
    if constexpr (!kSingle) {
      head = typename Cta::Head(cta, cta.team);
      places = typename Cta::Places(cta);
      if constexpr (kPlain) {
        slices = typename Cta::Slices(cta, head);
        cta.begin_slices(slices);
      } else {
        of_query = typename Cta::QueryPlaces(cta);
      }
      places.find_inputs(cta);
    }
    if (cta.team < cta.heads) {
      const typename Cta::Head head(cta, cta.team);
      out = head.out;
      if constexpr (kPlain && !kSingle) {
        // slices are under way
      } else if constexpr (kPlain) {
        next = head.state + cta.first_slice * Cta::kSliceBytes;
        if (cta.has_state()) {
          for (int i = 0; i < min(own_slices, kSlots); ++i) request_slice(i);
        } else {
          for (int i = 16 * cta.lane; i < kSlots * Cta::kSliceBytes; i += 512) {
            *reinterpret_cast<uint4*>(slot(0) + i) = make_uint4(0, 0, 0, 0);
          }
        }
      } else if (cta.has_state()) {
        cta.request_state(head.state, 0);
      } else {
        for (int i = (cta.member * 32 + cta.lane) * 16; i < params.state_bytes; i += 512 << cta.team_bits) {
          *reinterpret_cast<uint4*>(cta.state() + i) = make_uint4(0, 0, 0, 0);
        }
      }
      cta.request_x(head, typename Cta::Places(cta), 0, cta.history);
    }
    const int column = cta.tid % Cta::kRowParts * 8;
#pragma unroll 1
    for (int i = cta.tid / Cta::kRowParts; i < cta.history; i += Cta::kRowsAtOnce) {
      request_16_bytes(cta.staged(cta.layout.b) + i * N + column, cta.b_ring() + cta.ring_row_of(i) * N + column);
    }
    if (cta.warp == kStepWarp) weigh_history();
  }

  // v and d of all heads, in the order of ReadCta::discretise() and weigh_records(). A lane has one record of each
  // head, then a head, then a record again. Weights for a quantised state, which are still to be multiplied, take the
  // place of delta.
  __device__ __forceinline__ void weigh_history() {
    const replayssm_scan_args& args = cta.args;
    const ReadShared& layout = cta.layout;
    const int lane = cta.lane, heads = cta.heads;
    float delta[kWarps] = {};
    if (lane < cta.history) {
      const float* const of_record = cta.delta_ring(0) + cta.ring_row_of(lane) * cta.params.heads_per_group;
#pragma unroll
      for (int k = 0; k < kWarps; ++k) {
        if (k < heads) delta[k] = load_early(of_record + k);
      }
    }
    const int h = cta.head_of(min(lane, heads - 1));
    rate = -expf(load_scalar(args.A_log.data, args.A_log.dtype, h));
    bias = args.dt_bias.data ? load_scalar(args.dt_bias.data, args.dt_bias.dtype, h) : 0.0f;
    skip = args.D.data ? load_scalar(args.D.data, args.D.dtype, h) : 0.0f;
    if (lane < cta.history) {
#pragma unroll
      for (int k = 0; k < kWarps; ++k) {
        if (k < heads) cta.delta(k, lane) = delta[k];
      }
    }
    __syncwarp();
    if (lane < heads) {
      float* const v = cta.floats(layout.v) + lane * layout.delta_stride;
      float sum = 0.0f;
#pragma unroll 4
      for (int i = cta.history - 1; i >= 0; --i) {
        v[i] = sum;
        sum = __fadd_rn(sum, __fmul_rn(rate, cta.delta(lane, i)));
      }
      cta.floats(layout.decay)[lane] = expf(sum);
      cta.floats(layout.rate)[lane] = rate;
    }
    __syncwarp();
    if (lane >= round_up(cta.history, 16)) return;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      if (k >= heads) continue;
      float& v = cta.floats(layout.v)[k * layout.delta_stride + lane];
      const float weight = lane < cta.history ? record_weight(cta.delta(k, lane), v) : 0.0f;
      v = weight;
      if (!kPlain && kSingle) cta.delta(k, lane) = weight;
    }
  }

  // The addresses, which are kept so that they are not formed behind await_previous().
  __device__ __forceinline__ void find_token() {
    const replayssm_scan_args& args = cta.args;
    const int64_t token = cta.row.first_token;
    const bool append = cta.params.scan.append;
    const Staged* const C =
        static_cast<const Staged*>(args.C.data) + token * args.C.stride[0] + cta.group * args.C.stride[1];
    const Staged* const B =
        append ? static_cast<const Staged*>(args.B.data) + token * args.B.stride[0] + cta.group * args.B.stride[1]
               : cta.b_ring() + cta.row.ring_row * N;
    const typename Cta::Head head(cta, min(cta.team, cta.heads - 1));
    const Staged* const X = append ? head.new_x : beyond(head.ring, cta.row.ring_row * cta.params.x_ring_stride);
    const char* const of_c = reinterpret_cast<const char*>(C);
    const int64_t dt = token * args.dt.stride[0] + cta.head_of(min(cta.lane, cta.heads - 1)) * args.dt.stride[1];
    input = keep(cta.warp == kStepWarp
                     ? static_cast<const char*>(args.dt.data) + dt * (args.dt.dtype == REPLAYSSM_FP32 ? 4 : 2)
                     : of_c + (cta.warp == kQueryWarp ? 8 * cta.lane : 16 * cta.t));
    new_b = keep(reinterpret_cast<const char*>(B) + 16 * (cta.lane % Cta::kRowParts));
    new_x = keep(reinterpret_cast<const char*>(X));
  }

  // The lane's 16 bytes of the token's x.
  __device__ Staged* own_x() const { return cta.staged(cta.new_x_at()) + cta.x_column; }
  __device__ bool has_own_x() const { return cta.x_row == 0 && cta.team < cta.heads; }

  // All that the token brings. Nothing is stored in global memory.
  __device__ __forceinline__ void weigh_token() {
    const ReadShared& layout = cta.layout;
    const int lane = cta.lane, warp = cta.warp;
    if (has_own_x()) request_16_bytes(own_x(), new_x);
    if (warp == kStepWarp) {
      if (lane < cta.heads) {
        const uint32_t bits = load_bits(input, cta.args.dt.dtype, 0);
        step = discretised_step(bits_to_float(bits, cta.args.dt.dtype), bias, cta.args.dt_min, cta.args.dt_max);
        const float since = expf(__fadd_rn(0.0f, __fmul_rn(rate, step)));
        reinterpret_cast<float4*>(cta.floats(layout.terms))[lane] =
            make_float4(since, record_weight(step, 0.0f), skip, cta.floats(layout.decay)[lane]);
      }
    } else if (warp == kQueryWarp) {
      *reinterpret_cast<uint2*>(cta.staged(layout.c) + lane * 4) = load_early(reinterpret_cast<const uint2*>(input));
      __syncwarp();
      cta.form_query();
    } else if (16 * warp <= cta.history) {
      uint4 token[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) token[i] = load_early(reinterpret_cast<const uint4*>(input) + 4 * i);
      if (warp == cta.history / 16) {
        if (lane < Cta::kRowParts) {
          request_16_bytes(cta.staged(layout.b) + cta.history * N + lane * 8, new_b);
        }
        await_requests();
        __syncwarp();
      }
      float sum[2][4] = {};
      multiply_records<N>(cta.staged(layout.b), 16 * warp, cta.history + 1, token, cta.g, cta.t, sum);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int record = 16 * warp + cta.g + 8 * half;
        const float product = __fadd_rn(sum[0][2 * half], sum[1][2 * half]);
        if (record == cta.history && cta.t == 0) *cta.floats(layout.g_new) = product;
        if (record >= cta.history) continue;
        if constexpr (kPlain) {
          if (cta.t == 0) cta.floats(layout.g)[record] = product;
        } else {
          static_assert(kWarps == 4);  // lane t has head t
          if (cta.t < cta.heads) {
            cta.floats(layout.v)[cta.t * layout.delta_stride + record] =
                Cta::weight_in_parts(cta.delta(cta.t, record), product);
          }
        }
      }
    }
    await_requests();
  }

  // The same of several, as far as it can be had before all threads are together.
  __device__ __forceinline__ void request_tokens() {
    const ReadShared& layout = cta.layout;
    cta.request_b(cta.history, cta.from_ring());
    cta.request_tokens_of_group();
    if (cta.team < cta.heads) {
      const int x_rows = cta.x_rows;
      Staged* target = cta.staged(places.new_x);
      const Staged* source = head.new_x;
      uint32_t from = cta.wrapped((cta.row.ring_row + min(cta.x_row, cta.T)) * cta.params.x_ring_stride);
#pragma unroll 1
      for (int s = cta.x_row; s < cta.T; s += x_rows) {
        if (cta.params.scan.append) {
          request_16_bytes(target, source);
          source += x_rows * cta.args.x.stride[0];
        } else {
          request_16_bytes(target, beyond(head.ring, from));
          from = cta.wrapped(from + x_rows * cta.params.x_ring_stride);
        }
        target += x_rows * layout.x_stride;
      }
    }
    inputs = cta.load_tokens();
    await_requests();
  }
  // And the rest of it.
  __device__ __forceinline__ void read_several() {
    cta.append_b();
    cta.form_products();
    cta.form_query();
    cta.discretise_tokens(inputs);
    cta.synchronise();
    if (cta.reads_one()) cta.take_parts_of_weights();
    cta.weigh_tokens(inputs);
    cta.synchronise();
    if (cta.team >= cta.heads) return;
    if constexpr (kPlain) {
      cta.append_x(head, places);
      cta.read_plain(cta.team, places, places.terms, head.out, slices);
    } else {
      cta.await_head(0);
      cta.append_x(head, places);
      if (cta.reads_one()) {
        cta.read_token(cta.team, places, of_query, places.terms, head, true);
      } else {
        cta.read_tokens(cta.team, places, of_query, places.terms, head, true);
      }
    }
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
    if (!cta.has_state() || cta.team >= cta.heads) return;
    if constexpr (kPlain) {
#pragma unroll 1
      for (int i = 0; i < min(own_slices, kSlots); ++i) await(cta.slot_barrier(i), 0);
    } else if (cta.member == 0) {
      cta.await_head(0);
    }
  }

  // exp(f), u, skip, d of the team's head.
  __device__ float4 terms() const {
    float4 of = reinterpret_cast<const float4*>(cta.floats(cta.layout.terms))[cta.team];
    of.y = fmaf(of.y, *cta.floats(cta.layout.g_new), of.z);
    return of;
  }

  // The outputs of the warp's slices, as ReadCta::read_plain() forms them.
  __device__ __forceinline__ void read_plain() {
    constexpr int kQueryParts = State::template kQueryParts<Staged>;
    const ReadShared& layout = cta.layout;
    const int t = cta.t;
    const float4 terms = this->terms();
    const float factor = __fmul_rn(terms.w * *cta.floats(layout.query_scale), terms.x);
    uint4 query[kQueryParts][State::kQueries], weights[kTiles];
#pragma unroll
    for (int part = 0; part < kQueryParts; ++part)
#pragma unroll
      for (int i = 0; i < State::kQueries; ++i) {
        query[part][i] = *reinterpret_cast<const uint4*>(cta.shared + layout.query +
                                                         part * layout.tokens * kQueryStride * 4 + 64 * i + 16 * t);
      }
    int run_x[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float4 before = cta.weights_of(cta.team, 0, i);
      const int token = cta.history - 16 * i - 2 * t;  // of the lane's records, counted from its first
      auto of = [&](int record, float weight) {
        return record < token ? __fmul_rn(weight, terms.x) : record == token ? terms.y : 0.0f;
      };
      weights[i] = Cta::split_weights(make_float4(of(0, before.x), of(1, before.y), of(8, before.z), of(9, before.w)));
      run_x[i] = cta.run_at(i);
    }
    const typename State::Places of_state(cta.lane);
    Staged* out = this->out;
#pragma unroll 1
    for (int slice = 0; slice < own_slices; ++slice) {
      if (cta.has_state()) await(cta.slot_barrier(slice % kSlots), slice / kSlots % 2);
      const State state(slot(slice % kSlots), of_state);
      if (slice + kSlots < own_slices && cta.has_state()) {
        __syncwarp();
        request_slice(slice % kSlots, state.loaded());
      }
      typename State::Sums sum = {};
#pragma unroll
      for (int part = kQueryParts - 1; part >= 0; --part) {
        state.multiply([&](int i) { return query[part][i]; }, sum);
      }
      float of_run[2][4] = {};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (16 * i > cta.history) continue;
        const HistoryOperand<Staged> x(cta.staged(run_x[i]));
        run_x[i] += 2 * kSliceWidth;
#pragma unroll
        for (int part = HistoryOperand<Staged>::kParts - 1; part >= 0; --part)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            multiply_pairs<__nv_bfloat16>(of_run[half], weights[i].x, weights[i].y, weights[i].z, weights[i].w,
                                          x.part[part][2 * half], x.part[part][2 * half + 1]);
          }
      }
      float value[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[i] = fmaf(State::value(sum, i), factor, __fadd_rn(of_run[i / 2][i % 2], of_run[i / 2][2 + i % 2]));
      }
      if (cta.g == 0) {
        if (cta.params.paired) {
          *reinterpret_cast<uint32_t*>(out) = pack_pair<Staged>(value[0], value[1]);
          *reinterpret_cast<uint32_t*>(out + 8) = pack_pair<Staged>(value[2], value[3]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) store_scalar(out, kDtypeOf<Staged>, i / 2 * 8 + i % 2, value[i]);
        }
      }
      out += kSliceWidth;
    }
  }

  // The same as ReadCta::read_token() forms them.
  __device__ __forceinline__ void read_quantised() {
    const ReadShared& layout = cta.layout;
    const typename Cta::QueryPlaces places(cta);
    cta.template scale_columns<true>(places);
    cta.await_head(0);
    const float4 terms = this->terms();
    const float factor = State::head_scale(cta.shared + places.head_scale) * terms.w * *cta.floats(layout.query_scale);
    uint4 query[kProducts / 2];
    uint2 weights[kTiles];
    int run_x[kTiles];
#pragma unroll
    for (int i = 0; i < kProducts / 2; ++i) {
      query[i] = *reinterpret_cast<const uint4*>(cta.shared + places.operand + 64 * i);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      weights[i] = places.weights_of(cta.shared, cta.team, i);
      run_x[i] = cta.run_at(i);
    }
    typename State::Source source(cta.state(), cta.problem.geometry.head_dim, cta.first_slice, cta.lane);
    const int t = cta.t;
    const Staged* new_x = cta.staged(cta.new_x_at()) + cta.first_slice * kSliceWidth + cta.g + t / 2 * 8;
    Staged* out = this->out;  // ReadCta::output_row() has lanes with odd t a slice further on
#pragma unroll 1
    for (int slice = 0; slice < own_slices; ++slice) {
      const State state(source);
      float sum[2][4] = {}, y[1][4] = {};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (16 * i >= cta.history) continue;
        HistoryOperand<Staged>(cta.staged(run_x[i])).multiply(weights[i].x, weights[i].y, y[0]);
        run_x[i] += 2 * kSliceWidth;
      }
      multiply_blocks(state, query, sum);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        y[0][2 * i] = fmaf(state.scale(i, sum[0][2 * i], sum[1][2 * i]), factor, y[0][2 * i]);
      }
      const float value = fmaf(terms.y, static_cast<float>(*new_x), __fmul_rn(sum_over_quad(y, t), terms.x));
      if (t % 2 == 0) store_scalar(out, kDtypeOf<Staged>, 0, value);
      source.advance();
      new_x += kSliceWidth, out += kSliceWidth;
    }
  }

  // The token's records into the rings, but for those that are there.
  __device__ __forceinline__ void append() const {
    const int position = cta.row.ring_row;
    if (cta.warp == kStepWarp && cta.lane < cta.heads) {
      cta.delta_ring(cta.lane)[position * cta.params.heads_per_group] = step;
    }
    if (!cta.params.scan.append) return;
    if (has_own_x()) {
      const typename Cta::Head head(cta, cta.team);
      *reinterpret_cast<uint4*>(beyond(head.ring, position * cta.params.x_ring_stride)) =
          *reinterpret_cast<const uint4*>(own_x());
    }
    if (cta.warp == kQueryWarp && cta.group_head == 0 && cta.lane < Cta::kRowParts) {
      *reinterpret_cast<uint4*>(cta.b_ring() + position * N + cta.lane * 8) =
          *reinterpret_cast<const uint4*>(cta.staged(cta.layout.b) + cta.history * N + cta.lane * 8);
    }
  }
};

}  // namespace
}  // namespace cuda
}  // namespace replayssm
