// SPDX-License-Identifier: Apache-2.0
//
// What the host lays out and tells a launch of step_read.cu: a CTA's shared memory, which tasks and heads CTAs have,
// and numbers that a kernel would divide by; and how a CTA takes both.
#pragma once

#include <algorithm>

#include "head_fold.cuh"
#include "plain_operands.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kMaxCtaHeads = 16;  // a thread has one of so many heads
constexpr int kQueryStride = 64;  // words of a token of C
constexpr int kZeroBytes = 256;   // as many as are read of anything that does not exist
constexpr int kZeroRows = 15;     // before the records of x that are folded 16 at a time
constexpr int kNever = 1 << 20;   // a row that does not exist
constexpr int kPlainTokens = 8;   // of a row of which a plain checkpoint is read
constexpr int kSlots = 2;         // for slices of plain checkpoints, of a warp

// Warps that share the work of a CTA, as a power of two. CTAs of small batches have twice as many: of those that fold
// two warps have a slice, each half of its columns, and what is read then is kept in shared memory; of those that step
// either half is a CTA of its own, so to say.
constexpr int kWarpBits = 2, kWideWarpBits = 3, kWarps = 1 << kWarpBits;
constexpr int kPlainFoldBits = 3;  // of the heads that a CTA folds if their checkpoints are plain; else one a warp

// Division by a number that the host knows, of numbers below 2^31.
struct Quotient {
  uint32_t divisor, inverse;

  Quotient() = default;
  explicit Quotient(uint32_t divisor) : divisor(divisor), inverse(~0u / divisor) {}
  __device__ uint32_t operator()(uint32_t value) const {
    const uint32_t quotient = __umulhi(value, inverse);  // or one less
    return quotient + (value - quotient * divisor >= divisor);
  }
};

// Shared memory of a CTA; offsets in bytes, strides in elements. Records of the history are oldest first and, behind
// them, the new tokens; CTAs that fold have those of the history newest first.
struct ReadShared {
  int warps, tokens, rows;  // rows: records of the history and, behind them, new tokens
  int g_stride, x_stride;   // of a token of B^T C; of a record of x
  int delta_stride;         // of a head of v and, in CTAs that fold, of delta
  int b, c;
  int terms_stride;
  int zeros, query, g, g_new, query_scale, barrier;
  int delta, v, rate, decay;  // of each head; delta: of each record, or of each head in CTAs that fold. Behind the
                              // history's delta lie the tokens'. v has the exponents first. CTAs that fold have their
                              // decay behind it
  int terms;                  // of each head: exp(f_s) of each token, u [tokens][tokens]
  int scaled;  // of each warp: column scales, of rows of one token times C. CTAs that don't fold have this and
               // terms in the place of B and C, of which nothing is needed then
  // Of each team; plain checkpoints: state of each warp, kSlots slices or, in CTAs that fold, none, and in narrow ones
  // of these x of two heads one after the other.
  int x, state;
  // Of CTAs that fold, until they read: the checkpoint; x, before which lie zeros; for the maxima of columns [8][N] of
  // each warp, which takes the place of the checkpoint that it has in registers, if it has all its rows there; what
  // columns are multiplied by, [N]; the maxima of warps; what is stored of a plain checkpoint. B of the
  // history is at 0, as operands: see operands_size(). CTAs that keep what they then read have it in `folded`: wide
  // ones the checkpoint or the copy, others, if there is room, the copies of all heads.
  int checkpoint, folded_x, scratch, scratch_stride, inverse, warp_max, folded;
  int state_bytes, bytes;
  bool column_scales, keeps;

  ReadShared() = default;
  // Puts terms and scaled of so many heads where they are in nothing's place.
  void part(int heads) {
    terms = bytes, scaled = terms + heads * terms_stride * 4;
    bytes = round_up(terms + size_of_terms(heads, column_scales), 128);
  }
  // Format: what steps read. folded_size: bytes of a value that is folded, or 0.
  template <typename Format, typename Staged>
  static ReadShared of(bool wide, bool keeps, int P, int window, int tokens, int heads, int teams, int folded_size);

