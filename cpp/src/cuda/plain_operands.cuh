// SPDX-License-Identifier: Apache-2.0
//
// A plain checkpoint's slices as operands of a read-out's products (step_read.cu, whose opening says how). They lie in
// shared memory as in the slot, so that all rows begin at the same bank.
#pragma once

#include "read_operands.cuh"

namespace replayssm {
namespace cuda {
namespace {

template <typename Format>
constexpr bool kIsPlain = std::is_same_v<Format, __half> || std::is_same_v<Format, __nv_bfloat16>;

// 16 bits a value: a state's words are the operand, the second of a product whose first has tokens as rows. Of rows g
// and g + 8 of a slice, lane (g, t) takes the t-th 16 bytes of each run of 64: even rows of runs 0, 1, 2, 3, odd rows
// of 1, 0, 3, 2. So the eight lanes of a load, which have two rows, meet no bank twice, and a product's terms are
// columns of a run for even rows, of its neighbour for odd rows. The query brings both: rows 0 to 7 of the first
// operand are tokens with an even run, rows 8 to 15 the same tokens with the run behind it.
template <typename Stored>
struct PlainOperand {
  static constexpr bool kColumnScales = false;
  static constexpr float kUnit = 1.0f;
  static constexpr int kRowBytes = kMaxStateDim * sizeof(Stored), kSliceBytes = kSliceWidth * kRowBytes;
  static constexpr int kQueries = 4;  // operands of a token
  // BF16 states need the query in BF16: in two parts, if it is FP16.
  template <typename Staged>
  static constexpr int kQueryParts = std::is_same_v<Stored, __nv_bfloat16> && std::is_same_v<Staged, __half> ? 2 : 1;

  __host__ __device__ static int bytes(int P) { return P * kRowBytes; }

  // Where, in a token's operands, the word of columns 2 index and 2 index + 1 lies.
  __device__ static int query_word(int index) {
    const int run = index / 16, t = index / 4 % 4, word = index % 4;
    return (run / 2 * 2 + word / 2) * 16 + t * 4 + word % 2 * 2 + run % 2;
  }

  // Where in a slice the lane's first and second run begin; the other two follow 128 bytes behind.
  struct Places {
    int first, second;
    __device__ explicit Places(int lane) {
      const int g = lane / 4, row = g * kRowBytes + lane % 4 * 16, swapped = g % 2;
      first = keep(row + 64 * swapped), second = keep(row + 64 - 64 * swapped);
    }
  };

  uint4 run[2][4];  // of row g, of row g + 8

  PlainOperand() = default;
  __device__ PlainOperand(const char* slice, const Places& places) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        run[i][r] = *reinterpret_cast<const uint4*>(slice + (r % 2 == 0 ? places.first : places.second) + r / 2 * 128 +
                                                    i * 8 * kRowBytes);
      }
  }

  // Of every load a word.
  __device__ uint32_t loaded() const {
    uint32_t words = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) words |= run[i / 4][i % 4].x;
    return words;
  }

  // Sums over half the runs each, of rows 0 to 7 and 8 to 15; see value(). query(i): the i-th operand of token g.
  using Sums = float[2][2][4];
  template <typename Query>
  __device__ void multiply(const Query& query, Sums& sum) const {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      const uint4 q = query(i);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint4& a = run[half][i / 2 * 2 + r];
          multiply_pairs<Stored>(sum[half][r], q.x, q.y, q.z, q.w, i % 2 == 0 ? a.x : a.z, i % 2 == 0 ? a.y : a.w);
        }
    }
  }
  // Of token g and rows 2t, 2t + 1, 2t + 8, 2t + 9 of the slice.
  __device__ static float value(const Sums& sum, int i) {
    const float (&of)[2][4] = sum[i / 2];
    return i % 2 == 0 ? __fadd_rn(of[0][0], of[1][2]) : __fadd_rn(of[0][3], of[1][1]);
  }
};

template <>
struct StateOperand<__half> : PlainOperand<__half> {
  using PlainOperand<__half>::PlainOperand;
};
template <>
struct StateOperand<__nv_bfloat16> : PlainOperand<__nv_bfloat16> {
  using PlainOperand<__nv_bfloat16>::PlainOperand;
};

}  // namespace
}  // namespace cuda
}  // namespace replayssm
