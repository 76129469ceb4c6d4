// SPDX-License-Identifier: Apache-2.0
//
// conv_step: out = silu(bias + sum_k weight[k] * in[t - (K-1) + k]), depthwise, over the new tokens of each row.
//
// A thread owns 8 channels of a stretch of 64 tokens and slides a register window over it, so that every input is
// loaded once, 4 tokens at a time (or 1, where no row brings more). The window starts from the K-1 raw inputs before
// the stretch: from `in`, or, before the row's first new token, from the slot's ring (inputs before token 0 are 0 and
// are not read).
//
// The ring is written by the threads of a row's first stretch only. Those are the threads that read it, so that a
// prompt whose kept inputs fall on the ring rows of the old ones needs no other order than that of a thread's own loads
// and stores:
// - count <= max_step_tokens (one stretch): every new input, next to the old ones, none of which is overwritten;
// - longer: the last K-1 inputs, loaded once more.
#include "common.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kChannels = 8;
constexpr int kStretch = 64;
static_assert(kStretch >= REPLAYSSM_MAX_STEP_TOKENS, "a row that may be rolled back is one stretch");

struct ConvParams {
  Problem problem;
  replayssm_layer layer;
  replayssm_error* error;
  const replayssm_plan_row* planned;
  replayssm_conv_args args;
  int32_t channel_blocks, stretches;
  bool in_aligned, out_aligned, weight_aligned, bias_aligned;
};

// kTaps: K itself where it is 4, else 8, the window's older taps being zero and never loaded. kBatch: tokens whose
// inputs a thread loads at once.
template <typename T, int kTaps, int kBatch>
__global__ __launch_bounds__(kThreads, kTaps == 4 ? (kBatch == 1 ? 5 : 4)
                                                  : 1) void conv_kernel(const __grid_constant__ ConvParams params) {
  begin_early();
  constexpr int kType = kDtypeOf<T>;
  const Problem& problem = params.problem;
  const replayssm_conv_args& args = params.args;
  const int K = kTaps == 4 ? 4 : problem.geometry.conv_kernel;
  const int first_tap = kTaps - K;
  const int channel = (static_cast<int>(blockIdx.x % params.channel_blocks) * kThreads + threadIdx.x) * kChannels;
  const int stretch = static_cast<int>(blockIdx.x / params.channel_blocks % params.stretches);
  const int row_index = static_cast<int>(blockIdx.x / params.channel_blocks / params.stretches);

  const replayssm_plan_row row = params.planned[row_index];
  if (!admit(row, row_index, args.num_tokens, args.max_count, problem.config.window, true, params.error,
             channel == 0 && stretch == 0)) {
    return;
  }
  const int64_t start = static_cast<int64_t>(stretch) * kStretch;
  if (start >= row.count || channel >= problem.conv_channels) return;
  const int begin = static_cast<int>(start);
  const int end = static_cast<int>(min(start + kStretch, static_cast<int64_t>(row.count)));

  T* const ring = reinterpret_cast<T*>(section_of(params.layer.conv_ring, row.slot)) + channel;
  auto input = [&](int t) {
    return load_raw<kChannels>(args.in.data, kType,
                               (static_cast<int64_t>(row.first_token) + t) * args.in.stride[0] + channel,
                               params.in_aligned);
  };
  auto keep = [&](int position, const Raw<kChannels>& raw) {
    store_raw<kChannels>(ring, kType, static_cast<int64_t>(position) * problem.conv_channels, true, raw);
  };

  // Everything the first tokens need is asked for as raw bits, before the first conversion waits for any of it.
  Raw<kChannels> batch[kBatch];
  auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u)
      if (first + u < end) batch[u] = input(first + u);
  };
  fetch(begin);
  Raw<kChannels> window[kTaps];  // the newest input last; bits, for values would take twice the registers
