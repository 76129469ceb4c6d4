// SPDX-License-Identifier: Apache-2.0
//
// step from quantised states on tensor cores: state_dim 128, head_dim a multiple of 16, 16-bit activations.
//
//     y_s = exp(f_s) [ d S C_s + sum_i v_i (B_i . C_s) x_i ] + sum_{r<=s} u_rs x_r,    u_ss including D
//
// with the symbols of step_mma.cu, but that S is the read copy (FP8, NVFP4, E2M2), or a checkpoint of such a format.
//
// A CTA owns up to kMaxCtaHeads heads of one group of one row. What they share it does once: B^T C, C in FP16, and the
// weights of all heads, for a thread sums up a head's exponents as cheaply as a warp would. Then each of its four warps
// takes a head by itself, and another after that; in small batches two or four warps share one. A head's state comes by
// one block copy (pipeline.cuh), its records of x by asynchronous copies into rows that ldmatrix can read without
// meeting a bank twice. Warps are at different points, so that some wait for memory while others compute. What bounds
// this kernel is the number of instructions: a state of 4 bits a value is little memory. Hence the addresses that are
// kept in registers (keep(), hide_address()), where the compiler would compute them anew.
//  1. S C by mma.m16n8k16 in FP16. A code's bits in the places of FP16's are the code times 2^-14. The order of a
//     product's terms is free: of rows g and g + 8, lane (g, t) = (lane / 4, lane mod 4) takes the t-th 32 columns, two
//     blocks, so that a row's codes are one vector load (FP8: the t-th 16 of either half). Column n of the product has
//     the columns of lanes with t = n / 2 alone, for token n mod 2 of a pair: all other lanes bring zeros for the
//     query. So a lane gets the sums over its own blocks, and their scales are applied to sums, in float32. A product
//     has two tokens instead of eight; what it saves is a multiplication for each pair of codes.
//  2. C is brought to FP16 once a CTA, times the power of two that puts its largest value below 2^15: exact for BF16
//     but where values lie 2^28 apart. Column scales are multiplied into it once a head: the one rounding, by 2^-12.
//     The scales of the head, or of rows of FP8, and the powers of two go to the float32 sums.
//  3. The sum over the history is a product too, by mma.m16n8k16 in BF16: x as it lies (FP16 in two parts), weights in
//     three parts of 8 bits, which is all that they have. Column n has part n / 2 for token n mod 2. So the sum over
//     the four lanes of a quad, formed once, is both that over blocks and that over parts. The sums over new tokens are
//     no product: a later one may be NaN.
//  4. Rows flagged FLUSH are the work of other CTAs, the first of the grid, a head at a time: they fold the records
//     into the checkpoint as step_mma.cu does, in float32 in shared memory, cast it to the read copy from there, and
//     go on as above with what they cast. Steps and flushes don't wait for each other.
// Every sum's order depends on the row and the config alone, and the bits of token s don't depend on the tokens after
// it. Which CTA and warp has a slice, and how many heads a CTA has, changes no bit. Dead records are never read.
#include <algorithm>

#include "head_state.cuh"
#include "pipeline.cuh"

namespace replayssm {
namespace cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kParts = 3;         // of BF16, of a weight
constexpr int kMaxTeamBits = 2;   // a head's warps are all of the CTA
constexpr int kMaxCtaHeads = 16;  // a thread has one of so many heads, and every kTokenThreads-th token
constexpr int kTokenThreads = kThreads / kMaxCtaHeads;
constexpr int kProducts = 8;      // of 16 columns, for a row of the state
constexpr int kQueryStride = 80;  // words from token to token of C: 320 bytes, so that the loads of two tokens meet no
                                  // bank twice
constexpr int kZeroBytes = 256;   // as many as are read of anything that does not exist
constexpr int kNever = 1 << 20;   // a row that does not exist

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

// Shared memory of a CTA; offsets in bytes, strides in elements. Records of the history are newest first.
struct ReadShared {
  int tokens;
  int g_stride, w_stride, x_stride;  // of a token of B^T C; of a part of w; of a record of x
  int delta_stride;                  // of a head of delta and exponents
  int x_rows, new_x_row;             // of a head; where new tokens begin
  int b_new, c, zeros, query, g;     // B of the history is at 0
  int g_new, query_scale, barrier;
  int delta, exponents, steps, rate, terms;  // of each head. CTAs that fold have v where exponents are
  int w;                                     // of each head, in the place of B and C, of which nothing is needed then
  int terms_stride;                          // of a head of terms: d, exp(f_s) of each token, u [tokens][tokens]
  int x;                                     // of each team
  int end, state;                 // of what else there is; of each team. The copy that is cast takes the place of B
  int folded, inverse, warp_max;  // of CTAs that fold: [P][N], [kWarps][N], [kWarps]
  int scaled;                     // of each warp: C times column scales; in the place of the head that was folded
  int state_bytes, bytes;

