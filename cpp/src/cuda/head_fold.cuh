// SPDX-License-Identifier: Apache-2.0
//
// Folding a head and casting it to its read copy in a CTA's registers (step_read.cu).
//
// A warp has a slice, a lane of its rows 2g and 2g + 1 the t-th block of 16 columns of either half, (g, t) = (lane / 4,
// lane mod 4). The order of a product's columns is free: column n of product j stands for column j + 8 (n mod 2) of the
// block of lanes with t = n / 2, so that eight products give a lane its whole block, and what a lane brings to them are
// neighbouring columns of B. What a block of a read copy needs then lies in one lane: rounding, its maximum, the search
// of its scale. Only the maxima of the head and its columns go through shared memory. The checkpoint comes by a block
// copy and is stored from registers or, if steps read it, leaves in blocks as well. In wide CTAs a warp has one of the
// halves.
#pragma once

#include "pipeline.cuh"
#include "read_operands.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kSlicesAtOnce = 4;  // that a CTA folds

// Of a lane: of a row block t of a half, or of both halves; and those of rows 2g and 2g + 1.
template <int kHalves>
using RowPart = float[kHalves][kBlock];
template <int kHalves>
using SlicePart = RowPart<kHalves>[2];

__device__ inline int column_of(int lane, int half) { return (4 * half + lane % 4) * kBlock; }

// The lane's part of a checkpoint's slice, from its first half on.
template <typename Stored, int kHalves>
__device__ inline void load_slice(const Stored* slice, int lane, SlicePart<kHalves>& state) {
  constexpr int kVec = Packed<Stored>::kVec;
  const Stored* const source = slice + lane / 4 * 2 * kMaxStateDim + column_of(lane, 0);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int b = 0; b < kHalves; ++b)
#pragma unroll
      for (int j = 0; j < kBlock; j += kVec) {
        float value[kVec];
        Packed<Stored>::unpack(*reinterpret_cast<const uint4*>(source + i * kMaxStateDim + b * 4 * kBlock + j), value);
#pragma unroll
        for (int v = 0; v < kVec; ++v) state[i][b][j + v] = value[v];
      }
}

// Where B lies as operands of products, for each column those that a lane brings side by side: of BF16 of records
// 16k + 2t and 16k + 2t + 1, a word, and 16k + 2t + 8 and 16k + 2t + 9; of FP16, in float32, of records 8k + t and
// 8k + 4 + t. Rows of columns are padded, so that lanes don't meet a bank twice. Words.
constexpr int kPairStride = 2 * kMaxStateDim + 4;
template <typename Staged>
constexpr int kOperandRows = std::is_same_v<Staged, __nv_bfloat16> ? 4 : 8;  // of 16 records
template <typename Staged>
__host__ __device__ constexpr int operands_size(int records) {
  return (records + 15) / 16 * kOperandRows<Staged> * kPairStride;
}

// add_records of mma.cuh for a SlicePart: the same records give the same bits. x: the lane's rows of the newest record;
// B: operands, from the first half on.
template <int kHalves>
__device__ __forceinline__ void fold_slice(SlicePart<kHalves>& state, const __nv_bfloat16* x, int x_stride,
                                           const float* B, const float* weight, float decay, int h, int lane,
                                           uint32_t) {
  const int g = lane / 4, t = lane % 4;
  const float* source = B + t * kPairStride + 2 * (g / 2 * kBlock + g % 2 * 8);
  x += 2 * t * x_stride, weight += 2 * t;
#pragma unroll 1
  for (int first = 0; first < h; first += 16) {
    const WeighedRecords weighed(x, x_stride, weight, true);
#pragma unroll
    for (int b = 0; b < kHalves; ++b)
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        uint4 columns[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          columns[i] = *reinterpret_cast<const uint4*>(source + 2 * (b * 4 * kBlock + j + 2 * i));
        }
        float sum[4][4] = {};
        weighed.multiply(sum, reinterpret_cast<const uint32_t (&)[4][2]>(columns));
#pragma unroll
        for (int v = 0; v < 4; ++v)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            state[i][b][j + v] = fmaf(decay, state[i][b][j + v], sum[v][2 * i]);
            state[i][b][j + v + 8] = fmaf(decay, state[i][b][j + v + 8], sum[v][2 * i + 1]);
          }
      }
    decay = 1.0f;
    x += 16 * x_stride, weight += 16, source += 4 * kPairStride;
  }
}

