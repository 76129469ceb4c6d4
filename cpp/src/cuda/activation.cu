// SPDX-License-Identifier: Apache-2.0
//
// relu2: x = max(x, 0)^2 in place. A thread owns two vectors of 8 elements, both on their way before it works on one;
// the last elements, or all of memory that is not aligned, come one by one.
#include "common.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kVector = 8;
constexpr int kVectors = 2;
constexpr int kElementThreads = 256;

struct Relu2Params {
  void* x;
  int64_t count;
  bool aligned;
};

template <int kType>
__global__ __launch_bounds__(kElementThreads) void relu2_kernel(const __grid_constant__ Relu2Params params) {
  begin_early();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kVectors * kElementThreads + threadIdx.x;
  auto place = [&](int v) { return (first + v * kElementThreads) * kVector; };
  auto squared = [](float value) { return value <= 0.0f ? 0.0f : value * value; };  // NaN stays
  Raw<kVector> bits[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (place(v) + kVector <= params.count) bits[v] = load_raw<kVector>(params.x, kType, place(v), params.aligned);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (place(v) + kVector <= params.count) {
      float value[kVector];
      unpack_raw(bits[v], kType, value);
#pragma unroll
      for (int c = 0; c < kVector; ++c) value[c] = squared(value[c]);
      store_vector<kVector>(params.x, kType, place(v), params.aligned, value);
    } else {
      for (int64_t i = place(v); i < params.count; ++i) {
        store_scalar(params.x, kType, i, squared(load_scalar(params.x, kType, i)));
      }
    }
  }
}

using Relu2Kernel = void(Relu2Params);

Relu2Kernel* choose_relu2(int dtype) {
  if (dtype == REPLAYSSM_BF16) return relu2_kernel<REPLAYSSM_BF16>;
  return dtype == REPLAYSSM_FP16 ? relu2_kernel<REPLAYSSM_FP16> : relu2_kernel<REPLAYSSM_FP32>;
}

}  // namespace

replayssm_status relu2(const replayssm_exec& exec, void* x, int32_t dtype, int64_t count) {
  constexpr int64_t kOfCta = int64_t{kVectors} * kElementThreads * kVector;
  const Relu2Params params{x, count, reinterpret_cast<uintptr_t>(x) % 16 == 0};
  return launch_early("relu2", choose_relu2(dtype), (count - 1) / kOfCta + 1, kElementThreads, 0, exec, params);
}

cudaError_t load_activation_kernels() {
  for (int dtype : {REPLAYSSM_FP32, REPLAYSSM_BF16, REPLAYSSM_FP16}) {
    const cudaError_t error = load_kernel(choose_relu2(dtype));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
