// SPDX-License-Identifier: Apache-2.0
//
// rms_norm: out = x / sqrt(mean(x^2) + eps) * weight over groups of a row.
//
// A CTA owns a group of a row, a thread up to four vectors of 8 elements, as far apart as the CTA's threads reach. It
// loads each element once and keeps the values to be normed in registers, between them the sum of squares: lanes by
// shuffles, then every thread adds the warps' sums in the same order. The number of threads follows from the width
// alone, so that a row's bits do not depend on its batch.
//
// What a model's layers ask for has kernels of its own: x in FP32 or a 16-bit type, all else in that 16-bit type.
#include "common.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kVector = 8;
constexpr int kMostThreads = 512;
constexpr int kMostVectors = REPLAYSSM_MAX_NORM_WIDTH / kVector / kMostThreads;  // of a thread

struct NormParams {
  replayssm_norm_args args;
  int group_width;
  bool x_aligned, addend_aligned, gate_aligned, weight_aligned, out_aligned;
};

constexpr int kAny = -1;

// kX: dtype of x, kRest: of all other tensors, with aligned rows; kAny: whatever the arguments say.
template <int kVectors, int kX, int kRest>
__global__ __launch_bounds__(kMostThreads) void norm_kernel(const __grid_constant__ NormParams params) {
  begin_early();
  __shared__ float warp_sums[kMostThreads / 32];
  const replayssm_norm_args& args = params.args;
  const int64_t row = blockIdx.x / args.groups;
  const int width = params.group_width;
  const int first = static_cast<int>(blockIdx.x % args.groups) * width;
  auto column = [&](int v) { return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVector; };
  auto place = [&](const replayssm_tensor& tensor, int v) { return row * tensor.stride[0] + first + column(v); };
  auto rest = [&](const replayssm_tensor& tensor) { return kRest == kAny ? tensor.dtype : kRest; };
  const int x_type = kX == kAny ? args.x.dtype : kX;
  const bool x_aligned = kX != kAny || params.x_aligned, weight_aligned = kX != kAny || params.weight_aligned,
             out_aligned = kX != kAny || params.out_aligned;

  const replayssm_tensor& other = args.addend.data ? args.addend : args.gate;
  const bool other_aligned = kX != kAny || (args.addend.data ? params.addend_aligned : params.gate_aligned);
  // Everything is asked for as raw bits before the first conversion waits for any of it.
  Raw<kVector> x_bits[kVectors], other_bits[kVectors], weight_bits[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= width) break;
    x_bits[v] = load_raw<kVector>(args.x.data, x_type, place(args.x, v), x_aligned);
    if (other.data) other_bits[v] = load_raw<kVector>(other.data, rest(other), place(other, v), other_aligned);
    weight_bits[v] = load_raw<kVector>(args.weight.data, rest(args.weight), first + column(v), weight_aligned);
  }
  float value[kVectors][kVector], squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= width) break;
    unpack_raw(x_bits[v], x_type, value[v]);
    if (other.data) {
      float values[kVector];
      unpack_raw(other_bits[v], rest(other), values);
      if (args.addend.data) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) value[v][c] += values[c];
        store_vector<kVector>(args.x.data, x_type, place(args.x, v), x_aligned, value[v]);
      } else {
#pragma unroll
        for (int c = 0; c < kVector; ++c) value[v][c] *= silu(values[c]);
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
  const float scale = rsqrtf(__fdividef(sum, static_cast<float>(width)) + args.eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= width) break;
    float weight[kVector];
    unpack_raw(weight_bits[v], rest(args.weight), weight);
#pragma unroll
    for (int c = 0; c < kVector; ++c) value[v][c] = value[v][c] * scale * weight[c];
    store_vector<kVector>(args.out.data, rest(args.out), place(args.out, v), out_aligned, value[v]);
  }
}

using NormKernel = void(NormParams);

template <int kX, int kRest>
NormKernel* choose_norm(int vectors) {
  if (vectors == 1) return norm_kernel<1, kX, kRest>;
  return vectors == 2 ? norm_kernel<2, kX, kRest> : norm_kernel<kMostVectors, kX, kRest>;
}

NormKernel* choose_norm(int vectors, int x, int rest) {
  if (x == REPLAYSSM_FP32 && rest == REPLAYSSM_BF16) return choose_norm<REPLAYSSM_FP32, REPLAYSSM_BF16>(vectors);
  if (x == REPLAYSSM_BF16 && rest == REPLAYSSM_BF16) return choose_norm<REPLAYSSM_BF16, REPLAYSSM_BF16>(vectors);
  if (x == REPLAYSSM_FP32 && rest == REPLAYSSM_FP16) return choose_norm<REPLAYSSM_FP32, REPLAYSSM_FP16>(vectors);
  if (x == REPLAYSSM_FP16 && rest == REPLAYSSM_FP16) return choose_norm<REPLAYSSM_FP16, REPLAYSSM_FP16>(vectors);
  return choose_norm<kAny, kAny>(vectors);
}

// The dtype of all tensors but x, if it is one and all rows are aligned, else kAny.
int common_type(const NormParams& params) {
  const replayssm_norm_args& args = params.args;
  const int type = args.out.dtype;
  auto fits = [&](const replayssm_tensor& tensor, bool aligned) {
    return !tensor.data || (tensor.dtype == type && aligned);
  };
  const bool all = params.x_aligned && fits(args.addend, params.addend_aligned) &&
                   fits(args.gate, params.gate_aligned) && fits(args.weight, params.weight_aligned) &&
                   fits(args.out, params.out_aligned);
  return all ? type : kAny;
}

}  // namespace

replayssm_status rms_norm(const replayssm_exec& exec, const replayssm_norm_args& args) {
  const int vectors = args.width / args.groups / kVector;
  const int of_a_thread = (vectors + kMostThreads - 1) / kMostThreads;
  const int threads = ((vectors + of_a_thread - 1) / of_a_thread + 31) / 32 * 32;
  const NormParams params{args,
                          args.width / args.groups,
                          rows_aligned(args.x),
                          rows_aligned(args.addend),
                          rows_aligned(args.gate),
                          is_aligned_vector(args.weight),
                          rows_aligned(args.out)};
  return launch_early("rms_norm", choose_norm(of_a_thread, args.x.dtype, common_type(params)), args.rows * args.groups,
                      threads, 0, exec, params);
}

cudaError_t load_norm_kernels() {
  for (int vectors : {1, 2, kMostVectors}) {
    for (int x : {REPLAYSSM_FP32, REPLAYSSM_BF16, REPLAYSSM_FP16}) {
      for (int rest : {int{REPLAYSSM_BF16}, int{REPLAYSSM_FP16}, kAny}) {
        const cudaError_t error = load_kernel(choose_norm(vectors, x, rest));
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