template <int kHalves>
__device__ __forceinline__ void fold_slice(SlicePart<kHalves>& state, const __half* x, int x_stride, const float* B,
                                           const float* weight, float decay, int h, int lane, uint32_t mask) {
  const int g = lane / 4, t = lane % 4;
  const float* source = B + t * kPairStride + 2 * (g / 2 * kBlock + g % 2 * 8);
  x += t * x_stride, weight += t;
#pragma unroll 1
  for (int first = 0; first < h; first += 8) {
    float scaled[4], high[4], low[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = unpack_pair<__half>(*reinterpret_cast<const uint32_t*>(x + half * 4 * x_stride));
      const float v = weight[half * 4];
      scaled[2 * half] = __fmul_rn(v, pair.x);
      scaled[2 * half + 1] = __fmul_rn(v, pair.y);
    }
    split(scaled, mask, high, low);
#pragma unroll
    for (int b = 0; b < kHalves; ++b)
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float4 both = *reinterpret_cast<const float4*>(source + 2 * (b * 4 * kBlock + j));
        const float pair[2][2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          float sum[4] = {};
          multiply_tf32(sum, low, pair[v]);
          multiply_tf32(sum, high, pair[v]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            state[i][b][j + v] = fmaf(decay, state[i][b][j + v], sum[2 * i]);
            state[i][b][j + v + 8] = fmaf(decay, state[i][b][j + v + 8], sum[2 * i + 1]);
          }
        }
      }
    decay = 1.0f;
    x += 8 * x_stride, weight += 8, source += 4 * kPairStride;
  }
}

// ---- maxima --------------------------------------------------------------------------------------------------------

// max(a, |b|), NaN if one of them is; a is not negative.
__device__ inline float larger_magnitude(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
  return result;
}
__device__ inline float larger_magnitude(const float (&value)[kBlock]) {
  float amax = fabsf(value[0]);
#pragma unroll
  for (int i = 1; i < kBlock; ++i) amax = larger_magnitude(amax, value[i]);
  return amax;
}

// The largest magnitudes of the blocks of a SlicePart, and of all of them.
template <int kHalves>
using BlockMaxima = float[2][kHalves];
template <int kHalves>
__device__ inline void find_block_maxima(const SlicePart<kHalves>& state, BlockMaxima<kHalves>& amax) {
#pragma unroll
  for (int b = 0; b < 2 * kHalves; ++b) {
    amax[b / kHalves][b % kHalves] = larger_magnitude(state[b / kHalves][b % kHalves]);
  }
}
template <int kHalves>
__device__ inline float largest(const BlockMaxima<kHalves>& amax) {
  float result = 0.0f;
#pragma unroll
  for (int b = 0; b < 2 * kHalves; ++b) result = larger_magnitude(result, amax[b / kHalves][b % kHalves]);
  return result;
}
template <int kHalves>
__device__ inline float slice_amax(const SlicePart<kHalves>& state) {
  BlockMaxima<kHalves> amax;
  find_block_maxima<kHalves>(state, amax);
  return largest<kHalves>(amax);
}

