// SPDX-License-Identifier: Apache-2.0
//
// attend: new tokens of each row over the cached keys of its slot, grouped-query attention.
//
// A CTA owns up to 32 queries of a row that share a key head: query heads and new tokens alike, token by token. Its
// warps take blocks of 16 keys in turn, each by itself: asynchronous copies of keys and values two blocks ahead, scores
// and weighted values by tensor cores, a running maximum and sum. Scores stay in registers, where they have the order
// in which the product with the values wants its weights. At the end the warps' sums are brought to one maximum and
// added in order. Keys are read once, and none behind the newest token.
//
// Which keys a warp takes, and so the order of every sum, depends on their positions alone: a token's bits do not
// depend on its batch, nor on the tokens beside it. The exception are values that are not finite: a key behind a token
// has weight 0 in the product, and 0 times such a value is a NaN.
#include <algorithm>
#include <utility>

#include "common.cuh"
#include "mma.cuh"
#include "pipeline.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kBlock = 16;  // keys
constexpr int kStages = 2;
constexpr int kWarps = kThreads / 32;
constexpr int kMostQueries = 32;  // of a CTA
constexpr float kLog2E = 1.44269504f;

struct AttendParams {
  replayssm_attend_args args;
  int32_t parts;  // CTAs of a row and key head
};

// Element 8 * chunk of a row, of rows of kDim 16-bit elements whose chunks are exchanged so that the same chunk of
// eight rows lies in different banks.
template <int kDim>
__device__ inline int swizzled(int row, int chunk) {
  return row * kDim + (chunk ^ (row & 7)) * 8;
}

template <int kDim, int kTiles>
constexpr int kSharedBytes = (kTiles * 16 * kDim + kWarps * kStages * 2 * kBlock * kDim) * 2;

template <typename T, int kDim, int kTiles>
__global__ __launch_bounds__(kThreads) void attend_kernel(const __grid_constant__ AttendParams params) {
  begin_early();
  constexpr int kChunks = kDim / 8;
  constexpr int kQueries = kTiles * 16;
  constexpr int kPartialStride = kDim + 8;
  static_assert(kQueries * kPartialStride * 4 <= kWarps * kStages * 2 * kBlock * kDim * 2);
  extern __shared__ uint4 shared[];
  __shared__ float maxima[kWarps][kQueries], sums[kWarps][kQueries];
  const replayssm_attend_args& args = params.args;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;

  const int part = static_cast<int>(blockIdx.x % params.parts);
  const int key_head = static_cast<int>(blockIdx.x / params.parts % args.kv_heads);
  const int64_t row = blockIdx.x / params.parts / args.kv_heads;
  const int sharing = args.heads / args.kv_heads;
  const int first = part * kMostQueries;
  const int queries = min(sharing * args.width - first, kQueries);
  const int64_t* const cells = args.cells + row * args.width;
  auto token_of = [&](int query) { return cells[(first + query) / sharing]; };
  // A row's last token stands for those that it lacks.
  if (first >= sharing && cells[first / sharing] == cells[first / sharing - 1]) return;
  const int64_t slot = args.slots[cells[0]];
  if (slot < 0 || slot >= args.num_slots) return;
  const int length = static_cast<int>(min(args.positions[token_of(queries - 1)] + 1, int64_t{args.capacity}));

  T* const staged_queries = reinterpret_cast<T*>(shared);
  T* const stages = staged_queries + kQueries * kDim;
  T* const own_stages = stages + warp * kStages * 2 * kBlock * kDim;
  const T* const keys =
      static_cast<const T*>(args.keys.data) + slot * args.keys.stride[0] + key_head * args.keys.stride[1];
  const T* const values =
      static_cast<const T*>(args.values.data) + slot * args.values.stride[0] + key_head * args.values.stride[1];
  const int blocks = (length + kBlock - 1) / kBlock;
  auto request = [&](int block, int stage) {
    T* const target = own_stages + stage * 2 * kBlock * kDim;
    if (block < blocks) {
#pragma unroll
      for (int i = 0; i < kBlock * kChunks / 32; ++i) {
        const int key = (lane + 32 * i) / kChunks, chunk = (lane + 32 * i) % kChunks;
        const bool exists = block * kBlock + key < length;
        const int64_t source = exists ? static_cast<int64_t>(block * kBlock + key) * kDim + chunk * 8 : 0;
        request_16_bytes(target + swizzled<kDim>(key, chunk), keys + source, exists);
        request_16_bytes(target + kBlock * kDim + swizzled<kDim>(key, chunk), values + source, exists);
      }
    }
    close_group();
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) request(warp + stage * kWarps, stage);

  for (int i = threadIdx.x; i < kQueries * kChunks; i += kThreads) {
    const int query = i / kChunks, chunk = i % kChunks;
    uint4 bits = {};
    if (query < queries) {
      const int head = key_head * sharing + (first + query) % sharing;
      bits = *reinterpret_cast<const uint4*>(static_cast<const T*>(args.q.data) + token_of(query) * args.q.stride[0] +
                                             head * args.q.stride[1] + chunk * 8);
    }
    *reinterpret_cast<uint4*>(staged_queries + swizzled<kDim>(query, chunk)) = bits;
  }
  int newest[kTiles][2];  // key of queries g and g + 8 of a tile
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = tile * 16 + half * 8 + g;
      newest[tile][half] = query < queries ? static_cast<int>(args.positions[token_of(query)]) : 0;
    }
  __syncthreads();

  const float scale = args.scale * kLog2E;
  float out[kTiles][kDim / 8][4] = {};
  float maximum[kTiles][2], sum[kTiles][2] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) maximum[tile][0] = maximum[tile][1] = -INFINITY;
  const int matrix = lane / 8, matrix_row = lane % 8;

  int stage = 0;