#pragma unroll
  for (int k = 0; k < kTaps - 1; ++k) {
    const int t = begin - (kTaps - 1) + k;
    window[k] = {};
    if (k < first_tap) continue;
    if (t >= 0) {
      window[k] = input(t);
    } else if (row.tokens + t >= 0) {
      const int64_t position = ring_position(row.conv_row, t, problem.conv_rows);
      window[k] = load_raw<kChannels>(ring, kType, position * problem.conv_channels, true);
    }
  }

  float weight[kTaps][kChannels], bias[kChannels];
  if (kTaps == 4 && params.weight_aligned) {
    Raw<8> taps[kChannels / 2];  // of two channels
#pragma unroll
    for (int c = 0; c < kChannels; c += 2) {
      taps[c / 2] = load_raw<8>(args.weight.data, args.weight.dtype, (static_cast<int64_t>(channel) + c) * 4, true);
    }
#pragma unroll
    for (int c = 0; c < kChannels; c += 2) {
      float value[8];
      unpack_raw(taps[c / 2], args.weight.dtype, value);
#pragma unroll
      for (int k = 0; k < 4; ++k) weight[k][c] = value[k], weight[k][c + 1] = value[4 + k];
    }
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

  const bool is_long = row.flags & REPLAYSSM_ROW_LONG;
  if (is_long && stretch == 0) {
    for (int t = max(row.count - (K - 1), 0); t < row.count; ++t) {
      keep(static_cast<int>((static_cast<int64_t>(row.conv_row) + t) % problem.conv_rows), input(t));
    }
  }

  for (int first = begin; first < end; first += kBatch) {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int t = first + u;
      if (t >= end) break;
      if (!is_long) keep(ring_position(row.conv_row, t, problem.conv_rows), batch[u]);
      window[kTaps - 1] = batch[u];
      float y[kChannels];
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
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        y[c] = __fdividef(y[c], 1.0f + expf(-y[c]));  // 0 where the divisor is beyond 2^126, as is right
      }
#pragma unroll
      for (int k = 0; k < kTaps - 1; ++k) window[k] = window[k + 1];
      store_vector<kChannels>(args.out.data, kType,
                              (static_cast<int64_t>(row.first_token) + t) * args.out.stride[0] + channel,
                              params.out_aligned, y);
    }
    fetch(first + kBatch);
  }
}

using ConvKernel = void(ConvParams);

template <typename T>
ConvKernel* choose_conv(int taps, int max_count) {
  if (max_count == 1) return taps == 4 ? conv_kernel<T, 4, 1> : conv_kernel<T, 8, 1>;
  return taps == 4 ? conv_kernel<T, 4, 4> : conv_kernel<T, 8, 4>;
}

ConvKernel* choose_conv(int activation, int taps, int max_count) {
  if (activation == REPLAYSSM_BF16) return choose_conv<__nv_bfloat16>(taps, max_count);
  if (activation == REPLAYSSM_FP16) return choose_conv<__half>(taps, max_count);
  return choose_conv<float>(taps, max_count);
}

}  // namespace

replayssm_status conv_step(const replayssm_exec& exec, const Problem& problem, const replayssm_layer& layer,
                           const replayssm_table& table, const void* plan, int32_t rows,
                           const replayssm_conv_args& args) {
  if (rows == 0) return REPLAYSSM_OK;
  constexpr int kBlockChannels = kThreads * kChannels;
  const int32_t channel_blocks = (problem.conv_channels + kBlockChannels - 1) / kBlockChannels;
  const int32_t stretches = args.max_count > kStretch ? (args.max_count - 1) / kStretch + 1 : 1;
  const ConvParams params{problem,
                          layer,
                          table.error,
                          plan_rows(plan),
                          args,
                          channel_blocks,
                          stretches,
                          rows_aligned(args.in),
                          rows_aligned(args.out),
                          is_aligned_vector(args.weight),
                          is_aligned_vector(args.bias)};
  return launch_early("conv_step", choose_conv(problem.config.activation, problem.geometry.conv_kernel, args.max_count),
                      static_cast<int64_t>(rows) * stretches * channel_blocks, kThreads, 0, exec, params);
}

cudaError_t load_conv_kernels() {
  for (int activation : {REPLAYSSM_FP32, REPLAYSSM_BF16, REPLAYSSM_FP16}) {
    for (int taps : {4, 8}) {
      for (int max_count : {1, 2}) {
        const cudaError_t error = load_kernel(choose_conv(activation, taps, max_count));
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