// The amaxes of four columns over a slice's rows, to the lane-th place of scratch: of columns 4 lane to 4 lane + 3 or,
// of one half, of 4 (lane % 16) to 4 (lane % 16) + 3 over half the rows. Returns the largest. scratch: of the warp, 8
// rows of columns. more: with what is there of another slice.
template <int kHalves>
__device__ inline float column_maxima(const SlicePart<kHalves>& state, int lane, float4* scratch, bool more) {
  constexpr int kPieces = kHalves * kMaxStateDim / 8, kRows = 8 * kPieces / 32;
  const int g = lane / 4, t = lane % 4;
  // Pieces of four columns are permuted among neighbours, so that no lanes meet a bank twice.
  float4* const target = scratch + g * kPieces + 4 * t;
  float4 amax = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (more) amax = scratch[lane];
  __syncwarp();  // before that, others may still need what lies there
#pragma unroll
  for (int b = 0; b < kHalves; ++b)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float both[4];
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        both[v] = larger_magnitude(fabsf(state[0][b][4 * j + v]), state[1][b][4 * j + v]);
      }
      target[16 * b + (j ^ t / 2 ^ g % 2 * 2)] = make_float4(both[0], both[1], both[2], both[3]);
    }
  __syncwarp();
  const int piece = lane % kPieces, first = lane / kPieces * kRows;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float4 v = scratch[(first + row) * kPieces + (piece ^ (piece / 8 % 2) ^ row % 2 * 2)];
    amax.x = larger_magnitude(amax.x, v.x), amax.y = larger_magnitude(amax.y, v.y);
    amax.z = larger_magnitude(amax.z, v.z), amax.w = larger_magnitude(amax.w, v.w);
  }
  __syncwarp();
  scratch[lane] = amax;
  return larger_magnitude(larger_magnitude(amax.x, amax.y), larger_magnitude(amax.z, amax.w));
}

// ---- the checkpoint ------------------------------------------------------------------------------------------------

// A lane's part of a row into a plain checkpoint, to nearest. target: its first column.
template <typename Stored, int kHalves>
__device__ inline void store_nearest(const RowPart<kHalves>& row, Stored* target) {
  constexpr int kVec = Packed<Stored>::kVec;
#pragma unroll
  for (int b = 0; b < kHalves; ++b)
#pragma unroll
    for (int j = 0; j < kBlock; j += kVec) {
      float value[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) value[v] = row[b][j + v];
      *reinterpret_cast<uint4*>(target + b * 4 * kBlock + j) = Packed<Stored>::pack(value);
    }
}

// A run of columns in FP16, whatever they are. Out of the way of those that are below 65472.
__device__ __noinline__ uint4 pack_any_run(float4 front, float4 back, uint4 drawn) {
  const float value[kFp16Run] = {front.x, front.y, front.z, front.w, back.x, back.y, back.z, back.w};
  const uint32_t random[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
  uint32_t pair[4];
  bool finite = true;  // is_stored_finite() looks, too
  pack_any_fp16_sr(value, random, pair, finite);
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

// A lane's part of a slice in FP16, stochastically, which is what a draw serves, or half of it; p: its first row's
// index in the head; column: of `target`, where that begins. moderate: all values are below 65472.
template <int kHalves>
__device__ __forceinline__ void store_stochastic(const SlicePart<kHalves>& state, RoundingKey key, int64_t writes,
                                                 int p, int column, __half* target, bool moderate) {
  RandomWords drawn = rounding_words(key, p, fp16_draw(column), writes);
  uint32_t (&random)[4] = drawn.word;
  if (kHalves == 1) {
#pragma unroll
    for (int k = 0; k < 4; ++k) random[k] *= fp16_factor(0, column);
  }
  auto for_runs = [&](auto pack) {
#pragma unroll
    for (int run = 0; run < 4 * kHalves; ++run) {
      const int half = run / 4, first = run / 2 % 2 * kFp16Run, row = run % 2;
      if (run > 0) {
#pragma unroll
        for (int k = 0; k < 4; ++k) random[k] *= kNextRun;
      }
      *reinterpret_cast<uint4*>(target + row * kMaxStateDim + half * 4 * kBlock + first) =
          pack(state[row][half] + first);
    }
  };
  if (__builtin_expect(moderate, true)) {
    for_runs([&](const float* value) {
      uint32_t pair[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        pair[k] = pack_moderate_fp16_sr(value[2 * k], value[2 * k + 1], random[k]);
      }
      return make_uint4(pair[0], pair[1], pair[2], pair[3]);
    });
  } else {
    for_runs([&](const float* value) {
      return pack_any_run(make_float4(value[0], value[1], value[2], value[3]),
                          make_float4(value[4], value[5], value[6], value[7]),
                          make_uint4(random[0], random[1], random[2], random[3]));
    });
  }
}

// Whether what the lane has stored of a slice is finite.
template <int kHalves>
__device__ inline bool is_stored_finite(const __half* target) {
  bool finite = true;
#pragma unroll 1
  for (int piece = 0; piece < 4 * kHalves; ++piece) {  // of 16 bytes
    const int at = piece % 2 * 8 + piece / 2 % kHalves * 4 * kBlock + piece / (2 * kHalves) * kMaxStateDim;
    finite = finite && is_finite<__half>(*reinterpret_cast<const uint4*>(target + at));
  }
  return finite;
}

// ---- the read copy -------------------------------------------------------------------------------------------------

__device__ __noinline__ float divide(float value, float divisor) { return scaled_down(value, divisor); }

// Division of many values by one that is not negative, with the results of scaled_down.
class Divisor {
 public:
  __device__ explicit Divisor(float divisor)
      : divisor_(divisor), inverse_(divisor > 0.0f ? div_rn(1.0f, divisor) : 0.0f) {}

  __device__ void operator()(float (&value)[kBlock]) const {
    uint32_t least = ~0u;  // of the magnitudes above 0, minus 1
#pragma unroll
    for (int i = 0; i < kBlock; ++i) least = min(least, magnitude_bits(value[i]) - 1u);
    // Where the remainders below are exact, the last step rounds as division does. (A zero may change its sign.)
    const bool exact = divisor_ > 0x1p-40f && divisor_ < 0x1p40f && least >= float_bits(0x1p-80f);
    if (exact) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        float quotient = mul_rn(value[i], inverse_);
        quotient = fmaf(fmaf(-divisor_, quotient, value[i]), inverse_, quotient);
        value[i] = fmaf(fmaf(-divisor_, quotient, value[i]), inverse_, quotient);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) value[i] = divide(value[i], divisor_);
    }
  }

 private:
  float divisor_, inverse_;
};

