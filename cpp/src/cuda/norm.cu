// SPDX-License-Identifier: Apache-2.0
//
// rms_norm: out = x / sqrt(mean(x^2) + eps) * weight over groups of a row.
//
// A CTA owns a group of a row, a thread up to four vectors of 8 elements, as far apart as the CTA's threads reach. It
// loads each element once and keeps the values to be normed in registers, between them the sum of squares: lanes by
// shuffles, then every thread adds the warps' sums in the same order. The number of threads follows from the width
// alone, so that a row's bits do not depend on its batch.
//
// What a model's layers ask for has kernels of its own: x in FP32 or a 16-bit type, all else in that 16-bit type; and x
// and two or four addends in FP32, as a product in parts leaves them (runtime/dense.py).
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

// kX: dtype of x, kRest: of all other tensors, with aligned rows; kAny: whatever the arguments say. kAddends: 2 or 4:
// so many addends of kX's dtype; 1: at most one of kRest's, or with kAny any number.
template <int kVectors, int kX, int kRest, int kAddends>
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
  auto other_type = [&](const replayssm_tensor& tensor) { return kAddends > 1 ? kX : rest(tensor); };
  const int x_type = kX == kAny ? args.x.dtype : kX;
  const bool x_aligned = kX != kAny || params.x_aligned, weight_aligned = kX != kAny || params.weight_aligned,
             out_aligned = kX != kAny || params.out_aligned;

  const replayssm_tensor& other = args.addend.data ? args.addend : args.gate;
  const bool other_aligned = kX != kAny || (args.addend.data ? params.addend_aligned : params.gate_aligned);
  // Everything is asked for as raw bits before the first conversion waits for any of it.
  Raw<kVector> x_bits[kVectors], other_bits[kVectors][kAddends], weight_bits[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= width) break;
    x_bits[v] = load_raw<kVector>(args.x.data, x_type, place(args.x, v), x_aligned);
    if (other.data) {
#pragma unroll
      for (int i = 0; i < kAddends; ++i) {
        const int64_t start = place(other, v) + i * other.stride[1];
        other_bits[v][i] = load_raw<kVector>(other.data, other_type(other), start, other_aligned);
      }
    }
    weight_bits[v] = load_raw<kVector>(args.weight.data, rest(args.weight), first + column(v), weight_aligned);
  }
  float value[kVectors][kVector], squares = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= width) break;
    unpack_raw(x_bits[v], x_type, value[v]);
    if (other.data) {
      float values[kVector];
      unpack_raw(other_bits[v][0], other_type(other), values);
      if (args.addend.data) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) value[v][c] += values[c];
#pragma unroll
        for (int i = 1; i < kAddends; ++i) {
          unpack_raw(other_bits[v][i], kX, values);
#pragma unroll
          for (int c = 0; c < kVector; ++c) value[v][c] += values[c];
        }
        for (int i = 1; kX == kAny && i < args.addends; ++i) {
          load_vector<kVector>(other.data, other.dtype, place(other, v) + i * other.stride[1], other_aligned, values);
#pragma unroll
          for (int c = 0; c < kVector; ++c) value[v][c] += values[c];
        }
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

template <int kX, int kRest, int kAddends = 1>
NormKernel* choose_norm(int vectors) {
  if (vectors == 1) return norm_kernel<1, kX, kRest, kAddends>;
  return vectors == 2 ? norm_kernel<2, kX, kRest, kAddends> : norm_kernel<kMostVectors, kX, kRest, kAddends>;
}

template <int kRest>
NormKernel* choose_norm(int vectors, int x, int addends) {
  if (x == kRest) return choose_norm<kRest, kRest>(vectors);
  if (addends == 2) return choose_norm<REPLAYSSM_FP32, kRest, 2>(vectors);
  return addends == 4 ? choose_norm<REPLAYSSM_FP32, kRest, 4>(vectors) : choose_norm<REPLAYSSM_FP32, kRest>(vectors);
}

NormKernel* choose_norm(int vectors, int x, int rest, int addends) {
  const bool own = x == REPLAYSSM_FP32 ? addends != kAny : x == rest && addends == 1;
  if (own && rest == REPLAYSSM_BF16) return choose_norm<REPLAYSSM_BF16>(vectors, x, addends);
  if (own && rest == REPLAYSSM_FP16) return choose_norm<REPLAYSSM_FP16>(vectors, x, addends);
  return choose_norm<kAny, kAny>(vectors);
}

// The dtype of weight and output and of a gate, if it is one and all rows are aligned, else kAny.
int common_type(const NormParams& params) {
  const replayssm_norm_args& args = params.args;
  const int type = args.out.dtype;
  auto fits = [&](const replayssm_tensor& tensor, bool aligned) {
    return !tensor.data || (tensor.dtype == type && aligned);
  };
  const bool all = params.x_aligned && fits(args.gate, params.gate_aligned) &&
                   fits(args.weight, params.weight_aligned) && fits(args.out, params.out_aligned);
  return all ? type : kAny;
}

// How many addends a kernel of its own would take: one like the output or none, or two or four like x; else kAny.
int own_addends(const NormParams& params) {
  const replayssm_norm_args& args = params.args;
  if (!args.addend.data) return 1;
  if (!params.addend_aligned) return kAny;
  if (args.addends == 1) return args.addend.dtype == args.out.dtype ? 1 : kAny;
  const bool fits = args.addends == 2 || args.addends == 4;
  return fits && args.addend.dtype == args.x.dtype ? args.addends : kAny;
}

}  // namespace

replayssm_status rms_norm(const replayssm_exec& exec, const replayssm_norm_args& args) {
  const int vectors = args.width / args.groups / kVector;
  const int of_a_thread = (vectors + kMostThreads - 1) / kMostThreads;
  const int threads = ((vectors + of_a_thread - 1) / of_a_thread + 31) / 32 * 32;
  const bool addend_aligned =
      rows_aligned(args.addend) && args.addend.stride[1] * element_size(args.addend.dtype) % 16 == 0;
  const NormParams params{args,
                          args.width / args.groups,
                          rows_aligned(args.x),
                          addend_aligned,
                          rows_aligned(args.gate),
                          is_aligned_vector(args.weight),
                          rows_aligned(args.out)};
  NormKernel* const kernel = choose_norm(of_a_thread, args.x.dtype, common_type(params), own_addends(params));
  return launch_early("rms_norm", kernel, args.rows * args.groups, threads, 0, exec, params);
}

cudaError_t load_norm_kernels() {
  for (int vectors : {1, 2, kMostVectors}) {
    for (int x : {REPLAYSSM_FP32, REPLAYSSM_BF16, REPLAYSSM_FP16}) {
      for (int rest : {int{REPLAYSSM_BF16}, int{REPLAYSSM_FP16}, kAny}) {
        for (int addends : {1, 2, 4}) {
          const cudaError_t error = load_kernel(choose_norm(vectors, x, rest, addends));
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
