// SPDX-License-Identifier: Apache-2.0
//
// How a head's state [P,N] goes into and out of a chunk of each stored format. Every store_* returns whether all values
// are finite as stored.
#pragma once

#include <algorithm>

#include "formats.h"
#include "host/number_formats.h"

namespace replayssm::host {

// The random bits of one write of one head.
struct Rounding {
  RoundingKey key;
  int64_t writes;  // before this one
};

inline uint32_t amax_bits(const float* values, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, magnitude_bits(values[i]));
  return amax;
}

// ---- plain: values [P,N] of a dtype --------------------------------------------------------------------------------

// Whether n values of `dtype` are finite.
inline bool all_finite(const void* stored, int32_t dtype, int64_t n) {
  if (dtype == REPLAYSSM_FP32) return amax_bits(static_cast<const float*>(stored), n) < kInfinityBits;
  const auto* values = static_cast<const uint16_t*>(stored);
  const uint16_t infinity = dtype == REPLAYSSM_BF16 ? 0x7f80u : 0x7c00u;
  return std::all_of(values, values + n, [&](uint16_t value) { return (value & 0x7fffu) < infinity; });
}

inline bool store_plain(const float* state, int64_t n, int32_t dtype, char* chunk) {
  store_row(state, n, dtype, chunk);
  return all_finite(chunk, dtype, n);
}

inline bool store_fp16_sr(const float* state, int32_t P, int32_t N, const Rounding& rounding, char* chunk) {
  auto* values = reinterpret_cast<uint16_t*>(chunk);
  for (int32_t p = 0; p < P; ++p) {
    for (int32_t draw = 0; draw < N / kFp16PerDraw; ++draw) {
      const RandomWords words = rounding_words(rounding.key, p, draw, rounding.writes);
      for (int32_t i = 0; i < kFp16PerDraw; ++i) *values++ = float_to_fp16_sr(*state++, fp16_random(words, i));
    }
  }
  return all_finite(chunk, REPLAYSSM_FP16, int64_t{P} * N);
}

// ---- FP8: E4M3 codes [P,N] | row scales [P] ------------------------------------------------------------------------

// `rounding` NULL: to nearest.
inline bool store_fp8(const float* state, int32_t P, int32_t N, const Rounding* rounding, char* chunk) {
  auto* codes = reinterpret_cast<uint8_t*>(chunk);
  auto* scales = reinterpret_cast<float*>(chunk + Fp8Chunk{P, N}.row_scales());
  bool finite = true;
  for (int32_t p = 0; p < P; ++p, state += N, codes += N) {
    const uint32_t amax = amax_bits(state, N);
    finite = finite && amax < kInfinityBits;
    const float scale = scales[p] = fp8_row_scale(amax);
    RandomWords words{};
    for (int32_t n = 0; n < N; ++n) {
      const float value = scaled_down(state[n], scale);
      if (!rounding) {
        codes[n] = float_to_e4m3(value);
        continue;
      }
      const int32_t i = n % kE4m3PerDraw;
      if (i == 0) words = rounding_words(rounding->key, p, n / kE4m3PerDraw, rounding->writes);
      codes[n] = float_to_e4m3_sr(value, e4m3_random(words, i));
    }
  }
  return finite;
}

inline void load_fp8(const char* chunk, int32_t P, int32_t N, float* state) {
  const auto* codes = reinterpret_cast<const uint8_t*>(chunk);
  const auto* scales = reinterpret_cast<const float*>(chunk + Fp8Chunk{P, N}.row_scales());
  for (int32_t p = 0; p < P; ++p) {
    for (int32_t n = 0; n < N; ++n) state[p * N + n] = mul_rn(e4m3_to_float(codes[p * N + n]), scales[p]);
  }
}

// ---- NVFP4: E2M1 codes [P,N/2] | block scales [P,N/16] | head scale | zeros
// ------------------------------------------

inline bool store_nvfp4(const float* state, int32_t P, int32_t N, char* chunk) {
  const Nvfp4Chunk lies{P, N};
  const uint32_t amax = amax_bits(state, int64_t{P} * N);
  const float head_scale = nvfp4_head_scale(amax);
  auto* codes = reinterpret_cast<uint8_t*>(chunk);
  auto* block_scales = reinterpret_cast<uint8_t*>(chunk + lies.block_scales());
  for (int64_t block = 0; block < int64_t{P} * N / kNvfp4Block; ++block, state += kNvfp4Block) {
    block_scales[block] = nvfp4_block_scale(amax_bits(state, kNvfp4Block), head_scale);
    const float step = nvfp4_step(block_scales[block], head_scale);
    for (int32_t n = 0; n < kNvfp4Block; n += 2) {
      const uint32_t even = float_to_e2m1(scaled_down(state[n], step));
      const uint32_t odd = float_to_e2m1(scaled_down(state[n + 1], step));
      *codes++ = static_cast<uint8_t>(odd << 4 | even);
    }
  }
  std::memcpy(chunk + lies.head_scale(), &head_scale, sizeof(head_scale));
  std::memset(chunk + lies.head_scale() + 4, 0, lies.bytes() - lies.head_scale() - 4);
  return amax < kInfinityBits;
}

inline void load_nvfp4(const char* chunk, int32_t P, int32_t N, float* state) {
  const Nvfp4Chunk lies{P, N};
  float head_scale;
  std::memcpy(&head_scale, chunk + lies.head_scale(), sizeof(head_scale));
  const auto* codes = reinterpret_cast<const uint8_t*>(chunk);
  const auto* block_scales = reinterpret_cast<const uint8_t*>(chunk + lies.block_scales());
  for (int64_t block = 0; block < int64_t{P} * N / kNvfp4Block; ++block) {
    const float step = nvfp4_step(block_scales[block], head_scale);
    for (int32_t n = 0; n < kNvfp4Block; n += 2) {
      const uint32_t pair = *codes++;
      *state++ = mul_rn(e2m1_to_float(pair & 15u), step);
      *state++ = mul_rn(e2m1_to_float(pair >> 4), step);
    }
  }
}

}  // namespace replayssm::host