  ReadShared() = default;
  ReadShared(int P, int window, int tokens, int heads, int teams, int chunk_bytes, bool column_scales, bool folds)
      : tokens(tokens),
        g_stride(round_up(window, 16)),
        w_stride(round_up(window, 16) + 8),      // so that the parts of two tokens lie in different banks
        x_stride(P + 8),                         // so that the rows of a matrix do,
        delta_stride(round_up(window, 32) | 1),  // and the heads
        x_rows(round_up(window, 8) + tokens),
        new_x_row(round_up(window, 8)),
        b_new(std::max(round_up(window, 8) * kStride * 2, folds ? round_up(chunk_bytes, 128) : 0)),
        c(b_new + tokens * kStride * 2),
        zeros(std::max(c + tokens * kStride * 2, folds ? 0 : round_up(heads * tokens * kParts * w_stride * 2, 16))),
        query(zeros + kZeroBytes),
        g(query + tokens * kQueryStride * 4),
        g_new(g + tokens * g_stride * 4),
        query_scale(g_new + tokens * tokens * 4),
        barrier(round_up(query_scale + tokens * 4, 8)),
        delta(barrier + kWarps * 8),
        exponents(delta + heads * delta_stride * 4),
        steps(exponents + heads * delta_stride * 4),
        rate(steps + heads * tokens * 4),
        terms(round_up(rate + heads * 4, 16)),
        w(0),
        terms_stride(round_up(1 + tokens + tokens * tokens, 4)),
        x(terms + heads * terms_stride * 4),
        end(round_up(x + teams * x_rows * x_stride * 2, 128)),
        state(folds ? 0 : end),
        folded(folds ? end : end + teams * round_up(chunk_bytes, 128)),
        inverse(folded + (folds ? P * kMaxStateDim * 4 : 0)),
        warp_max(inverse + (folds ? kWarps * kMaxStateDim * 4 : 0)),
        scaled(folded),
        state_bytes(round_up(chunk_bytes, 128)),
        bytes(std::max(warp_max + (folds ? kWarps * 4 : 0),
                       scaled + (column_scales ? kWarps * tokens * kQueryStride * 4 : 0))) {}
};

struct ReadParams {
  ScanParams scan;
  int rows, flush_ctas;
  int heads_per_group, slices;  // slices a head
  int team_bits;                // 1 << team_bits warps work on a head,
  int cta_heads;                // a CTA on so many, one after the other if the warps are not enough
  Quotient heads, group_heads;  // of a row, of a group
  Quotient ctas, chunks;        // of a row, of a group, but for those that fold
  Quotient x_parts;             // 16 bytes of a row of x
  int state_bytes;              // of a head, as steps read it
  struct {
    int64_t state, ring, new_x, out;  // bytes, elements
  } advance;                          // from a head to the warp's next
  ReadShared stepping, folding;
  uint32_t tf32_mask;  // kTf32Mask, hidden from the compiler: see split()
};

// ---- formats: a chunk lies in shared memory as in the slot ---------------------------------------------------------

// The E2M1 codes kCode and kCode + 4 of a word as FP16, times 2^-14. Every other code is cleared first, so that what is
// shifted to the sign and to the exponent has nothing where the other goes (a single LOP3, where the compiler would
// mask both). kZeros: zeros may come as -0. Then one multiplication is both shifts: 9 c - 8 of a code c = 8 sign +
// magnitude has the sign in bit 6, the magnitude in bits 2 to 0, and is below 128.
template <int kCode, bool kZeros>
__device__ inline uint32_t e2m1_pair(uint32_t word) {
  constexpr int kShift = 9 - 4 * kCode;
  uint32_t codes, pair;
  asm("and.b32 %0, %1, %2;" : "=r"(codes) : "r"(word), "n"(kCode % 2 == 0 ? 0x0f0f0f0fu : 0xf0f0f0f0u));
  if constexpr (kZeros && kShift > 0) {
    pair = (codes * (9u << kShift) + 0xf000f000u) & 0x8e008e00u;
  } else {
    const uint32_t sign = codes << (kShift + 3),
                   magnitude = kShift > 0 ? codes << max(kShift, 0) : codes >> max(-kShift, 0);
    asm("lop3.b32 %0, %1, %2, %3, 0xa8;" : "=r"(pair) : "r"(sign), "r"(magnitude), "n"(0x8e008e00u));  // (a | b) & c
  }
  return pair;
}

// The operand of rows g and g + 8 of a slice: kProducts times {row g, row g + 8, row g, row g + 8} of pairs of columns
// that query_column() names. A lane's columns of the first half of the products are one block, those of the second half
// another. Formats of block scales.
template <typename Format>
struct StateOperand {
  static constexpr bool kColumnScales = Format::kColumnScales;
  static constexpr float kUnit = 16384.0f;  // what sums are to be multiplied by: codes come times 2^-14

  __host__ __device__ static int bytes(int P) { return static_cast<int>(BlockChunk<Format>{P, kMaxStateDim}.bytes()); }
  // The first of the two columns, of word `index` of lane t; the second lies `kColumnStep` behind.
  static constexpr int kColumnStep = 4;
  __device__ static int query_column(int t, int index) { return 32 * t + index / 4 * 8 + index % 4; }

  uint4 codes[2];
  uint32_t low[2];
  uint32_t scales[2];  // codes of the two blocks

  // Where the lane's parts of a slice are: of row g and, kRow on, of row g + 8.
  struct Source {
    static constexpr int kRow = 8 * 4, kSlice = kSliceWidth * 4;  // parts, of 4 in a row
    const uint4* codes;
    const uint16_t* scales;
    const uint32_t* low;

    __device__ Source(const char* chunk, int P, int slice, int lane) {
      const BlockChunk<Format> layout{P, kMaxStateDim};
      const int part = slice * kSlice + lane;
      codes = reinterpret_cast<const uint4*>(chunk) + part;
      scales = reinterpret_cast<const uint16_t*>(chunk + layout.block_scales()) + part;
      low = reinterpret_cast<const uint32_t*>(chunk + layout.low_bits()) + part;
    }
    __device__ void advance() { codes += kSlice, scales += kSlice, low += kSlice; }
  };
  __device__ explicit StateOperand(const Source& source) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      codes[i] = source.codes[i * Source::kRow];
      scales[i] = source.scales[i * Source::kRow];
      low[i] = 0;
      if constexpr (Format::kLowBits) low[i] = source.low[i * Source::kRow];
    }
  }

  // Code kCode and kCode + 4 of word kWord.
  template <int kWord, int kCode>
  __device__ uint32_t pair(int i) const {
    const uint32_t word = kWord == 0 ? codes[i].x : kWord == 1 ? codes[i].y : kWord == 2 ? codes[i].z : codes[i].w;
    uint32_t value = e2m1_pair<kCode, !Format::kLowBits>(word);
    if constexpr (Format::kLowBits) {
      const uint32_t byte = low[i] >> 8 * kWord & 0xffu;
      value |= (byte | byte << 12) << (8 - kCode) & 0x01000100u;
    }
    return value;
  }
  template <int kProduct>
  __device__ void get(uint32_t (&a)[4]) const {
    constexpr int kWord = kProduct / 2, kCode = kProduct % 2 * 2;
    a[0] = pair<kWord, kCode>(0), a[1] = pair<kWord, kCode>(1);
    a[2] = pair<kWord, kCode + 1>(0), a[3] = pair<kWord, kCode + 1>(1);
  }

  // y = a lane's products: of rows g and g + 8, two tokens each, from their sums over either block.
  __device__ void scale(const float (&first)[4], const float (&second)[4], float (&y)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 factor = __half22float2(e4m3_halves(scales[i]));
#pragma unroll
      for (int j = 2 * i; j < 2 * i + 2; ++j) y[j] = fmaf(second[j], factor.y, __fmul_rn(first[j], factor.x));
    }
  }
  __device__ static float head_scale(const char* scale) { return *reinterpret_cast<const float*>(scale); }
};

struct Fp8 {};  // E4M3 with row scales
template <>
struct StateOperand<Fp8> {
  static constexpr bool kColumnScales = false;
  static constexpr float kUnit = 1.0f;

  __host__ __device__ static int bytes(int P) { return static_cast<int>(Fp8Chunk{P, kMaxStateDim}.bytes()); }
  static constexpr int kColumnStep = 1;
  __device__ static int query_column(int t, int index) { return index / 8 * 64 + 16 * t + index % 8 * 2; }

  uint4 codes[2][2];  // of a row's first and second half
  float row_scale[2];

  struct Source {
    static constexpr int kRowParts = kMaxStateDim / 16;
    const uint4* codes;
    const float* scales;

    __device__ Source(const char* chunk, int P, int slice, int lane) {
      const int row = slice * kSliceWidth + lane / 4;
      codes = reinterpret_cast<const uint4*>(chunk) + row * kRowParts + lane % 4;
      scales = reinterpret_cast<const float*>(chunk + Fp8Chunk{P, kMaxStateDim}.row_scales()) + row;
    }
    __device__ void advance() { codes += kSliceWidth * kRowParts, scales += kSliceWidth; }
  };
  __device__ explicit StateOperand(const Source& source) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_scale[i] = source.scales[8 * i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[i][half] = source.codes[8 * i * Source::kRowParts + half * (Source::kRowParts / 2)];
      }
    }
  }

  template <int kProduct>
  __device__ void get(uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4& piece = codes[i][kProduct / 4];
      const uint32_t word = kProduct % 4 == 0   ? piece.x
                            : kProduct % 4 == 1 ? piece.y
                            : kProduct % 4 == 2 ? piece.z
                                                : piece.w;
      a[i] = bits_of(e4m3_halves(word & 0xffffu));
      a[2 + i] = bits_of(e4m3_halves(word >> 16));
    }
  }

  __device__ void scale(const float (&first)[4], const float (&second)[4], float (&y)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = __fmul_rn(__fadd_rn(first[j], second[j]), row_scale[j / 2]);
  }
  __device__ static float head_scale(const char*) { return 1.0f; }
};

