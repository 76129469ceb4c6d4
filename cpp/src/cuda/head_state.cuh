// SPDX-License-Identifier: Apache-2.0
//
// The float32 state of a head in the registers of a CTA: out of a checkpoint, and into checkpoint and read copy, in any
// format (the chunks that replayssm.h describes, the arithmetic of formats.h). For flush, materialize, prefill,
// restore; and how steps that fold in another layout store a plain checkpoint.
//
// A group of 8 lanes owns two rows, chunk c of a lane being the 4 columns from (c * 8 + lane) * 4 on, and the CTA has a
// group for every pair of rows. So a scale over 16 columns is a reduction over 4 lanes, over a row one over a group,
// over a column or the head one over the CTA, and every cast starts from the float32 values. The groups of a warp have
// rows all or none (head_dim is a multiple of 8): whole warps shuffle.
//
// A draw of random bits serves more columns than a lane has in a chunk. Lanes share their draws: each draws for another
// row or chunk, and they exchange words.
#pragma once

#include <algorithm>

#include "formats.cuh"
#include "records.cuh"

namespace replayssm {
namespace cuda {

constexpr int kRowsPerGroup = 2;
constexpr int kHeadVec = 4;
constexpr int kMaxHeadThreads = kMaxHeadDim / kRowsPerGroup * kLanes;

// At least kThreads: small heads leave some warps without rows.
inline int head_threads(const replayssm_geometry& geometry) {
  return std::max(kThreads, geometry.head_dim / kRowsPerGroup * kLanes);
}

template <int kStateDim>
constexpr int kHeadChunks = kStateDim / (kLanes * kHeadVec);

// The part of a thread.
template <int kStateDim>
using HeadState = float[kRowsPerGroup][kHeadChunks<kStateDim>][kHeadVec];

// The dtype in which a plain checkpoint format stores a value.
__device__ inline int32_t plain_dtype(int32_t checkpoint_format) {
  return checkpoint_format == REPLAYSSM_CHECKPOINT_FP32   ? REPLAYSSM_FP32
         : checkpoint_format == REPLAYSSM_CHECKPOINT_BF16 ? REPLAYSSM_BF16
                                                          : REPLAYSSM_FP16;
}

// Rows p and p + 1 of the checkpoint at `chunk`; for threads that own rows.
template <int kStateDim>
__device__ inline void load_state(const Problem& problem, const char* chunk, int p, int lane,
                                  HeadState<kStateDim>& state) {
  const int P = problem.geometry.head_dim, format = problem.config.checkpoint;
  const Fp8Chunk fp8{P, kStateDim};
  const BlockChunk<Nvfp4Amax> nvfp4{P, kStateDim};
#pragma unroll
  for (int i = 0; i < kRowsPerGroup; ++i)
#pragma unroll
    for (int c = 0; c < kHeadChunks<kStateDim>; ++c) {
      float (&value)[kHeadVec] = state[i][c];
      const int index = (p + i) * kStateDim + (c * kLanes + lane) * kHeadVec;
      if (format == REPLAYSSM_CHECKPOINT_FP8_SR) {
        const float scale = reinterpret_cast<const float*>(chunk + fp8.row_scales())[p + i];
        load_e4m3(*reinterpret_cast<const uint32_t*>(chunk + index), value);
#pragma unroll
        for (int v = 0; v < kHeadVec; ++v) value[v] = mul_rn(value[v], scale);
      } else if (format == REPLAYSSM_CHECKPOINT_NVFP4) {
        const uint8_t block_scale = (chunk + nvfp4.block_scales())[index / kBlock];
        const float step = block_step(block_scale, *reinterpret_cast<const float*>(chunk + nvfp4.head_scale()));
        load_e2m1(*reinterpret_cast<const uint16_t*>(chunk + index / 2), value);
#pragma unroll
        for (int v = 0; v < kHeadVec; ++v) value[v] = mul_rn(value[v], step);
      } else {
        load_vector<kHeadVec>(chunk, plain_dtype(format), index, true, value);
      }
    }
}

// ---- storing -------------------------------------------------------------------------------------------------------

// Whose state is stored: what its rounding is keyed by, and where a complaint goes.
struct StateOwner {
  const Problem& problem;
  const replayssm_layer& layer;
  replayssm_error* error;
  int32_t head, row;
  uint64_t stream;
  int64_t writes;

