// SPDX-License-Identifier: Apache-2.0
//
// What every kernel file shares: launch checks, element types, vector loads that fall back to scalar ones, and the
// rules by which a row is refused.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "cursor_rules.h"

namespace replayssm {
namespace cuda {

// The kernels of the state, but for those on tensor cores, work in groups of 8 lanes: a group owns rows of the state,
// its lanes split the columns in chunks of 16 bytes, so that a group's load is one full 128-byte line of a row.
constexpr int kThreads = 128;
constexpr int kLanes = 8;
constexpr int kGroups = kThreads / kLanes;
constexpr int kMaxHeadDim = 128;
constexpr int kMaxStateDim = 128;

// ---- host side -----------------------------------------------------------------------------------------------------

inline cudaStream_t stream_of(const replayssm_exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

inline replayssm_status check(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return REPLAYSSM_OK;
  return fail(REPLAYSSM_CUDA_ERROR, "%s: %s (%s)", op, cudaGetErrorString(error), cudaGetErrorName(error));
}

// Dynamic shared memory that every supported architecture grants on request; more than any kernel here asks for.
constexpr int kSharedLimit = 99 * 1024;
// What needs no request: 48 KB, together with the shared memory of fixed size that kernels have, here up to 1.2 KB.
constexpr int kUnaskedShared = 48 * 1024 - 1280;

// Permits a kernel dynamic shared memory up to `limit`. Where that and its memory of fixed size are more than the
// GPU grants a CTA (RTX: 99 KB for both), what is left; the largest window and head then fail when they are launched.
template <typename Kernel>
cudaError_t permit_shared(Kernel* kernel, int limit = kSharedLimit) {
  constexpr auto kAttribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  cudaError_t error = cudaFuncSetAttribute(kernel, kAttribute, limit);
  if (error != cudaErrorInvalidValue) return error;
  cudaGetLastError();  // it is dealt with
  int device = 0, granted = 0;
  cudaFuncAttributes attributes;
  error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&granted, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, kAttribute, granted - static_cast<int>(attributes.sharedSizeBytes));
}

// A one-dimensional grid of `blocks` CTAs. Shared memory above what needs no permission is permitted here too, not only
// in load_kernels(): the call is no stream operation, so it may happen under capture. Always up to the same limit, so
// that no launch takes back what another thread's launch was granted.
template <typename... Params>
replayssm_status launch(const char* op, bool early, int shared_limit, void (*kernel)(Params...), int64_t blocks,
                        int threads, size_t shared, const replayssm_exec& exec, const std::decay_t<Params>&... params) {
  if (blocks > INT32_MAX) {
    return fail(REPLAYSSM_UNSUPPORTED, "%s: the call needs %lld thread blocks, the limit is %d", op,
                static_cast<long long>(blocks), INT32_MAX);
  }
  if (shared > kUnaskedShared) {
    const cudaError_t error = permit_shared(kernel, shared_limit);
    if (error != cudaSuccess) return check(error, op);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream_of(exec);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return check(cudaLaunchKernelEx(&config, kernel, params...), op);
}

template <typename... Params>
replayssm_status launch(const char* op, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared,
                        const replayssm_exec& exec, const std::decay_t<Params>&... params) {
  return launch(op, false, kSharedLimit, kernel, blocks, threads, shared, exec, params...);
}

// The kernel may begin before the one before it in the stream has ended, if that allows it: every thread calls
// begin_early(), or its two parts, before it touches global memory, but for what may come before (below).
template <typename... Params>
replayssm_status launch_early(const char* op, void (*kernel)(Params...), int64_t blocks, int threads, size_t shared,
                              const replayssm_exec& exec, const std::decay_t<Params>&... params) {
  return launch(op, true, kSharedLimit, kernel, blocks, threads, shared, exec, params...);
}

// Of a kernel launched early: lets the next one begin, if that was launched early too; waits for the one before, which
// comes before any other access to global memory than those below.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void begin_early() {
  let_next_begin();
  await_previous();
}

// What a kernel launched early may do before await_previous(). Addresses come from a plan that may be another step's,
// half written or never written: what is read of it here is good for nothing but such addresses, and checked against
// what the host knows.
//  - Have the L2 fetch what it will read. All writes go through the L2, so that a line there is as good as memory,
//    whatever the kernel before still writes. Only the addresses must exist.
//  - Load, past the L1 (bulk copies, cp.async.cg, ld.cg, ld.relaxed; not cp.async of 4 bytes), what nobody writes from
//    the plan to this kernel: of a slot's layer the state and the records of history, unless the flush op has run; not
//    the new tokens. And A_log, D and dt_bias, by any load. A plan lets the next kernel begin only when the one before
//    it has ended, and no kernel begins until all before it have let the next begin: so whatever comes behind a plan
//    finds written what came before it. But the plan itself may still run: who has loaded by a row of it compares that
//    row after await_previous(), and loads again if it has changed.
// It may store nothing.

__device__ inline int32_t peek(const int32_t& field) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(&field) : "memory");  // leaves no line in L1
  return value;
}
// The slot of a row, or a negative number.
__device__ inline int32_t peek_slot(const replayssm_plan_row& row, int32_t num_slots) {
  const int32_t slot = peek(row.slot);
  return slot < num_slots ? slot : -1;
}
// The same of a row whose state has been stored, as the plan reads now: like all that is peeked, it may be wrong.
__device__ inline int32_t peek_stored_slot(const replayssm_plan_row& row, int32_t num_slots) {
  const int32_t flags = peek(row.flags), slot = peek_slot(row, num_slots);
  return flags & REPLAYSSM_ROW_EMPTY ? -1 : slot;
}
// data and bytes are multiples of 16.
__device__ inline void fetch_to_l2(const void* data, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(data), "r"(bytes) : "memory");
#endif
}
// The line of an element; of no tensor, nothing.
__device__ inline void fetch_to_l2(const replayssm_tensor& vector, int index) {
  if (!vector.data) return;
  const int size = vector.dtype == REPLAYSSM_FP32 ? 4 : 2;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(vector.data) + index * size) : "memory");
}

