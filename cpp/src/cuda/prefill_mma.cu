// SPDX-License-Identifier: Apache-2.0
//
// prefill on tensor cores: state_dim 128, head_dim a multiple of 16 up to 80, BF16 activations.
//
// The prompt is walked in chunks of 32 tokens. With e(j,t) = a_{j+1} + ... + a_t inside a chunk, S the state before it
// and S' the one after,
//
//     y_t = exp(e(0,t)) S C_t + sum_{j<=t} m_tj x_j,        m_tj = delta_j exp(e(j,t)) (B_j . C_t), m_tt including D
//     S'  = exp(e(0,32)) S + sum_j w_j x_j (outer) B_j,     w_j  = delta_j exp(e(j,32))
//
// A CTA owns a head and walks it alone: the state stays in registers, in float32, and no partial result goes through
// global memory. Its warps hand each other stages of a ring (pipeline.cuh):
//  1. Each preparing warp takes every n-th chunk. It requests B, C and x by asynchronous copies, and forms C B^T, but
//     for the block of 16 by 16 tokens above the diagonal, out of it m, and w x in the order in which the others take
//     it. Exponents are differences of sums in float64, so that they are as exact as sums of their own terms.
//  2. Two consuming warps have a slice of the state, 16 rows, each half of the columns. The state is the left operand
//     of S C as it lies in the registers, two column tiles a step of the product. Each warp has a part of the sums of
//     all tokens; they exchange them, so that each has half of the tokens whole, to which it adds m x.
//
// All products are mma.m16n8k16 in BF16 with float32 sums. B, C and x are exact; S and m go in as two parts of 8 bits,
// which leaves an error of 2^-17, well below the rounding of y. The state must be as good as float32's: w x goes in as
// three parts, 24 bits, and each chunk's sum is formed from zero, since the tensor cores round sums towards zero, and
// then added to the state by one rounding.
//
// A token must not touch those before it, even if it is a NaN, of which zero times is one: x that is not finite is left
// out of the product with m, and added by the CUDA cores to the tokens that it belongs to.
//
// Chunks are counted from the first token of the call. So a prompt that is cut at multiples of 32 keeps its bits, with
// a float32 checkpoint; elsewhere it keeps them to rounding.
#include <algorithm>

#include "head_state.cuh"
#include "pipeline.cuh"

namespace replayssm {
namespace cuda {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kChunk = 32;  // tokens: one a lane of a preparing warp
constexpr int kBlockTokens = 16, kTileTokens = 8;
constexpr int kTiles = kChunk / kTileTokens, kSteps = kChunk / kBlockTokens;
constexpr int kStateTiles = kMaxStateDim / 8;
constexpr int kParts = 2, kPartTiles = kStateTiles / kParts, kOwnTiles = kTiles / kParts;  // of the warps of a slice
// With few slices there are registers for everything that a consuming warp has under way.
constexpr int kMaxSlices = 5, kFewSlices = 4;
constexpr int kProducers = 4, kMaxStages = 6;
constexpr int prefill_threads(int slices) { return 32 * (slices * kParts + kProducers); }

// Elements from token to token of B and C, and of m, and from row to row of a state on its way between layouts; x has
// head_dim + kPad. Eight rows of 16 bytes lie in different banks.
constexpr int kPad = 8;
constexpr int kVectorStride = kMaxStateDim + kPad, kMixStride = kChunk + kPad, kStateStride = kMaxStateDim + 4;
constexpr int kBarrierBytes = round_up(3 * kMaxStages * static_cast<int>(sizeof(Barrier)), 128);
// What a slice's warps exchange of a chunk and of the next.
constexpr int kSwapBytes = 2 * kParts * kOwnTiles * 32 * static_cast<int>(sizeof(float4));

// A stage: what a chunk brings and what is prepared of it. Offsets in bytes.
struct StageLayout {
  static constexpr int kC = 0, kB = kC + kChunk * kVectorStride * 2;
  static constexpr int kHigh = kB + kChunk * kVectorStride * 2;  // the parts of m, [t][j]
  static constexpr int kLow = kHigh + kChunk * kMixStride * 2;
  static constexpr int kSinceStart = kLow + kChunk * kMixStride * 2;  // exp(e(0,t))
  static constexpr int kWeight = kSinceStart + kChunk * 4;            // w
  static constexpr int kDecay = kWeight + kChunk * 4;                 // exp(e(0,32))
  static constexpr int kNotFinite = kDecay + 4;                       // whether a slice's x is not all finite
  static constexpr int kX = round_up(kNotFinite + kMaxSlices * 4, 16);