// Where a lane stores the first block of a row.
template <typename Format>
struct BlockTarget {
  char *codes, *low_bits, *scales;

  __device__ BlockTarget(char* chunk, int P, int index) {
    const BlockChunk<Format> layout{P, kMaxStateDim};
    codes = chunk + index * (kBlock / 2);
    low_bits = chunk + layout.low_bits() + 2 * index;
    scales = chunk + layout.block_scales() + index;
  }
  __device__ void store(const CastBlock& found) const {
    *reinterpret_cast<uint2*>(codes) = found.codes;
    if constexpr (Format::kLowBits) {
      *reinterpret_cast<uint16_t*>(low_bits) = static_cast<uint16_t>(found.low_bits);
    }
    *scales = static_cast<char>(found.scale);
  }
  // On to the lane's block in the next half.
  __device__ void take_next() { codes += 4 * (kBlock / 2), low_bits += 4 * 2, scales += 4; }
};

// What the blocks of a head have in common.
struct AmaxHead {
  float scale;
  float of_amax;  // times a block's largest magnitude: its scale, but for some last bits
  bool common;    // these are few

  __device__ explicit AmaxHead(float head_scale) : scale(head_scale) {
    const float sixfold = mul_rn(6.0f, head_scale);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(of_amax) : "f"(sixfold));
    common = sixfold > 0x1p-40f && sixfold < 0x1p40f;
  }
};

// Any block of Nvfp4Amax, by the definition: codes and the scale's code. Out of the way of those that are common.
__device__ __noinline__ uint4 cast_rare_block(float4 a, float4 b, float4 c, float4 d, float amax, float head_scale) {
  const float value[kBlock] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
  const uint8_t scale = Nvfp4Amax::block_scale(float_bits(amax), head_scale);
  const float step = block_step(scale, head_scale);
  uint32_t codes[kBlock / 4];
#pragma unroll
  for (int j = 0; j < kBlock / 4; ++j) {
    float quad[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) quad[i] = scaled_down(value[4 * j + i], step);
    codes[j] = pack_e2m1(quad);
  }
  return make_uint4(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16, scale, 0);
}

