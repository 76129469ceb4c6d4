// SPDX-License-Identifier: Apache-2.0
//
// A head that a CTA folds and casts to its read copy, in float32 in shared memory (step_read.cu).
#pragma once

#include "pipeline.cuh"
#include "read_operands.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;

// The head that a CTA folds, in float32 in shared memory, in pieces of 4 columns. They are permuted among the 8 of a
// 128-byte run, so that neither the lanes of a product nor those that have a block of 16 columns each meet a bank
// twice.
__device__ inline int folded_piece(int row, int piece) {
  return row * (kMaxStateDim / 4) + (piece ^ (piece >> 3 & 3) ^ (row >> 1 & 1));
}

// Where a piece of 16 bytes of a 16-bit checkpoint lies while it waits to be folded: behind all that is folded by then.
__device__ inline int waiting_piece(int P, int row, int piece) {
  return P * (kMaxStateDim / 8) + row * (kMaxStateDim / 8) + (piece ^ (row >> 1 & 1) * 4);
}

template <typename Stored>
__device__ inline void request_checkpoint(const Stored* source, int P, uint4* folded) {
  constexpr int kRowPieces = kMaxStateDim * sizeof(Stored) / 16;
#pragma unroll 4
  for (int i = threadIdx.x; i < P * kRowPieces; i += kThreads) {
    const int row = i / kRowPieces, piece = i % kRowPieces;
    request_16_bytes(folded + (sizeof(Stored) == 4 ? folded_piece(row, piece) : waiting_piece(P, row, piece)),
                     source + i * (16 / sizeof(Stored)));
  }
}

// Folds h records into the head at `folded`, which holds what request_checkpoint brought, and stores the checkpoint. x:
// record 0 of the head. As Slice::fold of step_mma.cu has it: the same records give the same bits.
template <typename Stored, typename Staged>
__device__ __noinline__ void fold_head(const StateOwner& owner, bool has_state, Stored* checkpoint, uint4* folded,
                                       const Staged* x, int x_stride, const Staged* B, const float* weight, float decay,
                                       int h, uint32_t mask) {
  constexpr int kVec = Packed<Stored>::kVec, kBlocks = kMaxStateDim / (4 * kVec);
  constexpr bool kWide = sizeof(Stored) == 4;
  const int P = owner.problem.geometry.head_dim, slices = P / kSliceWidth;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const PlainRounding rounding(owner);
  bool finite = true;
#pragma unroll 1
  for (int first = 0; first < slices; first += kWarps) {
    const int slice = first + warp, row = slice * kSliceWidth + 2 * g;
    uint4 packed[2][kWide ? 1 : kBlocks] = {};
    if (!kWide) {  // what is folded takes the place of what waited
      if (has_state && slice < slices) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int b = 0; b < (kWide ? 1 : kBlocks); ++b) {
            packed[i][b] = folded[waiting_piece(P, row + i, b * 4 + t)];
          }
      }
      __syncthreads();
    }
    if (slice >= slices) continue;
    float state[2][kBlocks][kVec];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        uint4 raw = packed[i][kWide ? 0 : b];
        if (kWide && has_state) raw = folded[folded_piece(row + i, b * 4 + t)];
        Packed<Stored>::unpack(raw, state[i][b]);
      }
    add_records(state, x + slice * kSliceWidth + 2 * g, B, weight, decay, h, lane, mask, x_stride);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int column = (b * 4 + t) * kVec;
      uint4 stored[2];
      rounding.pack<Stored>(row, column, state, b, stored, finite);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&value)[kVec] = state[i][b];
        *reinterpret_cast<uint4*>(checkpoint + (row + i) * kMaxStateDim + column) = stored[i];
#pragma unroll
        for (int j = 0; j < kVec / 4; ++j) {
          folded[folded_piece(row + i, column / 4 + j)] =
              make_uint4(float_bits(value[4 * j]), float_bits(value[4 * j + 1]), float_bits(value[4 * j + 2]),
                         float_bits(value[4 * j + 3]));
        }
      }
    }
  }
  if (!finite) owner.report_not_finite();
}

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

__device__ inline void load_block(const uint4* folded, int row, int block, float (&value)[kBlock]) {
#pragma unroll
  for (int j = 0; j < kBlock / 4; ++j) {
    const uint4 v = folded[folded_piece(row, block * 4 + j)];
    value[4 * j] = bits_float(v.x), value[4 * j + 1] = bits_float(v.y);
    value[4 * j + 2] = bits_float(v.z), value[4 * j + 3] = bits_float(v.w);
  }
}

__device__ inline uint32_t amax_of_block(const float (&value)[kBlock]) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) amax = max(amax, magnitude_bits(value[i]));
  return amax;
}

// max(a, |b|), NaN if one of them is; a is not negative.
__device__ inline float larger_magnitude(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
  return result;
}

// Where a CTA that casts keeps what its threads share.
struct CastScratch {
  float* columns;      // [kWarps][N]: amaxes of a warp's rows; then, at the front, HeadUnit::of_column
  uint32_t* warp_max;  // [kWarps]
};