  __host__ __device__ static constexpr int x_stride(int head_dim) { return head_dim + kPad; }
  // The parts of w x of each slice, as its warps take them: [part][step] 16 bytes a lane.
  static constexpr int kSliceBytes = 3 * kSteps * 32 * 16;
  __host__ __device__ static constexpr int parts(int head_dim) { return kX + kChunk * x_stride(head_dim) * 2; }
  __host__ __device__ static constexpr int bytes(int head_dim) {
    return round_up(parts(head_dim) + head_dim / kSliceWidth * kSliceBytes, 128);
  }
};

__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b) {
  multiply_pairs<Bf16>(d, a[0], a[1], a[2], a[3], b[0], b[1]);
}
__device__ inline uint32_t transpose(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Of a pair: the sign bits of what is not finite.
__device__ inline uint32_t not_finite(uint32_t pair) { return ((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u; }

// The two warps of a slice wait for each other, and see what each stored before.
__device__ inline void meet(int barrier) { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }

struct PrefillParams {
  ScanParams scan;
  int stages;
  bool paired;  // outputs can be stored two at a time
};

// The work of a CTA's warps on one head of one row.
struct Prefill {
  const PrefillParams& params;
  const ScanParams& scan;
  const replayssm_scan_args& args;
  const int head, P, x_stride, stage_bytes;
  const int64_t first_token;
  const int count, chunks;
  float4* const swap;
  char* const stages;
  Barrier *const loaded, *const ready, *const empty;  // of each stage
  const int consumers;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  __device__ Prefill(const PrefillParams& params, const replayssm_plan_row& row, int head, char* shared)
      : params(params),
        scan(params.scan),
        args(params.scan.args),
        head(head),
        P(params.scan.problem.geometry.head_dim),
        x_stride(StageLayout::x_stride(P)),
        stage_bytes(StageLayout::bytes(P)),
        first_token(row.first_token),
        count(row.count),
        chunks((row.count + kChunk - 1) / kChunk),
        swap(reinterpret_cast<float4*>(shared + kBarrierBytes)),
        stages(shared + kBarrierBytes + P / kSliceWidth * kSwapBytes),
        loaded(reinterpret_cast<Barrier*>(shared)),
        ready(loaded + kMaxStages),
        empty(ready + kMaxStages),
        consumers(P / kSliceWidth * kParts) {}

  __device__ void init_barriers() const {
    const int stage = threadIdx.x;
    if (stage >= params.stages) return;
    init_barrier(loaded + stage, 33);
    init_barrier(ready + stage, 1);
    init_barrier(empty + stage, consumers);
  }

  // ---- preparation -------------------------------------------------------------------------------------------------

  // A chunk's B, C and x; zeros for tokens beyond the last.
  __device__ void request(int chunk, int stage) const {
    char* const base = stages + stage * stage_bytes;
    const int tokens = min(count - chunk * kChunk, kChunk);
    const int state_group = head / (scan.problem.geometry.num_heads / scan.problem.geometry.num_groups);
    auto start_of = [&](const replayssm_tensor& tensor, int index) {
      return static_cast<const Bf16*>(tensor.data) + (first_token + chunk * kChunk) * tensor.stride[0] +
             index * tensor.stride[1];
    };
    auto request_rows = [&](int offset, int stride, int columns, const Bf16* source, int64_t source_stride,
                            bool aligned) {
      Bf16* const target = reinterpret_cast<Bf16*>(base + offset);
      const int pieces = columns / 8;
      int token = lane / pieces, piece = lane % pieces;
      if (aligned && tokens == kChunk && 32 % pieces == 0) {  // the lanes keep their columns
        const int rows = 32 / pieces;
        Bf16* to = target + token * stride + piece * 8;
        const Bf16* from = source + token * source_stride + piece * 8;
#pragma unroll 8
        for (int i = 0; i < pieces; ++i, to += rows * stride, from += rows * source_stride) request_16_bytes(to, from);
        return;
      }
#pragma unroll 1
      for (int i = lane; i < kChunk * pieces; i += 32) {
        Bf16* const to = target + token * stride + piece * 8;
        if (token < tokens) {
          request_input(to, source + token * source_stride + piece * 8, aligned);
        } else {
          *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
        token += 32 / pieces, piece += 32 % pieces;
        if (piece >= pieces) ++token, piece -= pieces;
      }
    };
    request_rows(StageLayout::kC, kVectorStride, kMaxStateDim, start_of(args.C, state_group), args.C.stride[0],
                 scan.c_aligned);
    request_rows(StageLayout::kB, kVectorStride, kMaxStateDim, start_of(args.B, state_group), args.B.stride[0],
                 scan.b_aligned);
    request_rows(StageLayout::kX, x_stride, P, start_of(args.x, head), args.x.stride[0], scan.x_aligned);
    arrive_with_requests(loaded + stage);
    __syncwarp();
    if (lane == 0) arrive(loaded + stage);  // for what was not requested, but stored
  }

  // dt of the lane's token of a chunk.
  __device__ uint32_t step_bits(int chunk) const {
    const int token = chunk * kChunk + lane;
    if (token >= count) return 0;
    return load_bits(args.dt.data, args.dt.dtype, (first_token + token) * args.dt.stride[0] + head * args.dt.stride[1]);
  }

  // The lane's token: delta, and the sum of the chunk's log decays up to it as high + low.
  struct Token {
    float delta, high, low;
  };
  __device__ Token weigh(uint32_t bits, bool exists, float A, float bias) const {
    const float delta =
        exists ? discretised_step(bits_to_float(bits, args.dt.dtype), bias, args.dt_min, args.dt_max) : 0.0f;
    const float log_decay = __fmul_rn(A, delta);
    double sum = log_decay < -1e4f ? -1e4f : log_decay;  // which is as good as minus infinity, but has differences
#pragma unroll
    for (int distance = 1; distance < kChunk; distance *= 2) {
      const double before = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += before;
    }
    const float high = static_cast<float>(sum);
    return {delta, high, static_cast<float>(sum - high)};
  }

  // m of the chunk: three blocks of 16 by 16 tokens, the one above the diagonal is not needed.
  __device__ void mix(char* base, const Token& own, float skip) const {
    const Bf16* const C =
        reinterpret_cast<const Bf16*>(base + StageLayout::kC) + lane % 16 * kVectorStride + lane / 16 * 8;
    const Bf16* const B = reinterpret_cast<const Bf16*>(base + StageLayout::kB) +
                          (lane / 16 * 8 + lane % 8) * kVectorStride + lane / 8 % 2 * 8;
    float product[3][2][4] = {};  // of blocks (0, 0), (1, 0), (1, 1); by tile of j
#pragma unroll
    for (int k = 0; k < kStateTiles / 2; ++k) {
      uint32_t c[2][4], b[2][4];
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        load_matrices(c[block], C + block * kBlockTokens * kVectorStride + k * 16);
        load_matrices(b[block], B + block * kBlockTokens * kVectorStride + k * 16);
      }
#pragma unroll
      for (int block = 0; block < 3; ++block)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
          multiply(product[block][tile], c[(block + 1) / 2], b[block / 2] + 2 * tile);
    }
    float high_t[4], low_t[4];  // of tokens 8 i + g
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high_t[i] = __shfl_sync(~0u, own.high, i * 8 + g);
      low_t[i] = __shfl_sync(~0u, own.low, i * 8 + g);
    }
#pragma unroll
    for (int j_tile = 0; j_tile < kTiles; ++j_tile) {
      const int j = j_tile * 8 + t * 2;
      float delta[2], high[2], low[2];
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        delta[v] = __shfl_sync(~0u, own.delta, j + v);
        high[v] = __shfl_sync(~0u, own.high, j + v);
        low[v] = __shfl_sync(~0u, own.low, j + v);
      }
#pragma unroll
      for (int i = j_tile / 2 * 2; i < kTiles; ++i) {  // the tile of t
        const float (&similarity)[4] = product[i / 2 + j_tile / 2][j_tile % 2];
        const int token = i * 8 + g;
        float value[2];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          // m has 16 bits: an exponential that is right to 20 will do.
          const float weight = delta[v] * __expf((high_t[i] - high[v]) + (low_t[i] - low[v]));
          value[v] = token < j + v ? 0.0f : fmaf(weight, similarity[i % 2 * 2 + v], token == j + v ? skip : 0.0f);
        }
        const int place = (token * kMixStride + j) * 2;
        *reinterpret_cast<uint32_t*>(base + StageLayout::kHigh + place) = take_part(value[0], value[1]);
        *reinterpret_cast<uint32_t*>(base + StageLayout::kLow + place) = pack_pair<Bf16>(value[0], value[1]);
      }
    }
  }

  // The factors of the state and of its new terms.
  __device__ void store_weights(char* base, const Token& own) const {
    const float total_high = __shfl_sync(~0u, own.high, kChunk - 1), total_low = __shfl_sync(~0u, own.low, kChunk - 1);
    reinterpret_cast<float*>(base + StageLayout::kSinceStart)[lane] = expf(own.high + own.low);
    reinterpret_cast<float*>(base + StageLayout::kWeight)[lane] =
        __fmul_rn(own.delta, expf((total_high - own.high) + (total_low - own.low)));
    if (lane == 0) *reinterpret_cast<float*>(base + StageLayout::kDecay) = expf(total_high + total_low);
  }

  // x^T of 16 rows and 16 tokens, a left operand.
  __device__ void load_x(const char* base, int p0, int step, uint32_t (&xs)[4]) const {
    load_transposed(xs, reinterpret_cast<const Bf16*>(base + StageLayout::kX) +
                            (step * 16 + lane / 16 * 8 + lane % 8) * x_stride + p0 + lane / 8 % 2 * 8);
  }

  // w x in three parts.
  __device__ void split_inputs(char* base) const {
    const float* const weights = reinterpret_cast<const float*>(base + StageLayout::kWeight) + t * 2;
#pragma unroll 1
    for (int slice = 0; slice < P / kSliceWidth; ++slice) {
      uint4* const parts =
          reinterpret_cast<uint4*>(base + StageLayout::parts(P) + slice * StageLayout::kSliceBytes) + lane;
      uint32_t bad = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t xs[4], part[3][4];
        load_x(base, slice * kSliceWidth, step, xs);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 pair = unpack_pair<Bf16>(xs[i]);
          const float2 weight = *reinterpret_cast<const float2*>(weights + step * 16 + i / 2 * 8);
          float first = __fmul_rn(weight.x, pair.x), second = __fmul_rn(weight.y, pair.y);
          part[0][i] = take_part(first, second);
          part[1][i] = take_part(first, second);
          part[2][i] = pack_pair<Bf16>(first, second);
          bad |= not_finite(xs[i]);
        }
#pragma unroll
        for (int p = 0; p < 3; ++p) {
          parts[(p * kSteps + step) * 32] = make_uint4(part[p][0], part[p][1], part[p][2], part[p][3]);
        }
      }
      const bool any = __any_sync(~0u, bad != 0);
      if (lane == 0) reinterpret_cast<uint32_t*>(base + StageLayout::kNotFinite)[slice] = any;
    }
  }

  // Every kProducers-th chunk.
  __device__ void produce(int producer, float A) const {
    const float bias = args.dt_bias.data ? load_scalar(args.dt_bias.data, args.dt_bias.dtype, head) : 0.0f;
    const float skip = args.D.data ? load_scalar(args.D.data, args.D.dtype, head) : 0.0f;
    int stage = producer;
    uint32_t phase = 0;
    while (stage >= params.stages) stage -= params.stages, phase ^= 1;
    uint32_t bits = step_bits(producer);
#pragma unroll 1
    for (int chunk = producer; chunk < chunks; chunk += kProducers) {
      await(empty + stage, phase ^ 1);
      __syncwarp();
      request(chunk, stage);
      const Token own = weigh(bits, chunk * kChunk + lane < count, A, bias);
      bits = step_bits(chunk + kProducers);
      char* const base = stages + stage * stage_bytes;
      store_weights(base, own);
      await(loaded + stage, phase);
      __syncwarp();
      split_inputs(base);
      mix(base, own, skip);
      __syncwarp();
      if (lane == 0) arrive(ready + stage);
      stage += kProducers;
      while (stage >= params.stages) stage -= params.stages, phase ^= 1;
    }
  }

  // ---- consumption -------------------------------------------------------------------------------------------------

  // The slice from row p0 on; lane (g, t) has of tile i (rows g, g + 8; columns 8 i + 2 t, + 1).
  using Slice = float[kPartTiles][4];

  __device__ void exchange(Slice& state, int p0, int part, float* shared, bool store) const {
#pragma unroll
    for (int i = 0; i < kPartTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2& pair = *reinterpret_cast<float2*>(shared + (p0 + half * 8 + g) * kStateStride +
                                                  (part * kPartTiles + i) * 8 + t * 2);
        if (store) {
          pair = make_float2(state[i][2 * half], state[i][2 * half + 1]);
        } else {
          state[i][2 * half] = pair.x;
          state[i][2 * half + 1] = pair.y;
        }
      }
  }

  __device__ void consume(Slice& state, int slice, int part) const {
    int stage = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      await(loaded + stage, phase);
      await(ready + stage, phase);
      __syncwarp();
      float y[kOwnTiles][4];  // rows g, g + 8; tokens 16 part + 8 tile + 2 t, + 1
      advance(stages + stage * stage_bytes, slice, part, chunk % 2, state, y);
      __syncwarp();
      if (lane == 0) arrive(empty + stage);
      store_outputs(chunk * kChunk + part * kBlockTokens, slice * kSliceWidth, y);
      if (++stage == params.stages) stage = 0, phase ^= 1;
    }
  }

  // y = exp(e(0,t)) S C_t + sum_j m_tj x_j, and S'.
  __device__ void advance(const char* base, int slice, int part, int buffer, Slice& state,
                          float (&y)[kOwnTiles][4]) const {
    const int p0 = slice * kSliceWidth;
    const float decay = *reinterpret_cast<const float*>(base + StageLayout::kDecay);
    const bool all_finite = reinterpret_cast<const uint32_t*>(base + StageLayout::kNotFinite)[slice] == 0;
    uint32_t wx[3][kSteps][4];
    const uint4* const parts =
        reinterpret_cast<const uint4*>(base + StageLayout::parts(P) + slice * StageLayout::kSliceBytes) + lane;
#pragma unroll
    for (int p = 0; p < 3; ++p)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 four = parts[(p * kSteps + step) * 32];
        wx[p][step][0] = four.x, wx[p][step][1] = four.y, wx[p][step][2] = four.z, wx[p][step][3] = four.w;
      }

    const Bf16* const C = reinterpret_cast<const Bf16*>(base + StageLayout::kC) +
                          (lane / 16 * 8 + lane % 8) * kVectorStride + part * kPartTiles * 8 + lane / 8 % 2 * 8;
    const Bf16* const B = reinterpret_cast<const Bf16*>(base + StageLayout::kB) + lane % 16 * kVectorStride +
                          part * kPartTiles * 8 + lane / 16 * 8;
    float sums[kTiles][4] = {};  // S C of these columns
    constexpr int kQuarter = kStateTiles / 4;
