// SPDX-License-Identifier: Apache-2.0
//
// rms_norm: out = x / sqrt(mean(x^2) + eps) * weight over groups of a row.
//
// A CTA owns a group of a row, a thread up to four vectors of 8 elements, as far apart as the CTA's threads reach. It
// loads each element once and keeps the values to be normed in registers, between them the sum of squares: lanes by
// shuffles, then every thread adds the warps' sums in the same order. The number of threads follows from the width
// alone, so that a row's bits do not depend on its batch.
#include "common.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kVector = 8;
constexpr int kMostThreads = 512;
constexpr int kMostVectors = REPLAYSSM_MAX_NORM_WIDTH / kVector / kMostThreads;  // of a thread

struct NormParams {
  replayssm_norm_args args;
  bool x_aligned, addend_aligned, gate_aligned, weight_aligned, out_aligned;
};

template <int kVectors>
__global__ __launch_bounds__(kMostThreads) void norm_kernel(const __grid_constant__ NormParams params) {
  begin_early();
  __shared__ float warp_sums[kMostThreads / 32];
  const replayssm_norm_args& args = params.args;
  const int64_t row = blockIdx.x / args.groups;
  const int width = args.width / args.groups;
  const int first = static_cast<int>(blockIdx.x % args.groups) * width;
  auto column = [&](int v) { return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVector; };
  auto place = [&](const replayssm_tensor& tensor, int v) { return row * tensor.stride[0] + first + column(v); };

  const replayssm_tensor& other = args.addend.data ? args.addend : args.gate;
  const bool other_aligned = args.addend.data ? params.addend_aligned : params.gate_aligned;
  // Everything is asked for as raw bits before the first conversion waits for any of it.
  Raw<kVector> x_bits[kVectors], other_bits[kVectors], weight_bits[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= width) break;
    x_bits[v] = load_raw<kVector>(args.x.data, args.x.dtype, place(args.x, v), params.x_aligned);
    if (other.data) other_bits[v] = load_raw<kVector>(other.data, other.dtype, place(other, v), other_aligned);
    weight_bits[v] = load_raw<kVector>(args.weight.data, args.weight.dtype, first + column(v), params.weight_aligned);
  }
  float value[kVectors][kVector], squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= width) break;
    unpack_raw(x_bits[v], args.x.dtype, value[v]);
    if (other.data) {
      float values[kVector];
      unpack_raw(other_bits[v], other.dtype, values);
      if (args.addend.data) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) value[v][c] += values[c];
        store_vector<kVector>(args.x.data, args.x.dtype, place(args.x, v), params.x_aligned, value[v]);
      } else {
#pragma unroll
        for (int c = 0; c < kVector; ++c) value[v][c] *= __fdividef(values[c], 1.0f + expf(-values[c]));
      }
    }
#pragma unroll
    for (int c = 0; c < kVector; ++c) squares = fmaf(value[v][c], value[v][c], squares);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) sum += warp_sums[warp];
  const float scale = 1.0f / sqrtf(sum / width + args.eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= width) break;
    float weight[kVector];
    unpack_raw(weight_bits[v], args.weight.dtype, weight);
#pragma unroll
    for (int c = 0; c < kVector; ++c) value[v][c] = value[v][c] * scale * weight[c];
    store_vector<kVector>(args.out.data, args.out.dtype, place(args.out, v), params.out_aligned, value[v]);
  }
}

using NormKernel = void(NormParams);

NormKernel* choose_norm(int vectors) {
  if (vectors == 1) return norm_kernel<1>;
  return vectors == 2 ? norm_kernel<2> : norm_kernel<kMostVectors>;
}

}  // namespace

replayssm_status rms_norm(const replayssm_exec& exec, const replayssm_norm_args& args) {
  const int vectors = args.width / args.groups / kVector;
  const int of_a_thread = (vectors + kMostThreads - 1) / kMostThreads;
  const int threads = ((vectors + of_a_thread - 1) / of_a_thread + 31) / 32 * 32;
  const NormParams params{args,
                          rows_aligned(args.x),
                          rows_aligned(args.addend),
                          rows_aligned(args.gate),
                          is_aligned_vector(args.weight),
                          rows_aligned(args.out)};
  return launch_early("rms_norm", choose_norm(of_a_thread), args.rows * args.groups, threads, 0, exec, params);
}

cudaError_t load_norm_kernels() {
  for (int vectors : {1, 2, kMostVectors}) {
    const cudaError_t error = load_kernel(choose_norm(vectors));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
