// SPDX-License-Identifier: Apache-2.0
//
// The number formats of stored states: E4M3, E2M1 and E2M2 codes, their scales, stochastic rounding and its random
// bits.
//
// Both implementations compile this file, and one is tested against the other bit by bit. So everything is integer
// arithmetic or single IEEE operations whose rounding is spelled out (add_rn, mul_rn, div_rn, sqrt_rn), which no
// compiler may contract into a fused multiply-add. Kernels may do the same by other instructions; what counts is the
// result.
//
// Rounding to nearest is ties to even, but for the codes of searched scales, whose ties go away from 0. Magnitudes are
// compared and rounded as integers: the bits of a positive float are in the order of its value, an increment of the
// lowest kept bit carries into the exponent by itself, and NaN lies above infinity, which lies above every number.
//
// Stochastic rounding adds random bits to the mantissa bits that the target lacks, and cuts them off: it rounds up with
// the probability that the cut-off part is of a step. Blackwell's cvt.rs does so in hardware. Its semantics here:
//   - PTX ISA 8.7, "cvt": the result is rounded towards zero or away from it by the carry out of the integer addition
//     of the random bits to the discarded mantissa bits. For f16x2 (layout of rbits): bits 12..0 for the lower result,
//     28..16 for the upper one: all 13 discarded bits of a normal result.
//   - For e4m3x4 the ISA gives 16 bits of rbits to each pair of results. Public measurements on sm_100a (the software
//     paths and tests of flashinfer, include/flashinfer/mamba/conversion.cuh, and of a second project that agrees) show
//     the rest: the lower result of a pair takes the 16 bits as they are, the upper one in reverse order; they are
//     added at the top of the discarded bits, in the subnormal range too; what exceeds 448 saturates.
//   - Open in public text: f16 results that are subnormal or beyond 65504. The functions below, which need no hardware,
//     are the definition, and what kernels compute there.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace replayssm {

// ---- IEEE pieces ---------------------------------------------------------------------------------------------------

REPLAYSSM_HOST_DEVICE inline uint32_t float_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

REPLAYSSM_HOST_DEVICE inline float bits_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

REPLAYSSM_HOST_DEVICE inline float add_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

REPLAYSSM_HOST_DEVICE inline float mul_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

REPLAYSSM_HOST_DEVICE inline float div_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

REPLAYSSM_HOST_DEVICE inline float sqrt_rn(float value) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNanBits = 0x7fc00000u;

// The bits of |value|. Their maximum over a set is the bits of its amax, and not below kInfinityBits if one of the set
// is infinite or NaN.
REPLAYSSM_HOST_DEVICE inline uint32_t magnitude_bits(float value) { return float_bits(value) & 0x7fffffffu; }

// ---- codes ---------------------------------------------------------------------------------------------------------

// E4M3: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, 0x7f is NaN; largest 448, smallest 2^-9.

REPLAYSSM_HOST_DEVICE inline float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return bits_float(sign | kNanBits);
  // The fields in place, and the exponent's bias corrected by 2^120: exact, subnormal codes included.
  return bits_float(sign | float_bits(mul_rn(bits_float(magnitude << 20), bits_float(0x7b800000u))));
}

// To nearest; what exceeds 448 saturates.
REPLAYSSM_HOST_DEVICE inline uint8_t float_to_e4m3(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(value));
  return static_cast<uint8_t>(codes);
#else
  const uint32_t sign = float_bits(value) >> 24 & 0x80u, magnitude = magnitude_bits(value);
  if (magnitude > kInfinityBits) return 0x7fu;
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);
  // Below 2^-6 codes are 2^-9 apart, like floats in [2^14, 2^15).
  const uint32_t code = magnitude < 0x3c800000u
                            ? float_bits(add_rn(bits_float(magnitude), 16384.0f)) - float_bits(16384.0f)
                            : ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | code);
#endif
}

// Stochastically, by 16 random bits; what exceeds 448 saturates.
REPLAYSSM_HOST_DEVICE inline uint8_t float_to_e4m3_sr(float value, uint32_t random16) {
  const uint32_t sign = float_bits(value) >> 24 & 0x80u, magnitude = magnitude_bits(value);
  if (magnitude > kInfinityBits) return 0x7fu;
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);
  // Below 2^-6: in units of 2^-25, of which a step has 2^16.
  const uint32_t code = magnitude < 0x3c800000u
                            ? (static_cast<uint32_t>(mul_rn(bits_float(magnitude), 33554432.0f)) + random16) >> 16
                            : ((magnitude + (random16 << 4)) >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | code);
}

