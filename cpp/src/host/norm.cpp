// SPDX-License-Identifier: Apache-2.0
//
// RMS norm over groups of a row: a task owns a row, group after group. Values FP32, their squares' sum FP64.
#include <cmath>
#include <vector>

#include "host/number_formats.h"
#include "host/rows.h"

namespace replayssm::host {
namespace {

void norm_row(const replayssm_norm_args& args, int64_t row) {
  const int32_t width = args.width / args.groups;
  std::vector<float> value(width), other(width);
  for (int32_t first = 0; first < args.width; first += width) {
    auto load = [&](const replayssm_tensor& tensor, std::vector<float>& target, int32_t matrix = 0) {
      const int64_t index = matrix * tensor.stride[1] + row * tensor.stride[0] + first;
      load_row(element_address(tensor.data, tensor.dtype, index), tensor.dtype, width, target.data());
    };
    auto store = [&](const replayssm_tensor& tensor) {
      const int64_t index = row * tensor.stride[0] + first;
      store_row(value.data(), width, tensor.dtype, element_address(tensor.data, tensor.dtype, index));
    };
    load(args.x, value);
    if (args.addend.data) {
      for (int32_t i = 0; i < args.addends; ++i) {
        load(args.addend, other, i);
        for (int32_t c = 0; c < width; ++c) value[c] += other[c];
      }
      store(args.x);
    } else if (args.gate.data) {
      load(args.gate, other);
      for (int32_t c = 0; c < width; ++c) value[c] *= other[c] / (1.0f + std::exp(-other[c]));
    }
    double squares = 0.0;
    for (int32_t c = 0; c < width; ++c) squares += double{value[c]} * value[c];
    const float scale = static_cast<float>(1.0 / std::sqrt(squares / width + args.eps));
    load_row(element_address(args.weight.data, args.weight.dtype, first), args.weight.dtype, width, other.data());
    for (int32_t c = 0; c < width; ++c) value[c] = value[c] * scale * other[c];
    store(args.out);
  }
}

}  // namespace

replayssm_status rms_norm(const replayssm_exec&, const replayssm_norm_args& args) {
  parallel_for(args.rows, args.width, [&](int64_t row) { norm_row(args, row); });
  return REPLAYSSM_OK;
}

}  // namespace replayssm::host