// Brings a kernel's code into the current context (modules load lazily otherwise).
template <typename Kernel>
cudaError_t load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}
// And permits it dynamic shared memory up to a limit.
template <typename Kernel>
cudaError_t load_kernel(Kernel* kernel, int shared_limit) {
  const cudaError_t error = load_kernel(kernel);
  return error == cudaSuccess ? permit_shared(kernel, shared_limit) : error;
}

// Of the current device; `otherwise`: where it is not to be had. No stream operation.
inline int attribute_of_device(cudaDeviceAttr attribute, int otherwise) {
  int device = 0, value = 0;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess && value > 0;
  return known ? value : otherwise;
}

inline int64_t element_size(int32_t dtype) { return dtype == REPLAYSSM_FP32 ? 4 : 2; }

// Whether every inner row of a strided tensor starts on a 16-byte boundary.
inline bool is_aligned(const replayssm_tensor& tensor) {
  const int64_t size = element_size(tensor.dtype);
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.stride[0] * size % 16 == 0 &&
         tensor.stride[1] * size % 16 == 0;
}

// Whether a vector, or every row of a matrix, starts where loads of 16 bytes may.
inline bool is_aligned_vector(const replayssm_tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
}
inline bool rows_aligned(const replayssm_tensor& matrix) {
  return is_aligned_vector(matrix) && matrix.stride[0] * element_size(matrix.dtype) % 16 == 0;
}

// Calls f with a value of the C++ type that stores a plain checkpoint format.
template <typename F>
auto with_checkpoint(int32_t format, F&& f) {
  switch (format) {
    case REPLAYSSM_CHECKPOINT_BF16:
      return f(__nv_bfloat16());
    case REPLAYSSM_CHECKPOINT_FP16:
    case REPLAYSSM_CHECKPOINT_FP16_SR:
      return f(__half());
    default:
      return f(float());
  }
}

// ---- elements ------------------------------------------------------------------------------------------------------

template <typename T>
constexpr int32_t kDtypeOf = std::is_same_v<T, float>    ? REPLAYSSM_FP32
                             : std::is_same_v<T, __half> ? REPLAYSSM_FP16
                                                         : REPLAYSSM_BF16;

template <typename T>
__device__ inline float2 unpack_pair(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}

template <typename T>
__device__ inline uint32_t pack_pair(float lo, float hi) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// 16 bytes of stored state and the values they hold.
template <typename Stored>
struct Packed {
  static constexpr int kVec = 16 / sizeof(Stored);

  __device__ static void unpack(const uint4& raw, float (&value)[kVec]) {
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kVec == 4) {
        value[w] = __uint_as_float(word[w]);
      } else {
        const float2 pair = unpack_pair<Stored>(word[w]);
        value[2 * w] = pair.x;
        value[2 * w + 1] = pair.y;
      }
    }
  }

  __device__ static uint4 pack(const float (&value)[kVec]) {
    uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kVec == 4) {
        word[w] = __float_as_uint(value[w]);
      } else {
        word[w] = pack_pair<Stored>(value[2 * w], value[2 * w + 1]);
      }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
};

// One element as it lies in memory: a load that nothing waits for until the bits are converted.
__device__ inline uint32_t load_bits(const void* data, int32_t dtype, int64_t index) {
  if (dtype == REPLAYSSM_FP32) return static_cast<const uint32_t*>(data)[index];
  return static_cast<const uint16_t*>(data)[index];
}

