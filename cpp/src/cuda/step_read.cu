// SPDX-License-Identifier: Apache-2.0
//
// step from quantised states on tensor cores: state_dim 128, head_dim a multiple of 16, 16-bit activations.
//
//     y_s = exp(f_s) [ d S C_s + sum_i v_i (B_i . C_s) x_i ] + sum_{r<=s} u_rs x_r,    u_ss including D
//
// with the symbols of step_mma.cu, but that S is the read copy (FP8, NVFP4, E2M2), or a checkpoint of such a format.
//
// A CTA owns heads of one group of one row. Each of its four warps does a head by itself, and another after that if the
// batch is large; in small batches two or four warps share one. The CTA forms B^T C once. A warp asks for all that its
// head takes, by asynchronous copies, makes the head's weights, and takes its slices (16 rows) in turn. Warps are at
// different points, so that some wait for memory while others compute. What bounds this kernel is the number of
// instructions: a state of 4 bits a value is little memory.
//  1. S C by mma.m16n8k16 in FP16. A code's bits in the places of FP16's are the code times 2^-14; times 16 times its
//     block's scale that is exact: 6 significant bits at most, multiples of 2^-24. The order of a product's terms is
//     free: of rows g and g + 8, lane (g, t) = (lane / 4, lane mod 4) takes the t-th 32 columns (FP8: the t-th 16 of
//     either half), so that a row's codes are one vector load and two block scales.
//  2. C is brought to FP16 once a CTA, times the power of two that puts its largest value below 2^15: exact for BF16
//     but where values lie 2^28 apart. Column scales are multiplied into it once a head: the one rounding, by 2^-12.
//     The scales of the head, or of rows of FP8, and the powers of two go to the float32 sums.
//  3. The sum over the history is a product too, by mma.m16n8k16 in BF16: x as it lies (FP16 in two parts), weights in
//     three parts of 8 bits, which is all that they have. The sums over new tokens are not: a later one may be NaN.
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
constexpr int kTile = 8;          // tokens in a product
constexpr int kMaxTeamBits = 2;   // a head's warps are all of the CTA
constexpr int kProducts = 8;      // of 16 columns, for a row of the state
constexpr int kQueryStride = 80;  // words from token to token of C: 320 bytes, so that the loads of two tokens meet no
                                  // bank twice

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

// Shared memory of a CTA; offsets in bytes, strides in elements. Records of the history are newest first, zeros up to a
// multiple of 16 of them.
struct ReadShared {
  int g_stride, v_stride, u_stride, u_head, x_stride;  // of a token of B^T C; of a head of v; of a new token and a head
                                                       // of u; of a record of x
  int x_rows, new_x_row;                               // of a head; where new tokens begin
  int b_new, c, query, zeros, query_scale, g, g_new;   // B of the history is at 0
  int delta, v, u, decay, token_decay, x;              // of each head
  int end, state;                 // of what else there is; of each head. The copy that is cast takes the place of B
  int folded, inverse, warp_max;  // of CTAs that fold: [P][N], [kWarps][N], [kWarps]
  int state_bytes, bytes;

  ReadShared() = default;
  ReadShared(int P, int window, int tokens, int heads, int chunk_bytes, bool folds)
      : g_stride(round_up(window, 32) + 8),
        v_stride(round_up(window, 32)),
        u_stride(round_up(tokens, kTile)),
        u_head(tokens * u_stride),
        x_stride(P + 8),  // so that the rows of a matrix lie in different banks
        x_rows(round_up(window, 8) + tokens),
        new_x_row(round_up(window, 8)),
        b_new(std::max(round_up(window, 8) * kStride * 2, folds ? round_up(chunk_bytes, 128) : 0)),
        c(b_new + tokens * kStride * 2),
        query(c + tokens * kStride * 2),
        zeros(query + tokens * kQueryStride * 4),
        query_scale(zeros + 16),
        g(round_up(query_scale + tokens * 4, 16)),
        g_new(g + tokens * g_stride * 4),
        delta(round_up(g_new + u_head * 4, 16)),
        v(round_up(delta + heads * window * 4, 16)),
        u(v + heads * v_stride * 4),
        decay(u + heads * u_head * 4),
        token_decay(round_up(decay + heads * 4, 16)),
        x(round_up(token_decay + heads * u_stride * 4, 16)),
        end(round_up(x + heads * x_rows * x_stride * 2, 128)),
        state(folds ? 0 : end),
        folded(folds ? end : end + heads * round_up(chunk_bytes, 128)),
        inverse(folded + (folds ? P * kMaxStateDim * 4 : 0)),
        warp_max(inverse + (folds ? kWarps * kMaxStateDim * 4 : 0)),
        state_bytes(round_up(chunk_bytes, 128)),
        bytes(warp_max + (folds ? kWarps * 4 : 0)) {}
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
  ReadShared stepping, folding;
  uint32_t tf32_mask;  // kTf32Mask, hidden from the compiler: see split()
};