// The queries of some pairs of tokens are operands: pairs of columns of a lane's block. Column n of a product takes the
// block of lane n / 2 alone, of token n % 2; all other lanes bring zeros.

// Sums over a lane's two blocks, of some pairs of tokens. query(pair, i): the operands of products 2i and 2i + 1.
template <int kPairs, typename Format, typename Query, int kStep = 0>
__device__ inline void multiply_state(const StateOperand<Format>& state, const Query& query,
                                      float (&sum)[kPairs][2][4]) {
  if constexpr (kStep < kProducts / 2) {
    constexpr int kBlock = kStep / (kProducts / 4);
    uint32_t even[4], odd[4];
    state.template get<2 * kStep>(even);
    state.template get<2 * kStep + 1>(odd);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint4 q = query(pair, kStep);
      multiply_pairs<__half>(sum[pair][kBlock], even[0], even[1], even[2], even[3], q.x, q.y);
      multiply_pairs<__half>(sum[pair][kBlock], odd[0], odd[1], odd[2], odd[3], q.z, q.w);
    }
    multiply_state<kPairs, Format, Query, kStep + 1>(state, query, sum);
  }
}

// Both tokens' sums of the quad: lane (g, t) gets row g + 8 (t / 2), token t % 2. With one token all that are even are
// the same.
template <bool kSingle>
__device__ inline float sum_over_quad(const float (&y)[4], int t) {
  const bool lower = t >= 2, odd = t % 2 == 1;
  float kept = lower ? y[2] : y[0];
  kept = __fadd_rn(kept, __shfl_xor_sync(~0u, lower ? y[0] : y[2], 2));
  if (kSingle) return __fadd_rn(kept, __shfl_xor_sync(~0u, kept, 1));
  float other = lower ? y[3] : y[1];
  other = __fadd_rn(other, __shfl_xor_sync(~0u, lower ? y[1] : y[3], 2));
  return __fadd_rn(odd ? other : kept, __shfl_xor_sync(~0u, odd ? kept : other, 1));
}

// ---- the history ---------------------------------------------------------------------------------------------------

// 16 records of a slice's x as the operand of a product.
template <typename Staged>
struct HistoryOperand {
  static constexpr int kParts = std::is_same_v<Staged, __half> ? 2 : 1;  // of BF16
  uint32_t part[kParts][4];

  // x: the lane's row of a matrix of 8 by 8: of record lane / 16 * 8 + lane % 8, the slice's columns from lane / 8 % 2
  // * 8 on.
  __device__ explicit HistoryOperand(const Staged* x) {
    uint32_t (&a)[4] = part[0];
    load_transposed(a, x);
    if constexpr (kParts == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 pair = unpack_pair<__half>(a[i]);
        a[i] = take_part(pair.x, pair.y);
        part[1][i] = upper_halves(pair.x, pair.y);
      }
    }
  }
  // y += x times the lane's column of weights.
  __device__ void multiply(uint32_t first, uint32_t second, float (&y)[4]) const {
#pragma unroll
    for (int i = kParts - 1; i >= 0; --i) {
      multiply_pairs<__nv_bfloat16>(y, part[i][0], part[i][1], part[i][2], part[i][3], first, second);
    }
  }
};

// ---- flush ---------------------------------------------------------------------------------------------------------

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

// ---- the kernel ----------------------------------------------------------------------------------------------------

// The CTA's shared memory. The address is hidden from the compiler, which would compute it anew for every access.
__device__ inline char* hide_address(char* shared) {
  uint32_t address = shared_address(shared);
  asm volatile("" : "+r"(address));
  return static_cast<char*>(__cvta_shared_to_generic(address));
}

