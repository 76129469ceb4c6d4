// SPDX-License-Identifier: Apache-2.0
//
// conv_step: out = silu(bias + sum_k weight[k] * in[t - (K-1) + k]), depthwise, over the new tokens of each row.
//
// A thread owns 16 bytes of channels of a stretch of 64 tokens and slides a register window over it, so that every
// input is loaded once, 4 tokens at a time (or 1, where no row brings more). The window starts from the K-1 raw inputs
// before the stretch: from `in`, or, before the row's first new token, from the slot's ring (inputs before token 0 are
// 0 and are not read).
//
// Rows of one stretch are shared out among as many CTAs as run at once, of at most 64 rows each. A CTA fetches its rows
// of the plan at once and a thread its weights, and then takes row after row, of which the next ones' inputs are on
// their way while it works on this one's.
//
// The ring is written by the threads of a row's first stretch only. Those are the threads that read it, so that a
// prompt whose kept inputs fall on the ring rows of the old ones needs no other order than that of a thread's own loads
// and stores:
// - count <= max_step_tokens (one stretch): every new input, next to the old ones, none of which is overwritten;
// - longer: the last K-1 inputs, loaded once more.
//
// With `records` x and B go to the rings of their groups instead of `out`. A thread's channels lie side by side there,
// too: the pieces of 16 bytes cross neither groups nor x, B and C.
#include <algorithm>

#include "common.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kStretch = 64;
static_assert(kStretch >= REPLAYSSM_MAX_STEP_TOKENS, "a row that may be rolled back is one stretch");
constexpr int kMostRows = 64;  // of a CTA
static_assert(kMostRows <= kThreads);

// With `records`: where a range of channels goes, the rings of its groups or `out`. Strides in bytes.
struct Target {
  char* data;  // channel `first`
  int64_t slot_stride, group_stride, row_stride;
  int32_t first, group_channels;
  bool in_ring;
};

struct ConvParams {
  Problem problem;
  replayssm_layer layer;
  replayssm_error* error;
  const replayssm_plan_row* planned;
  replayssm_conv_args args;
  int32_t rows, rows_each;  // of all CTAs, of one
  int32_t channel_blocks, stretches;
  Target targets[3];  // of x, B and C
  bool in_aligned, out_aligned, weight_aligned, bias_aligned;
};

template <typename T>
constexpr int kChannelsOf = 16 / sizeof(T);  // of a thread

// CTAs of an SM at once, where K is 4.
constexpr int ctas_per_sm(int batch) { return batch == 1 ? 5 : 3; }