#pragma unroll
    for (int q = 0; q < kPartTiles; q += kQuarter) {
#pragma unroll
      for (int i = q; i < q + kQuarter; i += 2) {
        uint32_t high[4], low[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float first = state[i + r / 2][r % 2 * 2], second = state[i + r / 2][r % 2 * 2 + 1];
          high[r] = take_part(first, second);
          low[r] = pack_pair<Bf16>(first, second);
        }
        uint32_t c[kTiles / 2][4];
#pragma unroll
        for (int pair = 0; pair < kTiles / 2; ++pair) load_matrices(c[pair], C + pair * 16 * kVectorStride + i * 8);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) multiply(sums[tile], low, c[tile / 2] + tile % 2 * 2);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) multiply(sums[tile], high, c[tile / 2] + tile % 2 * 2);
      }
      // their new terms, the smallest parts first
      float sum[kQuarter][4] = {};
#pragma unroll
      for (int p = 2; p >= 0; --p)
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
          for (int i = 0; i < kQuarter; i += 2) {
            uint32_t b[4];
            load_transposed(b, B + step * 16 * kVectorStride + (q + i) * 8);
            multiply(sum[i], wx[p][step], b);
            multiply(sum[i + 1], wx[p][step], b + 2);
          }
#pragma unroll
      for (int i = 0; i < kQuarter; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) state[q + i][r] = fmaf(decay, state[q + i][r], sum[i][r]);
    }

    // m x of this warp's tokens
