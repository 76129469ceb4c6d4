// SPDX-License-Identifier: Apache-2.0
//
// A slice of a plain checkpoint, 16 rows of one head, in shared memory: how it comes, how a warp multiplies it with
// tokens and folds records into it. For step_mma.cu, which says why it is so, and step_head.cu.
#pragma once

#include "head_state.cuh"
#include "pipeline.cuh"

namespace replayssm {
namespace cuda {
namespace {

// A slice of a checkpoint format in shared memory, as a lane sees it. It lies as in the checkpoint, but that 64 bytes
// part its halves. Lane (g, t) has a pair of rows of one half or the other, so that the 8 lanes of a load meet no bank
// twice.
template <typename Stored>
struct Slice {
  static constexpr int kVec = Packed<Stored>::kVec;
  static constexpr int kRowBytes = kMaxStateDim * sizeof(Stored);
  static constexpr int kHalfBytes = kSliceWidth / 2 * kRowBytes, kHalfStride = kHalfBytes + 64;
  static constexpr int kBytes = kHalfStride + kHalfBytes;
  static constexpr int kBlocks = kRowBytes / 64;  // of 4 lanes' 16 bytes
  // Floats from token to token of C, so that the loads of multiply() meet no bank twice.
  static constexpr int kQueryStride = kMaxStateDim + (kVec == 4 ? 16 : 4);

  char* base;
  int lane;

  // The lane's first row.
  __device__ static int first_row(int lane) { return lane / 8 * 2 + lane / 4 % 2 * (kSliceWidth / 2); }

  // 16 bytes of block `block`, of the lane's first or second row.
  __device__ uint4& piece(int block, int row) const {
    return *reinterpret_cast<uint4*>(base + lane / 8 * 2 * kRowBytes + lane / 4 % 2 * kHalfStride + lane % 4 * 16 +
                                     row * kRowBytes + block * 64);
  }

  __device__ void clear() const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) piece(b, 0) = piece(b, 1) = make_uint4(0, 0, 0, 0);
  }

  // `source` is the slice in the checkpoint. The caller arrives at the barrier; below sm_90 the copies
  // are the lanes' own.
  __device__ void request(const Stored* source, Barrier* barrier) const {
    const char* const bytes = reinterpret_cast<const char*>(source);
#if __CUDA_ARCH__ >= 900
    if (elect_lane()) {
      request_block(base, bytes, kHalfBytes, barrier);
      request_block(base + kHalfStride, bytes + kHalfBytes, kHalfBytes, barrier);
    }
#else
#pragma unroll
    for (int k = 0; k < 2 * kHalfBytes; k += 512) {
      request_16_bytes(base + k + (k < kHalfBytes ? 0 : kHalfStride - kHalfBytes) + lane * 16, bytes + k + lane * 16);
    }
#endif
  }

  // sum = S C for the 8 tokens of which `token`, a row of C, is the g-th. Lane (g, t) gets tokens 2t, 2t + 1
  // of its first row, then of its second.
  template <typename Query>
  __device__ void multiply(const Query* token, uint32_t mask, float (&sum)[4]) const {
    const int t = lane % 4;
    float high[2][4] = {}, low[2][4] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float upper[kVec], lower[kVec], c[kVec];
      Packed<Stored>::unpack(piece(b, 0), upper);
      Packed<Stored>::unpack(piece(b, 1), lower);
      load_shared<kVec>(token + b * 4 * kVec + t * kVec, c);
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const float state[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]}, q[2] = {c[i], c[i + 1]};
        if constexpr (sizeof(Stored) == 2) {
          multiply_tf32(high[i / 2 % 2], state, q);
        } else {
          float state_high[4], state_low[4];
          split(state, mask, state_high, state_low);
          multiply_tf32(high[i / 2 % 2], state_high, q);
          multiply_tf32(low[i / 2 % 2], state_low, q);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(__fadd_rn(high[0][i], high[1][i]), __fadd_rn(low[0][i], low[1][i]));
  }