// Keeps a value in a register, where the compiler would compute it anew.
__device__ inline int keep(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A CTA and its work: some heads of a group of one row or, if it folds, a head to flush.
template <typename Format, typename Staged, bool kFolds, bool kSingle>
struct ReadCta {
  using State = StateOperand<Format>;
  static constexpr int N = kMaxStateDim;
  static constexpr int kUnrolled = kSingle && !kFolds ? 2 : 1;                 // slices
  static constexpr int kRowParts = N / 8, kRowsAtOnce = kThreads / kRowParts;  // of 16 bytes, of B and C

  const ReadParams& params;
  const Problem& problem;
  const replayssm_scan_args& args;
  const ReadShared& layout;
  char* const shared;
  int tid, warp, lane, g, t;
  int team_bits, team, member;  // of the warps that share a head, and which of them this is
  int first_slice, own_slices;  // of a head, for this warp
  int x_row, x_column, x_rows;  // of a record's 16 bytes that the lane moves, every x_rows-th from x_row on
  int row_index, group, group_head, heads;
  replayssm_plan_row row;
  int T, h, history;  // tokens; records to stage, and those that outputs see
  bool stored_before;

  __device__ __forceinline__ ReadCta(const ReadParams& params, char* shared)
      : params(params),
        problem(params.scan.problem),
        args(params.scan.args),
        layout(kFolds ? params.folding : params.stepping),
        shared(hide_address(shared)),
        tid(threadIdx.x),
        warp(__shfl_sync(~0u, threadIdx.x / 32, 0)),  // the shuffle tells the compiler that a warp has one index
        lane(threadIdx.x % 32),
        g(lane / 4),
        t(lane % 4),
        team_bits(kFolds ? kMaxTeamBits : params.team_bits),
        team(warp >> team_bits),
        member(warp & ((1 << team_bits) - 1)),
        x_rows(params.x_parts(32 << team_bits)) {
    const int team_lane = member * 32 + lane, parts = params.x_parts.divisor;
    x_row = params.x_parts(team_lane);
    x_column = (team_lane - x_row * parts) * 8;
    if (x_row >= x_rows) x_row = kNever;
    const int share = (params.slices + (1 << team_bits) - 1) >> team_bits;
    first_slice = member * share;
    own_slices = min(share, params.slices - first_slice);
  }

  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }
  __device__ Staged* staged(int offset) const { return reinterpret_cast<Staged*>(shared + offset); }
  __device__ uint32_t* words(int offset) const { return reinterpret_cast<uint32_t*>(shared + offset); }
  __device__ Staged* x() const { return staged(layout.x) + team * layout.x_rows * layout.x_stride; }
  __device__ char* state() const { return shared + layout.state + team * layout.state_bytes; }
  __device__ Barrier* barrier() const { return reinterpret_cast<Barrier*>(shared + layout.barrier) + team; }
  __device__ int head_of(int k) const { return group * params.heads_per_group + group_head + k; }
  __device__ int ring_before(int record) const {  // of the record-th newest
    const int position = row.ring_row - 1 - record;
    return position < 0 ? position + problem.ring_rows : position;
  }
  __device__ Staged* b_ring() const {
    return reinterpret_cast<Staged*>(section_of(params.scan.layer.b_ring, row.slot)) + group * problem.ring_rows * N;
  }
  __device__ float* delta_ring(int head) const {
    return reinterpret_cast<float*>(section_of(params.scan.layer.delta_ring, row.slot)) + head * problem.ring_rows;
  }
  __device__ char* checkpoint(int head) const {
    return section_of(params.scan.layer.checkpoint, row.slot) + head * problem.checkpoint_head_bytes;
  }
  __device__ char* read_copy(int head) const {
    return section_of(params.scan.layer.read_copy, row.slot) + head * problem.read_copy_head_bytes;
  }

  // Takes the task-th part of all heads or, if the CTA folds, the task-th head of the rows to flush. False: nothing to
  // do.
  __device__ bool take(uint32_t task) {
    if (kFolds) {
      const uint32_t index = params.heads(task), head = task - index * params.heads.divisor;
      row_index = reinterpret_cast<const int32_t*>(params.scan.planned + params.rows)[index];
      group = params.group_heads(head);
      group_head = head - group * params.heads_per_group;
      heads = 1;
    } else {
      row_index = params.ctas(task);
      const uint32_t rest = task - row_index * params.ctas.divisor;
      group = params.chunks(rest);
      group_head = (rest - group * params.chunks.divisor) * params.cta_heads;
      heads = min(params.cta_heads, params.heads_per_group - group_head);
    }
    row = params.scan.planned[row_index];
    if (!admit(row, row_index, args.num_tokens, args.max_count, problem.config.window, false, params.scan.error,
               !kFolds && group == 0 && group_head == 0 && tid == 0) ||
        row.count == 0) {
      return false;
    }
    const bool flagged = row.flags & REPLAYSSM_ROW_FLUSH, flushed = flagged && params.scan.flushed;
    T = kSingle ? 1 : row.count;
    h = flushed ? 0 : row.history;
    history = kFolds ? 0 : h;
    stored_before = !(row.flags & REPLAYSSM_ROW_EMPTY) || flushed;
    return kFolds || !flagged || flushed;  // else a CTA that folds has it
  }

  // ---- copies ----

  // B of the history and of the tokens, C, and the step sizes of all heads.
  __device__ void request_group() const {
    const int part_row = tid / kRowParts, part_column = tid % kRowParts * 8;
    const Staged* const ring = b_ring() + part_column;
    Staged* const B = staged(0) + part_column;
#pragma unroll 1
    for (int i = part_row; i < h; i += kRowsAtOnce) {
      request_16_bytes(B + i * kStride, ring + ring_before(i) * N);
    }
    if (kFolds && part_row < round_up(h, 8) - h) {
      *reinterpret_cast<uint4*>(B + (h + part_row) * kStride) = make_uint4(0, 0, 0, 0);
    }
    const int64_t first_token = row.first_token;
#pragma unroll 1
    for (int s = part_row; s < T; s += kRowsAtOnce) {
      request_input(staged(layout.b_new) + s * kStride + part_column,
                    static_cast<const Staged*>(args.B.data) + (first_token + s) * args.B.stride[0] +
                        group * args.B.stride[1] + part_column,
                    params.scan.b_aligned);
      request_input(staged(layout.c) + s * kStride + part_column,
                    static_cast<const Staged*>(args.C.data) + (first_token + s) * args.C.stride[0] +
                        group * args.C.stride[1] + part_column,
                    params.scan.c_aligned);
    }
    constexpr int kTile = 16;
#pragma unroll 1
    for (int i = tid % kTile; i < h; i += kTile) {
      const float* source = delta_ring(head_of(tid / kTile)) + ring_before(i);
      float* target = floats(layout.delta) + tid / kTile * layout.delta_stride + i;
#pragma unroll 1
      for (int k = tid / kTile; k < heads; k += kThreads / kTile) {
        request_4_bytes(target, source);
        source += kThreads / kTile * problem.ring_rows, target += kThreads / kTile * layout.delta_stride;
      }
    }
  }

  // Where the team's head lies in global memory, as a lane sees it.
  struct Head {
    const char* state;    // what steps read
    Staged* ring;         // of x, the lane's columns,
    const Staged* new_x;  // which also are these, of the lane's first token
    Staged* out;          // of the first token, in the lane's row of the warp's first slice
    int head;

    __device__ Head(const ReadCta& cta, int k) : head(cta.head_of(k)) {
      const replayssm_scan_args& args = cta.args;
      const int64_t first_token = cta.row.first_token;
      state = cta.problem.read_copy_head_bytes > 0 ? cta.read_copy(head) : cta.checkpoint(head);
      ring = reinterpret_cast<Staged*>(section_of(cta.params.scan.layer.x_ring, cta.row.slot)) +
             head * cta.problem.ring_rows * cta.problem.geometry.head_dim + cta.x_column;
      new_x = static_cast<const Staged*>(args.x.data) + (first_token + (kSingle ? 0 : cta.x_row)) * args.x.stride[0] +
              head * args.x.stride[1] + cta.x_column;
      out = static_cast<Staged*>(args.out.data) + first_token * args.out.stride[0] + head * args.out.stride[1] +
            cta.first_slice * kSliceWidth + cta.g + cta.t / 2 * 8;
    }
    __device__ void advance(const ReadParams& params) {  // where warps have a head each
      state += params.advance.state;
      ring += params.advance.ring;
      new_x += params.advance.new_x;
      out += params.advance.out;
    }
  };

  // Where a lane stages and finds things: bytes in shared memory. None depends on the head, if the row has one token.
  struct Places {
    int x, new_x;  // the lane's 16 bytes of its first record and first token
    int chunk, head_scale;
    int column_scales, query, scaled;  // of the two words of C that the lane scales; their stride is kQueryStride
    int operand;                       // of the first pair of queries
    int terms;                         // of the first head
    int history_x[2];                  // the lane's row of a tile's first slice
    int out_x;                         // the lane's row of the first slice, of the first token

    __device__ explicit Places(const ReadCta& cta) {
      const ReadShared& layout = cta.layout;
      const int lane = cta.lane, chunk = layout.state + cta.team * layout.state_bytes;
      const int x_rows = layout.x + cta.team * layout.x_rows * layout.x_stride * 2;
      const int new_rows = x_rows + layout.new_x_row * layout.x_stride * 2;
      const int column = State::query_column(lane / 2 % 4, lane / 8 * 4 + lane % 2 * 2),
                copy = cta.warp * layout.tokens;
      x = keep(x_rows + 2 * (cta.x_row * layout.x_stride + cta.x_column));
      new_x = keep(new_rows + 2 * ((kSingle ? 0 : cta.x_row) * layout.x_stride + cta.x_column));
      this->chunk = keep(chunk);
      head_scale = keep(chunk + cta.params.state_bytes - 16);
      column_scales = keep(head_scale - N + column);
      query = keep(layout.query + 8 * lane);
      scaled = keep(layout.scaled + copy * kQueryStride * 4 + 8 * lane);
      operand = keep(cta.query_at(0));
      terms = keep(layout.terms + cta.team * layout.terms_stride * 4);
      history_x[0] = keep(cta.history_at(0)), history_x[1] = keep(cta.history_at(1));
      out_x = keep(new_rows + 2 * (cta.first_slice * kSliceWidth + cta.g + cta.t / 2 * 8));
    }
  };

  // What the team's head takes: its state and x.
  __device__ void request_head(const Head& head, const Places& places) const {
    const int P = problem.geometry.head_dim;
    if constexpr (kFolds) {
      uint4* const folded = reinterpret_cast<uint4*>(shared + layout.folded);
      if (stored_before && problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32) {
        request_checkpoint(reinterpret_cast<const float*>(checkpoint(head.head)), P, folded);
      } else if (stored_before) {
        request_checkpoint(reinterpret_cast<const __half*>(checkpoint(head.head)), P, folded);
      }
    } else if (stored_before) {
      request_state(head.state);
    }  // else it is zero
    Staged* target = staged(places.x);
    int position = row.ring_row - 1 - x_row;
#pragma unroll 1
    for (int i = x_row; i < h; i += x_rows) {
      if (position < 0) position += problem.ring_rows;
      request_16_bytes(target, head.ring + position * P);
      target += x_rows * layout.x_stride, position -= x_rows;
    }
    if (kFolds) {
#pragma unroll 1
      for (int i = x_row; i < round_up(h, 8); i += x_rows) {
        if (i >= h) *reinterpret_cast<uint4*>(x() + i * layout.x_stride + x_column) = make_uint4(0, 0, 0, 0);
      }
    }
    const Staged* source = head.new_x;
#pragma unroll 1
    for (int s = x_row; s < T; s += x_rows, source += x_rows * args.x.stride[0]) {
      request_input(staged(places.new_x) + (s - x_row) * layout.x_stride, source, params.scan.x_aligned);
      if (kSingle) break;
    }
  }

  __device__ void request_state(const char* source) const {
    const int bytes = params.state_bytes;
#if __CUDA_ARCH__ >= 900
    if (member == 0 && elect_lane()) {
      arrive_expecting(barrier(), bytes);
      request_block(state(), source, bytes, barrier());
    }
#else
#pragma unroll 4
    for (int i = (member * 32 + lane) * 16; i < bytes; i += 512 << team_bits) {
      request_16_bytes(state() + i, source + i);
    }
#endif
  }
  // Until the team's head is there, for what this thread requested and for blocks. parity: of the heads before it.
  __device__ void await_head(int parity) const {
    await_groups<0>();
#if __CUDA_ARCH__ >= 900
    if (!kFolds && stored_before) await(barrier(), parity);
#endif
  }

  // The new x into the ring.
  __device__ void append_x(const Head& head, const Places& places) const {
#pragma unroll 1
    for (int s = x_row; s < T; s += x_rows) {
      const int position = kSingle ? row.ring_row : ring_position(row.ring_row, s, problem.ring_rows);
      *reinterpret_cast<uint4*>(head.ring + position * problem.geometry.head_dim) =
          *reinterpret_cast<const uint4*>(staged(places.new_x) + (s - x_row) * layout.x_stride);
      if (kSingle) break;
    }
  }

  // ---- what all heads share ----

  // C in FP16, by warps from the last on.
  __device__ void form_query() const {
#pragma unroll 1
    for (int s = kWarps - 1 - warp; s < T; s += kWarps) {
      const Staged* const token = staged(layout.c) + s * kStride;
      float value[4];
      load_shared<4>(token + lane * 4, value);
      uint32_t amax = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) amax = max(amax, magnitude_bits(value[i]));
      // 2^14 for the largest value; below 2^-100 the scale stays.
      const uint32_t exponent = max(__reduce_max_sync(~0u, amax) >> 23, 27u);
      const float scale = bits_float((268 - exponent) << 23);
      if (lane == 0) floats(layout.query_scale)[s] = bits_float((exponent - 14) << 23) * State::kUnit;
      uint32_t* const query = words(layout.query) + s * kQueryStride;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int owner = lane / 8, index = lane % 8 * 2 + i, column = State::query_column(owner, index);
        query[index / 4 * 16 + owner * 4 + index % 4] = pack_pair<__half>(
            static_cast<float>(token[column]) * scale, static_cast<float>(token[column + State::kColumnStep]) * scale);
      }
    }
  }

  // B^T C, 16 records by 8 tokens at a time; rows and columns beyond the last repeat it.
  __device__ void form_products() const {
    constexpr int kTile = 8;
    const int tiles = (history + 15) / 16;
#pragma unroll 1
    for (int tile = warp; tile < tiles + 1; tile += kWarps) {
      const bool is_new = tile == tiles;
      const int first = is_new ? 0 : tile * 16, count = is_new ? T : history;
      const Staged* const records = staged(is_new ? layout.b_new : 0);
#pragma unroll 1
      for (int token = 0; token < T; token += kTile) {
        const uint4* const upper = reinterpret_cast<const uint4*>(records + min(first + g, count - 1) * kStride) + t;
        const uint4* const lower =
            reinterpret_cast<const uint4*>(records + min(first + g + 8, count - 1) * kStride) + t;
        const uint4* const tokens =
            reinterpret_cast<const uint4*>(staged(layout.c) + min(token + g, T - 1) * kStride) + t;
        float sum[2][4] = {};
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const uint4 k0 = upper[b * 4], k1 = lower[b * 4], q = tokens[b * 4];
          multiply_pairs<Staged>(sum[0], k0.x, k1.x, k0.y, k1.y, q.x, q.y);
          multiply_pairs<Staged>(sum[1], k0.z, k1.z, k0.w, k1.w, q.z, q.w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int record = first + g + i / 2 * 8, s = token + 2 * t + i % 2;
          const float product = record < count ? sum[0][i] + sum[1][i] : 0.0f;
          if (s >= T) continue;
          if (!is_new) {
            floats(layout.g)[s * layout.g_stride + record] = product;
          } else if (record < T) {
            floats(layout.g_new)[record * layout.tokens + s] = product;
          }
        }
      }
    }
  }

  // ---- the weights of all heads ----

  // A thread's head and its first token. Threads of the third warp begin, which has least to do.
  __device__ int thread_head() const { return tid % kMaxCtaHeads; }
  __device__ int thread_token() const { return (tid / kMaxCtaHeads + kTokenThreads / 2) % kTokenThreads; }
  static constexpr int kThreadTokens = kSingle ? 1 : REPLAYSSM_MAX_STEP_TOKENS / kTokenThreads;

  // The inputs of the thread's tokens.
  struct TokenInputs {
    uint32_t dt[kThreadTokens] = {}, bias = 0, rate = 0, skip = 0;
  };
  __device__ TokenInputs load_tokens() const {
    TokenInputs inputs;
    const int head = head_of(thread_head());
    if (thread_head() >= heads || thread_token() >= T) return inputs;
#pragma unroll
    for (int i = 0; i < kThreadTokens; ++i) {
      const int64_t s = thread_token() + i * kTokenThreads;
      if (s >= T) continue;
      inputs.dt[i] =
          load_bits(args.dt.data, args.dt.dtype, (row.first_token + s) * args.dt.stride[0] + head * args.dt.stride[1]);
    }
    if (args.dt_bias.data) inputs.bias = load_bits(args.dt_bias.data, args.dt_bias.dtype, head);
    if (args.D.data) inputs.skip = load_bits(args.D.data, args.D.dtype, head);
    inputs.rate = load_bits(args.A_log.data, args.A_log.dtype, head);
    return inputs;
  }

  // Step sizes, decay rates and e(i,h), whose sums begin with the newest record; d.
  __device__ void discretise(const TokenInputs& inputs) const {
    const int k = thread_head();
    if (k >= heads) return;
#pragma unroll
    for (int i = 0; i < kThreadTokens; ++i) {
      const int s = thread_token() + i * kTokenThreads;
      if (s >= T) continue;
      const float step = discretised_step(bits_to_float(inputs.dt[i], args.dt.dtype),
                                          bits_to_float(inputs.bias, args.dt_bias.dtype), args.dt_min, args.dt_max);
      floats(layout.steps)[k * layout.tokens + s] = step;
      delta_ring(head_of(k))[ring_position(row.ring_row, s, problem.ring_rows)] = step;
    }
    if (thread_token() > 0) return;
    const float rate = -expf(bits_to_float(inputs.rate, args.A_log.dtype));
    floats(layout.rate)[k] = rate;
    const float* const delta = floats(layout.delta) + k * layout.delta_stride;
    float* const exponents = floats(layout.exponents) + k * layout.delta_stride;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < history; ++i) {
      exponents[i] = sum;
      sum = __fadd_rn(sum, __fmul_rn(rate, delta[i]));
    }
    floats(layout.terms)[k * layout.terms_stride] = expf(sum);
  }

  // exp(f_s) and u.
  __device__ void weigh_tokens(const TokenInputs& inputs) const {
    const int k = thread_head(), stride = layout.tokens;
    if (k >= heads) return;
    const float rate = floats(layout.rate)[k], skip = bits_to_float(inputs.skip, args.D.dtype);
    const float* const steps = floats(layout.steps) + k * stride;
    float* const since = floats(layout.terms) + k * layout.terms_stride + 1;
    float* const u = since + stride;
#pragma unroll 1
    for (int s = thread_token(); s < T; s += kTokenThreads) {
      float exponent = 0.0f;
#pragma unroll 1
      for (int r = s; r >= 0; --r) {
        const float product = floats(layout.g_new)[r * stride + s];
        u[r * stride + s] = fmaf(record_weight(steps[r], exponent), product, r == s ? skip : 0.0f);
        exponent = __fadd_rn(exponent, __fmul_rn(rate, steps[r]));
      }
      since[s] = expf(exponent);
    }
  }

  // v times B^T C in parts, of records up to a multiple of 16. Half a warp has a tile of a head.
  __device__ void weigh_records() const {
    constexpr int kTile = 16, kHeads = kThreads / kTile;
#pragma unroll 1
    for (int k = tid / kTile; k < heads; k += kHeads) {
      const float* const delta = floats(layout.delta) + k * layout.delta_stride;
      const float* const exponents = floats(layout.exponents) + k * layout.delta_stride;
#pragma unroll 1
      for (int i = tid % kTile; i < round_up(history, kTile); i += kTile) {
        const float weight = i < history ? record_weight(delta[i], exponents[i]) : 0.0f;
        const float* product = floats(layout.g) + i;
        auto* target =
            reinterpret_cast<uint16_t*>(shared + layout.w) + k * layout.tokens * kParts * layout.w_stride + i;
#pragma unroll 1
        for (int s = 0; s < T; ++s, product += layout.g_stride) {
          float rest = __fmul_rn(weight, *product);
#pragma unroll
          for (int part = 0; part < kParts; ++part, target += layout.w_stride) {
            *target = static_cast<uint16_t>(float_bits(rest) >> 16);
            rest = __fsub_rn(rest, upper_half(rest));
          }
        }
      }
    }
  }

  // All that precedes the heads. The first heads of all teams have been requested, and before them the group.
  __device__ void prepare(const TokenInputs& inputs) const {
    await_groups<1>();
    __syncthreads();
    if (group_head == 0) {
      const int part_column = tid % kRowParts * 8;
#pragma unroll 1
      for (int s = tid / kRowParts; s < T; s += kRowsAtOnce) {
        *reinterpret_cast<uint4*>(b_ring() + ring_position(row.ring_row, s, problem.ring_rows) * N + part_column) =
            *reinterpret_cast<const uint4*>(staged(layout.b_new) + s * kStride + part_column);
      }
    }
    form_products();
    form_query();
    discretise(inputs);
    __syncthreads();
    if (!kFolds) {
      weigh_records();
    } else if (warp == 0) {
      const float decay = weigh_history(floats(layout.delta), *floats(layout.rate), h, lane, floats(layout.exponents));
      if (lane == 0) *floats(layout.terms) = decay;
    }
    weigh_tokens(inputs);
    if (team_bits > 0 && team < heads) await_head(0);
    __syncthreads();
  }

  // ---- folding ----

  __device__ void fold() const {
    const int head = head_of(0);
    const StateOwner owner{problem, params.scan.layer, params.scan.error, head, row_index, row.stream, row.writes};
    uint4* const folded = reinterpret_cast<uint4*>(shared + layout.folded);
    auto fold_as = [&](auto stored) {
      fold_head(owner, stored_before, reinterpret_cast<decltype(stored)*>(checkpoint(head)), folded, x(),
                layout.x_stride, staged(0), floats(layout.exponents), *floats(layout.terms), h, params.tf32_mask);
    };
    if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32) {
      fold_as(float());
    } else if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_BF16) {
      fold_as(__nv_bfloat16());
    } else {
      fold_as(__half());
    }
    __syncthreads();
    const CastScratch scratch{floats(layout.inverse), words(layout.warp_max)};
    cast_head<Format>(folded, problem.geometry.head_dim, read_copy(head), state(), scratch);
    __syncthreads();
  }

  // ---- outputs ----

  // A lane's words of a token of the pair, in the operands of products: of the query, and of weights. Zeros where there
  // are none.
  __device__ int query_at(int pair) const {
    const int s = pair + g % 2;
    const int words = State::kColumnScales ? layout.scaled + warp * layout.tokens * kQueryStride * 4 : layout.query;
    return g / 2 == t && s < T ? words + s * kQueryStride * 4 + 16 * t : layout.zeros;
  }
  __device__ bool has_weights(int pair) const { return g / 2 < kParts && pair + g % 2 < T; }
  __device__ int weights_at(int k, int pair) const {
    const int part = (k * layout.tokens + pair + g % 2) * kParts + g / 2;
    return (has_weights(pair) ? layout.w + part * layout.w_stride * 2 : layout.zeros) + 4 * t;
  }
  // The lane's row of a tile of the history, for ldmatrix; zeros where there is no record.
  __device__ int history_at(int tile) const {
    const int record = 16 * tile + lane / 16 * 8 + lane % 8;
    return (record < history ? static_cast<int>(reinterpret_cast<char*>(x()) - shared) + record * layout.x_stride * 2
                             : layout.zeros) +
           2 * (first_slice * kSliceWidth + lane / 8 % 2 * 8);
  }

  // The head's column scales times C; for a whole warp, which has a copy of its own.
  __device__ void scale_query(const Places& places) const {
    if constexpr (State::kColumnScales) {
      const char* const scales = shared + places.column_scales;
      const uint32_t pairs = __byte_perm(*reinterpret_cast<const uint16_t*>(scales),
                                         *reinterpret_cast<const uint16_t*>(scales + State::kColumnStep), 0x5140);
      const __half2 first = e4m3_halves(pairs & 0xffffu), second = e4m3_halves(pairs >> 16);
#pragma unroll 1
      for (int s = 0; s < T; ++s) {
        const uint2 v = *reinterpret_cast<const uint2*>(shared + places.query + s * kQueryStride * 4);
        *reinterpret_cast<uint2*>(shared + places.scaled + s * kQueryStride * 4) =
            make_uint2(bits_of(__hmul2(halves_of(v.x), first)), bits_of(__hmul2(halves_of(v.y), second)));
        if (kSingle) break;
      }
      __syncwarp();
    }
  }

  // The outputs of a head, which is there; for a whole warp, which takes the slices that are its own.
  __device__ __forceinline__ void read_head(int k, const Places& places, int terms_at, Staged* head_out) const {
    constexpr int kPairs = kSingle ? 1 : 2, kTokens = kSingle ? 1 : 2 * kPairs;  // at a time
    const int tiles = (history + 15) / 16, odd = t % 2;
    scale_query(places);
    const float* const terms = floats(terms_at);
    const float scale = State::head_scale(shared + places.head_scale) * (kFolds ? 1.0f : terms[0]);

#pragma unroll 1
    for (int first = 0; first < T; first += kTokens) {
      // What all slices take, of tokens first + 2 pair + {0, 1}; since and u of the second if t is odd.
      int query[kPairs], weights[kPairs];
      float factor[kPairs][2], since[kPairs], u[kPairs][kTokens];
      Staged* out[kPairs];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int token = first + 2 * pair, s = min(token + odd, T - 1);
        query[pair] = kSingle ? places.operand : query_at(token);
        weights[pair] = weights_at(k, token);
#pragma unroll
        for (int i = 0; i < (kSingle ? 1 : 2); ++i) {
          factor[pair][i] = scale * floats(layout.query_scale)[min(token + i, T - 1)];
        }
        since[pair] = terms[1 + s];
#pragma unroll
        for (int r = 0; r < min(2 * pair + 2, kTokens); ++r) {
          u[pair][r] = terms[1 + layout.tokens + min(first + r, T - 1) * layout.tokens + s];
        }
        out[pair] = head_out + s * args.out.stride[0];
      }
      uint4 only_query[kProducts / 2];
      uint32_t only_weights[2][2];
      if (kSingle) {
#pragma unroll
        for (int i = 0; i < kProducts / 2; ++i) {
          only_query[i] = *reinterpret_cast<const uint4*>(shared + query[0] + 64 * i);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) only_weights[i / 2][i % 2] = i / 2 < tiles ? *words(weights[0] + 16 * i) : 0;
      }
      auto query_operand = [&](int pair, int i) {
        return kSingle ? only_query[i] : *reinterpret_cast<const uint4*>(shared + query[pair] + 64 * i);
      };
      int history_x[2] = {places.history_x[0], places.history_x[1]};
      const Staged* new_x = staged(places.out_x);
      typename State::Source source(shared + places.chunk, problem.geometry.head_dim, first_slice, lane);

#pragma unroll kUnrolled
      for (int slice = 0; slice < own_slices; ++slice) {
        float y[kPairs][4] = {}, sum[kPairs][2][4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i >= tiles) continue;
          const HistoryOperand<Staged> x(staged(history_x[i]));
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            const uint32_t* const of_tile = words(weights[pair]) + 8 * i;
            if (kSingle) {
              x.multiply(only_weights[i][0], only_weights[i][1], y[pair]);
            } else {
              x.multiply(of_tile[0], of_tile[4], y[pair]);
            }
          }
        }
