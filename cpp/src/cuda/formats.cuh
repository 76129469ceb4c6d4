// SPDX-License-Identifier: Apache-2.0
//
// The conversions of formats.h, by the instructions of targets that have them:
//
//     to and from E4M3, to nearest      sm_89 and later
//     to and from E2M1, to nearest      sm_100a, sm_103a, sm_120a
//     to FP16 and E4M3, stochastically  sm_100a, sm_103a
//
// and by the functions of formats.h elsewhere, which are the definition: the bits are the same. `first` is the lowest
// result of a word.
#pragma once

#include "common.cuh"
#include "formats.h"

#if __CUDA_ARCH__ >= 890
#define REPLAYSSM_CVT_E4M3
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define REPLAYSSM_CVT_E2M1
#define REPLAYSSM_CVT_RS
#elif defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define REPLAYSSM_CVT_E2M1
#endif

namespace replayssm {
namespace cuda {

__device__ inline uint32_t bits_of(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }
__device__ inline __half2 halves_of(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }

// Whether a word of stored values holds no infinity and no NaN.
template <typename Stored>
__device__ inline bool is_finite(uint32_t word) {
  constexpr uint32_t exponent = std::is_same_v<Stored, float>    ? 0x7f800000u
                                : std::is_same_v<Stored, __half> ? 0x7c007c00u
                                                                 : 0x7f807f80u;
  constexpr uint32_t high = exponent & 0xffff0000u, low = exponent & 0xffffu;
  return (word & high) != high && (low == 0 || (word & low) != low);
}

template <typename Stored>
__device__ inline bool is_finite(const uint4& raw) {
  return is_finite<Stored>(raw.x) && is_finite<Stored>(raw.y) && is_finite<Stored>(raw.z) && is_finite<Stored>(raw.w);
}

// ---- to float ------------------------------------------------------------------------------------------------------

// Four E4M3 codes.
__device__ inline void load_e4m3(uint32_t codes, float (&value)[4]) {
#ifdef REPLAYSSM_CVT_E4M3
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes >> 8 * i)));
    const float2 both = unpack_pair<__half>(pair);
    value[i] = both.x, value[i + 1] = both.y;
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] = e4m3_to_float(static_cast<uint8_t>(codes >> 8 * i));
#endif
}

// The first four E2M1 codes of a word.
__device__ inline void load_e2m1(uint32_t codes, float (&value)[4]) {
#ifdef REPLAYSSM_CVT_E2M1
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t pair;
    asm("{ .reg .b8 codes; cvt.u8.u32 codes, %1; cvt.rn.f16x2.e2m1x2 %0, codes; }" : "=r"(pair) : "r"(codes >> 4 * i));
    const float2 both = unpack_pair<__half>(pair);
    value[i] = both.x, value[i + 1] = both.y;
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] = e2m1_to_float(codes >> 4 * i & 15u);
#endif
}

// Four E2M2 codes: the first four of a word of upper bits and of one of lowest bits.
__device__ inline void load_e2m2(uint32_t upper, uint32_t low, float (&value)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] = e2m2_to_float((upper >> 4 * i & 15u) << 1 | (low >> i & 1u));
}

// ---- to nearest ----------------------------------------------------------------------------------------------------