#pragma unroll 1
  for (int block = warp; block < blocks; block += kWarps) {
    await_groups<kStages - 1>();
    __syncwarp();
    const T* const staged_keys = own_stages + stage * 2 * kBlock * kDim;
    const T* const staged_values = staged_keys + kBlock * kDim;

    float score[kTiles][2][4] = {};
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t key[4];  // of keys 0..7 and 8..15, two registers each
      load_matrices(key, staged_keys + swizzled<kDim>(matrix_row + matrix / 2 * 8, k * 2 + matrix % 2));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t q[4];
        const int query = tile * 16 + matrix_row + matrix % 2 * 8;
        load_matrices(q, staged_queries + swizzled<kDim>(query, k * 2 + matrix / 2));
        multiply_pairs<T>(score[tile][0], q[0], q[1], q[2], q[3], key[0], key[1]);
        multiply_pairs<T>(score[tile][1], q[0], q[1], q[2], q[3], key[2], key[3]);
      }
    }

    uint32_t weight[kTiles][4];
    bool rescale = false;
    float correction[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = maximum[tile][half];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& s = score[tile][n][half * 2 + c];
            s = block * kBlock + n * 8 + t * 2 + c <= newest[tile][half] ? s * scale : -INFINITY;
            best = fmaxf(best, s);
          }
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
        const float base = best == -INFINITY ? 0.0f : best;  // no key yet
        correction[tile][half] = exp2f(maximum[tile][half] - base);
        rescale |= maximum[tile][half] != best;
        maximum[tile][half] = best;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& s = score[tile][n][half * 2 + c];
            s = exp2f(s - base);
            added += s;
          }
        sum[tile][half] = fmaf(sum[tile][half], correction[tile][half], added);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          weight[tile][n * 2 + half] = pack_pair<T>(score[tile][n][half * 2], score[tile][n][half * 2 + 1]);
    }
    if (__any_sync(~0u, rescale)) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) out[tile][n][i] *= correction[tile][i / 2];
    }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t value[4];  // of columns 0..7 and 8..15, two registers each
      load_transposed(value, staged_values + swizzled<kDim>(matrix_row + matrix % 2 * 8, n * 2 + matrix / 2));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t (&w)[4] = weight[tile];
        multiply_pairs<T>(out[tile][2 * n], w[0], w[1], w[2], w[3], value[0], value[1]);
        multiply_pairs<T>(out[tile][2 * n + 1], w[0], w[1], w[2], w[3], value[2], value[3]);
      }
    }
    __syncwarp();
    request(block + kStages * kWarps, stage);
    stage = (stage + 1) % kStages;
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& total = sum[tile][half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (t == 0) {
        maxima[warp][tile * 16 + half * 8 + g] = maximum[tile][half];
        sums[warp][tile * 16 + half * 8 + g] = total;
      }
    }
  await_requests();
  float* const partial = reinterpret_cast<float*>(stages);  // [kQueries][kDim]; no warp reads its stages any more
  for (int turn = 0; turn < kWarps; ++turn) {
    __syncthreads();
    if (turn != warp) continue;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = tile * 16 + half * 8 + g;
        float best = maxima[0][query];
        for (int w = 1; w < kWarps; ++w) best = fmaxf(best, maxima[w][query]);
        const float factor = exp2f(maximum[tile][half] - best);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          float2* const place = reinterpret_cast<float2*>(partial + query * kPartialStride + n * 8 + t * 2);
          const float2 before = turn == 0 ? make_float2(0.0f, 0.0f) : *place;
          *place = make_float2(fmaf(out[tile][n][half * 2], factor, before.x),
                               fmaf(out[tile][n][half * 2 + 1], factor, before.y));
        }
      }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < queries * kChunks; i += kThreads) {
    const int query = i / kChunks, chunk = i % kChunks;
    float best = maxima[0][query], total = 0.0f;
    for (int w = 1; w < kWarps; ++w) best = fmaxf(best, maxima[w][query]);
    for (int w = 0; w < kWarps; ++w) total = fmaf(sums[w][query], exp2f(maxima[w][query] - best), total);
    const float share = 1.0f / total;
    float y[8];
    load_shared<8>(partial + query * kPartialStride + chunk * 8, y);
#pragma unroll
    for (int c = 0; c < 8; ++c) y[c] *= share;
    const int head = key_head * sharing + (first + query) % sharing;
    store_vector<8>(args.out.data, kDtypeOf<T>,
                    token_of(query) * args.out.stride[0] + head * args.out.stride[1] + chunk * 8, true, y);
  }
}