  __device__ bool rounds_stochastically() const {
    return problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP16_SR ||
           problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP8_SR;
  }
  // All zero where nothing is rounded stochastically.
  __device__ RoundingKey key() const {
    if (!rounds_stochastically()) return {};
    return rounding_key(problem.config.seed, stream, layer.layer, layer.first_head + head);
  }
  __device__ void report_not_finite() const { report(error, REPLAYSSM_ROW_STATE_NOT_FINITE, row, head, layer.layer); }
};

// How the kernels that fold and read on store a plain format: what of the owner that takes, in registers.
struct PlainRounding {
  bool stochastic;
  RoundingKey key;
  int64_t writes;

  __device__ explicit PlainRounding(const StateOwner& owner)
      : stochastic(owner.rounds_stochastically()), key(owner.key()), writes(owner.writes) {}

  // 16 bytes in each of kRows rows from p on, which is even, from column `column` on, which are block b of `state`.
  // `finite` becomes false if a value is not as stored.
  template <typename Stored, int kRows, int kBlocks>
  __device__ void pack(int p, int column, const float (&state)[kRows][kBlocks][Packed<Stored>::kVec], int b,
                       uint4 (&packed)[kRows], bool& finite) const {
    static_assert(kRows % 2 == 0, "a draw serves two rows");
    if constexpr (std::is_same_v<Stored, __half>) {
      if (stochastic) {
        // All rows together: they share draws, the keys of the rounds, and the check of their results.
        constexpr int kPairs = kFp16Run / 2;
        float value[kRows * kFp16Run];
        uint32_t random[kRows * kPairs], pair[kRows * kPairs];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const RandomWords drawn = rounding_words(key, p + i / 2 * 2, fp16_draw(column), writes);
#pragma unroll
          for (int k = 0; k < kPairs; ++k) random[i * kPairs + k] = drawn.word[k] * fp16_factor(i, column);
#pragma unroll
          for (int v = 0; v < kFp16Run; ++v) value[i * kFp16Run + v] = state[i][b][v];
        }
        pack_fp16_sr(value, random, pair, finite);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const uint32_t* const of_row = pair + i * kPairs;
          packed[i] = make_uint4(of_row[0], of_row[1], of_row[2], of_row[3]);
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      packed[i] = Packed<Stored>::pack(state[i][b]);
      finite = finite && is_finite<Stored>(packed[i]);
    }
  }
};

// The bits of the smallest magnitude that a plain format, rounding to nearest, stores as infinity.
__device__ inline uint32_t infinite_from(int32_t checkpoint_format) {
  return checkpoint_format == REPLAYSSM_CHECKPOINT_FP16   ? 0x477ff000u
         : checkpoint_format == REPLAYSSM_CHECKPOINT_BF16 ? 0x7f7f8000u
                                                          : kInfinityBits;
}

__device__ inline uint32_t shuffle_xor(uint32_t value, int distance) {
  return __shfl_xor_sync(0xffffffffu, value, distance);
}
__device__ inline uint32_t larger_of_both(uint32_t value, int distance) {
  return max(value, shuffle_xor(value, distance));
}

__device__ inline uint32_t amax_of(const float (&value)[kHeadVec]) {
  uint32_t amax = 0;
#pragma unroll
  for (int v = 0; v < kHeadVec; ++v) amax = max(amax, magnitude_bits(value[v]));
  return amax;
}

// The maximum over a CTA, for all its threads together.
__device__ inline uint32_t max_over_cta(uint32_t value) {
  __shared__ uint32_t warp_max[kMaxHeadThreads / 32];
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, value);
  if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = of_warp;
  __syncthreads();
  uint32_t result = 0;
  for (int warp = 0; warp < blockDim.x / 32; ++warp) result = max(result, warp_max[warp]);
  __syncthreads();  // before the next maximum
  return result;
}

// word[index]; no array in local memory.
__device__ inline uint32_t choose(const uint32_t (&word)[4], int index) {
  const uint32_t even = index & 2 ? word[2] : word[0], odd = index & 2 ? word[3] : word[1];
  return index & 1 ? odd : even;
}

// The stores below are for whole warps that own rows.

template <int kStateDim>
__device__ inline void store_plain(const Problem& problem, char* chunk, int p, int lane,
                                   const HeadState<kStateDim>& state) {
#pragma unroll
  for (int i = 0; i < kRowsPerGroup; ++i)
#pragma unroll
    for (int c = 0; c < kHeadChunks<kStateDim>; ++c) {
      store_vector<kHeadVec>(chunk, plain_dtype(problem.config.checkpoint),
                             (p + i) * kStateDim + (c * kLanes + lane) * kHeadVec, true, state[i][c]);
    }
}

// FP16, stochastically. Returns whether all results of the thread are finite.
template <int kStateDim>
__device__ inline bool store_fp16_sr(const StateOwner& owner, char* chunk, int p, int lane,
                                     const HeadState<kStateDim>& state) {
  static_assert(kHeadChunks<kStateDim> % 2 == 0);
  const RoundingKey key = owner.key();
  const bool odd = lane % 2 == 1;
  bool finite = true;
  // Four lanes share the draw of chunks 0 and 2 and that of chunks 1 and 3. An even one draws for the even chunks, an
  // odd one for the others. The even one uses the front of either draw, the odd one the back.
  const RandomWords drawn = rounding_words(key, p, fp16_draw((lane % 2 * kLanes + lane) * kHeadVec), owner.writes);
  uint32_t random[2][2];  // of even and odd chunks
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const uint32_t front = drawn.word[w], back = drawn.word[w + 2];
    const uint32_t taken = shuffle_xor(odd ? front : back, 1);
    random[0][w] = odd ? taken : front;
    random[1][w] = odd ? back : taken;
  }
#pragma unroll
  for (int c = 0; c < kHeadChunks<kStateDim>; ++c)
#pragma unroll
    for (int i = 0; i < kRowsPerGroup; ++i) {
      const int column = (c * kLanes + lane) * kHeadVec;
      const uint32_t factor = fp16_factor(i, column), (&words)[2] = random[c % 2];
      const uint32_t of_run[2] = {words[0] * factor, words[1] * factor};
      uint32_t pair[2];
      pack_fp16_sr(state[i][c], of_run, pair, finite);
      *reinterpret_cast<uint2*>(chunk + 2 * ((p + i) * kStateDim + column)) = make_uint2(pair[0], pair[1]);
    }
  return finite;
}