__device__ inline uint32_t pack_e4m3(const float (&value)[4]) {
#ifdef REPLAYSSM_CVT_E4M3
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(value[1]), "f"(value[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(value[3]), "f"(value[2]));
  return static_cast<uint32_t>(high) << 16 | low;
#else
  return float_to_e4m3(value[0]) | static_cast<uint32_t>(float_to_e4m3(value[1])) << 8 |
         static_cast<uint32_t>(float_to_e4m3(value[2])) << 16 | static_cast<uint32_t>(float_to_e4m3(value[3])) << 24;
#endif
}

// float_to_e2m1 without branches.
__device__ inline uint32_t e2m1_code(float value) {
  // Codes of a binade (of all numbers below 2, too) are as far apart as floats are in the binade of 2^22 times this
  // one.
  const float magnitude = bits_float(magnitude_bits(value));
  const float binade = bits_float(float_bits(fmaxf(magnitude, 1.0f)) & kInfinityBits);
  const float nearest = fminf(fmaf(binade, -0x1p22f, fmaf(binade, 0x1p22f, magnitude)), 6.0f);
  // Times 2^-126 the bits of a code's magnitude are the code. Adding 0 turns -0 into 0.
  return float_bits(add_rn(value, 0.0f)) >> 31 << 3 | float_bits(mul_rn(nearest, 0x1p-126f)) >> 22;
}

// 16 bits.
__device__ inline uint32_t pack_e2m1(const float (&value)[4]) {
#ifdef REPLAYSSM_CVT_E2M1
  uint16_t codes;
  // Adding 0 turns -0 into 0, whose code formats.h gives it.
  asm("{ .reg .b8 low, high; cvt.rn.satfinite.e2m1x2.f32 low, %2, %1; cvt.rn.satfinite.e2m1x2.f32 high, %4, %3; "
      "mov.b16 %0, {low, high}; }"
      : "=h"(codes)
      : "f"(add_rn(value[0], 0.0f)), "f"(add_rn(value[1], 0.0f)), "f"(add_rn(value[2], 0.0f)),
        "f"(add_rn(value[3], 0.0f)));
  return codes;
#else
  return e2m1_code(value[0]) | e2m1_code(value[1]) << 4 | e2m1_code(value[2]) << 8 | e2m1_code(value[3]) << 12;
#endif
}

// ---- blocks --------------------------------------------------------------------------------------------------------

// A block of 16 columns in FP16: of columns 4k to 4k + 3 the pairs {4k, 4k + 2} and {4k + 1, 4k + 3}. As codes in the
// upper bytes of the halves they are every other code of a word.
using PairedBlock = __half2[kBlock / 2];

struct CastBlock {
  uint2 codes;        // upper four bits
  uint32_t low_bits;  // lowest bits, if the format has them
  uint8_t scale;
};

// Two E4M3 numbers that are not NaN, as a pair.
__device__ inline __half2 e4m3_halves(uint32_t codes) {
#ifdef REPLAYSSM_CVT_E4M3
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
  return halves_of(pair);
#else
  // The fields in place, and the exponent's bias corrected by 2^8.
  const uint32_t bytes = __byte_perm(codes, 0, 0x1404);
  return __hmul2_rn(halves_of((bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 1), __float2half2_rn(256.0f));
#endif
}

// Two numbers to E4M3, to nearest.
__device__ inline uint32_t pack_e4m3_pair(float first, float second) {
#ifdef REPLAYSSM_CVT_E4M3
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  return codes;
#else
  return float_to_e4m3(first) | static_cast<uint32_t>(float_to_e4m3(second)) << 8;
#endif
}

// The bits of a in the mask, and those of b elsewhere: one instruction, where the compiler would mask both.
template <uint32_t kMask>
__device__ inline uint32_t choose_bits(uint32_t a, uint32_t b) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(bits) : "r"(a), "r"(b), "n"(kMask));
  return bits;
}

// ---- searched scales -----------------------------------------------------------------------------------------------

// Codes of ratios as formats.h rounds them, in place: the bits of the ratios, with what is below a code dropped.
__device__ inline uint32_t nearest_pair(uint32_t ratio) {
  constexpr uint32_t kStep = 1u << (10 - E2m2::kMantissaBits), kLargest = ((4u << E2m2::kMantissaBits) - 1) * kStep;
  return __vminu2((ratio + (kStep / 2) * 0x10001u) & (0x10000u - kStep) * 0x10001u, kLargest * 0x10001u);
}

// search_block of the host, of |u| and u's signs.
template <typename Format>
__device__ inline CastBlock search_block(const PairedBlock& u, bool first_only);

// The bytes of a table that the lowest four nibbles of an index name, all below 8. (__byte_perm masks them once more.)
__device__ inline uint32_t look_up(uint32_t front, uint32_t back, uint32_t index) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(front), "r"(back), "r"(index));
  return bytes;
}

// A block by one of its scales: codes without signs, and the sums of (m q)^2 and m q U.
struct TriedScale {
  uint32_t scale;  // the bits of a float
  uint32_t codes[2];
  uint32_t squares, products;