#pragma unroll
    for (int tile = 0; tile < kOwnTiles; ++tile)
#pragma unroll
      for (int r = 0; r < 4; ++r) y[tile][r] = 0.0f;
    uint32_t xs[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_x(base, p0, step, xs[step]);
    if (!all_finite) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t signs = not_finite(xs[step][i]);
          xs[step][i] &= ~(signs | (signs - (signs >> 15)));  // all bits of what is not finite
        }
    }
    const int mix_place = (part * kBlockTokens + lane / 16 * 8 + lane % 8) * kMixStride + lane / 8 % 2 * 8;
    const Bf16* const mix_high = reinterpret_cast<const Bf16*>(base + StageLayout::kHigh) + mix_place;
    const Bf16* const mix_low = reinterpret_cast<const Bf16*>(base + StageLayout::kLow) + mix_place;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step > part) break;
      uint32_t low[4], high[4];
      load_matrices(low, mix_low + step * 16);
      load_matrices(high, mix_high + step * 16);
      multiply(y[0], xs[step], low);
      multiply(y[1], xs[step], low + 2);
      multiply(y[0], xs[step], high);
      multiply(y[1], xs[step], high + 2);
    }
    if (!all_finite) add_not_finite(base, p0, part * kBlockTokens, y);

    // Of the other's tokens this warp gives its sums away, of its own it takes the other's.
    float4* const buffers = swap + (slice * 2 + buffer) * kParts * kOwnTiles * 32 + lane;
    float4* const given = buffers + part * kOwnTiles * 32;
    const float4* const taken = buffers + (1 - part) * kOwnTiles * 32;