  // S <- decay S + sum_i weight_i x_i (outer) B_i over h records, here; returns whether the lane's part is finite as
  // stored. p: the slice's first row; x: the lane's rows of record 0; B: record 0. From record h to a multiple of 8 all
  // three hold zeros.
  template <typename Staged>
  __device__ bool fold(const StateOwner& owner, int p, const Staged* x, const Staged* B, const float* weight,
                       float decay, int h, uint32_t mask) const {
    constexpr int kPart = sizeof(Stored) == 4 ? 2 : 1;  // blocks at a time
    const int t = lane % 4;
    const PlainRounding rounding(owner);
    bool finite = true;
    float zeros[2] = {};  // of float32 states; a NaN if a value is none or infinite, for the fewest instructions
#pragma unroll 1
    for (int part = 0; part < kBlocks; part += kPart) {
      float state[2][kPart][kVec];
#pragma unroll
      for (int b = 0; b < kPart; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) Packed<Stored>::unpack(piece(part + b, i), state[i][b]);
      add_records(state, x, B + part * 4 * kVec, weight, decay, h, lane, mask);
#pragma unroll
      for (int b = 0; b < kPart; ++b) {
        const int row = first_row(lane), column = ((part + b) * 4 + t) * kVec;
        uint4 folded[2];
        if constexpr (sizeof(Stored) == 4) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            folded[i] = Packed<Stored>::pack(state[i][b]);
#pragma unroll
            for (int v = 0; v < kVec; ++v) zeros[i] = fmaf(state[i][b][v], 0.0f, zeros[i]);
          }
        } else {
          rounding.pack<Stored>(p + row, column, state, b, folded, finite);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          piece(part + b, i) = folded[i];
        }
      }
    }
    return finite && zeros[0] + zeros[1] == 0.0f;
  }
  // To the checkpoint at `target`.
  __device__ void store(Stored* target) const {
#if __CUDA_ARCH__ >= 900
    finish_stores_before_blocks();
    __syncwarp();
    if (elect_lane()) {
      send_block(target, base, kHalfBytes);
      send_block(reinterpret_cast<char*>(target) + kHalfBytes, base + kHalfStride, kHalfBytes);
    }
#else
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = (b * 4 + lane % 4) * kVec;
        __stwb(reinterpret_cast<uint4*>(target + (first_row(lane) + i) * kMaxStateDim + column), piece(b, i));
      }
#endif
  }
  // Until the slice's memory may hold another.
  __device__ void await_stored() const {
#if __CUDA_ARCH__ >= 900
    if (elect_lane()) await_blocks_read();
#else
    finish_stores_before_blocks();
#endif
  }
};

constexpr int kTile = 8;  // tokens in a product

// B^T C of `count` records and T tokens, rows g_stride apart: 16 records by 8 tokens at a time; rows and columns beyond
// the last repeat it, but rows from `count` to a multiple of 8 records of history are zeros.
template <typename Staged>
__device__ inline void multiply_all_records(const Staged* B, int count, int padded_count, const Staged* C, int T,
                                            int g_stride, int lane, float* products) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int first = 0; first < padded_count; first += 16) {
#pragma unroll 1
    for (int token = 0; token < T; token += kTile) {
      float sum[2][4] = {};
      multiply_records(B, first, count, C, token, T, g, t, sum);
      float* const target = products + (first + g) * g_stride + token + 2 * t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<float2*>(target + 8 * half * g_stride) =
            first + g + 8 * half < count
                ? make_float2(sum[0][2 * half] + sum[1][2 * half], sum[0][2 * half + 1] + sum[1][2 * half + 1])
                : make_float2(0.0f, 0.0f);
      }
    }
  }
}

// For half a warp: exp(f_s) and u_rs of a head's tokens, of which a lane has token s, if it exists, and its delta. A,
// D: of the head. await_products() returns when B^T C may be read.
template <typename Await>
__device__ inline void weigh_tokens(float A, float D, float step, bool exists, int s, int T, int g_stride,
                                    float* token_decay, const float* products, float* u, Await&& await_products) {
  const float log_decay = __fmul_rn(A, step);
  float sum = log_decay;  // up to this token
  if (T > 1) {
#pragma unroll
    for (int distance = 1; distance < 16; distance *= 2) {
      const float other = __shfl_up_sync(~0u, sum, distance, 16);
      if (s >= distance) sum = __fadd_rn(sum, other);
    }
  }
  if (exists) token_decay[s] = expf(sum);
  await_products();
  float exponent = 0.0f;
#pragma unroll 1
  for (int back = 0; back < T; ++back) {
    const float step_r = __shfl_up_sync(~0u, step, back, 16);
    const float log_decay_r = __shfl_up_sync(~0u, log_decay, back, 16);
    if (exists && s >= back) {
      const int entry = (s - back) * g_stride + s;
      const float weight = __fmul_rn(step_r, expf(exponent));
      u[entry] = fmaf(weight, products[entry], back == 0 ? D : 0.0f);
      exponent = __fadd_rn(exponent, log_decay_r);
    }
  }
}

