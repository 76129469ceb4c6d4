// SPDX-License-Identifier: Apache-2.0
//
// The operands of a read-out's products (step_read.cu, whose opening says how): quantised states, which lie in shared
// memory as in the slot, and records of x.
#pragma once

#include "head_state.cuh"

namespace replayssm {
namespace cuda {
namespace {

// Keeps a value in a register, where the compiler would compute it anew, or in several.
__device__ inline int keep(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <typename T>
__device__ inline T* keep(T* global) {
  asm volatile("" : "+l"(global));
  __builtin_assume(__isGlobal(global));
  return global;
}

constexpr int kProducts = 8;  // of 16 columns, for a row of the state

__device__ inline uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The E2M1 codes kCode and kCode + 4 of a word as FP16, times 2^-14. Every other code is cleared first, so that what is
// shifted to the sign and to the exponent has nothing where the other goes (a single LOP3, where the compiler would
// mask both). kZeros: zeros may come as -0. Then one multiplication is both shifts: 9 c - 8 of a code c = 8 sign +
// magnitude has the sign in bit 6, the magnitude in bits 2 to 0, and is below 128.
template <int kCode, bool kZeros>
__device__ inline uint32_t e2m1_pair(uint32_t word) {
  constexpr int kShift = 9 - 4 * kCode;
  uint32_t codes, pair;
  asm("and.b32 %0, %1, %2;" : "=r"(codes) : "r"(word), "n"(kCode % 2 == 0 ? 0x0f0f0f0fu : 0xf0f0f0f0u));
  if constexpr (kZeros && kShift > 0) {
    pair = (codes * (9u << kShift) + 0xf000f000u) & 0x8e008e00u;
  } else {
    const uint32_t sign = codes << (kShift + 3),
                   magnitude = kShift > 0 ? codes << max(kShift, 0) : codes >> max(-kShift, 0);
    asm("lop3.b32 %0, %1, %2, %3, 0xa8;" : "=r"(pair) : "r"(sign), "r"(magnitude), "n"(0x8e008e00u));  // (a | b) & c
  }
  return pair;
}

// The operand of rows g and g + 8 of a slice: kProducts times {row g, row g + 8, row g, row g + 8} of pairs of columns
// that query_column() names. A lane's columns of the first half of the products are one block, those of the second half
// another. Formats of block scales.
template <typename Format>
struct StateOperand {
  static constexpr bool kColumnScales = Format::kColumnScales;
  static constexpr float kUnit = 16384.0f;  // what sums are to be multiplied by: codes come times 2^-14

  __host__ __device__ static int bytes(int P) { return static_cast<int>(BlockChunk<Format>{P, kMaxStateDim}.bytes()); }
  // The first of the two columns, of word `index` of lane t; the second lies `kColumnStep` behind.
  static constexpr int kColumnStep = 4;
  __device__ static int query_column(int t, int index) { return 32 * t + index / 4 * 8 + index % 4; }

  uint4 codes[2];
  uint32_t low[2];
  uint32_t scales[2];  // codes of the two blocks

  // Where the lane's parts of a slice are: of row g and, kRow on, of row g + 8.
  struct Source {
    static constexpr int kRow = 8 * 4, kSlice = kSliceWidth * 4;  // parts, of 4 in a row
    const uint4* codes;
    const uint16_t* scales;
    const uint32_t* low;

    __device__ Source(const char* chunk, int P, int slice, int lane) {
      const BlockChunk<Format> layout{P, kMaxStateDim};
      const int part = slice * kSlice + lane;
      codes = reinterpret_cast<const uint4*>(chunk) + part;
      scales = reinterpret_cast<const uint16_t*>(chunk + layout.block_scales()) + part;
      low = reinterpret_cast<const uint32_t*>(chunk + layout.low_bits()) + part;
    }
    __device__ void advance(int slices = 1) {
      codes += slices * kSlice, scales += slices * kSlice, low += slices * kSlice;
    }
  };

  StateOperand() = default;
  // Of the slice-th slice from the source on.
  __device__ explicit StateOperand(const Source& source, int slice = 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = slice * Source::kSlice + i * Source::kRow;
      codes[i] = source.codes[at];
      scales[i] = source.scales[at];
      low[i] = 0;
      if constexpr (Format::kLowBits) low[i] = source.low[at];
    }
  }

  // Of every load a word.
  __device__ uint32_t loaded() const { return codes[0].x | codes[1].x | scales[0] | scales[1] | low[0] | low[1]; }

  // Code kCode and kCode + 4 of word kWord.
  template <int kWord, int kCode>
  __device__ uint32_t pair(int i) const {
    const uint32_t word = word_of(codes[i], kWord);
    uint32_t value = e2m1_pair<kCode, !Format::kLowBits>(word);
    if constexpr (Format::kLowBits) {
      const uint32_t byte = low[i] >> 8 * kWord & 0xffu;
      value |= (byte | byte << 12) << (8 - kCode) & 0x01000100u;
    }
    return value;
  }
  template <int kProduct>
  __device__ void get(uint32_t (&a)[4]) const {
    constexpr int kWord = kProduct / 2, kCode = kProduct % 2 * 2;
    a[0] = pair<kWord, kCode>(0), a[1] = pair<kWord, kCode>(1);
    a[2] = pair<kWord, kCode + 1>(0), a[3] = pair<kWord, kCode + 1>(1);
  }

  // Of row g or g + 8, from its sums over either block.
  __device__ float scale(int i, float first, float second) const {
    const float2 factor = __half22float2(e4m3_halves(scales[i]));
    return fmaf(second, factor.y, __fmul_rn(first, factor.x));
  }
  // The same for several tokens: codes times the scales of their blocks, which is exact but for E2M2 codes of the
  // smallest scales, and sums as they are.
  struct Factors {
    __half2 of[2][2];  // of row g or g + 8, of a block
    __device__ explicit Factors(const StateOperand& state) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __half2 both = e4m3_halves(state.scales[i]);
        of[i][0] = __low2half2(both), of[i][1] = __high2half2(both);
      }
    }
  };
  template <int kProduct>
  __device__ void get_scaled(const Factors& factors, uint32_t (&a)[4]) const {
    get<kProduct>(a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = bits_of(__hmul2(halves_of(a[i]), factors.of[i % 2][kProduct / (kProducts / 2)]));
  }
  __device__ float scaled_sum(const float (&sum)[2][4], int i) const { return __fadd_rn(sum[0][i], sum[1][i]); }

  __device__ static float head_scale(const char* scale) { return *reinterpret_cast<const float*>(scale); }
};

struct Fp8 {};  // E4M3 with row scales
template <>
struct StateOperand<Fp8> {
  static constexpr bool kColumnScales = false;
  static constexpr float kUnit = 1.0f;