#pragma unroll
    for (int tile = 0; tile < kOwnTiles; ++tile) {
      const float (&first)[4] = sums[tile], (&second)[4] = sums[kOwnTiles + tile];
      given[tile * 32] = part == 0 ? make_float4(second[0], second[1], second[2], second[3])
                                   : make_float4(first[0], first[1], first[2], first[3]);
    }
    meet(1 + slice);
    const float* const since_start =
        reinterpret_cast<const float*>(base + StageLayout::kSinceStart) + part * kBlockTokens + t * 2;
#pragma unroll
    for (int tile = 0; tile < kOwnTiles; ++tile) {
      const float2 factor = *reinterpret_cast<const float2*>(since_start + tile * 8);
      const float4 other = taken[tile * 32];
      const float others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float own = part == 0 ? sums[tile][r] : sums[kOwnTiles + tile][r];
        y[tile][r] = fmaf(r % 2 == 0 ? factor.x : factor.y, own + others[r], y[tile][r]);
      }
    }
  }

  // What was left out of m x.
  __device__ void add_not_finite(const char* base, int p0, int t0, float (&y)[kOwnTiles][4]) const {
    const Bf16* const x = reinterpret_cast<const Bf16*>(base + StageLayout::kX) + p0 + g;
    const Bf16* const high = reinterpret_cast<const Bf16*>(base + StageLayout::kHigh);
    const Bf16* const low = reinterpret_cast<const Bf16*>(base + StageLayout::kLow);
#pragma unroll 1
    for (int j = 0; j < kChunk; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float value = static_cast<float>(x[j * x_stride + half * 8]);
        if (fabsf(value) < INFINITY) continue;
#pragma unroll
        for (int tile = 0; tile < kOwnTiles; ++tile)
#pragma unroll
          for (int v = 0; v < 2; ++v) {
            const int token = t0 + tile * 8 + t * 2 + v, place = token * kMixStride + j;
            if (token < j) continue;
            y[tile][half * 2 + v] += (static_cast<float>(high[place]) + static_cast<float>(low[place])) * value;
          }
      }
    }
  }

  // Lane (g, t) stores token 8 tile + g at rows p0 + 2 t, + 1 and 8 further.
  __device__ void store_outputs(int first, int p0, const float (&y)[kOwnTiles][4]) const {
    uint32_t pair[kOwnTiles][2];
#pragma unroll
    for (int tile = 0; tile < kOwnTiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pair[tile][half] = transpose(pack_pair<Bf16>(y[tile][half * 2], y[tile][half * 2 + 1]));
      }
    Bf16* const out = static_cast<Bf16*>(args.out.data) + (first_token + first + g) * args.out.stride[0] +
                      head * args.out.stride[1] + p0 + t * 2;
#pragma unroll
    for (int tile = 0; tile < kOwnTiles; ++tile) {
      if (first + tile * 8 + g >= count) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Bf16* const target = out + tile * 8 * args.out.stride[0] + half * 8;
        if (params.paired) {
          *reinterpret_cast<uint32_t*>(target) = pair[tile][half];
        } else {
          reinterpret_cast<uint16_t*>(target)[0] = static_cast<uint16_t>(pair[tile][half]);
          reinterpret_cast<uint16_t*>(target)[1] = static_cast<uint16_t>(pair[tile][half] >> 16);
        }
      }
    }
  }
};