#pragma unroll 1
        for (int i = 2; i < tiles; ++i) {
          const HistoryOperand<Staged> x(staged(history_at(i)) + slice * kSliceWidth);
#pragma unroll
          for (int pair = 0; pair < kPairs; ++pair) {
            const uint32_t* const of_tile = words(weights[pair]) + 8 * i;
            x.multiply(of_tile[0], of_tile[4], y[pair]);
          }
        }
        const State codes(source);
        multiply_state<kPairs>(codes, query_operand, sum);

        const float own_x = static_cast<float>(*new_x);
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          float products[4];
          codes.scale(sum[pair][0], sum[pair][1], products);
#pragma unroll
          for (int i = 0; i < 4; ++i) y[pair][i] = fmaf(products[i], factor[pair][kSingle ? 0 : i % 2], y[pair][i]);
          float value = __fmul_rn(sum_over_quad<kSingle>(y[pair], t), since[pair]);
          const int s = first + 2 * pair + odd;
#pragma unroll 1
          for (int r = 0; r < first; ++r) {
            value = fmaf(terms[1 + layout.tokens + r * layout.tokens + min(s, T - 1)],
                         static_cast<float>(new_x[r * layout.x_stride]), value);
          }
#pragma unroll
          for (int r = 0; r < min(2 * pair + 2, kTokens); ++r) {
            if (r == 2 * pair + 1 && !odd) continue;
            const float x = kSingle ? own_x : static_cast<float>(new_x[min(first + r, T - 1) * layout.x_stride]);
            value = fmaf(u[pair][r], x, value);
          }
          if (kSingle ? !odd : s < T) store_scalar(out[pair], kDtypeOf<Staged>, 0, value);
          out[pair] += kSliceWidth;
        }
        source.advance();
        history_x[0] += 2 * kSliceWidth, history_x[1] += 2 * kSliceWidth;
        new_x += kSliceWidth;
      }
      if (kSingle) break;
    }
  }

  // All of it.
  __device__ __forceinline__ void run() const {
    if (tid * 16 < kZeroBytes) *reinterpret_cast<uint4*>(shared + layout.zeros + tid * 16) = make_uint4(0, 0, 0, 0);
    if (!kFolds && member == 0 && lane == 0) {
      init_barrier(barrier(), 1);
      finish_stores_before_blocks();
    }
    __syncwarp();
    if (!kFolds && !stored_before) {
      for (int i = tid * 16; i < kWarps * layout.state_bytes >> team_bits; i += kThreads * 16) {
        *reinterpret_cast<uint4*>(shared + layout.state + i) = make_uint4(0, 0, 0, 0);
      }
    }
    request_group();
    close_group();
    Head head(*this, team);
    const Places places(*this);
    if (team < heads) request_head(head, places);
    close_group();
    prepare(load_tokens());
    if constexpr (kFolds) fold();
    int parity = 0, terms = places.terms;
#pragma unroll 1
    for (int k = team; k < heads; k += kWarps) {  // once, if teams are of more warps
      if (!kFolds && team_bits == 0) {
        await_head(parity);
        __syncwarp();
      }
      append_x(head, places);
      read_head(k, places, terms, head.out);
      terms += kWarps * 4 * layout.terms_stride;
      if (kFolds || team_bits > 0 || k + kWarps >= heads) break;
      head.advance(params);
      parity ^= 1;
      __syncwarp();
      request_head(head, places);
      close_group();
    }
  }
};