// y += values (weight), for a pair of rows: a product of 8 terms, values exact in TF32, weights split.
__device__ inline void add_weighed(float (&y)[4], const float (&values)[4], const float (&weight)[2], uint32_t mask) {
  float high[2], low[2];
  split(weight, mask, high, low);
  multiply_tf32(y, values, low);
  multiply_tf32(y, values, high);
}

// What a slice's outputs sum beside S C. Lane (g, t) has tokens 2t and 2t + 1 from `first` on, of a pair of rows.
template <typename Staged>
struct TokenSums {
  const Staged* x;                // the lane's rows, of the new tokens, then of the history
  const float *v, *products, *u;  // of the head
  const float* token_decay;
  int T, g_stride, lane;
  uint32_t mask;

  __device__ void add_history(int first, int history, float (&y)[4]) const {
    const int g = lane / 4, t = lane % 4;
    const Staged* const old_x = x + T * kSliceWidth;
    const float *const weights = v + t, *const product = products + (T + t) * g_stride + first + g;
#pragma unroll 1
    for (int i = 0; i < history; i += 8) {
      const float2 x0 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(old_x + (i + t) * kSliceWidth));
      const float2 x1 = unpack_pair<Staged>(*reinterpret_cast<const uint32_t*>(old_x + (i + 4 + t) * kSliceWidth));
      const float values[4] = {x0.x, x0.y, x1.x, x1.y};
      const float weight[2] = {weights[i] * product[i * g_stride], weights[i + 4] * product[(i + 4) * g_stride]};
      add_weighed(y, values, weight, mask);
    }
  }

  // Scales by the tokens' decays, and adds the new tokens.
  __device__ void add_tokens(int first, float (&y)[4]) const {
    const int g = lane / 4, t = lane % 4, s = first + 2 * t;
    const float2 since = *reinterpret_cast<const float2*>(token_decay + s);
    y[0] *= since.x, y[1] *= since.y, y[2] *= since.x, y[3] *= since.y;
    bool finite = true;
#pragma unroll 1
    for (int r = t; r < min(first + kTile, T) + t; r += kTile) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = r + 4 * i < T ? *reinterpret_cast<const uint32_t*>(x + (r + 4 * i) * kSliceWidth) : 0;
        const bool word_finite = is_finite<Staged>(word);
        finite = finite && word_finite;
        const float2 pair = unpack_pair<Staged>(word_finite ? word : 0);
        values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
      }
      const float weight[2] = {u[r * g_stride + first + g], u[(r + 4) * g_stride + first + g]};
      add_weighed(y, values, weight, mask);
    }
    if (!__all_sync(~0u, finite)) add_not_finite(min(first + kTile, T), s, y);
  }

  // What the product of finite x leaves out: x of tokens up to s and s + 1 with a NaN or an infinity.
  __device__ void add_not_finite(int count, int s, float (&y)[4]) const {
#pragma unroll 1
    for (int r = 0; r < count; ++r) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(x + r * kSliceWidth);
      if (is_finite<Staged>(word)) continue;
      const float2 pair = unpack_pair<Staged>(word);
      const float2 weight = *reinterpret_cast<const float2*>(u + s + r * g_stride);
      if (r <= s) y[0] = fmaf(weight.x, pair.x, y[0]), y[2] = fmaf(weight.x, pair.y, y[2]);
      if (r <= s + 1) y[1] = fmaf(weight.y, pair.x, y[1]), y[3] = fmaf(weight.y, pair.y, y[3]);
    }
  }
};

}  // namespace
}  // namespace cuda
}  // namespace replayssm