template <int kMost>  // slices
__global__ __launch_bounds__(prefill_threads(kMost),
                             1) void prefill_mma_kernel(const __grid_constant__ PrefillParams params) {
  extern __shared__ __align__(128) char prefill_mma_shared[];
  const ScanParams& scan = params.scan;
  const Problem& problem = scan.problem;
  const int H = problem.geometry.num_heads, P = problem.geometry.head_dim;
  const int head = static_cast<int>(blockIdx.x % H), row_index = static_cast<int>(blockIdx.x / H);
  const int p = threadIdx.x / kLanes * kRowsPerGroup, lane = threadIdx.x % kLanes;
  const replayssm_plan_row row = scan.planned[row_index];
  if (!admit(row, row_index, scan.args.num_tokens, scan.args.max_count, problem.config.window, false, scan.error,
             head == 0 && threadIdx.x == 0) ||
      row.count == 0) {
    return;
  }
  const HeadSlot slot(problem, scan.layer, row.slot, head);
  const float A = decay_rate(scan.args.A_log, head);
  const Prefill work(params, row, head, prefill_mma_shared);
  work.init_barriers();

  // The state in the layout of the stored formats, and in that of the products.
  float* const between = reinterpret_cast<float*>(work.stages);
  const int warp = threadIdx.x / 32;
  const bool consumes = warp < work.consumers, owns_rows = p < P;
  Prefill::Slice slice = {};
  auto each_chunk = [&](HeadState<kMaxStateDim>& state, bool store) {
    if (!owns_rows) return;
#pragma unroll
    for (int i = 0; i < kRowsPerGroup; ++i)
#pragma unroll
      for (int c = 0; c < kHeadChunks<kMaxStateDim>; ++c) {
        float4& place = *reinterpret_cast<float4*>(between + (p + i) * kStateStride + (c * kLanes + lane) * kHeadVec);
        float (&value)[kHeadVec] = state[i][c];
        if (store) {
          place = make_float4(value[0], value[1], value[2], value[3]);
        } else {
          value[0] = place.x, value[1] = place.y, value[2] = place.z, value[3] = place.w;
        }
      }
  };
  if (!(row.flags & REPLAYSSM_ROW_EMPTY) || row.history > 0) {
    HeadState<kMaxStateDim> state = {};
    if (owns_rows && !(row.flags & REPLAYSSM_ROW_EMPTY)) {
      load_state<kMaxStateDim>(problem, slot.checkpoint, p, lane, state);
    }
    if (row.history > 0) {
      const StagedRecords records(between, problem.config.window, P, kMaxStateDim);
      records.stage(problem, slot, ring_position(row.ring_row, -row.history, problem.ring_rows), row.history, A);
      if (owns_rows) {
        fold_records(state, records.x + p, StagedRecords::x_stride(P), records.B, kMaxStateDim, records.weight,
                     *records.decay, row.history, lane, kMaxStateDim);
      }
      __syncthreads();  // the state takes the place of the records
    }
    each_chunk(state, true);
    __syncthreads();
    if (consumes) work.exchange(slice, warp / kParts * kSliceWidth, warp % kParts, between, false);
  }
  __syncthreads();  // the barriers are made, and the stages take the place of the state
  if (consumes) {
    work.consume(slice, warp / kParts, warp % kParts);
  } else {
    work.produce(warp - work.consumers, A);
  }
  __syncthreads();
  if (consumes) work.exchange(slice, warp / kParts * kSliceWidth, warp % kParts, between, true);
  __syncthreads();
  HeadState<kMaxStateDim> state = {};
  each_chunk(state, false);
  const replayssm_plan_row& again = scan.planned[row_index];
  const StateOwner owner{problem, scan.layer, scan.error, head, row_index, again.stream, again.writes};
  store_state<kMaxStateDim>(owner, slot, p, lane, state);
}