// kTaps: K itself where it is 4, else 8, the window's older taps being zero and never loaded. kBatch: tokens whose
// inputs a thread loads at once; 1: no row brings more. kPacked: all is aligned, weights and bias are of the 16-bit
// type T; as bits they leave registers for two rows of one token on their way instead of one.
template <typename T, int kTaps, int kBatch, bool kPacked, bool kRecords>
__global__ __launch_bounds__(kThreads, kTaps == 4 ? ctas_per_sm(kBatch)
                                                  : 1) void conv_kernel(const __grid_constant__ ConvParams params) {
  constexpr bool kSingle = kBatch == 1;
  constexpr int kType = kDtypeOf<T>, kChannels = kChannelsOf<T>, kParts = kPacked && kSingle ? 2 : 1;
  let_next_begin();
  const Problem& problem = params.problem;
  const replayssm_conv_args& args = params.args;
  const bool in_aligned = kPacked || params.in_aligned;
  const int K = kTaps == 4 ? 4 : problem.geometry.conv_kernel;
  const int first_tap = kTaps - K;
  const int channel = (static_cast<int>(blockIdx.x % params.channel_blocks) * kThreads + threadIdx.x) * kChannels;
  const int stretch = static_cast<int>(blockIdx.x / params.channel_blocks % params.stretches);
  const int first_row = static_cast<int>(blockIdx.x / params.channel_blocks / params.stretches) * params.rows_each;
  // Where the thread's results go is found before the wait, with all divisions, and rests in shared memory until then.
  struct Place {
    char* data;  // in slot 0, row 0
    int64_t slot_stride, row_stride, in_ring;
  };
  __shared__ Place places[kRecords ? kThreads : 1];
  if constexpr (kRecords) {
    const Target& target = params.targets[(channel >= params.targets[1].first) + (channel >= params.targets[2].first)];
    const int of_range = channel - target.first, group = of_range / target.group_channels;
    const int64_t of_group = of_range - group * target.group_channels;
    places[threadIdx.x] = {target.data + group * target.group_stride + of_group * int64_t{sizeof(T)},
                           target.slot_stride, target.row_stride, target.in_ring};
  }
  await_previous();
  const int rows = min(params.rows_each, params.rows - first_row);
  __shared__ replayssm_plan_row planned[kMostRows];
  if (static_cast<int>(threadIdx.x) < rows) planned[threadIdx.x] = params.planned[first_row + threadIdx.x];
  __syncthreads();
  if (channel >= problem.conv_channels) return;

  // A row's part of this stretch, its first tokens' inputs and those before them: raw bits, nothing of which is
  // converted, so that nothing waits for the loads.
  const int begin = kSingle ? 0 : stretch * kStretch;
  struct Part {
    int index, end;  // among the CTA's rows; behind its last token of the stretch, `begin` if there is none
    Raw<kChannels> window[kTaps - 1], batch[kBatch];
  };
  auto ring_of = [&](const Part& part) {
    return reinterpret_cast<T*>(section_of(params.layer.conv_ring, planned[part.index].slot)) + channel;
  };
  auto input = [&](const Part& part, int t) {
    return load_raw<kChannels>(
        args.in.data, kType, (static_cast<int64_t>(planned[part.index].first_token) + t) * args.in.stride[0] + channel,
        in_aligned);
  };
  auto fetch = [&](Part& part, int first) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (first + u < part.end) part.batch[u] = input(part, first + u);
  };
  auto ask_for = [&](int i) {
    Part part;
    part.index = i;
    part.end = begin;
    if (i >= rows) return part;
    const replayssm_plan_row& row = planned[i];
    if (!admit(row, first_row + i, args.num_tokens, args.max_count, problem.config.window, !kRecords, params.error,
               channel == 0 && stretch == 0) ||
        begin >= row.count) {
      return part;
    }
    part.end = row.count - begin < kStretch ? row.count : begin + kStretch;
    fetch(part, begin);
    const T* const ring = ring_of(part);
#pragma unroll
    for (int k = 0; k < kTaps - 1; ++k) {
      const int t = begin - (kTaps - 1) + k;
      part.window[k] = {};
      if (k < first_tap) continue;
      if (t >= 0) {
        part.window[k] = input(part, t);
      } else if (row.tokens + t >= 0) {
        const int64_t position = ring_position(row.conv_row, t, problem.conv_rows);
        part.window[k] = load_raw<kChannels>(ring, kType, position * problem.conv_channels, true);
      }
    }
    return part;
  };
  Part parts[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = ask_for(i);

  float weight[kTaps][kChannels], bias[kChannels];
  Raw<8> taps[kChannels / 2], bias_bits;  // taps: of two channels
  if (kPacked || (kTaps == 4 && params.weight_aligned)) {
#pragma unroll
    for (int c = 0; c < kChannels; c += 2) {
      taps[c / 2] = load_raw<8>(args.weight.data, kPacked ? kType : args.weight.dtype,
                                (static_cast<int64_t>(channel) + c) * 4, true);
    }
  }
  auto unpack_taps = [&](int c) {
    float value[8];
    unpack_raw(taps[c / 2], kPacked ? kType : args.weight.dtype, value);
#pragma unroll
    for (int k = 0; k < 4; ++k) weight[k][c] = value[k], weight[k][c + 1] = value[4 + k];
  };
  if (kPacked) {
    bias_bits = {};
    if (args.bias.data) bias_bits = load_raw<8>(args.bias.data, kType, channel, true);
  } else {
    if (kTaps == 4 && params.weight_aligned) {
#pragma unroll
      for (int c = 0; c < kChannels; c += 2) unpack_taps(c);
    } else {
#pragma unroll
      for (int k = 0; k < kTaps; ++k)
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          weight[k][c] = 0.0f;
          if (k < first_tap) continue;
          weight[k][c] =
              load_scalar(args.weight.data, args.weight.dtype, (static_cast<int64_t>(channel) + c) * K + k - first_tap);
        }
    }
    if (args.bias.data) {
      load_vector<kChannels>(args.bias.data, args.bias.dtype, channel, params.bias_aligned, bias);
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) bias[c] = 0.0f;
    }
  }

  auto work_on = [&](Part& part) {
    if (part.end == begin) return;
    const replayssm_plan_row& row = planned[part.index];
    // Read once: for all that the compiler knows, the stores below change the plan.
    const int conv_row = row.conv_row, first_token = row.first_token, ring_row = row.ring_row;
    const bool is_long = !kSingle && row.flags & REPLAYSSM_ROW_LONG;
    T* const ring = ring_of(part);
    auto keep = [&](int position, const Raw<kChannels>& raw) {
      store_raw<kChannels>(ring, kType, static_cast<int64_t>(position) * problem.conv_channels, true, raw);
    };
    if (is_long && stretch == 0) {
      for (int t = max(row.count - (K - 1), 0); t < row.count; ++t) {
        keep(static_cast<int>((static_cast<int64_t>(row.conv_row) + t) % problem.conv_rows), input(part, t));
      }
    }
    Raw<kChannels> window[kTaps];  // the newest input last; bits, for values would take twice the registers
#pragma unroll
    for (int k = 0; k < kTaps - 1; ++k) window[k] = part.window[k];
    for (int first = begin;; first += kBatch) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int t = first + u;
        if (t >= part.end) break;
        if (!is_long) keep(ring_position(conv_row, t, problem.conv_rows), part.batch[u]);
        window[kTaps - 1] = part.batch[u];
        float y[kChannels];
        if constexpr (kPacked) {
          unpack_raw(bias_bits, kType, y);
          // New to the compiler for every token, or it keeps what they unpack to, for which there are no registers.
#pragma unroll
          for (Raw<8>& of_two : taps)
#pragma unroll
            for (int w = 0; w < 4; ++w) asm volatile("" : "+r"(of_two.word[w]));
#pragma unroll
          for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int c = 0; c < kChannels; c += 2) {
              const float2 pair = unpack_pair<T>(window[k].word[c / 2]);
              auto tap = [&](int i) {
                const float2 taps_of_two = unpack_pair<T>(taps[c / 2].word[2 * i + k / 2]);
                return k % 2 ? taps_of_two.y : taps_of_two.x;
              };
              y[c] = fmaf(tap(0), pair.x, y[c]);
              y[c + 1] = fmaf(tap(1), pair.y, y[c + 1]);
            }
        } else {
#pragma unroll
          for (int c = 0; c < kChannels; ++c) y[c] = bias[c];
#pragma unroll
          for (int k = 0; k < kTaps; ++k) {
            // Inputs that the kernel does not reach are skipped, not multiplied by zero: they may be Inf or NaN.
            if (kTaps != 4 && k < first_tap) continue;
            float input[kChannels];
            unpack_raw(window[k], kType, input);
#pragma unroll
            for (int c = 0; c < kChannels; ++c) y[c] = fmaf(weight[k][c], input[c], y[c]);
          }
        }
