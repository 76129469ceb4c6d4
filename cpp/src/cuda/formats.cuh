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

// The code of a value, as Format::code has it, without branches.
template <typename Format>
__device__ inline uint32_t code_of(float value) {
  // Times 2^-126 the bits of a code's magnitude are the code. Adding 0 turns -0 into 0.
  const float magnitude = mul_rn(nearest<Format>(bits_float(magnitude_bits(value))), 0x1p-126f);
  return float_bits(add_rn(value, 0.0f)) >> 31 << (2 + Format::kMantissaBits) |
         float_bits(magnitude) >> (23 - Format::kMantissaBits);
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
  return code_of<Nvfp4>(value[0]) | code_of<Nvfp4>(value[1]) << 4 | code_of<Nvfp4>(value[2]) << 8 |
         code_of<Nvfp4>(value[3]) << 12;
#endif
}

// The upper bits of the codes in 16 bits, their lowest bits in the 4 above. No target rounds to E2M2.
__device__ inline uint32_t pack_e2m2(const float (&value)[4]) {
  uint32_t upper = 0, low = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = code_of<E2m2>(value[i]);
    upper |= code >> 1 << 4 * i;
    low |= (code & 1u) << i;
  }
  return low << 16 | upper;
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

// `random` is a word of rounding_words: columns 2k and 2k + 1 of a draw take word k.
__device__ inline uint32_t pack_fp16_sr(float first, float second, uint32_t random) {
#ifdef REPLAYSSM_CVT_RS
  if (fp16_sr_hardware(first) && fp16_sr_hardware(second)) {
    uint32_t pair;
    asm("cvt.rs.f16x2.f32 %0, %1, %2, %3;" : "=r"(pair) : "f"(second), "f"(first), "r"(random));
    return pair;
  }
#endif
  return fp16_sr_code(first, random & 0x1fffu) | fp16_sr_code(second, random >> 16 & 0x1fffu) << 16;
}

// The same for numbers of fp16_sr_hardware(): the random bits are added below the last that stays, and what they don't
// carry into it is cut off.
__device__ inline uint32_t pack_common_fp16_sr(float first, float second, uint32_t random) {
  uint32_t pair;
#ifdef REPLAYSSM_CVT_RS
  asm("cvt.rs.f16x2.f32 %0, %1, %2, %3;" : "=r"(pair) : "f"(second), "f"(first), "r"(random));
#else
  asm("cvt.rz.f16x2.f32 %0, %1, %2;"
      : "=r"(pair)
      : "f"(bits_float(float_bits(second) + (random >> 16 & 0x1fffu))),
        "f"(bits_float(float_bits(first) + (random & 0x1fffu))));
#endif
  return pair;
}

// The 8 columns of a draw.
__device__ inline uint4 pack_fp16_sr(const float (&value)[kFp16PerDraw], const RandomWords& random) {
  bool common = true;
#pragma unroll
  for (int i = 0; i < kFp16PerDraw; ++i) common = common && fp16_sr_hardware(value[i]);
  uint32_t pair[kFp16PerDraw / 2];
  if (common) {
#pragma unroll
    for (int i = 0; i < kFp16PerDraw / 2; ++i) {
      pair[i] = pack_common_fp16_sr(value[2 * i], value[2 * i + 1], random.word[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kFp16PerDraw / 2; ++i) {
      pair[i] = pack_fp16_sr(value[2 * i], value[2 * i + 1], random.word[i]);
    }
  }
  return make_uint4(pair[0], pair[1], pair[2], pair[3]);
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