// E4M3 with row scales: a read copy, rounded to nearest, or a checkpoint, stochastically.
template <int kStateDim>
__device__ inline void store_fp8(const StateOwner& owner, char* chunk, bool stochastic, int p, int lane,
                                 const HeadState<kStateDim>& state, const uint32_t (&row_amax)[kRowsPerGroup]) {
  constexpr int kQuad = kE4m3PerDraw / kHeadVec;  // lanes that a draw serves
  static_assert(kQuad == 4 && kRowsPerGroup == 2 && kHeadChunks<kStateDim> % 2 == 0);
  const Fp8Chunk layout{owner.problem.geometry.head_dim, kStateDim};
  const int member = lane % kQuad;
  float scale[kRowsPerGroup];
#pragma unroll
  for (int i = 0; i < kRowsPerGroup; ++i) {
    scale[i] = fp8_row_scale(row_amax[i]);
    if (lane == i) reinterpret_cast<float*>(chunk + layout.row_scales())[p + i] = scale[i];
  }
  const RoundingKey key = owner.key();
#pragma unroll
  for (int c = 0; c < kHeadChunks<kStateDim>; c += 2) {
    // Item k of a quad is row p + k / 2, chunk c + k % 2. Member k draws for item k; member m uses word m of each draw.
    uint32_t random[4] = {};
    if (stochastic) {
      const RandomWords drawn = rounding_words(
          key, p + member / 2, ((c + member % 2) * kLanes + lane) * kHeadVec / kE4m3PerDraw, owner.writes);
      uint32_t received[4];  // received[d]: from member ^ d, for item member ^ d
#pragma unroll
      for (int d = 0; d < 4; ++d) received[d] = shuffle_xor(choose(drawn.word, member ^ d), d);
#pragma unroll
      for (int k = 0; k < 4; ++k) random[k] = choose(received, member ^ k);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = k / 2, column = ((c + k % 2) * kLanes + lane) * kHeadVec;
      float value[kHeadVec];
#pragma unroll
      for (int v = 0; v < kHeadVec; ++v) value[v] = scaled_down(state[i][c + k % 2][v], scale[i]);
      *reinterpret_cast<uint32_t*>(chunk + (p + i) * kStateDim + column) =
          stochastic ? pack_e4m3_sr(value, random[k]) : pack_e4m3(value);
    }
  }
}