// ---- formats -------------------------------------------------------------------------------------------------------

// A chunk lies in shared memory as in the slot, but that the halves of every other row of FP8 codes, which fill a
// 128-byte line, are swapped, so that the 8 lanes of a load meet no bank twice.

// The E2M1 codes kCode and kCode + 4 of a word as FP16, times 2^-14.
template <int kCode>
__device__ inline uint32_t e2m1_pair(uint32_t word) {
  constexpr int kShift = 9 - 4 * kCode;
  const uint32_t magnitude = kShift > 0 ? word << (kShift > 0 ? kShift : 0) : word >> (kShift > 0 ? 0 : -kShift);
  return (word << (12 - 4 * kCode) & 0x80008000u) | (magnitude & 0x0e000e00u);
}

// The operand of rows g and g + 8 of a slice: kProducts times {row g, row g + 8, row g, row g + 8} of pairs of columns
// that query_column() names. Formats of block scales.
template <typename Format>
struct StateOperand {
  static constexpr bool kColumnScales = Format::kColumnScales;
  static constexpr int kSwap = 0;  // XORed to the indices of 16 bytes of codes in odd rows
  static constexpr float kUnit =
      1024.0f;  // what sums are to be multiplied by: codes come times 2^-14, scales times 2^4

  __host__ __device__ static int bytes(int P) { return static_cast<int>(BlockChunk<Format>{P, kMaxStateDim}.bytes()); }
  // The first of the two columns, of word `index` of lane t; the second lies `kColumnStep` behind.
  static constexpr int kColumnStep = 4;
  __device__ static int query_column(int t, int index) { return 32 * t + index / 4 * 8 + index % 4; }

  uint4 codes[2];
  uint32_t low[2];
  __half2 scale[2];  // of the first and the second 16 columns, times 16

  __device__ StateOperand(const char* chunk, int P, int slice, int lane) {
    const BlockChunk<Format> layout{P, kMaxStateDim};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = (slice * kSliceWidth + 8 * i) * 4 + lane;  // of 4 in a row
      codes[i] = reinterpret_cast<const uint4*>(chunk)[part];
      const uint16_t scales = reinterpret_cast<const uint16_t*>(chunk + layout.block_scales())[part];
      scale[i] = __hmul2(e4m3_halves(scales), __float2half2_rn(16.0f));
      low[i] = 0;
      if constexpr (Format::kLowBits) low[i] = reinterpret_cast<const uint32_t*>(chunk + layout.low_bits())[part];
    }
  }

  // Code kCode and kCode + 4 of word kWord, times their scale.
  template <int kWord, int kCode>
  __device__ uint32_t pair(int i) const {
    const uint32_t word = kWord == 0 ? codes[i].x : kWord == 1 ? codes[i].y : kWord == 2 ? codes[i].z : codes[i].w;
    uint32_t value = e2m1_pair<kCode>(word);
    if constexpr (Format::kLowBits) {
      const uint32_t byte = low[i] >> 8 * kWord & 0xffu;
      value |= (byte | byte << 12) << (8 - kCode) & 0x01000100u;
    }
    return bits_of(__hmul2(halves_of(value), kWord < 2 ? __low2half2(scale[i]) : __high2half2(scale[i])));
  }
  template <int kProduct>
  __device__ void get(uint32_t (&a)[4]) const {
    constexpr int kWord = kProduct / 2, kCode = kProduct % 2 * 2;
    a[0] = pair<kWord, kCode>(0), a[1] = pair<kWord, kCode>(1);
    a[2] = pair<kWord, kCode + 1>(0), a[3] = pair<kWord, kCode + 1>(1);
  }

  // The scales that are not in the operands: of the head, and of rows g and g + 8.
  __device__ static float head_scale(const char* chunk, int P) {
    return *reinterpret_cast<const float*>(chunk + BlockChunk<Format>{P, kMaxStateDim}.head_scale());
  }
  __device__ static void scale_rows(const char*, int, int, int, float (&)[4]) {}
};

struct Fp8 {};  // E4M3 with row scales
template <>
struct StateOperand<Fp8> {
  static constexpr bool kColumnScales = false;
  static constexpr int kSwap = 4;
  static constexpr float kUnit = 1.0f;

  __host__ __device__ static int bytes(int P) { return static_cast<int>(Fp8Chunk{P, kMaxStateDim}.bytes()); }
  static constexpr int kColumnStep = 1;
  __device__ static int query_column(int t, int index) { return index / 8 * 64 + 16 * t + index % 8 * 2; }