// What a CTA may have, less 2 KiB; on a GPU that does not say, what the other kernels count on.
int prefill_shared_limit() {
  int device = 0, granted = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&granted, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return kSharedLimit;
  }
  return std::max(kSharedLimit, granted - 2048);
}

int prefill_shared_bytes(const Problem& problem, int stages) {
  const int P = problem.geometry.head_dim;
  const size_t records = StagedRecords::bytes(problem.config.window, P, kMaxStateDim);
  const size_t state = static_cast<size_t>(P) * kStateStride * sizeof(float);
  return kBarrierBytes + P / kSliceWidth * kSwapBytes +
         static_cast<int>(std::max({records, state, static_cast<size_t>(stages) * StageLayout::bytes(P)}));
}

}  // namespace

bool has_prefill_mma(const Problem& problem) {
  return has_mma_fold(problem) && problem.config.activation == REPLAYSSM_BF16 &&
         problem.geometry.head_dim <= kMaxSlices * kSliceWidth;
}

replayssm_status prefill_mma(const replayssm_exec& exec, const ScanParams& scan, int32_t rows) {
  const Problem& problem = scan.problem;
  const replayssm_tensor& out = scan.args.out;
  const int limit = prefill_shared_limit();
  int stages = kMaxStages;
  while (stages > 2 && prefill_shared_bytes(problem, stages) > limit) --stages;
  const bool paired =
      reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0 && out.stride[1] % 2 == 0;
  const int slices = problem.geometry.head_dim / kSliceWidth;
  void (*const kernel)(PrefillParams) =
      slices <= kFewSlices ? prefill_mma_kernel<kFewSlices> : prefill_mma_kernel<kMaxSlices>;
  return launch("prefill", false, limit, kernel, static_cast<int64_t>(rows) * problem.geometry.num_heads,
                prefill_threads(slices), prefill_shared_bytes(problem, stages), exec,
                PrefillParams{scan, stages, paired});
}

cudaError_t load_prefill_mma_kernels() {
  const cudaError_t error = load_kernel(prefill_mma_kernel<kFewSlices>);
  return error == cudaSuccess ? load_kernel(prefill_mma_kernel<kMaxSlices>) : error;
}

}  // namespace cuda
}  // namespace replayssm