// Computes and stores the scales of columns; for all threads of a CTA together, those without rows bring zeros. Returns
// HeadUnit::of_column of each, in shared memory until the next max_over_cta.
template <int kStateDim>
__device__ inline const float* scale_columns(char* target, int lane, const HeadState<kStateDim>& state,
                                             uint32_t head_amax, float head_scale) {
  static_assert(kStateDim <= kThreads);
  __shared__ uint32_t column_amax[kStateDim];
  __shared__ __align__(16) float inverse[kStateDim];
  const int n = threadIdx.x;
  if (n < kStateDim) column_amax[n] = 0;
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kHeadChunks<kStateDim>; ++c)
#pragma unroll
    for (int v = 0; v < kHeadVec; ++v) {
      // fmaxf drops a NaN, but then the head's scale is one.
      atomicMax(&column_amax[(c * kLanes + lane) * kHeadVec + v],
                float_bits(fmaxf(fabsf(state[0][c][v]), fabsf(state[1][c][v]))));
    }
  __syncthreads();
  if (n < kStateDim) {
    const uint8_t scale = column_scale(column_amax[n], head_amax, head_scale);
    target[n] = static_cast<char>(scale);
    inverse[n] = HeadUnit(head_scale).of_column(scale);
  }
  __syncthreads();
  return inverse;
}

template <typename Format>
__device__ inline void store_head_scale(const BlockChunk<Format>& layout, float head_scale, char* chunk) {
  if (threadIdx.x == 0) {  // and the zeros behind it
    *reinterpret_cast<uint4*>(chunk + layout.head_scale()) = make_uint4(float_bits(head_scale), 0, 0, 0);
  }
}