  uint4 codes[2][2];  // of a row's first and second half

  __device__ StateOperand(const char* chunk, int, int slice, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = slice * kSliceWidth + 8 * i + lane / 4;
        codes[i][half] = reinterpret_cast<const uint4*>(chunk)[row * 8 + (half ^ (row & 1)) * 4 + lane % 4];
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

  __device__ static float head_scale(const char*, int) { return 1.0f; }
  __device__ static void scale_rows(const char* chunk, int P, int slice, int g, float (&sum)[4]) {
    const float* const rows = reinterpret_cast<const float*>(chunk + Fp8Chunk{P, kMaxStateDim}.row_scales());
    const float upper = rows[slice * kSliceWidth + g], lower = rows[slice * kSliceWidth + 8 + g];
    sum[0] *= upper, sum[1] *= upper, sum[2] *= lower, sum[3] *= lower;
  }
};

// The operand of 8 tokens, of which `token`, a row of C in FP16, is the g-th. `columns`: the head's column scales.
template <typename Format>
struct QueryOperand {
  uint32_t word[2 * kProducts];

  __device__ void load(const uint32_t* token, const char* columns, int t) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 v = *reinterpret_cast<const uint4*>(token + j * 16 + t * 4);
      word[4 * j] = v.x, word[4 * j + 1] = v.y, word[4 * j + 2] = v.z, word[4 * j + 3] = v.w;
    }
    if constexpr (StateOperand<Format>::kColumnScales) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = *reinterpret_cast<const uint4*>(columns + t * 32 + half * 16);
        const uint32_t codes[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {  // word w / 2 of the half, its pairs w % 2 * 2 and the next
          const uint32_t pairs = __byte_perm(codes[w / 2 * 2], codes[w / 2 * 2 + 1], w % 2 == 0 ? 0x5140 : 0x7362);
          uint32_t& first = word[half * 8 + 2 * w];
          uint32_t& second = word[half * 8 + 2 * w + 1];
          first = bits_of(__hmul2(halves_of(first), e4m3_halves(pairs & 0xffffu)));
          second = bits_of(__hmul2(halves_of(second), e4m3_halves(pairs >> 16)));
        }
      }
    }
  }
};

template <int kProduct, typename Format>
__device__ inline void multiply_from(const StateOperand<Format>& state, const QueryOperand<Format>& query,
                                     float (&even)[4], float (&odd)[4]) {
  if constexpr (kProduct < kProducts) {
    uint32_t a[4];
    state.template get<kProduct>(a);
    multiply_pairs<__half>(kProduct % 2 == 0 ? even : odd, a[0], a[1], a[2], a[3], query.word[2 * kProduct],
                           query.word[2 * kProduct + 1]);
    multiply_from<kProduct + 1>(state, query, even, odd);
  }
}

// ---- the history ---------------------------------------------------------------------------------------------------

// The operand of 16 records and 8 tokens: weights in three parts of BF16, exactly. A pair of records a register.
struct WeightOperand {
  uint32_t part[3][2];

  // v: of the first of the lane's records; `product`: its products with the lane's token.
  __device__ void load(const float* v, const float* product) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 a = *reinterpret_cast<const float2*>(v + half * 8);
      const float2 b = *reinterpret_cast<const float2*>(product + half * 8);
      float first = a.x * b.x, second = a.y * b.y;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        part[i][half] = upper_halves(first, second);
        first -= bits_float(float_bits(first) & 0xffff0000u);
        second -= bits_float(float_bits(second) & 0xffff0000u);
      }
    }
  }

  // The BF16 numbers below two float32.
  __device__ static uint32_t upper_halves(float first, float second) {
    return __byte_perm(float_bits(first), float_bits(second), 0x7632);
  }
};

// y += x times weights of 16 records. x: the lane's row of a matrix of 8 by 8: of record lane / 16 * 8 + lane % 8, the
// slice's columns from lane / 8 % 2 * 8 on.
template <typename Staged>
__device__ inline void add_history(const Staged* x, const WeightOperand& weights, float (&y)[4]) {
  uint32_t a[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(x)))
               : "memory");
  uint32_t rest[4];
  if constexpr (std::is_same_v<Staged, __half>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack_pair<__half>(a[i]);
      a[i] = WeightOperand::upper_halves(pair.x, pair.y);
      rest[i] = WeightOperand::upper_halves(pair.x - bits_float(float_bits(pair.x) & 0xffff0000u),
                                            pair.y - bits_float(float_bits(pair.y) & 0xffff0000u));
    }
  }
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    const uint32_t (&part)[2] = weights.part[i];
    if constexpr (std::is_same_v<Staged, __half>) {
      multiply_pairs<__nv_bfloat16>(y, rest[0], rest[1], rest[2], rest[3], part[0], part[1]);
    }
    multiply_pairs<__nv_bfloat16>(y, a[0], a[1], a[2], a[3], part[0], part[1]);
  }
}

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
    reinterpret_cast<uint4*>(staged)[index ^ (row & 1) * StateOperand<Fp8>::kSwap] = words;
  }
}

