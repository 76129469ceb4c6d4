// SPDX-License-Identifier: Apache-2.0
//
// Causal depthwise convolution + SiLU over the new tokens of each row.
//
// A task owns one block of channels of one row. It first gathers the K-1 raw inputs before the new tokens (from the
// conv ring; inputs before token 0 are 0), then slides over the tokens, and writes the ring only after that: a prompt's
// ring rows may coincide with those that were gathered. With `records` x and B of a token go to the rings, where step
// would have appended them, run by run of channels that lie side by side there.
#include <algorithm>
#include <cmath>

#include "host/number_formats.h"
#include "host/rows.h"

namespace replayssm::host {
namespace {

constexpr int32_t kChannelBlock = 64;
constexpr int32_t kMaxTaps = 8;

// Stores `channels` values of token `token`, of the channels from `first` on: in `out`, or as a part of the record.
void store_channels(const Problem& problem, const replayssm_layer& layer, const replayssm_plan_row& row,
                    const replayssm_conv_args& args, int32_t token, int32_t first, int32_t channels,
                    const float* values) {
  const replayssm_geometry& g = problem.geometry;
  const int32_t dtype = problem.config.activation;
  const int64_t ring_row = (row.tokens + token) % problem.ring_rows;
  auto output = [&](int32_t channel) {
    return element_address(args.out.data, dtype, (row.first_token + token) * args.out.stride[0] + channel);
  };
  if (!args.records) return store_row(values, channels, dtype, output(first));
  const int32_t x_channels = g.num_heads * g.head_dim, b_channels = g.num_groups * g.state_dim;
  for (int32_t channel = first; channel < first + channels;) {
    const bool is_x = channel < x_channels;
    int32_t run = first + channels - channel;
    char* place;
    if (channel < x_channels + b_channels) {
      const replayssm_buffer& ring = is_x ? layer.x_ring : layer.b_ring;
      const int32_t width = is_x ? x_channels / g.num_groups : g.state_dim;  // of a group's record
      const int32_t of_kind = is_x ? channel : channel - x_channels;
      run = std::min(run, width - of_kind % width);
      place = element_address(static_cast<char*>(ring.base) + row.slot * ring.slot_stride, dtype,
                              (of_kind / width * problem.ring_rows + ring_row) * width + of_kind % width);
    } else {
      place = output(channel - x_channels - b_channels);
    }
    store_row(values + (channel - first), run, dtype, place);
    channel += run;
  }
}

void convolve_block(const Problem& problem, const replayssm_layer& layer, const replayssm_plan_row& row,
                    const replayssm_conv_args& args, int32_t first_channel, int32_t channels) {
  const int32_t K = problem.geometry.conv_kernel;
  const int32_t dtype = problem.config.activation;
  char* ring = static_cast<char*>(layer.conv_ring.base) + row.slot * layer.conv_ring.slot_stride;
  auto ring_row = [&](int64_t record) {
    return element_address(ring, dtype, (record % problem.conv_rows) * problem.conv_channels + first_channel);
  };
  auto input_row = [&](int32_t token) {
    return element_address(args.in.data, dtype, (row.first_token + token) * args.in.stride[0] + first_channel);
  };

  float weight[kMaxTaps][kChannelBlock], bias[kChannelBlock];
  for (int32_t c = 0; c < channels; ++c) {
    for (int32_t k = 0; k < K; ++k) weight[k][c] = load_element(args.weight, int64_t{first_channel + c} * K + k);
    bias[c] = args.bias.data ? load_element(args.bias, first_channel + c) : 0.0f;
  }

  // Raw input of token t in row t mod K; tokens before the first new one have negative numbers, from 1 - K on.
  float taps[kMaxTaps][kChannelBlock];
  for (int32_t t = 1 - K; t < 0; ++t) {
    float* tap = taps[(t + K) % K];
    if (row.tokens + t >= 0) {
      load_row(ring_row(row.tokens + t), dtype, channels, tap);
    } else {
      std::fill_n(tap, channels, 0.0f);
    }
  }

  float out[kChannelBlock];
  for (int32_t t = 0; t < row.count; ++t) {
    load_row(input_row(t), dtype, channels, taps[t % K]);
    std::copy_n(bias, channels, out);
    for (int32_t k = 0; k < K; ++k) {
      const float* tap = taps[(t + k + 1) % K];
      for (int32_t c = 0; c < channels; ++c) out[c] += weight[k][c] * tap[c];
    }
    for (int32_t c = 0; c < channels; ++c) out[c] = out[c] / (1.0f + std::exp(-out[c]));
    store_channels(problem, layer, row, args, t, first_channel, channels, out);
  }

  const bool prompt = row.flags & REPLAYSSM_ROW_LONG;
  const int32_t first_kept = prompt ? std::max(row.count - (K - 1), 0) : 0;
  const int64_t bytes = element_address(ring, dtype, channels) - ring;
  for (int32_t t = first_kept; t < row.count; ++t) std::copy_n(input_row(t), bytes, ring_row(row.tokens + t));
}

}  // namespace

replayssm_status conv_step(const replayssm_exec&, const Problem& problem, const replayssm_layer& layer,
                           const replayssm_table& table, const void* plan, int32_t rows,
                           const replayssm_conv_args& args) {
  if (!rows_fit(table, plan, rows, args.num_tokens, args.max_count, !args.records)) return REPLAYSSM_OK;
  const int32_t blocks = (problem.conv_channels + kChannelBlock - 1) / kChannelBlock;
  const int64_t work = std::max<int64_t>(args.num_tokens / rows, 1) * problem.geometry.conv_kernel * kChannelBlock;
  parallel_for(int64_t{rows} * blocks, work, [&](int64_t task) {
    const replayssm_plan_row& row = plan_rows(plan)[task / blocks];
    if (row.slot < 0) return;
    const int32_t first_channel = static_cast<int32_t>(task % blocks) * kChannelBlock;
    convolve_block(problem, layer, row, args, first_channel,
                   std::min(kChannelBlock, problem.conv_channels - first_channel));
  });
  return REPLAYSSM_OK;
}

}  // namespace replayssm::host
