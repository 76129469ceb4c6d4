// SPDX-License-Identifier: Apache-2.0
//
// The host ops compute in float32 on rows that are converted on load and rounded to nearest even on store.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats.h"
#include "replayssm/replayssm.h"

namespace replayssm::host {

inline float bf16_to_float(uint16_t value) { return bits_float(static_cast<uint32_t>(value) << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t magnitude = value & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));  // Inf, NaN
  // Moving the fields into place and rescaling by 2^112 is exact, subnormals included.
  return bits_float(float_bits(bits_float(magnitude << 13) * bits_float(0x77800000u)) | sign);
}

inline uint16_t float_to_fp16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);   // NaN
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more: Inf
  if (magnitude < 0x38800000u) {  // subnormal in fp16: adding 0.5 lines the fp32 mantissa up with 2^-24 steps
    return static_cast<uint16_t>(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13));
}

inline const char* element_address(const void* data, int32_t dtype, int64_t index) {
  return static_cast<const char*>(data) + index * (dtype == REPLAYSSM_FP32 ? 4 : 2);
}
inline char* element_address(void* data, int32_t dtype, int64_t index) {
  return static_cast<char*>(data) + index * (dtype == REPLAYSSM_FP32 ? 4 : 2);
}

// dst[i] = src[i] as float32, for n contiguous elements of `dtype`.
inline void load_row(const void* src, int32_t dtype, int64_t n, float* dst) {
  if (dtype == REPLAYSSM_FP32) {
    std::memcpy(dst, src, n * sizeof(float));
    return;
  }
  const auto* values = static_cast<const uint16_t*>(src);
  if (dtype == REPLAYSSM_BF16) {
    for (int64_t i = 0; i < n; ++i) dst[i] = bf16_to_float(values[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = fp16_to_float(values[i]);
  }
}

// dst[i] = src[i] rounded to `dtype`.
inline void store_row(const float* src, int64_t n, int32_t dtype, void* dst) {
  if (dtype == REPLAYSSM_FP32) {
    std::memcpy(dst, src, n * sizeof(float));
    return;
  }
  auto* values = static_cast<uint16_t*>(dst);
  if (dtype == REPLAYSSM_BF16) {
    for (int64_t i = 0; i < n; ++i) values[i] = float_to_bf16(src[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) values[i] = float_to_fp16(src[i]);
  }
}

inline float load_element(const replayssm_tensor& tensor, int64_t index) {
  float value;
  load_row(element_address(tensor.data, tensor.dtype, index), tensor.dtype, 1, &value);
  return value;
}

}  // namespace replayssm::host