  __host__ __device__ static int bytes(int P) { return static_cast<int>(Fp8Chunk{P, kMaxStateDim}.bytes()); }
  static constexpr int kColumnStep = 1;
  __device__ static int query_column(int t, int index) { return index / 8 * 64 + 16 * t + index % 8 * 2; }

  uint4 codes[2][2];  // of a row's first and second half
  float row_scale[2];

  struct Source {
    static constexpr int kRowParts = kMaxStateDim / 16;
    const uint4* codes;
    const float* scales;

    __device__ Source(const char* chunk, int P, int slice, int lane) {
      const int row = slice * kSliceWidth + lane / 4;
      codes = reinterpret_cast<const uint4*>(chunk) + row * kRowParts + lane % 4;
      scales = reinterpret_cast<const float*>(chunk + Fp8Chunk{P, kMaxStateDim}.row_scales()) + row;
    }
    __device__ void advance(int slices = 1) {
      codes += slices * kSliceWidth * kRowParts, scales += slices * kSliceWidth;
    }
  };

  StateOperand() = default;
  __device__ explicit StateOperand(const Source& source, int slice = 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = slice * kSliceWidth + 8 * i;
      row_scale[i] = source.scales[row];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[i][half] = source.codes[row * Source::kRowParts + half * (Source::kRowParts / 2)];
      }
    }
  }

  __device__ uint32_t loaded() const {
    return codes[0][0].x | codes[0][1].x | codes[1][0].x | codes[1][1].x | float_bits(row_scale[0]) |
           float_bits(row_scale[1]);
  }
  template <int kProduct>
  __device__ void get(uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = word_of(codes[i][kProduct / 4], kProduct % 4);
      a[i] = bits_of(e4m3_halves(word & 0xffffu));
      a[2 + i] = bits_of(e4m3_halves(word >> 16));
    }
  }

  __device__ float scale(int i, float first, float second) const {
    return __fmul_rn(__fadd_rn(first, second), row_scale[i]);
  }
  struct Factors {
    __device__ explicit Factors(const StateOperand&) {}
  };
  template <int kProduct>
  __device__ void get_scaled(const Factors&, uint32_t (&a)[4]) const {
    get<kProduct>(a);
  }
  __device__ float scaled_sum(const float (&sum)[2][4], int i) const {
    return __fmul_rn(__fadd_rn(sum[0][i], sum[1][i]), row_scale[i / 2]);
  }
  __device__ static float head_scale(const char*) { return 1.0f; }
};

__device__ inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  return bits_of(__hmul2(halves_of(a), halves_of(b)));
}