// A block of Nvfp4Amax. amax: its largest magnitude.
//
// Ratios by the inverse of the step, and a little more, are never below what division gives. Times 2^-14, cut off to
// FP16, they have their codes in the upper bits, rounded half up. That is the definition's code, unless a ratio lies at
// the middle between two codes or just above it: then all bits of the float32 but the upper two of its significand are
// as good as zeros, and the FP16 number is that middle. So are bits of a scale, raised by half of what it is rounded
// to, that lies near the middle between two.
__device__ __forceinline__ CastBlock cast_block(const float (&value)[kBlock], float amax, const AmaxHead& head) {
  constexpr uint32_t kNear = 16u << 12;
  const uint32_t raised = float_bits(mul_rn(amax, head.of_amax)) + 0x80008u;
  const float scale = bits_float(raised & 0xfff00000u);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(mul_rn(scale, head.scale)));
  inverse = mul_rn(inverse, 0x1p-14f * (1.0f + 0x1p-21f));
  uint32_t least = raised << 12, pair[kBlock / 2], words[2];  // pairs of columns as a PairedBlock has them
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    const int column = i / 2 * 4 + i % 2;
    // Adding 0 turns -0 into 0.
    const float first = fmaf(value[column], inverse, 0.0f), second = fmaf(value[column + 2], inverse, 0.0f);
    least = __vimin3_u32(least, float_bits(first) << 11, float_bits(second) << 11);
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair[i]) : "f"(second), "f"(first));
  }
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    const uint32_t even = __byte_perm(pair[4 * word], pair[4 * word + 2], 0x7531),
                   odd = __byte_perm(pair[4 * word + 1], pair[4 * word + 3], 0x7531);
    const uint32_t magnitudes = (choose_bits<0x0f0f0f0fu>(even, odd << 4) + 0x11111111u) >> 1,
                   signs = choose_bits<0x80808080u>(odd, even >> 4);
    words[word] = choose_bits<0x77777777u>(magnitudes, signs);
  }
  uint4 cast = make_uint4(words[0], words[1], scale_code(float_bits(scale)), 0);
  // By scales that are not normal ratios could be 7 or more.
  bool rare = !head.common || scale < 0x1p-6f;
  if (__builtin_expect(rare || least < kNear, false)) {
    rare = rare || raised << 12 < kNear;
    uint32_t middle = ~0u;  // 0 in a half where an FP16 number is one
    float smallest = 1.0f;
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) middle = __vminu2(middle, (pair[i] & 0x01ff01ffu) ^ 0x01000100u);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) smallest = fminf(smallest, fabsf(value[i]));
    if (rare || middle < 0x10000u || middle << 16 == 0 || smallest < 0x1p-80f) {  // of the last there may be no sign
      cast = cast_rare_block(make_float4(value[0], value[1], value[2], value[3]),
                             make_float4(value[4], value[5], value[6], value[7]),
                             make_float4(value[8], value[9], value[10], value[11]),
                             make_float4(value[12], value[13], value[14], value[15]), amax, head.scale);
    }
  }
  return {make_uint2(cast.x, cast.y), 0, static_cast<uint8_t>(cast.z)};
}

__device__ __noinline__ uint32_t rare_column_scale(float amax, uint32_t head_amax, float head_scale) {
  return column_scale(float_bits(amax), head_amax, head_scale);
}

// A column's scale, as column_scale has it, and what its values are multiplied by.
__device__ inline uint8_t scale_column(float amax, uint32_t head_amax, float head_scale, float& of_column) {
  const HeadUnit unit(head_scale);
  float inverse, root;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(bits_float(head_amax)));
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(mul_rn(amax, inverse)));
  const uint32_t raised = float_bits(fmaxf(root, 0x1p-6f)) + 0x80008u;
  uint32_t code = scale_code(raised);
  // Not where the head is very small or large, or where the root lies near the middle between two codes.
  if (__builtin_expect(!(head_scale > 0x1p-60f && head_scale < 0x1p60f) || raised << 12 < 16u << 12, false)) {
    code = rare_column_scale(amax, head_amax, head_scale);
  }
  // The inverses of all eight significands come out rounded.
  const float scale = e4m3_to_float(static_cast<uint8_t>(code));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
  inverse = fmaf(fmaf(-scale, inverse, 1.0f), inverse, inverse);
  of_column = code > 0 ? mul_rn(inverse, unit.inverse) : 0.0f;
  return static_cast<uint8_t>(code);
}