using AttendKernel = void(AttendParams);
struct Choice {
  AttendKernel* kernel;
  int shared;
};

template <typename T, int kDim>
Choice choose(int queries) {
  if (queries <= 16) return {attend_kernel<T, kDim, 1>, kSharedBytes<kDim, 1>};
  return {attend_kernel<T, kDim, 2>, kSharedBytes<kDim, 2>};
}

Choice choose(int32_t dtype, int head_dim, int queries) {
  if (dtype == REPLAYSSM_BF16) {
    return head_dim == 64 ? choose<__nv_bfloat16, 64>(queries) : choose<__nv_bfloat16, 128>(queries);
  }
  return head_dim == 64 ? choose<__half, 64>(queries) : choose<__half, 128>(queries);
}

}  // namespace

replayssm_status attend(const replayssm_exec& exec, const replayssm_attend_args& args) {
  const int32_t dtype = args.q.dtype;
  if (dtype == REPLAYSSM_FP32 || (args.head_dim != 64 && args.head_dim != 128)) {
    return fail(REPLAYSSM_UNSUPPORTED, "attend: CUDA has it for BF16 and FP16 with head_dim 64 or 128, got %s with %d",
                replayssm_dtype_name(dtype), args.head_dim);
  }
  for (const auto& [name, tensor] : {std::pair{"q", args.q}, std::pair{"keys", args.keys},
                                     std::pair{"values", args.values}, std::pair{"out", args.out}}) {
    if (!is_aligned(tensor))
      return fail(REPLAYSSM_INVALID_ARGUMENT, "%s: expected rows at multiples of 16 bytes", name);
  }
  const int64_t queries = int64_t{args.heads / args.kv_heads} * args.width;
  const int64_t parts = (queries + kMostQueries - 1) / kMostQueries;
  const Choice choice = choose(dtype, args.head_dim, static_cast<int>(std::min<int64_t>(queries, kMostQueries)));
  const AttendParams params{args, static_cast<int32_t>(parts)};
  return launch_early("attend", choice.kernel, int64_t{args.rows} * args.kv_heads * parts, kThreads, choice.shared,
                      exec, params);
}

cudaError_t load_attention_kernels() {
  for (int32_t dtype : {REPLAYSSM_BF16, REPLAYSSM_FP16}) {
    for (int head_dim : {64, 128}) {
      for (int queries : {16, kMostQueries}) {
        const Choice choice = choose(dtype, head_dim, queries);
        cudaError_t error = load_kernel(choice.kernel);
        if (error == cudaSuccess && choice.shared > kUnaskedShared) error = permit_shared(choice.kernel);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