  // levels: U of the columns in their order, as bytes.
  __device__ TriedScale(const PairedBlock& u, uint32_t scale, float factor, const uint32_t (&levels)[4])
      : scale(scale), squares(0), products(0) {
    float of_scale;
    // The inverse of none of the 8 significands comes near the middle of two FP16 numbers.
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(of_scale) : "f"(bits_float(scale + (5u << 23))));
    const __half2 inverse = __float2half2_rn(of_scale);
    const uint32_t step = half_code(scale, factor);
    // m q. By the wide scale there is no code 7, but where it saturates, and there m q is 168.
    const uint32_t front = step * 0x03020100u, back = step * 0x0c080604u;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t ratio[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) ratio[i] = bits_of(__hmul2_rn(__habs2(u[4 * word + i]), inverse));
      // Bits 8 to 11 of a ratio are a code's magnitude and the bit behind it, of which rounding takes the half.
      const uint32_t even = __byte_perm(ratio[0], ratio[2], 0x7531), odd = __byte_perm(ratio[1], ratio[3], 0x7531);
      codes[word] = (odd * 16u + even + 0x11111111u) >> 1 & 0x77777777u;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t coded = look_up(front, back, codes[word] >> 16 * half);
        squares = __dp4a(coded, coded, squares);
        products = __dp4a(coded, levels[2 * word + half], products);
      }
    }
  }

  __device__ int32_t error() const { return static_cast<int32_t>(squares - 2 * products); }
};

template <>
__device__ inline CastBlock search_block<Nvfp4>(const PairedBlock& block, bool first_only) {
  PairedBlock u;
  __half2 both = __float2half2_rn(Nvfp4::kLeastAmax);
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    u[i] = block[i];
    both = __hmax2(both, __habs2(u[i]));
  }
  float amax = fmaxf(__low2float(both), __high2float(both));
  constexpr float kLift = 128.0f;  // of small blocks, so that the factor of U is an FP16 number
  const bool small = amax < 1.0f / kLift;
  if (small) {
    amax = mul_rn(amax, kLift);
#pragma unroll
    for (int i = 0; i < kBlock / 2; ++i) u[i] = __hmul2_rn(u[i], __float2half2_rn(kLift));
  }
  const uint32_t nearest = first_scale(amax);
  const float factor = level_factor(nearest);
  const __half2 level_factors = __float2half2_rn(1024.0f * factor);
  uint32_t level[kBlock / 2], levels[4];
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {  // in the lower bytes
    level[i] = bits_of(__hfma2(__habs2(u[i]), level_factors, __float2half2_rn(1024.0f)));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) levels[i] = __byte_perm(level[2 * i], level[2 * i + 1], 0x6240);
  const TriedScale first(u, nearest, factor, levels), last(u, wide_scale(amax), factor, levels);
  const bool larger =
      first.products > first.squares || !(mul_rn(amax, Nvfp4::kLeastShare) < bits_float(nearest - kNextScale));
  const TriedScale second(u, larger ? nearest + kNextScale : nearest - kNextScale, factor, levels);
  uint32_t scale = first.scale, codes[2] = {first.codes[0], first.codes[1]};
  int32_t least = first_only ? INT32_MIN : first.error();
  for (const TriedScale* tried : {&second, &last}) {
    const int32_t error = tried->error();
    if (error < least) scale = tried->scale, least = error, codes[0] = tried->codes[0], codes[1] = tried->codes[1];
  }
#pragma unroll
  for (int word = 0; word < 2; ++word) {  // and the signs
    const uint32_t even = __byte_perm(bits_of(u[4 * word]), bits_of(u[4 * word + 2]), 0x7531),
                   odd = __byte_perm(bits_of(u[4 * word + 1]), bits_of(u[4 * word + 3]), 0x7531);
    codes[word] |= (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
  }
  CastBlock result{};
  result.codes = make_uint2(codes[0], codes[1]);
  result.scale = static_cast<uint8_t>(scale_code(scale) - (small ? 7 * 8 : 0));
  return result;
}