template <int kStateDim>
__device__ inline void store_nvfp4_amax(const Problem& problem, char* chunk, int p, int lane,
                                        const HeadState<kStateDim>& state, uint32_t head_amax) {
  using Format = Nvfp4Amax;
  constexpr int kChunks = kHeadChunks<kStateDim>;
  static_assert(kBlock == 4 * kHeadVec && kChunks % 2 == 0 && kChunks <= 4);
  const BlockChunk<Format> layout{problem.geometry.head_dim, kStateDim};
  const bool odd = lane % 2 == 1;
  const float head_scale = Format::head_scale(head_amax);
  store_head_scale(layout, head_scale, chunk);
#pragma unroll
  for (int i = 0; i < kRowsPerGroup; ++i) {
    uint32_t scales = 0;  // byte c: of block 2c in the first half of the group, 2c + 1 in the second
    uint32_t codes[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const uint32_t amax = larger_of_both(larger_of_both(amax_of(state[i][c]), 1), 2);
      const uint8_t block_scale = Format::block_scale(amax, head_scale);
      const float step = block_step(block_scale, head_scale);
      float value[kHeadVec];
#pragma unroll
      for (int v = 0; v < kHeadVec; ++v) value[v] = scaled_down(state[i][c][v], step);
      scales |= static_cast<uint32_t>(block_scale) << 8 * c;
      codes[c] = pack_e2m1(value);
    }
    const int row_blocks = (p + i) * (kStateDim / kBlock);  // before this row
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {
      // Two lanes have a word of codes in a chunk: the even one stores that of chunk c, the odd one that of chunk c
      // + 1.
      const uint32_t taken = shuffle_xor(odd ? codes[c] : codes[c + 1], 1);
      const uint32_t word = odd ? taken | codes[c + 1] << 16 : codes[c] | taken << 16;
      const int column = odd ? ((c + 1) * kLanes + lane - 1) * kHeadVec : (c * kLanes + lane) * kHeadVec;
      *reinterpret_cast<uint32_t*>(chunk + ((p + i) * kStateDim + column) / 2) = word;
    }
    const uint32_t of_odd_blocks = shuffle_xor(scales, kLanes / 2);
    if (lane == 0) {
      char* const target = chunk + layout.block_scales() + row_blocks;
      const uint32_t front = __byte_perm(scales, of_odd_blocks, 0x5140);
      if constexpr (kChunks == 4) {
        *reinterpret_cast<uint2*>(target) = make_uint2(front, __byte_perm(scales, of_odd_blocks, 0x7362));
      } else {
        *reinterpret_cast<uint32_t*>(target) = front;
      }
    }
  }
}

// Nvfp4 and E2m2. `inverse`: of columns, in shared memory, if they have scales.
template <typename Format, int kStateDim>
__device__ inline void store_searched(const Problem& problem, char* chunk, int p, int lane,
                                      const HeadState<kStateDim>& state, uint32_t head_amax, const float* inverse) {
  constexpr int kQuad = kBlock / kHeadVec;  // lanes that have a block
  static_assert(kQuad == 4 && kRowsPerGroup == 2 && kHeadChunks<kStateDim> % 2 == 0);
  const BlockChunk<Format> layout{problem.geometry.head_dim, kStateDim};
  const float head_scale = Format::head_scale(head_amax);
  const HeadUnit unit(head_scale);
  store_head_scale(layout, head_scale, chunk);
  const int member = lane % kQuad;
#pragma unroll
  for (int c = 0; c < kHeadChunks<kStateDim>; c += 2) {
    // Item k of a quad is row p + k / 2, chunk c + k % 2, of which each member has four columns. Member k gets them
    // all.
    uint32_t part[2][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float of_columns[kHeadVec] = {unit.inverse, unit.inverse, unit.inverse, unit.inverse};
      if constexpr (Format::kColumnScales) {
        load_shared<kHeadVec>(inverse + ((c + k % 2) * kLanes + lane) * kHeadVec, of_columns);
      }
      float u[kHeadVec];
#pragma unroll
      for (int v = 0; v < kHeadVec; ++v) {
        u[v] = mul_rn(mul_rn(state[k / 2][c + k % 2][v], unit.lift), of_columns[v]);
      }
      part[0][k] = pack_pair<__half>(u[0], u[2]);
      part[1][k] = pack_pair<__half>(u[1], u[3]);
    }
    PairedBlock u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t received[4];  // received[d]: from member ^ d
#pragma unroll
      for (int d = 0; d < 4; ++d) received[d] = shuffle_xor(choose(part[i], member ^ d), d);
#pragma unroll
      for (int k = 0; k < 4; ++k) u[2 * k + i] = halves_of(choose(received, member ^ k));
    }
    CastBlock found{};
    if (head_scale > 0.0f) found = search_block<Format>(u, tries_first_only(head_amax));
    const int block = (p + member / 2) * (kStateDim / kBlock) + (c + member % 2) * (kLanes / kQuad) + lane / kQuad;
    *reinterpret_cast<uint2*>(chunk + block * (kBlock / 2)) = found.codes;
    chunk[layout.block_scales() + block] = static_cast<char>(found.scale);
    if constexpr (Format::kLowBits) {
      *reinterpret_cast<uint16_t*>(chunk + layout.low_bits() + 2 * block) = static_cast<uint16_t>(found.low_bits);
    }
  }
}