// Casts the head at `folded` to a chunk of a read copy, in memory and as StateOperand reads it in shared memory. A
// thread has a block of 16 columns of every 16th row.
template <typename Format>
__device__ __noinline__ void cast_head(const uint4* folded, int P, char* chunk, char* staged,
                                       const CastScratch& scratch) {
  constexpr int N = kMaxStateDim;
  const BlockChunk<Format> layout{P, N};
  const int tid = threadIdx.x, block = tid % (N / kBlock);
  const int warp = tid / 32, piece = tid % 32;
  float4 amax = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // of the piece in every fourth row
#pragma unroll 4
  for (int first = 0; first < P; first += kWarps) {
    const uint4 v = folded[first * (N / 4) + folded_piece(warp, piece)];  // as of row first + warp
    amax.x = larger_magnitude(amax.x, bits_float(v.x)), amax.y = larger_magnitude(amax.y, bits_float(v.y));
    amax.z = larger_magnitude(amax.z, bits_float(v.z)), amax.w = larger_magnitude(amax.w, bits_float(v.w));
  }
  if constexpr (Format::kColumnScales) reinterpret_cast<float4*>(scratch.columns)[tid] = amax;
  const float of_lane = larger_magnitude(larger_magnitude(amax.x, amax.y), larger_magnitude(amax.z, amax.w));
  const uint32_t of_warp = __reduce_max_sync(~0u, float_bits(of_lane));
  if (piece == 0) scratch.warp_max[warp] = of_warp;
  __syncthreads();
  uint32_t head_amax = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) head_amax = max(head_amax, scratch.warp_max[warp]);
  const float head_scale = Format::head_scale(head_amax);
  if (tid == 0) {  // and the zeros behind it
    const uint4 last = make_uint4(float_bits(head_scale), 0, 0, 0);
    *reinterpret_cast<uint4*>(chunk + layout.head_scale()) = last;
    *reinterpret_cast<uint4*>(staged + layout.head_scale()) = last;
  }
  const HeadUnit unit(head_scale);
  if constexpr (Format::kColumnScales) {
    static_assert(N == kThreads);
    float of_column = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) of_column = larger_magnitude(of_column, scratch.columns[i * N + tid]);
    const uint8_t scale = column_scale(float_bits(of_column), head_amax, head_scale);
    chunk[layout.column_scales() + tid] = staged[layout.column_scales() + tid] = static_cast<char>(scale);
    scratch.columns[tid] = unit.of_column(scale);  // of what is there, no other thread needs a thing
    __syncthreads();
  }

  float inverse[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) inverse[i] = unit.inverse;
  if constexpr (Format::kColumnScales) {
#pragma unroll
    for (int j = 0; j < kBlock; j += 4) {
      float quad[4];
      load_shared<4>(scratch.columns + block * kBlock + j, quad);
#pragma unroll
      for (int i = 0; i < 4; ++i) inverse[j + i] = quad[i];
    }
  }
#pragma unroll 1
  for (int first = 0; first < P; first += kThreads / (N / kBlock)) {
    float value[kBlock];
    load_block(folded + first * (N / 4), tid / (N / kBlock), block, value);
    SearchedBlock found{};
    if constexpr (std::is_same_v<Format, Nvfp4Amax>) {
      found.scale = Format::block_scale(amax_of_block(value), head_scale);
      Divisor(block_step(found.scale, head_scale))(value);
      uint32_t codes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float quad[4] = {value[4 * j], value[4 * j + 1], value[4 * j + 2], value[4 * j + 3]};
        codes[j] = pack_e2m1(quad);
      }
      found.codes = make_uint2(__byte_perm(codes[0], codes[1], 0x5410), __byte_perm(codes[2], codes[3], 0x5410));
    } else if (head_scale > 0.0f) {
      if (unit.lift != 1.0f) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) value[i] = mul_rn(value[i], unit.lift);
      }
      PairedBlock u;
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) {
        const int column = i / 2 * 4 + i % 2;
        u[i] =
            __floats2half2_rn(mul_rn(value[column], inverse[column]), mul_rn(value[column + 2], inverse[column + 2]));
      }
      found = search_block<Format>(u, candidates_of(head_amax) == 1);
    }
    const int index = first * (N / kBlock) + tid;
    *reinterpret_cast<uint2*>(chunk + index * 8) = found.codes;
    *reinterpret_cast<uint2*>(staged + index * 8) = found.codes;
    chunk[layout.block_scales() + index] = staged[layout.block_scales() + index] = static_cast<char>(found.scale);
    if constexpr (Format::kLowBits) {
      const auto low = static_cast<uint16_t>(found.low_bits);
      *reinterpret_cast<uint16_t*>(chunk + layout.low_bits() + 2 * index) = low;
      *reinterpret_cast<uint16_t*>(staged + layout.low_bits() + 2 * index) = low;
    }
  }
}

template <>
__device__ __noinline__ void cast_head<Fp8>(const uint4* folded, int P, char* chunk, char* staged, const CastScratch&) {
  constexpr int N = kMaxStateDim;
  const Fp8Chunk layout{P, N};
  const int tid = threadIdx.x, block = tid % (N / kBlock);
#pragma unroll 1
  for (int row = tid / (N / kBlock); row < P; row += kThreads / (N / kBlock)) {
    float value[kBlock];
    load_block(folded, row, block, value);
    uint32_t amax = amax_of_block(value);
#pragma unroll
    for (int distance = 1; distance < N / kBlock; distance *= 2) amax = larger_of_both(amax, distance);
    const float scale = fp8_row_scale(amax);
    if (block == 0) {
      reinterpret_cast<float*>(chunk + layout.row_scales())[row] = scale;
      reinterpret_cast<float*>(staged + layout.row_scales())[row] = scale;
    }
    Divisor{scale}(value);
    uint32_t codes[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float quad[4] = {value[4 * j], value[4 * j + 1], value[4 * j + 2], value[4 * j + 3]};
      codes[j] = pack_e4m3(quad);
    }
    const uint4 words = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    const int index = row * (N / kBlock) + block;
    reinterpret_cast<uint4*>(chunk)[index] = words;
    reinterpret_cast<uint4*>(staged)[index] = words;
  }
}

}  // namespace
}  // namespace cuda
}  // namespace replayssm