// ---- the kernel ----------------------------------------------------------------------------------------------------

// Heads of one row: the task-th part of all heads or, if the CTA folds, the task-th head of the rows to flush.
template <typename Format, typename Staged, bool kFolds, bool kSingle>
__device__ __forceinline__ void step_heads(const ReadParams& params, uint32_t task, char* shared) {
  using State = StateOperand<Format>;
  const Problem& problem = params.scan.problem;
  const replayssm_scan_args& args = params.scan.args;
  constexpr int N = kMaxStateDim;
  const int P = problem.geometry.head_dim, R = problem.ring_rows, window = problem.config.window;
  // The shuffle tells the compiler that a warp has one index, so that it sees no divergence where warps differ.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int tid = threadIdx.x, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int team_bits = kFolds ? kMaxTeamBits : params.team_bits;
  const int team = warp >> team_bits, member = warp & ((1 << team_bits) - 1);
  const int team_lane = member * 32 + lane, team_lanes = 32 << team_bits;

  int row_index, state_group, group_head, heads;  // the CTA's first head, and how many
  if (kFolds) {
    const uint32_t index = params.heads(task), head = task - index * params.heads.divisor;
    row_index = reinterpret_cast<const int32_t*>(params.scan.planned + params.rows)[index];
    state_group = params.group_heads(head);
    group_head = head - state_group * params.heads_per_group;
    heads = 1;
  } else {
    row_index = params.ctas(task);
    const uint32_t rest = task - row_index * params.ctas.divisor;
    state_group = params.chunks(rest);
    group_head = (rest - state_group * params.chunks.divisor) * params.cta_heads;
    heads = min(params.cta_heads, params.heads_per_group - group_head);
  }
  const replayssm_plan_row row = params.scan.planned[row_index];
  if (!admit(row, row_index, args.num_tokens, args.max_count, window, false, params.scan.error,
             !kFolds && state_group == 0 && group_head == 0 && tid == 0) ||
      row.count == 0) {
    return;
  }
  const bool flagged = row.flags & REPLAYSSM_ROW_FLUSH;
  if (flagged && !params.scan.flushed && !kFolds) return;  // a CTA that folds has it
  const int T = kSingle ? 1 : row.count;
  const int h = flagged && params.scan.flushed ? 0 : row.history;  // records of history to stage
  const int history = kFolds ? 0 : h;                              // that outputs see
  const bool stored_before = !(row.flags & REPLAYSSM_ROW_EMPTY) || (flagged && params.scan.flushed);

  const ReadShared& layout = kFolds ? params.folding : params.stepping;
  auto floats_at = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  Staged* const B = reinterpret_cast<Staged*>(shared);
  Staged* const new_B = reinterpret_cast<Staged*>(shared + layout.b_new);
  Staged* const C = reinterpret_cast<Staged*>(shared + layout.c);
  uint32_t* const query = reinterpret_cast<uint32_t*>(shared + layout.query);  // C in FP16, a lane's pairs together
  float* const query_scale = floats_at(layout.query_scale);                    // [tokens]
  float* const products = floats_at(layout.g);                                 // C^T B of the history, [tokens][h]
  float* const new_products = floats_at(layout.g_new);                         // B^T C of the tokens, [tokens][tokens]
  // Of the warp's head:
  float* const delta = floats_at(layout.delta) + team * window;
  float* const v = floats_at(layout.v) + team * layout.v_stride;
  float* const u = floats_at(layout.u) + team * layout.u_head;  // [tokens][tokens]
  float* const decay = floats_at(layout.decay) + team;
  float* const token_decays = floats_at(layout.token_decay) + team * layout.u_stride;
  Staged* const x = reinterpret_cast<Staged*>(shared + layout.x) + team * layout.x_rows * layout.x_stride;
  char* const state = shared + layout.state + team * layout.state_bytes;
  uint4* const folded = reinterpret_cast<uint4*>(shared + layout.folded);

  // 1. What products take, asked for first.
  const int64_t first_token = row.first_token;
  Staged* const b_ring =
      reinterpret_cast<Staged*>(section_of(params.scan.layer.b_ring, row.slot)) + state_group * R * N;
  constexpr int kParts = N / 8, kRowsAtOnce = kThreads / kParts;
  const int part_row = tid / kParts, part_column = tid % kParts * 8;
#pragma unroll 1
  for (int i = part_row; i < h; i += kRowsAtOnce) {
    int position = row.ring_row - 1 - i;
    if (position < 0) position += R;
    request_16_bytes(B + i * kStride + part_column, b_ring + position * N + part_column);
  }
#pragma unroll 1
  for (int s = part_row; s < T; s += kRowsAtOnce) {
    request_input(new_B + s * kStride + part_column,
                  static_cast<const Staged*>(args.B.data) + (first_token + s) * args.B.stride[0] +
                      state_group * args.B.stride[1] + part_column,
                  params.scan.b_aligned);
    request_input(C + s * kStride + part_column,
                  static_cast<const Staged*>(args.C.data) + (first_token + s) * args.C.stride[0] +
                      state_group * args.C.stride[1] + part_column,
                  params.scan.c_aligned);
  }
  close_group();
  if (kFolds && part_row < round_up(h, 8) - h) {
    *reinterpret_cast<uint4*>(B + (h + part_row) * kStride + part_column) = make_uint4(0, 0, 0, 0);
  }

  const int x_row = params.x_parts(team_lane), x_column = (team_lane - x_row * params.x_parts.divisor) * 8;
  const int x_rows_at_once = params.x_parts(team_lanes);
  const bool moves_x = x_row < x_rows_at_once;
  Staged* const lane_x = x + x_row * layout.x_stride + x_column;  // what the lane stages
  if (tid == 0) *reinterpret_cast<uint4*>(shared + layout.zeros) = make_uint4(0, 0, 0, 0);
  if (kFolds && moves_x) {
#pragma unroll 1
    for (int i = x_row; i < round_up(h, 8); i += x_rows_at_once) {
      if (i >= h) *reinterpret_cast<uint4*>(x + i * layout.x_stride + x_column) = make_uint4(0, 0, 0, 0);
    }
  }
  auto wait_for_team = [&] {
    if (team_bits == 0) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };

#pragma unroll 1
  for (int k = team;; k += kWarps >> team_bits) {  // a head, if k < heads
    const bool first_round = k == team, has_head = k < heads;
    const int head = state_group * params.heads_per_group + group_head + k;
    Staged* const x_ring =
        reinterpret_cast<Staged*>(section_of(params.scan.layer.x_ring, row.slot)) + head * R * P + x_column;
    float* const delta_ring = reinterpret_cast<float*>(section_of(params.scan.layer.delta_ring, row.slot)) + head * R;
    char* const checkpoint = section_of(params.scan.layer.checkpoint, row.slot) + head * problem.checkpoint_head_bytes;
    char* const copy = section_of(params.scan.layer.read_copy, row.slot) + head * problem.read_copy_head_bytes;
    const bool weighs = has_head && member == 0, has_token = weighs && lane < T;

    // 2. What the head takes.
    uint32_t dt_bits = 0, bias_bits = 0, rate_bits = 0, skip_bits = 0;
    if (weighs) {
#pragma unroll 1
      for (int i = lane; i < h; i += 32) {
        int position = row.ring_row - 1 - i;
        if (position < 0) position += R;
        request_4_bytes(delta + i, delta_ring + position);
      }
      if (has_token) {
        dt_bits =
            load_bits(args.dt.data, args.dt.dtype, (first_token + lane) * args.dt.stride[0] + head * args.dt.stride[1]);
      }
      if (args.dt_bias.data) bias_bits = load_bits(args.dt_bias.data, args.dt_bias.dtype, head);
      if (args.D.data) skip_bits = load_bits(args.D.data, args.D.dtype, head);
      rate_bits = load_bits(args.A_log.data, args.A_log.dtype, head);
    }
    if constexpr (kFolds) {
      if (stored_before && problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32) {
        request_checkpoint(reinterpret_cast<const float*>(checkpoint), P, folded);
      } else if (stored_before) {
        request_checkpoint(reinterpret_cast<const __half*>(checkpoint), P, folded);
      }
    } else if (stored_before && has_head) {
      const char* source = (problem.read_copy_head_bytes > 0 ? copy : checkpoint) + team_lane * 16;
      char* target = state + (team_lane ^ team_lane / 8 % 2 * State::kSwap) * 16;
      int left = State::bytes(P) - team_lane * 16;
      if constexpr (State::kSwap != 0) {  // what follows the codes lies as it is
        left -= P * 4;
        for (int i = team_lane; i < P / 4; i += team_lanes) {
          request_16_bytes(state + P * N + i * 16, source + P * N + (i - team_lane) * 16);
        }
      }
#pragma unroll 4
      for (; left > 0; left -= team_lanes * 16) {
        request_16_bytes(target, source);
        source += team_lanes * 16, target += team_lanes * 16;
      }
    }
    if (moves_x && has_head) {
      Staged* target = lane_x;
      int position = row.ring_row - 1 - x_row;
#pragma unroll 1
      for (int i = x_row; i < h; i += x_rows_at_once) {
        if (position < 0) position += R;
        request_16_bytes(target, x_ring + position * P);
        target += x_rows_at_once * layout.x_stride, position -= x_rows_at_once;
      }
#pragma unroll 1
      for (int s = x_row; s < T; s += x_rows_at_once) {
        request_input(x + (layout.new_x_row + s) * layout.x_stride + x_column,
                      static_cast<const Staged*>(args.x.data) + (first_token + s) * args.x.stride[0] +
                          head * args.x.stride[1] + x_column,
                      params.scan.x_aligned);
      }
    }
    close_group();

    // 3. Once for all heads. The CTA of the group's first heads appends B to the ring. C in FP16. B^T C, 16 records by
    // 8 tokens at a time; rows and columns beyond the last repeat it.
    if (first_round) {
      await_groups<1>();
      __syncthreads();
      if (group_head == 0) {
#pragma unroll 1
        for (int s = part_row; s < T; s += kRowsAtOnce) {
          *reinterpret_cast<uint4*>(b_ring + ring_position(row.ring_row, s, R) * N + part_column) =
              *reinterpret_cast<const uint4*>(new_B + s * kStride + part_column);
        }
      }
#pragma unroll 1
      for (int s = kWarps - 1 - warp; s < T; s += kWarps) {
        const Staged* const token = C + s * kStride;
        float value[4];
        load_shared<4>(token + lane * 4, value);
        uint32_t amax = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = max(amax, magnitude_bits(value[i]));
        // 2^14 for the largest value; below 2^-100 the scale stays.
        const uint32_t exponent = max(__reduce_max_sync(~0u, amax) >> 23, 27u);
        const float scale = bits_float((268 - exponent) << 23);
        if (lane == 0) query_scale[s] = bits_float((exponent - 14) << 23) * State::kUnit;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int owner = lane / 8, index = lane % 8 * 2 + i, column = State::query_column(owner, index);
          query[s * kQueryStride + index / 4 * 16 + owner * 4 + index % 4] =
              pack_pair<__half>(static_cast<float>(token[column]) * scale,
                                static_cast<float>(token[column + State::kColumnStep]) * scale);
        }
      }
      const int tiles = (history + 15) / 16;
#pragma unroll 1
      for (int tile = warp; tile < tiles + 1; tile += kWarps) {
        const bool is_new = tile == tiles;
        const int first = is_new ? 0 : tile * 16, count = is_new ? T : history;
        const Staged* const records = is_new ? new_B : B;
#pragma unroll 1
        for (int token = 0; token < T; token += kTile) {
          const uint4* const upper = reinterpret_cast<const uint4*>(records + min(first + g, count - 1) * kStride) + t;
          const uint4* const lower =
              reinterpret_cast<const uint4*>(records + min(first + g + 8, count - 1) * kStride) + t;
          const uint4* const tokens = reinterpret_cast<const uint4*>(C + min(token + g, T - 1) * kStride) + t;
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
              products[s * layout.g_stride + record] = product;
            } else if (record < T) {
              new_products[record * layout.u_stride + s] = product;
            }
          }
        }
      }
      __syncthreads();
    }

    // 4. The weights of the head's records and tokens.
    float step = 0.0f;
    if (has_token) {
      step = discretised_step(bits_to_float(dt_bits, args.dt.dtype), bits_to_float(bias_bits, args.dt_bias.dtype),
                              args.dt_min, args.dt_max);
      delta_ring[ring_position(row.ring_row, lane, R)] = step;
    }
    await_groups<0>();
    wait_for_team();
    if (weighs) {
      const float rate = -expf(bits_to_float(rate_bits, args.A_log.dtype));
      const float total = weigh_history(delta, rate, h, lane, v);
      if (lane == 0) *decay = total;
      const float log_decay = __fmul_rn(rate, step);
      const float token_decay = expf(T == 1 ? log_decay : sum_up_to_lane(log_decay, lane));
      const float skip = bits_to_float(skip_bits, args.D.dtype);
      if (lane < T) token_decays[lane] = token_decay;
      float exponent = 0.0f;
#pragma unroll 1
      for (int back = 0; back < T; ++back) {
        const float step_r = __shfl_up_sync(~0u, step, back), log_decay_r = __shfl_up_sync(~0u, log_decay, back);
        if (lane >= back && lane < T) {
          const int entry = (lane - back) * layout.u_stride + lane;
          u[entry] = fmaf(__fmul_rn(step_r, expf(exponent)), new_products[entry], back == 0 ? skip : 0.0f);
          exponent = __fadd_rn(exponent, log_decay_r);
        }
      }
    }
    if (moves_x && has_head) {
#pragma unroll 1
      for (int s = x_row; s < T; s += x_rows_at_once) {
        *reinterpret_cast<uint4*>(x_ring + ring_position(row.ring_row, s, R) * P) =
            *reinterpret_cast<const uint4*>(x + (layout.new_x_row + s) * layout.x_stride + x_column);
      }
    }
    wait_for_team();
    if constexpr (kFolds) {
      const StateOwner owner{problem, params.scan.layer, params.scan.error, head, row_index, row.stream, row.writes};
      auto fold_as = [&](auto stored) {
        fold_head(owner, stored_before, reinterpret_cast<decltype(stored)*>(checkpoint), folded, x, layout.x_stride, B,
                  v, *decay, h, params.tf32_mask);
      };
      if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_FP32) {
        fold_as(float());
      } else if (problem.config.checkpoint == REPLAYSSM_CHECKPOINT_BF16) {
        fold_as(__nv_bfloat16());
      } else {
        fold_as(__half());
      }
      __syncthreads();
      const CastScratch scratch{floats_at(layout.inverse), reinterpret_cast<uint32_t*>(shared + layout.warp_max)};
      cast_head<Format>(folded, P, copy, state, scratch);
      __syncthreads();
    }

    // 5. Slice after slice.
    if (has_head) {
      const int history_tiles = (history + 15) / 16;
      const char* const columns = state + State::bytes(P) - 16 - N;  // before the head's scale
      const bool reads = stored_before || kFolds, whole = T <= kTile;
      QueryOperand<Format> operand;
      WeightOperand weights[2];  // of 32 records; those of more are formed slice by slice
      const float* const lane_weights = v + 2 * t;
      const float* lane_products = products + (kSingle ? 0 : min(g, T - 1)) * layout.g_stride + 2 * t;
      if (whole) {
        if (reads) operand.load(query + (kSingle ? 0 : min(g, T - 1)) * kQueryStride, columns, t);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i < history_tiles) weights[i].load(lane_weights + 16 * i, lane_products + 16 * i);
        }
      }
      const float scale = reads ? State::head_scale(state, P) * (kFolds ? 1.0f : *decay) : 0.0f;
      Staged* const out =
          static_cast<Staged*>(args.out.data) + first_token * args.out.stride[0] + head * args.out.stride[1] + g;
      // The lane's row of a tile of the history, slice 0; zeros where there is no record.
      const int lane_record = lane / 16 * 8 + lane % 8;
      auto history_x = [&](int tile, int slice) {
        const int record = 16 * tile + lane_record;
        return record < history ? x + record * layout.x_stride + slice * kSliceWidth + lane / 8 % 2 * 8
                                : reinterpret_cast<const Staged*>(shared + layout.zeros);
      };
