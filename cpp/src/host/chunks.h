// SPDX-License-Identifier: Apache-2.0
//
// How a head's state [P,N] goes into and out of a chunk of each stored format. Every store_* returns whether all values
// are finite as stored.
#pragma once

#include <algorithm>
#include <cmath>

#include "formats.h"
#include "host/number_formats.h"

namespace replayssm::host {

constexpr int32_t kMaxHeadDim = 128;
constexpr int32_t kMaxStateDim = 128;

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
  RandomWords drawn[kFp16Draws];  // of two rows
  for (int32_t p = 0; p < P; ++p) {
    if (p % 2 == 0) {
      for (int32_t c = 0; c < kFp16Draws; ++c) drawn[c] = rounding_words(rounding.key, p, c, rounding.writes);
    }
    for (int32_t n = 0; n < N; ++n) {
      *values++ = float_to_fp16_sr(*state++, fp16_random(drawn[fp16_draw(n)], p, n));
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

// ---- block scales: the parts of BlockChunk, then zeros -------------------------------------------------------------

template <typename Format>
void store_codes(const uint32_t (&codes)[kBlock], const BlockChunk<Format>& lies, int64_t block, char* chunk) {
  constexpr uint32_t kLow = Format::kLowBits ? 1 : 0;
  for (int32_t n = 0; n < kBlock; n += 2) {
    chunk[(block * kBlock + n) / 2] = static_cast<char>(codes[n + 1] >> kLow << 4 | codes[n] >> kLow);
  }
  if (!Format::kLowBits) return;
  uint32_t bits = 0;
  for (int32_t n = 0; n < kBlock; ++n) bits |= (codes[n] & 1u) << n;
  chunk[lies.low_bits() + 2 * block] = static_cast<char>(bits);
  chunk[lies.low_bits() + 2 * block + 1] = static_cast<char>(bits >> 8);
}

template <typename Format>
void store_head_scale(float head_scale, const BlockChunk<Format>& lies, char* chunk) {
  std::memcpy(chunk + lies.head_scale(), &head_scale, sizeof(head_scale));
  std::memset(chunk + lies.head_scale() + 4, 0, lies.bytes() - lies.head_scale() - 4);
}

inline bool store_nvfp4_amax(const float* state, int32_t P, int32_t N, char* chunk) {
  const BlockChunk<Nvfp4Amax> lies{P, N};
  const uint32_t amax = amax_bits(state, int64_t{P} * N);
  const float head_scale = Nvfp4Amax::head_scale(amax);
  auto* block_scales = reinterpret_cast<uint8_t*>(chunk + lies.block_scales());
  for (int64_t block = 0; block < lies.blocks(); ++block, state += kBlock) {
    block_scales[block] = Nvfp4Amax::block_scale(amax_bits(state, kBlock), head_scale);
    const float step = block_step(block_scales[block], head_scale);
    uint32_t codes[kBlock];
    for (int32_t n = 0; n < kBlock; ++n) codes[n] = float_to_e2m1(scaled_down(state[n], step));
    store_codes(codes, lies, block, chunk);
  }
  store_head_scale(head_scale, lies, chunk);
  return amax < kInfinityBits;
}

inline float rounded_to_fp16(float value) { return fp16_to_float(float_to_fp16(value)); }

// A block by one scale, or by the best of those tried.
struct SearchedBlock {
  uint8_t scale;
  uint32_t codes[kBlock];  // without signs
};

// `scale`'s ratio r of u, in FP16.
inline uint16_t ratio_of(float u, float scale) {
  return float_to_fp16(mul_rn(bits_float(magnitude_bits(u)), rounded_to_fp16(div_rn(0x1p-5f, scale))));
}

template <typename Format>
float block_amax(const float (&u)[kBlock]) {
  return std::max(bits_float(amax_bits(u, kBlock)), Format::kLeastAmax);
}

template <typename Format>
SearchedBlock search_block(const float (&u)[kBlock], bool first_only);

template <>
inline SearchedBlock search_block<Nvfp4>(const float (&u)[kBlock], bool first_only) {
  const float amax = block_amax<Nvfp4>(u);
  const uint32_t nearest = first_scale(amax);
  const float factor = level_factor(nearest);
  SearchedBlock best{};
  int32_t least = 0, balance = 0;
  const auto attempt = [&](uint32_t scale) {
    SearchedBlock tried{scale_code(scale), {}};
    const int32_t step = half_code(scale, factor);
    int32_t squares = 0, products = 0;
    for (int32_t n = 0; n < kBlock; ++n) {
      tried.codes[n] = code_of_ratio<Nvfp4>(ratio_of(u[n], bits_float(scale)));
      const auto q = static_cast<int32_t>(2.0f * Nvfp4::value(tried.codes[n]));
      const auto level =
          static_cast<int32_t>(std::nearbyint(mul_rn(bits_float(magnitude_bits(u[n])), 1024.0f * factor)));
      squares += q * q, products += q * level;
    }
    const int32_t error = step * (step * squares - 2 * products);
    balance = products - step * squares;
    if (scale == nearest || error < least) best = tried, least = error;
  };
  attempt(nearest);
  if (first_only) return best;
  const bool larger = balance > 0 || !(mul_rn(amax, Nvfp4::kLeastShare) < bits_float(nearest - kNextScale));
  attempt(larger ? nearest + kNextScale : nearest - kNextScale);
  attempt(wide_scale(amax));
  return best;
}

template <>
inline SearchedBlock search_block<E2m2>(const float (&u)[kBlock], bool first_only) {
  const float amax = block_amax<E2m2>(u);
  SearchedBlock best{};
  float least = 0.0f;
  for (int32_t candidate = 0; candidate < (first_only ? 1 : E2m2::kCandidates); ++candidate) {
    SearchedBlock tried{float_to_e4m3(mul_rn(amax, E2m2::share(candidate))), {}};
    const float scale = e4m3_to_float(tried.scale);
    float sum[2] = {};
    for (int32_t n = 0; n < kBlock; ++n) {
      const uint16_t ratio = ratio_of(u[n], scale);
      tried.codes[n] = code_of_ratio<E2m2>(ratio);
      const auto nearest = static_cast<uint16_t>(tried.codes[n] << (10 - E2m2::kMantissaBits));
      // Exact up to the rounding to FP16: distances are multiples of 2^-10 up to 1.
      const float distance = mul_rn(add_rn(fp16_to_float(ratio), -fp16_to_float(nearest)), 16384.0f);
      float& part = sum[n % 4 / 2];
      part = rounded_to_fp16(add_rn(part, mul_rn(distance, distance)));
    }
    const float error = mul_rn(mul_rn(add_rn(sum[0], sum[1]), scale), scale);
    if (candidate == 0 || error < least) best = tried, least = error;
  }
  return best;
}

// Nvfp4 and E2m2.
template <typename Format>
bool store_searched(const float* state, int32_t P, int32_t N, char* chunk) {
  const BlockChunk<Format> lies{P, N};
  const uint32_t amax = amax_bits(state, int64_t{P} * N);
  const float head_scale = Format::head_scale(amax);
  const bool live = head_scale > 0.0f;
  const HeadUnit unit(head_scale);
  float inverse[kMaxStateDim];
  for (int32_t n = 0; n < N; ++n) {
    inverse[n] = unit.inverse;
    if (!Format::kColumnScales) continue;
    uint32_t column_amax = 0;
    for (int32_t p = 0; p < P; ++p) column_amax = std::max(column_amax, magnitude_bits(state[p * N + n]));
    const uint8_t scale = column_scale(column_amax, amax, head_scale);
    chunk[lies.column_scales() + n] = static_cast<char>(scale);
    inverse[n] = unit.of_column(scale);
  }
  for (int64_t block = 0; block < lies.blocks(); ++block, state += kBlock) {
    SearchedBlock found{};
    if (live) {
      float u[kBlock];
      for (int32_t n = 0; n < kBlock; ++n) {
        u[n] = rounded_to_fp16(mul_rn(mul_rn(state[n], unit.lift), inverse[block * kBlock % N + n]));
      }
      found = search_block<Format>(u, tries_first_only(amax));
      for (int32_t n = 0; n < kBlock; ++n) found.codes[n] |= float_bits(u[n]) >> 31 << (2 + Format::kMantissaBits);
    }
    chunk[lies.block_scales() + block] = static_cast<char>(found.scale);
    store_codes(found.codes, lies, block, chunk);
  }
  store_head_scale(head_scale, lies, chunk);
  return amax < kInfinityBits;
}

// All formats of block scales.
template <typename Format>
void load_blocks(const char* chunk, int32_t P, int32_t N, float* state) {
  const BlockChunk<Format> lies{P, N};
  const auto* bytes = reinterpret_cast<const uint8_t*>(chunk);
  float head_scale;
  std::memcpy(&head_scale, chunk + lies.head_scale(), sizeof(head_scale));
  for (int64_t block = 0; block < lies.blocks(); ++block) {
    const float step = block_step(bytes[lies.block_scales() + block], head_scale);
    for (int32_t n = 0; n < kBlock; ++n) {
      uint32_t code = bytes[(block * kBlock + n) / 2] >> 4 * (n % 2) & 15u;
      if (Format::kLowBits) code = code << 1 | (bytes[lies.low_bits() + 2 * block + n / 8] >> n % 8 & 1u);
      float value = mul_rn(Format::value(code), step);
      if (Format::kColumnScales) {
        value = mul_rn(value, e4m3_to_float(bytes[lies.column_scales() + block * kBlock % N + n]));
      }
      *state++ = value;
    }
  }
}

}  // namespace replayssm::host