// kSingle: rows have one token at most. That changes no bit: the same operations, but for the loops around them.
template <typename Format, typename Staged, bool kSingle>
__global__ __launch_bounds__(kThreads, 4) void step_read_kernel(const __grid_constant__ ReadParams params) {
  extern __shared__ __align__(128) char shared[];
  begin_early();
  if (blockIdx.x >= params.flush_ctas) {
    ReadCta<Format, Staged, false, kSingle> cta(params, shared);
    if (cta.take(blockIdx.x - params.flush_ctas)) cta.run();
    return;
  }
  const auto* header = reinterpret_cast<const replayssm_plan_header*>(params.scan.planned) - 1;
#pragma unroll 1
  for (uint32_t task = blockIdx.x; task < header->num_flush * params.heads.divisor; task += params.flush_ctas) {
    ReadCta<Format, Staged, true, kSingle> cta(params, shared);
    if (cta.take(task)) cta.run();
    __syncthreads();  // before the next head is staged
  }
}

// ---- launch --------------------------------------------------------------------------------------------------------

using ReadKernel = void(ReadParams);

template <typename Format>
ReadKernel* choose_read(int activation, bool single) {
  if (activation == REPLAYSSM_BF16) {
    return single ? step_read_kernel<Format, __nv_bfloat16, true> : step_read_kernel<Format, __nv_bfloat16, false>;
  }
  return single ? step_read_kernel<Format, __half, true> : step_read_kernel<Format, __half, false>;
}