 private:
  ReadShared(bool wide, bool keeps, int P, int window, int tokens, int heads, int teams, int chunk_bytes,
             bool column_scales, bool plain, int query_parts, int folded_size, int operands_bytes)
      : warps(1 << (wide ? kWideWarpBits : kWarpBits)),
        tokens(tokens),
        rows(folded_size > 0 ? tokens : window),  // history and new tokens together are no longer than the window
        g_stride(round_up(window, 16) + 4),
        x_stride(P + 8),  // so that the rows of a matrix lie in different banks,
        delta_stride(round_up(window + (folded_size > 0 ? tokens : 0), 32) + 2),  // and the heads
        b(folded_size > 0 ? operands_bytes : 0),
        c(b + rows * kMaxStateDim * 2),
        terms_stride(round_up(tokens + tokens * tokens, 4)),
        zeros(std::max(c + tokens * kMaxStateDim * 2, folded_size > 0 ? 0 : size_of_terms(heads, column_scales))),
        query(zeros + kZeroBytes),
        g(query + query_parts * tokens * kQueryStride * 4),
        g_new(g + (folded_size > 0 ? 0 : tokens * g_stride * 4)),
        query_scale(g_new + tokens * tokens * 4),
        barrier(round_up(query_scale + tokens * 4, 8)),
        delta(round_up(barrier + (warps * (plain ? kSlots : 1) + 1) * 8, 16)),
        v(delta + heads * delta_stride * 4),
        rate(v + (wide ? warps : heads) * delta_stride * 4),
        decay(rate + heads * 4),
        terms(folded_size > 0 ? round_up(decay + heads * 4, 16) : 0),
        scaled(terms + heads * terms_stride * 4),
        x(folded_size > 0 ? terms + size_of_terms(heads, column_scales) : round_up(decay + heads * 4, 16)),
        state(round_up(x + teams * rows * x_stride * 2, plain ? 128 : 16)),
        checkpoint(wide || plain ? state : x),
        folded_x(checkpoint + P * kMaxStateDim * folded_size),
        scratch(wide || P != kSlicesAtOnce * kSliceWidth ? folded_x + (kZeroRows + window) * P * 2 : checkpoint),
        scratch_stride(wide                               ? 4 * kMaxStateDim * 4
                       : P != kSlicesAtOnce * kSliceWidth ? 8 * kMaxStateDim * 4
                                                          : kSliceWidth * kMaxStateDim * folded_size),
        inverse(wide || P != kSlicesAtOnce * kSliceWidth ? scratch + (column_scales ? warps * scratch_stride : 0)
                                                         : folded_x + (kZeroRows + window) * P * 2),
        warp_max(inverse + (column_scales ? kMaxStateDim * 4 : 0)),
        folded(plain && wide ? checkpoint
               : plain       ? round_up(folded_x + (kZeroRows + window) * P * 2, 128)
                             : round_up(warp_max + warps * 4, 16)),
        state_bytes(chunk_bytes),
        bytes(round_up(std::max(folded_size == 0 ? 0
                                : plain && wide  ? folded_x + (kZeroRows + window) * P * 2
                                : plain          ? folded + P * kMaxStateDim * folded_size
                                : keeps          ? folded + heads * state_bytes
                                                 : warp_max + warps * 4,
                                state + (!plain             ? teams
                                         : folded_size == 0 ? warps * kSlots
                                                            : 0) *
                                            chunk_bytes),
                       128)),
        column_scales(column_scales),
        keeps(keeps) {}

  int size_of_terms(int heads, bool column_scales) const {
    return heads * terms_stride * 4 + (column_scales ? warps * kQueryStride * 4 : 0);
  }
};

template <typename Format, typename Staged>
ReadShared ReadShared::of(bool wide, bool keeps, int P, int window, int tokens, int heads, int teams, int folded_size) {
  using State = StateOperand<Format>;
  if constexpr (kIsPlain<Format>) {
    return ReadShared(wide, keeps, P, window, tokens, heads, folded_size > 0 && !wide ? 2 : teams, State::kSliceBytes,
                      false, true, State::template kQueryParts<Staged>, folded_size, operands_size<Staged>(window) * 4);
  } else {
    return ReadShared(wide, keeps, P, window, tokens, heads, teams, State::bytes(P), State::kColumnScales, false, 1,
                      folded_size, operands_size<Staged>(window) * 4);
  }
}

struct ReadParams {
  ScanParams scan;
  int rows, flush_ctas;
  int enough_folds;                          // tasks of CTAs that fold, of which more have more heads each
  int flush_spacing;                         // of so many CTAs one folds, as a power of two
  int step_ctas, step_tasks;                 // CTAs that step; a task for each, or for either half
  int halved_tasks;                          // of so many of the first tasks the heads are half of those of others
  int early_ctas;                            // so many of the first step before the kernel before has ended
  int fold_bits;                             // of the most heads that a CTA folds, as a power of two
  int heads_per_group, slices;               // slices a head
  int x_ring_stride;                         // bytes from record to record of a head
  int x_ring_bytes;                          // from row to the same row
  int team_bits;                             // 1 << team_bits warps work on a head,
  int cta_heads;                             // a CTA on so many, one after the other if the warps are not enough
  Quotient heads, group_heads;               // of a row, of a group
  Quotient ctas, chunks;                     // of a row, of a group, but for those that fold
  Quotient groups;                           // of a row
  Quotient fold_chunks[kPlainFoldBits + 1];  // of a group, that CTAs fold: by their heads, as a power of two
  Quotient x_parts;                          // 16 bytes of a row of x
  int fold_rows;                             // of these rows, that the threads of a CTA that folds request at once
  Quotient delta_parts;                      // of a record's delta of a CTA that steps,
  int delta_part;                            // each of so many heads
  int state_bytes;                           // of a head, as steps read it
  struct {
    int64_t state, ring, new_x, out;
  } advance;  // bytes from a head to the warp's next
  ReadShared stepping, folding;
  int fetches;         // CTAs that have the L2 fetch states ahead
  bool paired;         // outputs can be stored two at a time
  uint32_t tf32_mask;  // kTf32Mask, hidden from the compiler: see split()
  uint32_t nothing;    // 0, hidden from the compiler: see after()
};

// The CTA's shared memory. The address is hidden from the compiler, which would compute it anew for every access.
__device__ inline char* hide_address(char* shared) {
  uint32_t address = shared_address(shared);
  asm volatile("" : "+r"(address));
  return static_cast<char*>(__cvta_shared_to_generic(address));
}

// Brings what the host has given near, so that no access to it has to wait when others wait for that.
__device__ inline void fetch_parameters(const ReadParams& params) {
  constexpr int kLine = 64 / 4, kWords = sizeof(ReadParams) / 4;
  const auto* const words = reinterpret_cast<const int*>(&params);
  int first[(kWords + kLine - 1) / kLine];
#pragma unroll
  for (int i = 0; i < kWords; i += kLine) first[i / kLine] = words[i];
#pragma unroll
  for (int value : first) asm volatile("" ::"r"(value));
}

}  // namespace
}  // namespace cuda
}  // namespace replayssm