__device__ inline float bits_to_float(uint32_t bits, int32_t dtype) {
  if (dtype == REPLAYSSM_FP32) return __uint_as_float(bits);
  return dtype == REPLAYSSM_BF16 ? unpack_pair<__nv_bfloat16>(bits).x : unpack_pair<__half>(bits).x;
}

__device__ inline float load_scalar(const void* data, int32_t dtype, int64_t index) {
  return bits_to_float(load_bits(data, dtype, index), dtype);
}

__device__ inline void store_scalar(void* data, int32_t dtype, int64_t index, float value) {
  if (dtype == REPLAYSSM_FP32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == REPLAYSSM_BF16) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(data)[index] = __float2half_rn(value);
  }
}

// kCount consecutive elements (4 or 8) as they lie in memory: kCount words of fp32, or half as many of a 16-bit type.
template <int kCount>
struct Raw {
  uint32_t word[kCount];
};

// `aligned` promises 16-byte alignment of the tensor's rows; without it the same elements come one by one.
template <int kCount>
__device__ inline Raw<kCount> load_raw(const void* data, int32_t dtype, int64_t index, bool aligned) {
  static_assert(kCount == 4 || kCount == 8);
  Raw<kCount> raw;
  if (dtype == REPLAYSSM_FP32) {
    const uint32_t* source = static_cast<const uint32_t*>(data) + index;
    if (aligned) {
#pragma unroll
      for (int w = 0; w < kCount; w += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(source + w);
        raw.word[w] = v.x, raw.word[w + 1] = v.y, raw.word[w + 2] = v.z, raw.word[w + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int w = 0; w < kCount; ++w) raw.word[w] = source[w];
    }
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(data) + index;
    if (!aligned) {
#pragma unroll
      for (int w = 0; w < kCount / 2; ++w) raw.word[w] = source[2 * w] | static_cast<uint32_t>(source[2 * w + 1]) << 16;
    } else if constexpr (kCount == 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(source);
      raw.word[0] = v.x, raw.word[1] = v.y, raw.word[2] = v.z, raw.word[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(source);
      raw.word[0] = v.x, raw.word[1] = v.y;
    }
  }
  return raw;
}

template <int kCount>
__device__ inline void unpack_raw(const Raw<kCount>& raw, int32_t dtype, float (&value)[kCount]) {
  if (dtype == REPLAYSSM_FP32) {
#pragma unroll
    for (int w = 0; w < kCount; ++w) value[w] = __uint_as_float(raw.word[w]);
    return;
  }
#pragma unroll
  for (int w = 0; w < kCount / 2; ++w) {
    const float2 pair =
        dtype == REPLAYSSM_BF16 ? unpack_pair<__nv_bfloat16>(raw.word[w]) : unpack_pair<__half>(raw.word[w]);
    value[2 * w] = pair.x;
    value[2 * w + 1] = pair.y;
  }
}

template <int kCount>
__device__ inline void load_vector(const void* data, int32_t dtype, int64_t index, bool aligned,
                                   float (&value)[kCount]) {
  unpack_raw(load_raw<kCount>(data, dtype, index, aligned), dtype, value);
}

// The inverse of load_raw.
template <int kCount>
__device__ inline void store_raw(void* data, int32_t dtype, int64_t index, bool aligned, const Raw<kCount>& raw) {
  if (dtype == REPLAYSSM_FP32) {
    uint32_t* target = static_cast<uint32_t*>(data) + index;
#pragma unroll
    for (int w = 0; w < kCount; w += 4) {
      if (aligned) {
        *reinterpret_cast<uint4*>(target + w) =
            make_uint4(raw.word[w], raw.word[w + 1], raw.word[w + 2], raw.word[w + 3]);
      } else {
        target[w] = raw.word[w], target[w + 1] = raw.word[w + 1];
        target[w + 2] = raw.word[w + 2], target[w + 3] = raw.word[w + 3];
      }
    }
  } else {
    uint16_t* target = static_cast<uint16_t*>(data) + index;
    if (!aligned) {
#pragma unroll
      for (int w = 0; w < kCount / 2; ++w) {
        target[2 * w] = static_cast<uint16_t>(raw.word[w]);
        target[2 * w + 1] = static_cast<uint16_t>(raw.word[w] >> 16);
      }
    } else if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(target) = make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]);
    } else {
      *reinterpret_cast<uint2*>(target) = make_uint2(raw.word[0], raw.word[1]);
    }
  }
}