// Calls f with a value of the format that steps read: of the read copy, if there is one.
template <typename F>
auto with_quantised(const replayssm_config& config, F&& f) {
  if (config.read_copy == REPLAYSSM_READ_COPY_NVFP4) return f(Nvfp4());
  if (config.read_copy == REPLAYSSM_READ_COPY_E2M2) return f(E2m2());
  if (config.read_copy == REPLAYSSM_READ_COPY_NVFP4_AMAX) return f(Nvfp4Amax());
  if (config.read_copy == REPLAYSSM_READ_COPY_NONE && config.checkpoint == REPLAYSSM_CHECKPOINT_NVFP4) {
    return f(Nvfp4Amax());
  }
  return f(Fp8());
}

// A head has more than one warp where CTAs would be fewer, and a CTA more heads than it has warps as long as that
// leaves so many, and room for two others in an SM.
constexpr int64_t kEnoughCtas = 512;
constexpr int kManyHeadsShared = 74 * 1024;
// CTAs that fold, of a grid that has more than those. The steps of small batches find room beside them at once.
int most_flush_ctas(int64_t row_heads) { return row_heads < 8192 ? 264 : 528; }

ReadShared lay_out(const Problem& problem, int tokens, int heads, int teams, bool folds) {
  return with_quantised(problem.config, [&](auto format) {
    using State = StateOperand<decltype(format)>;
    const int P = problem.geometry.head_dim;
    return ReadShared(P, problem.config.window, tokens, heads, teams, State::bytes(P), State::kColumnScales, folds);
  });
}

}  // namespace