// Casts the state of a head to its checkpoint, unless `copy_only`, and its read copy. For all threads of a CTA
// together; those without rows bring zeros.
template <int kStateDim>
__device__ inline void store_state(const StateOwner& owner, const HeadSlot& slot, int p, int lane,
                                   const HeadState<kStateDim>& state, bool copy_only = false) {
  const replayssm_config& config = owner.problem.config;
  uint32_t row_amax[kRowsPerGroup] = {};
#pragma unroll
  for (int i = 0; i < kRowsPerGroup; ++i) {
#pragma unroll
    for (int c = 0; c < kHeadChunks<kStateDim>; ++c) row_amax[i] = max(row_amax[i], amax_of(state[i][c]));
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) row_amax[i] = larger_of_both(row_amax[i], distance);
  }
  const uint32_t amax = max(row_amax[0], row_amax[1]);  // of the group's rows
  char* const nvfp4_amax = config.checkpoint == REPLAYSSM_CHECKPOINT_NVFP4      ? slot.checkpoint
                           : config.read_copy == REPLAYSSM_READ_COPY_NVFP4_AMAX ? slot.read_copy
                                                                                : nullptr;
  const bool nvfp4 = config.read_copy == REPLAYSSM_READ_COPY_NVFP4, e2m2 = config.read_copy == REPLAYSSM_READ_COPY_E2M2;
  const uint32_t head_amax = nvfp4_amax || nvfp4 || e2m2 ? max_over_cta(amax) : 0;
  const float* inverse = nullptr;
  if (nvfp4) {
    const BlockChunk<Nvfp4> layout{owner.problem.geometry.head_dim, kStateDim};
    inverse = scale_columns<kStateDim>(slot.read_copy + layout.column_scales(), lane, state, head_amax,
                                       Nvfp4::head_scale(head_amax));
  }
  if (p >= owner.problem.geometry.head_dim) return;

  bool finite = amax < infinite_from(config.checkpoint);
  const bool fp8_checkpoint = config.checkpoint == REPLAYSSM_CHECKPOINT_FP8_SR && !copy_only;
  if (copy_only) {
    // the checkpoint stands
  } else if (config.checkpoint <= REPLAYSSM_CHECKPOINT_FP16) {
    store_plain<kStateDim>(owner.problem, slot.checkpoint, p, lane, state);
  } else if (config.checkpoint == REPLAYSSM_CHECKPOINT_FP16_SR) {
    finite = store_fp16_sr<kStateDim>(owner, slot.checkpoint, p, lane, state);
  }
  if (fp8_checkpoint || config.read_copy == REPLAYSSM_READ_COPY_FP8) {
    store_fp8<kStateDim>(owner, fp8_checkpoint ? slot.checkpoint : slot.read_copy, fp8_checkpoint, p, lane, state,
                         row_amax);
  }
  if (nvfp4_amax) {
    store_nvfp4_amax<kStateDim>(owner.problem, nvfp4_amax, p, lane, state, head_amax);
  } else if (nvfp4) {
    store_searched<Nvfp4, kStateDim>(owner.problem, slot.read_copy, p, lane, state, head_amax, inverse);
  } else if (e2m2) {
    store_searched<E2m2, kStateDim>(owner.problem, slot.read_copy, p, lane, state, head_amax, nullptr);
  }
  if (!finite) owner.report_not_finite();
}

}  // namespace cuda
}  // namespace replayssm
