// SPDX-License-Identifier: Apache-2.0
//
// Folding records into a state on tensor cores, for the kernels that do it (step_mma.cu, step_read.cu, fold.cu), and
// the instructions that it takes:
//
//     S <- exp(e(0,h)) S + sum_{j=1..h} (delta_j exp(e(j,h))) x_j (outer) B_j,    e(j,h) = a_{j+1} + ... + a_h
//
// A warp works on a slice, 16 rows of one head. Lane (g, t) = (lane / 4, lane mod 4) has rows 2g and 2g + 1 and, of
// every block of columns, the t-th kVec: the order of a product's columns is free, so that what vector loads bring is
// the operand, and the sum lies where the state does. The sum over 16 records of BF16 is formed by mma.m16n8k16, weight
// times x in three parts, that over 8 of FP16 by mma.m16n8k8 in TF32, weight times x split in two; B is exact. It is
// added to the state by one rounding. Records are newest first. A sum's order depends on h alone: the same records give
// the same bits in all files.
#pragma once

#include "common.cuh"
#include "pipeline.cuh"

namespace replayssm {
namespace cuda {

constexpr int kSliceWidth = 16;             // rows of the state in a slice
constexpr int kStride = kMaxStateDim + 16;  // elements from row to row of staged B and C: 288 bytes, so that the rows
                                            // of four lanes lie in different banks

__host__ __device__ constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// d += a b of 16x8 and 8x8 values. a: (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4); b: (t, g), (t + 4, g); d: (g,
// 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). The tensor cores ignore the 13 low bits of a and b.
__device__ inline void multiply_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// d += a b of 16x16 and 16x8 values of 16 bits, a pair of neighbours in k a register, the rest as multiply_tf32 has it.
template <typename T>
__device__ inline void multiply_pairs(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                      uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Four matrices of 8 by 8, lane 8 i + r names row r of matrix i: lane (g, t) gets (g, 2t) and (g, 2t + 1) of each, or
// of its transpose.
__device__ inline void load_matrices(uint32_t (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_transposed(uint32_t (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(row))
               : "memory");
}

// The BF16 numbers that two float32 are without their lower halves, the first in the lower half, as memory has it.
__device__ inline uint32_t upper_halves(float first, float second) {
  return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}
__device__ inline float upper_half(float value) { return __uint_as_float(__float_as_uint(value) & 0xffff0000u); }

// The part of a pair that BF16 holds by cutting off; what is left stays.
__device__ inline uint32_t take_part(float& first, float& second) {
  const uint32_t part = upper_halves(first, second);
  first = __fsub_rn(first, upper_half(first));
  second = __fsub_rn(second, upper_half(second));
  return part;
}

// value = high + low, high exact in TF32. `mask` is kTf32Mask; if the compiler knew, it would drop the masking of what
// goes to the tensor cores, and move every value to its operand's registers instead.
constexpr uint32_t kTf32Mask = 0xffffe000u;
template <int kCount>
__device__ inline void split(const float (&value)[kCount], uint32_t mask, float (&high)[kCount], float (&low)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    high[i] = __uint_as_float(__float_as_uint(value[i]) & mask);
    low[i] = __fsub_rn(value[i], high[i]);
  }
}

// Sum of the values of the lanes up to this one. Lane i's bits depend on the lanes up to i only.
__device__ inline float sum_up_to_lane(float value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value = __fadd_rn(value, other);
  }
  return value;
}

// weight[i] = delta_i exp(e(i, h)) of h records, newest first, and 0 from h to a multiple of 32; returns exp(e(0, h)).
// Exponents are sums from the newest record backwards. For a whole warp.
__device__ inline float weigh_history(const float* delta, float A, int h, int lane, float* weight) {
  float total = 0.0f;
#pragma unroll 1
  for (int i = lane; i < round_up(h, 32) + lane; i += 32) {
    const float step = i < h ? delta[i] : 0.0f;
    const float sum = sum_up_to_lane(__fmul_rn(A, step), lane);
    const float newer = __shfl_up_sync(~0u, sum, 1);
    weight[i] = __fmul_rn(step, expf(lane == 0 ? total : __fadd_rn(total, newer)));
    total = __fadd_rn(total, __shfl_sync(~0u, sum, 31));
  }
  return expf(total);
}

// Of kVec FP16 values those at even (odd = 0) or odd places.
template <int kVec>
__device__ inline void pick_columns(const __half* source, int odd, float (&value)[kVec / 2]) {
  uint32_t word[kVec / 2];
  if constexpr (kVec == 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(source);
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
  } else {
    const uint2 v = *reinterpret_cast<const uint2*>(source);
    word[0] = v.x, word[1] = v.y;
  }
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) value[i] = unpack_pair<__half>(word[i] >> (16 * odd)).x;
}

// Of kVec BF16 values of a row those at even (odd = 0) or odd places, each with that of the next row.
template <int kVec>
__device__ inline void pick_pairs(const __nv_bfloat16* row, int odd, uint32_t (&pair)[kVec / 2]) {
  using Vector = std::conditional_t<kVec == 8, uint4, uint2>;
  const Vector raw[2] = {*reinterpret_cast<const Vector*>(row), *reinterpret_cast<const Vector*>(row + kStride)};
  const auto& word = reinterpret_cast<const uint32_t (&)[2][kVec / 2]>(raw);
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) pair[i] = __byte_perm(word[0][i], word[1][i], odd ? 0x7632 : 0x5410);
}