bool has_step_read(const Problem& problem) {
  const bool plain = problem.config.checkpoint <= REPLAYSSM_CHECKPOINT_FP16_SR;
  return has_mma_fold(problem) && (problem.read_copy_head_bytes > 0 || !plain) &&
         lay_out(problem, problem.config.max_step_tokens, 1, 1, plain).bytes <= kSharedLimit;
}

replayssm_status step_read(const replayssm_exec& exec, const ScanParams& scan, int32_t rows) {
  const Problem& problem = scan.problem;
  const replayssm_geometry& g = problem.geometry;
  const bool folds = has_fused_step_read(problem) && !scan.flushed;
  const int64_t row_heads = static_cast<int64_t>(rows) * g.num_heads;
  ReadParams params{};
  params.scan = scan;
  params.rows = rows;
  params.flush_ctas = folds ? static_cast<int>(std::min<int64_t>(most_flush_ctas(row_heads), row_heads)) : 0;
  params.heads_per_group = g.num_heads / g.num_groups;
  params.slices = g.head_dim / kSliceWidth;
  params.heads = Quotient(g.num_heads);
  params.group_heads = Quotient(params.heads_per_group);
  params.x_parts = Quotient(g.head_dim / 8);
  params.advance = {
      kWarps * (problem.read_copy_head_bytes > 0 ? problem.read_copy_head_bytes : problem.checkpoint_head_bytes),
      int64_t{kWarps} * problem.ring_rows * g.head_dim, kWarps * scan.args.x.stride[1],
      kWarps * scan.args.out.stride[1]};
  params.state_bytes =
      with_quantised(problem.config, [&](auto format) { return StateOperand<decltype(format)>::bytes(g.head_dim); });
  params.tf32_mask = kTf32Mask;
  int64_t ctas = 0;
  auto share = [&](int heads, int bits) {
    const int chunks = (params.heads_per_group + heads - 1) / heads;
    params.team_bits = bits;
    params.cta_heads = heads;
    params.chunks = Quotient(chunks);
    params.ctas = Quotient(g.num_groups * chunks);
    params.stepping = lay_out(problem, scan.args.max_count, heads, kWarps >> bits, false);
    ctas = static_cast<int64_t>(rows) * g.num_groups * chunks;
  };
  for (int bits = 0; bits <= kMaxTeamBits; ++bits) {
    share(kWarps >> bits, bits);
    if (params.stepping.bytes <= kSharedLimit && ctas >= kEnoughCtas && params.cta_heads <= params.heads_per_group) {
      break;
    }
  }
  while (params.team_bits == 0 && params.cta_heads < params.heads_per_group && 2 * params.cta_heads <= kMaxCtaHeads &&
         ctas >= 2 * kEnoughCtas &&
         lay_out(problem, scan.args.max_count, 2 * params.cta_heads, kWarps, false).bytes <= kManyHeadsShared) {
    share(2 * params.cta_heads, 0);
  }
  params.folding = lay_out(problem, scan.args.max_count, 1, 1, folds);
  const int shared = std::max(params.stepping.bytes, params.folding.bytes);
  return with_quantised(problem.config, [&](auto format) {
    return launch_early("step", choose_read<decltype(format)>(problem.config.activation, scan.args.max_count == 1),
                        row_heads > INT32_MAX ? row_heads : params.flush_ctas + ctas, kThreads, shared, exec, params);
  });
}

cudaError_t load_step_read_kernels() {
  replayssm_config config{};
  for (int read_copy :
       {REPLAYSSM_READ_COPY_FP8, REPLAYSSM_READ_COPY_NVFP4, REPLAYSSM_READ_COPY_NVFP4_AMAX, REPLAYSSM_READ_COPY_E2M2}) {
    for (int activation : {REPLAYSSM_BF16, REPLAYSSM_FP16}) {
      for (bool single : {false, true}) {
        config.read_copy = read_copy;
        ReadKernel* const kernel =
            with_quantised(config, [&](auto format) { return choose_read<decltype(format)>(activation, single); });
        cudaError_t error = load_kernel(kernel);
        if (error == cudaSuccess) {
          error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedLimit);
        }
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace replayssm