template <>
__device__ inline CastBlock search_block<E2m2>(const PairedBlock& u, bool first_only) {
  using Format = E2m2;
  constexpr int kCandidates = Format::kCandidates;
  static_assert(kCandidates == 4);
  __half2 both = __float2half2_rn(Format::kLeastAmax);
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) both = __hmax2(both, __habs2(u[i]));
  const float amax = fmaxf(__low2float(both), __high2float(both));
  uint32_t code[2];
  __half2 inverse[2];
  float scale[kCandidates];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    code[i] = pack_e4m3_pair(mul_rn(amax, Format::share(2 * i)), mul_rn(amax, Format::share(2 * i + 1)));
    const __half2 scales = e4m3_halves(code[i]);
    scale[2 * i] = __low2float(scales), scale[2 * i + 1] = __high2float(scales);
    // The inverse of none of the 8 significands comes near the middle of two FP16 numbers.
    float of_scale[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(of_scale[k]) : "f"(scale[2 * i + k]));
    inverse[i] = __hmul2_rn(__floats2half2_rn(of_scale[0], of_scale[1]), __float2half2_rn(0x1p-5f));
  }
  __half2 sum[kCandidates];  // side by side: one sum alone is a chain of operations that wait for each other
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i)
#pragma unroll
    for (int candidate = 0; candidate < kCandidates; ++candidate) {
      const __half2 pair = inverse[candidate / 2];
      const __half2 ratio = __hmul2_rn(u[i], candidate % 2 == 0 ? __low2half2(pair) : __high2half2(pair));
      const __half2 magnitude = __habs2(ratio);
      const __half2 distance =
          __hmul2_rn(__hsub2_rn(magnitude, halves_of(nearest_pair(bits_of(magnitude)))), __float2half2_rn(16384.0f));
      sum[candidate] = __hfma2(distance, distance, i == 0 ? __float2half2_rn(0.0f) : sum[candidate]);
    }
  uint32_t best = 0;  // the candidate's inverse, its code above
  float least = 0.0f;
#pragma unroll
  for (int candidate = 0; candidate < kCandidates; ++candidate) {
    const float s = scale[candidate];
    const float error = mul_rn(mul_rn(add_rn(__low2float(sum[candidate]), __high2float(sum[candidate])), s), s);
    const uint32_t tried =
        __byte_perm(bits_of(inverse[candidate / 2]), code[candidate / 2], candidate % 2 == 0 ? 0x0410 : 0x0532);
    if (candidate == 0) {
      best = tried, least = first_only ? 0.0f : error;
    } else if (error < least) {
      best = tried, least = error;
    }
  }
  const __half2 of_scale = halves_of(__byte_perm(best, 0, 0x1010));
  uint32_t rounded[kBlock / 2];
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    const __half2 ratio = __hmul2_rn(u[i], of_scale);
    rounded[i] = nearest_pair(bits_of(__habs2(ratio))) | (bits_of(ratio) & 0x80008000u);
  }
  CastBlock result{};
  uint32_t words[2];
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    const uint32_t* const pairs = rounded + 4 * word;
    uint32_t code[2];  // of every other column, in the upper halves of bytes
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {  // the sign and bits 9 to 11 of a number are the upper bits of its code
      const uint32_t bytes = __byte_perm(pairs[odd], pairs[2 + odd], 0x7531);
      code[odd] = choose_bits<0x70707070u>(bytes << 3, bytes);
      const uint32_t low = bytes & 0x01010101u;  // of columns 0, 2, 4 and 6 of the word, or of 1, 3, 5 and 7
      result.low_bits |= (low | low >> 6 | low >> 12 | low >> 18) % 256 << (8 * word + odd);
    }
    words[word] = choose_bits<0x0f0f0f0fu>(code[0] >> 4, code[1]);
  }
  result.codes = make_uint2(words[0], words[1]);
  result.scale = static_cast<uint8_t>(best >> 16);
  return result;
}

// ---- stochastically ------------------------------------------------------------------------------------------------

// float_to_fp16_sr without branches.
__device__ inline uint32_t fp16_sr_code(float value, uint32_t random13) {
  const uint32_t magnitude = magnitude_bits(value);
  // Below 2^-14 in units of 2^-37: what a float from there to 2^-13 is made of, so that adding cuts off the rest.
  const bool small = magnitude < 0x38800000u;
  const uint32_t shifted = small ? float_bits(__fadd_rz(bits_float(magnitude), 0x1p-14f)) : magnitude;
  const uint32_t code = ((shifted + random13) >> 13) - ((small ? 113u : 112u) << 10);
  const uint32_t sign = float_bits(value) >> 16 & 0x8000u;
  return sign | (magnitude > kInfinityBits ? 0x7e00u : min(code, 0x7c00u));
}