#pragma unroll 1
      for (int slice = member; slice < params.slices; slice += 1 << team_bits) {
        const Staged* const new_x = x + layout.new_x_row * layout.x_stride + slice * kSliceWidth + g;
#pragma unroll 1
        for (int first = 0; first < T; first += kTile) {
          const int s =
              kSingle ? 0 : first + 2 * t;  // of a single token only the lanes of t = 0 have it; all compute it
          float y[4] = {};
          if (!whole) lane_products = products + min(first + g, T - 1) * layout.g_stride + 2 * t;
          if (reads) {
            if (!whole) operand.load(query + min(first + g, T - 1) * kQueryStride, columns, t);
            float other[4] = {};
            multiply_from<0>(State(state, P, slice, lane), operand, y, other);
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = __fadd_rn(y[i], other[i]) * scale;
            State::scale_rows(state, P, slice, g, y);
            const float scale0 = query_scale[min(s, T - 1)], scale1 = query_scale[min(s + 1, T - 1)];
            y[0] *= scale0, y[1] *= scale1, y[2] *= scale0, y[3] *= scale1;
          }
          if (whole) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (i < history_tiles) add_history(history_x(i, slice), weights[i], y);
            }
          }
#pragma unroll 1
          for (int i = whole ? 2 : 0; i < history_tiles; ++i) {
            WeightOperand of_tile;
            of_tile.load(lane_weights + 16 * i, lane_products + 16 * i);
            add_history(history_x(i, slice), of_tile, y);
          }

          const float2 since = *reinterpret_cast<const float2*>(token_decays + s);
          y[0] *= since.x, y[1] *= since.y, y[2] *= since.x, y[3] *= since.y;
          const float* const new_weights = u + s;
