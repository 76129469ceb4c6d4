// SPDX-License-Identifier: Apache-2.0
//
// Grouped-query attention of new tokens over cached keys: a task owns a head of a row, token after token. FP32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "host/number_formats.h"
#include "host/rows.h"

namespace replayssm::host {
namespace {

void attend_head(const replayssm_attend_args& args, int64_t row, int32_t head) {
  const int64_t* const cells = args.cells + row * args.width;
  const int64_t slot = args.slots[cells[0]];
  if (slot < 0 || slot >= args.num_slots) return;
  const int32_t dim = args.head_dim, key_head = head / (args.heads / args.kv_heads);
  std::vector<float> q(dim), other(dim), sum(dim), weight(args.capacity);
  auto cached = [&](const replayssm_tensor& cache, int64_t position) {
    const int64_t index = slot * cache.stride[0] + key_head * cache.stride[1] + position * dim;
    load_row(element_address(cache.data, cache.dtype, index), cache.dtype, dim, other.data());
  };
  for (int32_t t = 0; t < args.width && (t == 0 || cells[t] != cells[t - 1]); ++t) {
    const int64_t length = std::min(args.positions[cells[t]] + 1, int64_t{args.capacity});
    load_row(element_address(args.q.data, args.q.dtype, cells[t] * args.q.stride[0] + head * args.q.stride[1]),
             args.q.dtype, dim, q.data());
    float best = -INFINITY, total = 0.0f;
    for (int64_t k = 0; k < length; ++k) {
      cached(args.keys, k);
      float score = 0.0f;
      for (int32_t d = 0; d < dim; ++d) score += q[d] * other[d];
      weight[k] = score * args.scale;
      best = std::max(best, weight[k]);
    }
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t k = 0; k < length; ++k) {
      const float w = std::exp(weight[k] - best);
      total += w;
      cached(args.values, k);
      for (int32_t d = 0; d < dim; ++d) sum[d] += w * other[d];
    }
    for (float& value : sum) value /= total;
    store_row(
        sum.data(), dim, args.out.dtype,
        element_address(args.out.data, args.out.dtype, cells[t] * args.out.stride[0] + head * args.out.stride[1]));
  }
}

}  // namespace

replayssm_status attend(const replayssm_exec&, const replayssm_attend_args& args) {
  const int64_t work = int64_t{args.width} * args.capacity * args.head_dim;
  parallel_for(int64_t{args.rows} * args.heads, work,
               [&](int64_t task) { attend_head(args, task / args.heads, static_cast<int32_t>(task % args.heads)); });
  return REPLAYSSM_OK;
}

}  // namespace replayssm::host