// Two neighbours to FP16, cut off, when 13 bits each of a word of a run have been added below the last bit of a normal
// result.
__device__ inline uint32_t pack_fp16_raised(float first, float second, uint32_t random) {
  uint32_t pair;
  random &= 0x1fff1fffu;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;"
      : "=r"(pair)
      : "f"(bits_float(__dp2a_lo(random, 0x0100u, float_bits(second)))),
        "f"(bits_float(__dp2a_lo(random, 0x0001u, float_bits(first)))));
  return pair;
}

// Two neighbours by a word of a run, both below 65504: the larger of two results, each no more than it should be. One
// is right from 2^-14 on. For the other 2^-14 is added to magnitudes, which cuts them off at 2^-37, so that of those
// below 2^-14 the last bit that stays is 2^-24 as it should be; then the code of 2^-14 is taken off the code. From
// there on that halves the sum. (Infinity and NaN come out as one or the other.)
__device__ inline uint32_t pack_moderate_fp16_sr(float first, float second, uint32_t random) {
#ifdef REPLAYSSM_CVT_RS
  uint32_t normal;
  asm("cvt.rs.f16x2.f32 %0, %1, %2, %3;" : "=r"(normal) : "f"(second), "f"(first), "r"(random));
#else
  const uint32_t normal = pack_fp16_raised(first, second, random);
#endif
  const uint32_t lifted =
      pack_fp16_raised(__fadd_rz(fabsf(first), 0x1p-14f), __fadd_rz(fabsf(second), 0x1p-14f), random);
#ifdef REPLAYSSM_CVT_RS
  normal &= ~(__vcmpltu2(lifted, 0x08000800u) & 0x7fff7fffu);  // what it makes of smaller ones is not documented
#endif
  const uint32_t magnitudes = __vmaxu2(normal & 0x7fff7fffu, lifted - 0x04000400u);
  return choose_bits<0x80008000u>(normal, magnitudes);
}

// Columns 2k and 2k + 1 of a run by word k, whatever they are. `finite` becomes false if a result is not.
template <int kPairs>
__device__ inline void pack_any_fp16_sr(const float (&value)[2 * kPairs], const uint32_t (&random)[kPairs],
                                        uint32_t (&pair)[kPairs], bool& finite) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    pair[i] = fp16_sr_code(value[2 * i], random[i] & 0x1fffu) |
              fp16_sr_code(value[2 * i + 1], random[i] >> 16 & 0x1fffu) << 16;
    finite = finite && is_finite<__half>(pair[i]);
  }
}

// The same, of which most are below 65504.
template <int kPairs>
__device__ inline void pack_fp16_sr(const float (&value)[2 * kPairs], const uint32_t (&random)[kPairs],
                                    uint32_t (&pair)[kPairs], bool& finite) {
  __half2 largest = halves_of(0);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    pair[i] = pack_moderate_fp16_sr(value[2 * i], value[2 * i + 1], random[i]);
    largest = __hmax2_nan(largest, __habs2(halves_of(pair[i])));
  }
  if (!__hblt2(largest, halves_of(0x7bff7bffu))) pack_any_fp16_sr(value, random, pair, finite);
}

// Columns 4k to 4k + 3 of a draw take word k.
__device__ inline uint32_t pack_e4m3_sr(const float (&value)[4], uint32_t random) {
#ifdef REPLAYSSM_CVT_RS
  uint32_t codes;
  asm("cvt.rs.satfinite.e4m3x4.f32 %0, {%1, %2, %3, %4}, %5;"
      : "=r"(codes)
      : "f"(value[3]), "f"(value[2]), "f"(value[1]), "f"(value[0]), "r"(random));
  return codes;
#else
  const RandomWords words{{random}};
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes |= static_cast<uint32_t>(float_to_e4m3_sr(value[i], e4m3_random(words, i))) << 8 * i;
  }
  return codes;
#endif
}

}  // namespace cuda
}  // namespace replayssm