#pragma unroll
        for (int c = 0; c < kChannels; ++c) y[c] = silu(y[c]);
#pragma unroll
        for (int k = 0; k < kTaps - 1; ++k) window[k] = window[k + 1];
        const int64_t token = static_cast<int64_t>(first_token) + t;
        if constexpr (kRecords) {
          const Place& place = places[threadIdx.x];
          const int64_t of_slot = place.in_ring ? ring_position(ring_row, t, problem.ring_rows) : token;
          store_vector<kChannels>(place.data + row.slot * place.slot_stride + of_slot * place.row_stride, kType, 0,
                                  kPacked || params.out_aligned || place.in_ring, y);
        } else {
          store_vector<kChannels>(args.out.data, kType, token * args.out.stride[0] + channel,
                                  kPacked || params.out_aligned, y);
        }
      }
      if (kSingle || first + kBatch >= part.end) break;
      fetch(part, first + kBatch);
    }
  };
  if constexpr (kParts == 1) {
    for (int i = 0; i < rows; ++i) {
      Part part = parts[0];
      parts[0] = ask_for(i + 1);
      work_on(part);
    }
  } else {
    for (int first = 0; first < rows; first += kParts) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (first + i >= rows) break;
        work_on(parts[i]);
        parts[i] = ask_for(first + i + kParts);
      }
    }
  }
}

using ConvKernel = void(ConvParams);