// E2M1: sign, 2 exponent bits (bias 1), 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6.

REPLAYSSM_HOST_DEVICE inline float e2m1_to_float(uint32_t code) {
  const float magnitude = mul_rn(bits_float((code & 7u) << 22), bits_float(0x7e800000u));  // bias corrected by 2^126
  return bits_float((code & 8u) << 28 | float_bits(magnitude));
}

// To nearest; what exceeds 6 saturates. Numbers below zero that round to zero get the code of -0, -0 itself that of +0.
REPLAYSSM_HOST_DEVICE inline uint32_t float_to_e2m1(float value) {
  const uint32_t sign = value < 0.0f ? 8u : 0u, magnitude = magnitude_bits(value);
  if (magnitude >= 0x40c00000u) return sign | 7u;
  // Below 1 codes are 0.5 apart, like floats in [2^22, 2^23).
  const uint32_t code = magnitude < 0x3f800000u
                            ? float_bits(add_rn(bits_float(magnitude), 4194304.0f)) - float_bits(4194304.0f)
                            : ((magnitude + 0x1fffffu + (magnitude >> 22 & 1u)) >> 22) - (126u << 1);
  return sign | code;
}

// E2M2: sign, 2 exponent bits (bias 1), 2 mantissa bits: 0, 0.25, .. 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7. Without its
// lowest bit a code is the E2M1 code of the magnitude rounded down.

REPLAYSSM_HOST_DEVICE inline float e2m2_to_float(uint32_t code) {
  const float magnitude = mul_rn(bits_float((code & 15u) << 21), bits_float(0x7e800000u));
  return bits_float((code & 16u) << 27 | float_bits(magnitude));
}

// FP16 stochastically, by 13 random bits: exactly unbiased for results from 2^-14 to 65504, within 2^-37 (2^-13 of a
// step) for subnormal ones. Numbers above 65504 become that or infinity, as the random bits say; from 65536 on
// infinity.
REPLAYSSM_HOST_DEVICE inline uint16_t float_to_fp16_sr(float value, uint32_t random13) {
  const uint32_t sign = float_bits(value) >> 16 & 0x8000u, magnitude = magnitude_bits(value);
  if (magnitude > kInfinityBits) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
  // Below 2^-14: in units of 2^-37, of which a step has 2^13.
  const uint32_t code = magnitude < 0x38800000u
                            ? (static_cast<uint32_t>(mul_rn(bits_float(magnitude), 137438953472.0f)) + random13) >> 13
                            : ((magnitude + random13) >> 13) - (112u << 10);
  return static_cast<uint16_t>(sign | code);
}

// ---- scales --------------------------------------------------------------------------------------------------------

// value / scale, 0 for a scale of 0 (all its values are 0 or too small for it) and for NaN (of values not finite).
REPLAYSSM_HOST_DEVICE inline float scaled_down(float value, float scale) {
  return scale > 0.0f ? div_rn(value, scale) : 0.0f;
}

// amax / divisor, or NaN if amax is not finite.
REPLAYSSM_HOST_DEVICE inline float scale_of(uint32_t amax_bits, float divisor) {
  return amax_bits < kInfinityBits ? div_rn(bits_float(amax_bits), divisor) : bits_float(kNanBits);
}

// The scale of a row of E4M3 codes: S = code * scale.
REPLAYSSM_HOST_DEVICE inline float fp8_row_scale(uint32_t amax_bits) { return scale_of(amax_bits, 448.0f); }

constexpr int32_t kBlock = 16;  // columns that share a block scale

// The E4M3 code of a block's scale in units of the head's, from what it should be; 1 for a block of zeros.
REPLAYSSM_HOST_DEVICE inline uint8_t block_scale_code(float scale) {
  if (scale == 0.0f) return 0x38u;
  return float_to_e4m3(scale < 0.001953125f ? 0.001953125f : scale);
}

// What a code of the block stands for, before a column scale: value = code * block_step.
REPLAYSSM_HOST_DEVICE inline float block_step(uint8_t block_scale, float head_scale) {
  return mul_rn(e4m3_to_float(block_scale), head_scale);
}

// ---- formats of block scales ---------------------------------------------------------------------------------------

// NVFP4 as Model Optimizer computes it: the largest of a block becomes the largest code. Code = E2M1(scaled_down(S,
// block_step)).
struct Nvfp4Amax {
  static constexpr bool kLowBits = false;       // codes have a fifth bit
  static constexpr bool kColumnScales = false;  // columns have scales