// Weights times x of 16 records in BF16, as the first operand of products: three parts that make up the float32
// products. Lane (g, t) has records 2t, 2t + 1, 2t + 8 and 2t + 9 of two rows.
struct WeighedRecords {
  uint32_t part[3][4];

  // x, weight: of record 2t, x the lane's two rows. Without `all` the last 8 records are taken for zeros.
  __device__ __forceinline__ WeighedRecords(const __nv_bfloat16* x, int x_stride, const float* weight, bool all) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float value[2][2] = {};  // of rows, records
      if (half == 0 || all) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int record = 8 * half + i;
          const float2 pair = unpack_pair<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(x + record * x_stride));
          value[0][i] = __fmul_rn(weight[record], pair.x);
          value[1][i] = __fmul_rn(weight[record], pair.y);
        }
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int k = 0; k < 2; ++k) part[k][2 * half + row] = take_part(value[row][0], value[row][1]);
        part[2][2 * half + row] = upper_halves(value[row][0], value[row][1]);
      }
    }
  }
  // Adds kCount products, side by side.
  template <int kCount>
  __device__ __forceinline__ void multiply(float (&sum)[kCount][4], const uint32_t (&b)[kCount][2]) const {
#pragma unroll
    for (int k = 2; k >= 0; --k)
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        multiply_pairs<__nv_bfloat16>(sum[i], part[k][0], part[k][1], part[k][2], part[k][3], b[i][0], b[i][1]);
      }
  }
};