#pragma unroll 1
          for (int r = 0; r < min(first + kTile, T); ++r) {
            const float upper = static_cast<float>(new_x[r * layout.x_stride]);
            const float lower = static_cast<float>(new_x[r * layout.x_stride + 8]);
            const float2 weight = *reinterpret_cast<const float2*>(new_weights + r * layout.u_stride);
            if (r <= s) y[0] = fmaf(weight.x, upper, y[0]), y[2] = fmaf(weight.x, lower, y[2]);
            if (r <= s + 1) y[1] = fmaf(weight.y, upper, y[1]), y[3] = fmaf(weight.y, lower, y[3]);
          }
#pragma unroll
          for (int i = 0; i < (kSingle ? 1 : 2); ++i) {
            if (kSingle ? t > 0 : s + i >= T) continue;
            Staged* const target = out + (s + i) * args.out.stride[0] + slice * kSliceWidth;
            store_scalar(target, kDtypeOf<Staged>, 0, y[i]);
            store_scalar(target, kDtypeOf<Staged>, 8, y[2 + i]);
          }
        }
      }
    }
    if (kFolds || k + (kWarps >> team_bits) >= heads) break;
    __syncwarp();  // before the next head is staged. More rounds have teams of one warp only.
  }
}

// kSingle: rows have one token at most. That changes no bit: the same operations, but for the loops around them.
template <typename Format, typename Staged, bool kSingle>
__global__ __launch_bounds__(kThreads, 4) void step_read_kernel(const __grid_constant__ ReadParams params) {
  extern __shared__ __align__(128) char shared[];
  if (blockIdx.x >= params.flush_ctas) {
    step_heads<Format, Staged, false, kSingle>(params, blockIdx.x - params.flush_ctas, shared);
    return;
  }
  const auto* header = reinterpret_cast<const replayssm_plan_header*>(params.scan.planned) - 1;
#pragma unroll 1
  for (uint32_t task = blockIdx.x; task < header->num_flush * params.heads.divisor; task += params.flush_ctas) {
    step_heads<Format, Staged, true, kSingle>(params, task, shared);
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

// A head has more than one warp where that many CTAs are few.
constexpr int64_t kEnoughCtas = 512;
// A CTA takes more heads than it has warps only as long as that leaves kManyCtas.
constexpr int64_t kManyCtas = 4096;
// CTAs that fold, of a grid that has more than those. The steps of small batches find room beside them at once.
int most_flush_ctas(int64_t row_heads) { return row_heads < 8192 ? 264 : 528; }

ReadShared lay_out(const Problem& problem, int tokens, int heads, bool folds) {
  const int P = problem.geometry.head_dim;
  const int chunk =
      with_quantised(problem.config, [P](auto format) { return StateOperand<decltype(format)>::bytes(P); });
  return ReadShared(P, problem.config.window, tokens, heads, chunk, folds);
}

}  // namespace

bool has_step_read(const Problem& problem) {
  const bool plain = problem.config.checkpoint <= REPLAYSSM_CHECKPOINT_FP16_SR;
  return has_mma_fold(problem) && (problem.read_copy_head_bytes > 0 || !plain) &&
         lay_out(problem, problem.config.max_step_tokens, 1, plain).bytes <= kSharedLimit;
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
  params.tf32_mask = kTf32Mask;
  int64_t ctas = 0;
  auto share = [&](int heads, int bits) {
    const int chunks = (params.heads_per_group + heads - 1) / heads;
    params.team_bits = bits;
    params.cta_heads = heads;
    params.chunks = Quotient(chunks);
    params.ctas = Quotient(g.num_groups * chunks);
    params.stepping = lay_out(problem, scan.args.max_count, kWarps >> bits, false);
    ctas = static_cast<int64_t>(rows) * g.num_groups * chunks;
  };
  for (int bits = 0; bits <= kMaxTeamBits; ++bits) {
    share(kWarps >> bits, bits);
    if (params.stepping.bytes <= kSharedLimit && ctas >= kEnoughCtas && params.cta_heads <= params.heads_per_group) {
      break;
    }
  }
  while (params.team_bits == 0 && params.cta_heads < params.heads_per_group && ctas >= 2 * kManyCtas) {
    share(2 * params.cta_heads, 0);
  }
  params.folding = lay_out(problem, scan.args.max_count, 1, folds);
  const int shared = std::max(params.stepping.bytes, params.folding.bytes);
  return with_quantised(problem.config, [&](auto format) {
    return launch("step", choose_read<decltype(format)>(problem.config.activation, scan.args.max_count == 1),
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