  REPLAYSSM_HOST_DEVICE static float value(uint32_t code) { return e2m1_to_float(code); }
  REPLAYSSM_HOST_DEVICE static float head_scale(uint32_t amax_bits) { return scale_of(amax_bits, 6.0f * 448.0f); }
  REPLAYSSM_HOST_DEVICE static uint8_t block_scale(uint32_t amax_bits, float head_scale) {
    return head_scale > 0.0f ? block_scale_code(div_rn(bits_float(amax_bits), mul_rn(6.0f, head_scale))) : uint8_t{0};
  }
};

// The formats below try some scales a block and keep the one of the least squared error. The largest codes lie far
// apart: mapping the largest of a block to 4, or to a little more or less than 6, pays if the others fit better.
//
// They work in FP16 on u = S / (512 g c), g the head's scale, c the column's (or 1), and on the block's amax,
//     a = max(amax(u), kLeastAmax)
// A scale s is a normal number of E4M3. By it
//     r = |u| (2^-5 / s)
// is 2^-14 times what the code shall stand for: that puts the smallest normal code where FP16 has its smallest normal
// number, and a code is the upper bits of r, rounded half up. g leaves room for an s by the smallest divisor. Of equal
// errors the first scale wins. A head of 2^127 or more tries the first one only, with which no code stands for more
// than the head's amax; by others one could be beyond the range of float32.
//
// Column scales: a block lies within a row and follows the row's size already, but columns differ within it. c is the
// root of the column's share of the head's amax, in [2^-6, 1]: it brings small columns nearer to the large ones of
// their block, which c = the share would do at the cost of the large ones. The largest column has c = 1, so amax(u) is
// that of S / (512 g), but for 1/500 by the rounding of c, which saturates.

// Three scales of a block, and their errors in integers: s1 = E4M3(a 512 / 6); one of its neighbours; E4M3(a 512 / 4).
// (These round half up, and saturate: where g is subnormal, a is up to 4.5 instead of 3.) With q twice the magnitude of
// a code, U = |u| f rounded to an integer, half to even, and m = s f / 1024,
//     error = sum (m q - U)^2 - sum U^2 = m (m sum q^2 - 2 sum q U)
// f is the power of two by which m of s1 is 10, 11, 12, 13, 14, 15, 16 or 18, so that U is below 256. The neighbour is
// the larger one if sum q (U - m q) > 0 by s1, if its codes are too small as a whole, or if a 512 / 6.875 is not below
// the smaller one, by which codes could be too large; else the smaller one.
struct Nvfp4 {
  static constexpr bool kLowBits = false;
  static constexpr bool kColumnScales = true;
  static constexpr int32_t kMantissaBits = 1;

  REPLAYSSM_HOST_DEVICE static float value(uint32_t code) { return e2m1_to_float(code); }
  REPLAYSSM_HOST_DEVICE static float head_scale(uint32_t amax_bits) { return scale_of(amax_bits, 6.0f * 256.0f); }
  static constexpr float kLeastAmax = 0x1p-15f * 6.5f;
  static constexpr float kShare = 512.0f / 6.0f, kWideShare = 512.0f / 4.0f, kLeastShare = 512.0f / 6.875f;
};

// The normal number of E4M3 that is nearest to a positive one, as the bits of a float; from one to the next; its code.
REPLAYSSM_HOST_DEVICE inline uint32_t nearest_scale(float scale) {
  return (float_bits(scale) + 0x80000u) & 0xfff00000u;
}
constexpr uint32_t kNextScale = 1u << 20, kLargestScale = 0x43e00000u;
REPLAYSSM_HOST_DEVICE inline uint8_t scale_code(uint32_t scale) {
  return static_cast<uint8_t>((scale >> 20) - (120u << 3));
}

// s1 and the third scale.
REPLAYSSM_HOST_DEVICE inline uint32_t first_scale(float amax) { return nearest_scale(mul_rn(amax, Nvfp4::kShare)); }
REPLAYSSM_HOST_DEVICE inline uint32_t wide_scale(float amax) {
  const uint32_t scale = nearest_scale(mul_rn(amax, Nvfp4::kWideShare));
  return scale < kLargestScale ? scale : kLargestScale;
}

// f / 1024 by s1. Adding carries into the exponent if the next scale's significand is 11/8 or more.
REPLAYSSM_HOST_DEVICE inline float level_factor(uint32_t nearest) {
  return bits_float(((127u + 4u + 127u) << 23) - ((nearest + 6u * kNextScale) & kInfinityBits));
}
// m, by f / 1024.
REPLAYSSM_HOST_DEVICE inline int32_t half_code(uint32_t scale, float factor) {
  const float sum = add_rn(mul_rn(bits_float(scale), factor), 0x1p23f);
  return static_cast<int32_t>(float_bits(sum) - float_bits(0x1p23f));
}

