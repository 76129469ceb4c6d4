// SPDX-License-Identifier: Apache-2.0
//
// A slice of a plain checkpoint, 16 rows of one head, in shared memory: how it comes, how a warp multiplies it with
// tokens and folds records into it. For step_mma.cu, which says why it is so, and step_head.cu.
#pragma once

#include "head_state.cuh"
#include "pipeline.cuh"

namespace replayssm {
namespace cuda {
namespace {

// A slice of a checkpoint format in shared memory, as a lane sees it. It lies as in the checkpoint, but that 64 bytes
// part its halves. Lane (g, t) has a pair of rows of one half or the other, so that the 8 lanes of a load meet no bank
// twice.
template <typename Stored>
struct Slice {
  static constexpr int kVec = Packed<Stored>::kVec;
  static constexpr int kRowBytes = kMaxStateDim * sizeof(Stored);
  static constexpr int kHalfBytes = kSliceWidth / 2 * kRowBytes, kHalfStride = kHalfBytes + 64;
  static constexpr int kBytes = kHalfStride + kHalfBytes;
  static constexpr int kBlocks = kRowBytes / 64;  // of 4 lanes' 16 bytes
  // Floats from token to token of C, so that the loads of multiply() meet no bank twice.
  static constexpr int kQueryStride = kMaxStateDim + (kVec == 4 ? 16 : 4);

  char* base;
  int lane;

  // The lane's first row.
  __device__ static int first_row(int lane) { return lane / 8 * 2 + lane / 4 % 2 * (kSliceWidth / 2); }

  // 16 bytes of block `block`, of the lane's first or second row.
  __device__ uint4& piece(int block, int row) const {
    return *reinterpret_cast<uint4*>(base + lane / 8 * 2 * kRowBytes + lane / 4 % 2 * kHalfStride + lane % 4 * 16 +
                                     row * kRowBytes + block * 64);
  }

  __device__ void clear() const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) piece(b, 0) = piece(b, 1) = make_uint4(0, 0, 0, 0);
  }

  // `source` is the slice in the checkpoint. All lanes arrive at the barrier when it has come.
  __device__ void request(const Stored* source, Barrier* barrier) const {
    const char* const bytes = reinterpret_cast<const char*>(source);
#if __CUDA_ARCH__ >= 900
    if (elect_lane()) {
      request_block(base, bytes, kHalfBytes, barrier);
      request_block(base + kHalfStride, bytes + kHalfBytes, kHalfBytes, barrier);
    }
#else
#pragma unroll
    for (int k = 0; k < 2 * kHalfBytes; k += 512) {
      request_16_bytes(base + k + (k < kHalfBytes ? 0 : kHalfStride - kHalfBytes) + lane * 16, bytes + k + lane * 16);
    }
#endif
  }

  // sum = S C for the 8 tokens of which `token`, a row of C, is the g-th. Lane (g, t) gets tokens 2t, 2t + 1
  // of its first row, then of its second.
  template <typename Query>
  __device__ void multiply(const Query* token, uint32_t mask, float (&sum)[4]) const {
    const int t = lane % 4;
    float high[2][4] = {}, low[2][4] = {};
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float upper[kVec], lower[kVec], c[kVec];
      Packed<Stored>::unpack(piece(b, 0), upper);
      Packed<Stored>::unpack(piece(b, 1), lower);
      load_shared<kVec>(token + b * 4 * kVec + t * kVec, c);
#pragma unroll
      for (int i = 0; i < kVec; i += 2) {
        const float state[4] = {upper[i], lower[i], upper[i + 1], lower[i + 1]}, q[2] = {c[i], c[i + 1]};
        if constexpr (sizeof(Stored) == 2) {
          multiply_tf32(high[i / 2 % 2], state, q);
        } else {
          float state_high[4], state_low[4];
          split(state, mask, state_high, state_low);
          multiply_tf32(high[i / 2 % 2], state_high, q);
          multiply_tf32(low[i / 2 % 2], state_low, q);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(__fadd_rn(high[0][i], high[1][i]), __fadd_rn(low[0][i], low[1][i]));
  }

  // S <- decay S + sum_i weight_i x_i (outer) B_i over h records, here; returns whether the lane's part is finite as
  // stored. p: the slice's first row; x: the lane's rows of record 0; B: record 0. From record h to a multiple of 8 all
  // three hold zeros.
  template <typename Staged>
  __device__ bool fold(const StateOwner& owner, int p, const Staged* x, const Staged* B, const float* weight,
                       float decay, int h, uint32_t mask) const {
    constexpr int kPart = sizeof(Stored) == 4 ? 2 : 1;  // blocks at a time
    const int t = lane % 4;
    const PlainRounding rounding(owner);
    bool finite = true;
    float zeros[2] = {};  // of float32 states; a NaN if a value is none or infinite, for the fewest instructions
#pragma unroll 1
    for (int part = 0; part < kBlocks; part += kPart) {
      float state[2][kPart][kVec];
#pragma unroll
      for (int b = 0; b < kPart; ++b)
#pragma unroll
        for (int i = 0; i < 2; ++i) Packed<Stored>::unpack(piece(part + b, i), state[i][b]);
      add_records(state, x, B + part * 4 * kVec, weight, decay, h, lane, mask);
#pragma unroll
      for (int b = 0; b < kPart; ++b) {
        const int row = first_row(lane), column = ((part + b) * 4 + t) * kVec;
        uint4 folded[2];
        if constexpr (sizeof(Stored) == 4) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            folded[i] = Packed<Stored>::pack(state[i][b]);
#pragma unroll
            for (int v = 0; v < kVec; ++v) zeros[i] = fmaf(state[i][b][v], 0.0f, zeros[i]);
          }
        } else {
          rounding.pack<Stored>(p + row, column, state, b, folded, finite);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          piece(part + b, i) = folded[i];
        }
      }
    }
    return finite && zeros[0] + zeros[1] == 0.0f;
  }
  // To the checkpoint at `target`.
  __device__ void store(Stored* target) const {
#if __CUDA_ARCH__ >= 900
    finish_stores_before_blocks();
    __syncwarp();
    if (elect_lane()) {
      send_block(target, base, kHalfBytes);
      send_block(reinterpret_cast<char*>(target) + kHalfBytes, base + kHalfStride, kHalfBytes);
    }
#else
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = (b * 4 + lane % 4) * kVec;
        __stwb(reinterpret_cast<uint4*>(target + (first_row(lane) + i) * kMaxStateDim + column), piece(b, i));
      }
#endif
  }
  // Until the slice's memory may hold another.
  __device__ void await_stored() const {
#if __CUDA_ARCH__ >= 900
    if (elect_lane()) await_blocks_read();
#else
    finish_stores_before_blocks();
#endif
  }
};

// y += values (weight), for a pair of rows: a product of 8 terms, values exact in TF32, weights split.
__device__ inline void add_weighed(float (&y)[4], const float (&values)[4], const float (&weight)[2], uint32_t mask) {
  float high[2], low[2];
  split(weight, mask, high, low);
  multiply_tf32(y, values, low);
  multiply_tf32(y, values, high);
}

}  // namespace
}  // namespace cuda
}  // namespace replayssm