template <typename T, bool kRecords>
ConvKernel* choose_conv(int taps, int max_count, bool packed) {
  if (taps != 4) return max_count == 1 ? conv_kernel<T, 8, 1, false, kRecords> : conv_kernel<T, 8, 4, false, kRecords>;
  if constexpr (sizeof(T) == 2) {
    if (packed && max_count <= REPLAYSSM_MAX_STEP_TOKENS) {
      return max_count == 1 ? conv_kernel<T, 4, 1, true, kRecords> : conv_kernel<T, 4, 4, true, kRecords>;
    }
  }
  return max_count == 1 ? conv_kernel<T, 4, 1, false, kRecords> : conv_kernel<T, 4, 4, false, kRecords>;
}

template <bool kRecords>
ConvKernel* choose_conv(int activation, int taps, int max_count, bool packed) {
  if (activation == REPLAYSSM_BF16) return choose_conv<__nv_bfloat16, kRecords>(taps, max_count, packed);
  if (activation == REPLAYSSM_FP16) return choose_conv<__half, kRecords>(taps, max_count, packed);
  return choose_conv<float, kRecords>(taps, max_count, packed);
}

}  // namespace

replayssm_status conv_step(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                           const replayssm_table& table, const void* plan, int32_t rows,
                           const replayssm_conv_args& args) {
  if (rows == 0) return REPLAYSSM_OK;
  const int32_t block_channels = kThreads * static_cast<int32_t>(16 / element_size(problem.config.activation));
  const int32_t channel_blocks = (problem.conv_channels + block_channels - 1) / block_channels;
  const int32_t stretches = args.max_count > kStretch ? (args.max_count - 1) / kStretch + 1 : 1;
  const int32_t at_once = ctas_per_sm(args.max_count) * attribute_of_device(cudaDevAttrMultiProcessorCount, 1);
  const int32_t groups = stretches > 1 ? rows : std::clamp(at_once / channel_blocks, 1, rows);  // of rows, a CTA each
  const int32_t rows_each = std::min((rows - 1) / groups + 1, kMostRows);
  ConvParams params{problem,
                    layer,
                    table.error,
                    plan_rows(plan),
                    args,
                    rows,
                    rows_each,
                    channel_blocks,
                    stretches,
                    {},
                    rows_aligned(args.in),
                    rows_aligned(args.out),
                    is_aligned_vector(args.weight),
                    is_aligned_vector(args.bias)};
  if (args.records) {
    const replayssm_geometry& g = problem.geometry;
    const int64_t size = element_size(problem.config.activation);
    const int32_t x_channels = g.num_heads * g.head_dim, b_channels = g.num_groups * g.state_dim;
    auto ring = [&](const replayssm_buffer& buffer, int32_t first, int32_t channels) {
      char* const base = static_cast<char*>(buffer.base);
      const int64_t record = channels * size;
      return Target{base, buffer.slot_stride, problem.ring_rows * record, record, first, channels, true};
    };
    params.targets[0] = ring(layer.x_ring, 0, x_channels / g.num_groups);
    params.targets[1] = ring(layer.b_ring, x_channels, g.state_dim);
    params.targets[2] = {static_cast<char*>(args.out.data), 0,          0,    args.out.stride[0] * size,
                         x_channels + b_channels,           b_channels, false};
  }
  auto packed = [&](const replayssm_tensor& vector, bool aligned) {
    return !vector.data || (vector.dtype == problem.config.activation && aligned);
  };
  const bool all_packed = packed(args.weight, params.weight_aligned) && packed(args.bias, params.bias_aligned) &&
                          params.in_aligned && params.out_aligned;
  ConvKernel* const kernel =
      (args.records ? choose_conv<true> : choose_conv<false>)(problem.config.activation, problem.geometry.conv_kernel,
                                                              args.max_count, all_packed);
  return launch_early("conv_step", kernel,
                      static_cast<int64_t>((rows - 1) / rows_each + 1) * stretches * channel_blocks, kThreads, 0, exec,
                      params);
}

cudaError_t load_conv_kernels() {
  for (int activation : {REPLAYSSM_FP32, REPLAYSSM_BF16, REPLAYSSM_FP16}) {
    for (int taps : {4, 8}) {
      for (int max_count : {1, 2}) {
        for (bool packed : {false, true}) {
          for (auto* const choose : {choose_conv<false>, choose_conv<true>}) {
            const cudaError_t error = load_kernel(choose(activation, taps, max_count, packed));
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