// Four scales of a block, E4M3(a (512 / d)) of four divisors d. The error is s^2 sum (2^14 (r - nearest(r)))^2, the sum
// being over the columns n with n mod 4 < 2 and over the others, each left to right by fused multiply-add in FP16, and
// then one and the other in float32. Codes have 5 bits.
struct E2m2 {
  static constexpr bool kLowBits = true;
  static constexpr bool kColumnScales = false;
  static constexpr int32_t kMantissaBits = 2;

  REPLAYSSM_HOST_DEVICE static float value(uint32_t code) { return e2m2_to_float(code); }
  REPLAYSSM_HOST_DEVICE static float head_scale(uint32_t amax_bits) { return scale_of(amax_bits, 7.0f * 352.0f); }
  static constexpr float kLeastAmax = 0x1p-15f * 7.5f;
  static constexpr int32_t kCandidates = 4;
  // 512 / d.
  REPLAYSSM_HOST_DEVICE static constexpr float share(int32_t candidate) {
    return candidate == 0   ? 512.0f / 7.0f
           : candidate == 1 ? 512.0f / 6.5f
           : candidate == 2 ? 512.0f / 7.5f
                            : 512.0f / 6.0f;
  }
};

// Whether a head of this amax tries the first scale only.
REPLAYSSM_HOST_DEVICE inline bool tries_first_only(uint32_t head_amax_bits) { return head_amax_bits >= 0x7f000000u; }

// The E4M3 code of a column's scale.
REPLAYSSM_HOST_DEVICE inline uint8_t column_scale(uint32_t amax_bits, uint32_t head_amax_bits, float head_scale) {
  if (!(head_scale > 0.0f)) return 0;
  const float root = sqrt_rn(div_rn(bits_float(amax_bits), bits_float(head_amax_bits)));
  return float_to_e4m3(root < 0.015625f ? 0.015625f : root);
}

// u = (S lift) (1 / c) inverse: `lift` brings small heads to where 1 / (512 g) is a float32.
struct HeadUnit {
  float lift, inverse;

  REPLAYSSM_HOST_DEVICE explicit HeadUnit(float head_scale)
      : lift(head_scale < 0x1p-64f ? 0x1p64f : 1.0f),
        inverse(head_scale > 0.0f ? div_rn(1.0f, mul_rn(mul_rn(head_scale, lift), 512.0f)) : 0.0f) {}
  // What values, lifted, are multiplied by.
  REPLAYSSM_HOST_DEVICE float of_column(uint8_t scale) const {
    return scale > 0 ? mul_rn(div_rn(1.0f, e4m3_to_float(scale)), inverse) : 0.0f;
  }
};

// The magnitude of the code that r is rounded to, from the bits of |r| in FP16. By Nvfp4's scales r is below 2^-14
// times 7, from where on a code would be too large.
template <typename Format>
REPLAYSSM_HOST_DEVICE inline uint32_t code_of_ratio(uint32_t bits) {
  constexpr uint32_t kDropped = 10 - Format::kMantissaBits, kLargest = (4u << Format::kMantissaBits) - 1;
  const uint32_t code = (bits + (1u << (kDropped - 1))) >> kDropped;
  return code < kLargest ? code : kLargest;
}

// ---- chunks: where the parts of a head lie, bytes from its start ---------------------------------------------------

struct Fp8Chunk {
  int32_t head_dim, state_dim;

  REPLAYSSM_HOST_DEVICE int64_t row_scales() const { return int64_t{head_dim} * state_dim; }  // codes lie at 0
  REPLAYSSM_HOST_DEVICE int64_t bytes() const { return row_scales() + int64_t{head_dim} * 4; }
};

template <typename Format>
struct BlockChunk {
  int32_t head_dim, state_dim;

  REPLAYSSM_HOST_DEVICE int64_t blocks() const { return int64_t{head_dim} * state_dim / kBlock; }
  // The upper four bits of codes lie at 0.
  REPLAYSSM_HOST_DEVICE int64_t low_bits() const { return blocks() * kBlock / 2; }
  REPLAYSSM_HOST_DEVICE int64_t block_scales() const { return low_bits() + (Format::kLowBits ? 2 * blocks() : 0); }
  REPLAYSSM_HOST_DEVICE int64_t column_scales() const { return block_scales() + blocks(); }
  REPLAYSSM_HOST_DEVICE int64_t head_scale() const { return column_scales() + (Format::kColumnScales ? state_dim : 0); }
  REPLAYSSM_HOST_DEVICE int64_t bytes() const { return (head_scale() + 4 + 15) / 16 * 16; }
};