template <int kCount>
__device__ inline void store_vector(void* data, int32_t dtype, int64_t index, bool aligned,
                                    const float (&value)[kCount]) {
  Raw<kCount> raw;
  if (dtype == REPLAYSSM_FP32) {
#pragma unroll
    for (int w = 0; w < kCount; ++w) raw.word[w] = __float_as_uint(value[w]);
  } else {
#pragma unroll
    for (int w = 0; w < kCount / 2; ++w) {
      raw.word[w] = dtype == REPLAYSSM_BF16 ? pack_pair<__nv_bfloat16>(value[2 * w], value[2 * w + 1])
                                            : pack_pair<__half>(value[2 * w], value[2 * w + 1]);
    }
  }
  store_raw(data, dtype, index, aligned, raw);
}

// kCount consecutive values out of shared memory, at a multiple of kCount.
template <int kCount, typename T>
__device__ inline void load_shared(const T* source, float (&value)[kCount]) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(source + i);
      value[i] = v.x, value[i + 1] = v.y, value[i + 2] = v.z, value[i + 3] = v.w;
    }
  } else {
    uint32_t word[kCount / 2];
    if constexpr (kCount == 8) {
      const uint4 v = *reinterpret_cast<const uint4*>(source);
      word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(source);
      word[0] = v.x, word[1] = v.y;
    }
#pragma unroll
    for (int w = 0; w < kCount / 2; ++w) {
      const float2 pair = unpack_pair<T>(word[w]);
      value[2 * w] = pair.x;
      value[2 * w + 1] = pair.y;
    }
  }
}

// x / (1 + exp(-x)) by the special function unit: a few units in the last place, 0 where the divisor is beyond 2^126.
__device__ inline float silu(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return x * inverse;
}

// Sum over the 8 lanes of a group; every lane gets the same bits. Groups of a warp may have diverged.
__device__ inline float group_sum(float value) {
  const unsigned mask = 0xffu << (threadIdx.x & 24);
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(mask, value, distance));
  }
  return value;
}

// ---- rows ----------------------------------------------------------------------------------------------------------

__device__ inline void report(replayssm_error* error, int32_t code, int32_t row, int64_t given, int64_t expected) {
  if (atomicCAS(&error->code, REPLAYSSM_ROW_OK, code) == REPLAYSSM_ROW_OK) {
    error->row = row;
    error->given = given;
    error->expected = expected;
  }
}

// For the (row, head) that `parts` CTAs own. The index of the CTA is read anew: kernels short of registers would keep
// it in one for this.
__device__ inline void report_not_finite(replayssm_error* error, int heads, int32_t layer, int parts = 1) {
  int block;
  asm("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  const int head = block / parts;
  report(error, REPLAYSSM_ROW_STATE_NOT_FINITE, head / heads, head % heads, layer);
}

// Whether a layer op may work on a plan row. Every CTA of the row decides alike; the one with `reporter` says why not.
// A history beyond the window can only come from a misused commit; the kernels' shared memory has no room for it.
__device__ inline bool admit(const replayssm_plan_row& row, int32_t index, int64_t num_tokens, int32_t max_count,
                             int32_t window, bool knows_snapshots, replayssm_error* error, bool reporter) {
  if (row.slot < 0) return false;
  const int64_t end = static_cast<int64_t>(row.first_token) + row.count;
  int32_t code = REPLAYSSM_ROW_OK;
  int64_t given = 0, expected = 0;
  if (end > num_tokens) {
    code = REPLAYSSM_ROW_TOKEN_RANGE, given = end, expected = num_tokens;
  } else if (row.count > max_count) {
    code = REPLAYSSM_ROW_TOO_LONG, given = row.count, expected = max_count;
  } else if ((row.flags & REPLAYSSM_ROW_SNAPSHOT) && !knows_snapshots) {
    code = REPLAYSSM_ROW_HAS_SNAPSHOTS, given = row.slot;
  } else if (row.history > window) {
    code = REPLAYSSM_ROW_HAS_RECORDS, given = row.history, expected = window;
  }
  if (code != REPLAYSSM_ROW_OK && reporter) report(error, code, index, given, expected);
  return code == REPLAYSSM_ROW_OK;
}

// Position `offset` rows after `row` in a ring of `rows` rows; -rows <= offset < rows.
__device__ inline int ring_position(int row, int offset, int rows) {
  const int position = row + offset;
  return position < 0 ? position + rows : position >= rows ? position - rows : position;
}

__device__ inline char* section_of(const replayssm_buffer& buffer, int32_t slot) {
  return static_cast<char*>(buffer.base) + slot * buffer.slot_stride;
}

// ---- entry points between the kernel files ------------------------------------------------------------------------

cudaError_t load_cursor_kernels();
cudaError_t load_conv_kernels();
cudaError_t load_norm_kernels();
cudaError_t load_activation_kernels();
cudaError_t load_attention_kernels();
cudaError_t load_fold_kernels();
cudaError_t load_step_kernels();
cudaError_t load_scan_kernels();
cudaError_t load_snapshot_kernels();

}  // namespace cuda
}  // namespace replayssm