// Sums over a lane's two blocks of a query whose column 2 n has the block of lane n alone: all other lanes bring zeros.
// query: operands of two products each.
template <typename Format, int kStep = 0>
__device__ inline void multiply_blocks(const StateOperand<Format>& state, const uint4 (&query)[kProducts / 2],
                                       float (&sum)[2][4]) {
  if constexpr (kStep < kProducts / 2) {
    float (&of_block)[4] = sum[kStep / (kProducts / 4)];
    uint32_t a[4];
    state.template get<2 * kStep>(a);
    multiply_pairs<__half>(of_block, a[0], a[1], a[2], a[3], query[kStep].x, query[kStep].y);
    state.template get<2 * kStep + 1>(a);
    multiply_pairs<__half>(of_block, a[0], a[1], a[2], a[3], query[kStep].z, query[kStep].w);
    multiply_blocks<Format, kStep + 1>(state, query, sum);
  }
}

// Sums over all columns, in two parts, of the queries of eight tokens, one a column.
template <typename Format, int kStep = 0>
__device__ inline void multiply_scaled(const StateOperand<Format>& state,
                                       const typename StateOperand<Format>::Factors& factors,
                                       const uint4 (&query)[kProducts / 2], float (&sum)[2][4]) {
  if constexpr (kStep < kProducts / 2) {
    uint32_t a[4];
    state.template get_scaled<2 * kStep>(factors, a);
    multiply_pairs<__half>(sum[0], a[0], a[1], a[2], a[3], query[kStep].x, query[kStep].y);
    state.template get_scaled<2 * kStep + 1>(factors, a);
    multiply_pairs<__half>(sum[1], a[0], a[1], a[2], a[3], query[kStep].z, query[kStep].w);
    multiply_scaled<Format, kStep + 1>(state, factors, query, sum);
  }
}

// The quad's sums of even columns of one slice or two: lane (g, t) gets row g + 8 (t / 2), of slice t % 2.
template <int kSlices>
__device__ inline float sum_over_quad(const float (&y)[kSlices][4], int t) {
  float kept[kSlices];
#pragma unroll
  for (int j = 0; j < kSlices; ++j) {
    kept[j] = t >= 2 ? y[j][2] : y[j][0];
    kept[j] = __fadd_rn(kept[j], __shfl_xor_sync(~0u, t >= 2 ? y[j][0] : y[j][2], 2));
  }
  const float own = t % 2 == 0 ? kept[0] : kept[kSlices - 1];
  return __fadd_rn(own, __shfl_xor_sync(~0u, t % 2 == 0 ? kept[kSlices - 1] : kept[0], 1));
}

// Of a matrix of 8 by 8, of which lane (g, t) has (g, 2t) and (g, 2t + 1): (2t, g) and (2t + 1, g).
__device__ inline uint32_t transpose_pairs(uint32_t pair) {
  uint32_t transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// ---- the history ---------------------------------------------------------------------------------------------------

// A pair of staged values, zeros for those that are not finite.
template <typename Staged>
__device__ inline uint32_t finite_of(uint32_t pair) {
  return pair & ((is_finite<Staged>(pair & 0xffffu) ? 0xffffu : 0u) |
                 (is_finite<Staged>(pair & 0xffff0000u) ? 0xffff0000u : 0u));
}

// 16 records of a slice's x as the operand of a product.
template <typename Staged>
struct HistoryOperand {
  static constexpr int kParts = std::is_same_v<Staged, __half> ? 2 : 1;  // of BF16
  uint32_t part[kParts][4];

  // x: the lane's row of a matrix of 8 by 8: of record lane / 16 * 8 + lane % 8, the slice's columns from lane / 8 % 2
  // * 8 on.
  __device__ explicit HistoryOperand(const Staged* x) {
    load_transposed(part[0], x);
    take_parts();
  }
  // word: what load_transposed brings.
  __device__ explicit HistoryOperand(const uint32_t (&word)[4]) : part{{word[0], word[1], word[2], word[3]}} {
    take_parts();
  }
  __device__ void take_parts() {
    uint32_t (&a)[4] = part[0];
    if constexpr (kParts == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 pair = unpack_pair<__half>(a[i]);
        a[i] = take_part(pair.x, pair.y);
        part[1][i] = upper_halves(pair.x, pair.y);
      }
    }
  }
  // y += x times the lane's column of weights.
  __device__ void multiply(uint32_t first, uint32_t second, float (&y)[4]) const {
#pragma unroll
    for (int i = kParts - 1; i >= 0; --i) {
      multiply_pairs<__nv_bfloat16>(y, part[i][0], part[i][1], part[i][2], part[i][3], first, second);
    }
  }
};

}  // namespace
}  // namespace cuda
}  // namespace replayssm