// ---- random bits ---------------------------------------------------------------------------------------------------

struct RandomWords {
  uint32_t word[4];
};

// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the fewest rounds with which the
// generator passes all of BigCrush.
REPLAYSSM_HOST_DEVICE inline RandomWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                                uint32_t k1) {
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * c0, b = uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

struct RoundingKey {
  uint32_t word[2];
};

// The key of one head of one sequence in one layer. `head` counts the heads of all tensor-parallel ranks: first_head +
// its index in the layer.
REPLAYSSM_HOST_DEVICE inline RoundingKey rounding_key(uint64_t seed, uint64_t stream, int32_t layer, int32_t head) {
  const RandomWords words =
      philox(static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32), static_cast<uint32_t>(layer),
             static_cast<uint32_t>(head), static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  return {{words.word[0], words.word[1]}};
}

// A draw of four words, when the state is written for the time that follows `writes` others. In FP16 it serves rows p
// and p + 1, p even, in E4M3 row p.
REPLAYSSM_HOST_DEVICE inline RandomWords rounding_words(RoundingKey key, int32_t p, int32_t draw, int64_t writes) {
  return philox(static_cast<uint32_t>(p) << 16 | static_cast<uint32_t>(draw), static_cast<uint32_t>(writes),
                static_cast<uint32_t>(static_cast<uint64_t>(writes) >> 32), 0, key.word[0], key.word[1]);
}

// In FP16 draw c serves columns 16c .. 16c + 15 and 64 + 16c .. 64 + 16c + 15 of its two rows: eight runs of eight
// columns. Run r takes each word times kNextRun^r, which is odd and leaves it evenly distributed. Two values of a draw
// are as good as uncorrelated, and the variance of a sum of states asks for no more:
//   - A lower half of a word's product (13 bits) and an upper half are independent: if the 13 lowest bits of a word are
//     known, all others of any product are as random as before.
//   - Two lower or two upper ones, d runs apart, are uncorrelated by the choice of the number: for each d up to 7 the
//     points (u, kNextRun^d u) fill the square evenly, modulo 2^13 and modulo 2^29.
constexpr int32_t kFp16Run = 8;
constexpr uint32_t kNextRun = 0xc680a74du;

constexpr int32_t kFp16Draws = 4;  // of two rows
REPLAYSSM_HOST_DEVICE constexpr int32_t fp16_draw(int32_t column) { return column % (kFp16Draws * 16) / 16; }

// Of the run of row p and `column` in its draw.
REPLAYSSM_HOST_DEVICE constexpr uint32_t fp16_factor(int32_t p, int32_t column) {
  uint32_t factor = 1;
  if (p % 2 != 0) factor = kNextRun;
  if (column & 8) factor *= kNextRun * kNextRun;
  if (column & 64) factor *= kNextRun * kNextRun * kNextRun * kNextRun;
  return factor;
}

// The bits of a column of row p, by its draw. Word i / 2 of a run is the rbits of cvt.rs.f16x2.f32 for its columns i
// and i + 1, i even, the even column being the lower result.
REPLAYSSM_HOST_DEVICE inline uint32_t fp16_random(const RandomWords& words, int32_t p, int32_t column) {
  return words.word[column % kFp16Run / 2] * fp16_factor(p, column) >> (column % 2 * 16) & 0x1fffu;
}

// E4M3: draw c serves columns 16c .. 16c + 15 of a row.
constexpr int32_t kE4m3PerDraw = 16;

REPLAYSSM_HOST_DEVICE inline uint32_t reversed16(uint32_t bits) {
  bits = (bits & 0x5555u) << 1 | (bits >> 1 & 0x5555u);
  bits = (bits & 0x3333u) << 2 | (bits >> 2 & 0x3333u);
  bits = (bits & 0x0f0fu) << 4 | (bits >> 4 & 0x0f0fu);
  return (bits & 0x00ffu) << 8 | (bits >> 8 & 0x00ffu);
}

// Word i / 4 is the rbits of cvt.rs.satfinite.e4m3x4.f32 for columns i .. i + 3, i a multiple of 4, the first column
// being the lowest result.
REPLAYSSM_HOST_DEVICE inline uint32_t e4m3_random(const RandomWords& words, int32_t i) {
  const uint32_t bits = words.word[i / 4] >> (i % 4 / 2 * 16) & 0xffffu;
  return i % 2 == 0 ? bits : reversed16(bits);
}

}  // namespace replayssm