// state <- decay state + sum_i weight_i x_i (outer) B_i over h records, for kPart blocks of 4 lanes' kVec columns of a
// slice. x: the lane's rows of record 0, records x_stride apart; B: record 0 at the first of the blocks, records
// kStride apart. From record h to a multiple of 8 all three hold zeros.
template <int kPart, int kVec>
__device__ inline void add_records(float (&state)[2][kPart][kVec], const __nv_bfloat16* x, const __nv_bfloat16* B,
                                   const float* weight, float decay, int h, int lane, uint32_t,
                                   int x_stride = kSliceWidth) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int first = 0; first < h; first += 16) {
    const int record = first + 2 * t;
    const bool all = first + 8 < h;  // or nothing may lie behind the first 8 records
    const WeighedRecords weighed(x + record * x_stride, x_stride, weight + record, all);
    const __nv_bfloat16* const source = B + record * kStride + g / 2 * kVec;
#pragma unroll
    for (int b = 0; b < kPart; ++b) {
      // Product i takes columns 2i and 2i + 1 of every lane's part; lane (g, t) brings those of t' = g / 2.
      uint32_t column[2][kVec / 2] = {};
      pick_pairs<kVec>(source + b * 4 * kVec, g % 2, column[0]);
      if (all) pick_pairs<kVec>(source + b * 4 * kVec + 8 * kStride, g % 2, column[1]);
      float sum[kVec / 2][4] = {};
      uint32_t operand[kVec / 2][2];
#pragma unroll
      for (int i = 0; i < kVec / 2; ++i) operand[i][0] = column[0][i], operand[i][1] = column[1][i];
      weighed.multiply(sum, operand);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        state[0][b][i] = fmaf(decay, state[0][b][i], sum[i / 2][i % 2]);
        state[1][b][i] = fmaf(decay, state[1][b][i], sum[i / 2][2 + i % 2]);
      }
    }
    decay = 1.0f;
  }
}
template <int kPart, int kVec>
__device__ inline void add_records(float (&state)[2][kPart][kVec], const __half* x, const __half* B,
                                   const float* weight, float decay, int h, int lane, uint32_t mask,
                                   int x_stride = kSliceWidth) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int first = 0; first < h; first += 8) {
    float scaled[4], high[4], low[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int record = first + half * 4 + t;
      const float2 pair = unpack_pair<__half>(*reinterpret_cast<const uint32_t*>(x + record * x_stride));
      const float v = weight[record];
      scaled[2 * half] = __fmul_rn(v, pair.x);
      scaled[2 * half + 1] = __fmul_rn(v, pair.y);
    }
    split(scaled, mask, high, low);
    const __half* const source = B + (first + t) * kStride + g / 2 * kVec;
#pragma unroll
    for (int b = 0; b < kPart; ++b) {
      // Product i / 2 takes columns i and i + 1 of every lane's part; lane (g, t) brings those of t' = g / 2.
      float columns[2][kVec / 2];
      pick_columns<kVec>(source + b * 4 * kVec, g % 2, columns[0]);
      pick_columns<kVec>(source + b * 4 * kVec + 4 * kStride, g % 2, columns[1]);
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        float sum[4] = {};
        const float pair[2] = {columns[0][i / 2], columns[1][i / 2]};
        multiply_tf32(sum, low, pair);
        multiply_tf32(sum, high, pair);
        state[0][b][i] = fmaf(decay, state[0][b][i], sum[0]);
        state[0][b][i + 1] = fmaf(decay, state[0][b][i + 1], sum[1]);
        state[1][b][i] = fmaf(decay, state[1][b][i], sum[2]);
        state[1][b][i + 1] = fmaf(decay, state[1][b][i + 1], sum[3]);
      }
    }
    decay = 1.0f;
  }
}

// What follows, with token g of C as lane (g, t) takes it: every fourth 16 bytes from its t-th on.
template <int kRowStride = kStride, typename Staged>
__device__ inline void multiply_records(const Staged* B, int first, int count, const uint4 (&token)[4], int g, int t,
                                        float (&sum)[2][4]) {
  const uint4* const upper = reinterpret_cast<const uint4*>(B + min(first + g, count - 1) * kRowStride) + t;
  const uint4* const lower = reinterpret_cast<const uint4*>(B + min(first + g + 8, count - 1) * kRowStride) + t;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const uint4 k0 = upper[b * 4], k1 = lower[b * 4], q = token[b];
    multiply_pairs<Staged>(sum[0], k0.x, k1.x, k0.y, k1.y, q.x, q.y);
    multiply_pairs<Staged>(sum[1], k0.z, k1.z, k0.w, k1.w, q.z, q.w);
  }
}

// A tile of B^T C, of 16 records from `first` on by 8 tokens from `token` on, in two sums for the even and the odd
// words of the rows. Lane (g, t) has records g and g + 8 of tokens 2t and 2t + 1, as mma.m16n8k16 has them. Rows and
// columns beyond the last of `count` records and T tokens repeat it. B, C: rows kRowStride apart.
template <int kRowStride = kStride, typename Staged>
__device__ inline void multiply_records(const Staged* B, int first, int count, const Staged* C, int token, int T, int g,
                                        int t, float (&sum)[2][4]) {
  const uint4* const row = reinterpret_cast<const uint4*>(C + min(token + g, T - 1) * kRowStride) + t;
  const uint4 parts[4] = {row[0], row[4], row[8], row[12]};
  multiply_records<kRowStride>(B, first, count, parts, g, t, sum);
}

}  // namespace cuda
}  // namespace replayssm