// What the casts of a head share. inverse: HeadUnit::of_column of all columns from a lane's first half on, in shared
// memory, of formats that have column scales.
struct HeadCast {
  char* chunk;
  int head_dim;
  uint32_t amax;
  float scale;
  const float* inverse;
};

// A lane's part of row p of a head to its chunk, from half `half` on. What row holds is lost.
template <typename Format, int kHalves>
__device__ __forceinline__ void cast_row(RowPart<kHalves>& row, int p, int half, int lane, const HeadCast& head) {
  BlockTarget<Format> target(head.chunk, head.head_dim, p * (kMaxStateDim / kBlock) + half * 4 + lane % 4);
  const HeadUnit unit(head.scale);
  PairedBlock u[kHalves];
#pragma unroll
  for (int b = 0; b < kHalves; ++b) {
    float (&value)[kBlock] = row[b];
    float of_column[kBlock];
#pragma unroll
    for (int j = 0; j < kBlock; ++j) of_column[j] = unit.inverse;
    if constexpr (Format::kColumnScales) load_shared<kBlock>(head.inverse + column_of(lane, b), of_column);
    if (unit.lift != 1.0f) {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) value[j] = mul_rn(value[j], unit.lift);
    }
#pragma unroll
    for (int j = 0; j < kBlock / 2; ++j) {
      const int column = j / 2 * 4 + j % 2;
      u[b][j] =
          __floats2half2_rn(mul_rn(value[column], of_column[column]), mul_rn(value[column + 2], of_column[column + 2]));
    }
  }
#pragma unroll 1
  for (int b = 0; b < kHalves; ++b) {  // a loop, for the instruction cache
    CastBlock found{};
    if (head.scale > 0.0f) found = search_block<Format>(u[0], tries_first_only(head.amax));
    target.store(found);
    target.take_next();
#pragma unroll
    for (int j = 0; j < kBlock / 2; ++j) u[0][j] = u[kHalves - 1][j];
  }
}

// The lane's part of a slice by the blocks' largest magnitudes; p: its first row.
template <int kHalves>
__device__ __forceinline__ void cast_slice(const SlicePart<kHalves>& state, const BlockMaxima<kHalves>& amax, int p,
                                           int half, int lane, const HeadCast& head, const AmaxHead& shared) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    BlockTarget<Nvfp4Amax> target(head.chunk, head.head_dim, (p + i) * (kMaxStateDim / kBlock) + half * 4 + lane % 4);
#pragma unroll
    for (int b = 0; b < kHalves; ++b) {
      target.store(cast_block(state[i][b], amax[i][b], shared));
      target.take_next();
    }
  }
}

// Rows have their scale: it takes both halves.
template <>
__device__ __forceinline__ void cast_row<Fp8, 2>(RowPart<2>& row, int p, int half, int lane, const HeadCast& head) {
  uint32_t amax = max(float_bits(larger_magnitude(row[0])), float_bits(larger_magnitude(row[1])));
  amax = larger_of_both(larger_of_both(amax, 1), 2);
  const float scale = fp8_row_scale(amax);
  if (lane % 4 == 0) {
    reinterpret_cast<float*>(head.chunk + Fp8Chunk{head.head_dim, kMaxStateDim}.row_scales())[p] = scale;
  }
  const Divisor divisor(scale);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    float (&value)[kBlock] = row[b];
    divisor(value);
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float quad[4] = {value[4 * j], value[4 * j + 1], value[4 * j + 2], value[4 * j + 3]};
      codes[j] = pack_e4m3(quad);
    }
    *reinterpret_cast<uint4*>(head.chunk + p * kMaxStateDim + column_of(lane, b)) =
        make_uint4(codes[0], codes[1], codes[2], codes[3]);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace replayssm
